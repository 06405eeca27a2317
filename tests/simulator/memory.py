"""Shared and global memory of the simulator, which see what a GPU does not tell."""

from __future__ import annotations

import bisect
import ctypes
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt

SHARED_BASE = 1024  # address of dynamic shared memory: on sm_90 the first KiB is the system's
WARP = 32
POISON = 0xFF  # NaN in every float format
SEVERAL = -1  # lanes, or warps
Array = npt.NDArray[Any]
Use = tuple[int, int]  # the lane, and the barriers of its warp until then


class Fault(RuntimeError):
    """What a GPU would stop at, or leave undefined."""


class Shared:
    """Dynamic shared memory of a block: poison where nobody wrote, and who used a word last.

    Two lanes that use a word, one of them to write it, must have a barrier in between: syncthreads,
    a barrier of some warps, or syncwarp if both are of one warp. All else is a race, even if it
    goes well.

    Attributes:
        bytes: the memory.
    """

    def __init__(self, size: int, warps: int):
        self._memory = bytearray([POISON]) * size
        self.bytes = np.frombuffer(self._memory, np.uint8)
        # by word of 4 bytes, since syncthreads: who wrote it last, and who has read it since, by
        # warp; all earlier uses came before that write, or it was a race
        self._written: dict[int, tuple[int, int, int]] = {}  # the warp, and its use
        self._read: dict[int, dict[int, Use]] = {}
        self._barriers = [0] * warps
        # by warp: of each warp, the barriers before which all that it did came before
        self._known = [[0] * warps for _ in range(warps)]
        self._copied_to: set[int] = set()  # words that asynchronous copies are under way to
        self._unfenced = defaultdict[int, set[int]](set)  # by lane, words that wgmma need not see

    def meet(self, warps: Iterable[int] | None = None) -> None:
        """Note a barrier of some warps, or of the block."""
        if warps is None:
            self._read.clear()
            self._written.clear()
            return
        warps = list(warps)
        self.learn(warps, self.come(warps))

    def come(self, warps: Iterable[int]) -> list[int]:
        """Note that warps come to a barrier; of each warp, the barriers before which they know that
        all came before."""
        warps = list(warps)
        for warp in warps:
            self._barriers[warp] += 1
            self._known[warp][warp] = self._barriers[warp]
        return [max(counts) for counts in zip(*(self._known[w] for w in warps), strict=True)]

    def learn(self, warps: Iterable[int], known: Sequence[int]) -> None:
        """Note that warps go on from a barrier, to which others came that knew this."""
        for warp in warps:
            self._known[warp] = list(map(max, self._known[warp], known))

    def fence(self, lane: int) -> None:
        """Let wgmma see what a lane wrote."""
        self._unfenced.pop(lane, None)

    def load(self, lane: int, address: int, size: int) -> Array:
        """Bytes that a lane reads."""
        start = self._at(address, size)
        warp = lane // WARP
        use, known = (lane, self._barriers[warp]), self._known[warp]
        for word in range(start // 4, -(-(start + size) // 4)):
            if word in self._copied_to:
                continue  # poison, which a kernel may read if it does not use it
            if word in self._written:
                other, writer, barriers = self._written[word]
                if barriers >= known[other] and writer != lane:
                    raise _race(word, "read", lane, "written", writer)
            readers = self._read.setdefault(word, {})
            last, barriers = readers.get(warp, use)
            readers[warp] = use if last == lane or barriers < known[warp] else (SEVERAL, use[1])
        return self.bytes[start : start + size]

    def load_rows(self, warp: int, addresses: list[int]) -> Array:
        """Rows of 16 bytes that a warp reads for all of its lanes."""
        starts = [self._at(address, 16) for address in addresses]
        words = {word for start in starts for word in range(start // 4, start // 4 + 4)}
        self._read_by_warps([warp], words)
        return np.stack([self.bytes[start : start + 16] for start in starts])

    def load_halves(self, warps: Sequence[int], starts: Array, words: Set[int]) -> Array:
        """Words of 16 bits that wgmma reads, for all lanes of the warps of a warpgroup.

        Args:
            warps: of the warpgroup.
            starts: where they lie in the memory.
            words: the words of 4 bytes that they are in.
        """
        self._read_by_warps(warps, words)
        for lane, written in self._unfenced.items():
            if not written.isdisjoint(words):
                raise Fault(
                    f"wgmma reads shared address {4 * min(written.intersection(words))}, written "
                    f"by thread {lane} without fence.proxy.async"
                )
        found: Array = self.bytes.view(np.uint16)[starts // 2]
        return found

    def _read_by_warps(self, warps: Sequence[int], words: Set[int]) -> None:
        """Note that all lanes of some warps read words."""
        uses = {warp: (SEVERAL, self._barriers[warp]) for warp in warps}
        known = list(map(min, *(self._known[warp] for warp in warps), self._known[warps[0]]))
        for word in words - self._copied_to:
            if word in self._written:
                other, writer, barriers = self._written[word]
                if barriers >= known[other]:
                    raise _race(word, "read", SEVERAL, "written", writer)
            if word in self._read:
                self._read[word].update(uses)
            else:
                self._read[word] = uses.copy()

    def store(self, lane: int, address: int, data: bytes) -> None:
        """Write bytes."""
        start = self._at(address, len(data))
        self._start_writing(lane, start, len(data))
        self._memory[start : start + len(data)] = data

    def start_copy(self, lane: int, address: int, data: bytes) -> int:
        """Poison what an asynchronous copy will write, and give its place for `finish_copy`."""
        start = self._at(address, len(data))
        self._copied_to.update(self._start_writing(lane, start, len(data)))
        self.bytes[start : start + len(data)] = POISON
        return start

    def finish_copy(self, lane: int, start: int, data: bytes) -> None:
        """Write what a lane has waited for."""
        words = range(start // 4, -(-(start + len(data)) // 4))
        self._copied_to.difference_update(words)
        self._write(lane, words)
        self._memory[start : start + len(data)] = data

    def _at(self, address: int, size: int) -> int:
        start = int(address) - SHARED_BASE
        if start % size or not 0 <= start <= len(self.bytes) - size:
            raise Fault(
                f"{size} bytes at shared address {start}: it must be a multiple of {size} in "
                f"{len(self.bytes)} bytes"
            )
        return start

    def _start_writing(self, lane: int, start: int, size: int) -> range:
        words = range(start // 4, -(-(start + size) // 4))
        if not self._copied_to.isdisjoint(words):
            raise Fault(f"shared address {start} is written while a copy to it is under way")
        self._write(lane, words)
        return words

    def _write(self, lane: int, words: range) -> None:
        """Note that a lane writes words."""
        warp = lane // WARP
        known, use = self._known[warp], (warp, lane, self._barriers[warp])
        for word in words:
            if word in self._written:
                other, writer, barriers = self._written[word]
                if barriers >= known[other] and writer != lane:
                    raise _race(word, "written", lane, "written", writer)
            if word in self._read:
                for other, (reader, barriers) in self._read.pop(word).items():
                    if barriers >= known[other] and reader != lane:
                        raise _race(word, "written", lane, "read", reader)
            self._written[word] = use
        self._unfenced[lane].update(words)


def _race(word: int, is_used: str, lane: int, was_used: str, last: int) -> Fault:
    return Fault(
        f"a race: shared address {4 * word} is {is_used} by {_name(lane)}, {was_used} by "
        f"{_name(last)}, and no barrier in between"
    )


def _name(lane: int) -> str:
    return "several lanes" if lane == SEVERAL else f"thread {lane}"


class Global:
    """Global memory: the tensors of a launch, rounded to the 16 bytes that a GPU allocates by.

    Args:
        memory: (address, bytes) of each tensor.
    """

    def __init__(self, memory: Iterable[tuple[int, int]]):
        spans = sorted((start & -16, -(-(start + size) // 16) * 16) for start, size in memory)
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]
        self._written: set[int] = set()  # words of 4 bytes

    def load(self, address: int, size: int, unit: int, *, constant: bool = True) -> bytes:
        """Bytes; `constant`: through a cache that does not see what this launch writes."""
        words = self._words(address, size, unit)
        if constant and not self._written.isdisjoint(words):
            raise Fault(f"{int(address):#x} is read as a constant, but this launch has written it")
        return ctypes.string_at(int(address), size)

    def store(self, address: int, data: bytes) -> None:
        """Write bytes."""
        self._written.update(self._words(address, len(data), len(data)))
        ctypes.memmove(int(address), data, len(data))

    def _words(self, address: int, size: int, unit: int) -> range:
        """The words of an access, which must be aligned to `unit` and in one tensor."""
        start = int(address)
        i = bisect.bisect_right(self._starts, start) - 1
        if i < 0 or start + size > self._ends[i]:
            raise Fault(f"{size} bytes at {start:#x} are in no tensor of this launch")
        if start % unit:
            raise Fault(f"{size} bytes at {start:#x} are not aligned to {unit}")
        return range(start // 4, -(-(start + size) // 4))
