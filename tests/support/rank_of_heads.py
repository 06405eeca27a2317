"""One rank of several that share heads out: started by ranks.py; prints "right" at
the end."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from example_plan import example_plan
from ranks import join

from kvquant import CachePlan, PagedBatch, PagedKVCache

LAYERS, HEADS, RATIO, DIM = 2, 4, 2, 64
GIVEN: dict[str, Any] = {"num_pages": 40, "max_num_seqs": 3, "max_seq_len": 256, "page_size": 16}


def make_plan() -> CachePlan:
    """No two heads are alike."""
    plan = example_plan(LAYERS, HEADS, DIM)
    plan.tensors["k.offset"][:] = torch.randn(LAYERS, HEADS, DIM)
    plan.tensors["k.matrix"].mul_(torch.arange(1, HEADS + 1)[None, :, None, None])
    return plan


def check_cache(own: PagedKVCache, whole: PagedKVCache, heads: slice) -> None:
    """Decode by turns in both: a rank has its heads' rows, and its part of the outputs."""
    queries = slice(RATIO * heads.start, RATIO * heads.stop)
    batches = PagedBatch(own, 3, 128), PagedBatch(whole, 3, 128)

    def step(ids: list[str], counts: list[int], known: list[int] | None = None) -> None:
        tokens = sum(counts)
        for batch, mine, asking in zip(
            batches, (heads, slice(None)), (queries, slice(None)), strict=True
        ):
            torch.manual_seed(tokens)
            with batch.extend(ids, counts, known):
                for layer in range(LAYERS):
                    k, v = torch.randn(2, tokens, HEADS, DIM)[:, :, mine].contiguous()
                    q = torch.randn(len(ids), RATIO * HEADS, DIM)[:, asking].contiguous()
                    if tokens > len(ids):
                        batch.append(layer, k, v)
                    else:
                        found[batch] = batch.step(layer, q, k, v)

    found: dict[PagedBatch, Any] = {}
    prompt = list(range(50))
    for cache in (own, whole):
        assert cache.allocate("a", prompt) == 0
    step(["a"], [50], prompt)
    for cache in (own, whole):
        cache.fork("a", "b")
    for last in range(20):
        step(["a", "b"], [1, 1], [100 + last, 200 + last])
        check_parts(found[batches[0]], found[batches[1]], queries)
    present = {cache.allocate("c", prompt) for cache in (own, whole)}
    (first,) = present  # of the prefix, the same on every rank
    assert first > 0
    step(["c"], [50 - first], prompt[first:])
    for cache in (own, whole):
        cache.truncate("b", 30)
        cache.free("a")
    step(["b", "c"], [1, 1], [7, 8])
    check_parts(found[batches[0]], found[batches[1]], queries)


def check_parts(part: torch.Tensor, out: torch.Tensor, queries: slice) -> None:
    """A rank's outputs are those of its heads, and all ranks' together are all."""
    torch.testing.assert_close(part, out[:, queries], rtol=1e-5, atol=1e-5)
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    torch.testing.assert_close(torch.cat(parts, 1), out, rtol=1e-5, atol=1e-5)


def main(device: str, file: str, rank: int, world: int) -> None:
    join(device, file, rank, world)
    torch.manual_seed(0)
    share = HEADS // world
    heads = slice(rank * share, (rank + 1) * share)
    options: dict[str, Any] = {"sink_len": 4, "recent_len": 16, **GIVEN}
    for k_format in ("int4-g4", "int8", "int3"):
        kinds = {"k_format": k_format, **options}
        check_cache(
            PagedKVCache(LAYERS, share, DIM, **kinds),
            PagedKVCache(LAYERS, HEADS, DIM, **kinds),
            heads,
        )
    plan = make_plan()
    mine = plan.of_heads(range(heads.start, heads.stop))
    check_cache(
        PagedKVCache.from_plan(mine, **options), PagedKVCache.from_plan(plan, **options), heads
    )
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
