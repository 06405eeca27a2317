"""Compile decode kernels to cubins, without a GPU, and keep them on disk.

numba makes LTO-IR of a kernel, nvJitLink a cubin of that; both come with the `cuda` extra and take
seconds. A cubin that lies on disk is read without either:

    <cache folder>/cubins/<key>.cubin    SHA-256 of what follows, name and report as JSON, code

The key is a hash of all that the machine code depends on, so a file is never wrong, only unused.

Of PTX, nvJitLink makes relocatable code: calls of the compiler's own functions then cost registers,
255 where LTO-IR, compiled as a whole program, takes 130 (sm_80). But for GPUs newer than sm_90
LTO-IR goes through another LLVM, which leaves arrays in local memory: there PTX of sm_90 is taken.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import re
import threading
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvquant import layout
from kvquant.errors import UnsupportedError

from ..usercache import cache_folder, replace_file
from .spec import DecodeSpec

NEWEST_LTO = (9, 0)
# what makes the machine code; the names of the wheels with NVVM and nvJitLink end in the CUDA
# version up to 12
COMPILERS = (
    "numba numba-cuda llvmlite cuda-core cuda-bindings nvidia-nvvm nvidia-nvjitlink "
    "nvidia-cuda-nvcc-cu12 nvidia-nvjitlink-cu12"
).split()
# files here that the machine code does not depend on, beside the simulator's
UNUSED = set("arrange.py driver.py launch.py workspace.py".split())
_lock = threading.Lock()


@dataclass(frozen=True)
class Report:
    """What ptxas says of a kernel.

    Attributes:
        registers: of a thread.
        stack_bytes: local memory of a thread.
        spill_bytes: registers moved to local memory and back, stores and loads together.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int

    @classmethod
    def parse(cls, log: str) -> Report:
        """Read the log of `ptxas -v`; of several functions the largest numbers count.

        Raises:
            ValueError: it is no such log.
        """
        registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
        frames = re.findall(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
        )
        if not registers or not frames:
            raise ValueError(f"ptxas reported no registers or no stack frame: {log!r}")
        return cls(
            max(registers),
            max(int(stack) for stack, _, _ in frames),
            max(int(stores) + int(loads) for _, stores, loads in frames),
        )


@dataclass(frozen=True)
class Cubin:
    """Machine code of a kernel for one architecture.

    Attributes:
        name: of the kernel in it, mangled.
        code: an ELF file that the driver loads.
        report: what ptxas says of it.
    """

    name: str
    code: bytes
    report: Report

    def to_bytes(self) -> bytes:
        """The content of a file in the cache."""
        facts = {"name": self.name, **asdict(self.report)}
        body = json.dumps(facts).encode() + b"\n" + self.code
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Cubin | None:
        """Read such a content; None if it is damaged."""
        digest, _, body = data.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None
        header, _, code = body.partition(b"\n")
        facts = json.loads(header)
        return cls(facts.pop("name"), code, Report(**facts))


def decode_cubin(spec: DecodeSpec, arch: str) -> Cubin:
    """Take a decode kernel from the disk, or compile it and put it there.

    Args:
        spec: the kernel.
        arch: of the GPU, such as "sm_90".

    Raises:
        UnsupportedError: numba-cuda is not installed, or knows no such architecture.
    """
    with _lock:
        try:
            path = cache_folder() / "cubins" / f"{cubin_key(spec, arch)}.cubin"
            cubin = Cubin.from_bytes(path.read_bytes()) if path.exists() else None
        except OSError as error:
            _warn_of_folder(str(error))
            return compile_decode(spec, arch)
        if cubin is None:
            cubin = compile_decode(spec, arch)
            try:
                replace_file(path, cubin.to_bytes())
            except OSError as error:
                _warn_of_folder(str(error))
        return cubin


def cubin_key(spec: DecodeSpec, arch: str) -> str:
    """A word that changes with all that the machine code depends on."""
    parts = [repr(spec), arch, _sources_hash()]
    parts += [f"{name} {_version(name)}" for name in COMPILERS]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def compile_decode(spec: DecodeSpec, arch: str) -> Cubin:
    """Compile a decode kernel; see decode_cubin."""
    _check_extra()
    from .decode import make_decode_kernel, signature

    return compile_kernel(make_decode_kernel(spec), signature(spec), arch)


def compile_kernel(function: Any, signature: Any, arch: str) -> Cubin:
    """Compile a Python function for numba.cuda to a cubin; needs no GPU.

    Args:
        function: the kernel.
        signature: numba types of the arguments.
        arch: such as "sm_90".

    Raises:
        UnsupportedError: numba-cuda is not installed, or knows no such architecture.
    """
    _check_extra()
    from cuda.bindings.nvjitlink import nvJitLinkError
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba import cuda

    from .device import pretend

    whole = _capability(arch) <= NEWEST_LTO
    capability = _capability(arch) if whole else NEWEST_LTO
    options: Any = {"device": False, "abi": "numba", "output": "ltoir" if whole else "ptx"}
    with pretend(capability):
        made, _ = cuda.compile(function, signature, cc=capability, **options)
    made = ObjectCode.from_ltoir(made) if whole else ObjectCode.from_ptx(made.encode())
    options = LinkerOptions(arch=arch, link_time_optimization=whole, ptxas_options=["-v"])
    try:
        linker = Linker(made, options=options)
        code = bytes(linker.link("cubin").code)
    except nvJitLinkError as error:
        raise UnsupportedError(
            f"nvJitLink {_version('nvidia-nvjitlink')} makes no code for {arch} ({error}): for a "
            "newer GPU install newer compilers, pip install -U 'numba-cuda[cu13]'"
        ) from error
    log = linker.get_info_log() + linker.get_error_log()
    (name,) = re.findall(r"Compiling entry function '(\w+)'", log)
    return Cubin(name, code, Report.parse(log))


def _capability(arch: str) -> tuple[int, int]:
    digits = re.fullmatch(r"sm_(\d+)(\d)", arch)
    if digits is None:
        raise UnsupportedError(f"architecture {arch!r} does not exist: give one such as 'sm_90'")
    return int(digits[1]), int(digits[2])


def _check_extra() -> None:
    try:
        import cuda.core  # noqa: F401
        import numba_cuda  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "CUDA tensors need numba-cuda: install kvquant with its cuda extra, pip install -e "
            f"'.[cuda]' in the checkout ({error}); or pass backend='reference' for the slow kernel"
        ) from error


@functools.cache
def _sources_hash() -> str:
    digest = hashlib.sha256(Path(layout.__file__).read_bytes())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name not in UNUSED and not path.name.startswith("simulat"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def _warn_of_folder(problem: str) -> None:
    warnings.warn(
        f"compiled CUDA kernels cannot be kept ({problem}): every process compiles them anew, "
        "for seconds. Let KVQUANT_CACHE_DIR name a folder that can be written",
        RuntimeWarning,
        stacklevel=3,
    )
