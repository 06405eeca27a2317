"""Kernels that are compiled at a time: the processes that do it, and who waits for whom."""

import os
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from slow_cases import mark_slow
from threads import run_in_threads

from kvquant.errors import UnsupportedError
from kvquant.kernels import disk_cache
from kvquant.kernels.cuda.decode import spec as decode
from kvquant.kernels.cuda.runtime import compile as compiling
from kvquant.kernels.cuda.runtime import compile_pool
from kvquant.kernels.cuda.runtime.compile import cubin_path, load_cubin, missing
from kvquant.kernels.cuda.runtime.compile_pool import ALONE, compile_all
from kvquant.kernels.cuda.runtime.spec import Spec
from kvquant.kernels.disk_cache import locked, read_file
from kvquant.rows.format import RowFormat

pytestmark = pytest.mark.extra("cuda")


# what a process of compile_all does, if compiling took no time; 16 columns are refused, 24 crash,
# 32 are killed, 40 find a disk that is full
INSTEAD = """
import os
os.write(1, b"what a sitecustomize prints")
from kvquant.errors import UnsupportedError
from kvquant.kernels.cuda.runtime import compile as compiling
from kvquant.kernels.cuda.runtime.compile_pool import compile_alone
def compile_spec(spec, arch):
    if spec.columns == 16:
        raise UnsupportedError(f"no code for {arch}:\\nnewer compilers")
    if spec.columns == 32:
        os.kill(os.getpid(), 9)
    if spec.columns == 40:
        raise OSError(28, "No space left on device")
    assert spec.columns == 8, "columns"
    return compiling.Cubin("f", b"code", compiling.Report(1, 0))
compiling.compile_spec = compile_spec
compile_alone()
"""


def make_spec(name: str) -> decode.DecodeSpec:
    """A kernel of rows of a format."""
    fmt = RowFormat.parse(name, 128)
    return decode.DecodeSpec(decode.Path(fmt, fmt))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; processes of compile_all compile nothing."""
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_pool, "ALONE", INSTEAD)
    monkeypatch.setattr(disk_cache, "_warned", set())
    return tmp_path / "cubins"


def cubins(folder: Path) -> list[Path]:
    """The files of a cache folder, without those that are locks only."""
    return [path for path in folder.iterdir() if path.suffix != ".lock"]


def test_kernels_are_compiled_in_processes_of_their_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "compile_spec", lambda spec, arch: pytest.fail("here"))
    specs = [make_spec(name) for name in ("int4", "int8", "fp8")]
    done: list[object] = []
    compile_all(specs * 2, "sm_90", done.append)
    assert sorted(map(repr, done)) == sorted(map(repr, specs)) and len(cubins(cache)) == 3
    assert load_cubin(specs[0], "sm_90").code == b"code"
    assert missing(specs, "sm_90") == [] and missing(specs, "sm_80") == specs
    compile_all(specs, "sm_90", lambda spec: pytest.fail("again"))


def test_who_comes_second_is_told_waits_and_compiles_none_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As ranks of one machine, which want the same kernels at the same time."""
    compiled: list[object] = []

    class Compiler(compile_pool._Compiler):
        def compile(self, spec: Spec, arch: str) -> None:
            compiled.append(spec)
            time.sleep(0.3)  # the others come meanwhile
            super().compile(spec, arch)

    monkeypatch.setattr(compile_pool, "_Compiler", Compiler)
    specs = [make_spec(name) for name in ("int4", "int8", "fp8")]
    done: list[list[object]] = [[], [], []]
    run_in_threads(lambda some: compile_all(specs, "sm_90", some.append), done)
    wanted = sorted(map(repr, specs))
    assert sorted(map(repr, compiled)) == wanted and len(cubins(cache)) == 3
    assert all(sorted(map(repr, some)) == wanted for some in done)
    assert 1 <= len(caplog.messages) <= 3  # each caller says it once, if it waits
    assert all("another process compiles kernels here; wait" in one for one in caplog.messages)


def test_a_thread_that_is_done_ends_no_process_of_another(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two threads has no more to compile while the second waits for a lock."""
    monkeypatch.setattr(compile_pool, "cores", lambda: 2)
    first, second = make_spec("int4"), make_spec("int8")
    done: list[object] = []

    def compile_both() -> None:
        compile_all([first, second], "sm_90", done.append)

    cache.mkdir(mode=0o700)
    with locked(cubin_path(second, "sm_90")):
        thread = threading.Thread(target=compile_both)
        thread.start()
        begin = time.monotonic()
        while not done and time.monotonic() < begin + 60:
            time.sleep(0.01)
        time.sleep(0.3)  # its thread ends now, and its process with it
    thread.join(60)
    assert done == [first, second]


ENDS = [
    (16, UnsupportedError, "^no code for sm_90: newer compilers$"),
    (24, RuntimeError, r"compiled DecodeSpec\(.* for sm_90 ended with 1: .*AssertionError"),
    (32, UnsupportedError, "compiled decode.* was ended by SIGKILL, as where memory runs out"),
]


@pytest.mark.parametrize("end", mark_slow(ENDS, ENDS[::2]), ids=lambda end: end[0])
def test_what_a_process_cannot_compile_is_told(
    end: tuple[int, type[Exception], str], cache: Path
) -> None:
    columns, error, message = end
    specs = [make_spec("int4"), replace(make_spec("int8"), columns=columns)]
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        compile_all(specs, "sm_90")


def test_nothing_is_compiled_ahead_that_cannot_be_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.joinpath("file").write_text("")
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(cache.parent / "file"))
    monkeypatch.setattr(compile_pool, "ALONE", "raise SystemExit(9)")
    with pytest.warns(RuntimeWarning, match="KVQUANT_CACHE_DIR"):
        compile_all([make_spec("int4")], "sm_90", lambda spec: pytest.fail("done"))


def test_kernels_that_cannot_be_kept_are_told_and_not_reported_as_done(cache: Path) -> None:
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        compile_all(
            [replace(make_spec("int4"), columns=40)], "sm_90", lambda spec: pytest.fail("done")
        )


@pytest.mark.slow
def test_modules_are_those_of_the_process_that_asks(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the folder in which it happens to be."""
    cache.parent.joinpath("queue.py").write_text("raise ImportError('another')")
    monkeypatch.chdir(cache.parent)
    monkeypatch.setattr(compile_pool, "ALONE", ALONE)
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path), Path("of no string")])
    with pytest.raises(UnsupportedError, match="architecture 'hopper' does not exist"):
        compile_all([make_spec("int4")], "hopper")


def test_a_folder_in_place_of_a_file_is_named_and_closed(cache: Path) -> None:
    path = cache / "kernel"
    path.mkdir(parents=True, mode=0o700)
    before = sorted(os.listdir("/dev/fd"))
    with pytest.raises(OSError, match="kernel is no file"):
        read_file(path)
    assert sorted(os.listdir("/dev/fd")) == before
