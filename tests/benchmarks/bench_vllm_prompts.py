"""Prompts of an engine on a GPU, without the engine: kvquant/engine/step.py and FlashAttention 3.

Run by hand, where vLLM's Python sources and its FlashAttention 3 are:

    python tests/benchmarks/bench_vllm_prompts.py

A layer of 32:8 heads of 128 reads chunks of prompts in BF16. "flash" is what vLLM does: K and V are
copied to 16-bit pages, FlashAttention 3 reads the pages. Ours writes rows and attends in 16 bit, by
vLLM's kernel or by torch's, with the parts of the time. "first" is the host's time of the first
call for a number of tokens that is new, as most chunks of a serving engine are. Then chunks of few
tokens: attention to rows, as it is and with as many queries as there are, beside attention in 16
bit behind the dequantized past. All outputs are compared first. Times are milliseconds of the GPU,
medians of a few calls in a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import click
import torch
from measuring import begin, relative_error

from kvquant import Basis
from kvquant.engine import step as steps
from kvquant.engine.contract import LayerRows, NewTokens
from kvquant.engine.settings import Settings
from kvquant.engine.step import Step, append, attend, describe_step
from kvquant.rows.basis import LayerBasis

HEADS, KV_HEADS, DIM, PAGE, SCALE = 32, 8, 128, 64, 128**-0.5
# new tokens of each sequence, and tokens before
CHUNKS = [
    ([8192], 0),
    ([2048], 0),
    ([512] * 16, 0),
    ([8192], 8192),
    ([2048], 8192),
    ([2048], 32768),
    ([512], 32768),
    ([100], 131072),
]
FEW = [(count, past) for past in (1024, 8192, 32768, 131072) for count in (2, 8, 16, 24, 64)]
CALLS, ROUNDS = 10, 5
Call = Callable[[], object]


def milliseconds(call: Call) -> float:
    """Of the GPU for a call."""
    for _ in range(3):
        call()
    found = []
    for _ in range(ROUNDS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun.record()
        for _ in range(CALLS):
            call()
        ended.record()
        torch.cuda.synchronize()
        found.append(begun.elapsed_time(ended) / CALLS)
    return float(sorted(found)[ROUNDS // 2])


class Prompts:
    """Chunks of prompts behind a past, in our pages and in those of 16 bit."""

    def __init__(self, layer: LayerRows, counts: list[int], past: int) -> None:
        self.layer, layout, tokens = layer, layer.layout, sum(counts)
        pages = [-(-(past + count) // PAGE) for count in counts]
        order = torch.randperm(sum(pages), dtype=torch.int32, device="cuda")
        self.table = torch.zeros(len(counts), max(pages), dtype=torch.int32, device="cuda")
        for row, part in zip(self.table, order.split(pages), strict=True):
            row[: len(part)] = part
        shape = sum(pages), layout.num_kv_heads, PAGE, layout.token_bytes
        self.pages = torch.zeros(shape, dtype=torch.uint8, device="cuda")
        self.plain = torch.zeros(
            2, sum(pages), PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda"
        )
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lens = starts.diff() + past
        self.lens, self.starts, self.longest = lens.cuda(), starts.cuda(), max(counts)
        self.new = NewTokens(self.table, self.lens, starts, lens, tokens)
        for sequence in range(len(counts)):
            for first in range(0, past, 8192):
                at = self.slots(sequence, first, min(first + 8192, past))
                k, v = torch.randn(2, len(at), KV_HEADS, DIM, device="cuda").bfloat16()
                self.write(k, v, at)
        self.at = torch.cat([self.slots(i, past, past + n) for i, n in enumerate(counts)])
        self.q = torch.randn(tokens, HEADS, DIM, device="cuda").bfloat16()
        self.k, self.v = torch.randn(2, tokens, KV_HEADS, DIM, device="cuda").bfloat16()
        self.write(self.k, self.v, self.at)

    def slots(self, sequence: int, first: int, end: int) -> torch.Tensor:
        token = torch.arange(first, end, device="cuda")
        return self.table[sequence, token // PAGE].long() * PAGE + token % PAGE

    def write(self, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> None:
        append(self.layer, k, v, self.pages, at)
        self.copy(k, v, at)

    def copy(self, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> None:
        """To 16-bit pages."""
        for x, pages in zip((k, v), self.plain, strict=True):
            pages.view(-1, KV_HEADS, DIM)[at] = x

    def flash(self, varlen: Any, out: torch.Tensor) -> None:
        """As vLLM's FLASH_ATTN."""
        varlen(
            self.q,
            *self.plain,
            out=out,
            cu_seqlens_q=self.starts,
            max_seqlen_q=self.longest,
            seqused_k=self.lens,
            max_seqlen_k=int(self.new.lens.max()),
            softmax_scale=SCALE,
            causal=True,
            block_table=self.table,
            fa_version=3,
        )

    def attend(self, layer: LayerRows, out: torch.Tensor, step: Step | None = None) -> None:
        attend(layer, step or describe_step(self.new), self.q, self.k, self.v, self.pages, out)

    def seen(self, step: Step) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What the last chunk sees, its past dequantized; None where there is none."""
        chunk = step.chunks[-1]
        own = self.k[chunk.first : chunk.end], self.v[chunk.first : chunk.end]
        return steps._seen(self.layer, step, chunk, *own, self.pages) if chunk.past else None

    def attend_exactly(self, layer: LayerRows, step: Step, out: torch.Tensor) -> None:
        """To rows, with no more queries than there are."""
        one, queries = slice(0, 1), self.q[None]
        out[:] = steps._attend_to_rows(layer, step, one, queries, None, self.pages)[0]

    def attend_in_16_bit(self, layer: LayerRows, step: Step, out: torch.Tensor) -> None:
        """Behind the dequantized past."""
        seen = self.seen(step)
        assert seen is not None
        lengths = step.lengths((len(self.q),), (len(seen[0]),))
        steps._attend_causally(layer, self.q, *seen, lengths, out)


def first_call(prompts: Prompts, layer: LayerRows, out: torch.Tensor) -> float:
    """The host's milliseconds of the first call for a number of tokens that is new."""
    found = []
    for less in range(3, 8):
        starts = prompts.new.starts.clone()
        starts[-1] -= less
        lens = prompts.new.lens.clone()
        lens[-1] -= less
        new = prompts.new._replace(starts=starts, lens=lens, seq_lens=lens.cuda())
        step = describe_step(new._replace(num_tokens=int(starts[-1])))
        torch.cuda.synchronize()
        begun = time.perf_counter()
        prompts.attend(layer, out, step)
        found.append(1e3 * (time.perf_counter() - begun))
        torch.cuda.synchronize()
    return sorted(found)[2]


