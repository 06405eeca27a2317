"""Launch plans and techniques measured by tests/benchmarks/bench_tune.py, with a fake timer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_timer import H200, MACHINE, FakeTimer, small

from kvquant.bench.timer import Call
from kvquant.kernels.cuda.decode.plan import Plan
from kvquant.kernels.cuda.decode.spec import TECHNIQUES, WIDE
from kvquant.kernels.cuda.runtime import launch as runtime

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bench_tune
from bench_tune import KERNELS, PLANS
from measuring import Times


@pytest.fixture
def override_plan(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Plan, str]]:
    """What the launcher is told to run, in the order of the calls; the last one runs now."""
    told: list[tuple[Plan, str]] = []

    @contextmanager
    def force(plan: Plan, without: str = "") -> Iterator[None]:
        told.append((plan, without))
        yield

    monkeypatch.setattr(bench_tune, "override_plan", force)
    monkeypatch.setattr(runtime, "gpu_of", lambda index: H200)
    return told


def test_tuning_keeps_the_fastest_plan(override_plan: list[tuple[Plan, str]]) -> None:
    def times(call: Call) -> float:
        plan = override_plan[-1][0]
        return 10.0 if (plan.warps, plan.stages) == (8, 3) else 11.0 + plan.splits[0]

    choice = bench_tune.tuned(small(), FakeTimer(times), H200)
    # the formula's and the fastest are measured again
    assert len(override_plan) - 2 == len(set(override_plan)) == choice.measured > 4
    assert override_plan[-2:] == [(choice.formula[0], WIDE), (choice.fastest[0], WIDE)]
    assert choice.formula[0] == override_plan[0][0]
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


def test_the_fastest_by_chance_is_not_taken(override_plan: list[tuple[Plan, str]]) -> None:
    seen: set[Plan] = set()

    def times(call: Call) -> float:
        plan = override_plan[-1][0]
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


@pytest.mark.parametrize("name", ["int4-g4", "int4-g8", "bf16", "int4"])
def test_ablation_leaves_out_one_thing_at_a_time(
    name: str, override_plan: list[tuple[Plan, str]]
) -> None:
    case = small(name, seq_len=4096)
    found = bench_tune.ablated(case, FakeTimer(), H200)
    assert [
        (one.plan, without) for one, (_, without) in zip(found, override_plan, strict=True)
    ] == override_plan
    whole, best = found[0], found[0].plan
    techniques = [without for _, without in override_plan if without != WIDE]
    own = {"padded shared memory"} if name in ("int4-g4", "int4") else set()
    assert set(techniques) == set(TECHNIQUES) - own
    plans = [plan for plan, without in override_plan[1:] if without == WIDE]
    assert best not in plans and len(plans) == len(set(plans))
    assert {plan.stages for plan in plans} - {best.stages}
    assert {plan.splits[0] for plan in plans} >= {1, 2 * best.splits[0]} - set(best.splits)
    cells = bench_tune.ablation_cells(whole, whole)
    assert len(cells) == len(KERNELS)
    assert cells[-4:] == ["10.0", "1.00x", "8.0", "1.00x"]
    assert bench_tune.ablation_figures(found[1], MACHINE)["kernel"].startswith("without ")


@pytest.mark.gpu
def test_every_ablation_is_right_on_a_gpu() -> None:
    given = "--ablate --format bf16 --batch 2 --seq-len 1000".split()
    done = CliRunner().invoke(bench_tune.main, given)
    assert done.exit_code == 0, done.output
    assert "without padded shared memory" in done.stdout
