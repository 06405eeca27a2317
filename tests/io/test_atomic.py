"""Files are written whole or not at all: modes, links, what a kill or an error leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import saving_steps
from saved_kinds import KINDS
from slow_cases import mark_slow

from kvquant.errors import CheckpointError, ConfigError
from kvquant.io.atomic import _sync_folder, replacing, save_text

Save = Callable[[Path], object]
SAVERS: dict[str, Save] = {
    name: lambda path, kind=kind: kind.save(0, path)  # type: ignore[misc]
    for name, kind in KINDS.items()
}
SAVERS["text"] = lambda path: save_text(path, "text\n")
each = pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@each
@pytest.mark.parametrize("old", [None, 0o600, 0o604, 0o664])
def test_the_mode_stays(tmp_path: Path, save: Save, old: int | None) -> None:
    path = tmp_path / "x.safetensors"
    os.umask(0o027)
    if old is not None:
        path.touch()
        path.chmod(old)
    for _ in range(2):
        save(path)
        assert mode(path) == (0o640 if old is None else old) and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root gives files away")
@each
def test_the_owner_stays(tmp_path: Path, save: Save) -> None:
    path = tmp_path / "x.safetensors"
    path.touch()
    os.chown(path, 1234, 2345)
    save(path)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 2345)


@each
def test_rights_that_cannot_be_given_are_not_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Save
) -> None:
    path = tmp_path / "x.safetensors"
    path.touch()
    path.chmod(0o664)

    def chown(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not yours")

    own = os.fstat

    def other(descriptor: int) -> Any:  # the new file's group is another one
        return os.stat_result([*own(descriptor)[:5], 99, *own(descriptor)[6:]])

    monkeypatch.setattr(os, "chown", chown)
    monkeypatch.setattr("kvquant.io.atomic.os.fstat", other)
    save(path)
    monkeypatch.undo()
    assert mode(path) == 0o604


@each
@pytest.mark.parametrize("exists", [True, False], ids=["file", "dangling"])
def test_a_link_is_followed(tmp_path: Path, save: Save, exists: bool) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "y.safetensors", tmp_path / "x.safetensors"
    if exists:
        real.write_text("old")
        real.chmod(0o600)
    link.symlink_to("real/y.safetensors")
    save(link)
    assert link.is_symlink() and mode(real) == (0o600 if exists else 0o644)
    assert list((tmp_path / "real").iterdir()) == [real] and real.read_bytes() != b"old"
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == [link.name]


NO_FILES: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "socket": lambda path: os.mknod(path, 0o600 | stat.S_IFSOCK),
    "link to a device": lambda path: path.symlink_to("/dev/full"),
}


@each
@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_file_is_never_replaced(tmp_path: Path, save: Save, what: str) -> None:
    path, message = tmp_path / "x.safetensors", "be written, it is a .*: give the name of a file"
    NO_FILES[what](path)
    before = path.lstat()
    with pytest.raises(ConfigError, match=message):
        save(path)
    assert os.path.samestat(path.lstat(), before)
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


@each
def test_names_that_no_file_can_have_are_refused(tmp_path: Path, save: Save) -> None:
    for name in ("\0", "\ud800"):
        with pytest.raises(ConfigError, match="cannot be written"):
            save(Path(f"{name}.safetensors"))
    with pytest.raises(OSError, match="too long") as error:
        save(tmp_path / f"{'x' * 225}.safetensors")
    assert Path(error.value.filename).name.startswith("x") and not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError) as caught:
        save(tmp_path / "none" / "x.safetensors")
    assert caught.value.filename == str(tmp_path / "none")


@each
def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path, save: Save) -> None:
    path = tmp_path / "x.safetensors"
    ours = [".x.safetensors.0123abcd.kvquant.tmp", ".x.safetensors.20251122.kvquant.tmp"]
    others = [
        ".x.safetensors.20251122.tmp",
        ".x.safetensors.0123abc.kvquant.tmp",
        ".x.safetensors.0123ABCD.kvquant.tmp",
        ".y.safetensors.0123abcd.kvquant.tmp",
        ".xxsafetensors.0123abcd.kvquant.tmp",
        "x.safetensors.0123abcd.kvquant.tmp",
        "x.safetensors.tmp",
        ".x.safetensors.0123abcd.kvquant.tmp.bak",
    ]
    for name in (*ours, *others):
        (tmp_path / name).write_text("some")
    (tmp_path / ".x.safetensors.00000000.kvquant.tmp").mkdir()
    (tmp_path / ".x.safetensors.00000001.kvquant.tmp").symlink_to(others[0])
    save(path)
    names = {file.name for file in tmp_path.iterdir()}
    assert not names & set(ours)
    assert set(others) <= names
    assert {f".x.safetensors.0000000{i}.kvquant.tmp" for i in range(2)} <= names


@each
def test_a_disk_that_fails_at_the_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Save
) -> None:
    sync, code = os.fsync, errno.EIO

    def fail(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        save(tmp_path / "x.safetensors")
    code = errno.EINVAL  # what network file systems say that cannot
    save(tmp_path / "x.safetensors")


def test_a_folder_that_cannot_be_read_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    _sync_folder(tmp_path)


@each
@pytest.mark.parametrize("call", ["fsync", "replace", "open", "chmod"])
def test_an_error_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Save, call: str
) -> None:
    path = tmp_path / "x.safetensors"
    KINDS["plan"].save(1, path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    real = os.open

    def fail(*given: Any, **_: object) -> Any:
        if call == "open" and not given[1] & os.O_WRONLY:
            return real(*given)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left") as error:
        save(path)
    assert names_a_file_of(path, error.value)
    monkeypatch.undo()
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def names_a_file_of(path: Path, error: OSError) -> bool:
    """Whether an error is about a file that a save to path makes, under its own name."""
    return isinstance(error.filename, str) and Path(error.filename).name.startswith(path.stem)


class Killed(BaseException):
    """A dead process does nothing more: it is raised by every step from then on."""


@pytest.mark.parametrize("pair", saving_steps.PAIRS, ids=" ".join)
@pytest.mark.parametrize("how", mark_slow(["fails once", "fails", "is killed"], ["is killed"]))
def test_a_save_that_ends_at_any_step_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str], how: str
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # slow, and the system is not killed
    path, seen = tmp_path / "x.safetensors", []
    old, new = (KINDS[name] for name in pair)
    for seed, kind in enumerate((old, new)):
        kind.save(seed, path)
        seen.append(kind.shown(kind.load(path)))
    found, left, numbers = list[str](), set[str](), list[int]()
    old.save(0, path)
    with saving_steps.steps(lambda n, _: numbers.append(n)):
        new.save(1, path)
    for number in numbers:
        old.save(0, path)
        code = errno.EIO if number % 2 else errno.ENOSPC

        def end(n: int, name: str, number: int = number, code: int = code) -> None:
            if n < number or (how == "fails once" and n > number):
                return
            if how == "is killed":
                raise Killed
            if n == number or name != "unlink":
                raise OSError(code, os.strerror(code))

        try:
            with saving_steps.steps(end):
                new.save(1, path)
            is_done = True
        except (OSError, Killed) as error:
            if isinstance(error, OSError):
                assert error.errno == code and names_a_file_of(path, error), number
            is_done = False
        found.append(("old", "new")[seen.index(new.shown(new.load(path)))])
        assert found[-1] == "new" or not is_done, number
        temporary = {file.name for file in tmp_path.iterdir() if file.name.endswith(".tmp")}
        assert not temporary or how == "is killed", number
        left |= temporary
    assert found.count("old") > 5 and "new" in found
    assert how != "is killed" or found == sorted(found, key="old new".index)
    assert bool(left) == (how == "is killed")
    new.save(1, path)
    assert list(tmp_path.iterdir()) == [path]


def test_writers_of_one_path_do_not_stop_each_other(tmp_path: Path) -> None:
    path, errors, kind = tmp_path / "x.safetensors", list[BaseException](), KINDS["cache"]
    kind.save(0, path)

    def write(seed: int) -> None:
        try:
            for _ in range(8):
                kind.save(seed, path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in (0, 1, 0)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        kind.load(path)
    for thread in threads:
        thread.join()
    assert not errors and list(tmp_path.iterdir()) == [path]


def test_the_file_of_a_writer_at_work_stays(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with replacing(path) as file:
        save_text(path, "second")
        assert path.read_text() == "second"
        file.write(b"first")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_a_new_file_that_is_taken_for_a_leftover_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer may come between the making of a file and its lock."""
    path, lock, others = tmp_path / "x", fcntl.flock, 0

    def locked(file: Any, how: int) -> None:
        nonlocal others
        if how == fcntl.LOCK_EX and others < 3:
            others += 1
            (left,) = tmp_path.iterdir()
            left.unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", locked)
    save_text(path, "text")
    assert others == 3 and path.read_text() == "text" and list(tmp_path.iterdir()) == [path]


@each
def test_without_locks_files_are_written_and_leftovers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Save
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    path, other = tmp_path / "x.safetensors", tmp_path / ".x.safetensors.0123abcd.kvquant.tmp"
    other.touch()  # somebody may be writing it
    save(path)
    assert sorted(tmp_path.iterdir()) == [other, path]


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="Linux has access lists")
def test_the_rights_of_an_access_list_are_not_given_to_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.touch()
    path.chmod(0o664)
    monkeypatch.setattr(os, "getxattr", lambda *_: b"")  # a file with a list: its bits are a mask
    save_text(path, "text")
    assert mode(path) == 0o604


@pytest.mark.parametrize("name", KINDS)
def test_what_could_not_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, kind = tmp_path / "x.safetensors", KINDS[name]
    kind.save(0, path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    monkeypatch.setattr("kvquant.io.tensor_files.MAX_HEADER_BYTES", 100)
    with pytest.raises(
        CheckpointError, match=r"could not be read again .* readers take 100.*save less"
    ):
        kind.save(1, path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
