"""Causal attention of many queries, beside the same with a mask in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from relative_l2 import relative_l2
from variant_cases import by_hand, variant_with

from kvquant import AttentionVariant
from kvquant.errors import UnsupportedError
from kvquant.ops import causal
from kvquant.ops.causal import POSSIBLE, causal_attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TENSORS = ("alibi_slopes", "sink_logits")
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: Sequence[int], scale: float
) -> torch.Tensor:
    given = q.transpose(1, 2).cpu(), k.cpu(), v.cpu(), lens, [q.shape[2]] * len(lens)
    return by_hand(*given, scale=scale)[0].transpose(1, 2).to(q.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(
    ("heads", "q_len", "lens"),
    [
        ((4, 4), 30, (30, 30)),  # no past
        ((8, 2), 30, (75, 75)),  # a past of one length
        ((6, 2), 7, (7, 50, 23)),  # of several
        ((4, 1), 1, (40,)),
        ((4, 4), 33, (100,)),
    ],
    ids=str,
)
def test_queries_see_the_tokens_up_to_their_own(
    monkeypatch: pytest.MonkeyPatch,
    heads: tuple[int, int],
    q_len: int,
    lens: Sequence[int],
    dtype: torch.dtype,
    device: str,
) -> None:
    monkeypatch.setattr(causal, "BLOCK", 8)  # the last block is shorter
    num_q_heads, num_kv_heads = heads
    q = torch.randn(len(lens), num_q_heads, q_len, 64, device=device).to(dtype)
    k, v = torch.randn(2, len(lens), num_kv_heads, max(lens) + 3, 64, device=device).to(dtype)
    for b, length in enumerate(lens):
        k[b, :, length:], v[b, :, length:] = torch.nan, torch.nan
    out = causal_attention(q, k, v, lens, 0.2)
    assert out.dtype == dtype
    assert relative_l2(out, expected(q, k, v, lens, 0.2)) <= LIMITS[dtype]
    blocks = causal_attention(q[:, :, -1:], k, v, lens, 0.2)
    assert relative_l2(blocks, expected(q[:, :, -1:], k, v, lens, 0.2)) <= LIMITS[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(
    "names",
    [
        ("sink_logits",),
        ("soft_cap",),
        ("window",),
        ("sink_logits", "window"),
        tuple(sorted(POSSIBLE)),
    ],
    ids="+".join,
)
def test_variants_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, names: Sequence[str], dtype: torch.dtype, device: str
) -> None:
    monkeypatch.setattr(causal, "BLOCK", 8)
    monkeypatch.setitem(causal.SCORES, device, 4 * 4 * 50)  # 4 queries
    variant = variant_with(names, 1, 1, 4)
    given = variant._replace(
        **{name: getattr(variant, name).to(device) for name in names if name in TENSORS}
    )
    for q_len, lens in ((30, [30]), (9, [50, 20])):
        q = torch.randn(len(lens), 4, q_len, 64, device=device).to(dtype)
        k, v = torch.randn(2, len(lens), 2, 50, 64, device=device).to(dtype)
        out = causal_attention(q, k, v, lens, None, given)
        wanted, _ = by_hand(q.transpose(1, 2).cpu(), k.cpu(), v.cpu(), lens, [q_len] * 2, variant)
        limit = 2 * LIMITS[dtype]  # on CUDA 16-bit scores are rounded before they are capped
        assert out.dtype == dtype and relative_l2(out.cpu().transpose(1, 2), wanted) <= limit
    with pytest.raises(UnsupportedError, match="tree_mask: not possible while a prompt is read"):
        tree = torch.ones(2, 9, 9, dtype=torch.bool)
        causal_attention(q, k, v, lens, variant=AttentionVariant(tree_mask=tree))


def test_no_queries() -> None:
    k = torch.randn(1, 2, 20, 64)
    assert causal_attention(k[:, :, :0], k, k, [20]).shape == (1, 2, 0, 64)


def test_scores_without_a_kernel_of_torch_are_taken_by_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's kernel on the CPU wants K and V of one width: else it computes all scores."""
    rows = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def noted(q: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        rows.append(q.shape[2])
        return attention(q, *rest, **options)

    monkeypatch.setattr(causal, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(causal, "BLOCK", 8)
    q, k, v = torch.randn(1, 4, 20, 64), torch.randn(1, 2, 20, 64), torch.randn(1, 2, 20, 32)
    out = causal_attention(q, k, v, [20])
    assert relative_l2(out, expected(q, k, v, [20], 64**-0.5)) <= 1e-5 and rows == [8, 8, 4]
    causal_attention(q, k, k, [20])
    assert rows[3:] == [20]


def test_keys_and_values_of_different_widths() -> None:
    q, k, v = torch.randn(2, 4, 9, 64), torch.randn(2, 2, 20, 64), torch.randn(2, 2, 20, 128)
    out = causal_attention(q, k, v, [20, 12])
    assert out.shape == (2, 4, 9, 128)
    assert relative_l2(out, expected(q, k, v, [20, 12], 64**-0.5)) <= 1e-5


@pytest.mark.gpu
def test_no_mask_of_all_queries_is_made() -> None:
    """8,192 queries on 40,960 tokens: a mask alone would take 320 MiB."""
    q = torch.randn(1, 8, 8192, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 2, 40960, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = causal_attention(q, k, v, [40960])
    assert torch.cuda.max_memory_allocated() - before < 8 * out.nbytes + (64 << 20)
