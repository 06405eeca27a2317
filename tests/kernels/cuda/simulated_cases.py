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
from dataclasses import dataclass, field
from typing import Any

import torch
from made_up_codec import INT5
from query_cases import make_variant

from kvquant import RowFormat, quantize_rows
from kvquant.kernels.cuda.decode.plan import fit
from kvquant.kernels.cuda.decode.spec import POSITIONAL, SEGMENT, DecodeSpec, Path
from kvquant.kernels.cuda.runtime.launch import GPU
from kvquant.kernels.cuda.simulator import simulator
from kvquant.rows.codec import CODECS
from kvquant.rows.reference import reference_over_segments
from kvquant.rows.segment import Segment
from kvquant.rows.variant import AttentionVariant

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
A_GPU = GPU("H200", (9, 0), 132, 233472, 232448)
NAN = 0xFF  # bytes of NaN: rows and pages that are not in use
Fields = dict[str, Any]  # of a segment's arguments: tensors and numbers


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
        q_len: queries of each sequence; 0: one, and q without an axis of them.
        q_lens: of each sequence, less than that; None: all.
        variant: fields of AttentionVariant, each with its value or, of a tensor, a random one;
            pages before a window are not to be looked up.
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
    q_len: int = 0
    q_lens: Sequence[int] | None = None
    variant: dict[str, Any] = field(default_factory=dict)


