"""What it costs on a GPU where sequences begin in memory: rows apart that lie badly, and well.

Run by hand: python tests/benchmarks/bench_spacing.py. 512 sequences of 8,192 tokens, 8 query heads
on one KV head of 128; each sequence has room for the rows that are named, 8,192 and more. Outputs
are compared first: with float64 on the dequantized rows of some sequences, and bit for bit from
room to room. Times are of calls in a row inside a CUDA graph. The room of a KVCache for 8,196
tokens, 4 of them sinks, is marked (kvquant/rows/spacing.py).
"""

from __future__ import annotations

import click
import torch
from measuring import begin, relative_error

from kvquant import RowFormat, dequantize_rows, quantize_rows
from kvquant.ops.attention import attend
from kvquant.rows.call import AttentionCall
from kvquant.rows.segment import Segment
from kvquant.rows.spacing import spaced_len

BATCH, TOKENS, Q_HEADS, HEAD_DIM, FEW = 512, 8192, 8, 128, 4
MORE = 0, 1, 8, 13, 32, 64, 512
FORMATS = "int4", "int4-g4", "int4-g8", "int8-g4", "fp8", "bf16"


def make_segment(rows: torch.Tensor, fmt: RowFormat, room: int) -> Segment:
    """Every FEW sequences hold the same rows [FEW, 1, TOKENS, row_bytes]; V is K backwards."""
    memory = torch.zeros(2, BATCH, 1, room, fmt.row_bytes, dtype=torch.uint8, device="cuda")
    memory[0, :, :, :TOKENS] = rows.repeat(BATCH // FEW, 1, 1, 1)
    memory[1, :, :, :TOKENS] = rows.flip(2).repeat(BATCH // FEW, 1, 1, 1)
    lens = torch.full((BATCH,), TOKENS, dtype=torch.int32, device="cuda")
    return Segment(memory[0], memory[1], lens, fmt, fmt)


def check(out: torch.Tensor, q: torch.Tensor, rows: torch.Tensor, fmt: RowFormat) -> None:
    """Compare the first sequences with float64."""
    k = dequantize_rows(rows, fmt).double()[:, 0]
    scores = q[:FEW].double() @ k.transpose(1, 2) * HEAD_DIM**-0.5
    wanted = scores.softmax(-1) @ k.flip(1)
    error = relative_error(out[:FEW], wanted)
    assert error < 3e-3, error


@click.command()
@click.option("--format", "names", multiple=True, default=FORMATS, show_default=True)
def main(names: tuple[str, ...]) -> None:
    """Print a line per format and room."""
    timer = begin()
    print(f"{'format':10}{'room':>7}{'apart':>12}{'us':>8}{'GB/s':>7}")
    q = torch.randn(BATCH, Q_HEADS, HEAD_DIM, device="cuda").bfloat16()
    for name in names:
        fmt = RowFormat.parse(name, HEAD_DIM)
        rows = quantize_rows(torch.randn(FEW, 1, TOKENS, HEAD_DIM, device="cuda"), fmt)
        first: torch.Tensor | None = None
        own = spaced_len(TOKENS, [fmt.row_bytes] * 2)
        for room in sorted({*(TOKENS + more for more in MORE), own}):
            call = AttentionCall(q, [make_segment(rows, fmt, room)], None, 1)
            out, _ = attend(call)
            if first is None:
                check(out, q, rows, fmt)
                first = out
            assert torch.equal(out, first)
            us = timer.in_a_row([lambda call=call: attend(call)])  # type: ignore[misc]
            speed = 2 * BATCH * TOKENS * fmt.row_bytes / us / 1e3
            mark = " KVCache" if room == own else ""
            print(f"{name:10}{room:7}{room * fmt.row_bytes:12}{us:8.1f}{speed:7.0f}{mark}")
            del call


if __name__ == "__main__":
    main()
