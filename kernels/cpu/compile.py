"""Compile kernels for the CPU, and keep them on disk.

    <cache folder>/cpu/<name>-<key>.kernel    numba's result, pickled, sealed (disk_cache.py)

numba's own cache would unpickle whatever it finds. Here the owner and the SHA-256 of a file are
checked first, and a kernel is compiled anew if either is wrong.

The key is a hash of all that the machine code depends on: sources, constants, processor, compilers.
So a file is never wrong, only unused.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba import types
from numba.core import registry, serialize, sigutils, typed_passes, untyped_passes
from numba.core.caching import NullCache
from numba.core.ccallback import CFunc
from numba.core.compiler import CompilerBase, CompileResult, PassManager

from kvquant.rows import codec, format

from ..disk_cache import (
    cache_folder,
    read_file,
    replace_file,
    seal,
    uncollected,
    unseal,
    warn_of_folder,
)

_SIGNATURE = sigutils.normalize_signature(types.void(types.int64, types.int64))
_OPTIONS = {"nopython": True, "error_model": "numpy"}
_kernels: list[object] = []


class Compiler(CompilerBase):
    """numba's, without passes that find nothing in a kernel, or what LLVM finds as well.

    The machine code is the same, in three quarters of the time. A variable has one type in a
    kernel.
    """

    PASSES = (
        untyped_passes.TranslateByteCode,
        untyped_passes.FixupArgs,
        untyped_passes.IRProcessing,
        untyped_passes.RewriteSemanticConstants,
        untyped_passes.DeadBranchPrune,
        typed_passes.NopythonTypeInference,
        typed_passes.PreLowerStripPhis,
        typed_passes.NoPythonSupportedFeatureValidation,
        typed_passes.IRLegalization,
        typed_passes.NativeLowering,
        typed_passes.NoPythonBackend,
    )

    def define_pipelines(self) -> list[PassManager]:
        manager = PassManager("kernel")
        for one in self.PASSES:
            manager.add_pass(one, one.__name__)
        manager.finalize()
        return [manager]


def compile_kernel(function: Callable[[int, int], None]) -> int:
    """The address of a kernel (arguments, item) -> None, compiled or taken from the disk."""
    # the linker knows code by the name of its function: each kernel has one of its own
    function.__qualname__ += f"_{_word(function)}"
    kernel: Any = CFunc(function, _SIGNATURE, {}, _OPTIONS, pipeline_class=Compiler)
    kernel._cache = KernelCache(function)
    with uncollected():
        kernel.compile()
    _kernels.append(kernel)  # the code lives as long as this object
    address: int = kernel.address
    return address


def compiled(function: Any) -> Any:
    """Decorate a function of this room that Python calls: numba.njit, and kept on the disk."""
    made = numba.njit(nogil=True)(function)
    made._cache = KernelCache(function)
    return made


class KernelCache(NullCache):
    """What numba asks for compiled code, and gives it to, for one function."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def load_overload(self, sig: Any, target_context: Any) -> CompileResult | None:
        """What was kept for a signature; None if there is nothing, or it cannot be used."""
        target_context.refresh()
        try:
            data = read_file(self._path(sig))
        except OSError as error:
            warn_of_folder("CPU", error)
            return None
        body = None if data is None else unseal(data)
        if body is None:
            return None
        try:
            return CompileResult._rebuild(target_context, *pickle.loads(body))
        except Exception:  # whatever another process wrote there: it is made anew
            return None

    def save_overload(self, sig: Any, data: CompileResult) -> None:
        """Keep what was compiled for a signature, if that can be."""
        try:
            replace_file(self._path(sig), seal(serialize.dumps(data._reduce())))
        except OSError as error:
            warn_of_folder("CPU", error)

    def _path(self, sig: Any) -> Path:
        key = hashlib.sha256(f"{_word(self._function)} {sig}".encode()).hexdigest()[:32]
        return cache_folder() / "cpu" / f"{self._function.__name__}-{key}.kernel"


def _word(function: Any) -> str:
    """Changes with all that the machine code of a function depends on, but for the signature."""
    parts = [_surroundings(), function.__module__, function.__name__]
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        value = cell.cell_contents
        if not isinstance(value, str | int | float | np.generic):
            raise TypeError(f"{name} of {function.__name__} is {value!r}: no constant of a kernel")
        parts.append(f"{name} {value!r}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@functools.cache
def _surroundings() -> str:
    """Changes with what all kernels depend on: sources, processor, compilers."""
    digest = hashlib.sha256()
    of_rows = Path(codec.__file__), Path(format.__file__)
    for path in [*sorted(Path(__file__).parent.rglob("*.py")), *of_rows]:
        digest.update(path.read_bytes())
    codegen = registry.cpu_target.target_context.codegen()
    versions = sys.version, numba.__version__, llvmlite.__version__, np.__version__
    digest.update(repr((codegen.magic_tuple(), versions)).encode())
    return digest.hexdigest()
