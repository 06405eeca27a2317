"""Compile kernels to cubins, without a GPU, and keep them on disk.

numba makes LTO-IR of a kernel, nvJitLink a cubin of that, in seconds. A cubin on disk needs
neither:

    <cache folder>/cubins/<key>.cubin    SHA-256 of what follows, name and report as JSON, code

The key is a hash of all that the machine code depends on, so a file is never wrong, only unused.
Who compiles a kernel holds the lock of its file. compile_pool.py compiles several at a time.

PTX would become relocatable code, with up to 255 registers for 130 (sm_80). But for GPUs newer than
sm_90 LTO-IR leaves arrays in local memory: there PTX of sm_90 is taken.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import re
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvquant.errors import UnsupportedError, missing_extra
from kvquant.rows import codec, format

from ...disk_cache import (
    cache_folder,
    locked,
    read_file,
    replace_file,
    seal,
    uncollected,
    unseal,
    warn_of_folder,
)
from .spec import Spec

NEWEST_LTO = (9, 0)
# of a cubin: the section of a kernel's arguments; in .nv.info attributes, and the form of those
# that are followed by as many bytes as they say
ARGUMENTS = ".nv.constant0."
REGISTER_COUNT, FRAME_SIZE, WITH_LENGTH = 0x2F, 0x11, 4
# what makes the machine code; the names of the wheels with NVVM and nvJitLink end in the CUDA
# version up to 12
COMPILERS = (
    "numba numba-cuda llvmlite cuda-core cuda-bindings nvidia-nvvm nvidia-nvjitlink "
    "nvidia-cuda-nvcc-cu12 nvidia-nvjitlink-cu12"
).split()
RELATIVE_IMPORT = re.compile(r"^ *from (\.+)([\w.]+) import", re.MULTILINE)
_lock = threading.Lock()


@dataclass(frozen=True)
class Report:
    """What a kernel takes: a thread's registers and bytes of stack (arrays and spills)."""

    registers: int
    stack_bytes: int


@dataclass(frozen=True)
class Cubin:
    """Machine code of a kernel: its mangled name, an ELF file, what it takes."""

    name: str
    code: bytes
    report: Report

    @classmethod
    def read(cls, code: bytes) -> Cubin:
        """Find the kernel in an ELF file, and what it takes; ValueError unless there is one.

        The log of ptxas says it too, but was seen empty on a machine with a GPU.
        """
        (table,) = struct.unpack_from("<Q", code, 0x28)
        size, count, names_at = struct.unpack_from("<3H", code, 0x3A)
        headers = [struct.unpack_from("<IIQQQQ", code, table + i * size) for i in range(count)]
        first_name = headers[names_at][4]
        sections = {}
        for name, _, _, _, start, length in headers:
            end = code.index(b"\0", first_name + name)
            sections[code[first_name + name : end].decode()] = code[start : start + length]
        # constant bank 0 holds the arguments: only what can be launched has one
        (kernel,) = [name[len(ARGUMENTS) :] for name in sections if name.startswith(ARGUMENTS)]
        info = sections[".nv.info"]
        found: dict[int, list[int]] = {REGISTER_COUNT: [], FRAME_SIZE: []}
        at = 0
        while at < len(info):
            form, attribute, length = struct.unpack_from("<BBH", info, at)
            if attribute in found:  # the index of a symbol, and its number
                found[attribute].append(struct.unpack_from("<I", info, at + 8)[0])
            at += 4 + (length if form == WITH_LENGTH else 0)
        return cls(kernel, code, Report(max(found[REGISTER_COUNT]), max(found[FRAME_SIZE])))

    def to_bytes(self) -> bytes:
        facts = self.name, self.report.registers, self.report.stack_bytes
        return seal(json.dumps(facts).encode() + b"\n" + self.code)

    @classmethod
    def from_bytes(cls, data: bytes) -> Cubin | None:
        """Read such a content; None if it is damaged."""
        body = unseal(data)
        if body is None:
            return None
        header, _, code = body.partition(b"\n")
        name, registers, stack_bytes = json.loads(header)
        return cls(name, code, Report(registers, stack_bytes))


def load_cubin(spec: Spec, arch: str) -> Cubin:
    """Take a kernel from the disk, or compile and keep it; a failing disk is warned of.

    arch: such as "sm_90". UnsupportedError if numba-cuda is not installed, or knows no such arch.
    """
    with _lock:
        cubin = None
        try:
            path = cubin_path(spec, arch)
            cubin = _read(path)
            if cubin is None:
                with locked(path):
                    cubin = _read(path)  # another process may have compiled it meanwhile
                    if cubin is None:
                        cubin = compile_spec(spec, arch)
                        replace_file(path, cubin.to_bytes())
        except OSError as error:
            warn_of_folder("CUDA", error)
        return cubin or compile_spec(spec, arch)


