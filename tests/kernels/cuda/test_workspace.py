"""Where the memory of launches comes from, and how long it lives. No GPU is needed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from fake_cuda import FakeDriver, install, make_query, make_segment

from kvquant.kernels.cuda.decode import launch
from kvquant.kernels.cuda.runtime.workspace import SLAB, Workspaces

Allocations = list[tuple[str, int, int]]  # function, elements, thread


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The CPU as an H200 with a driver that takes notes."""
    return install(monkeypatch)


@pytest.fixture
def spaces(cuda: FakeDriver) -> Workspaces:
    return Workspaces(torch.device("cpu"))


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Allocations:
    """Notes of every torch.zeros and torch.empty."""
    notes: Allocations = []
    for name in ("zeros", "empty"):
        make = getattr(torch, name)

        def noted(size: Any, *, make: Any = make, name: str = name, **options: Any) -> torch.Tensor:
            made: torch.Tensor = make(size, **options)
            notes.append((name, made.numel(), threading.get_ident()))
            return made

        monkeypatch.setattr(torch, name, noted)
    return notes


def capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_what_lasts_is_allocated_by_another_thread(
    cuda: FakeDriver, spaces: Workspaces, allocations: Allocations
) -> None:
    spaces.take(1, 10, 20)
    assert [note[:2] for note in allocations] == [("zeros", SLAB), ("zeros", 10), ("zeros", 20)]
    assert threading.get_ident() not in [thread for *_, thread in allocations]
    # each with captures of other threads left alone
    assert cuda.calls.count("cuThreadExchangeStreamCaptureMode") == 2 * len(allocations)


def test_what_is_captured_uses_the_memory_of_its_graph(
    spaces: Workspaces, allocations: Allocations, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(monkeypatch)
    spaces.take(1, 10, 20)
    spaces.take(1, 10, 20)
    here = threading.get_ident()
    assert allocations == 2 * [("empty", 20, here), ("zeros", 10, here)]


def test_outgrown_workspaces_stay_and_sizes_double(spaces: Workspaces) -> None:
    sizes = range(100, 2000, 10)
    taken = [spaces.take(1, size, 3 * size) for size in sizes]
    distinct = {one.partial_address: one.num_partial for one in taken}
    for size, one in zip(sizes, taken, strict=True):
        assert one.num_counters >= size and one.num_partial >= 3 * size
        assert not one.counters.any()
    assert len(distinct) == len(set(distinct.values())) == 6, "none was freed and used again"
    assert sum(distinct.values()) <= 2 * max(distinct.values())


def test_one_side_that_is_too_small_does_not_double_the_other(spaces: Workspaces) -> None:
    spaces.take(1, 100, 1000)
    larger = spaces.take(1, 101, 1000)
    assert (larger.num_counters, larger.num_partial) == (200, 1000)


def test_a_thread_that_finds_no_memory_tells_the_caller(
    spaces: Workspaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = spaces.take(1, 10, 20)
    zeros = torch.zeros

    def full(*size: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(torch.OutOfMemoryError):
        spaces.take(1, 11, 20)
    assert spaces.take(1, 10, 20) is before
    monkeypatch.setattr(torch, "zeros", zeros)
    assert spaces.take(1, 11, 20).num_counters == 20


def test_cached_launches_hold_no_memory(cuda: FakeDriver) -> None:
    for want_lse in (False, True):
        out, lse = launch.attend(make_query(), [make_segment()], 1.0, 1, want_lse)
        assert out.untyped_storage().nbytes() == 2 * out.numel()
        assert lse is None or lse.untyped_storage().nbytes() == 4 * lse.numel()
    (cached,) = launch._launches.values()
    assert not any(isinstance(one, torch.Tensor) for one in vars(cached).values())
