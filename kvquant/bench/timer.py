"""Stopwatches: of a GPU, by replays of CUDA graphs, and of a CPU, by calls that take turns.

Alone: on a GPU a graph of one call, with a cold L2 cache and events around each replay; launch is
included. In a row (GPU only): time per call in a graph of many calls, on inputs that together are
several times larger than the L2 cache.
"""

from __future__ import annotations

import ctypes
import datetime
import math
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

MIN_CALLS = 12  # in a row
MAX_REPLAYS = 200  # of a graph
MAX_COPIES = 1024  # of inputs; caches too small for that stay in L2, and are timed alone only
L2_TIMES = 4  # all inputs against L2; with twice its size a fifth of the reads would still hit it
GIVE_UP = 2.0  # a call this much slower than the fastest before it is not timed to the end
CPUINFO = Path("/proc/cpuinfo")

Call = Callable[[], object]


@dataclass(frozen=True)
class Machine:
    """What was measured, what ran on it and when, and its memory's bandwidth as measured, GB/s.

    Attributes:
        device: name of the GPU or the processor.
        backend: "CUDA 13.0", or "2 threads".
    """

    device: str
    backend: str
    torch: str
    kvquant: str
    date: str
    read_gb_per_s: float


class Timer:
    """Times calls on the CPU in microseconds, for about so many seconds."""

    device = torch.device("cpu")

    def __init__(self, seconds: float = 3.0) -> None:
        self.seconds = seconds

    def rotation(self, nbytes: int) -> int:
        """Inputs of this size that outgrow the L2 cache of a GPU together; 0 if too many."""
        return 0

    def alone(self, call: Call, limit: float = math.inf) -> float:
        """Median of single calls; on a GPU a rough time beyond the limit."""
        return self.alone_each([call])[0]

    def alone_each(self, calls: Sequence[Call]) -> list[float]:
        """The same of several calls, which take turns to see the same machine."""
        times: list[list[float]] = [[] for _ in calls]
        end = time.perf_counter() + self.seconds
        while not times[0] or time.perf_counter() < end:
            for call, taken in zip(calls, times, strict=True):
                start = time.perf_counter()
                call()
                taken.append(time.perf_counter() - start)
        return [1e6 * statistics.median(taken) for taken in times]

    def in_a_row(self, calls: Sequence[Call]) -> float:
        raise NotImplementedError

    def read_bandwidth(self) -> float:
        """GB/s at which torch sums 1 GiB of float32."""
        x = torch.zeros(1 << 28, dtype=torch.float32, device=self.device)
        return x.nbytes / self.alone(x.sum) / 1e3


class GraphTimer(Timer):
    """Times calls on the current GPU by CUDA graphs, each for about so many seconds."""

    def __init__(self, seconds: float = 0.05) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.microseconds = 1e6 * seconds
        self.l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        # long enough on any GPU that the host has queued the replay before it is over
        size = max(2 * self.l2_bytes, 128 << 20)
        self.scratch = torch.empty(size, dtype=torch.uint8, device=self.device)

    def rotation(self, nbytes: int) -> int:
        copies = -(-L2_TIMES * self.l2_bytes // nbytes)
        return copies if copies <= MAX_COPIES else 0

    def alone(self, call: Call, limit: float = math.inf) -> float:
        return self._median(capture([call]), limit)

    def alone_each(self, calls: Sequence[Call]) -> list[float]:
        """See Timer; a much slower call is timed roughly, one without room is infinite."""
        found: list[float] = []
        for call in calls:
            try:
                found.append(self.alone(call, GIVE_UP * min(found, default=math.inf)))
            except torch.OutOfMemoryError:
                found.append(math.inf)
        return found

    def in_a_row(self, calls: Sequence[Call]) -> float:
        many = [calls[i % len(calls)] for i in range(max(MIN_CALLS, len(calls)))]
        return self._median(capture(many)) / len(many)

    def read_bandwidth(self) -> float:
        """GB/s at which torch sums 4 GiB of float32, or what fits of it."""
        size = 1 << 30
        while True:
            try:
                x = torch.zeros(size, dtype=torch.float32, device=self.device)
                return x.nbytes / self.alone(x.sum) / 1e3
            except torch.OutOfMemoryError:
                if size <= 1 << 24:
                    raise
                size //= 2

    def _median(self, graph: torch.cuda.CUDAGraph, limit: float = math.inf) -> float:
        first = statistics.median(self.replay(graph, 3))
        if first > limit:
            return first
        count = min(max(int(self.microseconds / max(first, 1.0)), 10), MAX_REPLAYS)
        return statistics.median(self.replay(graph, count))

    def replay(self, graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
        """Microseconds of so many replays, each with a cold L2 cache."""
        spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in spans:
            self.scratch.zero_()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in spans]


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A graph of calls, each of which runs once before."""
    for call in {id(call): call for call in calls}.values():
        call()  # compiles; that cannot be captured
    torch.cuda.synchronize()  # a capture runs on a stream of its own
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def describe_machine(timer: Timer, version: str) -> Machine:
    """The timer's device, its measured bandwidth, and what else matters."""
    if timer.device.type == "cuda":
        device, cuda = torch.cuda.get_device_properties(timer.device).name, ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(cuda))
        backend = f"CUDA {cuda.value // 1000}.{cuda.value % 1000 // 10}"
    else:
        device, backend = processor_name(), f"{torch.get_num_threads()} threads"
    return Machine(
        device=device,
        backend=backend,
        torch=torch.__version__,
        kvquant=version,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        read_gb_per_s=timer.read_bandwidth(),
    )


def processor_name() -> str:
    """ "AMD EPYC (family 25, model 17)", as virtual machines cut names; on Arm the architecture."""
    text = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    facts = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
    name = facts.get("model name") or platform.machine()
    of = " (family {cpu family}, model {model})" if "cpu family" in facts else ""
    return name + of.format(**facts)
