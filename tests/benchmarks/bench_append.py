"""Append and dequantize on a GPU beside a plain copy: prompts, and a decode step inside a graph.

Run by hand: python tests/benchmarks/bench_append.py. Bytes are first compared with the meaning. A
prompt is 32,768 or 4,096 tokens of 8 heads (head_dim 128) into pages of 64 in any order; the rate
of the long one counts what is read and written. A step is 64 sequences, one token each, at its end
with 16-bit rows too. Times are per call, of calls in a row inside one CUDA graph, on inputs of
their own that outgrow the L2 cache together. The transforms of K and V:

    (none)      nearest codes of the rows as they come: one launch
    k, kv       K, or both, with an offset: one launch
    clip        both so, with clipped ranges: one launch
    feedback    likewise, rounded with feedback: one launch
    matrix      likewise, with a matrix: before them the products, by torch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from measuring import begin, relative_error

from kvquant import Basis, RowFormat, dequantize_rows
from kvquant.bench.timer import GraphTimer
from kvquant.ops.append import append_rows
from kvquant.ops.rows_at import dequantize_pages
from kvquant.rows.quantize import feedback_matrix
from kvquant.rows.slots import Slots

HEADS, HEAD_DIM, PAGE_SIZE = 8, 128, 64
PROMPT, SHORT, STEP = 32768, 4096, 64
MOST_MOVE = 0.02  # a fifth of what int4 itself moves
FORMATS = ("int4-g4", "int4", "int8", "fp8", "bf16")
EXACT_LEN = 132
MOST_COPIES = 200
TRANSFORMS = ("", "k", "kv", "clip", "feedback", "matrix")


def main() -> None:
    """Print a line per format and transform."""
    timer = begin()
    roof = max(copy_rate(timer, size) for size in (1 << 27, 1 << 28, 1 << 30))
    print(f"copy roof, read and written: {roof:.0f} GB/s")
    heads = f"{'prompt':>22}{'short':>10}{'step':>10}{'16-bit step':>14}{'dequantize':>22}"
    print(f"{'':32}{heads}")
    for name in FORMATS:
        for what in TRANSFORMS if name != "bf16" else TRANSFORMS[:3]:
            measure(timer, name, what, roof)


def copy_rate(timer: GraphTimer, size: int) -> float:
    """GB/s of a copy of `size` bytes, counting both ways."""
    calls = []
    for _ in range(max(timer.rotation(2 * size), 2)):
        source = torch.zeros(size, dtype=torch.uint8, device="cuda")
        calls.append(partial(torch.empty_like(source).copy_, source))
    return 2 * size / timer.in_a_row(calls) / 1e3


def measure(timer: GraphTimer, name: str, what: str, roof: float) -> None:
    """One line; what: one of TRANSFORMS."""
    fmt = RowFormat.parse(name, HEAD_DIM)
    check(fmt, what)
    row_bytes = 2 * HEADS * fmt.row_bytes
    element_bytes = 2 * HEADS * HEAD_DIM * 2
    moved = PROMPT * (row_bytes + element_bytes + 8)
    calls = inputs(timer, fmt, what, PROMPT, moved)
    prompt = timer.in_a_row([partial(append_rows, **call) for call in calls])
    line = f"{f'{name}, {what}' if what else name:32}{rate(prompt, moved, roof)}"
    for tokens, exact in ((SHORT, False), (STEP, False), (STEP, True)):
        moved = tokens * (row_bytes + element_bytes + 8)
        calls = inputs(timer, fmt, what, tokens, moved, exact)
        taken = timer.in_a_row([partial(append_rows, **call) for call in calls])
        line += f"{taken:>{14 if exact else 10}.2f}"
    if not what:
        line += rate(*time_dequantize(timer, fmt), roof)
    print(line, flush=True)


def rate(us: float, moved: int, roof: float) -> str:
    """Time and share of the roof."""
    return f"{us:>10.1f} us {moved / us / 1e3 / roof:>7.1%}"


def make(fmt: RowFormat, what: str, num_tokens: int, exact: bool = False) -> dict[str, Any]:
    """Arguments of append_rows for new tokens; pages in any order."""
    num_pages = -(-max(num_tokens, 16 * PAGE_SIZE) // PAGE_SIZE)
    if num_tokens == STEP:  # a token of each sequence, somewhere in a page of its own
        num_pages = STEP
    shape = num_pages, HEADS, PAGE_SIZE, fmt.row_bytes
    k, v = torch.randn(2, num_tokens, HEADS, HEAD_DIM, device="cuda").bfloat16()
    pages = torch.randperm(num_pages, device="cuda")[:, None] * PAGE_SIZE
    packed = (pages + torch.arange(PAGE_SIZE, device="cuda")).flatten()[:num_tokens]
    if num_tokens == STEP:
        packed = pages[:, 0] + torch.randint(PAGE_SIZE, (STEP,), device="cuda")
    transforms = [
        None if not what or (what == "k" and side == "v") else make_basis(what) for side in "kv"
    ]
    call: dict[str, Any] = {
        "k": k,
        "v": v,
        "k_rows": torch.zeros(shape, dtype=torch.uint8, device="cuda"),
        "v_rows": torch.zeros(shape, dtype=torch.uint8, device="cuda"),
        "slots": Slots(packed.contiguous()),
        "k_format": fmt,
        "v_format": fmt,
        "k_transform": transforms[0],
        "v_transform": transforms[1],
    }
    if exact:
        for side in "kv":
            held = torch.zeros(num_tokens, HEADS, EXACT_LEN, HEAD_DIM, device="cuda").bfloat16()
            call[f"exact_{side}"] = held.view(torch.uint8)
        seq_slots = torch.arange(num_tokens, device="cuda")
        slots = seq_slots * EXACT_LEN + torch.randint(EXACT_LEN, (num_tokens,), device="cuda")
        call["slots"] = Slots(torch.full_like(packed, -1), slots, packed.contiguous())
    return call


def make_basis(what: str) -> Basis:
    """One of TRANSFORMS."""
    offset = torch.randn(HEADS, HEAD_DIM, device="cuda")
    if what in ("k", "kv"):
        return Basis(offset)
    clip = torch.full((HEADS,), 0.9, device="cuda")
    if what == "clip":
        return Basis(offset, clip=clip)
    eye, roots = torch.eye(HEAD_DIM, device="cuda"), torch.randn(HEADS, HEAD_DIM, HEAD_DIM).cuda()
    feedback = feedback_matrix(roots.double() @ roots.double().mT + eye).float()
    if what == "feedback":
        return Basis(offset, clip=clip, feedback=feedback)
    return Basis(offset, eye + 0.1 * roots, clip, feedback)


def inputs(
    timer: GraphTimer, fmt: RowFormat, what: str, num_tokens: int, moved: int, exact: bool = False
) -> Sequence[dict[str, Any]]:
    """Calls that outgrow the L2 cache together, or at least 200."""
    copies = timer.rotation(moved)
    return [make(fmt, what, num_tokens, exact) for _ in range(min(max(copies, 2), MOST_COPIES))]


def check(fmt: RowFormat, what: str) -> None:
    """Compare the bytes of a call with those of the meaning. The GPU sums a matrix product in
    another order, so some codes round to a neighbour. There the values are compared."""
    for num_tokens, exact in ((2048, False), (STEP, True)):
        call = make(fmt, what, num_tokens, exact)
        names = [name for name in ("k_rows", "v_rows", "exact_k", "exact_v") if name in call]
        wanted = call | {name: call[name].clone() for name in names}
        append_rows(**wanted, backend="reference")
        append_rows(**call)
        for name in names:
            both = call[name], wanted[name]
            if torch.equal(*both):
                continue
            assert what == "matrix", f"{fmt} {what}: {name} differs"
            is_packed = name.endswith("_rows")
            row = fmt if is_packed else RowFormat.parse("bf16", HEAD_DIM)
            error = relative_error(*(dequantize_rows(rows, row) for rows in both))
            limit = MOST_MOVE if is_packed else 2**-8  # that of rounding to bfloat16
            assert error < limit, f"{fmt} {what}: {name} differs by {error:.1e}"


def time_dequantize(timer: GraphTimer, fmt: RowFormat) -> tuple[float, int]:
    """Microseconds for the rows of a prompt, of K, and bytes read and written."""
    moved = PROMPT * (HEADS * (fmt.row_bytes + 2 * HEAD_DIM) + 8)
    calls: list[Callable[[], object]] = []
    for call in inputs(timer, fmt, "", PROMPT, moved):
        rows, slots = call["k_rows"], call["slots"].packed
        append_rows(**call)
        out = torch.empty_like(call["k"])
        got = dequantize_pages(rows, fmt, slots, torch.bfloat16, out)
        wanted = dequantize_pages(rows, fmt, slots[:2048], torch.bfloat16, backend="reference")
        assert torch.equal(got[:2048], wanted), f"dequantize {fmt} differs"
        calls.append(partial(dequantize_pages, rows, fmt, slots, torch.bfloat16, out))
    return timer.in_a_row(calls), moved


if __name__ == "__main__":
    main()
