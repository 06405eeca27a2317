"""decode_attention on CUDA: microseconds a call and GB/s of rows read, beside the read roof.

Run by hand on a GPU: python tests/benchmarks/bench_cuda.py. 8 query heads on 1 KV head and 8192
tokens; 12 calls in a CUDA graph on rotated inputs, larger together than the L2 cache; median of 20
replays. Each format is compared with the reference first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from kvquant import RowFormat, decode_attention, quantize_rows, reference_attention

FORMATS = ("int4-g4", "int8-g4", "bf16", "int4", "int8", "fp8")
BATCHES = (1, 32, 128, 512)
TOKENS, CALLS, REPLAYS = 8192, 12, 20


def median_us(call: Callable[[], object]) -> float:
    """Median microseconds of a call on the GPU."""
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def measure(name: str, batch: int) -> None:
    """Print one case."""
    fmt = RowFormat.parse(name, 128)
    rows = quantize_rows(torch.randn(1, 1, 512, 128, device="cuda"), fmt)
    rows = rows.repeat(batch, 1, TOKENS // 512, 1)
    copies = min(8, int(3e8 // (2 * rows.nbytes)) + 1)
    pairs = [(rows.clone(), rows.clone()) for _ in range(copies)]
    q = torch.randn(batch, 8, 128, device="cuda", dtype=torch.bfloat16)
    lens = torch.full((batch,), TOKENS, dtype=torch.int32, device="cuda")
    formats: dict[str, Any] = {"k_format": fmt, "v_format": fmt}

    def call(i: int) -> Any:
        return decode_attention(q, *pairs[i % copies], lens, **formats)

    expected, _ = reference_attention(q[:2], rows[:2], rows[:2], lens[:2], **formats)
    error = float((call(0)[:2] - expected).norm() / expected.norm())
    assert error <= 3e-3, f"{name}: relative error {error:.1e}"
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    us = median_us(graph.replay) / CALLS
    speed = 2 * rows.nbytes / us / 1e3
    print(
        f"{name:<8} batch {batch:>3}  {us:7.1f} us  {speed:6.0f} GB/s  error {error:.1e}",
        flush=True,
    )


def main() -> None:
    """Print the roof and every case."""
    x = torch.zeros(1 << 30, device="cuda")
    print(f"{torch.cuda.get_device_name()}, read roof {x.nbytes / median_us(x.sum) / 1e3:.0f} GB/s")
    del x
    for name in FORMATS:
        for batch in BATCHES:
            measure(name, batch)


if __name__ == "__main__":
    main()
