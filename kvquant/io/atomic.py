"""Files that are written whole or not at all, by one process at a time.

    with writing(path) as place, place.replaced() as file:
        file.write(...)

What is written stands beside its place as .NAME.XXXXXXXX.kvquant.tmp until it is whole and on the
disk, and then takes its place by a rename: whoever opens NAME finds the old file or the new one. A
killed process leaves such a file, which the next one that writes to NAME removes.

Who writes holds the lock of NAME, .NAME.kvquant.lock, an empty file, and takes it away when done.
Where flock fails (some network file systems have none) the file is written without a lock, and a
warning says so.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from filelock import FileLock

from ..errors import ConfigError, warn

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF}
_ACL = "system.posix_acl_access"


class Place:
    """Where a file, or several of one name, are written; see writing.

    Attributes:
        path: the name that is locked, no link.
        is_locked: whether no other process writes here.
        written: the paths whose new files stand in their places.
    """

    def __init__(self, path: Path, is_locked: bool) -> None:
        self.path, self.is_locked = path, is_locked
        self.written: set[Path] = set()

    @contextmanager
    def replaced(self, path: Path | None = None, like: Path | None = None) -> Iterator[IO[bytes]]:
        """Give a new file, which takes the place of path (by default that of the name) at the end.

        It has the mode, and as far as that is allowed the owner, of the file that stands there;
        else it is made as new files are. After an exception what stood there is as before, unless
        the disk cannot say whether the new name will last: then the new file stands there, and the
        error says so.

        Args:
            path: what to replace; links are followed.
            like: another file whose mode to take where there is none at path.

        Raises:
            ConfigError: what stands there is no file, but a folder, a device or the like.
            OSError: the file cannot be written; the error names it.
        """
        path = self.path if path is None else path
        target = target_of(path)
        temporary = _temporary(target, self.path.name)
        try:
            with _new_file(temporary, target if target.exists() else like) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException as error:
            with suppress(OSError):  # the first error is the one that is raised
                temporary.unlink()
            if isinstance(error, OSError) and not _names_another(error, temporary):
                raise named(error, target) from error
            raise
        self.written.add(path)
        try:
            sync_folder(target.parent)
        except OSError as error:
            told = "the file is written, but may not outlast a crash of the system"
            raise named(error, target, told) from error

    def remove_leftovers(self) -> None:
        """Remove what killed processes left here of files that they did not finish."""
        ours = re.compile(rf"\.{re.escape(self.path.name)}\.[0-9a-f]{{8}}\.kvquant\.tmp")
        with suppress(OSError), os.scandir(self.path.parent) as entries:
            for entry in entries:
                if ours.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    with suppress(OSError):  # what stays is only space
                        os.unlink(entry.path)


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[Place]:
    """Write to a name while no other process does; one that does is waited for.

    Args:
        path: of the file; links are followed.

    Raises:
        ConfigError: what stands there, or at the place of the lock, is not what belongs there.
        OSError: there is no such folder.
    """
    target = target_of(as_path(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target.parent))
    # fallback_to_soft: a soft lock is a file with text, which stays where its process is killed
    name = target.with_name(f".{target.name}.kvquant.lock")
    lock = FileLock(name, poll_interval=0.02, fallback_to_soft=False)
    was_there = _check_lock(name, target)
    problem: OSError | None = None
    try:
        lock.acquire()
    except OSError as error:
        problem = error
        if not was_there:  # else another process may hold it
            with suppress(OSError):
                os.unlink(name)
    try:
        place = Place(target, problem is None)
        if place.is_locked:
            place.remove_leftovers()
        yield place
    finally:
        if problem is None:
            try:
                with suppress(OSError):  # while it is held: who waits looks whether it is there
                    os.unlink(name)
            finally:
                lock.release()
    if problem is not None:
        warn(
            f"{path} was written without a lock ({problem}): let one process at a time write to it"
        )


def _check_lock(lock: Path, target: Path) -> bool:
    """Whether the file of a lock is there; ConfigError if what is there is none of ours."""
    try:
        found = os.lstat(lock)
    except OSError:  # there is none, or what opens it tells why
        return False
    if not stat.S_ISREG(found.st_mode) or found.st_size:
        raise ConfigError(
            f"{lock} is not the lock of {target.name}, an empty file that is made while it is "
            "written: move it away"
        )
    return True


def save_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 text file, whole or not at all.

    Raises:
        ConfigError: what stands there is no file, but a folder, a device or the like.
        OSError: the file cannot be written.
    """
    with writing(path) as place, place.replaced() as file:
        file.write(text.encode())


