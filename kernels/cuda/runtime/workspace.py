"""Memory of launches whose splits are merged: counters, zero between launches, and partial results.

Launches of one stream follow one another, so they share a workspace. A launch that is captured into
a CUDA graph may be replayed beside any other: it has counters of its own, from a slab that was
zeroed before, and partial results from the graph's memory.

What outlives a call must not come from a graph's memory, which the next graph overwrites. torch
turns to that not only while it captures: torch.compile(mode="reduce-overhead") also runs a call in
it beforehand. It goes by the thread and by the stream that is captured. So lasting memory is
allocated by a thread of its own, on the default stream, which is never captured.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .driver import uncaptured

SLAB = 1 << 20  # counters for captured launches: 4 MiB
_lock = threading.Lock()
_workspaces: dict[int | None, Workspaces] = {}
GROWTH = 2  # times a workspace that is too small: those before it take no more memory than it


class Workspace(NamedTuple):
    """What a launch needs besides its tensors; hold it until the launch is enqueued.

    Attributes:
        counters: int32, zeros.
        partial: float32.
        num_counters, num_partial: how many.
        counters_address, partial_address: where they lie.
    """

    counters: torch.Tensor
    partial: torch.Tensor
    num_counters: int
    num_partial: int
    counters_address: int
    partial_address: int


class Workspaces:
    """The workspaces on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._of_stream: dict[int, Workspace] = {}
        self._outgrown: list[Workspace] = []  # their stream may not be done with them
        self._slab: torch.Tensor | None = None
        self.taken = 0

    def take(self, stream: int, counters: int, partial: int) -> Workspace:
        """The workspace of a launch on the device's current stream.

        Args:
            stream: raw handle of the current stream.
            counters: how many.
            partial: how many numbers.
        """
        # asked where it may be: the default stream is never captured
        if stream and torch.cuda.is_current_stream_capturing():
            return self._for_capture(counters, partial)
        found = self._of_stream.get(stream)
        if found and counters <= found.num_counters and partial <= found.num_partial:
            return found
        with self._lock:
            if self._slab is None:  # now: graphs are usually captured after a first call
                self._slab = self._lasting(SLAB, torch.int32)
            found = self._of_stream.get(stream)
            if found:
                counters = _grown(found.num_counters, counters)
                partial = _grown(found.num_partial, partial)
            made = _workspace(
                self._lasting(counters, torch.int32), self._lasting(partial, torch.float32)
            )
            if found:
                self._outgrown.append(found)
            self._of_stream[stream] = made
        return made

    def _for_capture(self, counters: int, partial: int) -> Workspace:
        numbers = torch.empty(partial, dtype=torch.float32, device=self.device)
        with self._lock:
            if self._slab is not None and self.taken + counters <= SLAB:
                first = self.taken
                self.taken += counters
                return _workspace(self._slab[first : first + counters], numbers)
        zeroed_by_every_replay = torch.zeros(counters, dtype=torch.int32, device=self.device)
        return _workspace(zeroed_by_every_replay, numbers)

    def _lasting(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros that any stream may use, from no graph's memory."""

        def allocate() -> torch.Tensor:
            with uncaptured():
                zeros = torch.zeros(count, dtype=dtype, device=self.device)
                torch.cuda.current_stream(self.device).synchronize()
            return zeros

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(allocate).result()


def workspaces_of(device: torch.device) -> Workspaces:
    """Those on a GPU, made once."""
    with _lock:
        if device.index not in _workspaces:
            _workspaces[device.index] = Workspaces(device)
        return _workspaces[device.index]


@contextmanager
def reuse_counters() -> Iterator[None]:
    """Give the counters that are taken meanwhile for captured launches to others afterwards."""
    taken = {index: spaces.taken for index, spaces in _workspaces.items()}
    try:
        yield
    finally:
        for index, spaces in _workspaces.items():
            spaces.taken = taken.get(index, 0)


def _grown(size: int, needed: int) -> int:
    return size if needed <= size else max(needed, GROWTH * size)


def _workspace(counters: torch.Tensor, partial: torch.Tensor) -> Workspace:
    return Workspace(
        counters,
        partial,
        counters.numel(),
        partial.numel(),
        counters.data_ptr(),
        partial.data_ptr(),
    )
