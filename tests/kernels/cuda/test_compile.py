"""Kernels as machine code, without a GPU: nothing spilled; kept on disk, safely.

The slow tests compile a representative part of the matrix; the whole, with a line for each kernel:

    KVQUANT_CUBINS=all pytest -m slow -s tests/kernels/cuda/test_compile.py -k machine_code
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path as FilePath

import pytest
from machine_code import (
    WARPGROUP_ORDER,
    WARPGROUP_PRODUCT,
    WARPGROUP_PRODUCT_OF_REGISTERS,
    count_instructions,
)

from kvquant.errors import UnsupportedError
from kvquant.kernels import disk_cache
from kvquant.kernels.cuda.decode.plan import fit, kernels, plan
from kvquant.kernels.cuda.decode.spec import HALF, POSITIONAL, VARIANT, DecodeSpec, Path, columns_of
from kvquant.kernels.cuda.decode.wide.spec import widened
from kvquant.kernels.cuda.runtime import compile as compiling
from kvquant.kernels.cuda.runtime.compile import Cubin, Report, compile_spec, cubin_key, load_cubin
from kvquant.kernels.cuda.runtime.launch import GPUS
from kvquant.rows.format import RowFormat

needs_numba_cuda = pytest.mark.extra("cuda")
ARCHS = "sm_80 sm_86 sm_89 sm_90 sm_100 sm_120".split()
SMALL = ("sm_86", "sm_89", "sm_120")  # an SM has 100 KB of shared memory
CUBIN = Cubin("decode", b"\x7fELF machine\ncode", Report(130, 0))


def make_spec(text: str) -> DecodeSpec:
    """A kernel of a short description: "K[/V] [head_dim] [word ...]"; the words are "fp16" (the
    query), "paged", "pages=4" (of so few rows), "ring", "strided", "segments" (bf16 sinks and a
    ring), "71:1" (query heads on a KV head), "queries" (several a sequence, so many columns),
    "pieces" (of ragged queries), "wide" (the kernel for wide groups), "crowded" (of few registers)
    and the fields of a variant."""
    formats, *words = text.split()
    head_dim = next((int(word) for word in words if word.isdecimal()), 128)
    k_name, _, v_name = formats.partition("/")
    k, v = (RowFormat.parse(name, head_dim) for name in (k_name, v_name or k_name))
    exact = RowFormat.parse("bf16", head_dim)
    place = next((word for word in words if word in ("paged", "ring")), "linear")
    pages = next((int(word.removeprefix("pages=")) for word in words if "pages=" in word), 0)
    place, run = ("paged", pages) if pages else (place, HALF)
    ratio = next((int(word.removesuffix(":1")) for word in words if word.endswith(":1")), 1)
    second = [exact] if "segments" in words else []
    columns, sharers = columns_of(ratio, k, v, *second)
    variant = tuple(sorted({*words} & {*VARIANT}))
    made = DecodeSpec(
        Path(k, v, place, place != "ring" and not pages and "strided" not in words, run),
        Path(exact, exact, "ring", False) if "segments" in words else None,
        "fp16" if "fp16" in words else "bf16",
        columns=columns,
        sharers=sharers,
        causal=bool({"queries", "pieces"} & {*words} or POSITIONAL & {*variant}),
        variant=variant,
        ragged="pieces" in words,
        crowded="crowded" in words,
    )
    assert made.may_be_crowded or not made.crowded
    wide = widened(made, ratio) if "wide" in words else made
    assert wide is not None
    return wide


EVERY_FIELD = " ".join(VARIANT)
SOME = (
    ("int4-g4 segments", "sm_90"),
    ("int4", "sm_100"),
    ("int3/int2", "sm_90"),
    ("int2/int3 16:1 segments", "sm_80"),
    ("int2 segments crowded", "sm_90"),
    ("int3 segments paged crowded", "sm_90"),
    ("int4/int2 segments paged crowded", "sm_100"),
    ("int4 segments crowded", "sm_90"),
    ("int8-g4/int4-g4", "sm_80"),
    ("int8-g4/int4-g4 segments", "sm_89"),
    ("int4-g4 segments paged", "sm_120"),
    ("fp8 fp16", "sm_89"),
    ("bf16 256", "sm_90"),
    ("int4-g4 512 segments", "sm_90"),
    ("int8 512", "sm_80"),
    ("int4-g4 16:1", "sm_90"),
    ("int4-g4 16:1 segments", "sm_86"),
    ("int4-g8 64:1 segments", "sm_80"),
    ("int4-g4 queries", "sm_100"),
    ("int4-g4 32:1 segments queries", "sm_90"),
    ("int4 16:1 paged queries", "sm_86"),
    ("bf16 64:1 fp16 queries", "sm_89"),
    (f"int4-g4 16:1 segments paged queries {EVERY_FIELD}", "sm_90"),
    (f"int4-g4 16:1 segments paged queries {EVERY_FIELD}", "sm_80"),
    ("int4-g4 8:1 segments sink_logits window", "sm_120"),
    ("int4-g4 36:1 segments paged pieces", "sm_90"),
    ("int4 16:1 segments paged pieces sink_logits window", "sm_80"),
    ("int4-g4 pages=1", "sm_90"),
    ("int4 16:1 pages=8 queries", "sm_90"),
    ("int4-g4 64:1 wide", "sm_90"),
    ("int8 71:1 wide paged queries", "sm_90"),
    ("fp8/int2 64:1 wide pages=1 pieces", "sm_90"),
    ("int4-g4 71:1 wide pieces", "sm_90"),
    ("int4-g4 64:1 wide segments", "sm_90"),
    ("int8/int2 64:1 wide segments pages=1 queries", "sm_90"),
    ("int8-g4/int4-g4 71:1 wide segments paged pieces", "sm_90"),
)
FORMATS = "int2 int3 int4 int4-g2 int4-g4 int4-g8 int8 int8-g4 fp8 fp8-g4 bf16 fp16".split()
FEW = "int2 int3 int4 int3/int2 int2/int3 int4/int2 int2/int4 int3/int4 int4/int3".split()
ALL = [
    *(f"{name} {head_dim}" for name in FORMATS for head_dim in (64, 128, 256)),
    # int4-g8 spills 8 bytes outside its loop (kernels/FACTS.md)
    *(f"{name} 512" for name in FORMATS if name != "int4-g8"),
    *(f"{name} {head_dim}" for name in ("int2", "int4", "bf16") for head_dim in (80, 96, 112, 192)),
    *(f"int3 {head_dim}" for head_dim in (96, 192)),
    *(f"{name} {word}" for name in FORMATS for word in ("segments", "paged")),
    *(f"{name} fp16" for name in FORMATS),
    *(
        f"{name} {word}"
        for name in ("int2", "int3", "int4", "int4-g4", "bf16")
        for word in ("strided", "ring")
    ),
    *"int3/int2 int2/int3 int4/int2 int3/int8-g8 int2/bf16 fp8/int3".split(),
    *(f"{name} segments {word} crowded" for name in FEW for word in ("", "paged")),
    *(f"{name} {ratio}:1 pages=1 segments" for name in FORMATS for ratio in (8, 64)),
    *"int8-g4/int4-g4 int8/int4 fp8/int4-g4 bf16/int4-g8 int4/bf16 fp16/fp8-g4".split(),
    *(f"{name} 16:1" for name in FORMATS),
    *(f"{name} 71:1 {word}" for name in FORMATS for word in ("segments", "paged")),
    *(f"{name} 64:1 fp16" for name in FORMATS),
    *(f"{name} 64:1 {head_dim}" for name in ("int4", "int4-g8", "bf16") for head_dim in (64, 256)),
    *(f"{name} {ratio}:1 queries" for name in FORMATS for ratio in (8, 16, 64)),
    *(f"{name} {ratio}:1 segments paged queries" for name in FORMATS for ratio in (8, 16, 64)),
    *(f"{name} {ratio}:1 segments paged pieces" for name in FORMATS for ratio in (8, 16, 64)),
    *(f"{name} 8:1 segments {field}" for name in ("int4-g4", "bf16") for field in VARIANT),
    *(f"{name} {ratio}:1 segments queries {EVERY_FIELD}" for name in FORMATS for ratio in (8, 64)),
    *(f"{name} 256 paged {EVERY_FIELD}" for name in ("int4", "int4-g8", "bf16")),
]
# what no block of a small GPU has room for, and is refused there
TOO_LARGE = {"int8 512", "bf16 512", "fp16 512", "int4-g4 512 segments"}


def matrix() -> list[tuple[str, str]]:
    """Kernels and architectures to compile."""
    if os.environ.get("KVQUANT_CUBINS") == "all":
        every = [
            (text, arch)
            for text in ALL
            for arch in ARCHS
            if "crowded" not in text or arch not in SMALL  # they have less memory
        ]
        every.remove(("int4/int3 segments paged crowded", "sm_100"))  # it spills 8 bytes
        return [one for one in every if one[0] not in TOO_LARGE or one[1] not in SMALL]
    return [*SOME]


@pytest.mark.parametrize("arch", SMALL)
def test_gpus_with_little_shared_memory_refuse_few_kernels(arch: str) -> None:
    refused = set()
    for text in {*ALL, *(text for text, _ in SOME)}:
        if "wide" not in text:  # those are Hopper's
            try:
                assert all(one.blocks for one in kernels(make_spec(text), GPUS[arch]))
            except UnsupportedError:
                refused.add(text)
    assert refused == TOO_LARGE


@pytest.mark.slow
@needs_numba_cuda
@pytest.mark.parametrize(
    ("text", "arch"), matrix(), ids=lambda word: word.strip().replace(" ", "-")
)
def test_machine_code_spills_nothing(text: str, arch: str) -> None:
    chosen = kernels(make_spec(text), GPUS[arch])
    for kernel in chosen if os.environ.get("KVQUANT_CUBINS") == "all" else chosen[-1:]:
        spec = kernel.spec
        report = compile_spec(spec, arch).report
        print(f"{text:28} {arch:6} {spec.warps} warps {spec.stages} stages: {report}")
        assert report.stack_bytes == 0, "spilled, or arrays in local memory"
        planned = plan(spec, GPUS[arch], 64, [8192], registers=report.registers)
        spec = replace(spec, warps=planned.warps, stages=planned.stages)
        assert fit(spec, GPUS[arch], report.registers).blocks, "a block fits an SM"


@pytest.mark.slow
@needs_numba_cuda
def test_products_of_wide_groups_do_not_wait_for_one_another() -> None:
    # times that scores and P V of a tile stand in the code; to begin each and to wait takes one
    for words, scores, values in (("64:1", 1, 1), ("71:1", 3, 4), ("71:1 segments queries", 3, 4)):
        code = compile_spec(make_spec(f"int4-g4 {words} wide"), "sm_90").code
        assert count_instructions(code, WARPGROUP_PRODUCT) == 8 * scores
        assert count_instructions(code, WARPGROUP_PRODUCT_OF_REGISTERS) == 4 * values
        assert count_instructions(code, WARPGROUP_ORDER) == 2 * (scores + values)


@needs_numba_cuda
def test_a_gpu_newer_than_the_compiler_is_refused() -> None:
    from numba import types

    def kernel(address):  # type: ignore[no-untyped-def]
        return

    with pytest.raises(UnsupportedError, match="no code for sm_990"):
        compiling.compile_kernel(kernel, (types.uint64,), "sm_990")


def test_an_architecture_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'hopper' does not exist"):
        compiling._capability("hopper")
    assert compiling._capability("sm_100") == (10, 0)


def test_a_missing_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba_cuda", None)
    with pytest.raises(UnsupportedError, match="install the extra 'cuda'"):
        compile_spec(make_spec("int4"), "sm_90")


def make_cubin(names: Sequence[str], counts: Sequence[tuple[int, int, int]]) -> bytes:
    """An ELF file as ptxas makes it, of kernels and attributes (number, symbol, count)."""
    # attributes of the form 3 have their value in place of a length
    info = struct.pack("<BBH", 3, 0x1B, 40)
    info += b"".join(struct.pack("<BBHII", 4, number, 8, *rest) for number, *rest in counts)
    contents = {"": b"", ".nv.info": info, ".text.helper": b"code"}
    contents |= {f".nv.constant0.{name}": b"constants" for name in names}
    contents[".shstrtab"] = "\0".join([*contents, ".shstrtab", ""]).encode()
    body, headers, place = b"", b"", 0
    for name, content in contents.items():
        headers += struct.pack(
            "<IIQQQQIIQQ", place, 1, 0, 0, 64 + len(body), len(content), *[0] * 4
        )
        body += content
        place += len(name) + 1
    start = b"\x7fELF\2\1\1".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(body))
    sizes = struct.pack("<3H", 64, len(contents), len(contents) - 1)
    return start.ljust(0x3A, b"\0") + sizes + body + headers


def test_what_a_kernel_takes_is_read_from_its_machine_code() -> None:
    code = make_cubin(["decode"], [(0x2F, 3, 30), (0x11, 3, 0), (0x2F, 5, 129), (0x11, 5, 48)])
    assert Cubin.read(code) == Cubin("decode", code, Report(129, 48))
    for names in ([], ["one", "two"]):
        with pytest.raises(ValueError, match="unpack"):
            Cubin.read(make_cubin(names, [(0x2F, 3, 30)]))


@needs_numba_cuda
@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_read_is_what_ptxas_reports(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.core as linking
    from numba import cuda, float32, types

    logs = []

    class Linker(linking.Linker):  # type: ignore[misc]
        def link(self, target_type: str) -> object:
            made = super().link(target_type)
            logs.append(self.get_info_log())
            return made

    def kernel(address, n):  # type: ignore[no-untyped-def]
        local = cuda.local.array(64, float32)
        for i in range(n):
            local[(i * n) % 64] += i
        if local[n % 64] > n:
            cuda.syncthreads()

    options = partial(linking.LinkerOptions, ptxas_options=["-v"])
    monkeypatch.setattr(linking, "Linker", Linker)
    monkeypatch.setattr(linking, "LinkerOptions", options)
    cubin = compiling.compile_kernel(kernel, (types.uint64, types.int32), arch)
    assert f"Used {cubin.report.registers} registers" in logs[0]
    assert f"{cubin.report.stack_bytes} bytes stack frame" in logs[0]
    assert cubin.report.stack_bytes == 256
    assert cubin.code.startswith(b"\x7fELF") and b".text." + cubin.name.encode() in cubin.code


def test_the_key_changes_with_all_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec("int4-g4")
    specs = [replace(spec, warps=8), replace(spec, stages=2), replace(spec, query="fp16")]
    specs += [make_spec("int4-g4 strided")]
    specs += [make_spec(text) for text in ("int4", "int4-g4/int8", "int4-g4 64")]
    keys = [cubin_key(one, "sm_90") for one in [spec, *specs]] + [cubin_key(spec, "sm_80")]
    monkeypatch.setattr(compiling, "_version", lambda name: "0.1")
    keys.append(cubin_key(spec, "sm_90"))
    monkeypatch.setattr(compiling, "_version", lambda name: "9" if name == "llvmlite" else "0.1")
    keys.append(cubin_key(spec, "sm_90"))
    monkeypatch.setattr(compiling, "_sources_hash", lambda *names: "other sources")
    keys.append(cubin_key(spec, "sm_90"))
    assert len(set(keys)) == len(keys)
    assert cubin_key(spec, "sm_90") == keys[-1]


def test_the_sources_that_machine_code_depends_on_are_hashed(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = DecodeSpec.__module__, DecodeSpec.kernel

    def changed(name: str) -> bool:
        before = compiling._sources_hash.__wrapped__(*names)
        (tmp_path / name).write_text("changed = True\n")
        return bool(compiling._sources_hash.__wrapped__(*names) != before)

    kernels = FilePath(compiling.__file__).parents[2]
    copied = shutil.copytree(kernels, tmp_path / "kernels", symlinks=True) / "cuda"
    monkeypatch.setattr(compiling, "__file__", str(copied / "runtime" / "compile.py"))
    tmp_path = copied
    for name in ("decode/launch.py", "decode/plan.py", "prefix/kernel.py"):
        assert not changed(name), name
    for name in (
        "device/row_layout.py",
        "device/ptx.py",
        "decode/spec.py",
        "decode/mainloop.py",
        "decode/kernel.py",
        "runtime/compile.py",
    ):
        assert changed(name), name


@needs_numba_cuda
def test_the_sources_are_all_that_a_kernel_loads() -> None:
    """Of every operation, in a process of its own; the key has all fields of its spec."""
    code = """
