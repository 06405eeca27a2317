"""The decode kernel on larger calls than the simulator takes. Needs an NVIDIA GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from attend import attend_segments, launch_attention
from cuda_cases import (
    LIMITS,
    assert_right,
    captured,
    check_on_gpu,
    int32,
    launch,
    linear,
    paged,
    query,
    random_rows,
)
from decode_cases import Case, make_call
from query_cases import make_variant
from ragged_cases import each_alone, indptr
from relative_l2 import relative_l2
from simulator_cases import of
from threads import run_in_threads

from kvquant import AttentionVariant, RowFormat
from kvquant.errors import ShapeError, UnsupportedError
from kvquant.rows.reference import reference_over_segments
from kvquant.rows.segment import PAGE_SIZES, FixedSegments, Segment

pytestmark = pytest.mark.gpu
LENS = "lens=[1000,37,1,0]"
UNLIKE = {  # lengths, of which work is cut on the device (schedule.py)
    "one far beyond the others": [5000, *[60] * 7],
    "the last far beyond the others": [*[60] * 7, 5000],
    "all different": [0, 1, 33, 64, 65, 511, 900, 3600],
    "only one has tokens": [0, 0, 0, 4000, 0],
    "two": [1, 4100],
    "more than a warp has lanes": [*[17 * i % 190 for i in range(70)], 3000, 5],
    "more than a warp asks for at once": [*[i % 40 for i in range(300)], 2600],
    "more units than there is room for": [*[37 * i % 500 for i in range(200)], 6000],
}
FEW = "int4-g4 int4 int3 int2 int8-g4 bf16".split()
FORMATS = "int2 int3 int4 int4-g2 int4-g4 int4-g8 int8 int8-g2 int8-g4 int8-g8".split()
FORMATS += "fp8 fp8-g4 bf16 fp16".split()
RECENT = "exact=bf16 sinks=4 splits=[1,1,0] lens=[300,33,1,0,0,2] "
VARIANT: dict[str, Any] = dict.fromkeys(("alibi_slopes", "score_offsets", "sink_logits"), True)
VARIANT |= {"soft_cap": 3.0, "window": 100}

CASES: dict[str, dict[str, Any]] = {}
for k in FORMATS:
    for query_type in ("bf16", "fp16"):
        for heads in ("[16,2]", "[32,2]", "[34,2]", "[142,2]"):
            words = f"k={k} heads={heads} query={query_type}"
            CASES[words] = of(f"{words} {LENS}")
        CASES[f"queries, {words}"] = of(f"{words} {LENS} q_len=4 q_lens=[4,3,1,0]")
        words = f"k={k} heads=[16,2] query={query_type} rest=5"
        CASES[f"pieces, {words}"] = of(f"{words} lens=[1000,37,1,0,300] q_lens=[70,37,2,1,1]")
        CASES[f"pieces, {words}"]["ragged"] = True
for k, v in (("int8", "int4-g4"), ("int3", "int2"), ("int4", "bf16"), ("fp8-g2", "int3")):
    CASES[f"{k} and {v}"] = of(f"k={k} v={v} heads=[16,2] {LENS}")
for head_dim in (64, 80, 96, 112, 192, 256, 512):
    for k in ("int2", "int3", "int4", "int8", "bf16"):
        if (k, head_dim) not in (("int3", 80), ("int3", 112)):  # refused
            for heads in ("[8,1]", "[64,1]"):
                words = f"k={k} head_dim={head_dim} heads={heads}"
                CASES[words] = of(f"{words} {LENS}")
for name, lens in UNLIKE.items():
    for k in FEW:
        CASES[f"{name}, {k}"] = {"k": k, "lens": lens, "heads": [8, 2]}
    words = f"{name}, int4-g4"
    plain = {"lens": lens, "heads": [8, 2]}
    CASES |= {
        f"{words}, pages": {**plain, "place": "paged", "page_size": 64},
        f"{words}, 64 heads": {**plain, "heads": [64, 1], "wide": {}},
        f"{words}, 64 heads, a window": of("heads=[64,1] exact=bf16 sinks=4 splits=[1,1,0]")
        | {"lens": lens, "wide": {}, "exact_lens": [[23 * i % 150 for i in range(len(lens))], []]},
        f"{words}, queries": {**plain, "q_len": 4, "q_lens": [i % 5 for i in range(len(lens))]},
        f"{words}, one query": {**plain, "variant": VARIANT},
        f"{words}, sinks": {**plain, "variant": {"sink_logits": True}, "q_len": 2},
        f"{words}, decode steps and a chunk": {**plain, "ragged": True}
        | {"q_lens": [*[1] * (len(lens) - 1), 60]},
    }
for k in FEW:
    for page_size in PAGE_SIZES:
        if page_size * RowFormat.parse(k, 128).row_bytes % 16 == 0:
            words = f"k={k} place=paged page_size={page_size}"
            CASES[words] = of(f"{words} heads=[142,2] lens=[310,97,1,0,128]")
            CASES[f"queries, {words}"] = CASES[words] | of("q_len=4 q_lens=[4,3,4,4,2] heads=[8,2]")
    CASES |= {
        f"{k} in a ring": of(
            f"k={k} place=ring sinks=4 seated=True lens=[3000,97,0,31] heads=[8,2]"
        ),
        f"{k} in the order of tokens": of(f"k={k} layout=tokens lens=[300,211,5] heads=[16,4]"),
    }
for place in ("linear", "paged"):
    for count, exact in (("132", "[132,102,132,3,0,5]"), ("few", "[4,4,6,12,1,2]")):
        for seated in (False, True):
            words = f"place={place} page_size=64 seated={seated} {RECENT} exact_lens=[{exact},[]] "
            name = f"{count} recent rows, {place}, seated {seated}"
            CASES |= {
                name: of(f"{words} heads=[16,2]"),
                f"{name}, queries": of(f"{words} heads=[8,2] q_len=6 q_lens=[6,5,6,4,6,0]"),
                f"{name}, 64 heads": of(f"{words} heads=[64,2] q_len=6 k=int4"),
                f"{name}, all fields": of(f"{words} heads=[8,2] q_len=3") | {"variant": VARIANT},
                f"{name}, pieces": of(f"{words} heads=[8,2] q_lens=[200,74,1,0,0,2] ragged=True"),
            }
for k in ("int4-g4", "int3", "int2", "fp8", "fp16"):
    for scale in ("1e-4", "30.0", "1e4"):
        words = f"k={k} q_scale={scale}"
        CASES[words] = of(f"{words} lens=[1000,37]")
    for scale in ("6e-7", "1e-3", "2e4"):
        words = f"k={k} v_scale={scale}"
        CASES[words] = of(f"{words} lens=[700,650] heads=[8,2]")
    CASES[f"{k}, equal scores"] = of(f"k={k} q_scale=0.0 lens=[5000,33] query=fp16")
    CASES[f"{k}, long sequences"] = of(f"k={k} lens=[100000,99999] heads=[8,1]")
CASES["keys at the limits of fp16"] = of("k=int8-g4 k_scale=2e4 q_scale=1e-5 lens=[500]")
for name in [*VARIANT, "tree_mask"]:
    for place in ("linear", "paged"):
        value = {"variant": {name: VARIANT.get(name, True)}}
        words = f"place={place} lens=[1000,37,1,0,129] heads=[8,2]"
        CASES[f"{name}, {place}, queries"] = of(f"{words} q_len=4 q_lens=[4,3,4,1,0]") | value
        if name != "tree_mask":
            CASES[f"{name}, {place}"] = of(words) | value
for window in (1, 15, 16, 33, 512):
    lens = [*range(14, 20), *range(30, 36), *range(126, 132), 1000, 0, 1]
    of_window = {"lens": lens, "place": "paged", "heads": [8, 2], "variant": {"window": window}}
    CASES[f"a window of {window}"] = of_window
    CASES[f"a window of {window}, queries"] = of_window | {"q_len": 4}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_on_a_gpu(name: str) -> None:
    check_on_gpu(Case(**CASES[name]))


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("side", ["k_rows", "v_rows"])
def test_nan_in_a_row_in_use_reaches_its_sequence_only(name: str, side: str) -> None:
    segment = linear(name, (300, 300, 300), 2)
    q = query(segment, 8)
    clean: Any = attend_segments(q, [segment], num_splits=2)
    getattr(segment, side)[1, 0, 150] = 0xFF
    out: Any = attend_segments(q, [segment], num_splits=2)
    assert bool(out[1, :4].isnan().any(-1).all())
    assert torch.equal(out[0], clean[0]) and torch.equal(out[2], clean[2])
    assert torch.equal(out[1, 4:], clean[1, 4:])


def test_a_million_tokens_beyond_4_gib() -> None:
    """Rows of 64 heads lie 5.4 GB apart: addresses need 64 bits."""
    fmt = RowFormat.parse("int4-g4", 128)
    block = random_rows(fmt, 1, 64, 1 << 12, shift=0.3)
    rows = block.repeat(1, 1, 256, 1)
    q = torch.randn(1, 64, 128, device="cuda", dtype=torch.bfloat16)
    out: Any = attend_segments(q, [Segment(rows, rows, int32([1 << 20]), fmt, fmt)])
    # the same tokens 256 times over have the same mean
    few = Segment(block, block, int32([1 << 12]), fmt, fmt)
    expected: Any = attend_segments(q, [few], backend="reference")
    assert relative_l2(out, expected) <= LIMITS[q.dtype]


@pytest.mark.parametrize("words", ["", "q_len=3 q_lens=[3,1,2]", "ragged=True q_lens=[70,1,9]"])
def test_queries_of_any_strides(words: str) -> None:
    call = make_call(Case(**of(f"lens=[300,129,40] heads=[8,2] {words}"))).on("cuda")
    expected = launch(call)
    q = call.q
    wide = torch.full((*q.shape[:-2], 10, 256), torch.nan, device="cuda", dtype=q.dtype)
    crooked = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape)
    for other in (wide[..., 1:9, 128:], crooked, torch.empty_like(q.mT.contiguous()).mT):
        found = launch(call._replace(q=other.copy_(q)))
        assert all(map(torch.equal, found, expected))


def test_counts_and_lengths_that_are_not_possible_count_as_the_nearest_that_are() -> None:
    segment = linear("int4-g4", (256, 256), 2)
    rows = [x[:, :, :256] for x in (segment.k_rows, segment.v_rows)]
    segment = segment._replace(k_rows=rows[0], v_rows=rows[1])
    q = torch.randn(2, 3, 8, 128, device="cuda").bfloat16()
    for wrong, right in (([-5, 2**31 - 1], [0, 3]), ([4, 1], [3, 1])):
        told = [launch_attention(q, [segment], None, 2, q_lens=int32(n)) for n in (wrong, right)]
        assert all(map(torch.equal, *told))
    for wrong, right in (([300, 2**31 - 1], [256, 256]), ([-5, 256], [0, 256])):
        found = [
            attend_segments(q[:, 0], [segment._replace(seq_lens=int32(n))]) for n in (wrong, right)
        ]
        assert torch.equal(*found)


def test_tensors_of_a_variant_have_any_strides() -> None:
    fields = {**VARIANT, "tree_mask": True}
    case = Case(lens=(1000, 37, 1, 0, 129), heads=(8, 2), q_len=4, variant=fields)
    call = make_call(case).on("cuda")
    crooked: Any = {}
    for name, value in call.variant._asdict().items():
        if isinstance(value, torch.Tensor):
            crooked[name] = torch.stack([value, torch.zeros_like(value)], -1)[..., 0]
    found = launch(call._replace(variant=call.variant._replace(**crooked)))
    assert all(map(torch.equal, found, launch(call)))


def test_large_caps_slopes_and_offsets() -> None:
    segment = linear("int4-g4", (40_000, 33_001), 1)
    q = query(segment, 4)
    slopes = torch.tensor([2.0**-i for i in (1, 4, 8, 12)], device="cuda")
    offsets = torch.tensor([[1e4, -1e4, 0, 30], [0, 0, -30, 1e-3]], device="cuda")
    for variant in (
        AttentionVariant(alibi_slopes=slopes),
        AttentionVariant(alibi_slopes=slopes, soft_cap=0.1),
        AttentionVariant(soft_cap=1e4),
        AttentionVariant(soft_cap=50.0, score_offsets=offsets),
        AttentionVariant(sink_logits=torch.tensor([-100.0, 0, 50, 1e4], device="cuda")),
        AttentionVariant(window=2**31 - 1),
    ):
        out, lse = launch_attention(q, [segment], None, None, variant=variant)
        assert lse is not None
        expected = reference_over_segments(q, [segment], None, None, variant)
        assert_right((out, lse), expected, [segment])


@pytest.mark.parametrize("fields", [{}, {**VARIANT, "tree_mask": True}], ids=["plain", "all"])
def test_a_graph_follows_lengths_counts_and_values(fields: dict[str, Any]) -> None:
    case = of("exact=bf16 sinks=4 lens=[4096,4096,4096,4096,4096,4096] heads=[8,2] q_len=4")
    case |= {"exact_lens": [[132] * 6, []], "splits": [1, 1, 0], "variant": fields}
    call = make_call(Case(**case)).on("cuda")
    packed, exact = call.segments
    for segments in ([packed], [packed, exact]):
        fixed, q, q_lens = FixedSegments(segments), call.q.clone(), int32([4] * 6)
        variant = make_variant(fields, q, segments)
        attend = partial(launch_attention, q, fixed, None, None, q_lens=q_lens, variant=variant)
        graph, (out, lse) = captured(attend)
        assert lse is not None
        for lens, numbers in (
            ([4096] * 6, [4] * 6),
            ([0, 4096, 0, 1, 2, 3], [4, 3, 2, 1, 4, 4]),
            ([0] * 6, [4] * 6),
            ([100] * 6, [0, 1, 2, 3, 4, 4]),
            ([4096, 9, 9, 9, 9, 2000], [0] * 6),
            ([4096, 9, 31, 32, 33, 2000], [2, 1, 4, 4, 4, 4]),
        ):
            packed.seq_lens.copy_(torch.tensor(lens))
            if len(segments) > 1:
                exact.seq_lens.copy_(torch.tensor([min(n, 132) for n in lens]))
            q_lens.copy_(torch.tensor(numbers))
            q.normal_()
            for mine, value in zip(variant, make_variant(fields, q, segments), strict=True):
                if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor):
                    mine.copy_(value)
            q[torch.arange(4, device="cuda") >= q_lens[:, None]] = torch.nan
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
            for _ in range(2):
                graph.replay()
            expected = reference_over_segments(q, segments, None, q_lens, variant)
            assert_right((out, lse), expected, segments)


def test_a_graph_serves_any_ragged_queries_and_tokens() -> None:
    lens, first = (1000, 37, 1, 0, 300), (70, 37, 2, 1, 1)
    segment, at = paged("int4-g4", lens, 2, 16), indptr(first, "cuda")
    q = torch.randn(120, 8, 128, device="cuda").bfloat16()
    graph, found = captured(lambda: launch_attention(q, [segment], q_indptr=at))
    for counts in (first, (0, 0, 0, 0, 120), (120, 0, 0, 0, 0), (1, 1, 1, 1, 1), (24,) * 5):
        at.copy_(indptr(counts))
        segment.seq_lens.copy_(int32([n - n // 3 for n in lens]))
        q.normal_()
        graph.replay()
        assert found[1] is not None
        expected = each_alone(q.double().float(), [segment], counts)
        assert_right((found[0], found[1]), expected, [segment])


def test_too_many_ragged_pieces_are_refused() -> None:
    segment = linear("bf16", (1,), 1)
    q = torch.zeros(70000, 64, 128, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"70000 ragged queries in 70000 pieces"):
        launch_attention(q, [segment], q_indptr=int32([0, 70000]))


def test_two_graphs_of_one_capture_stream_run_at_once() -> None:
    segments = [linear("int4-g4", (20_000,) * 8, 1) for _ in range(2)]
    q = query(segments[0], 8)
    expected: list[Any] = [attend_segments(q, [one], num_splits=16) for one in segments]
    torch.cuda.synchronize()
    graphs: list[torch.cuda.CUDAGraph] = []
    outs: list[Any] = []
    for one in segments:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(attend_segments(q, [one], num_splits=16))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(50):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for out, one in zip(outs, expected, strict=True):
        assert torch.equal(out, one)


def test_two_streams_and_two_threads_at_once() -> None:
    segments = [linear("int4-g4", (9_000,) * 4, 1) for _ in range(2)]
    q = query(segments[0], 8)
    expected: list[Any] = [attend_segments(q, [one], num_splits=16) for one in segments]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            outs: list[Any] = [attend_segments(q, [segments[i]], num_splits=16) for _ in range(100)]
            torch.cuda.current_stream().synchronize()
        wrong.extend(i for out in outs if not torch.equal(out, expected[i]))

    run_in_threads(work, range(2))
    assert not wrong


@pytest.mark.gpu(2)
def test_tensors_on_a_device_that_is_not_the_current_one() -> None:
    segment = linear("int4-g4", (300, 129), 1)
    q = query(segment, 8)
    expected: Any = attend_segments(q, [segment], num_splits=2)
    fields: dict[str, Any] = {
        name: field.to("cuda:1")
        for name, field in segment._asdict().items()
        if isinstance(field, torch.Tensor)
    }
    moved = segment._replace(**fields)
    out: Any = attend_segments(q.to("cuda:1"), [moved], num_splits=2)
    assert out.device.index == 1 and torch.cuda.current_device() == 0
    assert torch.equal(out.cpu(), expected.cpu())


def test_the_debug_mode_looks_at_lengths_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvquant.debug.enabled", True)
    segment = paged("int4-g4", (100, 40), 1, 64)
    q = query(segment, 8)
    attend_segments(q, [segment])
    assert segment.block_table is not None
    segment.block_table[1, 0] = 9999
    with pytest.raises(ShapeError, match="block_table of sequence 1, entry 0, is 9999"):
        attend_segments(q, [segment])
    plain = linear("int4-g4", (100, 40), 1)
    plain.seq_lens[1] = 5000
    with pytest.raises(ShapeError, match="seq_lens of sequence 1 is 5000"):
        attend_segments(q, [plain])
