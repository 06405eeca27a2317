"""The cases of kvquant bench on a GPU, and their inputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from kvquant import LatentFormat, RowFormat
from kvquant.bench.cases import (
    FORMATS,
    SHAPES,
    TABLES,
    Case,
    list_cases,
    make_inputs,
    parse_formats,
    parse_latents,
    rehearse_case,
)
from kvquant.errors import ConfigError
from kvquant.kernels.cuda.decode.spec import DecodeSpec
from kvquant.kernels.cuda.mla.mma.spec import MlaSpec
from kvquant.kernels.cuda.mla.wgmma.spec import WideMlaSpec
from kvquant.kernels.cuda.runtime.launch import GPUS
from kvquant.kernels.cuda.runtime.warmup import kernels_of

CPU = torch.device("cpu")


def small(name: str = "int4-g4", **sizes: Any) -> Case:
    shape = {"batch": 2, "num_q_heads": 4, "num_kv_heads": 2, "seq_len": 70}
    return Case(*parse_formats(name, 64), **(shape | sizes))


def test_the_default_cases_are_one_format_over_shapes_and_all_at_one_shape() -> None:
    cases = list_cases()
    shapes = {(c.num_q_heads, c.num_kv_heads, c.seq_len, c.batch) for c in cases}
    assert shapes == {shape[:4] for shape in SHAPES}
    assert [c.name for c in cases if c.batch == 256] == list(FORMATS)
    assert {c.name for c in cases if c.batch != 256} == {"int4-g4"}
    assert len(cases) == len(set(cases)) == len(SHAPES) + len(FORMATS) - 1
    assert len(list_cases(quick=True)) < 5
    assert [c.name for c in list_cases(["fp8"])] == ["fp8"] * len(SHAPES)


def test_given_shapes_are_combined_with_everything_else() -> None:
    cases = list_cases(
        ["int4-g4", "int8-g4/int4-g4"],
        batches=[1, 8],
        seq_lens=[1024],
        num_q_heads=8,
        num_kv_heads=1,
        dtype=torch.float16,
        page_sizes=[0, 64],
        exact=[(0, 0), (4, 128)],
    )
    assert len(cases) == len(set(cases)) == 2 * 2 * 2 * 2
    assert {c.name for c in cases} == {
        f"{name}{paged}{exact}"
        for name in ("int4-g4", "int8-g4/int4-g4")
        for paged in ("", " paged 64")
        for exact in ("", " 4+128")
    }
    (case,) = list_cases(["fp8"], num_q_heads=64)
    assert [case.num_q_heads, case.num_kv_heads, case.seq_len, case.batch] == [64, 8, 8192, 64]
    assert [c.name for c in list_cases(batches=[1])] == list(FORMATS)


def test_tables_have_cases_of_their_own() -> None:
    ragged = list_cases(table="ragged", page_sizes=[0, 64])
    assert {case.name for case in ragged} == {"int4-g4", "int4-g4 paged 64"}
    assert {(case.heads, case.seq_len) for case in ragged} == {("32:8", 32768)}
    words = [case.lengths for case in ragged[::2]]
    assert words[:4] == [
        *("1 x 32768, 31 x 512", "4 x 32768, 28 x 512", "1 x 32768, 63 x 1024"),
        "1 x 32768, 7 x 512",
    ]
    assert [case.batch for case in ragged[::2]] == [32, 32, 64, 8, 8, 64, 256, 32, 32]
    assert ragged[8].lens == list_cases(table="ragged")[4].lens
    assert all(128 <= length <= 32768 for case in ragged for length in case.lens)
    assert sum(length > 2048 for length in ragged[12].lens) == pytest.approx(128, abs=20)
    assert [case.heads for case in list_cases(table="wide")] == [
        f"{heads}:1" for heads in (8, 16, 32, 64, 71)
    ]
    several = list_cases(table="queries")
    assert [(case.heads, case.q_len) for case in several[::2]] == [
        ("32:8", 1),
        ("32:8", 4),
        ("8:1", 1),
        ("8:1", 4),
    ]
    assert several[1].exact.q_len == 2
    variants = list_cases(table="variants")
    assert {(case.heads, case.batch, case.seq_len) for case in variants} == {("32:8", 64, 8192)}
    assert [case.kind for case in variants] == [
        *("plain", "soft cap", "sink logits", "alibi slopes", "window 4096"),
        *("plain, 4 queries", "tree mask, 4 queries"),
    ]
    mla = list_cases(table="mla", page_sizes=[64])
    assert len(mla) == 7 * len(TABLES["mla"].shapes)
    assert mla[1].name == "int4-g8+fp8-g4 paged 64" and mla[6].exact.name == "bf16"
    assert [(case.num_q_heads, case.q_len) for case in mla[-1::-7]][:3] == [
        *((128, 2), (16, 4), (16, 2))
    ]
    assert "64:1" in {case.heads for case in mla}
    short = list_cases(table="short")
    assert {case.dtype for case in short} == {torch.float16}
    assert [(case.name, case.batch, case.seq_len) for case in short[:4]] == [
        *(("fp16", 1, 128), ("int4-g4", 1, 128), ("fp16", 1, 512), ("int4-g4", 1, 512))
    ]
    assert len(list_cases(["fp8"], table="short", dtype=torch.bfloat16)) == 5


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_q_heads": 7}, "--q-heads 7 is not a multiple of --kv-heads 2"),
        (
            {"page_size": 48},
            "--page-size 48: use 1, 2, 4, 8, 16, 32, 64, 128 or 256, or 0 for none",
        ),
        ({"sink_len": 4, "recent_len": 66}, "--exact 4 66 leaves nothing of --seq-len 70"),
        ({"lens": (4, 70), "sink_len": 4}, "--exact 4 0 leaves nothing of --seq-len 4"),
        ({"lens": (4, 70), "q_len": 2}, "2 queries: of sequences of one length"),
        ({"q_len": 71}, "71 queries: of sequences of one length"),
        ({"variant": "tree_mask"}, "tree_mask with 1 queries: use soft_cap or sink_logits or"),
        ({"variant": "window", "q_len": 2}, "window with 2 queries: use tree_mask"),
        ({"variant": "window", "lens": (4, 70)}, "window .* of sequences of one length"),
    ],
    ids=[f"case{i}" for i in range(9)],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**sizes)


def test_a_call_reads_the_rows_of_all_tokens() -> None:
    assert small("int4-g4").nbytes == 2 * 2 * 70 * (48 + 48)
    assert small("int8/int4-g4").nbytes == 2 * 2 * 70 * (68 + 48)
    assert small(sink_len=4, recent_len=16).nbytes == 2 * 2 * (50 * 96 + 20 * 256)
    assert small(lens=(3, 70)).nbytes == 2 * 73 * (48 + 48)
    assert small(lens=(30, 70), sink_len=4, recent_len=16).nbytes == 2 * (60 * 96 + 40 * 256)
    assert small(lens=(3, 70)).even == small(seq_len=37)
    assert small(lens=(3, 70)).exact.nbytes == 2 * 73 * 256
    assert small().exact.nbytes == 2 * 2 * 70 * 256
    assert small(dtype=torch.float16, page_size=16).exact.name == "fp16"
    assert small(variant="window").nbytes == 2 * 2 * 35 * (48 + 48)
    whole = small(variant="window", sink_len=4, recent_len=16)
    assert whole.nbytes == 2 * 2 * (19 * 96 + 20 * 256)
    latent = Case(*parse_latents("int4-g8"), 2, 16, 1, 70)
    assert (latent.nbytes, latent.exact.nbytes) == (2 * 70 * 416, 2 * 70 * 1152)


def test_latent_rows_have_no_variants() -> None:
    with pytest.raises(ConfigError, match="without variants, not with window"):
        Case(*parse_latents("int4-g8"), 2, 16, 1, 70, variant="window")
    whole = Case(*parse_latents("int4-g8"), 2, 16, 1, 70, sink_len=4, recent_len=16, q_len=3)
    assert whole.nbytes == 2 * (50 * 416 + 20 * 1152)


@pytest.mark.parametrize("page_size", [0, 16])
def test_sequences_of_a_ragged_batch_have_the_same_room(page_size: int) -> None:
    first, second = make_inputs(small(lens=(3, 70), page_size=page_size), 2, CPU)
    for one in (first, second):
        (segment,) = one.segments
        assert segment.seq_lens.tolist() == [3, 70]
        assert segment.capacity == (80 if page_size else 72)  # see rows/spacing.py


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inputs_have_memory_of_their_own_and_the_lengths_of_the_case(dtype: torch.dtype) -> None:
    case = small("int8-g4/int4-g4", sink_len=4, recent_len=16, dtype=dtype)
    first, second = make_inputs(case, 2, CPU)
    assert first.q.shape == (2, 4, 64) and first.q.dtype == dtype
    packed, exact = first.segments
    assert [str(packed.k_format), str(packed.v_format)] == ["int8-g4", "int4-g4"]
    assert [s.seq_lens.tolist() for s in first.segments] == [[50] * 2, [20] * 2]
    assert packed.starts is None and exact.sinks == 4
    assert exact.starts is not None and exact.starts.tolist() == [5, 5]
    assert not torch.equal(first.q, second.q)
    memory = {
        rows.data_ptr()
        for one in (first, second)
        for s in one.segments
        for rows in (s.k_rows, s.v_rows)
    }
    assert len(memory) == 8
    k, v = packed.dequantized(0)
    assert k.std() == pytest.approx(1, abs=0.1) and not torch.equal(k, v)


def test_pages_are_scattered_over_all_inputs_and_hold_the_tokens() -> None:
    one, two = make_inputs(small(page_size=16), 2, CPU)
    segments = one.segments + two.segments
    tables = torch.cat([s.block_table for s in segments if s.block_table is not None])
    assert tables.shape == (4, 5)
    assert tables.flatten().sort().values.tolist() == list(range(20))
    assert segments[0].k_rows.shape == (20, 2, 16, 48)
    assert segments[0].k_rows.data_ptr() == segments[1].k_rows.data_ptr()
    assert segments[1].dequantized(1)[0].shape == (2, 70, 64)


def test_formats_are_named_once_or_apart() -> None:
    assert parse_formats("fp8", 128) == (RowFormat("fp8", 1, 128),) * 2
    assert [str(f) for f in parse_formats("int8-g4/int4", 64)] == ["int8-g4", "int4"]


@pytest.mark.extra("cuda")
@pytest.mark.parametrize("table", ["", *TABLES])
def test_cases_are_rehearsed(table: str) -> None:
    cases = list_cases((), quick=False, table=table)
    told = kernels_of([partial(rehearse_case, case) for case in cases], GPUS["sm_90"])
    formats = {(case.k_format, case.v_format) for case in cases}
    paths = [spec.first for spec in told if isinstance(spec, DecodeSpec)]
    found: set[Any] = {(path.k_format, path.v_format) for path in paths}
    for spec in told:
        if isinstance(spec, (MlaSpec, WideMlaSpec)):
            found.add((LatentFormat(spec.latent, spec.rope), spec.latent))
    assert formats == found
