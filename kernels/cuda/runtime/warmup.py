"""Compile what calls will launch before they do, all at a time.

The calls say by themselves which kernels they need: they are rehearsed (kvquant/rehearsal.py) on
tensors without memory. The warmup.py of cache, paged and engine have the calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable

import torch

from kvquant.rehearsal import rehearse

from .compile import missing
from .compile_pool import compile_all
from .launch import GPU, gpu_of
from .spec import Spec

log = logging.getLogger("kvquant")
_warm: set[Hashable] = set()  # devices and kinds whose kernels were compiled in this process


def kernels_of(calls: Iterable[Callable[[], None]], gpu: GPU) -> list[Spec]:
    """The specs of the kernels that calls, such as cache.warmup.Calls, would launch on a GPU."""
    with rehearse(gpu) as rehearsal:
        for call in calls:
            call()
    return list(rehearsal.kernels)


def warm_up(
    device: torch.device, calls: Iterable[Callable[[], None]], kind: Hashable = None
) -> None:
    """Compile the kernels that calls will launch and that are not on the disk; the log says so.

    kind: all that the kernels of the calls depend on. A process rehearses the calls of a kind once;
    with None always. Nothing to do for the CPU.
    """
    if device.type != "cuda" or (kind is not None and (device, kind) in _warm):
        return
    from kvquant.text import progress

    gpu = gpu_of(torch.cuda.current_device() if device.index is None else device.index)
    todo = missing(kernels_of(calls, gpu), gpu.arch)
    if todo:
        log.warning("kvquant: compiling %d kernels for %s, once", len(todo), gpu.arch)
        with progress(len(todo), "kvquant: compiling kernels", line=log.info) as update:
            compile_all(todo, gpu.arch, lambda spec: update(1))
    _warm.add((device, kind))
