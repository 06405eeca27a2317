"""What a plan's bases cost: the fused call of a KVCache, with and without them.

python tests/benchmarks/bench_plan.py --seq-len 8192
"""

from __future__ import annotations

import time
from statistics import median

import click
import torch

from kvquant import KVCache
from kvquant.rows.basis import Basis, LayerBasis

HEADS, DIM = 2, 128


@click.command()
@click.option("--seq-len", default=8192, show_default=True, help="Tokens of each sequence.")
@click.option("--batch", default=4, show_default=True, help="Sequences.")
@click.option("--format", default="int4", show_default=True, help="Of K and V.")
@click.option("--repeats", default=100, show_default=True, help="Calls; the median counts.")
@click.option("--device", default="cpu", show_default=True)
def main(seq_len: int, batch: int, format: str, repeats: int, device: str) -> None:
    """Time KVCache.attend for every kind of basis.

    \b
    Example:
      python tests/benchmarks/bench_plan.py --seq-len 8192 --batch 4
    """
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    k, v = torch.randn(2, batch, HEADS, seq_len, DIM, device=device, dtype=dtype)
    q = torch.randn(batch, 4 * HEADS, DIM, device=device, dtype=dtype)
    matrix = torch.eye(DIM) + 0.05 * torch.randn(HEADS, DIM, DIM)
    offset = torch.randn(HEADS, DIM)
    kinds = {
        "no plan": None,
        "offset": Basis(offset),
        "hadamard": Basis(offset, "hadamard"),
        "matrix": Basis(offset, "matrix", matrix),
    }
    for name, basis in kinds.items():
        cache = KVCache(
            1,
            batch,
            HEADS,
            DIM,
            seq_len,
            k_format=format,
            v_format=format,
            device=device,
            bases=None if basis is None else [LayerBasis(basis, basis)],
        )
        cache.append(0, k, v)
        times = []
        for _ in range(repeats):
            _wait(device)
            start = time.perf_counter()
            cache.attend(0, q)
            _wait(device)
            times.append(time.perf_counter() - start)
        click.echo(f"{name:10} {1e6 * median(times):8.1f} µs")


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
