"""Run a CUDA kernel without a GPU: numba's simulator, by lanes and warps.

    lane    a greenlet (PyPI). One lane of a block runs at a time, until it has to meet others; then
            the next goes on. So nothing is locked, and every run is the same.
    warp    32 lanes that meet at a collective: the last to come computes for all, in numpy.
    block   its lanes and its shared memory. Blocks run one after another.

What a GPU leaves undefined is a Fault here, or gives NaN: addresses that are misaligned or in no
tensor of the launch, lanes that do not meet, lanes that use the same shared memory without a
barrier, shared memory that nobody wrote, rows that were asked for but not waited for. The
instructions themselves are in instructions.py.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
from greenlet import greenlet
from memory import POISON, WARP, Fault, Global, Shared
from numba.cuda.simulator.kernelapi import Dim3, FakeCUDAModule

GROUP = 128  # lanes of a warpgroup
BARRIERS = 16  # of a block; number 0 is syncthreads
SCALARS = (np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.float32)

_running: list[Block] = []  # the block that runs; one launch at a time, as in numba's simulator


def launch(
    kernel: Callable[..., None],
    grid: Sequence[int],
    threads: int,
    shared_bytes: int,
    arguments: Sequence[Any],
    memory: Iterable[tuple[int, int]],
    *,
    backwards: bool = False,
) -> None:
    """Run a kernel block by block.

    Args:
        kernel: the Python function.
        grid: blocks along x, y and z.
        threads: of a block, a multiple of 32.
        shared_bytes: dynamic shared memory of a block.
        arguments: of the kernel: numpy scalars, and tuples of them.
        memory: (address, bytes) of every tensor that the kernel may touch.
        backwards: start with the last block and the last lane; results must not depend on it.

    Raises:
        Fault: in a lane, with its block and thread.
    """
    tensors = Global(memory)
    blocks = list(np.ndindex(*grid))
    with _swapped(_Cuda(grid, (threads, 1, 1), 0)):
        for index in reversed(blocks) if backwards else blocks:
            _running.append(Block(index, threads, shared_bytes, tensors))
            try:
                _running[0].run(kernel, arguments, backwards)
            finally:
                _running.clear()


def block() -> Block:
    """The block that runs."""
    if not _running:
        raise Fault("PTX instructions run in kernels only: see simulator.launch")
    return _running[0]


@contextmanager
def _swapped(cuda: _Cuda) -> Iterator[None]:
    """Let all modules see `cuda` in place of numba.cuda, as numba's simulator does at each call.

    Once a launch is faster, and so are numpy's scalars in place of the types that make them.
    """
    swaps = {"cuda": cuda, **{kind.__name__: kind for kind in SCALARS}}
    found = [
        (vars(module), name)
        for module in list(sys.modules.values())
        if not module.__name__.startswith("numba")
        for name in swaps
        if vars(module).get(name) is getattr(numba, name)
    ]
    for names, name in found:
        names[name] = swaps[name]
    try:
        yield
    finally:
        for names, name in found:
            names[name] = getattr(numba, name)


class _Cuda(FakeCUDAModule):
    """The module `cuda` as kernels see it: numba's, by lanes and warps."""

    local = shared = property(lambda self: self)

    @property
    def threadIdx(self) -> Any:
        return block().current.threadIdx

    @property
    def blockIdx(self) -> Any:
        return block().blockIdx

    def array(self, shape: Any, dtype: Any) -> Any:
        """A local array, poisoned; or, for shape 0, dynamic shared memory."""
        dtype = np.dtype(getattr(dtype, "name", dtype))  # numba's types bear numpy's names
        if shape == 0:
            return block().shared.bytes.view(dtype)
        made = np.empty(shape, dtype)
        made.view(np.uint8).fill(POISON)
        return made

    def syncthreads(self) -> None:
        block().gather()

    def syncwarp(self) -> None:
        block().meet_warp()


