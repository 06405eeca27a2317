"""What it costs to turn a query into a basis and an output back, and to encode new rows, beside
plain torch.

Run by hand on a GPU: python tests/benchmarks/bench_affine.py. A CUDA graph has the calls of 32
layers with a basis each, one after the other; the L2 cache is overwritten before each replay.
"""

from __future__ import annotations

from collections.abc import Callable

import click
import torch

from kvquant.bench.timer import GraphTimer
from kvquant.kernels.cuda.affine.launch import encode_rows
from kvquant.ops.transform import affine_rows
from kvquant.rows.basis import Basis, transform_rows

HEADS, DIM, LAYERS = 8, 128, 32
KINDS = ("none", "hadamard", "matrix")


@click.command()
@click.option("--batch", "batches", multiple=True, default=[1, 8, 64, 256], show_default=True)
@click.option("--q-heads", default=32, show_default=True, help="On 8 KV heads; 8 to encode.")
def main(batches: tuple[int, ...], q_heads: int) -> None:
    """Time the steps for every kind of basis; alone, an offset or a rotation is encoded by the
    append kernel."""
    torch.manual_seed(0)
    click.echo(f"{'microseconds, batch':24}" + "".join(f"{batch:>9}" for batch in batches))
    for kind in KINDS:
        for step in ("turn", "restore", "encode"):
            if (kind, step) in (("none", "turn"), ("none", "encode"), ("hadamard", "encode")):
                continue
            for way in ("one launch", "torch"):
                times = [measure(kind, step, way, batch, q_heads) for batch in batches]
                name = f"{kind}, {step}, {way}"
                click.echo(f"{name:24}" + "".join(f"{t:9.2f}" for t in times))


def measure(kind: str, step: str, way: str, batch: int, q_heads: int) -> float:
    """Microseconds of a call, after a look at what comes out."""
    matrix = torch.randn(LAYERS, HEADS, DIM, DIM) if kind == "matrix" else [None] * LAYERS
    bases = [Basis(torch.randn(HEADS, DIM), kind, one).to("cuda") for one in matrix]
    x = torch.randn(batch, HEADS if step == "encode" else q_heads, DIM, device="cuda").bfloat16()
    lens = torch.ones(batch, dtype=torch.int32, device="cuda")

    def fused(basis: Basis) -> torch.Tensor:
        if step == "encode":
            assert basis.encoding.matrix is not None
            return encode_rows(x, basis.encoding.matrix, basis.offset)
        if step == "turn":
            return affine_rows(x, basis.matrix)
        return affine_rows(x, basis.transposed, basis.offset, lens)

    def plain(basis: Basis) -> torch.Tensor:
        if step == "encode":
            return transform_rows(x, basis.encoding)
        if step == "turn":
            return basis.transform_query(x).to(x.dtype)
        return basis.restore(x).masked_fill(lens[:, None, None] == 0, 0).to(x.dtype)

    rtol = 1e-4 if step == "encode" else 2**-7
    torch.testing.assert_close(fused(bases[0]), plain(bases[0]), rtol=rtol, atol=1e-3)
    call: Callable[[Basis], torch.Tensor] = fused if way == "one launch" else plain

    def run() -> None:
        for basis in bases:
            call(basis)

    return GraphTimer().alone(run) / LAYERS


if __name__ == "__main__":
    main()
