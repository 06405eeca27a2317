"""Compiled CPU kernels on the disk: whatever lies there, kernels work, and nothing foreign runs."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvquant.kernels import disk_cache
from kvquant.kernels.cpu import compile as compiling
from kvquant.kernels.cpu.parallel import run
from kvquant.kernels.cpu.simd import argument, store_int

touched: list[str] = []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kernels are kept: nothing is there yet."""
    run(0, np.zeros(1, np.int64), 0)  # what runs them is compiled already
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(tmp_path / "kvquant"))
    monkeypatch.setattr(disk_cache, "_warned", set())
    touched.clear()
    return tmp_path / "kvquant" / "cpu"


def make(constant: int) -> int:
    """Compile a small kernel, as a process that has not had it yet."""

    def small_kernel(args: int, item: int) -> None:
        store_int(argument(args, 0), argument(args, 1) + constant)

    return compiling.compile_kernel(small_kernel)


def result(kernel: int) -> int:
    out = np.zeros(1, np.int64)
    run(kernel, np.array([out.ctypes.data, 1000]), 1)
    return int(out[0])


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were not taken from the disk."""
    names: list[str] = []
    plain = compiling.KernelCache.save_overload

    def counted(cache: compiling.KernelCache, *compiled: Any) -> None:
        names.append(cache._function.__name__)
        plain(cache, *compiled)

    monkeypatch.setattr(compiling.KernelCache, "save_overload", counted)
    return names


def test_a_kernel_is_compiled_once_and_kept_for_the_user_alone(
    folder: Path, compilations: list[str]
) -> None:
    before = os.umask(0o002)
    try:
        assert [result(make(1)), result(make(1))] == [1001, 1001]
    finally:
        os.umask(before)
    assert compilations == ["small_kernel"]
    (path,) = folder.iterdir()
    modes = [oct(one.stat().st_mode & 0o777) for one in (path, folder, folder.parent)]
    assert modes == ["0o600", "0o700", "0o700"]


def test_kernels_of_other_constants_sources_or_processors_have_other_files(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [result(make(constant)) for constant in (2, 3)] == [1002, 1003]
    monkeypatch.setattr(compiling, "_surroundings", lambda: "another processor")
    assert result(make(2)) == 1002
    assert len(compilations) == len(list(folder.iterdir())) == 3


def test_only_constants_can_make_a_kernel() -> None:
    """What it is made of names its file: nothing may be left out of the name."""
    function = object()

    def kernel(args: int, item: int) -> None:
        print(function)

    with pytest.raises(TypeError, match="function of kernel is <object"):
        compiling.compile_kernel(kernel)


class Poison:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return touched.append, ("poison",)


def flip(data: bytes) -> bytes:
    changed, rng = bytearray(data), random.Random(0)
    for _ in range(4):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
    "flipped": flip,
    "another digest": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "poison": lambda data: pickle.dumps(Poison()),
    "no pickle": lambda data: disk_cache.seal(b"no pickle"),
    "pickle of something": lambda data: disk_cache.seal(pickle.dumps((1, 2, 3))),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_not_loaded_and_made_anew(
    folder: Path, compilations: list[str], damage: Callable[[bytes], bytes]
) -> None:
    make(4)
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert result(make(4)) == 1004
    assert not touched
    assert len(compilations) == 2
    assert disk_cache.unseal(path.read_bytes()) is not None
    assert result(make(4)) == 1004 and len(compilations) == 2


def a_folder_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe_in_its_place(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


OPEN: dict[str, Callable[[Path], object]] = {
    "the file": lambda path: path.chmod(0o620),
    "the folder": lambda path: path.parent.chmod(0o777),
    "a folder in its place": a_folder_in_its_place,
    "a pipe in its place": a_pipe_in_its_place,
}


@pytest.mark.parametrize("open_to_others", OPEN.values(), ids=OPEN)
def test_what_others_can_have_written_is_not_used_and_said_once(
    folder: Path, compilations: list[str], open_to_others: Callable[[Path], object]
) -> None:
    make(5)
    (path,) = folder.iterdir()
    open_to_others(path)
    with pytest.warns(RuntimeWarning, match="CPU kernels cannot be kept") as warned:
        assert [result(make(5)), result(make(6))] == [1005, 1006]
    assert len(compilations) == 3 and len(warned) == 1


def test_the_file_of_another_user_is_not_used(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(7)
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:  # root's own files are good for all
        for path in (*folder.iterdir(), folder):
            os.chown(path, 12345, 12345)
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        assert result(make(7)) == 1007
    assert len(compilations) == 2


def test_a_full_disk_is_said_once_and_kernels_work(
    folder: Path, compilations: list[str], small_files: None
) -> None:
    words = rf"CPU kernels cannot be kept.*File too large: '{folder}/.*\.kernel'"
    with pytest.warns(RuntimeWarning, match=words) as warned:
        assert [result(make(8)), result(make(9))] == [1008, 1009]
    assert len(warned) == 1 and warned[0].filename == __file__
    assert not list(folder.iterdir())  # nor is a part of one left


def test_a_folder_without_locks_is_refused_and_nobody_waits_for_the_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    for _ in range(2):
        with pytest.raises(OSError, match="not implemented"), disk_cache.locked(tmp_path / "x"):
            pass


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file can grow beyond 100 bytes."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("home", ["none", "a file", "unknown"])
def test_without_a_home_kernels_work(
    folder: Path,
    compilations: list[str],
    home: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container with a user that it does not know, or with a home that cannot be written."""
    monkeypatch.delenv("KVQUANT_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if home == "a file":
        (tmp_path / "home").touch()
    elif home == "none":
        monkeypatch.setenv("HOME", "/dev/null/none")
    else:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.warns(RuntimeWarning, match="KVQUANT_CACHE_DIR"):
        assert result(make(10)) == 1010
    assert compilations == ["small_kernel"]


def test_functions_called_from_python_are_kept_too(folder: Path) -> None:
    def add(a: int, b: int) -> int:
        return a + b

    for _ in range(2):
        assert compiling.compiled(add)(1, 2) == 3
    (path,) = folder.iterdir()
    assert path.name.startswith("add-")


def test_numbas_own_cache_is_used_nowhere() -> None:
    """It would leave files in the package, which an uninstall does not know."""
    for path in Path(compiling.__file__).parent.glob("*.py"):
        assert "cache=True" not in path.read_text(encoding="utf-8"), path
