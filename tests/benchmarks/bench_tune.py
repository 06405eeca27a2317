"""Launch plans measured on a GPU: the fastest for the table.

python tests/benchmarks/bench_tune.py --quick --format int4-g4

Plans are those of the decode kernel for any GPU. The one for wide groups has no such plans, and is
left out.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path as FilePath
from typing import Any, TypeVar

import click
import torch
from measuring import Times, check_and_time, figures_of

from kvquant import __version__
from kvquant.bench.cases import Case, list_cases, rehearse_case
from kvquant.bench.measure import case_figures, render_machine, rotated_inputs
from kvquant.bench.timer import GraphTimer, Machine, Timer, describe_machine
from kvquant.cli.console import COUNT, HEAD_DIM, JSON, Format, check_output, write_json
from kvquant.errors import ConfigError
from kvquant.kernels.cuda.decode.plan import (
    RINGS,
    Plan,
    crowd,
    even_splits,
    fit,
    formats_of_rows,
    narrow,
    plan,
    price,
    stages_of,
    useful_splits,
)
from kvquant.kernels.cuda.decode.spec import DecodeSpec, Path, columns_of
from kvquant.kernels.cuda.decode.tuned import (
    TABLE_VERSION,
    Tuned,
    read_table,
    table_path,
)
from kvquant.kernels.cuda.runtime import launch
from kvquant.kernels.cuda.runtime.launch import GPU
from kvquant.kernels.cuda.runtime.warmup import warm_up
from kvquant.kernels.disk_cache import locked, replace_file
from kvquant.rows.format import RowFormat
from kvquant.text import Column, progress, render_table

sys.path.insert(0, str(FilePath(__file__).parents[1] / "support"))
from forced_plan import forced  # of the tests

T = TypeVar("T")
FORMATS = "int4-g4", "int4", "int8-g4", "fp8", "bf16"
# shapes of the default table of plans
TABLE: dict[str, Any] = {
    "batches": (1, 8, 32, 64, 128, 256, 512),
    "seq_lens": (1024, 8192, 32768),
    "num_q_heads": 8,
    "num_kv_heads": 1,
}
GIVE_UP = 1.25  # a plan this much slower alone than the best is not timed to the end
CHEAPEST = 12  # plans by the formula's prices that are measured where it has to be quick
WORTH = 1.03  # what a plan must gain over the formula's, both times considered: less may be noise
SHAPE = (
    Column("format", left=True),
    *map(Column, ("batch", "heads", "T")),
)
PLANS = (
    *SHAPE,
    *(Column(title, part=1) for title in ("plans", "by the\nformula", "us", "in a row\nus")),
    *(Column(title, part=2) for title in ("fastest", "us", "in a row\nus")),
    *(Column(title, part=2) for title in ("gain", "gain\nin a row")),
)


def candidates(spec: DecodeSpec, gpu: GPU, units: int, capacities: Sequence[int]) -> Iterator[Plan]:
    """Yield the plans worth measuring for a shape; arguments as of plan.

    They are all kernels that fit, with an eighth to four times as many blocks as the GPU holds.
    """
    if spec.is_wide:
        chosen = fit(spec, gpu)
        for count in sorted({useful_splits(chosen, capacities, n) for n in range(1, 17)}):
            yield Plan((count,), spec.warps, spec.stages)
        return
    for warps in [rings * spec.sharers for rings in RINGS]:
        for stages in stages_of(spec):
            kernel = fit(replace(spec, warps=warps, stages=stages), gpu)
            if kernel.blocks * warps < 2:
                continue
            shares = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1, 3 / 2, 2, 4)
            wanted = {round(share * kernel.slots / units) for share in shares}
            for count in sorted({useful_splits(kernel, capacities, count) for count in wanted}):
                yield Plan(even_splits(kernel, capacities, count), warps, stages)


def tuned_row(spec: DecodeSpec, gpu: GPU, units: int, capacity: int, fastest: Plan) -> Tuned:
    """Make the row of the table for a shape with one segment and its fastest plan."""
    splits, warps, stages = fastest.splits[0], fastest.warps, fastest.stages
    shape = gpu.name, *formats_of_rows(spec), units, capacity
    return Tuned(*shape, splits, warps, stages, spec.block_columns)


@dataclass(frozen=True)
class Choice:
    """The plan of the formula and the one to take for a case, of how many measured."""

    case: Case
    formula: tuple[Plan, Times]
    fastest: tuple[Plan, Times]
    measured: int


def tuned(case: Case, timer: Timer, gpu: GPU, most: int | None = None) -> Choice:
    """Measure the plans worth measuring for a case of plain rows, each checked first.

    Args:
        case: plain rows.
        timer: takes the times.
        gpu: where it runs.
        most: plans to measure beside the formula's, the cheapest by its prices; all when None.

    Raises:
        KVQuantError: a plan gives a wrong result.
    """
    inputs = rotated_inputs(case, timer)

    def times_of(one: Plan, limit: float = math.inf) -> Times:
        with forced(one):
            return check_and_time(case, inputs, timer, limit)[1]

    formula, *others = plans_to_measure(case, gpu, most)
    found: dict[Plan, Times] = {}
    for one in (formula, *others):
        limit = GIVE_UP * min((times.alone for times in found.values()), default=math.inf)
        found[one] = times_of(one, limit)
    best = fastest(found, formula)
    if best != formula:  # the fastest of many may be so by chance
        again = {one: times_of(one) for one in (formula, best)}
        found |= again
        best = fastest(again, formula)
    return Choice(case, (formula, found[formula]), (best, found[best]), len(found))


def plans_to_measure(case: Case, gpu: GPU, most: int | None = None) -> list[Plan]:
    """The formula's plan, then the others; arguments as of tuned."""
    units = num_units(case, gpu)
    spec = crowd(decode_spec(case, gpu), gpu, units)
    formula = plan(spec, gpu, units, [case.seq_len])

    def price_of(one: Plan) -> float:
        kernel = fit(replace(spec, warps=one.warps, stages=one.stages), gpu)
        return price(kernel, units, [case.seq_len], one.splits)

    wanted = sorted(candidates(spec, gpu, units, [case.seq_len]), key=price_of)[:most]
    return list(dict.fromkeys([formula, *wanted]))


