"""The CUDA kernel against the reference on the dequantized rows. Needs an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvquant import KVCache, RowFormat, decode_attention, quantize_rows, reference_attention
from kvquant.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    # numba-cuda and torch warn of matters of their own while they load
    pytest.mark.filterwarnings("default"),
]
LIMITS = {torch.bfloat16: 3e-3, torch.float16: 8e-4}
Measure = Callable[[torch.Tensor, torch.Tensor], float]


def check(
    relative_l2: Measure,
    k_name: str,
    v_name: str | None = None,
    *,
    head_dim: int = 128,
    heads: tuple[int, int] = (8, 1),
    dtype: torch.dtype = torch.bfloat16,
    lens: tuple[int, ...] = (1000, 37, 1, 0),
    num_splits: int | None = None,
    q_scale: float = 1.0,
) -> None:
    """Compare out and lse; rows that are not in use hold NaN."""
    k_format = RowFormat.parse(k_name, head_dim)
    v_format = RowFormat.parse(v_name or k_name, head_dim)
    shape = (len(lens), heads[1], max(lens) + 5, head_dim)
    k = quantize_rows(torch.randn(shape, device="cuda") * 2 + 1, k_format)
    v = quantize_rows(torch.randn(shape, device="cuda") + 0.3, v_format)
    for b, seq_len in enumerate(lens):
        k[b, :, seq_len:] = v[b, :, seq_len:] = 0xFF
    q = (torch.randn(len(lens), heads[0], head_dim, device="cuda") * q_scale).to(dtype)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    formats: dict[str, Any] = {"k_format": k_format, "v_format": v_format}
    result = decode_attention(q, k, v, seq_lens, return_lse=True, num_splits=num_splits, **formats)
    out, lse = result
    expected, expected_lse = reference_attention(q, k, v, seq_lens, **formats)
    assert out.dtype == dtype
    assert relative_l2(out, expected) <= LIMITS[dtype]
    used = seq_lens > 0
    assert (lse - expected_lse)[used].abs().max() <= 1e-3 * max(1.0, q_scale)
    assert not out[~used].any() and bool((lse[~used] == -torch.inf).all())
    again: Any = decode_attention(q, k, v, seq_lens, num_splits=num_splits, **formats)
    assert torch.equal(again, out), "two calls differ"


@pytest.mark.parametrize(
    "name",
    "int4 int4-g2 int4-g4 int4-g8 int8 int8-g2 int8-g4 int8-g8 fp8 fp8-g4 bf16 fp16".split(),
)
def test_every_format(relative_l2: Measure, name: str) -> None:
    check(relative_l2, name)
    check(relative_l2, name, lens=(513, 512, 31, 33), num_splits=3)


@pytest.mark.parametrize("names", ["int8 int4-g4", "int4 bf16", "fp16 fp8-g4", "bf16 int4"])
def test_k_and_v_formats_apart(relative_l2: Measure, names: str) -> None:
    check(relative_l2, *names.split())


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 192, 256])
@pytest.mark.parametrize("name", ["int4", "int8", "bf16"])
def test_head_dims(relative_l2: Measure, name: str, head_dim: int) -> None:
    check(relative_l2, name, head_dim=head_dim)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (10, 2), (7, 1), (32, 2), (40, 2)])
def test_head_ratios(relative_l2: Measure, heads: tuple[int, int]) -> None:
    check(relative_l2, "int4-g4", heads=heads, dtype=torch.float16)


def test_peaked_scores(relative_l2: Measure) -> None:
    check(relative_l2, "int4-g4", q_scale=30.0)


def test_sequences_of_100_000_tokens(relative_l2: Measure) -> None:
    check(relative_l2, "int4-g4", lens=(100_000, 99_999))


def test_rows_in_the_order_of_tokens(relative_l2: Measure) -> None:
    fmt = RowFormat.parse("int4-g4", 128)
    rows = quantize_rows(torch.randn(2, 300, 4, 128, device="cuda"), fmt).transpose(1, 2)
    q = torch.randn(2, 8, 128, device="cuda", dtype=torch.bfloat16)
    lens = torch.tensor([300, 211], dtype=torch.int32, device="cuda")
    out = decode_attention(q, rows, rows, lens, k_format=fmt, v_format=fmt)
    expected, _ = reference_attention(q, rows, rows, lens, k_format=fmt, v_format=fmt)
    assert isinstance(out, torch.Tensor)
    assert relative_l2(out, expected) <= LIMITS[q.dtype]


def test_a_cache_with_sinks_and_a_ring(relative_l2: Measure) -> None:
    cache = KVCache(1, 2, 2, 128, 400, sink_len=4, recent_len=32, device="cuda")
    k, v = torch.randn(2, 2, 2, 300, 128, device="cuda", dtype=torch.bfloat16)
    cache.append(0, k, v, new_lens=[300, 150])
    cache.append(0, k[:, :, :7], v[:, :, :7])
    q = torch.randn(2, 8, 128, device="cuda", dtype=torch.bfloat16)
    expected = cache.attend(0, q, backend="reference")
    out = cache.attend(0, q)
    assert isinstance(out, torch.Tensor) and isinstance(expected, torch.Tensor)
    assert relative_l2(out, expected) <= LIMITS[q.dtype]


def test_other_streams_and_graphs(relative_l2: Measure) -> None:
    fmt = RowFormat.parse("int4-g4", 128)
    rows = quantize_rows(torch.randn(2, 1, 512, 128, device="cuda"), fmt)
    q = torch.randn(2, 8, 128, device="cuda", dtype=torch.bfloat16)
    lens = torch.tensor([512, 100], dtype=torch.int32, device="cuda")
    formats: dict[str, Any] = {"k_format": fmt, "v_format": fmt}
    decode_attention(q, rows, rows, lens, **formats)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(q, rows, rows, lens, **formats)
    for seq_lens in ([512, 100], [7, 300], [0, 512]):
        lens.copy_(torch.tensor(seq_lens))
        graph.replay()
        expected, _ = reference_attention(q, rows, rows, lens, **formats)
        assert isinstance(out, torch.Tensor)
        assert relative_l2(out, expected) <= LIMITS[q.dtype]


def test_float32_queries_and_crooked_rows_are_refused() -> None:
    fmt = RowFormat.parse("int4-g4", 128)
    rows = quantize_rows(torch.randn(1, 1, 64, 128, device="cuda"), fmt)
    q = torch.randn(1, 8, 128, device="cuda")
    lens = torch.tensor([64], dtype=torch.int32, device="cuda")
    with pytest.raises(ConfigError, match="on CUDA use bfloat16 or float16"):
        decode_attention(q, rows, rows, lens, k_format=fmt, v_format=fmt)
    crooked = torch.zeros(64 * 80 + 4, dtype=torch.uint8, device="cuda")[4:].view(1, 1, 64, 80)
    with pytest.raises(ConfigError, match="aligned to 16 bytes"):
        decode_attention(q.bfloat16(), crooked, crooked, lens, k_format=fmt, v_format=fmt)