import sys
from dataclasses import fields, is_dataclass
from kvquant.kernels.cuda.affine import launch
from kvquant.kernels.cuda.append import spec
from kvquant.kernels.cuda.decode import spec
from kvquant.kernels.cuda.dequantize import launch
from kvquant.kernels.cuda.prefix import spec
from kvquant.kernels.cuda.slots import launch
from kvquant.kernels.cuda.runtime.compile import sources_of
from kvquant.kernels.cuda.runtime.spec import Spec
import importlib

def files():
    return {
        module.__file__ for name, module in sys.modules.items()
        if name.startswith("kvquant.kernels.cuda.") and not hasattr(module, "__path__")
    }

specs = Spec.__subclasses__()
for spec in specs:
    specs += spec.__subclasses__()
specs = [one for one in specs if hasattr(one, "kernel")]
parts = [x for one in specs for x in vars(sys.modules[one.__module__]).values() if is_dataclass(x)]
parts = [one for one in parts if "kvquant.kernels." in one.__module__]  # a format is told whole
assert all(field.repr for one in (*specs, *parts) for field in fields(one))
launched, sources = files(), set()
for one in specs:
    importlib.import_module("kvquant.kernels.cuda." + one.kernel.rpartition(".")[0])
    sources |= {str(path) for path in sources_of(one.__module__, one.kernel)}
