"""Run a compiled kernel over its work items, on the threads that torch runs on.

Every CPU kernel is a C function (arguments, item), so one driver serves all. The threads are those
of torch's own OpenMP: a second runtime would spin on the cores that torch's threads spin on, and
each would delay the other. A process that was forked takes one: OpenMP would wait for threads that
are not there.
"""

import ctypes
import functools
import os
from typing import Any

import numba
import numpy as np
import torch

from kvquant.errors import warn

from .compile import compile_kernel, compiled
from .simd import argument, call_kernel, call_team, next_item, stack_floats, store_int

ALONE = 0  # in place of a team: one thread
_forks: list[int] = []  # this process is the child of one


def run(kernel: int, arguments: Any, items: int, *, parallel: bool = True) -> None:
    """Call the kernel at an address with (arguments, item) for each item.

    arguments: int64 array. parallel: whether the work is worth more than one thread.
    """
    _, start, work = team() if parallel and items > 1 else (1, ALONE, 0)
    _run(kernel, arguments, items, start, work)


def team() -> tuple[int, int, int]:
    """Threads, and what run_items calls to work on them: GOMP_parallel of torch's OpenMP, or ALONE
    where only one thread can work, and the work of a thread."""
    threads = torch.get_num_threads()  # this also tells OpenMP torch's number
    return threads, *((ALONE, 0) if _forks or threads < 2 else _find_team())


@functools.cache
def _find_team() -> tuple[int, int]:
    libraries = map(ctypes.CDLL, (None, torch._C.__file__))  # torch takes a preloaded one first
    found = next((one.GOMP_parallel for one in libraries if hasattr(one, "GOMP_parallel")), 0)
    if not found:
        warn("this torch has no GOMP_parallel: kvquant's CPU kernels run in one thread")

    def work(job, _):
        item = next_item(job + 24)
        while item < argument(job, 2):
            call_kernel(argument(job, 0), argument(job, 1), item)
            item = next_item(job + 24)

    return ctypes.cast(found, ctypes.c_void_p).value or ALONE, compile_kernel(work)


@numba.njit(nogil=True)
def run_items(kernel, arguments, items, start, work):
    """Call a kernel with each item; arguments: their address. start and work: of team."""
    if start != ALONE and items > 1:
        job = stack_floats(2 * 4)
        store_int(job, kernel)
        store_int(job + 8, arguments)
        store_int(job + 16, items)
        store_int(job + 24, 0)  # the next one
        call_team(start, work, job)
    else:
        for item in range(items):
            call_kernel(kernel, arguments, np.int64(item))


@compiled
def _run(kernel, arguments, items, start, work):
    run_items(kernel, arguments.ctypes.data, items, start, work)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forks.append(1))
