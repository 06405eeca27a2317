"""Rehearsals of a cache's calls on the meta device; see kernels/cuda/runtime/warmup.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import KVQuantError
from ..rows.basis import LayerBasis
from ..rows.format import RowFormat
from ..rows.kind import KeyValue
from ..rows.quantize import EXACT_DTYPES
from ..rows.variant import moved, names_of
from .layer import LayerCache

Cache = Any  # a KVCache, whose module imports this one


@dataclass(frozen=True)
class Calls:
    """Calls to rehearse.

    Attributes:
        make: makes an empty cache on the meta device.
        dtype: of new rows and queries (bfloat16 queries for float32).
        num_q_heads: of queries; None for likely_q_heads.
        prompts, steps: new tokens of each sequence in calls of append, and of step.
    """

    make: Callable[[], Cache]
    dtype: torch.dtype
    num_q_heads: int | None = None
    prompts: Sequence[int] = ()
    steps: Sequence[int] = (1,)

    def __call__(self) -> None:
        """Make all calls; impossible ones raise later, when they are made."""
        cache = self.make()
        step: Callable[..., object] = cache.step  # latents come with two queries
        q_heads = (self.num_q_heads,) if self.num_q_heads else likely_q_heads(cache)
        options: dict[str, Any] = {"sm_scale": 1.0}  # kernels do not depend on it
        if cache.step_variant is not None and not cache.latent:  # a step of latents refuses any
            options["variant"] = moved(cache.step_variant, "meta")
        kinds = {_kind(at): layer for layer, at in enumerate(cache.layers)}
        for layer in sorted(kinds.values()):
            at = cache.layers[layer]
            rows = cache.batch, cache.num_kv_heads
            for count in self.prompts:
                k, v = new_rows((*rows, count), at.k_format, at.v_format, self.dtype)
                with suppress(KVQuantError):
                    cache.append(layer, k, v)
            for count, num_q_heads in itertools.product(self.steps, q_heads):
                k, v = new_rows((*rows, count), at.k_format, at.v_format, self.dtype)
                axes = (count, num_q_heads) if count > 1 else (num_q_heads,)
                queries = [new_queries((cache.batch, *axes), x) for x in (k, v)]
                queries = queries if cache.latent else queries[:1]
                with suppress(KVQuantError):
                    step(layer, *queries, k, v, **options)


def likely_q_heads(cache: Cache) -> tuple[int, ...]:
    """Numbers of query heads to compile kernels for: the known one, or guesses."""
    known = cache.num_q_heads
    kind: KeyValue = cache.LAYER.row_kind
    return (known,) if known else kind.likely_q_heads(cache.num_kv_heads)


def new_rows(
    shape: tuple[int, ...], k_format: RowFormat, v_format: RowFormat, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (
        torch.empty(*shape, fmt.head_dim, dtype=dtype, device="meta")
        for fmt in (k_format, v_format)
    )
    return k, v


def new_queries(shape: tuple[int, ...], k: torch.Tensor) -> torch.Tensor:
    dtype = k.dtype if k.dtype in EXACT_DTYPES.values() else torch.bfloat16
    return torch.empty(*shape, k.shape[-1], dtype=dtype, device="meta")


def warm_up_first(cache: Cache, k: object) -> None:
    """Warm up a cache before its first append, of k, and for its steps."""
    if not isinstance(k, torch.Tensor) or k.ndim != 4:
        return
    prompts, steps = (k.shape[2],), cache.step_lens
    key = k.dtype, prompts, steps
    make = partial(cache.like, cache.batch, "meta")
    warm_up_cache(cache, key, [Calls(make, k.dtype, prompts=prompts, steps=steps)])


def warm_up_cache(cache: Cache, key: Hashable, calls: Sequence[Calls]) -> None:
    """Compile the kernels of known calls, so that a new cache's first append compiles nothing.

    cache has the batch, heads and devices of the caches in the calls. Each kind of cache rehearses
    calls of a key once in a process.
    """
    cache.is_cold = False
    kinds = tuple(dict.fromkeys(map(_kind, cache.layers)))
    heads = cache.num_kv_heads, cache.num_q_heads
    kind = type(cache), kinds, cache.batch, heads, names_of(cache.step_variant), key
    from ..kernels.cuda.runtime.warmup import warm_up

    for device in dict.fromkeys(cache.devices):
        warm_up(device, calls, kind)


def _kind(at: LayerCache) -> Hashable:
    return at.k_format, at.v_format, at.k_exact, at.sizes, present_in(at.basis)


def present_in(basis: LayerBasis | None) -> tuple[bool, ...]:
    """Which parts the bases of a layer have."""
    encodings = (side.encoding for side in basis or ())
    return tuple(x is not None for one in encodings for x in one)
