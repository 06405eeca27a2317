"""Files are written whole or not at all: modes, links, locks, what a kill or an error leaves."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import saving_steps
import torch
from filelock import FileLock
from safetensors.torch import save_file
from saved_kinds import KINDS, SHARD_BYTES, Kind
from slow_cases import mark_slow

from kvquant import load_cache, save_cache
from kvquant.calibration.moments import Moments
from kvquant.errors import CheckpointError, ConfigError
from kvquant.io.atomic import save_text, sync_folder, writing
from kvquant.io.inspect import describe

Save = Callable[[Path], object]
SAVERS: dict[str, Save] = {
    name: lambda path, kind=kind: kind.save(0, path)  # type: ignore[misc]
    for name, kind in KINDS.items()
}
SAVERS["sums"] = lambda path: Moments().save(path, "key")
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
def test_new_files_have_the_mode_of_new_files(tmp_path: Path, save: Save) -> None:
    os.umask(0o027)
    save(tmp_path / "x.safetensors")
    assert {mode(file) for file in tmp_path.iterdir()} == {0o640}


@each
@pytest.mark.parametrize("old", [0o600, 0o604, 0o664])
def test_the_mode_stays(tmp_path: Path, save: Save, old: int) -> None:
    path = tmp_path / "x.safetensors"
    path.touch()
    path.chmod(old)
    save(path)
    assert {mode(file) for file in tmp_path.iterdir()} == {old}
    save(path)
    assert {mode(file) for file in tmp_path.iterdir()} == {old}


def test_the_mode_goes_from_shards_to_the_file_and_back(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for name in ("cache", "shards", "cache", "shards"):
        KINDS[name].save(0, path)
        for file in tmp_path.iterdir():
            file.chmod(0o600 if name == "cache" else mode(file))
        assert {mode(file) for file in tmp_path.iterdir()} == {0o600}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root gives files away")
@each
def test_the_owner_stays(tmp_path: Path, save: Save) -> None:
    path = tmp_path / "x.safetensors"
    path.touch()
    os.chown(path, 1234, 2345)
    save(path)
    for file in tmp_path.iterdir():
        assert (file.stat().st_uid, file.stat().st_gid) == (1234, 2345)


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
    assert {mode(file) for file in tmp_path.iterdir()} == {0o604}


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
    assert link.is_symlink() or save is SAVERS["shards"]
    files = list((tmp_path / "real").iterdir())
    assert {mode(file) for file in files} == {0o600 if exists else 0o644}
    if save is not SAVERS["shards"]:
        assert files == [real] and real.read_bytes() != b"old"
        assert [file.name for file in tmp_path.iterdir() if file.is_file()] == [link.name]


@pytest.mark.parametrize("names", [("cache", "shards"), ("shards", "cache"), ("shards",) * 2])
def test_caches_are_found_through_links(tmp_path: Path, names: tuple[str, str]) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "y.safetensors", tmp_path / "x.safetensors"
    link.symlink_to(real)
    for seed, name in enumerate(names):
        kind = KINDS[name]
        kind.save(seed, link)
        for path in (link, real):
            assert kind.shown(load_cache(path)) == _shown(seed, tmp_path)
    assert link.is_symlink()


def test_shards_that_are_links_are_read(tmp_path: Path) -> None:
    """As in the folders of the Hugging Face Hub's cache: every file is a link to one named by its
    content."""
    (tmp_path / "blobs").mkdir()
    KINDS["shards"].save(0, tmp_path / "x.safetensors")
    for number, file in enumerate(list(tmp_path.glob("x*"))):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(tmp_path / "blobs" / str(number))
    assert KINDS["cache"].shown(load_cache(tmp_path / "x.safetensors")) == _shown(0, tmp_path)


def _shown(seed: int, folder: Path) -> Any:
    kind = KINDS["cache"]
    kind.save(seed, folder / "other.safetensors")
    return kind.shown(kind.load(folder / "other.safetensors"))


@each
@pytest.mark.parametrize("what", ["folder", "pipe", "link to a device", "socket"])
def test_what_is_no_file_is_never_replaced(tmp_path: Path, save: Save, what: str) -> None:
    path = tmp_path / "x.safetensors"
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "socket":
        os.mknod(path, 0o600 | stat.S_IFSOCK)
    else:
        path.symlink_to("/dev/full")
    before = path.lstat()
    with pytest.raises(
        ConfigError, match=r"cannot be written, it is a .*: give the name of a file"
    ):
        save(path)
    assert os.path.samestat(path.lstat(), before)
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


@each
@pytest.mark.parametrize("name", ["\0", "\ud800"])
def test_a_name_that_no_file_can_have_is_refused(save: Save, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        save(Path(f"{name}.safetensors"))


@each
def test_a_name_that_is_too_long_is_told_and_no_other(tmp_path: Path, save: Save) -> None:
    path = tmp_path / f"{'x' * 225}.safetensors"
    with pytest.raises(OSError, match="too long") as error:
        save(path)
    assert Path(error.value.filename).name.startswith("x") and not list(tmp_path.iterdir())


def test_a_cache_whose_name_has_no_room_for_an_index_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / f"{'x' * 243}.safetensors"
    KINDS["cache"].save(0, tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").rename(path)
    load_cache(path)
    assert describe(path)["kind"] == "cache"


@each
def test_a_folder_that_is_not_there_is_named(tmp_path: Path, save: Save) -> None:
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


def test_a_check_that_is_killed_leaves_what_the_next_writer_removes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    code = """
import os, pathlib, sys
from kvquant.cli.console import check_output
sys.addaudithook(lambda event, _: os._exit(7) if event == "os.remove" else None)
check_output(pathlib.Path(sys.argv[1]))
"""
    assert subprocess.run([sys.executable, "-c", code, path]).returncode == 7
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".x.safetensors.") and not left.stat().st_size
    save_text(path, "text\n")
    assert list(tmp_path.iterdir()) == [path]


def foreign_shards(folder: Path) -> dict[str, bytes]:
    """Files named as shards of x.safetensors, which are none, or in use by another name."""
    tensors = {"w": torch.zeros(3)}
    save_file(tensors, folder / "x-20251122-00001-of-00002.safetensors")
    save_file(tensors, folder / "x-20251122-00002-of-00002.safetensors", {"format": "pt"})
    (folder / "x-00000000-00001-of-00001.safetensors").write_text("a text")
    shard, *_ = KINDS["shards"].save(1, folder / "x.safetensors")
    for name in ("x-0123abcd-00001-of-00009.safetensors", "z.safetensors"):
        (folder / name).write_bytes(shard.read_bytes())
    (folder / "run.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"w": "x-0123abcd-00001-of-00009.safetensors"}})
    )
    (folder / "x-0123abcd-00002-of-00009.safetensors").symlink_to("z.safetensors")
    foreign = [
        "x-20251122-00001-of-00002.safetensors",
        "x-20251122-00002-of-00002.safetensors",
        "x-00000000-00001-of-00001.safetensors",
        "x-0123abcd-00001-of-00009.safetensors",
        "x-0123abcd-00002-of-00009.safetensors",
        "z.safetensors",
        "run.safetensors.index.json",
    ]
    return {name: (folder / name).read_bytes() for name in foreign}


@pytest.mark.parametrize("name", ["cache", "shards"])
def test_shards_of_others_stay(tmp_path: Path, name: str) -> None:
    foreign = foreign_shards(tmp_path)
    orphan = tmp_path / "x-fedcba98-00001-of-00001.safetensors"  # of a killed save
    orphan.write_bytes((tmp_path / "z.safetensors").read_bytes())
    written = save_cache(
        load_cache(tmp_path / "x.safetensors"),
        tmp_path / "x.safetensors",
        max_shard_bytes=1 << 30 if name == "cache" else SHARD_BYTES,
    )
    assert {file: (tmp_path / file).read_bytes() for file in foreign} == foreign
    left = {file.name for file in tmp_path.iterdir()} - foreign.keys()
    assert left == {file.name for file in written}


def test_writers_of_one_path_wait_for_one_another(tmp_path: Path) -> None:
    path, errors = tmp_path / "x.safetensors", list[BaseException]()

    def write(kinds: list[Kind]) -> None:
        try:
            for _ in range(4):
                for seed, kind in enumerate(kinds):
                    kind.save(seed, path)
        except BaseException as error:
            errors.append(error)

    cache, shards = KINDS["cache"], KINDS["shards"]
    pairs = [[cache, shards], [shards, shards], [shards, cache], [cache, cache]]
    threads = [threading.Thread(target=write, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists() or path.with_name("x.safetensors.index.json").exists():
            load_cache(path)
    for thread in threads:
        thread.join()
    assert not errors
    load_cache(path)
    shards.save(0, path)
    assert not [file.name for file in tmp_path.iterdir() if file.name.startswith(".")]


@each
def test_a_save_waits_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Save
) -> None:
    path, tries = tmp_path / "x.safetensors", 0
    acquire = FileLock._acquire

    def tried(self: FileLock) -> None:
        nonlocal tries
        tries += 1
        if tries == 4:
            other.release()  # until now no attempt has succeeded
        assert not path.exists()
        acquire(self)

    path.symlink_to("real.safetensors")
    other = FileLock(tmp_path / ".real.safetensors.kvquant.lock")
    other.acquire()
    monkeypatch.setattr(FileLock, "_acquire", tried)
    monkeypatch.setattr(FileLock, "_raise_if_would_deadlock", lambda *_, **__: None)
    save(path)
    assert tries >= 4
    assert not list(tmp_path.glob(".*"))


NO_FLOCK = errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EIO


def without_flock(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A file system on which every flock fails."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)


@each
@pytest.mark.parametrize("code", NO_FLOCK, ids=errno.errorcode.get)
def test_without_locks_files_are_written_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Save, code: int
) -> None:
    without_flock(monkeypatch, code)
    other = tmp_path / ".x.safetensors.0123abcd.kvquant.tmp"
    other.touch()  # somebody may be writing it
    orphan = tmp_path / "x-fedcba98-00001-of-00001.safetensors"
    save_file({"x": torch.zeros(1)}, orphan, {"format": "kvquant-cache-shard"})
    for _ in range(2):
        words = f"without a lock .*{os.strerror(code)}"
        with pytest.warns(RuntimeWarning, match=words) as warned:
            save(tmp_path / "x.safetensors")
        assert Path(warned[0].filename).name in ("test_atomic.py", "saved_kinds.py")
    names = [file.name for file in tmp_path.iterdir()]
    assert other.name in names and orphan.name in names
    assert not [name for name in names if name.endswith(".lock")]
    marks = {name.split("-")[1] for name in names if name.startswith("x-")}
    assert len(marks) == 1 + (save is SAVERS["shards"])  # the first save's shards are gone


@pytest.mark.parametrize("is_held", [False, True], ids=["no lock", "lock of another"])
@pytest.mark.parametrize("code", NO_FLOCK, ids=errno.errorcode.get)
def test_without_locks_two_writers_do_not_stop_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_held: bool
) -> None:
    without_flock(monkeypatch, code)
    path, lock = tmp_path / "x", tmp_path / ".x.kvquant.lock"
    if is_held:
        lock.touch()  # flock fails for us alone
    with pytest.warns(RuntimeWarning, match="without a lock"):
        with writing(path) as place, place.replaced() as file:
            save_text(path, "second")
            assert path.read_text() == "second" and lock.exists() == is_held
            file.write(b"first")
    assert path.read_text() == "first" and lock.exists() == is_held


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
    sync_folder(tmp_path)


@each
@pytest.mark.parametrize("call", ["fsync", "replace", "open", "chmod"])
def test_an_error_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Save, call: str
) -> None:
    path = tmp_path / "x.safetensors"
    KINDS["shards" if save is SAVERS["shards"] else "plan"].save(1, path)
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

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # without a lock
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
    files = sorted(file.name for file in tmp_path.iterdir())
    is_cut = pair[1] == "shards"
    assert files.pop() == f"x.safetensors{'.index.json' if is_cut else ''}"
    assert len(files) == 2 * is_cut and len({file[:10] for file in files}) == is_cut


@pytest.mark.parametrize("call", ["fsync", "unlink"])
@pytest.mark.parametrize("pair", ["shards cache", "plan shards", "cache shards"])
def test_an_error_behind_the_last_step_says_which_cache_counts(
    tmp_path: Path, pair: str, call: str
) -> None:
    path, (old, new) = tmp_path / "x.safetensors", (KINDS[name] for name in pair.split())
    done, index = list[str](), path.with_name("x.safetensors.index.json")
    new.save(1, path)  # the first save of a process may keep compiled kernels, which are steps, too
    for file in tmp_path.iterdir():
        file.unlink()
    old.save(0, path)
    before = old.shown(old.load(path))
    with saving_steps.steps(lambda _, name: done.append(name)):
        new.save(1, path)
    after = new.shown(new.load(path))
    for file in tmp_path.iterdir():
        file.unlink()
    last = len(done) - done[::-1].index("replace")

    def fail(number: int, name: str) -> None:
        if number > last and name == call:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    old.save(0, path)
    with pytest.raises(OSError) as error, saving_steps.steps(fail):
        new.save(1, path)
    assert error.value.errno == errno.EIO and names_a_file_of(path, error.value)
    assert ("may not outlast a crash" in str(error.value)) == (call == "fsync")
    if pair == "cache shards":
        assert "the new cache is whole, and counts" in str(error.value)
    else:
        assert old.shown(old.load(path)) == before
        counts = path if pair == "plan shards" else index
        words = f"the new cache is whole, but {counts.name} still counts: remove it"
        assert words in str(error.value)
        counts.unlink()
    assert new.shown(new.load(path)) == after


def readable(path: Path) -> dict[str, Any]:
    """What each reader finds under a name: those that find something."""
    found: dict[str, Any] = {}
    for name in ("cache", "pages", "plan"):
        with suppress(CheckpointError, FileNotFoundError):
            found[name] = KINDS[name].shown(KINDS[name].load(path))
    return found


@pytest.mark.parametrize("is_locked", [True, False])
@pytest.mark.parametrize("name", ["pages", "plan", "raw", "sums"])
@pytest.mark.parametrize("link", [False, True])
def test_what_takes_the_name_of_shards_leaves_nothing_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, link: bool, is_locked: bool
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    path = tmp_path / "x.safetensors"
    if not is_locked:
        monkeypatch.setattr(FileLock, "acquire", fail)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        KINDS["shards"].save(0, path)
        other = tmp_path / "x.safetensors.1.index.json"
        other.write_text("{}")
        (index,) = tmp_path.glob("*.safetensors.index.json")
        index.chmod(0o600)
        if link:
            (tmp_path / "link.safetensors").symlink_to(path)
        SAVERS[name](tmp_path / "link.safetensors" if link else path)
    files = {file.name for file in tmp_path.iterdir()} - {"link.safetensors"}
    assert files == {path.name, other.name}
    assert mode(path) == 0o600
    with pytest.raises(CheckpointError):
        load_cache(path)


@pytest.mark.parametrize("pair", ["shards pages", "shards plan", "pages shards", "plan shards"])
def test_a_killed_save_of_another_kind_leaves_one_thing_for_all_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: str
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    path, (old, new) = tmp_path / "x.safetensors", (KINDS[name] for name in pair.split())
    old.save(0, path)
    before, numbers = readable(path), list[int]()
    with saving_steps.steps(lambda n, _: numbers.append(n)):
        new.save(1, path)
    after, found = readable(path), []
    assert len(before) == len(after) == 1 and before.keys() != after.keys()

    for number in numbers:
        old.save(0, path)

        def end(n: int, _: str, number: int = number) -> None:
            if n >= number:
                raise Killed

        with suppress(Killed), saving_steps.steps(end):
            new.save(1, path)
        found.append((before, after).index(readable(path)))
    assert found == sorted(found) and set(found) == {0, 1}


def test_an_index_of_another_program_stays(tmp_path: Path) -> None:
    index = tmp_path / "x.safetensors.index.json"
    index.write_text('{"weight_map": {}}')
    KINDS["plan"].save(0, tmp_path / "x.safetensors")
    assert index.exists()


@each
@pytest.mark.parametrize("what", ["a file", "a folder", "a link"])
def test_what_stands_at_the_place_of_the_lock_is_told_and_stays(
    tmp_path: Path, save: Save, what: str
) -> None:
    path, lock = tmp_path / "x.safetensors", tmp_path / ".x.safetensors.kvquant.lock"
    mine = tmp_path / ".x.safetensors.lock"  # a name that other programs use
    mine.write_text("mine")
    if what == "a file":
        lock.write_text("mine")
    elif what == "a folder":
        lock.mkdir()
    else:
        lock.symlink_to(mine)
    with pytest.raises(ConfigError, match=r"\.kvquant\.lock is not the lock .* move it away"):
        save(path)
    assert not path.exists() and os.path.lexists(lock) and mine.read_text() == "mine"
    (lock.rmdir if what == "a folder" else lock.unlink)()
    lock.touch()  # a killed process leaves it
    save(path)
    assert not lock.exists() and mine.read_text() == "mine"


def test_a_block_that_raises_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        with writing(path) as place, place.replaced() as file:
            file.write(b"new")
            raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


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
