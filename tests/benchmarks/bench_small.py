"""Whether decode calls of few sequences are cut well, and what they cannot go below: the usual
plan, splits around it, blocks of half the warps, and an empty kernel in as many blocks.

Run by hand: python tests/benchmarks/bench_small.py --json small.json. Rows are int4-g4. Outputs are
compared first, with float64 and bit for bit from call to call: of sequences of unequal lengths with
NaN behind them, then of each shape. Variants are timed by turns, so that what changes on the GPU
meanwhile touches all alike. Times are medians of replays of CUDA graphs, with the L2 cache
overwritten before: of one call, and of one in a graph of ten calls, each on rows of its own. Beside
them stands the time by the formula that chooses plans where none was measured (decode/plan.py).

A run that hangs is ended; what it has found is in the file. --dry needs no GPU.
"""

from __future__ import annotations

import faulthandler
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import click
import torch
from measuring import relative_error

from kvquant import RowFormat, __version__, dequantize_rows, quantize_rows
from kvquant.bench.cases import Case, Inputs, make_inputs
from kvquant.bench.measure import render_machine
from kvquant.bench.timer import GraphTimer, capture, describe_machine
from kvquant.kernels.cuda.decode import launch
from kvquant.kernels.cuda.decode.plan import Plan, fit, plan, price, with_workers
from kvquant.kernels.cuda.decode.spec import TILE, DecodeSpec
from kvquant.kernels.cuda.decode.tuned import measured_plans
from kvquant.kernels.cuda.runtime.compile import compile_kernel, load_cubin
from kvquant.kernels.cuda.runtime.compile_pool import compile_all
from kvquant.kernels.cuda.runtime.driver import Kernel, Launcher
from kvquant.kernels.cuda.runtime.launch import GPU, GPUS, current_stream, gpu_of
from kvquant.ops.attention import attend
from kvquant.rehearsal import rehearse
from kvquant.rows.call import AttentionCall
from kvquant.rows.segment import Segment

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from forced_plan import forced

FORMAT = RowFormat.parse("int4-g4", 128)
SHAPES = {  # sequences, query heads, KV heads, tokens
    **{f"{batch} x 8,192, 8:1": (batch, 8, 1, 8192) for batch in (1, 8, 32, 64)},
    "1 x 32,768, 32:8": (1, 32, 8, 32768),
}
UNEVEN = "uneven"  # checked only
LENS = 0, 1, 31, 33, 64, 1000, 8192, 5000, 257
CUTS = (1, 0), (3, 0), (2, 7), (1, 1)  # splits and workers to check them with
CALLS, REPLAYS, AGAIN = 10, 5, 8  # in a row; of a graph a round; calls that must agree
MOST_ERROR = 3e-3  # relative, L2: outputs are rounded to bfloat16
LEAST_ROUNDS = 4
COMPILE, QUIET = 180, 20  # seconds until a run counts as hung: while it compiles, and else
COLUMNS = "splits", "warps", "blocks", "tiles", "registers", "priced", "alone", "in_a_row"
describe = launch.describe
Facts = dict[str, float]  # the figures of a line
Key = tuple[str, str]  # a variant, and "alone" or "in_a_row"


class Variant(NamedTuple):
    """A way to compute a call.

    Attributes:
        share: warps of all blocks, as a multiple of those of the usual plan.
        smaller: how many times fewer warps a block has.
        overlapped: whether the kernel lets the next launch begin.
    """

    share: float = 1.0
    smaller: int = 1
    overlapped: bool = True


SHARES = 0.5, 0.75, 1.25, 1.5, 2.0
EMPTY = "empty kernel"
VARIANTS = {
    "usual": Variant(),
    **{f"splits x {share:g}": Variant(share) for share in SHARES},
    **{f"half the warps x {share:g}": Variant(share, 2) for share in sorted({1.0, *SHARES})},
    "lets no launch begin": Variant(overlapped=False),
}


class Planned(NamedTuple):
    """A variant of a shape: its kernel, how it cuts the work, and the figures of its line."""

    spec: DecodeSpec
    chosen: Plan
    facts: Facts


