"""Attention with the 16-bit window of a cache, on a GPU: many columns, and the default formats.

Run by hand: python tests/benchmarks/bench_wide.py --json FILE. Sequences of 8,192 packed tokens,
and a window of 132 more in bfloat16: 4 sinks and a ring. 64 of int4-g4, whose many columns take the
kernel for wide groups of Hopper; 64 and 512 of the default formats. Outputs are compared with the
float64 reference first. Times are microseconds of calls in a row:

    packed, window    without the window, with it
    old               many columns with it, by the kernel for all columns
    torch             the fastest of torch's attention on as many 16-bit tokens, without a mask
    peak              bytes of all rows, divided by the window's time and the peak bandwidth
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest import mock

import click
import torch
from measuring import begin, relative_error

from kvquant import __version__
from kvquant.bench.cases import Case, make_inputs, parse_formats, take_sequences
from kvquant.bench.measure import running, torch_calls
from kvquant.bench.timer import GraphTimer, describe_machine
from kvquant.cli.console import write_json
from kvquant.kernels.cuda.decode import launch
from kvquant.kernels.cuda.decode.wide import spec
from kvquant.kernels.cuda.runtime.warmup import warm_up
from kvquant.ops.attention import attend
from kvquant.rows.call import AttentionCall
from kvquant.rows.defaults import default_format
from kvquant.rows.reference import reference_over_segments

TOKENS, SINKS, WINDOW = 8192, 4, 132
PAIR = "/".join(default_format(side, 128, SINKS, WINDOW - SINKS) for side in "kv")
Shape = tuple[str, int, int, int, int]  # formats, sequences, query heads, KV heads, queries of each
WIDE = (32, 1, 1), (64, 1, 1), (71, 1, 1), (8, 1, 8), (32, 8, 8), (32, 8, 9)
SHAPES: list[Shape] = [(PAIR, 512, 8, 1, 1), (PAIR, 64, 32, 8, 1)]
SHAPES += [("int4-g4", 64, *shape) for shape in WIDE]
OLD = {"FEWEST": 1000, "FEWEST_OF_QUERIES": 1000}  # in wide/spec.py


@contextmanager
def calls_by(
    name: str, shape: Shape, copies: int, device: torch.device
) -> Iterator[list[AttentionCall]]:
    """Calls on rows of their own, which take a kernel while the context lasts."""
    formats, batch, heads, kv_heads, q_len = shape
    packed = Case(*parse_formats(formats, 128), batch, heads, kv_heads, TOKENS)
    exact = Case(*parse_formats("bf16", 128), batch, heads, kv_heads, WINDOW)
    calls = []
    both = (make_inputs(one, copies, device) for one in (packed, exact))
    for one, other in zip(*both, strict=True):
        q = torch.randn(batch, q_len, heads, 128, device=device).bfloat16()
        (recent,) = other.segments
        starts = torch.arange(5, 5 + batch, device=device).int() % (WINDOW - SINKS)
        segments = [*one.segments, recent._replace(starts=starts, sinks=SINKS)]
        segments = segments[: 1 if name == "packed" else 2]
        calls.append(AttentionCall(q[:, 0] if q_len == 1 else q, segments))
    with (
        mock.patch.dict(vars(spec), OLD if name == "old" else {}),
        mock.patch.object(launch, "_launches", {}),
    ):
        yield calls


def rehearse(name: str, shape: Shape) -> None:
    """Attend without values, for a rehearsal: see kvquant/rehearsal.py."""
    with calls_by(name, shape, 1, torch.device("meta")) as calls:
        attend(calls[0])


def time_of(name: str, shape: Shape, timer: GraphTimer) -> float:
    """Check the first call, and time all."""
    copies = timer.rotation(160 * shape[1] * TOKENS * shape[3]) or 1
    with calls_by(name, shape, copies, timer.device) as calls:
        segments = [take_sequences(one, 0, 1) for one in calls[0].segments]
        segments = [
            one._replace(starts=None if one.starts is None else one.starts[:1]) for one in segments
        ]
        wanted, _ = reference_over_segments(calls[0].q[:1], segments)
        error = relative_error(attend(calls[0])[0][:1], wanted)
        assert error < 3e-3, (name, shape, error)
        return timer.in_a_row([partial(attend, one) for one in calls])


def time_of_torch(shape: Shape, timer: GraphTimer) -> float:
    """Queries of a KV head are heads of it: nothing is masked."""
    _, batch, heads, kv_heads, q_len = shape
    formats = parse_formats("bf16", 128)
    case = Case(*formats, batch, heads * q_len, kv_heads, TOKENS + WINDOW)
    inputs = make_inputs(case, timer.rotation(case.nbytes) or 1, timer.device)
    calls = {name: one for name, one in torch_calls(case, inputs).items() if "folded" in name}
    return min(map(timer.in_a_row, running(calls).values()))


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(json_file: Path | None) -> None:
    """Print a line per shape."""
    timer, found = begin(), []
    machine = describe_machine(timer, __version__)

    names = {one: ("packed", "window", "old")[: 2 if one[0] == PAIR else 3] for one in SHAPES}
    calls = [(name, shape) for shape in SHAPES for name in names[shape]]
    warm_up(timer.device, [partial(rehearse, *one) for one in calls])
    for shape in SHAPES:
        us = {name: time_of(name, shape, timer) for name in names[shape]}
        us["torch"] = time_of_torch(shape, timer)
        k, v = parse_formats(shape[0], 128)
        size = TOKENS * (k.row_bytes + v.row_bytes) + WINDOW * 512
        peak = 1e-3 * size * shape[1] * shape[3] / us["window"] / machine.read_gb_per_s
        print(*shape, *(f"{name} {one:.4g}," for name, one in us.items()), f"peak {peak:.1%}")
        row = {"shape": shape, "in_a_row_us": us, "ratio": us["window"] / us["packed"]}
        found.append({**row, "peak": peak})
    if json_file is not None:
        write_json(json_file, {"machine": asdict(machine), "wide": found})


if __name__ == "__main__":
    main()
