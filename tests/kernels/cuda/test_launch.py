"""Launching decode kernels: what is refused, copied and cached. No GPU is needed.

Arguments are packed as the kernel reads them: test_simulated.py launches by the same launcher.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from attend import launch_attention
from fake_cuda import (
    CPU,
    STREAM,
    FakeDriver,
    loaded_specs,
    make_query,
    make_segment,
    note_devices,
    unpack,
)

from kvquant import RowFormat
from kvquant.errors import ConfigError, ShapeError, UnsupportedError
from kvquant.kernels.cuda.decode import arrange, launch
from kvquant.kernels.cuda.decode.spec import MMA_COLUMNS, columns_of
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime.launch import GPUS
from kvquant.kernels.cuda.runtime.workspace import workspaces_of
from kvquant.rehearsal import rehearse
from kvquant.rows.bound import MOST_KINDS
from kvquant.rows.call import AttentionCall
from kvquant.rows.segment import FixedSegments, Segment, check_segments
from kvquant.rows.variant import AttentionVariant


def make_queries(q_len: int, batch: int = 2, heads: int = 8) -> torch.Tensor:
    """Queries of zeros [batch, q_len, heads, 128]."""
    return torch.zeros(batch, q_len, heads, 128, dtype=torch.bfloat16)


def counts(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_exact_segments_come_second_whatever_their_order(
    cuda: FakeDriver, order: tuple[int, ...]
) -> None:
    sinks, body = make_segment("bf16", 4), make_segment("int4-g4", 8192)
    recent = make_segment("bf16", 128, starts=True)
    given = [(sinks, body, recent)[i] for i in order]
    launch_attention(make_query(), given, 1.0, None)
    (note,) = cuda.launched
    _, parts = unpack(loaded_specs()[-1], note.arguments)
    assert parts[0]["k_rows"] == body.k_rows.data_ptr()
    assert {parts[1]["capacity"], parts[2]["capacity"]} == {4, 128}
    assert all(1 <= part["splits"] <= 2 for part in parts[1:]) and parts[0]["splits"] >= 1
    assert note.grid[2] == sum(part["splits"] for part in parts)
    assert loaded_specs()[-1].second is not None


def crooked(*shape: int) -> torch.Tensor:
    """Rows that start 4 bytes after a multiple of 16."""
    return torch.zeros(math.prod(shape) + 16, dtype=torch.uint8)[4:-12].view(shape)


def large(batch: int, tokens: int) -> list[Segment]:
    """A segment of many sequences or tokens, which takes no memory."""
    fmt = RowFormat.parse("int4-g4", 128)
    rows = torch.zeros(1, dtype=torch.uint8).expand(batch, 1, tokens, 80)
    return [Segment(rows, rows, torch.zeros(1, dtype=torch.int32).expand(batch), fmt, fmt)]


PLAIN, SINKS = make_segment(capacity=64), make_segment("bf16", 4)
RING, PAGES = make_segment("bf16", 132, starts=True), make_segment("int4", 64, page_size=16)
WITH_SINKS = RING._replace(sinks=4)
EXACT_PAGES = make_segment("bf16", 64, page_size=16)
NO_KERNEL = UnsupportedError, "There may be one of any kind, and two more"
SEVERAL = UnsupportedError, r"several queries .* Attend to each query in"
FLOAT32 = ConfigError, "on CUDA use bfloat16 or float16"
SCALE = ConfigError, "is not possible on CUDA: use a positive number"
NO_SCALE = ConfigError, "sm_scale is"
V_ROWS = ConfigError, r"v_rows: rows .* aligned to 16 bytes"
K_ROWS = ConfigError, r"k_rows: rows .* aligned to 16 bytes"
ODD = ConfigError, "pages of int4 must be aligned to 16 bytes"
BATCH = UnsupportedError, r"batch 70000 .* Cut the batch"
TOKENS = UnsupportedError, "at most 1073741824"
COLUMNS = UnsupportedError, r"and 4194304 queries a sequence is too much"
NOBODY = {"q_indptr": counts(0, 0, 0)}
LOOSE = torch.zeros(2, 2, 64, 88, dtype=torch.uint8)[..., :80]
REFUSED: dict[str, tuple[Any, torch.Tensor, list[Segment], dict[str, Any]]] = {
    "three formats": (NO_KERNEL, make_query(), [make_segment("int8", 64), PLAIN, SINKS], {}),
    "four segments": (NO_KERNEL, make_query(), [SINKS] * 4, {}),
    "pages second": (NO_KERNEL, make_query(), [PLAIN, PAGES, EXACT_PAGES], {}),
    "sinks first": (SEVERAL, make_queries(2), [SINKS, PLAIN, RING], {}),
    "pages behind": (SEVERAL, make_queries(2), [SINKS, PAGES], {}),
    "sinks twice": (SEVERAL, make_queries(2), [WITH_SINKS, WITH_SINKS], {}),
    "float32": (FLOAT32, make_query().float(), [PLAIN], {}),
    "float32, no rows at all": (FLOAT32, make_query(0).float(), [PLAIN], NOBODY),
    "V between units": (V_ROWS, make_query(), [PLAIN._replace(v_rows=crooked(2, 2, 64, 80))], {}),
    "K with gaps": (K_ROWS, make_query(), [PLAIN._replace(k_rows=LOOSE)], {}),
    "pages of short rows": (ODD, make_query(), [PAGES._replace(k_rows=crooked(8, 2, 16, 68))], {}),
    "a batch": (BATCH, torch.zeros(1).bfloat16().expand(70_000, 8, 128), large(70_000, 16), {}),
    "tokens": (TOKENS, make_query(1), large(1, (1 << 30) + 1), {}),
    "columns": (COLUMNS, make_queries(1).expand(2, 1 << 22, 8, 128), [PLAIN], {}),
    **{
        f"a scale of {scale}": (SCALE, make_query(), [PLAIN], {"sm_scale": scale})
        for scale in (0.0, -0.1, math.nan, math.inf, 1e39)
    },
    **{
        f"a scale of {odd!s:.4}": (NO_SCALE, make_query(), [PLAIN], {"sm_scale": odd})
        for odd in (True, "1", 10**400)
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_takes_is_refused(cuda: FakeDriver, name: str) -> None:
    (error, message), q, segments, options = REFUSED[name]
    for _ in range(2):  # cached or not
        with pytest.raises(error, match=message):
            launch_attention(q, segments, **{"sm_scale": 1.0, **options})
    assert not cuda.launched


def test_rows_that_start_between_16_bytes_are_not_dense(cuda: FakeDriver) -> None:
    fmt = RowFormat.parse("int4", 128)
    pool = torch.zeros(4 * 64 * 68 + 64, dtype=torch.uint8)
    for offset, dense in ((0, True), (4, False), (16, True)):
        rows = pool[offset : offset + 4 * 64 * 68].view(2, 2, 64, 68)
        assert rows.data_ptr() % 16 == offset % 16
        lens = torch.zeros(2, dtype=torch.int32)
        launch_attention(make_query(), [Segment(rows, rows, lens, fmt, fmt)], 1.0, None)
        assert loaded_specs()[-1].first.dense is dense
        runtime._kernels.clear()
        launch._launches.clear()


def test_strides_of_axes_with_one_element_do_not_matter(cuda: FakeDriver) -> None:
    segment = make_segment(batch=1, heads=1)
    odd = segment.k_rows.as_strided((1, 1, 1000, 80), (7, 3, 80, 1))
    q = make_query(1).as_strided((1, 8, 128), (5, 128, 1))
    launch_attention(q, [segment._replace(k_rows=odd)], 1.0, None)
    common, (one,) = unpack(loaded_specs()[-1], cuda.launched[0].arguments)
    assert one["k_stride_outer"] == one["k_stride_head"] == common["q_stride_batch"] == 0
    assert common["q"] == q.data_ptr()


IN_PLACE = {
    "every second head": make_query(2, 16)[:, ::2],
    "heads before queries": torch.zeros(2, 8, 3, 128).bfloat16().transpose(1, 2),
    "inside": torch.zeros(2, 5, 10, 256).bfloat16()[:, 1:4, 1:9, 128:],
}
POOL = torch.zeros(2 * 3 * 8 * 128 + 8, dtype=torch.bfloat16)
COPIED = {
    "not aligned": POOL[1 : 1 + 2 * 8 * 128].view(2, 8, 128),
    "not aligned, several": POOL[1:-7].view(2, 3, 8, 128),
    "gaps": torch.zeros(2, 3 * 8 * 128 + 4).bfloat16()[:, :-4].unflatten(1, (3, 8, 128)),
    "elements apart": torch.zeros(2, 128, 8).bfloat16().transpose(1, 2),
    "elements apart, several": torch.zeros(2, 128, 3, 8).bfloat16().permute(0, 2, 3, 1),
    "read as negated": torch._neg_view(make_query().add(1)),  # a kernel would not negate it
}


@pytest.mark.parametrize("name", [*IN_PLACE, *COPIED])
def test_queries_are_copied_only_if_they_must_be(cuda: FakeDriver, name: str) -> None:
    q = {**IN_PLACE, **COPIED}[name].detach().requires_grad_()
    given = [make_segment()]
    for segments in (FixedSegments(given), given):
        for one in (torch.zeros_like(q.detach()), q):  # aligned: another launch
            out, lse = launch_attention(one, segments, None, 1)
    common, _ = unpack(loaded_specs()[-1], cuda.launched[-1].arguments)
    axes = ("batch", "query", "head") if q.ndim == 4 else ("batch", "head")
    strides = tuple(common[f"q_stride_{axis}"] // 2 for axis in axes)
    assert (common["q"] == q.data_ptr()) is (name in IN_PLACE)
    assert strides == (q.stride() if name in IN_PLACE else q.contiguous().stride())[:-1]
    assert lse is not None and (common["out"], common["lse"]) == (out.data_ptr(), lse.data_ptr())
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32)
    assert out.is_contiguous() and lse.is_contiguous()
    assert not (out.requires_grad or lse.requires_grad)
    assert common["score_scale"] == pytest.approx(128**-0.5 * arrange.LOG2_E)


def test_lengths_starts_slots_and_tables_with_gaps_are_copied(cuda: FakeDriver) -> None:
    lens = torch.zeros(2, 3, dtype=torch.int32)[:, 1]
    ring = make_segment("bf16", 128)._replace(seq_lens=lens, starts=lens, seq_slots=lens)
    launch_attention(make_query(), [ring], 1.0, None)
    _, (one,) = unpack(loaded_specs()[-1], cuda.launched[-1].arguments)
    told = one["seq_lens"], one["index"], one["seq_slots"]
    assert 0 not in told and lens.data_ptr() not in told
    paged = make_segment(capacity=640, page_size=64)
    assert paged.block_table is not None
    wide = torch.zeros(2, 16, dtype=torch.int32)[:, :10]  # read in place
    for table, stride in ((wide, 16), (paged.block_table.t().contiguous().t(), 10)):
        launch_attention(make_query(), [paged._replace(block_table=table)], 1.0, None)
        _, (one,) = unpack(loaded_specs()[-1], cuda.launched[-1].arguments)
        assert (one["index"] == table.data_ptr()) is (table is wide)
        assert one["table_stride"] == stride


@pytest.mark.parametrize(
    ("heads", "q_len"),
    [*((2 * n, 0) for n in (1, 8, 9, 16, 34, 71, 129, 300)), (8, 2), (8, 16), (2, 9), (142, 2)],
    ids=str,
)
def test_columns_are_query_heads_of_all_queries(cuda: FakeDriver, heads: int, q_len: int) -> None:
    q = make_queries(q_len, heads=heads) if q_len else make_query(heads=heads)
    launch_attention(q, [make_segment()], 1.0, 1)
    spec, count = loaded_specs()[-1], heads // 2 * max(q_len, 1)
    assert (spec.columns, spec.sharers) == columns_of(count, RowFormat.parse("int4-g4", 128))
    assert cuda.launched[0].grid == (2 * -(-count // spec.block_columns), 2, 1)


@pytest.mark.parametrize(
    ("q", "capacity"),
    [
        (make_query(0), 100),
        (make_query(heads=0), 100),
        (make_query(), 0),
        (make_queries(3, batch=0), 9),
        (make_queries(0), 9),
        (make_queries(3), 0),
    ],
    ids=lambda one: str([*one.shape]) if isinstance(one, torch.Tensor) else str(one),
)
def test_nothing_to_do_launches_nothing(cuda: FakeDriver, q: torch.Tensor, capacity: int) -> None:
    segment = make_segment(capacity=capacity, batch=len(q))
    out, lse = launch_attention(q, [segment], 1.0, None)
    assert out.shape == q.shape and out.dtype == torch.bfloat16 and not out.any()
    assert lse is not None and lse.shape == q.shape[:-1] and bool((lse == -torch.inf).all())
    assert not cuda.launched


def test_a_batch_has_workers_unless_splits_are_given(cuda: FakeDriver) -> None:
    def launched(batch: int, num_splits: int | None, capacity: int = 8192) -> tuple[Any, Any]:
        segment = make_segment(capacity=capacity, batch=batch)
        launch_attention(make_query(batch), [segment], 1.0, num_splits)
        note = cuda.launched[-1]
        return note, unpack(loaded_specs()[-1], note.arguments)[0]

    note, common = launched(6, None)
    columns, batch, parts = note.grid
    assert (common["batch"], common["columns"], common["parts"]) == (batch, columns, parts)
    assert 0 < common["workers"] <= batch * columns * parts
    assert common["places"] == max(batch * columns * parts, common["workers"] + batch * columns)
    space = workspaces_of(torch.device("cpu"))._of_stream[STREAM]
    assert space.partial.numel() >= common["places"] * MMA_COLUMNS * (128 + 1)
    assert common["most_parts"] > parts
    for batch, num_splits, capacity in ((6, 3, 8192), (1, None, 8192), (6, None, 100)):
        _, common = launched(batch, num_splits, capacity)
        assert common["workers"] == 0
        assert common["places"] == batch * common["columns"] * common["parts"]


def test_a_launch_goes_to_the_device_of_its_tensors(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_attention(make_query(), [make_segment()], 1.0, None)
    entered = note_devices(monkeypatch)
    launch_attention(make_query(), [make_segment()], 1.0, None)
    assert entered == [CPU] and len(cuda.launched) == 2


def checked(call: AttentionCall) -> AttentionCall:
    """What attention gives as a check, without what is installed."""
    check_segments(call.q, call.segments)
    return call


@pytest.mark.parametrize("name", ["k_rows", "v_rows", "seq_lens"])
def test_freed_tensors_of_a_known_kind_are_refused(cuda: FakeDriver, name: str) -> None:
    segment = make_segment()
    launch_once = partial(launch_attention, make_query(), [segment], 1.0, check=checked)
    launch_once()
    getattr(segment, name).untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match=f"{name} is a Tensor .* freed"):
        launch_once()
    assert len(cuda.launched) == 1


def test_tensors_that_change_in_place_are_looked_at_again(cuda: FakeDriver) -> None:
    for segments in ([make_segment("int8")], [make_segment(page_size=16), make_segment("bf16", 7)]):
        q = make_query()
        again = partial(launch_attention, q, segments, 1.0, check=checked)
        again()
        before = len(launch._launches)
        again()
        assert len(launch._launches) == before
        for i, segment in enumerate(segments):
            segment.v_rows.resize_(*segment.v_rows.shape[:2], 5, segment.v_rows.shape[3])
            if not i:  # the check trusts the others, which a cache has made like the first one
                with pytest.raises(ShapeError, match="must both be"):
                    again()
            segment.k_rows.resize_(segment.v_rows.shape)
            table, capacity = segment.block_table, 5
            if table is not None:
                with pytest.raises(ShapeError, match="page_size 5 is not supported"):
                    again()
                for rows in (segment.k_rows, segment.v_rows):
                    rows.resize_(*rows.shape[:2], 32, rows.shape[3])
                table.resize_(2, 3)
                capacity = 96
            again()
            spec = loaded_specs()[-1]
            parts = unpack(spec, cuda.launched[-1].arguments)[1]
            assert parts[i]["capacity"] == capacity
            segment.k_rows.transpose_(0, 1)  # as many sequences as heads
            if table is None:
                again()
                parts = unpack(loaded_specs()[-1], cuda.launched[-1].arguments)[1]
                assert parts[i]["k_stride_head"] > parts[i]["k_stride_outer"]
            segment.k_rows.transpose_(0, 1)
            if not i:
                segment.seq_lens.data = segment.seq_lens.long()
                with pytest.raises(ConfigError, match=r"seq_lens is torch.int64"):
                    again()
            segment.seq_lens.data = torch.zeros(4, dtype=torch.int32)[::2]
            again()
            parts = unpack(loaded_specs()[-1], cuda.launched[-1].arguments)[1]
            assert parts[i]["seq_lens"] != segment.seq_lens.data_ptr()
        q.transpose_(0, 1)
        with pytest.raises(ShapeError, match="does not fit"):
            again()
        q.transpose_(0, 1)
        q.data = q.data.transpose(1, 2).contiguous().transpose(1, 2)
        again()
        common, _ = unpack(loaded_specs()[-1], cuda.launched[-1].arguments)
        assert common["q"] != q.data_ptr(), "its elements do not follow one another"


def fixed(**options: Any) -> FixedSegments:
    return FixedSegments([make_segment(), make_segment("bf16", 132, starts=True, **options)])


def test_segments_that_stay_are_launched_as_the_call_is(cuda: FakeDriver) -> None:
    segments = fixed()
    for call in (
        (make_query(), None),
        (make_query(dtype=torch.float16), None),
        (make_query(2, 16), None),
        (make_query(2, 16)[:, ::2], None),
        (make_query(), 3),
    ):
        q, num_splits = call
        for one in (segments, list(segments)):
            out, _ = launch_attention(q, one, 1.0, num_splits)
            assert (out.dtype, out.shape) == (q.dtype, q.shape)
        first, second = cuda.launched[-2:]
        assert first.grid == second.grid
        common = [unpack(loaded_specs()[-1], one.arguments)[0] for one in (first, second)]
        differs = {name for name in common[0] if common[0][name] != common[1][name]}
        assert differs <= {"out", "lse"}
    assert len(launch._launches) == len(segments.bound) == 5
    with pytest.raises(ShapeError, match="does not fit"):
        launch_attention(make_query(3), segments, 1.0, None, check=checked)


def test_a_copy_of_segments_is_looked_at_anew(cuda: FakeDriver) -> None:
    segments, q = fixed(), make_query()
    launch_attention(q, segments, 1.0, 1)
    for copied in (copy.deepcopy(segments), pickle.loads(pickle.dumps(segments))):
        assert type(copied) is FixedSegments and not copied.bound
        launch_attention(q, copied, 1.0, 1)
        _, parts = unpack(loaded_specs()[-1], cuda.launched[-1].arguments)
        assert parts[0]["k_rows"] == copied[0].k_rows.data_ptr()
    assert len(launch._launches) == 1


def test_few_launches_are_bound_to_segments(cuda: FakeDriver) -> None:
    segments = fixed()
    for heads in range(2, 4 * MOST_KINDS, 2):
        for _ in range(2):
            out, _ = launch_attention(make_query(2, heads), segments, 1.0, None)
            common, (one, *_) = unpack(loaded_specs()[-1], cuda.launched[-1].arguments)
            assert common["num_q_heads"] == heads == out.shape[1]
            assert one["k_rows"] == segments[0].k_rows.data_ptr()
        assert 1 <= len(segments.bound) <= MOST_KINDS


@pytest.mark.parametrize("codec", ["int4-g4", "bf16"])
def test_segments_stay_in_the_order_of_their_tokens(cuda: FakeDriver, codec: str) -> None:
    packed, empty = make_segment(codec, 64), make_segment("bf16", 0)
    exact = make_segment("bf16", 132, starts=True)._replace(sinks=4)
    launch_attention(make_queries(2), [empty, packed, exact], 1.0, None)
    _, parts = unpack(loaded_specs()[-1], cuda.launched[-1].arguments)
    assert [part["capacity"] for part in parts] == [64, 132, 0]
    assert [part["sinks"] for part in parts] == [0, 4, 0]
    for q, given, place in (
        (make_queries(2), [exact, empty], "ring"),
        (make_query(), [empty, packed], "linear"),
    ):
        launch_attention(q, given, 1.0, None)
        assert loaded_specs()[-1].second is None and loaded_specs()[-1].first.place == place


def test_tensors_of_a_variant_are_copied_only_if_they_must_be(cuda: FakeDriver) -> None:
    segment = make_segment(capacity=8192)
    slopes, sinks = torch.zeros(8), torch.zeros(16)[::2]
    variant = AttentionVariant(soft_cap=2.0, window=512, alibi_slopes=slopes, sink_logits=sinks)
    for _ in range(2):
        launch_attention(make_query(), [segment], 1.0, None, variant=variant)
    spec, note = loaded_specs()[-1], cuda.launched[-1]
    common, _ = unpack(spec, note.arguments)
    assert common["alibi_slopes"] == slopes.data_ptr()
    assert common["sink_logits"] not in (0, sinks.data_ptr())
    assert len(launch._launches) == 1
    launch_attention(make_query(), [segment], 1.0, None)
    plain = cuda.launched[-1]
    assert plain.grid[2] > note.grid[2], "parts are planned for the tokens in a window"


def test_fields_that_change_nothing_take_the_plain_kernel(cuda: FakeDriver) -> None:
    three = [make_segment("bf16", 4), make_segment(), make_segment("bf16", 128, starts=True)]
    for window in (None, 4 + 1000 + 128, 2**31 - 1):
        variant = AttentionVariant(window=window)
        launch_attention(make_query(), three, 1.0, None, variant=variant)
        assert loaded_specs()[-1].variant == () and not loaded_specs()[-1].causal
    launch_attention(make_query(), three, 1.0, None, variant=AttentionVariant(soft_cap=1.0))
    assert loaded_specs()[-1].variant == ("soft_cap",) and not loaded_specs()[-1].causal
    with pytest.raises(UnsupportedError, match="window"):
        launch_attention(make_query(), three, 1.0, None, variant=AttentionVariant(window=1000))


def test_wide_groups_have_their_own_kernel_unless_the_lse_is_wanted(cuda: FakeDriver) -> None:
    batch, capacity = 64, 8192
    segment = make_segment(capacity=capacity, batch=batch, heads=1)

    def takes(
        heads: int,
        segment: Segment = segment,
        *others: Segment,
        want_lse: bool = False,
        q_len: int = 0,
    ) -> bool:
        q = make_query(len(segment.seq_lens), heads)
        if q_len:
            q = q[:, None].repeat(1, q_len, 1, 1)
        call = AttentionCall(q, [segment, *others], 1.0, None, want_lse)
        return launch.describe(call).spec.is_wide

    assert takes(64) and takes(128) and takes(17)
    launch_attention(make_query(batch, 64), [segment], 1.0, None, False)
    assert cuda.launched[0].grid == (1, batch, 2), "all SMs, once"
    assert not takes(64, want_lse=True)
    assert not takes(16)
    assert takes(9, q_len=4) and not takes(8, q_len=4), "several queries: from 33 columns on"
    assert not takes(64, make_segment("bf16", capacity, batch=batch, heads=1))
    assert not takes(64, make_segment("int3", capacity, batch=batch, heads=1))
    assert not takes(64, make_segment(capacity=1000, batch=2, heads=1)), "too short"
    half = make_segment(capacity=capacity, batch=70, heads=1)
    assert takes(64, half) and not takes(32, half), "two waves of blocks, the second half empty"
    recent = make_segment("bf16", 132, batch=batch, heads=1)
    assert takes(64, segment, recent) and takes(9, segment, recent, q_len=4)
    assert not takes(64, segment, recent, recent), "two segments of 16-bit rows"
    assert not takes(64, segment, make_segment("int8", 144, batch=batch, heads=1))
    cuda.launched.clear()
    launch_attention(make_query(batch, 64), [segment, recent], 1.0, None, False)
    (launched,), spec = cuda.launched, loaded_specs()[-1]
    assert spec.is_wide and launched.grid == (1, batch, 2), "no blocks for recent rows alone"
    common, both = unpack(spec, launched.arguments)
    assert common["parts"] == 2 and [one["splits"] for one in both] == [2, 1]
    launch_attention(make_query(batch, 64), [segment], 1.0, None, True)
    assert not loaded_specs()[-1].is_wide, "the same call with lse has a launch of its own"


@pytest.mark.parametrize("stay", [False, True])
def test_ragged_queries_are_cut_once_and_have_a_launch_for_each_kind(
    cuda: FakeDriver, stay: bool
) -> None:
    segment, q = make_segment(), make_query(40)
    segments = FixedSegments([segment]) if stay else [segment]
    q_indptr = counts(0, *[40] * len(segment.seq_lens))
    for _ in range(2):
        cuda.launched.clear()
        out, lse = launch_attention(q, segments, q_indptr=q_indptr)
        cutting, *attending = cuda.launched
        assert len(attending) == cutting.grid[0] > 1
        starts, ends = set(), set()
        for one, spec in zip(attending, loaded_specs()[: len(attending)], strict=True):
            common = unpack(spec, one.arguments)[0]
            assert lse is not None and not one.overlaps
            assert (common["out"], common["lse"]) == (out.data_ptr(), lse.data_ptr())
            starts.add(common["q_lens"])
            ends.add(common["q_lens"] + 16 * (common["batch"] + 1))
        assert len(starts) == len(attending) and len(starts & ends) == len(attending) - 1


def test_a_rehearsal_notes_both_kernels_of_wide_groups() -> None:
    """Which of them a step takes depends on its batch."""
    fmt = RowFormat.parse("int4-g4", 128)
    rows = torch.empty(2, 1, 2048, fmt.row_bytes, dtype=torch.uint8, device="meta")
    lens = torch.empty(2, dtype=torch.int32, device="meta")
    q = torch.empty(2, 32, 128, dtype=torch.bfloat16, device="meta")
    for want_lse, wide in ((False, [False, True]), (True, [False])):
        call = AttentionCall(q, [Segment(rows, rows, lens, fmt, fmt)], None, None, want_lse)
        with rehearse(GPUS["sm_90"]) as noted:
            launch.attend(call)
        assert [one.is_wide for one in noted.kernels] == wide
