"""A layer's step of an engine on a GPU, without the engine: kvquant/engine/step.py on vLLM's pages.

Run by hand: python tests/benchmarks/bench_vllm_step.py. Decoding sequences of 8,192 tokens, pages
of 64 tokens in random order, head_dim 128, BF16: new rows are written, then all queries attend.
Outputs are compared first, with float64 on the dequantized rows of some sequences. Times are of a
step inside a CUDA graph, in a row on pages that outgrow the L2 cache. Beside them the fastest of
torch's attention kernels on 16-bit K and V of the same tokens, without pages and without append;
FlashInfer and vLLM are not needed. "drafted": every sequence has that many tokens more.
"""

from __future__ import annotations

import click
import torch
from measuring import begin, relative_error
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kvquant.bench.measure import BACKENDS, running
from kvquant.bench.timer import Call, GraphTimer
from kvquant.engine.contract import LayerRows, NewTokens
from kvquant.engine.settings import Settings
from kvquant.engine.step import Step, append, attend, describe_step
from kvquant.rows.segment import Segment

TOKENS, PAGE, HEAD_DIM, SCALE, FEW = 8192, 64, 128, 128**-0.5, 2
# sequences, query heads, KV heads, drafted tokens
CASES = (64, 32, 8, 0), (64, 8, 1, 0), (256, 8, 1, 0), (64, 32, 8, 3), (8, 32, 8, 0)
FORMATS = "int4-g4", "int8", "bf16"


