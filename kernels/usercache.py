"""The folder in which what was compiled or measured on this machine is kept between processes.

It is $KVQUANT_CACHE_DIR, or $XDG_CACHE_HOME/kvquant, or ~/.cache/kvquant. Several processes use it
at once: a file is written beside its place and then renamed, so a reader finds all of it or none.
Who changes a file by what is in it holds its lock from the reading to the writing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """The folder, whether or not it is there.

    Raises:
        OSError: no variable names it, and the user has no home.
    """
    named = os.environ.get("KVQUANT_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(shared) if shared else Path.home() / ".cache") / "kvquant"
    except RuntimeError as error:
        raise OSError(f"no folder for cached files: {error}") from None


def replace_file(path: Path, data: bytes) -> None:
    """Give a file this content, at once; its folder is made if need be.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one thread of one process at a time change a file; its folder is made if need be.

    The lock is a file beside it, which stays: if it were deleted, two could hold it.

    Raises:
        OSError: the folder cannot be written, or has no locks.
    """
    import fcntl  # not on Windows

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, also by the end of the process
        yield