class Lane:
    """A thread of a block: where it waits, its asynchronous copies.

    Attributes:
        number: in the block.
        warp: number of its warp.
        life: its run of the kernel.
    """

    life: greenlet

    def __init__(self, number: int):
        self.number = number
        self.warp = number // WARP
        self.threadIdx = Dim3(number, 0, 0)
        self.place = "its start"
        self.value: Any = None  # that it gives at a collective, then what it gets
        self.copies: list[tuple[int, bytes]] = []  # of the group that is not committed yet
        self.groups: deque[list[tuple[int, bytes]]] = deque()


@dataclass
class Meeting:
    """At a barrier of some warps.

    Attributes:
        waiting: lanes that wait.
        arrived: how many came without waiting.
        known: what their warps knew (Shared.come).
    """

    waiting: list[Lane] = field(default_factory=list)
    arrived: int = 0
    known: list[list[int]] = field(default_factory=list)


class Block:
    """A block that runs: its lanes, whose turn it is, and its memory.

    Attributes:
        current: the lane that runs.
        shared: shared memory.
        tensors: global memory.
    """

    def __init__(self, index: Sequence[int], threads: int, shared_bytes: int, tensors: Global):
        self.index = index
        self.blockIdx = Dim3(*index)
        self.lanes = [Lane(number) for number in range(threads)]
        self.warps = [self.lanes[i : i + WARP] for i in range(0, threads, WARP)]
        self.shared = Shared(shared_bytes, len(self.warps))
        self.tensors = tensors
        self.current = self.lanes[0]
        self._ready: deque[Lane] = deque()
        self._waiting: list[list[Lane]] = [[] for _ in self.warps]  # at a collective
        self._gathered: list[Lane] = []  # at syncthreads
        self._groups: dict[int, list[Lane]] = {}  # at a collective of a warpgroup, by its number
        self._meetings: dict[int, Meeting] = {}  # by the number of a barrier of some warps
        self._ended = 0

    def run(self, kernel: Callable[..., None], arguments: Sequence[Any], backwards: bool) -> None:
        """Run every lane to its end."""

        def live() -> None:
            with np.errstate(all="ignore"):  # integers wrap, floats become inf and NaN
                kernel(*arguments)
            self.current.place = "the end"
            self._ended += 1
            self._release_gathered()

        for lane in self.lanes:
            lane.life = greenlet(live)
        self._ready.extend(reversed(self.lanes) if backwards else self.lanes)
        try:
            while self._ready:
                self.current = self._ready.popleft()
                self.current.life.switch()
        except Exception as error:
            text = f"thread {self.current.number}: {type(error).__name__}: {error}"
            raise Fault(f"block {self.index}, {text}") from error
        else:
            self._require_all_ended()
        finally:
            for lane in self.lanes:
                lane.life.throw()  # ends those that still wait

    def meet(self, place: str, value: Any, combine: Callable[[list[Any]], Iterable[Any]]) -> Any:
        """This lane's item of combine([the values of all lanes]), once they have come."""
        lane, waiting = self.current, self._waiting[self.current.warp]
        lane.place, lane.value = place, value
        if len(waiting) < WARP - 1:
            waiting.append(lane)
            self._wait(lane)
            return lane.value
        lanes = self.warps[lane.warp]
        places = {other.place for other in lanes}
        if len(places) > 1:
            raise Fault(f"lanes of a warp meet at different instructions: {sorted(places)}")
        results = combine([other.value for other in lanes])
        for other, result in zip(lanes, results, strict=True):
            other.value = result
        self._ready.extend(waiting)
        waiting.clear()
        return lane.value

    def meet_warp(self) -> None:
        """Go on when every lane of the warp has come."""

        def combine(values: list[Any]) -> list[Any]:
            self.shared.meet([self.current.warp])
            return values

        self.meet("syncwarp", None, combine)

    def gather(self) -> None:
        """Go on when every lane of the block that has not ended has come."""
        lane = self.current
        lane.place = "syncthreads"
        self._gathered.append(lane)
        self._release_gathered()
        self._wait(lane)

    def meet_group(
        self, place: str, value: Any, combine: Callable[[list[Any]], Iterable[Any]]
    ) -> Any:
        """As meet, of a warpgroup: 4 warps, the first of them a multiple of 4."""
        lane = self.current
        group = lane.number // GROUP
        waiting = self._groups.setdefault(group, [])
        lane.place, lane.value = place, value
        if len(waiting) < GROUP - 1:
            waiting.append(lane)
            self._wait(lane)
            return lane.value
        lanes = self.lanes[GROUP * group : GROUP * (group + 1)]
        places = {other.place for other in lanes}
        if len(places) > 1:
            raise Fault(f"lanes of a warpgroup meet at different instructions: {sorted(places)}")
        for other, result in zip(lanes, combine([one.value for one in lanes]), strict=True):
            other.value = result
        self._ready.extend(waiting)
        waiting.clear()
        return lane.value

    def meet_warps(self, barrier: int, threads: int) -> None:
        """Go on when so many threads, whole warps, have come to a barrier."""
        lane = self.current
        lane.place = f"barrier {barrier}"
        meeting = self._meeting(barrier, threads)
        meeting.waiting.append(lane)
        self._release_meeting(barrier, threads, meeting)
        self._wait(lane)

    def arrive(self, barrier: int, threads: int) -> None:
        """Come to a barrier of so many threads, and go on at once, when the warp has come."""

        def combine(values: list[Any]) -> list[Any]:
            meeting = self._meeting(barrier, threads)
            meeting.arrived += WARP
            meeting.known.append(self.shared.come([self.current.warp]))
            self._release_meeting(barrier, threads, meeting)
            return values

        self.meet(f"arrival at barrier {barrier}", None, combine)

    def _meeting(self, barrier: int, threads: int) -> Meeting:
        if not 0 < barrier < BARRIERS or threads % WARP:
            raise Fault(f"barrier {barrier} of {threads} threads: 1 to {BARRIERS - 1}, whole warps")
        return self._meetings.setdefault(int(barrier), Meeting())

    def _release_meeting(self, barrier: int, threads: int, meeting: Meeting) -> None:
        come = len(meeting.waiting) + meeting.arrived
        if come > threads:
            raise Fault(f"barrier {barrier}: {come} threads come, of {threads}")
        if come == threads:
            warps = {other.warp for other in meeting.waiting}
            if len(warps) * WARP != len(meeting.waiting):
                raise Fault(f"barrier {barrier}: lanes of {len(warps)} warps, but not all of them")
            if warps:
                known = [self.shared.come(warps), *meeting.known]
                self.shared.learn(warps, [max(counts) for counts in zip(*known, strict=True)])
            self._ready.extend(meeting.waiting)
            del self._meetings[int(barrier)]

    def start_copy(
        self,
        target: int,
        source: int,
        size: int,
        valid: int | None = None,
        *,
        constant: bool = True,
    ) -> None:
        """Start an asynchronous copy of `valid` bytes, then zeros; `constant` as of Global.load."""
        valid = size if valid is None else int(valid)
        if valid > size:
            raise Fault(f"a copy of {valid} bytes into {size}")
        data = self.tensors.load(source, valid, size, constant=constant) if valid else b""
        data = data.ljust(size, b"\0")
        self.current.copies.append(
            (self.shared.start_copy(self.current.number, target, data), data)
        )

    def commit_copies(self) -> None:
        """Close the current lane's group of copies."""
        self.current.groups.append(self.current.copies)
        self.current.copies = []

    def wait_copies(self, pending: int) -> None:
        """Finish the current lane's groups but the youngest `pending`."""
        while len(self.current.groups) > pending:
            for start, data in self.current.groups.popleft():
                self.shared.finish_copy(self.current.number, start, data)

    def _require_all_ended(self) -> None:
        if self._ended < len(self.lanes):
            places: dict[str, list[int]] = {}
            for lane in self.lanes:
                places.setdefault(lane.place, []).append(lane.number)
            raise Fault(f"block {self.index}, threads wait for others that never come: {places}")

    def _release_gathered(self) -> None:
        if len(self._gathered) + self._ended == len(self.lanes):
            self.shared.meet()
            self._ready.extend(self._gathered)
            self._gathered = []

    def _wait(self, lane: Lane) -> None:
        """Let the lanes that are ready go on, until others let this one."""
        lane.life.parent.switch()
