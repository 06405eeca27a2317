"""What a plan's bases cost in a step of a paged cache: append and attend of a layer.

Run by hand: python tests/benchmarks/bench_paged_plan.py --device cuda. On a GPU one CUDA graph has
the step, and the L2 cache is overwritten before each replay; on the CPU calls are timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import click
import torch

from kvquant import PagedBatch, PagedKVCache
from kvquant.bench.timer import GraphTimer
from kvquant.rows.basis import Basis, LayerBasis
from kvquant.rows.quantize import feedback_matrix

HEADS, Q_HEADS, DIM, LAYERS, CHUNK = 8, 32, 128, 4, 2048


@click.command()
@click.option("--seq-len", "seq_lens", multiple=True, default=[2048, 16384], show_default=True)
@click.option("--batch", default=8, show_default=True, help="Sequences.")
@click.option("--format", default="int4", show_default=True, help="Of K and V.")
@click.option("--device", default="cpu", show_default=True)
def main(seq_lens: tuple[int, ...], batch: int, format: str, device: str) -> None:
    """Time steps for every kind of basis.

    \b
    Example:
      python tests/benchmarks/bench_paged_plan.py --seq-len 2048 --seq-len 32768 --device cuda
    """
    torch.manual_seed(0)
    offset = torch.randn(HEADS, DIM)  # of all rows, so that no basis has an easier task
    click.echo(f"{'microseconds of a layer at':27}" + "".join(f"{n:>10,}" for n in seq_lens))
    for name, basis in make_bases(offset).items():
        times = [measure(basis, offset.to(device), n, batch, format) for n in seq_lens]
        click.echo(f"{name:27}" + "".join(f"{t:10.1f}" for t in times))


def make_bases(offset: torch.Tensor) -> dict[str, Basis | None]:
    """A basis of each kind, by what is printed."""
    clip = torch.full((HEADS,), 0.95)
    matrix = torch.eye(DIM) + 0.02 * torch.randn(HEADS, DIM, DIM)
    feedback = feedback_matrix((matrix @ matrix.mT).double()).float()
    return {
        "no plan": None,
        "offset": Basis(offset),
        "hadamard, clip": Basis(offset, "hadamard", clip=clip),
        "matrix, clip": Basis(offset, "matrix", matrix, clip),
        "matrix, clip, feedback": Basis(offset, "matrix", matrix, clip, feedback),
    }


def measure(basis: Basis | None, offset: torch.Tensor, seq_len: int, batch: int, fmt: str) -> float:
    """Microseconds of a layer's append and attend, after a look at what comes out."""
    cache = PagedKVCache(
        LAYERS,
        HEADS,
        DIM,
        batch * (seq_len // 64 + 1),
        max_num_seqs=batch,
        max_seq_len=seq_len + 64,
        k_format=fmt,
        v_format=fmt,
        device=offset.device,
        bases=None if basis is None else [LayerBasis(basis, basis)] * LAYERS,
    )
    prefill, step = (PagedBatch(cache, *n, shared_prefix=False) for n in ((1, CHUNK), (batch,)))
    for sequence in range(batch):
        cache.allocate(sequence)
        for start in range(0, seq_len, CHUNK):
            count = min(CHUNK, seq_len - start)
            rows = (torch.randn(2, count, HEADS, DIM, device=offset.device) + offset).bfloat16()
            with prefill.extend([sequence], count):
                for layer in range(LAYERS):
                    prefill.append(layer, *rows)
    k, v = (torch.randn(2, batch, HEADS, DIM, device=offset.device) + offset).bfloat16()
    q = torch.randn(batch, Q_HEADS, DIM, device=offset.device).bfloat16()

    def run() -> None:
        for layer in range(LAYERS):
            step.append(layer, k, v)
            step.attend(layer, q)

    with step.extend(range(batch)):
        run()
        check(cache, step, q)
        timed = GraphTimer().alone if offset.is_cuda else _time
        return timed(run) / LAYERS


def check(cache: PagedKVCache, step: PagedBatch, q: torch.Tensor) -> None:
    """Raise unless a step attends to the dequantized rows."""
    out = step.attend(0, q)
    assert isinstance(out, torch.Tensor)
    k, v = (x.repeat_interleave(Q_HEADS // HEADS, 0) for x in cache.dequantized(0, 0))
    scores = (k @ q[0, :, :, None].float())[..., 0] / DIM**0.5
    expected = (scores.softmax(-1)[..., None] * v).sum(1)
    error = float((out[0].float() - expected).norm() / expected.norm())
    assert error < 2e-2, error


def _time(call: Callable[[], None]) -> float:
    times = []
    for _ in range(20):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return median(times)


if __name__ == "__main__":
    main()
