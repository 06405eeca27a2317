"""One rank of several, started by ranks.py; prints "right" at the end."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import join
from relative_l2 import relative_l2

from kvquant import AttentionVariant, ContextParallelCache, KVCache
from kvquant.errors import ConfigError, NonFiniteError, ShapeError, UnsupportedError

LAYERS, BATCH, HEADS, Q_HEADS, DIM, BLOCK = 2, 3, 2, 6, 64, 16


# on GPUs queries have 16 bit, and so have outputs: they are rounded twice by ranks, once by a cache
DTYPE, MOST_L2, MOST_LSE = torch.float32, 1e-5, 1e-5


def queries() -> torch.Tensor:
    return torch.randn(BATCH, Q_HEADS, DIM).to(DTYPE)


def both(room: int, world: int, **options: Any) -> tuple[ContextParallelCache, KVCache]:
    """A cache of all ranks, and one that has all tokens."""
    share = ContextParallelCache.tokens_of(room, 0, world, BLOCK)
    options["device"] = torch.get_default_device()
    own = KVCache(LAYERS, BATCH, HEADS, DIM, share, **options)
    whole = KVCache(LAYERS, BATCH, HEADS, DIM, room, **options)
    return ContextParallelCache(own, block_len=BLOCK), whole


def compare(spread: ContextParallelCache, whole: KVCache, variant: Any = None) -> None:
    for layer in range(LAYERS):
        q = queries()
        found, lse = spread.attend(layer, q, variant=variant, return_lse=True)
        out, expected = whole.attend(layer, q, variant=variant, return_lse=True)
        assert relative_l2(found, out) < MOST_L2
        assert torch.allclose(lse, expected, atol=MOST_LSE)
    assert spread.seq_lens.tolist() == whole.seq_lens.tolist()


def check_rows_of_any_format(world: int) -> None:
    """Prompts over several blocks, ragged lengths, ranks without tokens, single tokens, crops."""
    cap = AttentionVariant(soft_cap=5.0, sink_logits=torch.randn(Q_HEADS))
    every = {"sink_len": 4, "recent_len": 24}  # 16-bit rows: the same bits wherever they lie
    for fmt, options in (("bf16", every), ("int4-g4", {}), ("int8", {})):
        if fmt != "bf16":
            options = {"sink_len": 0, "recent_len": 0}
        spread, whole = both(400, world, k_format=fmt, v_format=fmt, **options)
        for lens in ([5, 1, 9], [60, 0, 100], [17, 3, 150]):  # at first only rank 0 has some
            k, v = torch.randn(2, LAYERS, BATCH, HEADS, max(lens), DIM)
            for layer in range(LAYERS):
                spread.append(layer, k[layer], v[layer], lens)
                whole.append(layer, k[layer], v[layer], lens)
            compare(spread, whole)
        for _ in range(2 * BLOCK + 1):
            k, v = torch.randn(2, LAYERS, BATCH, HEADS, 1, DIM)
            for layer in range(LAYERS):
                q = queries()
                found = spread.step(layer, q, k[layer], v[layer])
                assert relative_l2(found, whole.step(layer, q, k[layer], v[layer])) < MOST_L2
        compare(spread, whole, cap)
        for kept in ([100, 37, 200], 90, [5, 9, 3]):  # at last only rank 0 has some again
            spread.crop(kept)
            whole.crop(kept)
            compare(spread, whole)
        spread.reorder([2, 0, 0])
        whole.reorder([2, 0, 0])
        compare(spread, whole)
        spread.check()
        share = spread.cache.seq_lens.tolist()
        lens = whole.seq_lens.tolist()
        assert share == [spread.tokens_of(n, spread.rank, world, BLOCK) for n in lens]
        for empty in (partial(spread.crop, 0), spread.reset):
            empty()
            for layer in range(LAYERS):
                with pytest.raises(ShapeError, match=f"layer {layer} holds no tokens: append to"):
                    spread.attend(layer, queries())
        spread.cache.layers[0].longest = None  # as where a graph appends
        assert not spread.attend(0, queries()).any()
        assert spread.seq_lens.tolist() == spread.cache.seq_lens.tolist() == [0] * BATCH


def made(room: int, **options: Any) -> KVCache:
    return KVCache(1, 1, 1, 64, room, device=torch.get_default_device(), **options)


def check_faults(rank: int, world: int) -> None:
    """All ranks raise what one of them finds."""
    with pytest.raises(ConfigError, match="alike"):
        ContextParallelCache(made(64 + rank))
    filled = made(64)
    if rank == 1:
        filled.append(0, *torch.randn(2, 1, 1, 1, 64))
    with pytest.raises(ConfigError, match="holds tokens"):
        ContextParallelCache(filled)
    spread, _ = both(400, world)
    if rank == 1:
        spread.cache.bad_rows += 1
    with pytest.raises(NonFiniteError if rank == 1 else ConfigError, match=r"rank 1|rows"):
        spread.check()
    spread.append(0, *torch.randn(2, BATCH, HEADS, 1 + rank, DIM))
    with pytest.raises((ConfigError, ValueError), match=r"other numbers|different lengths"):
        spread.check()
    spread, _ = both(400, world)
    k, v = torch.randn(2, BATCH, HEADS, 1, DIM)
    spread.append(0, k, v)  # and not to layer 1
    assert spread.seq_lens.tolist() == [0] * BATCH
    spread.crop(spread.seq_lens)
    spread.check()
    huge = ContextParallelCache(made(64), block_len=(1 << 31) - 1)  # all on rank 0
    for length in (1, 2):
        huge.step(0, torch.randn(1, 1, 64).to(DTYPE), *torch.randn(2, 1, 1, 1, 64))
        assert huge.cache.seq_lens.tolist() == [0 if rank else length]
    windows = made(64, windows=[16])
    with pytest.raises(UnsupportedError, match="windows"):
        ContextParallelCache(windows)
    apart = KVCache(2, 1, 1, 64, 64, device=["cpu", "cpu:0"])
    with pytest.raises(UnsupportedError, match="lies on several devices"):
        ContextParallelCache(apart)


def check_graphs(world: int) -> None:
    """A CUDA graph's steps, through one another's memory and by an all-gather."""
    for exchanges in (True, False):
        spread, whole = both(400, world)
        assert spread._exchange is not None, "GPUs of one host map one another's memory"
        if not exchanges:
            spread._exchange = None
        k, v = torch.randn(2, LAYERS, BATCH, HEADS, 70, DIM)
        for layer in range(LAYERS):
            spread.append(layer, k[layer], v[layer])
            whole.append(layer, k[layer], v[layer])
        q, (k, v) = queries(), torch.randn(2, BATCH, HEADS, 1, DIM)

        def steps(cache: Any, q: Any = q, k: Any = k, v: Any = v) -> list[torch.Tensor]:
            return [cache.step(layer, q, k, v) for layer in range(LAYERS)]

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for cache in (spread, whole):
                steps(cache)  # compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                found = steps(spread)
        for _ in range(3 * BLOCK):
            for one in (q, k, v):
                one.copy_(torch.randn(one.shape))
            graph.replay()
            for one, out in zip(found, steps(whole), strict=True):
                assert relative_l2(one, out) < MOST_L2
                parts = [torch.empty_like(one) for _ in range(world)]
                dist.all_gather(parts, one)
                assert all(torch.equal(part, one) for part in parts), "ranks have other outputs"


def main(device: str, file: str, rank: int, world: int) -> None:
    global DTYPE, MOST_L2, MOST_LSE
    join(device, file, rank, world)
    torch.manual_seed(0)  # all ranks get the same tokens
    if device == "cuda":
        DTYPE, MOST_L2, MOST_LSE = torch.bfloat16, 3 * 2**-9, 2**-8
        check_graphs(world)
    check_rows_of_any_format(world)
    if world > 1:
        check_faults(rank, world)
    dist.barrier()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
