"""Plans for the tests of paged caches, and a KVCache beside one."""

from __future__ import annotations

from typing import Any

import torch
from example_plan import example_plan
from paged_cases import DIM, HEADS, PAGE, RECENT, SINKS

from kvquant import KVCache
from kvquant.io.plan import CachePlan
from kvquant.paged.cache import PagedKVCache
from kvquant.rows.quantize import feedback_matrix

PLAN_LAYERS = 3  # the last one is kept in 16 bit


def make_plan(basis: str, *, feedback: bool = False) -> CachePlan:
    """A plan of 3 layers, INT4 and INT8 and 16 bit, with one kind of basis for K and V."""
    made = example_plan(PLAN_LAYERS, HEADS, DIM)
    torch.manual_seed(0)
    facts, tensors = dict(made.facts), dict(made.tensors)
    chosen = {"basis": basis, "rounding": "feedback" if feedback else "nearest"}
    facts["layers"] = [
        entry if entry["kept"] else entry | {side: entry[side] | chosen for side in "kv"}
        for entry in facts["layers"]
    ]
    for side in "kv":
        shape = PLAN_LAYERS, HEADS, DIM
        tensors[f"{side}.offset"] = torch.randn(shape)
        tensors[f"{side}.offset"][-1] = 0  # of the layer that is kept
        matrix = torch.eye(DIM) + 0.03 * torch.randn(*shape, DIM)
        tensors[f"{side}.matrix"] = matrix
        tensors[f"{side}.feedback"] = feedback_matrix((matrix @ matrix.mT).double()).float()
    return CachePlan(facts, tensors)


def make_paged(plan: CachePlan, **options: Any) -> PagedKVCache:
    """A small cache from a plan: 12 pages of 16 tokens, 4 sequence slots, 3 sinks, 5 recent."""
    given = {
        "max_num_seqs": 4,
        "max_seq_len": 100,
        "page_size": PAGE,
        "sink_len": SINKS,
        "recent_len": RECENT,
    }
    return PagedKVCache.from_plan(plan, options.pop("num_pages", 12), **(given | options))


def make_contiguous(plan: CachePlan, **options: Any) -> KVCache:
    """A KVCache of one sequence from a plan."""
    return KVCache.from_plan(plan, 1, 100, **({"sink_len": SINKS, "recent_len": RECENT} | options))


def packed_rows(cache: PagedKVCache, name: str, layer: int) -> list[torch.Tensor]:
    """The bytes of K's and V's packed rows, [num_kv_heads, packed tokens, row_bytes]."""
    table = list(cache.state.pool.block_table(name))
    length = int(cache.state.packed_lens[cache.state.seq_slot(name)])
    rows = cache.rows.layers[layer]
    return [
        pages[table].transpose(0, 1).flatten(1, 2)[:, :length]
        for pages in (rows.k_pages, rows.v_pages)
    ]


PLANS = {
    "offset": make_plan("none"),
    "clip feedback": make_plan("none", feedback=True),
    "matrix": make_plan("matrix"),
    "matrix clip feedback": make_plan("matrix", feedback=True),
}