def run_case(case: Case) -> dict[str, float]:
    """Errors against the reference: of out, relative, in L2, and of the lse, absolute."""
    torch.manual_seed(0)
    batch, (num_q_heads, num_kv_heads), dim = len(case.lens), case.heads, case.head_dim
    v_dim = case.v_head_dim or dim
    formats = RowFormat.parse(case.k, dim), RowFormat.parse(case.v or case.k, v_dim)
    first = Path(*formats, case.place, case.layout == "heads")
    paths, lens, second = [first], [case.lens], None
    if case.exact:
        second = Path(RowFormat.parse(case.exact, dim), RowFormat.parse(case.exact, v_dim), "ring")
        paths, lens = [first, second, second], [case.lens, *case.exact_lens]
    spec = DecodeSpec(
        first,
        second,
        case.query,
        case.warps,
        case.stages,
        case.without,
        case.columns,
        case.sharers,
        causal=case.q_len > 0 or bool(POSITIONAL & {*case.variant}),
        variant=tuple(sorted(case.variant)),
    )

    segments: list[Segment] = []
    fields: list[Fields] = []
    for path, of_path, splits in zip(paths, lens, case.splits, strict=True):
        segment, made = make_segment(case, path, of_path)
        segments += [segment] if splits else []
        fields.append({**made, "splits": splits} if splits else {"splits": 0})

    dtype = DTYPES[case.query]
    shape: tuple[int, ...] = (batch, num_q_heads)
    around = torch.full((batch, num_q_heads + 2, dim), torch.nan, dtype=dtype)
    if case.q_len:
        shape = (batch, case.q_len, num_q_heads)
        around = around[:, None].repeat(1, case.q_len, 1, 1)
    q = around[..., 1:-1, :]
    q.copy_(torch.randn(q.shape) * case.q_scale)
    q_lens = None
    if case.q_len:
        q_lens = torch.tensor(case.q_lens or [case.q_len] * batch, dtype=torch.int32)
        q[torch.arange(case.q_len) >= q_lens[:, None]] = torch.nan
    variant = make_variant(case.variant, q, segments, q_lens)
    expected, expected_lse = reference_over_segments(q, segments, None, q_lens, variant)
    fields_of_queries = {
        "q_lens": q_lens if case.q_lens else 0,
        "q_stride_query": 2 * q.stride(1) if case.q_len else 0,
        "q_len": max(case.q_len, 1),
    }

    ratio, parts = num_q_heads // num_kv_heads, sum(case.splits)
    head_blocks = -(-ratio * max(case.q_len, 1) // spec.block_columns)
    columns = num_kv_heads * head_blocks
    units = batch * columns
    places = max(units * parts, case.workers + units * spec.segments)
    outs = []
    for backwards in (False, True):
        out = torch.full((*shape, v_dim), torch.nan, dtype=dtype)
        lse = torch.full(shape, torch.nan)
        counters = torch.zeros(units, dtype=torch.int32)
        common = {
            "q": q,
            "out": out,
            "lse": lse if case.want_lse else 0,
            "partial": torch.full((places * spec.block_columns * (v_dim + 1),), torch.nan),
            "counters": counters,
            "q_stride_batch": 2 * q.stride(0),
            "q_stride_head": 2 * q.stride(-2),
            "num_q_heads": num_q_heads,
            "ratio": ratio,
            "head_blocks": head_blocks,
            "batch": batch,
            "columns": columns,
            "parts": parts,
            "places": places,
            "workers": case.workers,
            "most_parts": fit(spec, A_GPU).most_parts,
            "score_scale": dim**-0.5 * math.log2(math.e),
            **fields_of_queries,
            **arguments_of(variant),
        }
        if parts == 1 and not case.workers:
            common |= {"partial": 0, "counters": 0}
        launch(
            spec, common, fields, (columns, batch, max(parts, -(-case.workers // units))), backwards
        )
        assert not counters.any(), "counters are not 0 after the launch"
        outs.append(out)
    assert torch.equal(outs[0], outs[1]), "the result depends on the order of blocks and lanes"
    empty = expected_lse == -math.inf
    assert not out[empty].any(), "no tokens, but the output is not 0"
    if case.want_lse:
        assert bool((lse[empty] == -math.inf).all()), "no tokens, but the lse is not -inf"
    error = (out.double() - expected).norm() / expected.norm()
    lse_error = (lse.double() - expected_lse)[~empty].abs().max() if case.want_lse else 0.0
    return {"out": float(error), "lse": float(lse_error)}


def make_segment(case: Case, path: Path, lens: Sequence[int]) -> tuple[Segment, Fields]:
    """Random rows: as a plain segment for the reference, and as the kernel finds them."""
    page_size = case.page_size if path.place == "paged" else 1
    room = max([1, *lens]) + (0 if case.overlong else 5)
    unit = page_size if path.place == "paged" else 16
    capacity = -(-room // unit) * unit + (case.layout == "odd heads")
    max_pages = capacity // page_size
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    plain: list[torch.Tensor] = []
    for fmt in (path.k_format, path.v_format):
        values = torch.randn(len(lens), case.heads[1], capacity, fmt.head_dim) * 1.5 + 0.5
        rows = quantize_rows(values, fmt)
        for b, seq_len in enumerate(lens):
            rows[b, :, seq_len:] = NAN
        plain.append(rows)
    told = (
        torch.where(seq_lens == capacity, capacity + 1000, seq_lens) if case.overlong else seq_lens
    )
    fields: Fields = dict.fromkeys((name for name, _ in SEGMENT), 0)
    fields |= {"seq_lens": told, "capacity": capacity}
    if path.place == "ring":
        sinks = min(case.sinks, capacity - 1)
        starts = torch.randint(0, capacity - sinks, (len(lens),), dtype=torch.int32)
        fields |= {"index": starts, "sinks": sinks, "ring": capacity - sinks}
        moved = [rows.clone() for rows in plain]
        for rows in moved:
            for row, start in zip(rows, starts.tolist(), strict=True):
                row[:, sinks:] = row[:, sinks:].roll(start, 1)
        if case.seated:
            seq_slots = torch.randperm(len(lens) + 2, dtype=torch.int32)[: len(lens)]
            fields["seq_slots"] = seq_slots
            moved = [seq_slot(rows, seq_slots) for rows in moved]
    elif path.place == "paged":
        used = -(-seq_lens // page_size)
        table = torch.randperm(len(lens) * max_pages, dtype=torch.int32).view(len(lens), -1)
        moved = [to_pages(rows, page_size, table) for rows in plain]
        table = torch.where(torch.arange(max_pages) < used[:, None], table, -1)  # never looked up
        fields |= {"index": table.to(torch.int32), "table_stride": max_pages}
        fields["page_shift"] = page_size.bit_length() - 1
        window = case.variant.get("window", 0)
        if window:  # pages before it may be freed
            numbers = torch.tensor(case.q_lens or [max(case.q_len, 1)] * len(lens))
            begin = (seq_lens - numbers - window + 1).clamp(min=0)
            table = torch.where(torch.arange(max_pages) < begin[:, None] // page_size, -1, table)
            fields["index"] = table.to(torch.int32)
    else:
        moved = plain
    for side, rows in zip("kv", moved, strict=True):
        if case.layout == "tokens":
            rows = rows.transpose(1, 2).contiguous().transpose(1, 2)
        fields[f"{side}_rows"] = rows
        outer, head, row, _ = rows.stride()
        fields |= {f"{side}_stride_outer": outer, f"{side}_stride_head": head}
        fields[f"{side}_stride_row"] = row
    k_rows, v_rows = plain
    sinks = fields["sinks"]  # these rows are in order, but come before other segments
    made = Segment(k_rows, v_rows, seq_lens, path.k_format, path.v_format, sinks=sinks)
    return made, fields


def arguments_of(variant: AttentionVariant) -> Fields:
    """A variant as the kernel takes it."""
    given = {name: value for name, value in variant._asdict().items() if value is not None}
    if "soft_cap" in given:
        given["soft_cap"] *= math.log2(math.e)
    if "key_bias" in given:
        given["key_bias_stride"] = 4 * given["key_bias"].stride(0)
        given["key_bias_len"] = given["key_bias"].shape[1]
    return given


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


def launch(
    spec: DecodeSpec, common: Fields, fields: list[Fields], grid: tuple[int, ...], backwards: bool
) -> None:
    """Launch in the simulator, with the arguments in the order of the tables."""
    memory = []

    def cast(kind: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return kind(value)
        storage = value.untyped_storage()
        memory.append((storage.data_ptr(), storage.nbytes()))
        return kind(value.data_ptr())

    arguments = []
    tables = [spec.places, *[[name for name, _ in SEGMENT]] * spec.segments]
    for given, names, kind in zip([common, *fields], tables, spec.signature(), strict=True):
        pairs = zip(kind.types, (given.get(name, 0) for name in names), strict=True)
        arguments.append(tuple(cast(*pair) for pair in pairs))
    kernel = spec.build()
    simulator.launch(
        kernel, grid, 32 * spec.warps, spec.shared_bytes, arguments, memory, backwards=backwards
    )


def main() -> None:
    """Answer every line {"name": ..., "case": {...}} by {"name": ..., errors or "problem"}."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    CODECS[INT5.name] = INT5
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result: Fields = dict(run_case(Case(**request["case"])))
        except Exception:
            result = {"problem": traceback.format_exc()}
        print(json.dumps({"name": request["name"], **result}), flush=True)


if __name__ == "__main__":
    main()