missing = files() - launched - sources
assert not missing, missing
print(len(specs))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 9


@pytest.fixture
def cache(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> FilePath:
    """An empty cache folder; kernels are not really compiled."""
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "compile_spec", lambda spec, arch: CUBIN)
    monkeypatch.setattr(disk_cache, "_warned", set())
    return tmp_path / "cubins"


def cubins(folder: FilePath) -> list[FilePath]:
    """The files of a cache folder, without those that are locks only."""
    return [path for path in folder.iterdir() if path.suffix != ".lock"]


def test_a_kernel_is_compiled_once(cache: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec("int4-g4")
    assert load_cubin(spec, "sm_90") == CUBIN
    assert [path.name for path in cubins(cache)] == [f"{cubin_key(spec, 'sm_90')}.cubin"]
    monkeypatch.setattr(compiling, "compile_spec", lambda spec, arch: pytest.fail("again"))
    assert load_cubin(spec, "sm_90") == CUBIN


def test_a_damaged_file_is_compiled_anew(cache: FilePath) -> None:
    spec, whole = make_spec("int4-g4"), CUBIN.to_bytes()
    load_cubin(spec, "sm_90")
    (path,) = cubins(cache)
    for damage in (b"", bytes(100), whole[:-5], whole + b"x", whole[:70] + b"?" + whole[71:]):
        path.write_bytes(damage)
        assert load_cubin(spec, "sm_90") == CUBIN
        assert path.read_bytes() == whole


CHILD = """
import sys, time
from kvquant.kernels.cuda.runtime import compile as compiling
from kvquant.kernels.cuda.decode.spec import DecodeSpec, Path
from kvquant.rows.format import RowFormat
def slow(spec, arch):
    print("compiled")
    time.sleep(0.3)
    return compiling.Cubin("decode", b"code" * 100_000, compiling.Report(1, 0))
fmt = RowFormat.parse("int4-g4", 128)
if sys.argv[1] == "compile":
    compiling.compile_spec = slow
cubin = compiling.load_cubin(DecodeSpec(Path(fmt, fmt)), "sm_90")
assert len(cubin.code) == 400_000
print(*sorted({"numba", "llvmlite"} & {name.split(".")[0] for name in sys.modules}))
"""


@pytest.mark.slow
def test_processes_share_the_folder_and_a_hit_needs_no_numba(tmp_path: FilePath) -> None:
    root = FilePath(__file__).parents[3]
    environment = {**os.environ, "KVQUANT_CACHE_DIR": str(tmp_path)}

    def start(task: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, task]
        return subprocess.Popen(
            command, env=environment, cwd=root, stdout=subprocess.PIPE, text=True
        )

    with start("compile") as first, start("compile") as second:
        printed = [process.communicate(timeout=600)[0] for process in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0)
    assert "".join(printed).split() == ["compiled"], "the second one waits for the first"
    assert len(cubins(tmp_path / "cubins")) == 1, "temporary files are left"
    with start("read") as reader:
        loaded, _ = reader.communicate(timeout=600)
    assert (reader.returncode, loaded.strip()) == (0, "")
