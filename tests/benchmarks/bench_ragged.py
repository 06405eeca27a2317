"""Sequences of unequal lengths behind a shared prefix, and with several queries each, on a GPU.

Run by hand: python tests/benchmarks/bench_ragged.py. INT4 in 4 groups, 32 query heads on 8 KV heads
of 128, room for 32,768 tokens a sequence. Times are of one call inside a CUDA graph, alone with the
L2 cache overwritten, beside those of as many tokens spread evenly. Outputs are compared first: a
prefix with two calls merged by their lse, several queries with a call for each. One query without a
prefix: kvquant bench --ragged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from measuring import begin, relative_error

from kvquant import RowFormat, merge_states, quantize_rows
from kvquant.ops.attention import attend
from kvquant.ops.shared_prefix import attend_shared
from kvquant.rows.call import AttentionCall
from kvquant.rows.segment import Segment

Q_HEADS, KV_HEADS, HEAD_DIM, ROOM = 32, 8, 128, 32768
PREFIX, QUERIES = 4096, 4
FORMAT = RowFormat.parse("int4-g4", HEAD_DIM)
# sequences, how many of them are long, tokens of these, tokens of the others
CASES = ((32, 1, 32768, 512), (32, 4, 32768, 512), (64, 1, 32768, 1024), (8, 1, 32768, 512))
Attend = Callable[[], torch.Tensor]


def main() -> None:
    """Print a line per case."""
    timer = begin()
    print(f"{'':40}{'unequal':>12}{'evenly':>12}{'ratio':>8}{'error':>10}")
    for name, make in (
        (f"a prefix of {PREFIX:,}", behind_a_prefix),
        (f"{QUERIES} queries", several_queries),
    ):
        for batch, count, long, short in CASES:
            lens = [long] * count + [short] * (batch - count)
            rows = random_rows(batch, ROOM), random_rows(batch, ROOM)
            times, errors = [], []
            for each in (lens, [sum(lens) // batch] * batch):
                call, wanted = make(rows, each)
                errors.append(relative_error(call(), wanted))
                times.append(timer.alone(call))
            assert max(errors) < 3e-3, errors
            what = f"{count} x {long:,}, {batch - count} x {short:,}, {name}"
            ragged, even = times
            print(
                f"{what:40}{ragged:9.1f} us{even:9.1f} us{ragged / even:7.2f}x{max(errors):10.1e}"
            )


def random_rows(*shape: int) -> torch.Tensor:
    """[sequences, KV_HEADS, tokens, row_bytes]."""
    batch, tokens = shape
    return quantize_rows(torch.randn(batch, KV_HEADS, tokens, HEAD_DIM, device="cuda"), FORMAT)


def segment(rows: tuple[torch.Tensor, torch.Tensor], lens: Sequence[int]) -> Segment:
    counts = torch.tensor(lens, dtype=torch.int32, device="cuda")
    return Segment(*rows, counts, FORMAT, FORMAT)


def behind_a_prefix(
    rows: tuple[torch.Tensor, torch.Tensor], lens: Sequence[int]
) -> tuple[Attend, torch.Tensor]:
    """The call, and what it is to give."""
    q = torch.randn(len(lens), Q_HEADS, HEAD_DIM, device="cuda").bfloat16()
    shared = random_rows(1, PREFIX), random_rows(1, PREFIX)
    prefix, own = segment(shared, [PREFIX]), segment(rows, lens)
    k, v = (one.expand(len(lens), -1, -1, -1) for one in shared)
    of_all = segment((k, v), [PREFIX] * len(lens))
    states = [attend(AttentionCall(q, [one], return_lse=True)) for one in (of_all, own)]
    wanted, _ = merge_states(*((out.float(), lse) for out, lse in states if lse is not None))
    call = AttentionCall(q, [own])
    return (lambda: attend_shared(call, prefix)[0]), wanted.double()


def several_queries(
    rows: tuple[torch.Tensor, torch.Tensor], lens: Sequence[int]
) -> tuple[Attend, torch.Tensor]:
    """The call, and what it is to give."""
    q = torch.randn(len(lens), QUERIES, Q_HEADS, HEAD_DIM, device="cuda").bfloat16()
    alone = [
        attend(AttentionCall(q[:, i].contiguous(), [segment(rows, [n - last for n in lens])]))[0]
        for i, last in enumerate(reversed(range(QUERIES)))
    ]
    wanted = torch.stack(alone, dim=1).double()
    call = AttentionCall(q, [segment(rows, lens)])
    return (lambda: attend(call)[0]), wanted


if __name__ == "__main__":
    main()
