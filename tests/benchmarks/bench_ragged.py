"""Times of attention on a GPU to sequences of unequal lengths, and with ragged queries.

Run by hand: python tests/benchmarks/bench_ragged.py. With --queries it prints the second table
only. --json FILE writes the times of the second table to a file. To compare two checkouts, run this
script twice on one machine, each time with another checkout's folder first in PYTHONPATH.

Rows are INT4 in 4 groups, with 32 query heads on 8 KV heads of 128. A time is that of a single call
inside a CUDA graph, with the L2 cache overwritten before it. The script compares outputs before it
measures, and prints two tables:

    unequal lengths      Sequences have room for 32,768 tokens. A line has the time behind a shared
                         prefix, or of several queries each, and the time of as many tokens spread
                         evenly. A prefix is compared with two calls merged by their lse, several
                         queries with a call for each.
    numbers of queries   Sequences with equally or unequally many queries. "ragged" is one call with
                         q_indptr. "padded" is one call with q_lens; the script skips it where
                         padding makes more than 4 times as many queries.
                         "apart" is a call for each number of queries, one after another. "to apart"
                         is the time of "ragged" divided by that of "apart". All are compared with a
                         call for each sequence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path

import click
import torch
from measuring import begin, relative_error

from kvquant import RowFormat, merge_states, quantize_rows
from kvquant.bench.timer import GraphTimer
from kvquant.kernels.cuda.runtime.warmup import warm_up
from kvquant.ops.attention import attend
from kvquant.ops.shared_prefix import attend_shared
from kvquant.rows.call import AttentionCall
from kvquant.rows.segment import Segment

Q_HEADS, KV_HEADS, HEAD_DIM, ROOM = 32, 8, 128, 32768
PREFIX, QUERIES = 4096, 4
FORMAT = RowFormat.parse("int4-g4", HEAD_DIM)
# sequences, how many of them are long, tokens of these, tokens of the others
CASES = ((32, 1, 32768, 512), (32, 4, 32768, 512), (64, 1, 32768, 1024), (8, 1, 32768, 512))
# tokens of a sequence, and new ones of each: decode steps, drafted tokens, chunks of prompts
COUNTS = (
    (1024, [1] * 64),
    (8192, [1] * 64),
    (8192, [8] * 64),
    (8192, [128] * 64),
    (8192, [n for n in range(1, 9) for _ in range(8)]),
    (8192, [1] * 60 + [128] * 4),
    (8192, [1] * 63 + [512]),
    (1024, [1] * 250 + [128] * 6),
    (32768, [1] * 8 + [2048]),
)
Attend = Callable[[], torch.Tensor]


@click.command()
@click.option("--queries", is_flag=True, help="Print the table of numbers of queries only.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the times of the table of numbers of queries to this file, in us.",
)
def main(queries: bool, json_file: Path | None) -> None:
    """Print a line per case."""
    timer = begin()
    if not queries:
        print_lengths(timer)
    print(f"{'new tokens':40}{'ragged':>12}{'padded':>12}{'apart':>12}{'to apart':>10}")
    # a call for one sequence has a kernel for its number of queries
    warm_up(torch.device("cuda"), [partial(rehearse_counts, *case) for case in COUNTS])
    found = dict(print_counts(timer, tokens, counts) for tokens, counts in COUNTS)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def print_lengths(timer: GraphTimer) -> None:
    """Print the table of unequal lengths."""
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


def print_counts(
    timer: GraphTimer, tokens: int, counts: Sequence[int]
) -> tuple[str, dict[str, float]]:
    """Print a line: the time of one call for all sequences, and of several calls. Return the name
    of the case and its times."""
    alone, runs = calls_of(tokens, counts, "cuda")
    wanted = torch.cat([attend(one)[0][0] for one in alone]).double()
    times = {}
    for name, calls in runs.items():

        def run(calls: Sequence[AttentionCall] = calls) -> list[torch.Tensor]:
            return [attend(one)[0] for one in calls]

        out = run()
        if name == "padded":
            out = [x[:count] for x, count in zip(out[0], counts, strict=True)]
        error = relative_error(torch.cat([x.reshape(-1, Q_HEADS, HEAD_DIM) for x in out]), wanted)
        assert error < 3e-3, (name, error)
        times[name] = timer.alone(run)
    different = [f"{len([*same])} x {count:,}" for count, same in groupby(counts)]
    what = ", ".join(different if len(different) < 4 else [f"{len(counts)} x 1 to {max(counts)}"])
    what += f" behind {tokens:,}"
    cells = (
        f"{times[one]:9.1f} us" if one in times else f"{'-':>12}"
        for one in ("ragged", "padded", "apart")
    )
    ratio = times["ragged"] / times["apart"]
    print(f"{what:40}" + "".join(cells) + f"{ratio:9.2f}x", flush=True)
    return what, times


def calls_of(
    tokens: int, counts: Sequence[int], device: str
) -> tuple[list[AttentionCall], dict[str, list[AttentionCall]]]:
    """A call for each sequence, and the calls of each way that makes fewer, by its name.

    Args:
        tokens: of the cache of each sequence.
        counts: new tokens of each sequence.
        device: "cuda", or "meta" to rehearse the calls.
    """
    batch, total, most = len(counts), sum(counts), max(counts)
    rows = [random_rows(batch, tokens, device=device) for _ in range(2)]

    def part(first: int, size: int) -> Segment:
        k, v = (one[first : first + size] for one in rows)
        return segment((k, v), [tokens] * size)

    q = torch.randn(total, Q_HEADS, HEAD_DIM, device=device).bfloat16()
    each = q.split([*counts])
    q_lens = torch.tensor(counts, dtype=torch.int32, device=device)
    q_indptr = torch.nn.functional.pad(q_lens.cumsum(0), (1, 0)).int()
    alone = [AttentionCall(one[None], [part(i, 1)]) for i, one in enumerate(each)]
    runs = {"ragged": [AttentionCall(q, [part(0, batch)], q_indptr=q_indptr)]}
    if batch * most <= 4 * total:
        padded = torch.nn.utils.rnn.pad_sequence([*each], batch_first=True)
        runs["padded"] = [AttentionCall(padded, [part(0, batch)], q_lens=q_lens)]
    runs["apart"], first = [], 0
    for _, same in groupby(counts):
        size = len([*same])
        own = torch.stack(each[first : first + size])
        runs["apart"].append(AttentionCall(own, [part(first, size)]))
        first += size
    return alone, runs


def rehearse_counts(tokens: int, counts: Sequence[int]) -> None:
    """Rehearse the calls of a printed line on the meta device: see kvquant/rehearsal.py."""
    alone, runs = calls_of(tokens, counts, "meta")
    for one in (*alone, *chain.from_iterable(runs.values())):
        attend(one)


def random_rows(batch: int, tokens: int, device: str = "cuda") -> torch.Tensor:
    """[sequences, KV_HEADS, tokens, row_bytes]; without values on the meta device."""
    if device == "meta":
        shape = batch, KV_HEADS, tokens, FORMAT.row_bytes
        return torch.empty(shape, dtype=torch.uint8, device=device)
    return quantize_rows(torch.randn(batch, KV_HEADS, tokens, HEAD_DIM, device="cuda"), FORMAT)


def segment(rows: tuple[torch.Tensor, torch.Tensor], lens: Sequence[int]) -> Segment:
    counts = torch.tensor(lens, dtype=torch.int32, device=rows[0].device)
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
