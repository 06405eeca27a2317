"""What a shared prefix saves on a GPU: read once for all sequences, against once for each.

Run by hand: python tests/benchmarks/bench_cascade.py. Sequences share a prefix (its pages are the
same in every block table) and have 256 tokens of their own; INT4 in 4 groups, head_dim 128, pages
of 64. Outputs are compared first. Times are of one call inside a CUDA graph, alone with the L2
cache overwritten. The last column says whether PagedBatch would read the prefix once by itself.
With --mla the same of latent rows, in several formats, and of LatentPagedBatch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import click
import torch
from measuring import begin, relative_error

from kvquant import LatentFormat, RowFormat, quantize_rows
from kvquant.bench.cases import LATENT_SCALE
from kvquant.bench.timer import GraphTimer
from kvquant.kernels.cuda.runtime.warmup import warm_up
from kvquant.ops.attention import attend
from kvquant.ops.mla import attend_latents
from kvquant.ops.shared_prefix import attend_shared
from kvquant.paged.shared_prefix import pays, pays_of_latents
from kvquant.rows.call import AttentionCall, LatentCall, LatentPrefix
from kvquant.rows.segment import Segment, latent_segment

OWN, PAGE, HEAD_DIM = 256, 64, 128
# sequences, tokens of the prefix, query heads, KV heads
CASES = (
    *((64, 16384, *heads) for heads in ((32, 32), (32, 16), (32, 8), (64, 8))),
    *((64, tokens, 32, 8) for tokens in (1024, 4096)),
    *((batch, 16384, 32, 8) for batch in (2, 4, 8, 16, 32)),
    (8, 65536, 32, 8),
)
LATENTS = "int4-g8+int8-g4", "int8-g4", "bf16"
# sequences, tokens of the prefix, query heads
LATENT_CASES = (
    *((64, 8192, heads) for heads in (16, 32, 64, 128)),
    *((64, tokens, 16) for tokens in (1024, 2048)),
    *((batch, 16384, 16) for batch in (4, 8, 16, 32)),
)


@click.command()
@click.option("--mla", is_flag=True, help="Latent rows.")
def main(mla: bool) -> None:
    """Print a line per case."""
    timer = begin()
    print(
        f"{'rows'.ljust(17) if mla else ''}{'sequences':>10}{'prefix':>8}{'heads':>7}"
        f"{'each for itself':>18}{'prefix once':>14}"
        f"{'ratio':>8}{'error':>10}{'pays':>6}"
    )
    if not mla:
        for case in CASES:
            measure(timer, *case)
        return
    latent_cases = [(name, *case) for case in LATENT_CASES for name in LATENTS]
    warm_up(timer.device, [partial(rehearse_latents, *one) for one in latent_cases])
    for one in latent_cases:
        measure_latents(timer, *one)


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

    heads = f"{num_q_heads}:{num_kv_heads}"
    taken = pays(batch, prefix_len, num_kv_heads, num_q_heads // num_kv_heads)
    line = f"{batch:>10}{prefix_len:>8}{heads:>7}"
    alone, once = (AttentionCall(q, [one]) for one in (whole, rest))
    ways = (lambda: attend(alone)[0]), (lambda: attend_shared(once, prefix)[0])
    compare(timer, line, *ways, taken)


def compare(
    timer: GraphTimer,
    line: str,
    for_itself: Callable[[], object],
    once: Callable[[], object],
    taken: bool,
) -> None:
    """Check that both ways give the same, time them, and print a line."""
    expected, out = for_itself(), once()
    assert isinstance(expected, torch.Tensor) and isinstance(out, torch.Tensor)
    error = relative_error(out, expected)
    assert error < 5e-3, error
    slow, fast = timer.alone(for_itself), timer.alone(once)
    print(
        f"{line}{slow:>15.1f} us{fast:>11.1f} us{slow / fast:>7.2f}x"
        f"{error:>10.1e}{'yes' if taken else 'no':>6}"
    )


def latent_calls(
    device: torch.device, name: str, batch: int, prefix_len: int, heads: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The two ways to attend to latent rows."""
    fmt = LatentFormat.parse(name)
    shared, own = prefix_len // PAGE, OWN // PAGE
    num_pages = shared + batch * own
    values = torch.randn(num_pages, 1, PAGE, fmt.head_dim, device=device)
    rows = quantize_rows(values, fmt, check=False)
    pages = torch.randperm(num_pages, device=device, dtype=torch.int32)
    prefix_table, own_table = pages[None, :shared], pages[shared:].view(batch, own)
    table = torch.cat([prefix_table.expand(batch, -1), own_table], dim=1)
    lens = torch.full((batch,), OWN, dtype=torch.int32, device=device)
    q_latent = torch.randn(batch, heads, fmt.latent_dim, device=device).bfloat16()
    q_rope = torch.randn(batch, heads, fmt.rope_dim, device=device).bfloat16()
    whole = latent_segment(rows, lens + prefix_len, fmt, block_table=table)
    rest = latent_segment(rows, lens, fmt, block_table=own_table.contiguous())
    prefix = latent_segment(rows, lens[:1] * 0 + prefix_len, fmt, block_table=prefix_table)
    shares = LatentPrefix(prefix, torch.ones_like(lens))
    alone, once = (
        LatentCall(q_latent, q_rope, [one], LATENT_SCALE, prefix=its)
        for one, its in ((whole, None), (rest, shares))
    )
    return (lambda: attend_latents(alone)[0]), (lambda: attend_latents(once)[0])


def rehearse_latents(name: str, *case: int) -> None:
    """Both calls without values: see kvquant/rehearsal.py."""
    for call in latent_calls(torch.device("meta"), name, *case):
        call()


def measure_latents(timer: GraphTimer, name: str, batch: int, prefix_len: int, heads: int) -> None:
    """Compare and time the two ways to attend to latent rows."""
    calls = latent_calls(timer.device, name, batch, prefix_len, heads)
    taken = pays_of_latents(batch, batch, prefix_len, heads)
    compare(timer, f"{name:<17}{batch:>10}{prefix_len:>8}{heads:>7}", *calls, taken)


if __name__ == "__main__":
    main()
