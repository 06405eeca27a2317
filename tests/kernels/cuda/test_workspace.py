"""Where the memory of launches comes from, and how long it lives. No GPU is needed."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from attend import launch_attention
from fake_cuda import FakeDriver, make_query, make_segment

from kvquant.kernels.cuda.decode import launch
from kvquant.kernels.cuda.runtime.workspace import SLAB, Lease, Workspaces, workspaces_of

Allocations = list[tuple[str, int, int]]  # function, elements, thread


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


@pytest.fixture
def captured(cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> tuple[Workspaces, list[int]]:
    """Workspaces that have a slab, in which all is captured; notes of waits for the GPU."""
    spaces, waits = workspaces_of(torch.device("cpu")), list[int]()
    spaces.take(1, 10, 10)
    capture(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append(len(spaces._free)))
    return spaces, waits


def place(spaces: Workspaces, counters: int) -> int:
    """Where counters of a captured launch lie in the slab; negative where it is full."""
    assert spaces._slab is not None
    taken = spaces.take(1, counters, 10)
    assert not taken.counters.any()
    found = taken.counters_address - spaces._slab.data_ptr()
    return found // 4 if 0 <= found < 4 * SLAB else -1


def test_a_dropped_lease_gives_its_counters_to_later_graphs(
    captured: tuple[Workspaces, list[int]],
) -> None:
    spaces, waits = captured
    leases = [Lease() for _ in range(3)]
    for lease in leases:
        with lease:
            for _ in range(4):
                place(spaces, 100)
    assert place(spaces, 100) == 1200, "outside of them counters stay with their graph"
    assert not waits, "nothing was given back"
    del lease, leases[0]
    gc.collect()
    assert place(spaces, 100) == 1300, "its graph may still run"
    with Lease():
        assert waits == [1]
        assert [place(spaces, n) for n in (300, 101, 100)] == [0, 1400, 300]
    leases.clear()  # together with what the last one gave back
    gc.collect()
    with Lease():
        assert [place(spaces, n) for n in (1200, 1, 1)] == [0, 1400, 1401]
        assert place(spaces, SLAB - 1402) == 1402
        assert place(spaces, 1) == -1
    with Lease():
        assert place(spaces, SLAB - 1400) == 1400


def test_captures_without_end_do_not_use_the_slab_up(
    captured: tuple[Workspaces, list[int]],
) -> None:
    spaces, _ = captured
    for size in range(SLAB // 3, SLAB // 3 + 50):
        with Lease():
            assert place(spaces, size) >= 0
            assert place(spaces, size) >= 0


def test_a_lease_has_the_counters_of_its_thread_only(
    captured: tuple[Workspaces, list[int]],
) -> None:
    spaces, _ = captured
    with Lease() as outer, Lease() as inner:
        thread = threading.Thread(target=place, args=(spaces, 100))
        thread.start()
        thread.join()
        assert place(spaces, 50) == 100
    assert (outer.places, inner.places) == ([], [(spaces, range(100, 150))])


def test_outgrown_workspaces_stay_and_sizes_double(spaces: Workspaces) -> None:
    sizes = range(100, 2000, 10)
    taken = [spaces.take(1, size, 3 * size) for size in sizes]
    distinct = {one.partial_address: one.num_partial for one in taken}
    for size, one in zip(sizes, taken, strict=True):
        assert one.num_counters >= size and one.num_partial >= 3 * size
        assert not one.counters.any()
    assert len(distinct) == len(set(distinct.values())) == 6, "none was freed and used again"
    assert sum(distinct.values()) <= 2 * max(distinct.values())


def test_a_side_that_is_too_small_grows_alone_and_of_its_stream(spaces: Workspaces) -> None:
    first = spaces.take(1, 100, 1000)
    assert spaces.take(1, 50, 10) is first is not spaces.take(2, 50, 10)
    larger = spaces.take(1, 101, 1000)
    assert (larger.num_counters, larger.num_partial) == (200, 1000)
    assert larger.counters_address == larger.counters.data_ptr()
    assert larger.counters.dtype == torch.int32


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
        out, lse = launch_attention(make_query(), [make_segment()], 1.0, 1, want_lse)
        assert out.untyped_storage().nbytes() == 2 * out.numel()
        assert lse is None or lse.untyped_storage().nbytes() == 4 * lse.numel()
    launches = launch._launches.values()
    assert len(launches) == 2, "with lse, and without"
    for cached in launches:
        assert not any(isinstance(one, torch.Tensor) for one in vars(cached).values())
