"""Appends in a basis on a GPU, a prompt and a decode step, beside the plain append and plain torch.

Run by hand: python tests/benchmarks/bench_feedback.py. Bytes are first compared with the meaning.
A prompt is 4,096 tokens of 8 heads (head_dim 128), a step is 64 sequences, one token each, at its
end with 16-bit rows too, of which one leaves for every token that comes. Microseconds for K and V:

    plain       nearest codes of the rows as they come: one launch
    clip        offset, rotation and clipped ranges: one launch
    feedback    likewise, with feedback: one launch
    matrix      likewise, with a matrix for the rotation: before them the products, by torch
    torch       what feedback does, in plain torch, by the clock of the host

All but the last inside CUDA graphs.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from kvquant import RowFormat
from kvquant.bench.timer import GraphTimer
from kvquant.ops.append import append_rows
from kvquant.rows.basis import Basis
from kvquant.rows.quantize import feedback_matrix
from kvquant.rows.slots import Slots

HEADS, HEAD_DIM, EXACT_LEN = 8, 128, 132
SHAPES = {"prompt": (4096, False), "step": (64, False), "16-bit step": (64, True)}
FORMATS = ("int4-g4", "int4", "int8")
CALLS = 5


def main() -> None:
    """Print a line per format and shape."""
    torch.manual_seed(0)
    timer = GraphTimer()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    bases = make_bases()
    names = "".join(f"{name:>11}" for name in (*bases, "torch"))
    print(f"{'microseconds':24}{names}")
    for name in FORMATS:
        for what in SHAPES:
            measure(timer, RowFormat.parse(name, HEAD_DIM), what, bases)


def make_bases() -> dict[str, Basis | None]:
    """The columns."""
    square, eye = (HEADS, HEAD_DIM, HEAD_DIM), torch.eye(HEAD_DIM, device="cuda")
    roots = torch.randn(square, device="cuda").double()
    feedback = feedback_matrix(roots @ roots.mT + eye).float()
    matrix = eye + 0.1 * torch.randn(square, device="cuda")
    offset = torch.randn(HEADS, HEAD_DIM, device="cuda")
    clip = torch.full((HEADS,), 0.9, device="cuda")
    return {
        "plain": None,
        "clip": Basis(offset, "hadamard", clip=clip),
        "feedback": Basis(offset, "hadamard", clip=clip, feedback=feedback),
        "matrix": Basis(offset, "matrix", matrix, clip, feedback),
    }


def measure(timer: GraphTimer, fmt: RowFormat, what: str, bases: dict[str, Basis | None]) -> None:
    """One line."""
    line = f"{f'{fmt}, {what}':24}"
    call: dict[str, Any] = {}
    for basis in bases.values():
        call = make_call(fmt, *SHAPES[what]) | {"k_transform": basis, "v_transform": basis}
        check(call, f"{fmt}, {what}")
        line += f"{timer.in_a_row([partial(append_rows, **call)]):>11.1f}"
    call |= {"k_transform": bases["feedback"], "v_transform": bases["feedback"]}
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        append_rows(**call, backend="reference")
    torch.cuda.synchronize()
    print(f"{line}{(time.perf_counter() - start) / CALLS * 1e6:>11.1f}", flush=True)


def make_call(fmt: RowFormat, num_tokens: int, exact: bool) -> dict[str, Any]:
    """Arguments of append_rows: bfloat16 rows into pages of 64."""
    k, v = torch.randn(2, num_tokens, HEADS, HEAD_DIM, device="cuda").bfloat16()
    rows = torch.zeros(
        2, num_tokens // 64, HEADS, 64, fmt.row_bytes, dtype=torch.uint8, device="cuda"
    )
    packed = torch.randperm(num_tokens, device="cuda")
    call: dict[str, Any] = {"k": k, "v": v, "k_rows": rows[0], "v_rows": rows[1]}
    call |= {"slots": Slots(packed), "k_format": fmt, "v_format": fmt}
    if exact:
        for side in "kv":
            held = torch.randn(num_tokens, HEADS, EXACT_LEN, HEAD_DIM, device="cuda").bfloat16()
            call[f"exact_{side}"] = held.view(torch.uint8)
        seq_slots = torch.arange(num_tokens, device="cuda") * EXACT_LEN
        slots = seq_slots + torch.randint(EXACT_LEN, (num_tokens,), device="cuda")
        call["slots"] = Slots(torch.full_like(packed, -1), slots, packed)
    return call


def check(call: dict[str, Any], what: str) -> None:
    """Compare the bytes of a call with those of the meaning."""
    names = [name for name in ("k_rows", "v_rows", "exact_k", "exact_v") if name in call]
    wanted = call | {name: call[name].clone() for name in names}
    append_rows(**wanted, backend="reference")
    append_rows(**call)
    for name in names:
        assert torch.equal(call[name], wanted[name]), f"{what}: {name} differs"


if __name__ == "__main__":
    main()