def make_step(batch: int, new: int) -> tuple[Step, torch.Tensor]:
    """Sequences whose last `new` tokens are those of the step, and the slots of these tokens."""
    count = -(-TOKENS // PAGE)
    table = torch.randperm(batch * count, dtype=torch.int32, device="cuda").view(batch, count)
    lens = torch.full((batch,), TOKENS, dtype=torch.int32, device="cuda")
    starts = torch.arange(0, batch * new + 1, new, dtype=torch.int32)
    step = describe_step(NewTokens(table, lens, starts, lens.cpu(), batch * new, new))
    place = torch.arange(TOKENS - new, TOKENS, device="cuda")
    slots = table[:, place // PAGE].long() * PAGE + place % PAGE
    return step, slots.flatten()


def fill(layer: LayerRows, pages: torch.Tensor) -> None:
    """Write random rows to all pages."""
    room, heads = len(pages) * PAGE, layer.layout.num_kv_heads
    for first in range(0, room, TOKENS):
        slots = torch.arange(first, min(first + TOKENS, room), device="cuda")
        k, v = torch.randn(2, len(slots), heads, HEAD_DIM, device="cuda").bfloat16()
        append(layer, k, v, pages, slots)


def error_of(
    layer: LayerRows, step: Step, pages: torch.Tensor, q: torch.Tensor, out: torch.Tensor
) -> float:
    """Of the first sequences, to float64 on their rows."""
    k_format, v_format, heads = layer.layout
    rows = layer.layout.views(pages)
    segment = Segment(*rows, step.seq_lens, k_format, v_format, block_table=step.block_table)
    new, ratio = step.q_len, q.shape[1] // heads
    found, wanted = [], []
    for i in range(FEW):
        k, v = (x.double().repeat_interleave(ratio, 0) for x in segment.dequantized(i))
        mine = slice(i * new, (i + 1) * new)
        scores = torch.einsum("qhd,hkd->hqk", q[mine].double(), k) * SCALE
        seen = torch.ones(new, TOKENS, dtype=torch.bool, device="cuda").tril(TOKENS - new)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        wanted.append(torch.einsum("hqk,hkd->qhd", weights, v))
        found.append(out[mine].double())
    return relative_error(torch.cat(found), torch.cat(wanted))


def our_time(
    timer: GraphTimer, fmt: str, batch: int, heads: tuple[int, int], new: int
) -> tuple[float, float]:
    """Microseconds of a step, and its error."""
    num_q_heads, num_kv_heads = heads
    layer = LayerRows(Settings(fmt, fmt).layout(num_kv_heads, HEAD_DIM, HEAD_DIM), SCALE)
    layout = layer.layout
    shape = batch * (TOKENS // PAGE), layout.num_kv_heads, PAGE, layout.token_bytes
    calls: list[Call] = []
    error = 0.0
    copies = 1
    while len(calls) < copies:
        pages = torch.zeros(shape, dtype=torch.uint8, device="cuda")
        copies = timer.rotation(pages.nbytes) or 1
        fill(layer, pages)
        step, slots = make_step(batch, new)
        q = torch.randn(batch * new, num_q_heads, HEAD_DIM, device="cuda").bfloat16()
        k, v = torch.randn(2, batch * new, num_kv_heads, HEAD_DIM, device="cuda").bfloat16()
        out = torch.empty_like(q)

        def run(
            step: Step = step,
            slots: torch.Tensor = slots,
            pages: torch.Tensor = pages,
            new_rows: tuple[torch.Tensor, torch.Tensor] = (k, v),
            q: torch.Tensor = q,
            out: torch.Tensor = out,
        ) -> None:
            append(layer, *new_rows, pages, slots)
            attend(layer, step, q, *new_rows, pages, out)

        run()
        if not calls:
            error = error_of(layer, step, pages, q, out)
            assert error < 3e-3, error
        calls.append(run)
    return timer.in_a_row(calls), error


def torch_time(
    timer: GraphTimer, batch: int, heads: tuple[int, int], new: int
) -> tuple[float, str]:
    """Microseconds of the fastest of torch's attention kernels on 16-bit K and V, and its name."""
    num_q_heads, num_kv_heads = heads
    nbytes = 2 * 2 * batch * num_kv_heads * TOKENS * HEAD_DIM
    calls: dict[str, list[Call]] = {}
    for _ in range(timer.rotation(nbytes) or 1):
        k, v = torch.randn(2, batch, num_kv_heads, TOKENS, HEAD_DIM, device="cuda").bfloat16()
        q = torch.randn(batch, num_q_heads, new, HEAD_DIM, device="cuda").bfloat16()
        forms = {"enable_gqa": (q, causal_lower_right(new, TOKENS) if new > 1 else None)}
        if new == 1:  # the query heads of a KV head as its queries
            forms["folded"] = q.view(batch, num_kv_heads, -1, HEAD_DIM), None
        for name, backend in BACKENDS.items():
            for form, (queries, mask) in forms.items():

                def run(
                    backend: SDPBackend = backend,
                    queries: torch.Tensor = queries,
                    mask: torch.Tensor | None = mask,
                    rows: tuple[torch.Tensor, torch.Tensor] = (k, v),
                    grouped: bool = form == "enable_gqa",
                ) -> None:
                    with sdpa_kernel(backend):
                        scaled_dot_product_attention(
                            queries, *rows, attn_mask=mask, enable_gqa=grouped
                        )

                calls.setdefault(f"{name}, {form}", []).append(run)
    return min((timer.in_a_row(one), name) for name, one in running(calls).items())


@click.command()
@click.option("--format", "names", multiple=True, default=FORMATS, show_default=True)
def main(names: tuple[str, ...]) -> None:
    """Print a line per case and format."""
    timer = begin()
    print(f"{'rows':9}{'batch':>6}{'heads':>7}{'drafted':>9}{'us':>9}{'error':>9}  torch, 16 bit")
    for batch, num_q_heads, num_kv_heads, drafted in CASES:
        heads, new = (num_q_heads, num_kv_heads), 1 + drafted
        torch.cuda.empty_cache()
        their_us, theirs = torch_time(timer, batch, heads, new)
        for name in names:
            torch.cuda.empty_cache()
            us, error = our_time(timer, name, batch, heads, new)
            print(
                f"{name:9}{batch:6}{f'{num_q_heads}:{num_kv_heads}':>7}{drafted:9}{us:9.1f}"
                f"{error:9.1e}  {their_us:.1f} ({theirs}), {their_us / us:.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
