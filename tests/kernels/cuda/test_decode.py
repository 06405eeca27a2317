"""The CUDA kernel against the reference on the dequantized rows. Needs an NVIDIA GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attend import attend_segments
from cuda_cases import (
    LIMITS,
    captured,
    compare,
    int32,
    linear,
    paged,
    query,
    random_rows,
    ring,
    seated,
)
from relative_l2 import relative_l2
from threads import run_in_threads

from kvquant import KVCache, RowFormat, decode_attention, quantize_rows
from kvquant.errors import ConfigError, ShapeError
from kvquant.rows.segment import PAGE_SIZES, Segment

pytestmark = pytest.mark.gpu
LENS = (1000, 37, 1, 0)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name",
    "int2 int3 int4 int4-g2 int4-g4 int4-g8 int8 int8-g2 int8-g4 int8-g8 fp8 fp8-g4 bf16 "
    "fp16".split(),
)
def test_every_format(name: str, dtype: str) -> None:
    segment = linear(name, LENS, 1)
    q = query(segment, 8, DTYPES[dtype])
    compare(q, [segment])
    compare(q, [segment], num_splits=3)
    compare(q, [segment], num_splits=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "names",
    [
        *("int8 int4-g4", "int4 bf16", "fp16 fp8-g4", "bf16 int4"),
        *("int3 int2", "int2 int3", "int4 int2", "int3 int8-g8", "fp8-g2 int3", "int2 bf16"),
    ],
)
def test_k_and_v_formats_apart(names: str, dtype: str) -> None:
    segment = linear(names, LENS, 2)
    compare(query(segment, 16, DTYPES[dtype]), [segment])


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 192, 256, 512])
@pytest.mark.parametrize("name", ["int2", "int3", "int4", "int8", "bf16"])
def test_head_dims(name: str, head_dim: int) -> None:
    if name == "int3" and head_dim in (80, 112):
        pytest.skip("its rows do not lie at words")
    segment = linear(name, LENS, 1, head_dim=head_dim)
    compare(query(segment, 8), [segment])


@pytest.mark.parametrize("name", ["int4-g4", "int4-g8", "int8-g8", "fp8-g4"])
@pytest.mark.parametrize("head_dim", [64, 256, 512])
def test_groups_at_other_head_dims(name: str, head_dim: int) -> None:
    segment = linear(name, LENS, 1, head_dim=head_dim)
    compare(query(segment, 8, torch.float16), [segment])


@pytest.mark.parametrize(
    "heads", [(1, 1), (4, 4), (10, 2), (7, 1), (16, 1), (32, 2), (40, 2), (71, 1)], ids=str
)
def test_head_ratios(heads: tuple[int, int]) -> None:
    segment = linear("int4-g4", (300, 129), heads[1])
    compare(query(segment, heads[0], torch.float16), [segment])


@pytest.mark.parametrize("ratio", [9, 16, 17, 32, 64, 71])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", "int4-g4 int4 int3 int2 int8-g4 int4-g8 fp8 bf16 fp16".split())
def test_wide_groups(name: str, dtype: str, ratio: int) -> None:
    segment = linear(name, LENS, 2)
    q = query(segment, 2 * ratio, DTYPES[dtype])
    compare(q, [segment])
    compare(q, [segment], num_splits=3)
    compare(q, [segment], num_splits=1)


@pytest.mark.parametrize("ratio", [17, 64])
@pytest.mark.parametrize("name", ["int4-g4", "int4", "int3", "int2"])
@pytest.mark.parametrize("head_dim", [64, 80, 256, 512])
def test_wide_groups_of_other_head_dims(name: str, head_dim: int, ratio: int) -> None:
    if head_dim == 80 and name in ("int4-g4", "int3"):
        pytest.skip("groups of 20 elements do not line up, nor do rows of 34 bytes")
    segment = linear(name, (300, 129), 1, head_dim=head_dim)
    compare(query(segment, ratio), [segment])


@pytest.mark.parametrize("ratio", [2, 17])
@pytest.mark.parametrize("name", ["int4-g4", "int8"])
def test_rows_of_512_elements_with_pages_sinks_and_recent_rows(name: str, ratio: int) -> None:
    packed = paged(name, (1300, 0, 1, 0), 2, 64, head_dim=512)
    recent = ring("bf16", (128, 100, 128, 0), 2, 128, head_dim=512)
    sinks = linear("bf16", (4, 2, 4, 0), 2, head_dim=512)
    q = query(packed, 2 * ratio)
    compare(q, [packed])
    compare(q, [sinks, packed, recent])
    rows = ring(name, (311, 97, 0, 31), 2, 311, head_dim=512)
    compare(query(rows, 2 * ratio, torch.float16), [rows])


@pytest.mark.parametrize("ratio", [17, 71])
@pytest.mark.parametrize("name", ["int4-g4", "int4", "int3", "int2"])
def test_wide_groups_with_pages_sinks_and_recent_rows(name: str, ratio: int) -> None:
    packed = paged(name, (300, 0, 1, 0), 2, 64)
    recent = ring("bf16", (128, 100, 128, 0), 2, 128)
    sinks = linear("bf16", (4, 2, 4, 0), 2)
    q = query(packed, 2 * ratio)
    compare(q, [packed])
    compare(q, [sinks, packed, recent])
    compare(q, [sinks, recent])
    rows = ring(name, (311, 97, 0, 31), 2, 311)
    compare(query(rows, 2 * ratio), [rows])
    tokens = linear(name, (300, 211, 5), 2, order="tokens")
    compare(query(tokens, 2 * ratio), [tokens])


@pytest.mark.parametrize("name", ["int4-g4", "int4", "int3", "int2", "int8-g2", "bf16"])
def test_rows_in_the_order_of_tokens(name: str) -> None:
    segment = linear(name, (300, 211, 5), 4, order="tokens")
    compare(query(segment, 8), [segment])


@pytest.mark.parametrize("name", ["int4-g4", "int4", "int3", "int2", "int8-g2", "bf16"])
def test_rings(name: str) -> None:
    segment = ring(name, (311, 97, 0, 31), 2, 311)
    compare(query(segment, 8), [segment])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", ["int4-g4", "int4", "int3", "int2", "int8-g2", "bf16"])
def test_pages(name: str, page_size: int) -> None:
    segment = paged(name, (310, 97, 1, 0, 128), 2, page_size)
    q = query(segment, 8)
    if page_size * segment.k_format.row_bytes % 16:
        with pytest.raises(ConfigError, match="must be aligned to 16 bytes on CUDA"):
            compare(q, [segment])
        return
    compare(q, [segment])
    compare(q, [segment], num_splits=2)
    compare(query(segment, 2 * 71), [segment])


def test_pages_in_the_order_of_tokens_and_strided_tables() -> None:
    segment = paged("int4-g4", (310, 97), 2, 64)
    k, v = (
        rows.transpose(1, 2).contiguous().transpose(1, 2)
        for rows in (segment.k_rows, segment.v_rows)
    )
    assert segment.block_table is not None
    wide = torch.full((2, 20), 2**30, dtype=torch.int32, device="cuda")
    wide[:, : segment.block_table.shape[1]] = segment.block_table
    table = wide[:, : segment.block_table.shape[1]]
    compare(query(segment, 8), [segment._replace(k_rows=k, v_rows=v, block_table=table)])


@pytest.mark.parametrize("name", ["int4-g4", "int4"])
@pytest.mark.parametrize("place", ["linear", "paged"])
def test_sinks_and_recent_rows_in_the_same_launch(name: str, place: str) -> None:
    lens = (300, 0, 1, 0)
    packed = paged(name, lens, 2, 64) if place == "paged" else linear(name, lens, 2)
    sinks = linear("bf16", (4, 2, 4, 0), 2)
    recent = ring("bf16", (128, 100, 128, 0), 2, 128)
    q = query(packed, 16)
    compare(q, [sinks, packed, recent])
    compare(q, [packed, recent], num_splits=2)
    compare(q, [sinks, recent])
    both = ring("bf16", (132, 102, 132, 3), 2, 132, sinks=4)
    compare(q, [packed, both])
    compare(q, [seated(both), packed])
    compare(q, [seated(both)])


def test_a_cache_with_sinks_and_a_ring() -> None:
    cache = KVCache(1, 2, 2, 128, 400, sink_len=4, recent_len=32, device="cuda")
    k, v = torch.randn(2, 2, 2, 300, 128, device="cuda", dtype=torch.bfloat16)
    cache.append(0, k, v, new_lens=[300, 150])
    cache.append(0, k[:, :, :7], v[:, :, :7])
    q = torch.randn(2, 8, 128, device="cuda", dtype=torch.bfloat16)
    expected: Any = cache.attend(0, q, backend="reference")
    out: Any = cache.attend(0, q)
    assert relative_l2(out, expected) <= LIMITS[q.dtype]


@pytest.mark.parametrize("name", ["int4-g4", "int3", "int2", "fp8", "fp16"])
@pytest.mark.parametrize("scale", [1e-4, 30.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_peaked_and_huge_queries(name: str, scale: float, dtype: str) -> None:
    segment = linear(name, (1000, 37), 1)
    q = (query(segment, 8).float() * scale).clamp(-6e4, 6e4).to(DTYPES[dtype])
    compare(q, [segment])


@pytest.mark.parametrize("name", ["int4-g4", "int4-g8", "int3", "int2", "int8", "bf16"])
def test_equal_scores(name: str) -> None:
    segment = linear(name, (5000, 33), 1)
    compare(torch.zeros_like(query(segment, 8, torch.float16)), [segment])


@pytest.mark.parametrize("name", ["int4-g4", "int8", "fp16"])
def test_one_huge_outlier_among_many(name: str) -> None:
    fmt = RowFormat.parse(name, 128)
    k, v = torch.randn(2, 1, 1, 4096, 128, device="cuda")
    k[:, :, 1234] *= 50
    v[:, :, 77, 5] = 3000.0
    segment = Segment(quantize_rows(k, fmt), quantize_rows(v, fmt), int32([4096]), fmt, fmt)
    compare(query(segment, 8, torch.float16) * 0.05, [segment])


@pytest.mark.parametrize("name", ["int2", "int3", "int4", "int4-g4", "int4-g8", "int8-g4", "fp8"])
@pytest.mark.parametrize("size", [6e-7, 1e-3, 2e4])
def test_scales_at_the_limits_of_fp16(name: str, size: float) -> None:
    fmt = RowFormat.parse(name, 128)
    k = torch.randn(2, 1, 700, 128, device="cuda")
    v = (torch.rand(2, 1, 700, 128, device="cuda") * 2 - 1) * size
    segment = Segment(quantize_rows(k, fmt), quantize_rows(v, fmt), int32([700, 650]), fmt, fmt)
    q = query(segment, 8)  # bf16: fp16 cannot hold outputs of 6e-7
    compare(q, [segment])
    mixed = v.clone()
    mixed[:, :, ::7] *= 100 if size < 1 else 1e-4
    compare(q, [segment._replace(v_rows=quantize_rows(mixed, fmt))])


def test_keys_at_the_limits_of_fp16() -> None:
    fmt = RowFormat.parse("int8-g4", 128)
    k = (torch.rand(1, 1, 500, 128, device="cuda") - 0.5) * 1.2e5
    rows = quantize_rows(k, fmt)
    segment = Segment(rows, random_rows(fmt, 1, 1, 500), int32([500]), fmt, fmt)
    compare(query(segment, 8) * 1e-5, [segment])


@pytest.mark.parametrize("name", ["int4-g4", "int4", "int3", "int2", "bf16"])
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


def test_lengths_beyond_the_capacity_read_nothing_else() -> None:
    segment = linear("int4-g4", (256, 256), 1)
    segment = segment._replace(k_rows=segment.k_rows[:, :, :256], v_rows=segment.v_rows[:, :, :256])
    q = query(segment, 8)
    expected: Any = attend_segments(q, [segment])
    out: Any = attend_segments(q, [segment._replace(seq_lens=int32([300, 2**31 - 1]))])
    assert torch.equal(out, expected)
    short: Any = attend_segments(q, [segment._replace(seq_lens=int32([-5, 256]))])
    assert not short[0].any() and torch.equal(short[1], expected[1])


@pytest.mark.parametrize("name", ["int4-g4", "int8", "fp8-g4", "bf16"])
def test_long_sequences_whose_values_nearly_cancel(name: str) -> None:
    fmt = RowFormat.parse(name, 128)
    rows = random_rows(fmt, 2, 1, 100_000)
    segment = Segment(rows, rows.flip(2), int32([100_000, 99_999]), fmt, fmt)
    q = query(segment, 8)
    compare(q, [segment])
    compare(q, [segment], num_splits=1)


def test_a_million_tokens_beyond_4_gib() -> None:
    """Rows of 64 heads lie 5.4 GB apart: addresses need 64 bits."""
    fmt = RowFormat.parse("int4-g4", 128)
    block = random_rows(fmt, 1, 64, 1 << 12, shift=0.3)
    rows = block.repeat(1, 1, 256, 1)
    lens = int32([1 << 20])
    q = torch.randn(1, 64, 128, device="cuda", dtype=torch.bfloat16)
    out: Any = attend_segments(q, [Segment(rows, rows, lens, fmt, fmt)])
    # the same tokens 256 times over have the same mean
    expected: Any = attend_segments(
        q, [Segment(block, block, int32([1 << 12]), fmt, fmt)], backend="reference"
    )
    assert relative_l2(out, expected) <= LIMITS[q.dtype]


def test_strided_and_crooked_queries() -> None:
    segment = linear("int4-g4", (300, 129), 2)
    wide = torch.randn(2, 3, 16, 128, device="cuda", dtype=torch.bfloat16)
    compare(wide[:, 1], [segment])
    crooked = torch.randn(2 * 16 * 128 + 1, device="cuda", dtype=torch.bfloat16)[1:]
    compare(crooked.view(2, 16, 128), [segment])


def test_graphs_replay_with_changed_lengths() -> None:
    segment = linear("int4-g4", (512, 512), 1)
    q = query(segment, 8)
    graph, out = captured(lambda: attend_segments(q, [segment], num_splits=4))
    for lens in ([512, 100], [7, 300], [0, 512]):
        segment.seq_lens.copy_(torch.tensor(lens))
        graph.replay()
        expected: Any = attend_segments(q, [segment], backend="reference")
        assert relative_l2(out, expected) <= LIMITS[q.dtype]


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


def test_under_torch_compile() -> None:
    segment = linear("int4-g4", (300, 129), 1)
    weight = torch.randn(128, 128, device="cuda", dtype=torch.bfloat16) / 11

    def step(x: torch.Tensor) -> Any:
        rows = segment.k_rows, segment.v_rows, segment.seq_lens
        return decode_attention(x @ weight, *rows, k_format="int4-g4", v_format="int4-g4")

    x = query(segment, 8)
    compiled: Any = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), step(x))


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
