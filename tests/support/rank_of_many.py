"""One rank of several: `python rank_of_many.py FILE RANK WORLD_SIZE`; prints "right" at the end."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from relative_l2 import relative_l2

from kvquant import AttentionVariant, ContextParallelCache, KVCache
from kvquant.errors import ConfigError, NonFiniteError, ShapeError, UnsupportedError

LAYERS, BATCH, HEADS, Q_HEADS, DIM, BLOCK = 2, 3, 2, 6, 64, 16


def both(room: int, world: int, **options: Any) -> tuple[ContextParallelCache, KVCache]:
    """A cache of all ranks, and one that has all tokens."""
    share = ContextParallelCache.tokens_of(room, 0, world, BLOCK)
    own = KVCache(LAYERS, BATCH, HEADS, DIM, share, **options)
    whole = KVCache(LAYERS, BATCH, HEADS, DIM, room, **options)
    return ContextParallelCache(own, block_len=BLOCK), whole


def compare(spread: ContextParallelCache, whole: KVCache, variant: Any = None) -> None:
    for layer in range(LAYERS):
        q = torch.randn(BATCH, Q_HEADS, DIM)
        found, lse = spread.attend(layer, q, variant=variant, return_lse=True)
        out, expected = whole.attend(layer, q, variant=variant, return_lse=True)
        assert relative_l2(found, out) < 1e-5
        assert torch.allclose(lse, expected, atol=1e-5)
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
                q = torch.randn(BATCH, Q_HEADS, DIM)
                found = spread.step(layer, q, k[layer], v[layer])
                assert relative_l2(found, whole.step(layer, q, k[layer], v[layer])) < 1e-5
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
                    spread.attend(layer, torch.randn(BATCH, Q_HEADS, DIM))
        spread.cache.layers[0].longest = None  # as where a graph appends
        assert not spread.attend(0, torch.randn(BATCH, Q_HEADS, DIM)).any()
        assert spread.seq_lens.tolist() == spread.cache.seq_lens.tolist() == [0] * BATCH


def check_faults(rank: int, world: int) -> None:
    """All ranks raise what one of them finds."""
    with pytest.raises(ConfigError, match="alike"):
        ContextParallelCache(KVCache(1, 1, 1, 64, 64 + rank))
    filled = KVCache(1, 1, 1, 64, 64)
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
    huge = ContextParallelCache(KVCache(1, 1, 1, 64, 64), block_len=(1 << 31) - 1)  # all on rank 0
    for length in (1, 2):
        huge.step(0, torch.randn(1, 1, 64), *torch.randn(2, 1, 1, 1, 64))
        assert huge.cache.seq_lens.tolist() == [0 if rank else length]
    windows = KVCache(1, 1, 1, 64, 64, windows=[16])
    with pytest.raises(UnsupportedError, match="windows"):
        ContextParallelCache(windows)
    apart = KVCache(2, 1, 1, 64, 64, device=["cpu", "cpu:0"])
    with pytest.raises(UnsupportedError, match="lies on several devices"):
        ContextParallelCache(apart)


def main(file: str, rank: int, world: int) -> None:
    torch.manual_seed(0)  # all ranks get the same tokens
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    check_rows_of_any_format(world)
    if world > 1:
        check_faults(rank, world)
    dist.barrier()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
