"""Compile the kernels of a batch's steps early; see kernels/cuda/runtime/warmup.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..cache.warmup import new_queries, new_rows, present_in
from ..errors import KVQuantError
from ..rows.kind import LATENT
from ..rows.rotation import Rope
from ..rows.variant import AttentionVariant, moved
from .cache import PagedKVCache

STEPS_BETWEEN = 8  # totals of ragged queries to rehearse from one to twice that
Batch = Any  # a PagedBatch or a LatentPagedBatch, whose modules import this one


@dataclass(frozen=True)
class BatchCalls:
    """Calls of a batch to rehearse: rows of some tokens, and steps of a token a sequence.

    Attributes:
        kind: the class of the batch.
        cache: its cache, or one like it.
        dtype: of new rows and queries (bfloat16 queries for float32).
        num_tokens: in the first call of append.
        batches: sequences of steps.
        rotary_dim: of K's Rope, and whether it is interleaved; None without.
        num_q_heads: of queries; None for likely ones.
        most_ragged: tokens of a step with ragged queries, at most; 0 without. The mean number
            of queries of a sequence decides their kernels.
        shared_prefix: of the batch. Unless False, steps that read a prefix once are included:
            at most three kernels for a pair of formats and one that combines.
        variant: of steps, as PagedBatch.step_variant.
    """

    kind: Callable[..., Batch]
    cache: PagedKVCache
    dtype: torch.dtype
    num_tokens: int
    batches: tuple[int, ...]
    rotary_dim: tuple[int, bool] | None = None
    num_q_heads: int | None = None
    most_ragged: int = 0
    shared_prefix: bool | None = False
    variant: AttentionVariant | None = None

    def __call__(self) -> None:
        """Make all calls; impossible ones raise later, when they are made."""
        most = max(self.batches)
        cache = _like(self.cache, most)
        batch = self.kind(cache, most, max(self.num_tokens, self.most_ragged, most))
        for name in range(most):
            cache.allocate(name)
        prompt = self.num_tokens, 0, 0, False
        plain = itertools.product(self.batches, self._q_heads((1,)), (0,), (False,))
        ragged = itertools.product(self._totals(), self._q_heads((1,)), (0,), (True,))
        calls = prompt, *plain, *ragged, *self._sharing(batch)
        for count, heads, members, is_ragged in calls:
            ids = range(min(count, most))
            with _failing(cache, ids), batch.extend(ids):
                for layer, at in enumerate(cache.rows.layers):
                    shape = count, cache.num_kv_heads
                    k, v = new_rows(shape, at.k_format, at.v_format, self.dtype)
                    if heads:
                        queries = [new_queries((count, heads), x) for x in (k, v)]
                        queries = queries if cache.row_kind is LATENT else queries[:1]
                        options: dict[str, Any] = {"sm_scale": 1.0, **self._rope(count)}
                        options |= {"q_indptr": batch.q_indptr} if is_ragged else {}
                        if self.variant is not None and cache.row_kind is not LATENT:
                            options["variant"] = moved(self.variant, "meta")
                        # as if so many sequences began with the same pages
                        batch._num_members = members
                        batch.step(layer, *queries, k, v, **options)  # kernels are of any scale
                    else:
                        batch.append(layer, k, v, **self._rope(count))

    def _totals(self) -> Iterator[int]:
        """Totals of ragged queries, close enough to meet nearly every kernel."""
        total = 1
        while total < self.most_ragged:
            yield total
            total += max(total // STEPS_BETWEEN, 1)
        if self.most_ragged:
            yield self.most_ragged

    def _sharing(self, batch: Batch) -> Iterator[tuple[int, int, int, bool]]:
        """Steps that read a prefix once: sequences, query heads, and members.

        The kernel depends on all members' queries on a KV head, not on the prefix. Each serves from
        some number to at least its double, so doubling numbers find all.
        """
        if self.shared_prefix is False:
            return
        kv_heads, split = self.cache.num_kv_heads, self.cache.state.split
        tokens = self.cache.state.tables.shape[1] * split.page_size
        q_heads = self._q_heads((1, 2, 4, 8))
        for most in self.batches:
            seen: set[int] = set()
            members = [1 << i for i in range(1, most.bit_length()) if 1 << i < most]
            for count, heads in itertools.product((*members, most), q_heads):
                is_read = self.shared_prefix or batch.pays(most, count, tokens, heads // kv_heads)
                if is_read and count * heads not in seen:
                    seen.add(count * heads)
                    yield most, heads, count, False

    def _q_heads(self, ratios: Sequence[int]) -> tuple[int, ...]:
        """Query heads of steps: the given ones, or likely ones, for all their kernels."""
        if self.num_q_heads:
            return (self.num_q_heads,)
        return self.cache.row_kind.likely_q_heads(self.cache.num_kv_heads, ratios)

    def _rope(self, count: int) -> dict[str, Rope]:
        if self.rotary_dim is None:
            return {}
        dim, interleaved = self.rotary_dim
        cos, sin = torch.empty(2, count, dim // 2, dtype=torch.float32, device="meta")
        return {"rope": Rope(cos, sin, interleaved)}


@contextmanager
def _failing(cache: PagedKVCache, ids: Iterable[int]) -> Iterator[None]:
    """Begin sequences anew if their step is not possible."""
    try:
        yield
    except KVQuantError:
        for name in ids:
            cache.free(name)
            cache.allocate(name)


def likely_batches(batch: Batch, num_ids: int) -> tuple[int, ...]:
    """Sequences of steps to compile for, with those of the first step.

    With latents fewer sequences have more parts to combine; numbers grow by a fourth, so that no
    kernel, whose parts double, is missed.
    """
    most = batch.max_batch
    found = {num_ids, most}
    while batch.cache.row_kind is LATENT and most > 1:
        most = min(most - 1, -(-4 * most // 5))
        found.add(most)
    return tuple(sorted(found))


def warm_up_batch(batch: Batch, k: object, rope: Rope | None, num_ids: int) -> None:
    """Compile what a batch on CUDA needs before its first append, of k and rope."""
    if isinstance(k, torch.Tensor) and k.ndim == 3 and len(k) <= batch.max_tokens:
        rotary_dim = None if rope is None else (2 * rope.cos.shape[-1], rope.interleaved)
        from ..kernels.cuda.runtime.warmup import warm_up

        batches = likely_batches(batch, max(num_ids, 1))
        told = type(batch), batch.cache, k.dtype, len(k), batches, rotary_dim
        shared, variant = batch.shared_prefix, batch.step_variant
        calls = BatchCalls(*told, shared_prefix=shared, variant=variant)
        warm_up(batch.cache.device, [calls])


def warm_up_ragged(batch: Batch, q: torch.Tensor, variant: AttentionVariant | None) -> None:
    """Compile the kernels of steps with ragged queries like q and this variant."""
    from ..kernels.cuda.runtime.warmup import warm_up

    told = type(batch), batch.cache, q.dtype, 1, (batch.max_batch,)
    most = batch.max_tokens
    calls = BatchCalls(*told, num_q_heads=q.shape[1], most_ragged=most, variant=variant)
    warm_up(batch.cache.device, [calls])


def _like(cache: PagedKVCache, max_num_seqs: int) -> PagedKVCache:
    """An empty cache on the meta device, with each kind of layer once and few pages."""
    kinds: dict[Hashable, int] = {}
    for layer, at in enumerate(cache.rows.layers):
        window = cache.windows[layer]
        kinds.setdefault((at.k_format, at.v_format, window, present_in(at.basis)), layer)
    num_pages = (len(kinds) + 4) * max_num_seqs
    return cache.like(list(kinds.values()), num_pages, max_num_seqs, "meta")
