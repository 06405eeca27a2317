"""The attention calls: the reference against torch, and what every backend does with its input."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from decode_rows import BACKENDS, BOTH, INT4, lens
from fake_cuda import FakeDriver, OnCuda, make_query, make_segment
from segment_cases import packed

from kvquant import (
    debug,
    decode_attention,
    quantize_rows,
    reference_attention,
)
from kvquant.errors import ConfigError, ShapeError, UnsupportedError
from kvquant.ops.attention import attend
from kvquant.rows.basis import Basis, LayerBasis
from kvquant.rows.call import AttentionCall
from kvquant.rows.segment import Segment
from kvquant.rows.variant import AttentionVariant


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_out_has_the_dtype_of_q_and_lse_is_float32(dtype: torch.dtype, backend: str) -> None:
    k_rows, v_rows = packed(1, 2, 9), packed(1, 2, 9)
    q = torch.randn(1, 4, 64).to(dtype)
    options: Any = {**BOTH, "backend": backend}
    out, lse = decode_attention(q, k_rows, v_rows, lens(9), **options, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    alone = decode_attention(q, k_rows, v_rows, lens(9), **options)
    assert torch.equal(alone, out)
    exact = reference_attention(q, k_rows, v_rows, lens(9), **BOTH)
    # integer products of 16-bit queries (kernels/cpu/integers.py) round by parts of the greatest
    atol = 1e-5 if dtype == torch.float32 else 5e-4 * float(exact.abs().max())
    torch.testing.assert_close(out.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=atol)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_row_in_use_makes_nan_and_no_plausible_number(backend: str) -> None:
    bad = quantize_rows(torch.full((64,), torch.nan), INT4, check=False)
    q = torch.randn(1, 4, 64)
    for at in (0, 17, 299):
        for spoiled in (0, 1):
            rows = packed(1, 2, 300), packed(1, 2, 300)
            rows[spoiled][0, 1, at] = bad
            out, lse = decode_attention(
                q, *rows, lens(300), **BOTH, return_lse=True, backend=backend
            )
            assert bool(out[0, :2].isfinite().all()), "the other KV head"
            assert bool(out[0, 2:].isnan().all()), f"{'KV'[spoiled]} of token {at} is NaN"
            assert bool(lse[0, 2:].isnan().all()) == (spoiled == 0)


def call(q: torch.Tensor, segment: Segment, **options: Any) -> Any:
    """The public call on CUDA."""
    k_rows, v_rows, seq_lens, k_format, v_format, _, block_table, *_ = segment
    options = {"k_format": k_format, "v_format": v_format, "block_table": block_table} | options
    return decode_attention(q.as_subclass(OnCuda), k_rows, v_rows, seq_lens, **options)


@pytest.mark.extra("cuda")
def test_debug_mode_looks_at_the_values_of_a_settled_call(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = make_segment(capacity=64)
    segment.seq_lens[1] = 65
    call(make_query(), segment)
    monkeypatch.setattr(debug, "enabled", True)
    with pytest.raises(ShapeError, match="seq_lens of sequence 1 is 65"):
        call(make_query(), segment)


def test_a_missing_extra_is_told_after_what_does_not_fit(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numba_cuda", None)
    with pytest.raises(UnsupportedError, match="install the extra 'cuda'"):
        call(make_query(), make_segment())
    with pytest.raises(ShapeError):
        call(make_query(3), make_segment())


def test_calls_without_query_heads_are_checked() -> None:
    k_rows, v_rows = packed(1, 2, 9), packed(1, 2, 9)
    for seq_len in (-1, 10):
        with pytest.raises(ShapeError, match="seq_lens of sequence 0"):
            decode_attention(torch.zeros(1, 0, 64), k_rows, v_rows, lens(seq_len), **BOTH)


def test_queries_and_variants_are_checked_for_rows_in_a_basis() -> None:
    k_rows, v_rows = packed(1, 2, 9), packed(1, 2, 9)
    basis = LayerBasis(*(Basis(torch.zeros(2, 64)) for _ in "kv"))
    segments = [Segment(k_rows, v_rows, lens(9), INT4, INT4)]
    q = torch.zeros(1, 4, 64)
    sinks = AttentionVariant(sink_logits=torch.zeros(3))
    for call, error, message in (
        (AttentionCall(q.int(), segments), ConfigError, "q is torch.int32: use float32"),
        (AttentionCall(q.double(), segments), ConfigError, "q is torch.float64: use float32"),
        (AttentionCall(q, segments, variant=sinks), ShapeError, "sink_logits"),
    ):
        with pytest.raises(error, match=message):
            attend(call, basis, lens(9))
