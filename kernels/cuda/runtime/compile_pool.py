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

READY = b"ready\n"  # before an answer; what else is said on stdout is none
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
    if todo:
        require_extra()
        _compile(todo, arch, report)


def _compile(todo: list[Spec], arch: str, report: Callable[[Spec], object]) -> None:
    todo.sort(key=lambda spec: -len(fields_of(spec.arguments)))  # those that take longest first
    waiting: queue.SimpleQueue[Spec] = queue.SimpleQueue()
    ended: queue.SimpleQueue[Spec | BaseException] = queue.SimpleQueue()
    for spec in todo:
        waiting.put(spec)
    notes = iter(["kvquant: another process compiles kernels here; waiting for those"])

    def tell() -> None:
        for note in notes:  # the first time
            log.warning(note)

    def work(compiler: _Compiler) -> None:
        with compiler, suppress(queue.Empty):
            while not compiler.is_closed:
                spec = waiting.get_nowait()
                try:
                    with locked(cubin_path(spec, arch), tell):
                        if missing([spec], arch):  # another process may have compiled it meanwhile
                            compiler.compile(spec, arch)
                    ended.put(spec)
                except BaseException as error:
                    ended.put(error)

    with ExitStack() as stack:
        # a process that ends waits for the threads of an executor, and for none of these
        for _ in range(min(cores(), len(todo))):
            compiler = stack.enter_context(_Compiler())
            threading.Thread(target=work, args=(compiler,), daemon=True).start()
        for _ in todo:
            found = ended.get()
            if isinstance(found, OSError):  # it cannot be kept
                warn_of_folder("CUDA", found)
                return
            if isinstance(found, BaseException):
                raise found
            report(found)


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Compiler:
    """A process that compiles kernels one after another, without torch or the caller's program.

    It starts with the first kernel. Linux ends it with the thread that started it (compile_alone).
    """

    def __init__(self) -> None:
        self._lock, self.is_closed = threading.Lock(), False
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Compiler:
        return self

    def __exit__(self, *error: object) -> None:
        """End it, in the middle of a kernel, too, for good."""
        with self._lock:
            self.is_closed = True
            if self._process is not None:
                self._process.kill()  # it has nothing to put in order
                with suppress(OSError), self._process, self._said:
                    pass
                self._process = None

    def compile(self, spec: Spec, arch: str) -> None:
        """Compile a kernel and put it on the disk; OSError if it cannot be kept."""
        with self._lock:
            if self.is_closed:
                return  # nobody waits for it
            process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump((spec, arch), process.stdin)
            process.stdin.flush()
            while process.stdout.readline() not in (READY, b""):
                pass
            problem = pickle.load(process.stdout)
        except (OSError, EOFError):
            code = process.wait()
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip()
            problem = RuntimeError(
                f"the process that compiled {spec} for {arch} ended with {code}: {said}"
            )
            if code < 0:
                problem = UnsupportedError(
                    f"a process that compiled {spec.kernel} was ended by "
                    f"{signal.Signals(-code).name}, as where memory runs out: run it again, which "
                    "goes on with the kernels that are there, or give it fewer cores (taskset)"
                )
        if problem is not None:
            raise problem

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [path for path in sys.path if isinstance(path, str)]  # as Python's own import
        try:
            self._said = tempfile.TemporaryFile()  # a file, since nobody reads it before the end
            return subprocess.Popen(
                [sys.executable, "-c", ALONE, str(os.getpid()), *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
            )
        except OSError as error:
            raise UnsupportedError(
                f"a process that compiles kernels cannot be started: {error}"
            ) from error


def compile_alone() -> None:
    """What such a process does: compile kernels from stdin, answer None or an error."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(sys.argv[1]):  # it ended before it was asked for
            return
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print is no answer
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
        answers.write(b"\n" + READY)
        pickle.dump(problem, answers)
        answers.flush()