def rehearse_plans(case: Case, plans: Iterable[Plan]) -> None:
    """Attend without values by plans, for a rehearsal: see kvquant/rehearsal.py."""
    for one in {(one.warps, one.stages): one for one in plans}.values():
        with forced(one):
            rehearse_case(case)


def fastest(found: Mapping[Plan, Times], formula: Plan) -> Plan:
    """The plan with the least geometric mean of both times, if that is worth it, or the formula's.

    The time alone counts where none ran in a row, else plans without a time in a row do not.
    """
    scores = {one: math.sqrt(t.alone * t.in_a_row) for one, t in found.items() if t.in_a_row}
    scores = scores or {one: times.alone for one, times in found.items()}
    best = min(scores, key=scores.__getitem__)
    return formula if scores.get(formula, math.inf) <= WORTH * scores[best] else best


def table_row(choice: Choice, gpu: GPU) -> Tuned:
    """What the table of plans keeps."""
    case, (fastest, _) = choice.case, choice.fastest
    return tuned_row(decode_spec(case, gpu), gpu, num_units(case, gpu), case.seq_len, fastest)


def decode_spec(case: Case, gpu: GPU) -> DecodeSpec:
    """The kernel of a case of plain rows."""
    query = "bf16" if case.exact.name == "bf16" else "fp16"
    assert isinstance(case.k_format, RowFormat)
    path = Path(case.k_format, case.v_format)
    ratio = case.num_q_heads // case.num_kv_heads
    columns, sharers = columns_of(ratio, case.k_format, case.v_format)
    return narrow(DecodeSpec(path, None, query, columns=columns, sharers=sharers), gpu)


