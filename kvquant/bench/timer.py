"""A stopwatch for calls on a GPU: replays of CUDA graphs, and the limits they show.

A call has two times on the GPU. Alone: a graph of one call, the L2 cache overwritten before each
replay, with events around the replay only; launch and cold start are in it. In a row: a graph of
many calls, each on inputs of its own, together several times larger than the L2 cache; time per
call. Eager: many calls from Python, without a graph; where the GPU is faster, the host's time.
"""

from __future__ import annotations

import ctypes
import datetime
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

MIN_CALLS = 12  # in a row
MAX_REPLAYS = 200  # of a graph, or calls of a loop
LOOPS = 5  # of calls from Python
MAX_COPIES = 1024  # of inputs; caches too small for that stay in L2, and are timed alone only
L2_TIMES = 4  # all inputs against L2; with twice its size a fifth of the reads would still hit it

Call = Callable[[], object]


@dataclass(frozen=True)
class Machine:
    """The GPU and its limits, as measured: GB/s, and microseconds of an empty graph's replay."""

    gpu: str
    driver: str
    torch: str
    kvquant: str
    date: str
    num_sms: int
    l2_bytes: int
    read_gb_per_s: float
    empty_graph_us: float


class Timer(Protocol):
    """Takes times in microseconds of calls on tensors of its device."""

    device: torch.device

    def rotation(self, nbytes: int) -> int:
        """Inputs of this size that outgrow the L2 cache together; 0 if too many."""

    def alone(self, call: Call, limit: float = math.inf) -> float:
        """Median of single calls, L2 cold; one that takes longer than limit is timed roughly."""

    def in_a_row(self, calls: Sequence[Call]) -> float:
        """Per call, one after the other."""

    def eager(self, calls: Sequence[Call]) -> float:
        """Per call, one after the other from Python, without a graph."""


class GraphTimer:
    """Times calls on the current device by replays of CUDA graphs.

    Args:
        seconds: about how long a graph is replayed.
    """

    def __init__(self, seconds: float = 0.05) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.microseconds = 1e6 * seconds
        self.l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        # long enough on any GPU that the host has queued the replay before it is over
        size = max(2 * self.l2_bytes, 128 << 20)
        self.scratch = torch.empty(size, dtype=torch.uint8, device=self.device)

    def rotation(self, nbytes: int) -> int:
        """See Timer."""
        copies = -(-L2_TIMES * self.l2_bytes // nbytes)
        return copies if copies <= MAX_COPIES else 0

    def alone(self, call: Call, limit: float = math.inf) -> float:
        """See Timer."""
        return self._median(capture([call]), limit)

    def in_a_row(self, calls: Sequence[Call]) -> float:
        """See Timer."""
        many = [calls[i % len(calls)] for i in range(max(MIN_CALLS, len(calls)))]
        return self._median(capture(many)) / len(many)

    def eager(self, calls: Sequence[Call]) -> float:
        """See Timer."""
        first = self._loop(calls, MIN_CALLS)
        count = min(max(int(self.microseconds / LOOPS / max(first, 1.0)), MIN_CALLS), MAX_REPLAYS)
        return statistics.median(self._loop(calls, count) for _ in range(LOOPS))

    def empty(self) -> float:
        """Microseconds of an empty graph's replay."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            return self._median(capture([]))

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
        """Microseconds of so many replays, the L2 cache overwritten before each."""
        spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in spans:
            self.scratch.zero_()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in spans]

    def _loop(self, calls: Sequence[Call], count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(count):
            calls[i % len(calls)]()
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - start) / count


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


def describe_machine(timer: GraphTimer, version: str) -> Machine:
    """Measure the limits of the timer's GPU and name what else matters."""
    properties = torch.cuda.get_device_properties(timer.device)
    cuda = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(cuda))
    return Machine(
        gpu=properties.name,
        driver=f"CUDA {cuda.value // 1000}.{cuda.value % 1000 // 10}",
        torch=torch.__version__,
        kvquant=version,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        num_sms=properties.multi_processor_count,
        l2_bytes=timer.l2_bytes,
        read_gb_per_s=timer.read_bandwidth(),
        empty_graph_us=timer.empty(),
    )
