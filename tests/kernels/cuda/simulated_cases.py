"""Run decode kernels in numba's simulator: cases from stdin, one JSON a line, results to stdout.

A process of its own, because numba reads NUMBA_ENABLE_CUDASIM once, when it is imported.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from made_up_codec import INT5
from query_cases import make_variant
from simulated_launches import orders_of, simulated

from kvquant import RowFormat, quantize_rows
from kvquant.kernels.cuda.decode import launch as launching
from kvquant.kernels.cuda.decode.plan import Plan
from kvquant.kernels.cuda.decode.ragged import Kind
from kvquant.kernels.cuda.decode.spec import DecodeSpec
from kvquant.kernels.cuda.decode.wide.spec import widened
from kvquant.kernels.cuda.runtime.launch import GPU
from kvquant.rows.call import AttentionCall
from kvquant.rows.codec import CODECS, FP16_MAX
from kvquant.rows.reference import reference_over_segments
from kvquant.rows.segment import Segment

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
A_GPU = GPU("H200", (9, 0), 132, 233472, 232448)
NAN = 0xFF  # bytes of NaN: rows and pages that are not in use


@dataclass
class Case:
    """What a kernel is made for and called with.

    Attributes:
        k, v: formats of the first segment; v is that of k if empty.
        v_head_dim: head_dim if 0.
        heads: query heads and KV heads.
        place: "linear", "ring" or "paged", of the first segment.
        sinks: rows before the ring, in every ring.
        seated: sequences of rings lie in another order, and among others.
        layout: of rows: "heads" (a head's rows follow one another), "odd heads" (and heads do not
            start at multiples of 16 bytes), "tokens" (a token's heads follow one another).
        splits: of each segment; 0 for a second or third one that is missing.
        workers: blocks that share the work where lengths differ; 0: none.
        exact: codec of the second and third segment, or "" for the first one only.
        exact_lens: tokens of each sequence in these.
        overlong: tell the kernel of more tokens than there is room for, where all room is taken.
        want_lse: whether the kernel writes the lse.
        k_scale, v_scale: factors on the values of K and V, which are cut where fp16 ends.
        q_len: queries of each sequence; 0: one, and q without an axis of them.
        q_lens: of each sequence, less than that; None: all.
        ragged: q is [total, ...]: q_lens of each sequence, one behind another.
        rest: rows of a ragged q behind them.
        variant: fields of AttentionVariant, each with its value or, of a tensor, a random one;
            pages before a window are not to be looked up.
        wide: fields of the spec of the kernel for wide groups that differ. With this kernel all
            ragged queries are in pieces of one kind, the last one. None for the other kernel.
    """

    k: str = "int4-g4"
    v: str = ""
    head_dim: int = 128
    v_head_dim: int = 0
    lens: Sequence[int] = (33, 0, 100)
    heads: Sequence[int] = (8, 1)
    query: str = "bf16"
    q_scale: float = 1.0
    place: str = "linear"
    sinks: int = 0
    seated: bool = False
    page_size: int = 16
    layout: str = "heads"
    splits: Sequence[int] = (1,)
    warps: int = 1
    stages: int = 2
    workers: int = 0
    exact: str = ""
    exact_lens: Sequence[Sequence[int]] = ((4, 0, 2), (40, 3, 0))
    overlong: bool = False
    want_lse: bool = True
    without: str = ""
    columns: int = 8
    sharers: int = 1
    k_scale: float = 1.0
    v_scale: float = 1.0
    q_len: int = 0
    q_lens: Sequence[int] | None = None
    ragged: bool = False
    rest: int = 0
    variant: dict[str, Any] = field(default_factory=dict)
    wide: dict[str, Any] | None = None


def run_case(name: str, case: Case) -> dict[str, float]:
    """Errors against the reference: of out, relative, in L2, and of the lse, absolute."""
    torch.manual_seed(0)
    batch, num_q_heads, dim = len(case.lens), case.heads[0], case.head_dim
    plain, segments = make_segments(case)
    dtype = DTYPES[case.query]
    around = torch.full((batch, num_q_heads + 2, dim), torch.nan, dtype=dtype)
    q_lens = q_indptr = None
    if case.ragged:
        assert case.q_lens is not None
        q_indptr = torch.tensor([0, *accumulate(case.q_lens)], dtype=torch.int32)
        around = around[:1].repeat(sum(case.q_lens) + case.rest, 1, 1)
    elif case.q_len:
        around = around[:, None].repeat(1, case.q_len, 1, 1)
    q = around[..., 1:-1, :]
    q.copy_(torch.randn(q.shape) * case.q_scale)
    if case.ragged and case.rest:
        q[-case.rest :] = torch.nan
    elif case.q_len:
        q_lens = torch.tensor(case.q_lens or [case.q_len] * batch, dtype=torch.int32)
        q[torch.arange(case.q_len) >= q_lens[:, None]] = torch.nan
    variant = make_variant(case.variant, q, plain, q_lens)
    expected, expected_lse = reference_over_segments(q, plain, None, q_lens, variant, q_indptr)

    def with_columns(spec: DecodeSpec, gpu: GPU) -> DecodeSpec:
        return replace(spec, columns=case.columns, sharers=case.sharers)

    def as_told(spec: DecodeSpec, count: int) -> DecodeSpec | None:
        if case.wide is None:
            return None
        found = widened(spec, count)
        assert found is not None
        return replace(found, **case.wide)

    kinds = launching._kinds_of

    def one_kind(call: AttentionCall) -> tuple[Kind, ...]:
        return (kinds(call)[-1]._replace(least=1, room=len(call.q)),)

    splits = tuple(n for n in case.splits if n)
    chosen = Plan(splits, case.warps, case.stages, case.workers)
    q_lens = q_lens if case.q_lens else None
    want_lse = case.want_lse and case.wide is None  # it moves the lse
    call = AttentionCall(q, segments, None, None, want_lse, q_lens, variant)
    call = call._replace(q_indptr=q_indptr)
    outs = []
    # These cases are about blocks that take parts of one sequence. Other cases may have such
    # blocks, but they differ in what comes before.
    for backwards in orders_of(name, both=name.endswith(("splits", "balanced"))):
        with (
            simulated(call, gpu=A_GPU, backwards=backwards) as simulation,
            mock.patch.object(launching, "narrow", with_columns),
            mock.patch.object(launching, "widened", as_told),
            mock.patch.object(launching, "_kinds_of", one_kind if case.wide is not None else kinds),
            mock.patch.object(launching, "pays", lambda *_: True),
        ):
            if case.wide is not None:  # its warps and stages are those of its spec
                spec = launching.describe(call).spec
                assert spec.is_wide
                chosen = replace(chosen, warps=spec.warps, stages=spec.stages)
            with launching.override_plan(chosen, case.without):
                out, lse = launching.attend(call)
        assert not any(one.any() for one in simulation.counters), "not 0 after the launch"
        outs.append(out)
    assert torch.equal(outs[0], outs[-1]), "the result depends on the order of blocks and lanes"
    empty = expected_lse == -math.inf
    assert not out[empty].any(), "no tokens, but the output is not 0"
    error = (out.double() - expected).norm() / expected.norm()
    if lse is None:
        return {"out": float(error), "lse": 0.0}
    assert bool((lse[empty] == -math.inf).all()), "no tokens, but the lse is not -inf"
    return {"out": float(error), "lse": float((lse.double() - expected_lse)[~empty].abs().max())}


def make_segments(case: Case) -> tuple[list[Segment], list[Segment]]:
    """Those that have splits: as plain ones for the reference, and as the launcher gets them."""
    v_dim = case.v_head_dim or case.head_dim
    kinds = [(case.k, case.v or case.k, case.place, case.lens)]
    if case.exact:
        kinds += [(case.exact, case.exact, "ring", lens) for lens in case.exact_lens]
    made = [
        make_segment(
            case, RowFormat.parse(k, case.head_dim), RowFormat.parse(v, v_dim), place, lens
        )
        for (k, v, place, lens), splits in zip(kinds, case.splits, strict=True)
        if splits
    ]
    plain, segments = zip(*made, strict=True)
    return list(plain), list(segments)


def make_segment(
    case: Case, k_format: RowFormat, v_format: RowFormat, place: str, lens: Sequence[int]
) -> tuple[Segment, Segment]:
    """Random rows: in order for the reference, and where the kernel finds them."""
    page_size = case.page_size if place == "paged" else 1
    room = max([1, *lens]) + (0 if case.overlong else 5)
    unit = page_size if place == "paged" else 16
    capacity = -(-room // unit) * unit + (case.layout == "odd heads")
    max_pages = capacity // page_size
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    rows: list[torch.Tensor] = []
    for fmt, scale in ((k_format, case.k_scale), (v_format, case.v_scale)):
        values = torch.randn(len(lens), case.heads[1], capacity, fmt.head_dim) * 1.5 + 0.5
        rows.append(quantize_rows((scale * values).clamp(-FP16_MAX, FP16_MAX), fmt))
        for b, seq_len in enumerate(lens):
            rows[-1][b, :, seq_len:] = NAN
    told = seq_lens
    if case.overlong:
        told = torch.where(seq_lens == capacity, capacity + 1000, seq_lens)
    sinks = min(case.sinks, capacity - 1) if place == "ring" else 0
    # these rows are in order, but come before other segments
    plain = Segment(rows[0], rows[1], seq_lens, k_format, v_format, sinks=sinks)
    starts = table = seq_slots = None
    if place == "ring":
        starts = torch.randint(0, capacity - sinks, (len(lens),), dtype=torch.int32)
        rows = [one.clone() for one in rows]
        for one in rows:
            for row, start in zip(one, starts.tolist(), strict=True):
                row[:, sinks:] = row[:, sinks:].roll(start, 1)
        if case.seated:
            seq_slots = torch.randperm(len(lens) + 2, dtype=torch.int32)[: len(lens)]
            rows = [seq_slot(one, seq_slots) for one in rows]
    elif place == "paged":
        table = torch.randperm(len(lens) * max_pages, dtype=torch.int32).view(len(lens), -1)
        rows = [to_pages(one, page_size, table) for one in rows]
        # pages that are not in use, and those before a window, are never looked up
        numbers = torch.tensor(case.q_lens or [max(case.q_len, 1)] * len(lens))
        begin = (seq_lens - numbers - case.variant.get("window", 1 << 30) + 1).clamp(min=0)
        page, end = torch.arange(max_pages), -(-seq_lens // page_size)
        used = (page < end[:, None]) & (page >= begin[:, None] // page_size)
        table = torch.where(used, table, -1)
    if case.layout == "tokens":
        rows = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in rows]
    found = rows[0], rows[1], told, k_format, v_format, starts, table, sinks, seq_slots
    return plain, Segment(*found)


def seq_slot(rows: torch.Tensor, seq_slots: torch.Tensor) -> torch.Tensor:
    """Sequences at their sequence slots, the others NaN."""
    store = torch.full((len(seq_slots) + 2, *rows.shape[1:]), NAN, dtype=torch.uint8)
    store[seq_slots.long()] = rows
    return store


def to_pages(rows: torch.Tensor, page_size: int, table: torch.Tensor) -> torch.Tensor:
    """Pages [num_pages, num_kv_heads, page_size, row_bytes], some of which nobody uses."""
    batch, heads, _, row_bytes = rows.shape
    pages = torch.full((table.numel() + 2, heads, page_size, row_bytes), NAN, dtype=torch.uint8)
    pages[table.long()] = rows.view(batch, heads, -1, page_size, row_bytes).transpose(1, 2)
    return pages


def main() -> None:
    """Answer every line {"name": ..., "case": {...}} by {"name": ..., errors or "problem"}."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    CODECS[INT5.name] = INT5
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result: dict[str, Any] = dict(run_case(request["name"], Case(**request["case"])))
        except Exception:
            result = {"problem": traceback.format_exc()}
        print(json.dumps({"name": request["name"], **result}), flush=True)


if __name__ == "__main__":
    main()
