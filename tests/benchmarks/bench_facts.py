"""Facts of a GPU that kernels/FACTS.md names: reads by size, launches in graphs, pages of memory.

Run by hand, on an idle GPU: python tests/benchmarks/bench_facts.py. Calls are timed alone, with the
L2 cache overwritten, unless it says in a row.
"""

from __future__ import annotations

import torch
from measuring import begin

from kvquant import RowFormat
from kvquant.bench.cases import Case
from kvquant.bench.gpu import check_and_time, rotated_inputs
from kvquant.bench.timer import GraphTimer
from kvquant.kernels.cuda.decode.launch import override_plan
from kvquant.kernels.cuda.decode.plan import Plan

ROW_BYTES = 160  # K and V of a token in INT4 with 4 groups, head_dim 128
READ_MB = [batch * 8192 * ROW_BYTES / 1e6 for batch in (1, 8, 32, 64, 128, 256, 512)] + [4096.0]
LAUNCHES = (1, 2, 10, 100)
# from few blocks with many warps to many with few: how many pages of memory are read from at once
PLANS = [
    Plan(*plan) for plan in (((1,), 8, 2), ((1,), 4, 2), ((1,), 2, 2), ((1,), 2, 4), ((3,), 1, 2))
]


def main() -> None:
    """Print all of them."""
    timer = begin()
    print_reads(timer)
    print_launches(timer)
    print_pages(timer)


def print_reads(timer: GraphTimer) -> None:
    """How fast torch.sum reads, by size."""
    for size in READ_MB:
        x = torch.zeros(int(size * 1e6) // 4, device=timer.device)
        taken = timer.alone(x.sum)
        print(f"torch.sum of {size:6.1f} MB: {taken:7.1f} us, {x.nbytes / taken / 1e3:5.0f} GB/s")


def print_launches(timer: GraphTimer) -> None:
    """What the replay of a graph costs, and each kernel in it."""
    one = torch.zeros(1, device=timer.device)
    empty = timer.empty()
    print(f"graph without kernels: {empty:.2f} us")
    for count in LAUNCHES:

        def call(count: int = count) -> None:
            for _ in range(count):
                one.fill_(1.0)

        taken = timer.alone(call)
        each = (taken - empty) / count
        print(f"graph of {count:3d} kernels of one element: {taken:6.2f} us, {each:.2f} us each")


def print_pages(timer: GraphTimer) -> None:
    """What it costs to read from many pages of GPU memory at once."""
    fmt = RowFormat.parse("int4-g4", 128)
    for seq_len in (8192, 32768):
        case = Case(fmt, fmt, batch=512, num_q_heads=8, num_kv_heads=1, seq_len=seq_len)
        inputs = rotated_inputs(case, timer)
        for plan in PLANS:
            with override_plan(plan):
                _, times = check_and_time(case, inputs, timer)
            print(
                f"512 sequences of {seq_len:5d} tokens, {plan.splits[0]} x {plan.warps} warps x "
                f"{plan.stages} stages: {times.alone:7.1f} us, "
                f"{case.nbytes / times.alone / 1e3:5.0f} GB/s"
            )


if __name__ == "__main__":
    main()
