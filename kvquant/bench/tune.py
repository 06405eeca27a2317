"""Launch plans measured on a GPU: the fastest for the table, and what each technique brings.

Plans are those of the decode kernel for any GPU. The one for wide groups has no such plans, and is
left out (WIDE).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..kernels.cuda.decode.launch import override_plan
from ..kernels.cuda.decode.plan import (
    Plan,
    candidates,
    fit,
    narrow,
    plan,
    price,
    stages_of,
    tuned_row,
)
from ..kernels.cuda.decode.spec import TECHNIQUES, TILE, WIDE, DecodeSpec, Path, columns_of
from ..kernels.cuda.decode.tuned import Tuned
from ..kernels.cuda.runtime.launch import GPU
from ..rows.format import RowFormat
from .cases import Case, rehearse_case
from .gpu import Times, check_and_time, rotated_inputs
from .timer import Timer

# shapes of the default table of plans
TABLE: dict[str, Any] = {
    "batches": (1, 8, 32, 64, 128, 256, 512),
    "seq_lens": (1024, 8192, 32768),
    "num_q_heads": 8,
    "num_kv_heads": 1,
}
# where the techniques are measured; bf16 rows are padded
ABLATED = TABLE | {"batches": (256,), "seq_lens": (8192,)}
ABLATED_FORMATS = ("int4-g4", "int4-g8", "bf16")
GIVE_UP = 1.25  # a plan this much slower alone than the best is not timed to the end
CHEAPEST = 12  # plans by the formula's prices that are measured where it has to be quick
WORTH = 1.03  # what a plan must gain over the formula's, both times considered: less may be noise


@dataclass(frozen=True)
class Choice:
    """The plan of the formula and the one to take for a case, of how many measured."""

    case: Case
    formula: tuple[Plan, Times]
    fastest: tuple[Plan, Times]
    measured: int


@dataclass(frozen=True)
class Ablation:
    """A kernel or a plan that differs from the best in one thing."""

    case: Case
    name: str
    plan: Plan
    times: Times


def tune(case: Case, timer: Timer, gpu: GPU, most: int | None = None) -> Choice:
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
        with override_plan(one, WIDE):
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
    """The formula's plan, then the others; arguments as of tune."""
    spec, units = decode_spec(case, gpu), num_units(case, gpu)
    formula = plan(spec, gpu, units, [case.seq_len])

    def price_of(one: Plan) -> float:
        kernel = fit(replace(spec, warps=one.warps, stages=one.stages), gpu)
        return price(kernel, units, [case.seq_len], one.splits)

    wanted = sorted(candidates(spec, gpu, units, [case.seq_len]), key=price_of)[:most]
    return list(dict.fromkeys([formula, *wanted]))


def rehearse_plans(case: Case, plans: Iterable[tuple[Plan, str]]) -> None:
    """Attend without values by plans, each perhaps without a technique, for a rehearsal: see
    kvquant/rehearsal.py."""
    kernels = {(one.warps, one.stages, without): one for one, without in plans}
    for (_, _, without), one in kernels.items():
        with override_plan(one, without or WIDE):
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


def ablate(case: Case, timer: Timer, gpu: GPU, rows: Sequence[Tuned] = ()) -> list[Ablation]:
    """Measure the kernel without each technique, and under other plans; all checked first.

    Args:
        case: plain rows.
        timer: takes the times.
        gpu: where it runs.
        rows: the table of measured plans.

    Returns:
        The kernel as it is, then the others.
    """
    inputs = rotated_inputs(case, timer)
    found = []
    for name, (one, without) in ablations(case, gpu, rows).items():
        with override_plan(one, without or WIDE):
            _, times = check_and_time(case, inputs, timer)
        found.append(Ablation(case, name, one, times))
    return found


def ablations(case: Case, gpu: GPU, rows: Sequence[Tuned] = ()) -> dict[str, tuple[Plan, str]]:
    """The best plan, and what is measured in its place: plans, and techniques to leave out, by
    name; rows as in ablate.

    Padding is left out only where it changes how rows lie; 80-byte rows are their own padding.
    """
    spec = decode_spec(case, gpu)
    best = plan(spec, gpu, num_units(case, gpu), [case.seq_len], rows=rows)
    spec = replace(spec, warps=best.warps, stages=best.stages)
    ring = spec.ring_bytes(spec.first)
    found = {"all techniques": (best, "")}
    for technique in TECHNIQUES:
        plain = replace(spec, without=technique)
        if technique != "padded shared memory" or plain.ring_bytes(plain.first) != ring:
            found[f"without {technique}"] = best, technique
    (splits,) = best.splits
    most = min(-(-case.seq_len // TILE), fit(spec, gpu).most_parts)
    for count in (1, splits // 2, 2 * splits):
        if count != splits and 1 <= count <= most:
            name = "1 split" if count == 1 else f"{count} splits"
            found[name] = replace(best, splits=(count,)), ""
    for stages in stages_of(spec):
        if stages != best.stages and fit(replace(spec, stages=stages), gpu).blocks:
            found[f"{stages} stages"] = replace(best, stages=stages), ""
    return found


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