def keep_cubin(spec: Spec, arch: str) -> None:
    """Compile a kernel and put it on the disk, for one who holds its lock. Errors as of load_cubin;
    OSError if the disk cannot be written."""
    replace_file(cubin_path(spec, arch), compile_spec(spec, arch).to_bytes())


def missing(specs: Iterable[Spec], arch: str) -> list[Spec]:
    """Those kernels, each once, that are not on the disk; all where it cannot be read."""
    found = []
    for spec in dict.fromkeys(specs):
        try:
            if _read(cubin_path(spec, arch)) is None:
                found.append(spec)
        except OSError as error:
            warn_of_folder("CUDA", error)
            found.append(spec)
    return found


def cubin_path(spec: Spec, arch: str) -> Path:
    """Where a kernel lies; OSError if there is no folder."""
    return cache_folder() / "cubins" / f"{cubin_key(spec, arch)}.cubin"


def _read(path: Path) -> Cubin | None:
    data = read_file(path)
    return None if data is None else Cubin.from_bytes(data)


def cubin_key(spec: Spec, arch: str) -> str:
    """A word that changes with all that the machine code depends on."""
    parts = [repr(spec), arch, _sources_hash(type(spec).__module__, spec.kernel)]
    parts += [f"{name} {_version(name)}" for name in COMPILERS]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def compile_spec(spec: Spec, arch: str) -> Cubin:
    require_extra()
    threads = spec.threads if spec.arch_specific else None
    most, kernel, types = spec.most_registers, spec.build(), spec.signature()
    return compile_kernel(kernel, types, arch, specific_threads=threads, most_registers=most)


def compile_kernel(
    function: Any,
    signature: Any,
    arch: str,
    *,
    specific_threads: int | None = None,
    most_registers: int | None = None,
) -> Cubin:
    """Compile a Python function for numba.cuda to a cubin; needs no GPU. Errors as of
    load_cubin.

    signature: numba types of the arguments. arch: such as "sm_90". specific_threads: of a block,
    where the kernel has instructions of this architecture alone, and its warpgroups share out
    registers. most_registers: of a thread.
    """
    require_extra()
    from cuda.bindings.nvjitlink import nvJitLinkError
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba import cuda

    from ..device.jit import pretend

    whole = _capability(arch) <= NEWEST_LTO
    capability = _capability(arch) if whole else NEWEST_LTO
    # opt and debug are given, so that no setting of numba's changes the machine code
    options: Any = {"device": False, "abi": "numba", "opt": True, "debug": False}
    options["output"] = "ltoir" if whole else "ptx"
    linked = arch
    if specific_threads is not None:
        options["launch_bounds"] = (specific_threads, 1)
        linked = f"{arch}a"
    with pretend(capability), uncollected():
        made, _ = cuda.compile(function, signature, cc=capability, **options)
    made = ObjectCode.from_ltoir(made) if whole else ObjectCode.from_ptx(made.encode())
    options = LinkerOptions(
        arch=linked, link_time_optimization=whole, max_register_count=most_registers
    )
    try:
        code = bytes(Linker(made, options=options).link("cubin").code)
    except nvJitLinkError as error:
        raise UnsupportedError(
            f"nvJitLink {_version('nvidia-nvjitlink')} makes no code for {arch} ({error}): for a "
            "newer GPU install newer compilers, pip install -U 'numba-cuda[cu13]'"
        ) from error
    return Cubin.read(code)


def _capability(arch: str) -> tuple[int, int]:
    digits = re.fullmatch(r"sm_(\d+)(\d)", arch)
    if digits is None:
        raise UnsupportedError(f"architecture {arch!r} does not exist: give one such as 'sm_90'")
    return int(digits[1]), int(digits[2])


def require_extra() -> None:
    try:
        import numba_cuda  # noqa: F401
    except ImportError as error:
        raise missing_extra("the CUDA kernels need numba-cuda", "cuda", error) from error


@functools.cache
def _sources_hash(*names: str) -> str:
    """A hash of sources_of."""
    digest = hashlib.sha256()
    for path in [Path(codec.__file__), Path(format.__file__), *sources_of(*names)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def sources_of(spec_module: str, kernel: str) -> list[Path]:
    """The files of a kernel: its own, its spec's, this one, and all that they import by relative
    imports. What only launches a kernel is not among them."""
    rooms = Path(__file__).parents[1]
    of_spec = spec_module.rpartition("kernels.cuda.")[2]
    modules = [of_spec, kernel.rpartition(".")[0]]
    todo = [Path(__file__), *(rooms / f"{name.replace('.', '/')}.py" for name in modules)]
    found: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            for dots, name in RELATIVE_IMPORT.findall(path.read_text(encoding="utf-8")):
                todo.append(path.parents[len(dots) - 1] / f"{name.replace('.', '/')}.py")
    return sorted(found)


@functools.cache
def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"
