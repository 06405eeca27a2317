"""Microseconds of a layer's step on a long sequence, on one GPU and spread over several.

    torchrun --nproc-per-node 2 tests/benchmarks/bench_ranks.py        1 M tokens, NCCL

32 query heads on 8 KV heads, head_dim 128. Outputs of both are compared first: without sinks and
recent tokens they have the same rows. Then a CUDA graph of a step, append and attend, is replayed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import torch
import torch.distributed as dist

from kvquant import ContextParallelCache, KVCache

Q_HEADS, HEADS, DIM, CHUNK, STEPS = 32, 8, 128, 16384, 10


def captured(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of STEPS steps, after one without."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            step()
    return graph


def take_time(graph: torch.cuda.CUDAGraph, rounds: int) -> float:
    """Microseconds of a step, the median of replays that all ranks begin together."""
    found = []
    for _ in range(rounds):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * start.elapsed_time(end) / STEPS)
    return float(statistics.median(found[1:]))


@click.command()
@click.option("--tokens", multiple=True, type=int, default=(1 << 17, 1 << 20), show_default=True)
@click.option("--format", "fmt", default="int4-g4", show_default=True)
@click.option("--rounds", default=8, show_default=True)
def main(tokens: tuple[int, ...], fmt: str, rounds: int) -> None:
    """Measure and print."""
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    for count in tokens:
        room = count + 4096
        options: Any = {"k_format": fmt, "v_format": fmt, "sink_len": 0, "recent_len": 0}
        shape = 1, 1, HEADS, DIM
        share = ContextParallelCache.tokens_of(room, 0, world)
        spread = ContextParallelCache(KVCache(*shape, share, device=device, **options))
        whole = KVCache(*shape, room, device=device, **options)
        for _ in range(0, count, CHUNK):
            k, v = torch.randn(2, 1, HEADS, CHUNK, DIM, device=device).bfloat16()
            dist.broadcast(k, 0)
            dist.broadcast(v, 0)
            spread.append(0, k, v)
            whole.append(0, k, v)
        q = torch.randn(1, Q_HEADS, DIM, device=device).bfloat16()
        k, v = torch.randn(2, 1, HEADS, 1, DIM, device=device).bfloat16()
        for x in (q, k, v):
            dist.broadcast(x, 0)
        found, expected = spread.step(0, q, k, v).double(), whole.step(0, q, k, v).double()
        error = float((found - expected).norm() / expected.norm())
        assert error < 4e-3, error  # bfloat16, rounded on each rank and once more
        steps = (partial(cache.step, 0, q, k, v) for cache in (whole, spread))
        times = [take_time(captured(step), rounds) for step in steps]
        spread.check()
        whole.check()
        if not rank:
            one, many = times
            line = f"{fmt}, {count} tokens: one GPU {one:.1f} us, {world} GPUs {many:.1f} us"
            print(f"{line}, {one / many:.2f}x, error {error:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
