"""What the scripts of this folder share: how a run on a GPU begins, and the measure of errors."""

from __future__ import annotations

import torch

from kvquant import __version__
from kvquant.bench.report import render_machine
from kvquant.bench.timer import GraphTimer, describe_machine


def begin(seconds: float = 0.05) -> GraphTimer:
    """Seed random numbers, print the GPU and its limits, and give what takes times."""
    torch.manual_seed(0)
    timer = GraphTimer(seconds)
    print(render_machine(describe_machine(timer, __version__)))
    return timer


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """|value - expected| / |expected| in float64."""
    expected = expected.double()
    return float((value.double() - expected).norm() / expected.norm())
