"""A GPU of no machine: its figures, small cases, and a timer that runs calls on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvquant.bench.cases import Case, parse_formats
from kvquant.bench.timer import Call, Machine, Timer
from kvquant.kernels.cuda.runtime.launch import GPU

CPU = torch.device("cpu")
H200 = GPU("NVIDIA H200", (9, 0), 132, 228 << 10, 227 << 10)
MACHINE = Machine("GPU", "CUDA 13.0", "2.11", "0.1", "2026-11-21", 4000.0)


class FakeTimer(Timer):
    """Runs every call once; the times are what it is told, by default 10 us alone, 8 in a row."""

    device = CPU

    def __init__(self, times: Callable[[Call], float] = lambda call: 10.0, copies: int = 2) -> None:
        self.times, self.copies = times, copies
        self.calls: list[Call] = []

    def rotation(self, nbytes: int) -> int:
        assert nbytes > 0
        return self.copies

    def alone(self, call: Call, limit: float = math.inf) -> float:
        self.calls.append(call)
        call()
        return self.times(call)

    def in_a_row(self, calls: Sequence[Call]) -> float:
        assert len(calls) == self.copies
        for call in calls:
            call()
        return 0.8 * self.times(calls[0])

    def alone_each(self, calls: Sequence[Call]) -> list[float]:
        return [self.alone(call) for call in calls]

    def read_bandwidth(self) -> float:
        return 4000.0


def small(name: str = "int4-g4", **sizes: Any) -> Case:
    shape = {"batch": 2, "num_q_heads": 4, "num_kv_heads": 2, "seq_len": 70}
    return Case(*parse_formats(name, 64), **(shape | sizes))