def num_units(case: Case, gpu: GPU) -> int:
    """Sequences times KV heads times blocks of query heads that share one."""
    ratio = case.num_q_heads // case.num_kv_heads
    return case.batch * case.num_kv_heads * -(-ratio // decode_spec(case, gpu).block_columns)


def choice_cells(choice: Choice) -> list[str]:
    """A row of PLANS."""
    row = [*_shape(choice.case), str(choice.measured)]
    for one, times in (choice.formula, choice.fastest):
        row += [_words(one), _number(times.alone, ".1f"), _number(times.in_a_row, ".1f")]
    return [*row, *_ratios(choice.formula[1], choice.fastest[1])]


def _shape(case: Case) -> list[str]:
    return [case.name, str(case.batch), case.heads, str(case.seq_len)]


def _words(plan: Plan) -> str:
    return f"{plan.splits[0]} x {plan.warps}w x {plan.stages}s"


def _ratios(slow: Times, fast: Times) -> tuple[str, str]:
    """Of the times alone and in a row."""
    both = slow.in_a_row and fast.in_a_row and slow.in_a_row / fast.in_a_row
    return _number(slow.alone / fast.alone, ".2f", "x"), _number(both, ".2f", "x")


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def choice_figures(choice: Choice, machine: Machine) -> dict[str, Any]:
    """A choice of a plan as plain data."""
    found = {**case_figures(choice.case), "measured": choice.measured}
    for name, (one, times) in (("formula", choice.formula), ("fastest", choice.fastest)):
        found[name] = asdict(one) | figures_of(choice.case, times, machine)
    return found


@click.command()
@click.option(
    "--format", "formats", type=Format("/"), multiple=True, help="Or FORMAT/FORMAT, of K and V."
)
@click.option("--batch", "batches", type=COUNT, multiple=True, help="Sequences.")
@click.option("--q-heads", "num_q_heads", type=COUNT, help="Query heads.")
@click.option("--kv-heads", "num_kv_heads", type=COUNT, help="KV heads.")
@click.option("--seq-len", "seq_lens", type=COUNT, multiple=True, help="Tokens.")
@click.option("--head-dim", type=HEAD_DIM, default=128, show_default=True, help="Of a row.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]), help="Of q and the output.")
@click.option("--quick", is_flag=True, help=f"Only the {CHEAPEST} cheapest plans, timed briefly.")
@JSON
def main(
    formats: tuple[str, ...],
    dtype: str | None,
    quick: bool,
    json_file: FilePath | None,
    **sizes: Any,
) -> None:
    """Find the fastest launch plans on this GPU and keep them in the table of measured plans.

    With several formats, batches or tokens all combinations are measured. Without batch, heads or
    tokens these are the shapes of TABLE.
    """
    check_output(json_file, endings=(".json",))
    if not any(sizes[name] for name in TABLE):
        sizes |= TABLE
    cases = list_cases(formats or FORMATS, dtype=getattr(torch, dtype) if dtype else None, **sizes)
    timer = GraphTimer(0.01 if quick else 0.05)
    machine = describe_machine(timer, __version__)
    click.echo(render_machine(machine) + "\n")
    gpu, rows = launch.gpu_of(timer.device.index), list[list[str]]()
    try:
        figures = _tune(cases, timer, machine, gpu, rows, CHEAPEST if quick else None)
    finally:  # what was measured is printed after an interrupt too
        if rows:
            click.echo(render_table(PLANS, rows))
    write_json(json_file, {"machine": asdict(machine)} | figures)


def save_table(rows: Iterable[Tuned], path: FilePath | None = None) -> FilePath:
    """Add rows to a table, the user's when path is None; they take the place of old ones of the
    same shapes. Several processes may do so at once. A damaged table is replaced.

    Returns:
        Where the table lies.

    Raises:
        ConfigError: it cannot be written, or a newer kvquant wrote it.
    """
    try:
        path = path or table_path()
        with locked(path):
            merged = {row.shape: row for row in (*_to_keep(path), *rows)}
            lines = ",\n".join(json.dumps(asdict(merged[shape])) for shape in sorted(merged))
            replace_file(path, f'{{"version": {TABLE_VERSION}, "rows": [\n{lines}\n]}}\n'.encode())
    except OSError as error:
        raise ConfigError(
            f"the table of measured plans cannot be written ({error}): let KVQUANT_CACHE_DIR name "
            "a folder that can be"
        ) from None
    return path


def _to_keep(path: FilePath) -> tuple[Tuned, ...]:
    """The rows of a table that is about to be written anew."""
    try:
        version, rows = read_table(path)
    except ValueError:
        return ()
    if version > TABLE_VERSION:
        raise ConfigError(
            f"the table of measured plans {path} is of version {version}, this kvquant writes "
            f"{TABLE_VERSION}: use the newer kvquant, let KVQUANT_CACHE_DIR name another folder, "
            "or move the table away"
        )
    return rows


def _tune(
    cases: Sequence[Case],
    timer: Timer,
    machine: Machine,
    gpu: GPU,
    rows: list[list[str]],
    most: int | None,
) -> dict[str, Any]:
    path = save_table(())  # an error, if any, comes before the measurements
    click.echo("plans: splits x warps of a block x stages")
    plans = {case: plans_to_measure(case, gpu, most) for case in cases}
    warm_up(timer.device, [partial(rehearse_plans, *one) for one in plans.items()])
    choices = []
    for choice in each_that_fits(cases, lambda case: tuned(case, timer, gpu, most)):
        path = save_table([table_row(choice, gpu)])
        rows.append(choice_cells(choice))
        choices.append(choice)
    click.echo(f"{len(choices)} plans kept in {path}: new processes use them\n")
    return {"plans": [choice_figures(choice, machine) for choice in choices]}


def each_that_fits(cases: Sequence[Case], measure: Callable[[Case], T]) -> Iterator[T]:
    """What is measured of each case; those that are too large for the GPU are named."""
    fitting = 0
    with progress(len(cases), "Timing") as update:
        for case in cases:
            try:
                found = measure(case)
            except torch.OutOfMemoryError:
                size = f"{case.nbytes / 1e9:.1f} GB of rows are more than fits"
                click.echo(f"{case.title}: {size}", err=True)
            else:
                fitting += 1
                yield found
            update(1, case.title)
    if not fitting:
        raise ConfigError("none of the cases fits the GPU: use a smaller --seq-len or --batch")


if __name__ == "__main__":
    main()
