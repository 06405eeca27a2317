"""Run a compiled kernel over its work items, on all threads that torch uses.

Every CPU kernel is a C function (arguments, item): the address of its int64 arguments and the index
of the work item. So one driver serves all, a kernel compiles without numba's parallel passes, and
both are cached on disk.

A process forked from one that has run kernels in parallel goes on with one thread: the OpenMP that
numba uses would end it otherwise.
"""

import functools
import hashlib
import os
import platform
import threading
from pathlib import Path

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from numba import types

from kvquant import layout
from kvquant.errors import UnsupportedError

from .simd import call_kernel

_SIGNATURE = types.void(types.int64, types.int64)
_kernels: list[object] = []
# one of numba's threading layers ends the process if two threads meet in it
_lock = threading.Lock()
_has_run_parallel = False
_is_forked = False


def compile_kernel(function):
    """The address of a kernel (arguments, item) -> None, compiled or taken from the disk.

    numba keeps what is made of one function under numbers, in one index, and processes that compile
    at the same time may take the same number: one of them then finds the other's code. So each
    kernel has a name of its own, by what it is made of, and with it files of its own.
    """
    _check_machine()
    function.__qualname__ += f"_{_word(function)}"
    kernel = numba.cfunc(_SIGNATURE, nopython=True, cache=True, error_model="numpy")(function)
    _kernels.append(kernel)  # the code lives as long as this object
    return kernel.address


def run(kernel, arguments, items, *, parallel=True):
    """Call kernel(arguments, item) for each item.

    Args:
        kernel: address, from compile_kernel.
        arguments: int64 array of what the kernel expects: addresses, sizes, strides.
        items: how many there are.
        parallel: whether the work is worth more than one thread.
    """
    global _has_run_parallel
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, items)
    if parallel and threads > 1 and not _is_forked:
        with _lock:
            _has_run_parallel = True
            numba.set_num_threads(threads)
            _run_parallel(kernel, arguments, items, threads)
    else:
        _run(kernel, arguments.ctypes.data, 0, items, 1)


@functools.cache
def sources_hash():
    """A word that changes with these files and the layout: kernels are then compiled anew."""
    digest = hashlib.sha256()
    for path in [*sorted(Path(__file__).parent.glob("*.py")), Path(layout.__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _word(function):
    """Of the constants of a kernel and of the processor."""
    parts = [llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        value = cell.cell_contents
        known = value if isinstance(value, (str, int, float)) else getattr(value, "__name__", "")
        parts.append(f"{name} {known}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _after_fork():
    global _lock, _is_forked
    _lock, _is_forked = threading.Lock(), _has_run_parallel


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def _check_machine():
    if platform.machine() in ("x86_64", "AMD64") and not llvm.get_host_cpu_features().get("f16c"):
        raise UnsupportedError(
            "the CPU kernels need an x86-64 processor with F16C (2012 and newer): "
            "pass backend='torch' or backend='reference' to use the slow path"
        )


@numba.njit(nogil=True, cache=True)
def _run(kernel, arguments, first, items, step):
    for item in range(first, items, step):
        call_kernel(kernel, arguments, item)


@numba.njit(nogil=True, parallel=True, cache=True)
def _run_parallel(kernel, arguments, items, threads):
    address = arguments.ctypes.data
    for thread in numba.prange(threads):
        for item in range(thread, items, threads):
            call_kernel(kernel, address, np.int64(item))
