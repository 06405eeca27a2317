"""Run a compiled kernel over its work items, on all threads that torch uses.

Every CPU kernel is a C function (arguments, item), so one driver serves all. A process that was
forked after kernels ran in parallel has one thread: numba's OpenMP would end it otherwise.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numba
import numpy as np
import torch

from kvquant.rows.arguments import address

from .compile import compiled
from .simd import call_kernel

# one of numba's threading layers ends the process if two threads meet in it
_lock = threading.Lock()
_has_run_parallel = False
_is_forked = False


class Launch:
    """A kernel and arguments that stay; `at` takes the addresses of the new ones and runs it.

    Args:
        new: places of the new addresses among the arguments.
        stay: the tensors whose addresses stay, by their places. torch moves a tensor that another
            process gets (share_memory_), so `at` looks where they are.
        is_small: not worth more than one thread.
    """

    def __init__(
        self,
        kernel: int,
        arguments: Any,
        items: int,
        new: Sequence[int],
        stay: Mapping[int, torch.Tensor],
        *,
        is_small: bool,
    ) -> None:
        self._kernel, self._items, self._new = kernel, items, new
        self._places, self._tensors, self._addresses = [*stay], [*stay.values()], list[int]()
        self.arguments, self._is_parallel = arguments, not is_small

    def at(self, addresses: Sequence[int]) -> None:
        found = [tensor.data_ptr() for tensor in self._tensors]
        if found != self._addresses:
            for place, tensor in zip(self._places, self._tensors, strict=True):
                self.arguments[place] = address(tensor)
            self._addresses = found
        for place, new in zip(self._new, addresses, strict=True):
            self.arguments[place] = new
        run(self._kernel, self.arguments, self._items, parallel=self._is_parallel)


def run(kernel: int, arguments: Any, items: int, *, parallel: bool = True) -> None:
    """Call the kernel at an address with (arguments, item) for each item.

    arguments: int64 array. parallel: whether the work is worth more than one thread.
    """
    global _has_run_parallel
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, items)
    if parallel and threads > 1 and not _is_forked:
        with _lock:
            _has_run_parallel = True
            before = numba.get_num_threads()  # of the caller's own code
            numba.set_num_threads(threads)
            try:
                _run_parallel(kernel, arguments, items, threads)
            finally:
                numba.set_num_threads(before)
    else:
        _run(kernel, arguments, items)


def _after_fork():
    global _lock, _is_forked
    _lock, _is_forked = threading.Lock(), _has_run_parallel


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@compiled()
def _run(kernel, arguments, items):
    address = arguments.ctypes.data
    for item in range(items):
        call_kernel(kernel, address, np.int64(item))


@compiled(parallel=True)
def _run_parallel(kernel, arguments, items, threads):
    address = arguments.ctypes.data
    for thread in numba.prange(threads):
        for item in range(thread, items, threads):
            call_kernel(kernel, address, np.int64(item))
