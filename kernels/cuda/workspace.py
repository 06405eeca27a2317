"""Memory of launches whose splits are merged: counters, zero between launches, and partial results.

Launches of one stream follow one another, so they share a workspace. A launch that is captured into
a CUDA graph may be replayed beside any other: it has counters of its own, from a slab that was
zeroed before, and partial results from the graph's memory.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

SLAB = 1 << 20  # counters for captured launches: 4 MiB


@dataclass(frozen=True)
class Workspace:
    """What a launch needs besides its tensors; hold it until the launch is enqueued.

    Attributes:
        counters: int32, zeros.
        partial: float32.
        counters_address, partial_address: where they lie.
    """

    counters: torch.Tensor
    partial: torch.Tensor
    counters_address: int
    partial_address: int


class Workspaces:
    """The workspaces on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._of_stream: dict[int, Workspace] = {}
        self._slab: torch.Tensor | None = None
        self.taken = 0

    def take(self, stream: int, counters: int, partial: int) -> Workspace:
        """The workspace of a launch on the device's current stream.

        Args:
            stream: raw handle of the current stream.
            counters: how many.
            partial: how many numbers.
        """
        if torch.cuda.is_current_stream_capturing():
            return self._for_capture(counters, partial)
        found = self._of_stream.get(stream)
        if found and counters <= found.counters.numel() and partial <= found.partial.numel():
            return found
        with self._lock:
            if self._slab is None:
                self._slab = self._zeros(SLAB)
                torch.cuda.current_stream(self.device).synchronize()  # graphs run on any stream
            if found:
                counters = max(counters, found.counters.numel())
                partial = max(partial, found.partial.numel())
            made = self._make(self._zeros(counters), partial)
            self._of_stream[stream] = made
        return made

    def _for_capture(self, counters: int, partial: int) -> Workspace:
        with self._lock:
            if self._slab is None or self.taken + counters > SLAB:
                return self._make(self._zeros(counters), partial)  # zeroed by every replay
            first = self.taken
            self.taken += counters
            return self._make(self._slab[first : first + counters], partial)

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def _make(self, counters: torch.Tensor, partial: int) -> Workspace:
        numbers = torch.empty(partial, dtype=torch.float32, device=self.device)
        return Workspace(counters, numbers, counters.data_ptr(), numbers.data_ptr())