def chunks(layer: LayerRows, by_torch: LayerRows, varlen: Any) -> None:
    """Print a line for each of CHUNKS."""
    print(f"{'chunks':>12}{'past':>8}{'flash':>8}{'copy':>7} | {'ours':>7}{'append':>8}", end="")
    print(f"{'past':>7}{'torch':>8} | first, ours and torch's | errors")
    for counts, past in CHUNKS:
        torch.cuda.empty_cache()
        prompts = Prompts(layer, counts, past)
        exact, ours, theirs = (torch.empty_like(prompts.q) for _ in range(3))
        calls: list[Call] = [
            partial(prompts.flash, varlen, exact),
            partial(prompts.copy, prompts.k, prompts.v, prompts.at),
            partial(prompts.attend, layer, ours),
            partial(append, layer, prompts.k, prompts.v, prompts.pages, prompts.at),
            partial(prompts.seen, describe_step(prompts.new)),
            partial(prompts.attend, by_torch, theirs),
        ]
        flash, copied, total, appended, dequantized, other = map(milliseconds, calls)
        errors = [relative_error(x, exact) for x in (ours, theirs)]
        firsts = [first_call(prompts, one, ours) for one in (layer, by_torch)]
        print(f"{f'{len(counts)} x {counts[0]}':>12}{past:8}{flash:8.3f}{copied:7.3f} | ", end="")
        print(f"{total:7.3f}{appended:8.3f}{dequantized:7.3f}{other:8.3f} | ", end="")
        print(*(f"{one:.2f}" for one in firsts), "|", *(f"{error:.1e}" for error in errors))


def few(layer: LayerRows, varlen: Any) -> None:
    """Print a line for each of FEW."""
    print(f"{'few':>12}{'past':>8}{'flash':>8} | {'rows':>7}{'exact':>8}{'16 bit':>8} | error")
    for count, past in FEW:
        torch.cuda.empty_cache()
        prompts = Prompts(layer, [count], past)
        step = describe_step(prompts.new)
        found = [torch.empty_like(prompts.q) for _ in range(4)]
        calls: list[Call] = [
            partial(prompts.flash, varlen, found[0]),
            partial(prompts.attend, layer, found[1], step),
            partial(prompts.attend_exactly, layer, step, found[2]),
            partial(prompts.attend_in_16_bit, layer, step, found[3]),
        ]
        flash, rows, exact, dequantized = map(milliseconds, calls)
        print(f"{count:12}{past:8}{flash:8.3f} | {rows:7.3f}{exact:8.3f}{dequantized:8.3f}", end="")
        print(f" | {relative_error(found[1], found[2]):.1e}", flush=True)


@click.command()
@click.option("--format", "fmt", default="int4-g4", show_default=True)
@click.option("--basis", is_flag=True, help="Rows in a basis, as of a plan.")
@click.option("--few/--no-few", "has_few", default=True, help="Chunks of few tokens, too.")
def main(fmt: str, basis: bool, has_few: bool) -> None:
    """Print a line per case."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    from kvquant.vllm.flash import causal_attention_of

    begin()
    moved = None
    if basis:
        matrix = torch.linalg.qr(torch.randn(KV_HEADS, DIM, DIM))[0]
        moved = LayerBasis(*[Basis(torch.zeros(KV_HEADS, DIM), matrix)] * 2).to("cuda")
    layer = LayerRows(Settings(fmt, fmt).layout(KV_HEADS, DIM, DIM), SCALE, moved)
    impl = SimpleNamespace(
        alibi_slopes=None,
        head_size=DIM,
        sinks=None,
        soft_cap=None,
        sliding_window=None,
        scale=SCALE,
    )
    causal = causal_attention_of(impl, impl.head_size, torch.device("cuda"))
    assert causal is not None, "vLLM has no FlashAttention here"
    ours = layer._replace(causal=causal)
    chunks(ours, layer, flash_attn_varlen_func)
    if has_few:
        few(ours, flash_attn_varlen_func)


if __name__ == "__main__":
    main()
