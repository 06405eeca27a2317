"""The stopwatches of kvquant bench, of a GPU without one, and what they say of the machine."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant.bench import timer as timer_module
from kvquant.bench.measure import render_machine
from kvquant.bench.timer import GraphTimer, Timer, describe_machine


@pytest.mark.parametrize(
    ("nbytes", "copies"), [(1 << 30, 1), (60 << 20, 4), (1 << 20, 240), (1 << 10, 0)], ids=str
)
def test_inputs_outgrow_the_l2_cache(nbytes: int, copies: int) -> None:
    timer = GraphTimer.__new__(GraphTimer)
    timer.l2_bytes = 60 << 20
    assert timer.rotation(nbytes) == copies


def test_l2_is_overwritten_outside_of_the_time_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 0.012  # ms

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    class Scratch:
        def zero_(self) -> None:
            log.append("overwrite")

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        log.append("capture")
        yield
        log.append("captured")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    timer: Any = GraphTimer.__new__(GraphTimer)
    timer.scratch, timer.microseconds = Scratch(), 240.0
    replay = ["overwrite", "event", "replay", "event"]

    assert timer.alone(lambda: log.append("call")) == pytest.approx(12.0)
    begin = ["call", "synchronize", "capture", "call", "captured"]
    assert log == [*begin, *3 * replay, "synchronize", *20 * replay, "synchronize"]
    log.clear()
    assert timer.alone(lambda: None, limit=11.0) == pytest.approx(12.0)
    assert log.count("replay") == 3
    log.clear()
    assert timer.in_a_row([lambda i=i: log.append(str(i)) for i in range(5)]) == 1.0
    assert log[:5] == [str(i) for i in range(5)]  # each once before the capture
    assert log[7:19] == [str(i % 5) for i in range(12)]


def test_calls_of_a_cpu_take_turns() -> None:
    log: list[str] = []
    times = Timer(0.01).alone_each([lambda: log.append("a"), lambda: log.append("b")])
    assert len(times) == 2 and min(times) > 0
    assert log[::2] == ["a"] * (len(log) // 2) and log[1::2] == ["b"] * (len(log) // 2)


def test_a_call_much_slower_than_an_earlier_one_is_timed_roughly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []

    def alone(timer: object, call: Callable[[], float], limit: float) -> float:
        limits.append(limit)
        return call()

    monkeypatch.setattr(GraphTimer, "alone", alone)

    def large() -> float:
        raise torch.OutOfMemoryError

    timer = GraphTimer.__new__(GraphTimer)
    inf = float("inf")
    assert timer.alone_each([large, lambda: 3.0, lambda: 9.0, lambda: 2.0]) == [inf, 3, 9, 2]
    assert limits == [inf, inf, 6, 6]


AMD = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC

processor\t: 1
model name\t: AMD EPYC
"""
ARM = """processor\t: 0
BogoMIPS\t: 2000.00
CPU part\t: 0xd4f
"""


def test_a_record_of_the_machine_names_processor_versions_and_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Timer, "read_bandwidth", lambda timer: 34.71)
    monkeypatch.setattr(timer_module, "CPUINFO", tmp_path / "cpuinfo")
    named = {"": platform.machine(), AMD: "AMD EPYC (family 25, model 17)"}
    for text, name in (named | {ARM: platform.machine()}).items():
        if text:
            timer_module.CPUINFO.write_text(text)
        machine = describe_machine(Timer(), "0.1.0")
        assert machine.device == name
    assert machine.backend == f"{torch.get_num_threads()} threads"
    assert machine.torch == torch.__version__
    assert machine.kvquant == "0.1.0" and machine.date.endswith("+00:00")
    first, second = render_machine(machine).splitlines()
    assert first.startswith(machine.device) and second == "peak bandwidth 35 GB/s"
