"""Many columns with the window of a default cache, on a Hopper GPU: the kernel for wide groups.

Run by hand: python tests/benchmarks/bench_wide.py --json FILE. 64 sequences of 8,192 packed tokens,
int4-g4, and a window of 132 more in bfloat16: 4 sinks and a ring. Outputs are compared with the
float64 reference first. Times are microseconds of calls in a row:

    packed, window    without the window, with it
    old               with it, by the kernel for all columns
    torch             the fastest of torch's attention on as many 16-bit tokens, without a mask

--variants times other blocks, other splits, and 17 columns and more of several queries, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from measuring import begin, relative_error

from kvquant.bench.cases import Case, make_inputs, parse_formats, take_sequences
from kvquant.bench.measure import running, torch_calls
from kvquant.bench.timer import GraphTimer
from kvquant.kernels.cuda.decode import launch
from kvquant.kernels.cuda.decode.wide import spec
from kvquant.kernels.cuda.runtime.warmup import warm_up
from kvquant.ops.attention import attend
from kvquant.rows.call import AttentionCall
from kvquant.rows.reference import reference_over_segments

BATCH, TOKENS, SINKS, WINDOW = 64, 8192, 4, 132
# query heads, KV heads, queries of a sequence
SHAPES = (32, 1, 1), (64, 1, 1), (71, 1, 1), (8, 1, 8), (32, 8, 8), (32, 8, 9)
(ONE, *ONE_MORE), (TWO, *TWO_MORE) = spec.SHAPES[1], spec.SHAPES[2]
OTHERS = {1: ({**ONE, "stages": 3},), 2: ({**TWO, "ahead": False},)}
# what differs in wide/spec.py, and splits
WAYS: dict[str, tuple[dict[str, Any], int | None]] = {
    "packed": ({}, None),
    "window": ({}, None),
    "old": ({"FEWEST": 1000, "FEWEST_OF_QUERIES": 1000}, None),
}
VARIANTS: dict[str, tuple[dict[str, Any], int | None]] = {
    "one feeder": ({"SHAPES": {1: ONE_MORE, 2: TWO_MORE}}, None),
    "3 stages, not ahead": ({"SHAPES": OTHERS}, None),
    **{f"{n} splits": ({}, n) for n in (1, 3, 4)},
    "from 17": ({"FEWEST_OF_QUERIES": 17}, None),
}


@contextmanager
def calls_by(
    name: str, shape: tuple[int, int, int], copies: int, device: torch.device
) -> Iterator[list[AttentionCall]]:
    """Calls on rows of their own, which take a kernel while the context lasts."""
    changes, splits = (WAYS | VARIANTS)[name]
    heads, kv_heads, q_len = shape
    packed = Case(*parse_formats("int4-g4", 128), BATCH, heads, kv_heads, TOKENS)
    exact = Case(*parse_formats("bf16", 128), BATCH, heads, kv_heads, WINDOW)
    calls = []
    both = (make_inputs(one, copies, device) for one in (packed, exact))
    for one, other in zip(*both, strict=True):
        q = torch.randn(BATCH, q_len, heads, 128, device=device).bfloat16()
        (recent,) = other.segments
        starts = torch.arange(5, 5 + BATCH, dtype=torch.int32, device=device)
        segments = [*one.segments, recent._replace(starts=starts, sinks=SINKS)]
        segments = segments[: 1 if name == "packed" else 2]
        calls.append(AttentionCall(q[:, 0] if q_len == 1 else q, segments, num_splits=splits))
    with mock.patch.dict(vars(spec), changes), mock.patch.object(launch, "_launches", {}):
        yield calls


def rehearse(name: str, shape: tuple[int, int, int]) -> None:
    """Attend without values, for a rehearsal: see kvquant/rehearsal.py."""
    with calls_by(name, shape, 1, torch.device("meta")) as calls:
        attend(calls[0])


def time_of(name: str, shape: tuple[int, int, int], timer: GraphTimer) -> float:
    """Check the first call, and time all."""
    copies = timer.rotation(160 * BATCH * TOKENS * shape[1]) or 1
    with calls_by(name, shape, copies, timer.device) as calls:
        segments = [take_sequences(one, 0, 1) for one in calls[0].segments]
        segments = [
            one._replace(starts=None if one.starts is None else one.starts[:1]) for one in segments
        ]
        wanted, _ = reference_over_segments(calls[0].q[:1], segments)
        error = relative_error(attend(calls[0])[0][:1], wanted)
        assert error < 3e-3, (name, shape, error)
        return timer.in_a_row([partial(attend, one) for one in calls])


def time_of_torch(shape: tuple[int, int, int], timer: GraphTimer) -> float:
    """Queries of a KV head are heads of it: nothing is masked."""
    heads, kv_heads, q_len = shape
    formats = parse_formats("bf16", 128)
    case = Case(*formats, BATCH, heads * q_len, kv_heads, TOKENS + WINDOW)
    inputs = make_inputs(case, timer.rotation(case.nbytes) or 1, timer.device)
    calls = {name: one for name, one in torch_calls(case, inputs).items() if "folded" in name}
    return min(map(timer.in_a_row, running(calls).values()))


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--variants", is_flag=True, help="Time the variants, too.")
def main(json_file: Path | None, variants: bool) -> None:
    """Print a line per shape."""
    timer, found = begin(), []
    names = [*WAYS, *(VARIANTS if variants else ())]
    warm_up(timer.device, [partial(rehearse, name, one) for one in SHAPES for name in names])
    for shape in SHAPES:
        us = {name: time_of(name, shape, timer) for name in names}
        us |= {"torch": time_of_torch(shape, timer), "ratio": us["window"] / us["packed"]}
        print(*shape, *(f"{name} {one:.4g}," for name, one in us.items()), flush=True)
        found.append({"shape": shape, "in_a_row_us": us})
    if json_file is not None:
        json_file.write_text(json.dumps({"windows": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