def plan_variants(shape: str, gpu: GPU) -> dict[str, Planned]:
    """The variants of a shape that differ."""
    with rehearse(gpu):
        (inputs,) = make_inputs(case_of(shape), 1, torch.device("meta"))
        work = describe(AttentionCall(inputs.q, inputs.segments))
    usual = plan(work.spec, gpu, work.units, work.capacities, rows=measured_plans())
    tokens = SHAPES[shape][-1]
    found: dict[str, Planned] = {}
    seen = set()
    for name, (share, smaller, overlapped) in VARIANTS.items():
        warps = usual.warps // smaller
        wanted = max(round(usual.splits[0] * share * smaller), 1)
        step = TILE * warps
        tiles = -(-tokens // (wanted * step))  # of a warp, in the longest split
        count = -(-tokens // (tiles * step))
        if (warps, count, overlapped) not in seen:
            seen.add((warps, count, overlapped))
            spec = replace(work.spec, warps=warps, stages=usual.stages, overlapped=overlapped)
            blocks = work.units * count
            facts: Facts = {"splits": count, "warps": warps, "blocks": blocks, "tiles": tiles}
            found[name] = Planned(spec, Plan((count,), warps, usual.stages), facts)
    return found


def complete(shape: str, one: Planned, gpu: GPU) -> Planned:
    """A variant with what its compiled kernel says: workers, registers, and the formula's price."""
    batch, _, kv_heads, tokens = SHAPES[shape]
    units, chosen = batch * kv_heads, one.chosen
    registers = load_cubin(one.spec, gpu.arch).report.registers
    kernel = fit(one.spec, gpu, registers)
    if batch > 1:
        chosen = with_workers(chosen, kernel, units, [tokens])
    paid = price(kernel, units, [tokens], chosen.splits)
    return Planned(one.spec, chosen, {**one.facts, "registers": registers, "priced": paid})


def case_of(shape: str) -> Case:
    """A shape as kvquant bench knows it."""
    batch, q_heads, kv_heads, tokens = SHAPES[shape]
    return Case(FORMAT, FORMAT, batch, q_heads, kv_heads, tokens)


def watch(seconds: float = QUIET) -> None:
    """End the process, with a traceback, unless this is called again in time."""
    faulthandler.dump_traceback_later(seconds, exit=True)


@contextmanager
def following(one: Planned) -> Iterator[None]:
    """Let calls take a variant's kernel and plan."""

    def describe_changed(*args: Any, **options: Any) -> launch.Work:
        work = describe(*args, **options)
        return replace(work, spec=replace(work.spec, overlapped=one.spec.overlapped))

    with (
        mock.patch.object(launch, "describe", describe_changed),
        forced(one.chosen, may_widen=True),
    ):
        yield


def error_of(call: Callable[[], torch.Tensor], expected: torch.Tensor) -> float:
    """The error of a call, whose outputs may not differ."""
    outs = [call() for _ in range(AGAIN)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    error = relative_error(outs[0], expected)
    assert error <= MOST_ERROR, error
    return error


def check_uneven(found: dict[str, Planned], device: torch.device) -> dict[str, Facts]:
    """Check kernels on sequences that end anywhere, by even parts and by workers."""
    call, expected = uneven_call(device)
    kernels = {one.spec: (name, one) for name, one in reversed(found.items())}
    errors = {}
    for name, one in kernels.values():
        watch()
        cut = [replace(one.chosen, splits=(splits,), workers=workers) for splits, workers in CUTS]
        each = []
        for chosen in cut:
            with following(one._replace(chosen=chosen)):
                each.append(error_of(lambda: attend(call)[0], expected))
        errors[name] = {"error": max(each)}
    return errors


def uneven_call(device: torch.device) -> tuple[AttentionCall, torch.Tensor]:
    """Sequences of rows of their own, NaN behind them, and what attention to them gives."""
    batch, room, heads = len(LENS), max(LENS) + 8, 8
    q = torch.randn(batch, heads, FORMAT.head_dim, device=device).bfloat16()
    k, v = (
        quantize_rows(torch.randn(batch, 1, room, FORMAT.head_dim, device=device), FORMAT)
        for _ in range(2)
    )
    lens = torch.tensor(LENS, dtype=torch.int32, device=device)
    call = AttentionCall(q, [Segment(k, v, lens, FORMAT, FORMAT)])
    expected = expected_of(call.q, call.segments)
    for b, length in enumerate(LENS):
        k[b, :, length:] = v[b, :, length:] = 0xFF
    return call, expected


def expected_of(q: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
    """Attention in float64, one sequence at a time; zeros where there is no token."""
    (segment,) = segments
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for b, length in enumerate(segment.seq_lens.tolist()):
        rows = segment.k_rows[b, :, :length], segment.v_rows[b, :, :length]
        k, v = (dequantize_rows(one, FORMAT).double() for one in rows)
        of_heads = q[b].double().view(len(k), -1, FORMAT.head_dim)
        scores = of_heads @ k.transpose(1, 2) * FORMAT.head_dim**-0.5
        out[b] = (scores.softmax(-1) @ v).view_as(out[b])
    return out


def measure(
    found: dict[str, Planned],
    inputs: Sequence[Inputs],
    timer: GraphTimer,
    empty: Callable[[], None],
    end: float,
) -> dict[str, Facts]:
    """Check the variants of a shape, then time them until `end`."""
    expected = expected_of(inputs[0].q, inputs[0].segments)
    facts = {name: dict(one.facts) for name, one in found.items()}
    with ExitStack() as stack:
        graphs = {}
        for name, one in found.items():
            watch()
            # until the end of all rounds: graphs keep what they were captured with
            stack.enter_context(following(one))
            facts[name]["error"] = error_of(inputs[0].attend, expected)
            graphs[name, "alone"] = capture([inputs[0].attend])
            graphs[name, "in_a_row"] = capture([each.attend for each in inputs])
        facts[EMPTY] = {key: facts["usual"][key] for key in ("splits", "warps", "blocks", "tiles")}
        graphs[EMPTY, "alone"] = capture([empty])
        graphs[EMPTY, "in_a_row"] = capture([empty] * CALLS)
        times = rounds(graphs, timer, end)
    for (name, kind), taken in times.items():
        facts[name][kind] = statistics.median(taken) / (CALLS if kind == "in_a_row" else 1)
        facts[name]["replays"] = len(taken)
    return facts


def rounds(
    graphs: dict[Key, torch.cuda.CUDAGraph], timer: GraphTimer, end: float
) -> dict[Key, list[float]]:
    """Times of all graphs by turns, each round in another order."""
    for graph in graphs.values():
        timer.replay(graph, 1)
    times: dict[Key, list[float]] = {key: [] for key in graphs}
    keys, count = list(graphs), 0
    while count < LEAST_ROUNDS or time.time() < end:
        watch()
        for key in keys[count % len(keys) :] + keys[: count % len(keys)]:
            times[key] += timer.replay(graphs[key], REPLAYS)
        count += 1
    return times


def make_empty(gpu: GPU) -> Callable[[Planned], Callable[[], None]]:
    """Make the function that gives a launch of an empty kernel, in the blocks of a variant."""
    from numba.cuda import types

    def nothing(number: Any) -> None:
        return

    cubin = compile_kernel(nothing, (types.uint32,), gpu.arch)

    def launch_like(one: Planned) -> Callable[[], None]:
        shape = {"threads": one.spec.threads, "shared": one.spec.shared_bytes}
        kernel = Kernel(cubin.code, cubin.name, 0, **shape)
        launcher = Launcher(kernel, (int(one.facts["blocks"]), 1, 1), "@I")
        return lambda: launcher(current_stream(0), [0])

    return launch_like


def render(group: str, found: dict[str, Facts]) -> str:
    """A table of a group's variants."""
    lines = [f"{group:24}" + "".join(f"{name:>10}" for name in (*COLUMNS, "error"))]
    for name, facts in found.items():
        cells = (f"{facts[one]:10.4g}" if one in facts else " " * 10 for one in COLUMNS)
        error = f"{facts['error']:10.2e}" if "error" in facts else ""
        lines.append(f"{name:24}" + "".join(cells) + error)
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--seconds", default=75.0, show_default=True, help="When to be done.")
@click.option("--compile", "compile_only", is_flag=True, help="Compile all kernels and end.")
@click.option("--dry", is_flag=True, help="Plan and compile for an H200, without a GPU.")
def main(json_file: Path | None, seconds: float, compile_only: bool, dry: bool) -> None:
    """Print a table of each shape."""
    until = time.time() + seconds
    watch(COMPILE)
    gpu = GPUS["sm_90"] if dry else gpu_of(0)
    plans = {shape: plan_variants(shape, gpu) for shape in SHAPES}
    compile_all([one.spec for found in plans.values() for one in found.values()], gpu.arch)
    if compile_only:
        return
    for shape, found in plans.items():
        plans[shape] = {name: complete(shape, one, gpu) for name, one in found.items()}
        if dry:
            print(render(shape, {name: one.facts for name, one in plans[shape].items()}))
    if dry:
        return
    watch()
    torch.manual_seed(0)
    timer, empty = GraphTimer(), make_empty(gpu)
    machine = describe_machine(timer, __version__)
    print(render_machine(machine))
    results = {UNEVEN: check_uneven(plans[next(iter(SHAPES))], timer.device)}
    print(render(UNEVEN, results[UNEVEN]))
    for place, (shape, found) in enumerate(plans.items()):
        watch()
        now = time.time()
        end = now + (until - now) / (len(plans) - place)
        inputs = make_inputs(case_of(shape), CALLS, timer.device)
        results[shape] = measure(found, inputs, timer, empty(found["usual"]), end)
        print(render(shape, results[shape]), flush=True)
        if json_file is not None:
            record = {"machine": asdict(machine), "found": results}
            json_file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
