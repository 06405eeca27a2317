"""Launch plans measured by tests/benchmarks/bench_tune.py, with a fake timer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_timer import H200, MACHINE, FakeTimer, small

from kvquant.bench.timer import Call
from kvquant.kernels.cuda.decode.plan import Plan
from kvquant.kernels.cuda.runtime import launch as runtime

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bench_tune
from bench_tune import PLANS
from measuring import Times


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """What the launcher is told to run, in the order of the calls; the last one runs now."""
    told: list[Plan] = []

    @contextmanager
    def force(plan: Plan) -> Iterator[None]:
        told.append(plan)
        yield

    monkeypatch.setattr(bench_tune, "forced", force)
    monkeypatch.setattr(runtime, "gpu_of", lambda index: H200)
    return told


def test_tuning_keeps_the_fastest_plan(forced: list[Plan]) -> None:
    def times(call: Call) -> float:
        plan = forced[-1]
        return 10.0 if (plan.warps, plan.stages) == (8, 3) else 11.0 + plan.splits[0]

    choice = bench_tune.tuned(small(), FakeTimer(times), H200)
    # the formula's and the fastest are measured again
    assert len(forced) - 2 == len(set(forced)) == choice.measured > 4
    assert forced[-2:] == [choice.formula[0], choice.fastest[0]]
    assert choice.formula[0] == forced[0]
    plan, measured = choice.fastest
    assert (plan.warps, plan.stages, measured) == (8, 3, Times(10.0, 8.0))
    row = bench_tune.table_row(choice, H200)
    assert [row.gpu, row.k, row.v] == ["NVIDIA H200", "int4-g4/64", "int4-g4/64"]
    assert [row.units, row.capacity, row.warps, row.splits] == [4, 70, 8, plan.splits[0]]
    cells = bench_tune.choice_cells(choice)
    assert len(cells) == len(PLANS)
    assert cells[:5] == ["int4-g4", "2", "4:2", "70", str(choice.measured)]
    gain = choice.formula[1].alone / 10.0
    assert cells[-2:] == [f"{gain:.2f}x"] * 2
    assert bench_tune.choice_figures(choice, MACHINE)["fastest"]["warps"] == 8


def test_the_fastest_by_chance_is_not_taken(forced: list[Plan]) -> None:
    seen: set[Plan] = set()

    def times(call: Call) -> float:
        plan = forced[-1]
        first = plan not in seen
        seen.add(plan)
        return 10.0 if first and (plan.warps, plan.stages) == (8, 3) else 11.0

    choice = bench_tune.tuned(small(seq_len=4096), FakeTimer(times), H200, most=3)
    assert choice.fastest == choice.formula and choice.measured <= 4


def test_a_gain_that_may_be_noise_leaves_the_plan_of_the_formula() -> None:
    one, two = (Plan((1,), warps, 3) for warps in (4, 8))
    for gain, chosen in ((1.02, one), (1.05, two)):
        found = {one: Times(10.0, 8.0), two: Times(10.0 / gain, 8.0 / gain)}
        assert bench_tune.fastest(found, one) == chosen
