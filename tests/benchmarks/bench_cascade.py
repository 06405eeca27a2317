"""What a shared prefix saves on a GPU: read once for all sequences, against once for each.

Run by hand: python tests/benchmarks/bench_cascade.py. Sequences share a prefix (its pages are the
same in every block table) and have 256 tokens of their own; INT4 in 4 groups, head_dim 128, pages
of 64. Outputs are compared first. Times are of one call inside a CUDA graph, alone with the L2
cache overwritten. The last column says whether PagedBatch would read the prefix once by itself.
"""

from __future__ import annotations

import torch

from kvquant import RowFormat, __version__, quantize_rows
from kvquant.bench.report import render_machine
from kvquant.bench.timer import GraphTimer, describe_machine
from kvquant.ops.attention import attend_segments
from kvquant.ops.shared_prefix import attend_shared
from kvquant.paged.shared_prefix import pays
from kvquant.rows.segment import Segment

OWN, PAGE, HEAD_DIM = 256, 64, 128
# sequences, tokens of the prefix, query heads, KV heads
CASES = (
    *((64, 16384, *heads) for heads in ((32, 32), (32, 16), (32, 8), (64, 8))),
    *((64, tokens, 32, 8) for tokens in (1024, 4096)),
    *((batch, 16384, 32, 8) for batch in (2, 4, 8, 16, 32)),
    (8, 65536, 32, 8),
)


def main() -> None:
    """Print a line per case."""
    torch.manual_seed(0)
    timer = GraphTimer()
    print(render_machine(describe_machine(timer, __version__)))
    print(
        f"{'sequences':>10}{'prefix':>8}{'heads':>7}{'each for itself':>18}{'prefix once':>14}"
        f"{'ratio':>8}{'error':>10}{'pays':>6}"
    )
    for case in CASES:
        measure(timer, *case)


def measure(
    timer: GraphTimer, batch: int, prefix_len: int, num_q_heads: int, num_kv_heads: int
) -> None:
    """Compare and time the two ways."""
    fmt = RowFormat.parse("int4-g4", HEAD_DIM)
    shared, own = prefix_len // PAGE, OWN // PAGE
    num_pages = shared + batch * own
    values = torch.randn(num_pages, num_kv_heads, PAGE, HEAD_DIM, device="cuda")
    k, v = quantize_rows(values, fmt), quantize_rows(values.flip(0), fmt)
    pages = torch.randperm(num_pages, device="cuda", dtype=torch.int32)
    prefix_table = pages[None, :shared]
    own_table = pages[shared:].view(batch, own)
    table = torch.cat([prefix_table.expand(batch, -1), own_table], dim=1)
    lens = torch.full((batch,), OWN, dtype=torch.int32, device="cuda")
    whole = Segment(k, v, lens + prefix_len, fmt, fmt, None, table)
    rest = Segment(k, v, lens, fmt, fmt, None, own_table.contiguous())
    prefix = Segment(k, v, lens[:1] * 0 + prefix_len, fmt, fmt, None, prefix_table)
    q = torch.randn(batch, num_q_heads, HEAD_DIM, device="cuda").bfloat16()

    expected = attend_segments(q, [whole])
    out = attend_shared(q, prefix, [rest])
    assert isinstance(expected, torch.Tensor) and isinstance(out, torch.Tensor)
    error = float((out.double() - expected.double()).norm() / expected.double().norm())
    assert error < 5e-3, error
    each = timer.alone(lambda: attend_segments(q, [whole]))
    once = timer.alone(lambda: attend_shared(q, prefix, [rest]))
    heads = f"{num_q_heads}:{num_kv_heads}"
    taken = pays(batch, prefix_len, num_kv_heads, num_q_heads // num_kv_heads)
    print(
        f"{batch:>10}{prefix_len:>8}{heads:>7}{each:>15.1f} us{once:>11.1f} us{each / once:>7.2f}x"
        f"{error:>10.1e}{'yes' if taken else 'no':>6}"
    )


if __name__ == "__main__":
    main()
