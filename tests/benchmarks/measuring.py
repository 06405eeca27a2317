"""What the scripts of this folder share: how a run on a GPU begins, times of a case, and errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvquant import __version__
from kvquant.bench.cases import Case, Inputs, check
from kvquant.bench.measure import render_machine, time_figures
from kvquant.bench.timer import GraphTimer, Machine, Timer, describe_machine


class Times(NamedTuple):
    """Microseconds of a call alone, and in a row; None where inputs stay in the L2 cache."""

    alone: float
    in_a_row: float | None


def begin(seconds: float = 0.05) -> GraphTimer:
    """Seed random numbers, print the GPU and its limits, and give what takes times."""
    torch.manual_seed(0)
    timer = GraphTimer(seconds)
    print(render_machine(describe_machine(timer, __version__)))
    return timer


def check_and_time(
    case: Case, inputs: Sequence[Inputs], timer: Timer, limit: float = math.inf
) -> tuple[float, Times]:
    """The relative error of a case, and its times; over a limit it is timed alone and roughly."""
    error, calls = check(case, inputs[0]), [one.attend for one in inputs]
    alone = timer.alone(calls[0], limit)
    rotates = alone <= limit and timer.rotation(case.nbytes)
    return error, Times(alone, timer.in_a_row(calls) if rotates else None)


def figures_of(case: Case, times: Times, machine: Machine) -> dict[str, float | None]:
    """Times as plain data."""
    return time_figures(case, times.alone, times.in_a_row, machine)


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """|value - expected| / |expected| in float64."""
    expected = expected.double()
    return float((value.double() - expected).norm() / expected.norm())
