"""Microseconds of one layer's decode step on a GPU, append and attend, with every kind of plan.

Run by hand: python tests/benchmarks/bench_step.py --json FILE. 32 query heads on 8 KV heads,
head_dim 128, 2,048 tokens a sequence, int4-g4 between 4 sinks and 128 recent tokens. Outputs are
first compared with the reference, in float64. Then, each beside no plan:

    alone       a CUDA graph of one step, the L2 cache overwritten before each replay
    in a row    a graph of a step in each of 16 layers, whose rows outgrow the L2 cache together
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
import torch
from measuring import begin, relative_error

from kvquant import KVCache
from kvquant.cli.console import JSON, write_json
from kvquant.rows.basis import Basis, LayerBasis
from kvquant.rows.quantize import feedback_matrix

Q_HEADS, HEADS, DIM, TOKENS, LAYERS = 32, 8, 128, 2048, 16
LIMIT = 2e-2  # of outputs whose queries and sums were rounded to bfloat16 in the plan's basis
New = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@click.command()
@click.option("--batch", "batches", multiple=True, default=[8, 64], show_default=True)
@click.option("--kernels", is_flag=True, help="Print the time of each kernel, too.")
@JSON
def main(batches: tuple[int, ...], kernels: bool, json_file: Path | None) -> None:
    """Print a line per batch and kind of plan."""
    timer, rows = begin(), []
    print(f"{'microseconds, batch':32}{'alone':>10}{'':8}{'in a row':>10}{'':8}{'error':>10}")
    for batch in batches:
        first: tuple[float, float] | None = None
        for name, basis in make_bases().items():
            cache, new = make_cache(batch, basis), make_new(batch)
            error = error_of(cache, new)
            assert error < LIMIT, f"{name}: {error}"
            times = (
                timer.alone(partial(step, cache, 0, *new)),
                timer.in_a_row([partial(step, cache, i, *new) for i in range(LAYERS)]),
            )
            first = first or times
            line = f"{f'{name}, {batch}':32}"
            for own, plain in zip(times, first, strict=True):
                line += f"{own:10.1f}{own / plain:7.2f}x"
            print(f"{line}{error:10.1e}", flush=True)
            us = {"alone_us": times[0], "in_a_row_us": times[1]}
            rows.append({"batch": batch, "plan": name, **us, "error": error})
            write_json(json_file, {"rows": rows})
            if kernels:
                print_kernels(cache, new)


def make_offset() -> torch.Tensor:
    """What all keys and values lie around."""
    return torch.randn(HEADS, DIM, generator=torch.Generator().manual_seed(1))


def make_bases() -> dict[str, LayerBasis | None]:
    """The kinds of plans."""
    square, eye = (HEADS, DIM, DIM), torch.eye(DIM)
    roots = torch.randn(square).double()
    feedback = feedback_matrix(roots @ roots.mT + eye).float()
    matrix, offset = eye + 0.05 * torch.randn(square), make_offset()
    plain, moved = Basis(torch.zeros(HEADS, DIM)), Basis(offset)
    turned, rounded = (Basis(offset, matrix, None, one) for one in (None, feedback))
    return {
        "no plan": None,
        "offset": LayerBasis(moved, moved),
        "matrix": LayerBasis(turned, turned),
        "matrix, V folded": LayerBasis(turned, plain),
        "matrix and feedback": LayerBasis(rounded, rounded),
    }


def make_cache(batch: int, basis: LayerBasis | None) -> KVCache:
    """All layers, with TOKENS tokens of each sequence."""
    bases = None if basis is None else [basis] * LAYERS
    cache = KVCache(LAYERS, batch, HEADS, DIM, 2 * TOKENS, device="cuda", bases=bases)
    k, v = make_rows(batch, TOKENS)
    for layer in range(LAYERS):
        cache.append(layer, k, v)
    return cache


def make_new(batch: int) -> New:
    """Queries, and keys and values of a token."""
    q = torch.randn(batch, Q_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = make_rows(batch, 1)
    return q, k, v


def make_rows(batch: int, tokens: int) -> torch.Tensor:
    """Keys and values, [2, batch, HEADS, tokens, DIM]."""
    rows = torch.randn(2, batch, HEADS, tokens, DIM) + make_offset()[:, None]
    return rows.to("cuda", torch.bfloat16)


def step(
    cache: KVCache, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """A layer's step."""
    return cache.step(layer, q, k, v)


def error_of(cache: KVCache, new: New) -> float:
    """Of the output of a step against that of the reference over the same rows."""
    out = step(cache, 0, *new).double()
    wanted = cache.attend(0, new[0].float(), backend="reference").double()
    return relative_error(out, wanted)


def print_kernels(cache: KVCache, new: New) -> None:
    """The kernels of a step, in their order, as CUPTI times them, in eager calls."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        for layer in range(LAYERS):
            step(cache, layer, *new)
        torch.cuda.synchronize()
    events = [one for one in profiled.events() if one.device_type.name == "CUDA"]
    events = [one for one in events if "Memcpy" not in one.name]
    events.sort(key=lambda one: one.time_range.start)
    count = len(events) // LAYERS
    for i in range(count):
        same = sorted(one.time_range.elapsed_us() for one in events[i::count])
        print(f"    {same[len(same) // 2]:7.2f}  {events[i].name[:90]}", flush=True)


if __name__ == "__main__":
    main()
