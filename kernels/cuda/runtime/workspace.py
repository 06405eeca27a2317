"""Memory of launches whose splits are merged: counters, zero between launches, and partial
results.

Launches of one stream share a workspace. A launch in a CUDA graph may be replayed beside any other,
so it has counters of its own from a slab, which it keeps unless it is captured with a Lease, and
partial results from the graph's memory.

What outlives a call must not come from a graph's memory. torch.compile(mode="reduce-overhead") uses
that even before it captures. So a thread of its own allocates lasting memory, on the default
stream.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from .driver import uncaptured

SLAB = 1 << 20  # counters for captured launches: 4 MiB
_lock = threading.Lock()
_workspaces: dict[int | None, Workspaces] = {}
GROWTH = 2  # times a workspace that is too small: those before it take no more memory than it


class Workspace(NamedTuple):
    """What a launch needs besides its tensors; hold it until the launch is enqueued.

    counters are num_counters int32 zeros, partial num_partial float32.
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
        self._free = [range(SLAB)]  # places in the slab, in order
        self.returned: deque[range] = deque()  # by graphs that may still run

    def take(self, stream: int, counters: int, partial: int) -> Workspace:
        """The workspace of a launch on the device's current stream (raw handle)."""
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
            if self._slab is not None and (place := self._lend(counters)):
                return _workspace(self._slab[place.start : place.stop], numbers)
        zeroed_by_every_replay = torch.zeros(counters, dtype=torch.int32, device=self.device)
        return _workspace(zeroed_by_every_replay, numbers)

    def _lend(self, counters: int) -> range | None:
        """A place in the slab, if there is one."""
        for i, free in enumerate(self._free):
            if len(free) >= counters:
                place, self._free[i] = free[:counters], free[counters:]
                if (lease := _local.lease) is not None:
                    lease.places.append((self, place))
                return place
        return None

    def reclaim(self) -> None:
        """Lend to others what was given back; waits for the GPU if there is any."""
        if not self.returned:
            return
        with self._lock:
            count = len(self.returned)  # more may come meanwhile
            torch.cuda.synchronize(self.device)
            places = self._free + [self.returned.popleft() for _ in range(count)]
            self._free = []
            for place in sorted(filter(None, places), key=lambda one: one.start):
                if self._free and self._free[-1].stop == place.start:
                    place = range(self._free.pop().start, place.stop)
                self._free.append(place)

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
    with _lock:
        if device.index not in _workspaces:
            _workspaces[device.index] = Workspaces(device)
        return _workspaces[device.index]


class Lease:
    """The counters of graphs that this thread captures inside of it. The graphs must not outlive
    it. The next lease that begins waits for the GPU and lends them again."""

    def __init__(self) -> None:
        self.places: list[tuple[Workspaces, range]] = []
        self._outer: Lease | None = None

    def __enter__(self) -> Lease:
        for spaces in list(_workspaces.values()):
            spaces.reclaim()
        self._outer, _local.lease = _local.lease, self
        return self

    def __exit__(self, *error: object) -> None:
        _local.lease, self._outer = self._outer, None

    def __del__(self) -> None:  # at any line of any thread, one that holds a lock too
        for spaces, place in self.places:
            spaces.returned.append(place)


class _Local(threading.local):
    lease: Lease | None = None


_local = _Local()


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
