"""Compile what calls will launch before they do, all at a time.

A kernel takes seconds to compile, and one after another would be compiled where it is first needed.
Which ones will be needed the calls themselves say, rehearsed (kvquant/rehearsal.py) on tensors of
the same shapes without memory: there is no list that could differ from them. The calls of caches
are in kvquant/cache/warmup.py, of steps in kvquant/paged/warmup.py, of an engine's in
kvquant/engine/warmup.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from kvquant.rehearsal import rehearse

from .compile import missing
from .compile_pool import compile_all
from .launch import GPU, gpu_of
from .spec import Spec

log = logging.getLogger("kvquant")


def kernels_of(calls: Iterable[Callable[[], None]], gpu: GPU) -> list[Spec]:
    """The specs of the kernels that calls, such as cache.warmup.Calls, would launch on a GPU."""
    with rehearse(gpu) as rehearsal:
        for call in calls:
            call()
    return list(rehearsal.kernels)


def warm_up(device: torch.device, calls: Iterable[Callable[[], None]]) -> None:
    """Compile the kernels that calls will launch and that are not on the disk, all at a time.

    A line of the log says so. A bar shows the progress on a terminal, and further lines of the log
    elsewhere, at level INFO. For the CPU this function does nothing.
    """
    if device.type != "cuda":
        return
    from kvquant.text import progress

    gpu = gpu_of(torch.cuda.current_device() if device.index is None else device.index)
    todo = missing(kernels_of(calls, gpu), gpu.arch)
    if todo:
        log.warning("kvquant: compiling %d kernels for %s, once", len(todo), gpu.arch)
        with progress(len(todo), "kvquant: compiling kernels", line=log.info) as update:
            compile_all(todo, gpu.arch, lambda spec: update(1))
