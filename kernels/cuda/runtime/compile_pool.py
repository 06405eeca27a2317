"""Compile several kernels at a time, in as many processes as cores, each one kernel after
another.

To import numba takes as long as a small kernel. Who compiles a kernel holds its lock, so ranks that
begin together share the work.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

from kvquant.errors import UnsupportedError

from ...disk_cache import locked, warn_of_folder
from .compile import cubin_path, keep_cubin, missing, require_extra
from .spec import Spec, fields_of

READY = b"ready\n"  # before its answers; what is said on stdout before that is none
# what a _Compiler runs: it finds modules where this process does, and in no other folder
ALONE = f"""
import sys
sys.path[:] = sys.argv[2:]
from {__name__} import compile_alone
compile_alone()
"""
# of prctl: the signal that a process gets when the thread that started it ends
PR_SET_PDEATHSIG = 1
log = logging.getLogger("kvquant")


def compile_all(
    specs: Iterable[Spec], arch: str, report: Callable[[Spec], object] = lambda spec: None
) -> None:
    """Compile kernels that are not on the disk, at a time as many as there are cores for.

    Those that another process compiles are waited for. If the disk cannot be written, a warning
    says so and no more is done. report is called with each kernel that is done. UnsupportedError as
    of load_cubin, or if a process was killed; RuntimeError if a process failed otherwise.
    """
    todo = missing(specs, arch)
    if not todo:
        return
    require_extra()
    try:
        _compile(todo, arch, report)
    except _NotKeptError as error:
        warn_of_folder("CUDA", error.problem)


class _NotKeptError(Exception):
    """A kernel could not be put on the disk."""

    def __init__(self, problem: OSError) -> None:
        super().__init__(problem)
        self.problem = problem


def _compile(todo: list[Spec], arch: str, report: Callable[[Spec], object]) -> None:
    todo.sort(key=lambda spec: -len(fields_of(spec.arguments)))  # those that take longest first
    waiting: queue.SimpleQueue[Spec] = queue.SimpleQueue()
    ended: queue.SimpleQueue[Spec | BaseException] = queue.SimpleQueue()
    for spec in todo:
        waiting.put(spec)

    def work(compilers: _Compilers) -> None:
        with suppress(queue.Empty):
            while True:
                spec = waiting.get_nowait()
                try:
                    ended.put(compilers.compile(spec, arch))
                except BaseException as error:
                    ended.put(error)
        # Linux kills the compilers that this thread has started when it ends (PR_SET_PDEATHSIG),
        # and another thread may be using them
        compilers.closed.wait()

    with _Compilers() as compilers:
        # a process that ends waits for the threads of an executor, and for none of these
        for _ in range(min(cores(), len(todo))):
            threading.Thread(target=work, args=(compilers,), daemon=True).start()
        for _ in todo:
            found = ended.get()
            if isinstance(found, BaseException):
                raise found
            report(found)


class _Compilers:
    """Processes that compile, started when they are needed; `closed` is set when all have ended,
    and until then a thread that uses them must live."""

    def __init__(self) -> None:
        self._idle: queue.SimpleQueue[_Compiler] = queue.SimpleQueue()
        self._lock, self._ends = threading.Lock(), ExitStack()
        self.closed, self._has_told = threading.Event(), False

    def __enter__(self) -> _Compilers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all, in the middle of a kernel, too; none is started any more."""
        with self._lock:
            try:
                self._ends.close()
            finally:  # interrupted, too: else threads would wait for ever
                self.closed.set()

    def compile(self, spec: Spec, arch: str) -> Spec:
        """Put a kernel on the disk, unless another process does so meanwhile."""
        try:
            path = cubin_path(spec, arch)
            with locked(path, self._tell):
                if missing([spec], arch):
                    compiler = self._take()
                    try:
                        compiler.compile(spec, arch)
                    finally:
                        self._idle.put(compiler)
        except OSError as error:
            raise _NotKeptError(error) from error
        return spec

    def _take(self) -> _Compiler:
        """One that has nothing to do, or a new one."""
        with suppress(queue.Empty):
            return self._idle.get_nowait()
        with self._lock:
            if self.closed.is_set():
                raise UnsupportedError("another kernel cannot be compiled")
            return self._ends.enter_context(_Compiler())

    def _tell(self) -> None:
        with self._lock:
            if not self._has_told:
                log.warning("kvquant: another process compiles kernels here; waiting for those")
            self._has_told = True


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Compiler:
    """A process that compiles kernels one after another, without torch or the caller's program."""

    def __init__(self) -> None:
        paths = [path for path in sys.path if isinstance(path, str)]  # as Python's own import
        self._is_ready = False
        try:
            self._said = tempfile.TemporaryFile()
            self._process = subprocess.Popen(
                [sys.executable, "-c", ALONE, str(os.getpid()), *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,  # a file, since nobody reads it before the end
            )
        except OSError as error:
            raise UnsupportedError(
                f"a process that compiles kernels cannot be started: {error}"
            ) from error

    def __enter__(self) -> _Compiler:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()  # it has nothing to put in order
        with suppress(OSError), self._process, self._said:
            pass

    def compile(self, spec: Spec, arch: str) -> None:
        """Compile a kernel and put it on the disk; _NotKeptError if it cannot be kept."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            pickle.dump((spec, arch), self._process.stdin)
            self._process.stdin.flush()
            while not self._is_ready:
                line = self._process.stdout.readline()
                if not line:
                    raise EOFError
                self._is_ready = line == READY
            problem = pickle.load(self._process.stdout)
        except (OSError, EOFError):
            code = self._process.wait()
            if code < 0:
                raise UnsupportedError(
                    f"a process that compiled {spec.kernel} was ended by "
                    f"{signal.Signals(-code).name}, as where memory runs out: run it again, which "
                    "goes on with the kernels that are there, or give it fewer cores (taskset)"
                ) from None
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip()
            raise RuntimeError(
                f"the process that compiled {spec} for {arch} ended with {code}: {said}"
            ) from None
        if isinstance(problem, OSError):
            raise _NotKeptError(problem)
        if problem is not None:
            raise problem


def compile_alone() -> None:
    """What such a process does: compile kernels from stdin, answer None or an error."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(sys.argv[1]):  # it ended before it was asked for
            return
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print is no answer
    answers.write(b"\n" + READY)
    while True:
        try:
            spec, arch = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        problem: Exception | None = None
        try:
            keep_cubin(spec, arch)
        except UnsupportedError as error:
            problem = UnsupportedError(str(error).replace("\n", " "))
        except OSError as error:
            problem = error
        pickle.dump(problem, answers)
        answers.flush()
