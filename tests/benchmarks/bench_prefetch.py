"""What the prefetch of K and V rows brings: decode attention with and without it, one thread.

Run by hand: python tests/benchmarks/bench_prefetch.py. Cold: the caches are overwritten before each
call, so that rows come from memory; warm: they are found where the last call left them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from kvquant import RowFormat, decode_attention, quantize_rows, reference_attention

FORMATS = ("int4-g4", "int8", "bf16")
CALLS = 60


def main() -> None:
    """Run each variant in a process of its own: compiled kernels are kept by their sources."""
    for variant in ("with", "without"):
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"NUMBA_CACHE_DIR": folder}
            subprocess.run([sys.executable, __file__, variant], env=environment, check=True)


def measure(variant: str) -> None:
    """Time one variant."""
    if variant == "without":
        from kvquant.kernels.cpu import simd

        setattr(simd.Emitter, "prefetch", lambda *args: None)  # noqa: B010  # mypy forbids =
    torch.set_num_threads(1)
    torch.manual_seed(0)
    overwritten = torch.zeros(1 << 26)  # 256 MiB
    q = torch.randn(1, 32, 128)
    lens = torch.full((1,), 8192, dtype=torch.int32)
    for name in FORMATS:
        fmt = RowFormat.parse(name, 128)
        k, v = (quantize_rows(torch.randn(1, 8, 8192, 128), fmt) for _ in range(2))

        def attend(k: torch.Tensor = k, v: torch.Tensor = v, fmt: RowFormat = fmt) -> torch.Tensor:
            out = decode_attention(q, k, v, lens, k_format=fmt, v_format=fmt)
            assert isinstance(out, torch.Tensor)
            return out

        expected = reference_attention(q, k, v, lens, k_format=fmt, v_format=fmt)
        assert (attend() - expected).norm() <= 1e-5 * expected.norm()
        times: dict[str, list[float]] = {"cold": [], "warm": []}
        for _ in range(CALLS):
            overwritten.add_(1)
            for state in times:
                start = time.perf_counter()
                attend()
                times[state].append(1e3 * (time.perf_counter() - start))
        cold, warm = (statistics.median(taken) for taken in times.values())
        print(
            f"{variant:<8} prefetch  {name:<8} cold {cold:.3f} ms  warm {warm:.3f} ms", flush=True
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        main()
