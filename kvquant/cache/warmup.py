"""Compile what a cache will launch before it does, all at a time.

A kernel takes seconds to compile, and one after another would be compiled where it is first needed.
Which ones will be needed is told by the calls themselves, rehearsed (kvquant/rehearsal.py) on a
cache of the same shape without memory: there is no list that could differ from them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..errors import KVQuantError
from ..rehearsal import rehearse
from ..rows.quantize import EXACT_DTYPES
from .layer import LayerCache

if TYPE_CHECKING:
    from ..kernels.cuda.runtime.launch import GPU
    from ..kernels.cuda.runtime.spec import Spec
    from .contiguous import KVCache

log = logging.getLogger("kvquant")
_warm: set[Hashable] = set()  # caches whose kernels were compiled in this process


def kernels_of(
    make: Callable[[], KVCache],
    gpu: GPU,
    dtype: torch.dtype,
    num_q_heads: int | None = None,
    *,
    prompts: Iterable[int] = (),
    steps: Iterable[int] = (1,),
) -> list[Spec]:
    """The kernels that calls of a cache would launch.

    Args:
        make: makes an empty cache on the meta device.
        gpu: where the real one lies.
        dtype: of new rows; queries have it too, or bfloat16 where it is float32.
        num_q_heads: of queries; up to 8 on a KV head when None.
        prompts: new tokens of each sequence in calls of KVCache.append.
        steps: the same of KVCache.step.

    Returns:
        Their specs, without those of calls that are not possible.
    """
    with rehearse(gpu) as rehearsal:
        cache = make()
        num_q_heads = num_q_heads or cache.num_kv_heads
        kinds = {_kind(at): layer for layer, at in enumerate(cache.layers)}
        for layer in sorted(kinds.values()):
            for count in prompts:
                with suppress(KVQuantError):  # the call itself will say why
                    cache.append(layer, *_new_rows(cache, layer, dtype, count))
            for count in steps:
                of_query = dtype if dtype in EXACT_DTYPES.values() else torch.bfloat16
                axes = (count, num_q_heads) if count > 1 else (num_q_heads,)
                shape = cache.batch, *axes, cache.layers[layer].k_format.head_dim
                q = torch.empty(shape, dtype=of_query, device="meta")
                with suppress(KVQuantError):
                    cache.step(layer, q, *_new_rows(cache, layer, dtype, count))
    return list(rehearsal.kernels)


def compile_kernels(specs: Iterable[Spec], arch: str) -> None:
    """Compile kernels that are not on the disk; a line of the log says so, since it takes time."""
    from ..kernels.cuda.runtime.compile import compile_all, missing

    todo = missing(specs, arch)
    if todo:
        log.warning("compiling %d kernels for %s, once; this takes seconds", len(todo), arch)
        compile_all(todo, arch)


def warm_up(cache: KVCache, k: object) -> None:
    """Compile what a cache on CUDA that was not appended to yet will need: for these new rows, and
    for steps. A line of the log says so where that takes time.

    Args:
        cache: on CUDA.
        k: of the first append; what does not fit is left to the append to refuse.
    """
    from ..kernels.cuda.runtime.launch import gpu_of

    if not isinstance(k, torch.Tensor) or k.ndim != 4:
        return
    kinds = tuple(dict.fromkeys(map(_kind, cache.layers)))
    kind = kinds, cache.batch, cache.num_kv_heads, k.dtype, k.shape[2], cache.device
    if kind in _warm:
        return
    gpu = gpu_of(cache.bad_rows.get_device())
    make = partial(cache.like, cache.batch, "meta")
    compile_kernels(kernels_of(make, gpu, k.dtype, prompts=(k.shape[2],)), gpu.arch)
    _warm.add(kind)


def _new_rows(
    cache: KVCache, layer: int, dtype: torch.dtype, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of so many new tokens of each sequence."""
    at = cache.layers[layer]
    shape = cache.batch, cache.num_kv_heads, count
    k, v = (
        torch.empty(*shape, fmt.head_dim, dtype=dtype, device="meta")
        for fmt in (at.k_format, at.v_format)
    )
    return k, v


def _kind(at: LayerCache) -> Hashable:
    """What the kernels of a layer depend on."""
    encodings = (side.encoding for side in at.basis or ())
    present = tuple(x is not None and x is not False for one in encodings for x in one)
    return at.k_format, at.v_format, at.k_exact, at.sizes, present
