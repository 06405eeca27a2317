"""Ranks on GPUs: a long sequence spread over them, and the steps of a model; a GPU for each rank.

    torchrun --nproc-per-node 2 tests/benchmarks/bench_ranks.py --json ranks.json

Parts:

    attention   ContextParallelCache beside a KVCache that holds all tokens on one GPU: a layer of
                32:8 heads and one sequence. Outputs are compared first, and all ranks must have
                the same bits. Then come times of attention and of a step, and of their parts: this
                rank's tokens, the exchange through one another's memory, and by an all-gather
    model       steps of 32 layers as wide as a Llama of 8B, without RoPE, random weights: on one
                GPU; with sequences spread over the ranks, and all weights on each; with heads and
                weights split, and a sum over ranks twice a layer

Calls are captured in a CUDA graph. A time is the slowest rank's, the median over rounds. Ranks meet
before each round. First and last tokens are in 16 bit, others in FORMATS.
"""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from decoding import Figures
from measuring import relative_error
from torch.nn.functional import rms_norm, silu

from kvquant import ContextParallelCache, KVCache, __version__
from kvquant.ops.merge import merge_by_kernels

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
WIDTH, INNER, WORDS = 4096, 14336, 32000
CALLS, ROUNDS = 16, 15  # in a graph; replays of it
MOST_L2 = 3 * 2**-9  # outputs are rounded to bfloat16 twice by ranks, once by a cache
PARTS = "attention", "model"
FORMATS: dict[str, Figures] = {
    "default": {},
    "int4-g4": {"k_format": "int4-g4", "v_format": "int4-g4"},
}


def microseconds(call: Callable[[], Any], calls: int = CALLS) -> float:
    """The time of a call, on the slowest rank."""
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
        side.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(calls):
                call()
        taken = []
        for _ in range(ROUNDS + 1):
            dist.barrier()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record(side)
            graph.replay()
            events[1].record(side)
            side.synchronize()
            own = torch.tensor(1e3 * events[0].elapsed_time(events[1]) / calls, device="cuda")
            dist.all_reduce(own, dist.ReduceOp.MAX)
            taken.append(float(own))
    return statistics.median(taken[1:])


def fill(caches: list[Any], batch: int, tokens: int, chunk: int) -> None:
    """Append the same random tokens to all layers of caches, on all ranks."""
    for start in range(0, tokens, chunk):
        count = min(chunk, tokens - start)
        shape = 2, batch, KV_HEADS, count, HEAD_DIM
        k, v = torch.randn(*shape, dtype=torch.bfloat16, device="cuda")
        for cache in caches:
            held = cache.cache if isinstance(cache, ContextParallelCache) else cache
            mine = slice(None)
            if held.num_kv_heads < KV_HEADS:
                first = dist.get_rank() * held.num_kv_heads
                mine = slice(first, first + held.num_kv_heads)
            for layer in range(held.num_layers):
                cache.append(layer, k[:, mine], v[:, mine])
    for cache in caches:
        cache.check()


def room_of(tokens: int) -> int:
    """Tokens that a cache has room for while it is measured."""
    return tokens + 4 * (ROUNDS + 4) * CALLS


def new_cache(layers: int, batch: int, tokens: int, heads: int = KV_HEADS, **rows: Any) -> KVCache:
    return KVCache(layers, batch, heads, HEAD_DIM, room_of(tokens), device="cuda", **rows)


def spread_cache(layers: int, batch: int, tokens: int, **rows: Any) -> ContextParallelCache:
    share = ContextParallelCache.tokens_of(room_of(tokens), 0, dist.get_world_size())
    return ContextParallelCache(
        KVCache(layers, batch, KV_HEADS, HEAD_DIM, share, device="cuda", **rows)
    )


