"""MLA decode attention on a GPU beside the read roof and torch's matrix products on 16-bit latents.

Run by hand: python tests/benchmarks/bench_mla.py. Results are first compared with the reference.
Times are per call: alone, and of calls in a row inside one CUDA graph, on rows of their own that
outgrow the L2 cache together. The share is that of the read roof.
"""

from __future__ import annotations

from functools import partial

import torch

from kvquant import LatentFormat, mla_decode_attention, quantize_rows
from kvquant.bench.timer import GraphTimer

FORMATS = ("int4-g8+fp8-g4", "int4-g8", "int8-g4", "fp8-g4+bf16", "fp8", "bf16")
SHAPES = (
    (64, 8192, 16),
    (64, 1024, 16),
    (64, 8192, 32),
    (64, 8192, 128),
    (16, 8192, 16),
    (1, 32768, 16),
    (1, 131072, 16),
)
DIMS = (512, 64)
SCALE = 192**-0.5
LIMIT = 4e-3
MOST_COPIES = 12


def main() -> None:
    """Print a line per format and shape."""
    torch.manual_seed(0)
    timer = GraphTimer()
    roof = timer.read_bandwidth()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(f"read roof {roof:.0f} GB/s; an empty graph takes {timer.empty():.1f} us")
    for name in FORMATS:
        print(f"{name}: relative L2 error {error_of(name):.1e}")
    print(f"{'':16}{'batch':>6}{'tokens':>8}{'heads':>6}{'alone':>11}{'in a row':>11}{'share':>7}")
    for shape in SHAPES:
        for name in FORMATS:
            measure(timer, name, *shape, roof)
        measure_torch(timer, *shape, roof)


def queries(batch: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed queries and their RoPE part, bfloat16."""
    latent, rope = (
        torch.randn(batch, heads, dim, dtype=torch.bfloat16, device="cuda") for dim in DIMS
    )
    return latent, rope


def random_rows(fmt: LatentFormat, batch: int, tokens: int) -> torch.Tensor:
    """[batch, tokens, row_bytes]: 512 rows, repeated."""
    few = quantize_rows(torch.randn(512, fmt.head_dim, device="cuda"), fmt)
    return few[torch.arange(batch * tokens, device="cuda") % 512].view(batch, tokens, -1)


def error_of(name: str) -> float:
    """How far results of ragged sequences are from the reference."""
    fmt = LatentFormat.parse(name, *DIMS)
    lens = torch.tensor([3000, 1, 0, 2999], dtype=torch.int32, device="cuda")
    x = torch.randn(4, 3000, fmt.head_dim, device="cuda")
    call = partial(
        mla_decode_attention,
        *queries(4, 16),
        quantize_rows(x, fmt),
        lens,
        fmt=fmt,
        sm_scale=SCALE,
    )
    wanted = call(backend="reference").double()
    error = float((call() - wanted).norm() / wanted.norm())
    assert error < LIMIT, (name, error)
    return error


def measure(timer: GraphTimer, name: str, batch: int, tokens: int, heads: int, roof: float) -> None:
    """Print a line of ours."""
    fmt = LatentFormat.parse(name, *DIMS)
    nbytes = batch * tokens * fmt.row_bytes
    lens = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
    q = queries(batch, heads)
    calls = [
        partial(
            mla_decode_attention,
            *q,
            random_rows(fmt, batch, tokens),
            lens,
            fmt=fmt,
            sm_scale=SCALE,
        )
        for _ in range(min(max(timer.rotation(nbytes), 1), MOST_COPIES))
    ]
    calls[0]()  # compiles
    show(name, batch, tokens, heads, timer.alone(calls[0]), timer.in_a_row(calls), nbytes, roof)


def measure_torch(timer: GraphTimer, batch: int, tokens: int, heads: int, roof: float) -> None:
    """Print a line of two products and a softmax between them."""
    nbytes = batch * tokens * sum(DIMS) * 2
    q = torch.cat(queries(batch, heads), -1)

    def attend(rows: torch.Tensor) -> torch.Tensor:
        scores = torch.bmm(q, rows.transpose(1, 2)).float() * SCALE
        return torch.bmm(scores.softmax(-1).bfloat16(), rows[..., : DIMS[0]])

    rows = [
        torch.randn(batch, tokens, sum(DIMS), dtype=torch.bfloat16, device="cuda")
        for _ in range(min(max(timer.rotation(nbytes), 1), MOST_COPIES))
    ]
    calls = [partial(attend, one) for one in rows]
    alone, in_a_row = timer.alone(calls[0]), timer.in_a_row(calls)
    show("torch, bf16", batch, tokens, heads, alone, in_a_row, nbytes, roof)


def show(
    name: str,
    batch: int,
    tokens: int,
    heads: int,
    alone: float,
    in_a_row: float,
    nbytes: int,
    roof: float,
) -> None:
    """Print a line."""
    share = nbytes / in_a_row / 1e3 / roof
    print(
        f"{name:16}{batch:6}{tokens:8}{heads:6}{alone:8.1f} us{in_a_row:8.1f} us{share:7.1%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
