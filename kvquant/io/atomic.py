"""Files that are written whole or not at all.

    with replacing(path) as file:
        file.write(...)

The new file is .NAME.XXXXXXXX.kvquant.tmp beside NAME until it is whole and on the disk; then a
rename puts it in place, so readers find the old file or the new one. The last writer wins. Writers
lock (flock) their .tmp file; the next writer of NAME removes those without a lock, which killed
processes left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..errors import ConfigError

_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF}


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Give a new file, which replaces the one at path (links followed) when the block ends.

    It takes the mode and, if possible, the owner of the old one. After an exception the old file is
    as before, unless the disk fails after the rename: then the error says so.

    Raises:
        ConfigError: at path is a folder, a device or the like.
        OSError: the file cannot be written; the error names it.
    """
    target = target_of(as_path(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target.parent))
    _remove_leftovers(target)
    temporary = target
    try:
        temporary, file = _new_file(target, target if target.exists() else None)
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, target)
    except BaseException as error:
        if temporary != target:
            with suppress(OSError):  # the first error is the one to raise
                temporary.unlink()
        if isinstance(error, OSError) and not _names_another(error):
            raise named(error, target) from error
        raise
    try:
        _sync_folder(target.parent)
    except OSError as error:
        words = "the file is written, but may not outlast a crash of the system"
        raise named(error, target, words) from error


def save_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 text file, whole or not at all; raises as replacing."""
    with replacing(path) as file:
        file.write(text.encode())


def check_writable(path: Path) -> None:
    """Raise as replacing would, by writing an empty file beside the path."""
    temporary, file = _new_file(target_of(path), None)
    file.close()
    temporary.unlink(missing_ok=True)  # another writer may have removed it


def named(error: OSError, path: str | Path, words: str = "") -> OSError:
    """The same error about a file, with more words."""
    text = error.strerror or str(error)
    return OSError(error.errno, f"{text} ({words})" if words else text, str(path))


def as_path(path: str | os.PathLike[str]) -> Path:
    """A path of a file; ConfigError for other types, and without a file name."""
    try:
        found = Path(path)
    except TypeError:
        raise ConfigError(f"path is {path!r:.80}: give a string or a Path") from None
    if not found.name:
        raise ConfigError(f"path is {str(path)!r:.80}: give the path of a file")
    return found


def target_of(path: Path) -> Path:
    """The file at a path, links followed; ConfigError if it is none, or cannot have this name."""
    with suppress(FileNotFoundError):
        try:
            mode = os.stat(path).st_mode
        except ValueError as error:  # NUL, or half a character
            raise ConfigError(f"{str(path)!r} cannot be written: {error}") from None
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or the like"
            raise ConfigError(f"{path} cannot be written, it is {what}: give the name of a file")
    return Path(os.path.realpath(path))


def _remove_leftovers(target: Path) -> None:
    ours = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.kvquant\.tmp")
    with suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if ours.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError), open(entry.path, "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)


def _sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk, where the system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder may be writable and not readable
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


def _names_another(error: OSError) -> bool:
    """Whether an error is about another file; a descriptor's name is its number."""
    return isinstance(error.filename, str) and not error.filename.endswith(".kvquant.tmp")


def _new_file(target: Path, old: Path | None) -> tuple[Path, IO[bytes]]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.kvquant.tmp")
        descriptor = os.open(temporary, flags, 0o600 if old else 0o666)
        try:
            with suppress(OSError):  # some network file systems have no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not os.fstat(descriptor).st_nlink:  # another writer removed it before the lock
                os.close(descriptor)
                continue
            if old:
                _take_rights(descriptor, old)
            return temporary, open(descriptor, "wb")
        except BaseException:
            os.close(descriptor)
            with suppress(OSError):
                temporary.unlink()
            raise


def _take_rights(descriptor: int, like: Path) -> None:
    """Give a file the owner and mode of another one, but never more rights."""
    old, own = os.stat(like), os.fstat(descriptor)
    mode = stat.S_IMODE(old.st_mode) & 0o777
    if (own.st_uid, own.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.chown(descriptor, old.st_uid, old.st_gid)
        except OSError:
            try:
                os.chown(descriptor, -1, old.st_gid)
            except OSError:
                mode &= ~0o070  # the rights of the old group are not for the new one
    with suppress(OSError, AttributeError):
        os.getxattr(like, "system.posix_acl_access")
        mode &= ~0o070  # these bits are the mask of a list of users, not the rights of the group
    os.chmod(descriptor, mode)
