"""The folder of what was compiled or measured on this machine: $KVQUANT_CACHE_DIR, or kvquant in
the user's folder for caches ($XDG_CACHE_HOME, ~/.cache). You may delete it at any time.

Machine code is used only if the file and its folder belong to the user or to root, and nobody else
may write there. A file is written beside its place and then renamed, so a reader finds all of it or
none. Who changes a file by its content holds its lock. Both compilers also run without Python's
collector, see uncollected.
"""

from __future__ import annotations

import gc
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import filelock
import platformdirs

from kvquant.errors import warn

ATTEMPTS = 9  # to make a folder that is deleted again
TEMPORARY = ".tmp"  # ends the names of files that are being written
LEFT_AFTER = 86400  # seconds after which nobody writes one any more
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_warned: set[str] = set()


def cache_folder() -> Path:
    """The folder, there or not; OSError if no variable names it and there is no home."""
    named = os.environ.get("KVQUANT_CACHE_DIR")
    try:
        if named:
            return Path(named).expanduser()
        folder = Path(platformdirs.user_cache_dir("kvquant", appauthor=False))
    except RuntimeError as error:
        raise OSError(f"no folder for cached files: {error}") from None
    if not folder.is_absolute():  # older platformdirs leave "~" as it is
        raise OSError("no folder for cached files: could not determine the home directory")
    return folder


def read_file(path: Path) -> bytes | None:
    """The content of a file that nobody else can have written; None if there is none.

    PermissionError if somebody else can have written it, OSError if it cannot be read.
    """
    try:
        if not hasattr(os, "geteuid"):  # Windows: the folder is the user's own
            return path.read_bytes()
        # by descriptors: what was looked at is what is read, whatever others do meanwhile
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check_owner(path.parent, os.fstat(folder))
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not make us wait
            handle = os.open(path.name, flags, dir_fd=folder)
        finally:
            os.close(folder)
    except FileNotFoundError:
        return None
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(f"{path} is no file")
        _check_owner(path, facts)
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def replace_file(path: Path, data: bytes) -> None:
    """Give a file this content, at once; its folder is made if need be.

    PermissionError if others may write in its folder, OSError if it cannot be written.
    """
    _make_folder(path.parent)
    _remove_leftovers(path.parent)
    handle, temporary = tempfile.mkstemp(TEMPORARY, f".{path.name}.", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # such as that of a full disk
            error.filename = str(path)
        raise


@contextmanager
def locked(path: Path, wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Let one thread of one process at a time change a file; its folder is made if need be.

    The lock is a file beside it, which stays: if it were deleted, two could hold it. `wait` is
    called before waiting. OSError if the folder cannot be written, or has no locks.
    """
    # fallback_to_soft: a soft lock of a process that was killed on another machine is held for ever
    name = path.with_name(f".{path.name}.lock")
    lock = filelock.FileLock(name, mode=0o600, fallback_to_soft=False)
    for left in reversed(range(ATTEMPTS)):
        _make_folder(path.parent)
        try:
            try:
                held = lock.acquire(blocking=False)
            except filelock.Timeout:
                wait()
                held = lock.acquire()
            break
        except FileNotFoundError:  # the folder was deleted meanwhile
            if not left:
                raise
    with held:
        yield


def seal(body: bytes) -> bytes:
    """The content of a file whose damage is found: the SHA-256 of a body, a line end, the body."""
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def unseal(data: bytes) -> bytes | None:
    """The body of what seal gave; None if it is damaged."""
    digest, _, body = data.partition(b"\n")
    return body if hashlib.sha256(body).hexdigest().encode() == digest else None


def warn_of_folder(whose: str, problem: OSError) -> None:
    """Say, once, that compiled kernels ("CPU", "CUDA") are not kept."""
    if whose in _warned:
        return
    _warned.add(whose)
    warn(
        f"compiled {whose} kernels cannot be kept ({problem}): every process compiles them anew, "
        "for seconds. Let KVQUANT_CACHE_DIR name a folder of your own that can be written"
    )


@cache
def _remove_leftovers(folder: Path) -> None:
    """Remove, once in a process, what killed processes left beside the files of a folder."""
    with suppress(OSError):  # others may remove them, too
        for path in folder.glob(f".*{TEMPORARY}"):
            if time.time() - path.lstat().st_mtime > LEFT_AFTER:
                path.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, for the user alone, and see that nobody else writes in."""
    for missing in reversed([folder, *folder.parents]):
        if not missing.is_dir():
            missing.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "geteuid"):
        _check_owner(folder, folder.stat())


def _check_owner(path: Path, facts: os.stat_result) -> None:
    """Raise PermissionError unless only the user and root can write to a file or folder."""
    if facts.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to another user")
    if facts.st_mode & OTHERS_WRITE:
        mode = stat.S_IMODE(facts.st_mode)
        raise PermissionError(f"others may write to {path} (mode {mode:o}): chmod go-w it")


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave Python's garbage collector off: compiling takes a sixth less, and it finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
