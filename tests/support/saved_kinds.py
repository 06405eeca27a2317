"""Every kind of file that kvquant writes and reads: two contents of each, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from example_plan import example_plan
from paged_cases import begin, make, values

from kvquant import KVCache, PagedKVCache, load_cache, load_sequences, save_cache, save_sequences
from kvquant.io.export import RawFile, export_cache
from kvquant.io.plan import CachePlan
from kvquant.paged.batch import PagedBatch


class Kind(NamedTuple):
    """A kind of file.

    Attributes:
        save: content 0 or 1 to a path.
        load: what save wrote.
        shown: the whole content of what was loaded, to be compared.
    """

    save: Callable[[int, Path], Any]
    load: Callable[[Path], Any]
    shown: Callable[[Any], Any]


@cache
def _cache(seed: int) -> KVCache:
    cache = KVCache(2, 2, 1, 64, 16, sink_len=1, recent_len=2, v_format="int8")
    generator = torch.Generator().manual_seed(seed)
    for layer in range(2):
        k, v = torch.randn(2, 2, 1, 6, 64, generator=generator)
        cache.append(layer, k, v, [6, 4])
    return cache


@cache
def _plan(seed: int) -> CachePlan:
    plan = example_plan(1, 1)
    return CachePlan(plan.facts, {**plan.tensors, "k.offset": plan.tensors["k.offset"] + seed})


@cache
def _pages(seed: int) -> PagedKVCache:
    torch.manual_seed(seed)
    batch = PagedBatch(make(), 4, 100)
    begin(batch, "a", 30, range(30))
    return batch.cache


def contents(cache: KVCache) -> dict[str, Any]:
    """All that a cache holds: counters, formats, and the rows in use in their order."""
    held: dict[str, Any] = {
        "sizes": (cache.num_kv_heads, cache.head_dim, cache.sink_len, cache.recent_len),
        "exact_format": cache.exact_format,
        "start_positions": cache.start_positions.tolist(),
    }
    for i, layer in enumerate(cache.layers):
        held[f"{i}.formats"] = (layer.k_format, layer.v_format)
        held[f"{i}.lens"] = (layer.seq_lens.tolist(), layer.packed_lens.tolist())
        segments = [s for s in layer.segments_in_order() if s.seq_lens.any()]
        for number, segment in enumerate(segments):
            for b, n in enumerate(segment.seq_lens.tolist()):
                start = 0 if segment.starts is None else int(segment.starts[b])
                slots = torch.arange(start, start + n) % max(segment.capacity, 1)
                for side, rows in (("k", segment.k_rows), ("v", segment.v_rows)):
                    held[f"{i}.{number}.{b}.{side}"] = rows[b][:, slots].numpy().tobytes()
    return held


def _shown_cache(cache: KVCache) -> Any:
    rows = [cache.dequantized(layer) for layer in range(cache.num_layers)]
    return cache.seq_lens.tolist(), [[side.tolist() for side in pair] for pair in rows]


def _load_pages(path: Path) -> PagedKVCache:
    paged = make()
    load_sequences(paged, path)
    return paged


def load_raw(path: Path) -> tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]:
    """The tokens in use and K and V of all layers."""
    with RawFile(path) as file:
        return file.seq_lens.tolist(), [file.layer(i) for i in range(file.num_layers)]


KINDS = {
    "cache": Kind(lambda seed, path: save_cache(_cache(seed), path), load_cache, _shown_cache),
    "pages": Kind(
        lambda seed, path: save_sequences(_pages(seed), ["a"], path),
        _load_pages,
        lambda paged: [x.tolist() for x in values(paged, "a")],
    ),
    "plan": Kind(
        lambda seed, path: _plan(seed).save(path),
        CachePlan.load,
        lambda plan: {name: tensor.tolist() for name, tensor in plan.tensors.items()},
    ),
    "raw": Kind(
        lambda seed, path: export_cache(_cache(seed), path, "bf16"),
        load_raw,
        lambda raw: (raw[0], [[x.tolist() for x in pair] for pair in raw[1]]),
    ),
}