def check_writable(path: Path) -> None:
    """Try whether a file can be written, by an empty one beside it; links are followed.

    Raises:
        ConfigError: what stands there is no file, but a folder, a device or the like.
        OSError: the file cannot be written.
    """
    target = target_of(path)
    temporary = _temporary(target, target.name)
    _new_file(temporary, None).close()
    temporary.unlink(missing_ok=True)  # another writer may have taken it for a leftover


def named(error: OSError, path: str | Path, told: str = "") -> OSError:
    """The same error about a file, with more words if there are any."""
    words = error.strerror or str(error)
    return OSError(error.errno, f"{words} ({told})" if told else words, str(path))


def as_path(path: str | os.PathLike[str]) -> Path:
    """A path that may have come as text; ConfigError if it is none, or names no file."""
    try:
        found = Path(path)
    except TypeError:
        raise ConfigError(f"path is {path!r:.80}: give a string or a Path") from None
    if not found.name:
        raise ConfigError(f"path is {str(path)!r:.80}: give the path of a file")
    return found


def target_of(path: Path) -> Path:
    """The file that is meant by path, links followed.

    Raises:
        ConfigError: what stands there is no file, or none can have this name.
    """
    with suppress(FileNotFoundError):
        try:
            mode = os.stat(path).st_mode
        except ValueError as error:  # NUL, or half a character
            raise ConfigError(f"{str(path)!r} cannot be written: {error}") from None
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "no file")
            raise ConfigError(f"{path} cannot be written, it is {kind}: give the name of a file")
    return Path(os.path.realpath(path))


def token() -> str:
    """Eight hexadecimal digits that nobody else has drawn."""
    return secrets.token_hex(4)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last, where the system can.

    Raises:
        OSError: the disk failed.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder may be written to and not read
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


def _names_another(error: OSError, path: Path) -> bool:
    """Whether an error is about another file; of a descriptor's the name is its number."""
    return isinstance(error.filename, str) and error.filename != str(path)


def _temporary(target: Path, name: str) -> Path:
    """A new name beside a file, which remove_leftovers of the place `name` knows."""
    return target.with_name(f".{name}.{token()}.kvquant.tmp")


def _new_file(path: Path, like: Path | None) -> IO[bytes]:
    """Open a new file, with the mode and the owner of another one."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    old = None if like is None else os.stat(like)
    descriptor = os.open(path, flags, 0o666 if old is None else 0o600)
    try:
        if old is not None and like is not None and hasattr(os, "fchmod"):
            _take_rights(descriptor, like, old)
        return open(descriptor, "wb")
    except BaseException:
        os.close(descriptor)
        raise


def _take_rights(descriptor: int, like: Path, old: os.stat_result) -> None:
    """Give a file the owner, the mode and the access list of another one; never more rights."""
    mode, own = stat.S_IMODE(old.st_mode) & 0o777, os.fstat(descriptor)
    if (own.st_uid, own.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.chown(descriptor, old.st_uid, old.st_gid)
        except OSError:
            try:
                os.chown(descriptor, -1, old.st_gid)
            except OSError:
                mode &= ~0o070  # what the old group might do is not for the new one
    try:
        acl = os.getxattr(like, _ACL)
    except (OSError, AttributeError):  # it has none
        os.chmod(descriptor, mode)
        return
    os.chmod(descriptor, mode & ~0o070)  # with a list the group's bits are those of its mask
    with suppress(OSError):
        os.setxattr(descriptor, _ACL, acl)