def attention(tokens: int, name: str) -> Figures:
    """A layer of one sequence."""
    torch.manual_seed(tokens)
    whole = new_cache(1, 1, tokens, **FORMATS[name])
    spread = spread_cache(1, 1, tokens, **FORMATS[name])
    fill([whole, spread], 1, tokens, 1 << 16)
    q = torch.randn(1, Q_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 1, KV_HEADS, 1, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    exchange, errors = spread._exchange, {}
    assert exchange is not None, "GPUs do not map one another's memory"
    ways = {"exchange": exchange, "all-gather": None}
    for way, spread._exchange in ways.items():
        out = spread.attend(0, q)
        errors[way] = relative_error(out, whole.attend(0, q))
        assert errors[way] < MOST_L2, errors
        outs = [torch.empty_like(out) for _ in range(dist.get_world_size())]
        dist.all_gather(outs, out)
        assert all(torch.equal(one, out) for one in outs), "ranks have other outputs"
    attends = {
        "one": microseconds(lambda: whole.attend(0, q)),
        "own": microseconds(lambda: spread.cache.attend(0, q, return_lse=True)),
    }
    steps = {"one": microseconds(lambda: whole.step(0, q, k, v))}
    for way, spread._exchange in ways.items():
        attends[way] = microseconds(lambda: spread.attend(0, q))
        steps[way] = microseconds(lambda: spread.step(0, q, k, v))
    out, lse = spread.cache.attend(0, q, return_lse=True)
    merges = {
        "exchange": microseconds(lambda: exchange.merge(out, lse)),
        "all-gather": microseconds(
            lambda: merge_by_kernels(*spread._gathered(out, lse), dtype=out.dtype, backend=None)
        ),
    }
    return {
        "tokens": tokens,
        "rows": name,
        "ranks": dist.get_world_size(),
        "error": errors,
        "attend_us": attends,
        "step_us": steps,
        "merge_us": merges,
        "times": attends["one"] / attends["exchange"],
        "gb": spread.cache.nbytes / 1e9,
        "gb_of_one": whole.nbytes / 1e9,
    }


class Part(NamedTuple):
    """The weights that a rank has of a layer, and its heads."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def weights(layers: int, ranks: int) -> Iterator[Part]:
    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda") * 0.02

    heads, inner = Q_HEADS // ranks, INNER // ranks
    for _ in range(layers):
        yield Part(
            made(WIDTH, (heads + 2 * KV_HEADS // ranks) * HEAD_DIM),
            made(heads * HEAD_DIM, WIDTH),
            made(WIDTH, 2 * inner),
            made(inner, WIDTH),
        )


def model(way: str, layers: int, batch: int, tokens: int) -> Figures:
    """Steps of a whole model: "one", "context" or "tensor"."""
    torch.manual_seed(0)
    world = dist.get_world_size()
    ranks = world if way == "tensor" else 1
    cache: Any
    if way == "context":
        cache = spread_cache(layers, batch, tokens)
    else:
        cache = new_cache(layers, batch, tokens, KV_HEADS // ranks)
    fill([cache], batch, tokens, 8192)
    parts = list(weights(layers, ranks))
    words = torch.randn(WORDS, WIDTH, dtype=torch.bfloat16, device="cuda") * 0.02
    ids = torch.zeros(batch, dtype=torch.int64, device="cuda")
    sizes = [heads * HEAD_DIM // ranks for heads in (Q_HEADS, KV_HEADS, KV_HEADS)]

    def summed(x: torch.Tensor) -> torch.Tensor:
        if ranks > 1:
            dist.all_reduce(x)
        return x

    def step() -> None:
        x = words[ids]
        for layer, part in enumerate(parts):
            q, k, v = (rms_norm(x, (WIDTH,)) @ part.qkv).split(sizes, dim=-1)
            q, k, v = (one.reshape(batch, -1, HEAD_DIM) for one in (q, k, v))
            out = cache.step(layer, q, k[:, :, None], v[:, :, None])
            x = x + summed(out.flatten(1) @ part.o)
            gate, up = (rms_norm(x, (WIDTH,)) @ part.gate_up).chunk(2, dim=-1)
            x = x + summed((silu(gate) * up) @ part.down)
        ids.copy_((rms_norm(x, (WIDTH,)) @ words.T).argmax(-1))

    taken = microseconds(step, 2)
    cache.check()
    held = cache.cache if way == "context" else cache
    return {
        "way": way,
        "layers": layers,
        "batch": batch,
        "tokens": tokens,
        "ranks": 1 if way == "one" else world,
        "step_ms": taken / 1e3,
        "tokens_per_s": 1e6 * batch / taken,
        "gb": held.nbytes / 1e9,
        "gb_of_weights": sum(x.nbytes for part in parts for x in part) / 1e9,
    }


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS)
@click.option("--tokens", type=int, multiple=True, default=(1 << 20, 1 << 22), show_default=True)
@click.option("--layers", default=32, show_default=True)
@click.option("--batch", default=8, show_default=True)
@click.option("--context", default=1 << 17, show_default=True, help="Tokens a sequence of a model.")
def main(
    json_file: Path,
    parts: tuple[str, ...],
    tokens: tuple[int, ...],
    layers: int,
    batch: int,
    context: int,
) -> None:
    """Measure, print, and write the file after each measurement."""
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    machine["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    found: Figures = {"machine": machine | {"kvquant": __version__}}
    calls: list[tuple[str, Callable[..., Figures], tuple[Any, ...]]] = []
    calls += [("attention", attention, (count, name)) for count in tokens for name in FORMATS]
    ways = "one", "context", "tensor"
    calls += [("model", model, (way, layers, batch, context)) for way in ways]
    with torch.no_grad():
        for part, measure, given in calls:
            if part not in parts:
                continue
            figures = measure(*given)
            torch.cuda.empty_cache()
            found.setdefault(part, []).append(figures)
            if not rank:
                print(json.dumps(figures), flush=True)
                json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
