"""Rounding with feedback on a GPU: a prompt and a decode step, beside plain torch.

Run by hand: python tests/benchmarks/bench_feedback.py. Bytes are first compared with the meaning.
A prompt is 4,096 tokens of 8 heads (head_dim 128), a step is 64 sequences, one token each. The
rounding alone, by the kernel and by plain torch, is timed inside CUDA graphs; whole calls of
quantize_fitted, with the scales and shifts that torch chooses before, by the clock of the host.
"""

from __future__ import annotations

import time
from functools import partial

import torch

from kvquant import RowFormat, quantize_rows
from kvquant.gputimer import GraphTimer
from kvquant.kernels.feedback import round_with_feedback
from kvquant.quant import LEVELS
from kvquant.rounding import _round_with_feedback, feedback_matrix, quantize_fitted

HEADS, HEAD_DIM = 8, 128
SHAPES = {"prompt": (1, HEADS, 4096), "step": (64, HEADS, 1)}
FORMATS = ("int4-g4", "int8")
CALLS = 20


def main() -> None:
    """Print a line per format and shape, in microseconds."""
    torch.manual_seed(0)
    timer = GraphTimer()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(f"{'microseconds':20}{'kernel':>12}{'torch':>12}{'whole call':>14}{'in torch':>12}")
    for name in FORMATS:
        for what, shape in SHAPES.items():
            measure(timer, RowFormat.parse(name, HEAD_DIM), what, shape)


def measure(timer: GraphTimer, fmt: RowFormat, what: str, shape: tuple[int, int, int]) -> None:
    """One line."""
    roots = torch.randn(HEADS, HEAD_DIM, HEAD_DIM, device="cuda").double()
    weights = roots @ roots.mT + torch.eye(HEAD_DIM, device="cuda")
    feedback = feedback_matrix(weights).float()
    x = torch.randn(*shape, HEAD_DIM, device="cuda")
    slow = partial(quantize_fitted, x, fmt, feedback=feedback, backend="torch")
    fast = partial(quantize_fitted, x, fmt, feedback=feedback, backend="cuda")
    assert torch.equal(fast(), slow()), f"{fmt}, {what} differs"

    rows = quantize_rows(x, fmt)
    params = rows[..., : fmt.header_bytes].contiguous().view(torch.float16).float()
    params = params.unflatten(-1, (fmt.groups, 2))
    kernel = timer.in_a_row([partial(round_with_feedback, x, rows, fmt, feedback)])
    levels = LEVELS[fmt.codec]
    plain = timer.alone(partial(_round_with_feedback, x, params, feedback, levels))
    line = f"{f'{fmt}, {what}':20}{kernel:>12.1f}{plain:>12.1f}"
    for width, call in ((14, fast), (12, slow)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
        line += f"{(time.perf_counter() - start) / CALLS * 1e6:>{width}.1f}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
