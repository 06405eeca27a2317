"""What the tests of paged caches share: a small cache, steps, and the bytes of everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import cuda_cases
import torch

from kvquant import LatentPagedBatch, LatentPagedKVCache
from kvquant.paged.batch import PagedBatch
from kvquant.paged.cache import PagedKVCache
from kvquant.paged.pool import SequenceId

LAYERS, HEADS, DIM, PAGE, SINKS, RECENT = 2, 2, 64, 16, 3, 5
Batch = PagedBatch | LatentPagedBatch


def make(**options: Any) -> PagedKVCache:
    """A small cache: 2 layers, 12 pages of 16 tokens, 4 sequence slots, 3 sinks, 5 recent."""
    options = {
        "max_num_seqs": 4,
        "max_seq_len": 100,
        "page_size": PAGE,
        "k_format": "int4-g4",
        "v_format": "int8",
        "sink_len": SINKS,
        "recent_len": RECENT,
        **options,
    }
    num_layers, num_pages = options.pop("num_layers", LAYERS), options.pop("num_pages", 12)
    return PagedKVCache(num_layers, HEADS, options.pop("head_dim", DIM), num_pages, **options)


def new_rows(count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """K and V of new tokens: [2, count, HEADS, DIM], bfloat16."""
    return torch.randn(2, count, HEADS, DIM).bfloat16().to(device)


def rows_of(cache: PagedKVCache, count: int) -> torch.Tensor | list[torch.Tensor]:
    """New tokens of a cache: as new_rows, or latents and RoPE parts."""
    if not isinstance(cache, LatentPagedKVCache):
        return new_rows(count, cache.device)
    dims = cache.formats[0].latent_dim, cache.formats[0].rope_dim
    return [torch.randn(count, 1, dim).bfloat16().to(cache.device) for dim in dims]


def extend(
    batch: Batch,
    ids: Sequence[SequenceId],
    counts: int | Sequence[int] = 1,
    tokens: Sequence[int] | None = None,
    rows: Any = None,
) -> Any:
    """One step, the same rows in every layer; return them."""
    with batch.extend(ids, counts, tokens):
        total = counts * len(ids) if isinstance(counts, int) else sum(counts)
        rows = rows_of(batch.cache, total) if rows is None else rows
        for layer in range(batch.cache.num_layers):
            batch.append(layer, *rows)
    return rows


def begin(batch: Batch, name: SequenceId, count: int, tokens: Sequence[int] | None = None) -> Any:
    """A new sequence of so many tokens, none of them present."""
    assert batch.cache.allocate(name) == 0
    return extend(batch, [name], [count], tokens)


def captured(
    batch: PagedBatch, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor
) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """One decode step of all layers as a graph, captured while the step has no sequences.

    Args:
        batch: on a GPU.
        k: [places, HEADS, DIM]: read anew by every replay, in all layers.
        v: likewise.
        q: [places, num_q_heads, DIM].

    Returns:
        The graph, and the output of each layer, which replays write.
    """

    def layers() -> list[torch.Tensor]:
        outs = []
        for layer in range(batch.cache.num_layers):
            batch.append(layer, k, v)
            out = batch.attend(layer, q)
            assert isinstance(out, torch.Tensor)
            outs.append(out)
        return outs

    with batch.extend([]):
        return cuda_cases.captured(layers)


def changing_steps(caches: Sequence[Any], count: int) -> Iterator[list[str]]:
    """The ids of so many steps of sequences "a" to "d", of which some end and others are forked."""
    live = list("abcd")
    for step in range(count):
        if step % 9 == 4:  # the shared last page is copied between replays
            for cache in caches:
                cache.free(live[0])
                cache.fork(live[1], f"{step}")
            live = [*live[1:], f"{step}"]
        yield live[step % 3 :]


def values(cache: PagedKVCache, name: SequenceId) -> list[torch.Tensor]:
    """K and V of a sequence in all layers."""
    return [x for layer in range(cache.num_layers) for x in cache.dequantized(name, layer)]


def same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def poison(cache: PagedKVCache) -> None:
    """Free pages, in the layers of each group, and free sequence slots hold what decodes to NaN."""
    state = cache.state
    free = [(of or state.pool)._free for of in state.groups]
    sides = [(group.sides, pages) for group, pages in zip(cache.rows.groups, free, strict=True)]
    for stacks, units in (*sides, (cache.rows.exact, state._free_seq_slots)):
        for stack in (stack for side in stacks for stack in side.stacks):
            stack[:, units] = 0xFF


def seen(cache: PagedKVCache) -> object:
    """All that a refused call must leave as it was."""
    state = cache.state
    each = [(i, cache.length(i), state.pool.block_table(i), state.tokens(i)) for i in cache.ids]
    stacks = [stack for side in (*cache.rows.pages, *cache.rows.exact) for stack in side.stacks]
    sums = [int(stack.long().sum()) for stack in stacks]
    return each, sums, cache.num_free_pages, cache.num_free_seq_slots, cache.swapped_ids


class SlowEvent:
    """An event of a copy that ends when the test says so."""

    def __init__(self) -> None:
        self.ended = False

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.ended = True
