"""The stopwatch of kvquant bench: what is run before it is captured. No GPU is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from kvquant.bench import timer as timer_module


def test_every_call_runs_before_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def graph(_: object) -> Iterator[None]:
        events.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("synchronize"))

    def make_call(name: str) -> Callable[[], None]:
        return lambda: events.append(name)

    first, second = make_call("first"), make_call("second")
    timer_module.capture([first, second, first])
    before = ["first", "second", "synchronize", "capture"]
    assert events == [*before, "first", "second", "first"]
