"""Microseconds of one layer's decode step: append and attend, at 2048 tokens, 32 heads on 8.

Run by hand: python tests/benchmarks/bench_step.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from kvquant import KVCache

STEPS = 200


def median_us(call: Callable[[], object]) -> float:
    """Median over STEPS calls."""
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    """Print a line per cache and batch."""
    torch.manual_seed(0)
    for sink_len, recent_len in ((0, 0), (4, 128)):
        for batch in (1, 16):
            cache = KVCache(1, batch, 8, 128, 4096, sink_len=sink_len, recent_len=recent_len)
            prompt = torch.randn(batch, 8, 2048, 128)
            cache.append(0, prompt, prompt)
            k, q = torch.randn(batch, 8, 1, 128), torch.randn(batch, 32, 128)
            append = median_us(partial(cache.append, 0, k, k))
            attend = median_us(partial(cache.attend, 0, q))
            print(
                f"int4-g4, {sink_len} sinks, {recent_len} recent, batch {batch:>2}: "
                f"append {append:.0f} us, attend {attend:.0f} us"
            )


if __name__ == "__main__":
    main()
