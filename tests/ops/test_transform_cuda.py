"""Attention of a KVCache in a plan's basis on CUDA: its launches, and on a GPU (-m gpu)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import FakeDriver, arguments_of
from relative_l2 import relative_l2

from kvquant import KVCache
from kvquant.errors import ShapeError
from kvquant.kernels.cuda.affine.launch import AffineSpec
from kvquant.ops import transform
from kvquant.rows.basis import Basis, LayerBasis

MATRIX = Basis(torch.ones(2, 64), torch.eye(64).repeat(2, 1, 1))


def make(k: Basis, v: Basis) -> KVCache:
    """A cache with a token of each sequence."""
    cache = KVCache(1, 3, 2, 64, 40, bases=[LayerBasis(k, v)])
    cache.append(0, *torch.randn(2, 3, 2, 1, 64))
    return cache


@pytest.fixture
def on_cuda(cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A GPU that turns queries of 16 bit by one launch; the CPU attends."""
    chosen = {torch.bfloat16, torch.float16}
    monkeypatch.setattr(
        transform, "takes_one_launch", lambda q, of: q.dtype in chosen and of != "reference"
    )
    return cuda


def test_attention_turns_by_two_launches(on_cuda: FakeDriver) -> None:
    plain = Basis(torch.ones(2, 64))
    for k, v, launches in ((plain, plain, 1), (MATRIX, plain, 2), (MATRIX, MATRIX, 2)):
        cache = make(k, v)
        on_cuda.launched.clear()
        cache.attend(0, torch.zeros(3, 6, 64).bfloat16())
        assert len(on_cuda.launched) == launches
        given = arguments_of(AffineSpec(64), on_cuda.launched[-1].arguments)
        assert given["seq_lens"] == cache.layers[0].seq_lens.data_ptr()
    with pytest.raises(ShapeError, match="does not fit"):
        cache.attend(0, torch.zeros(3, 5, 64).bfloat16())


def test_several_queries_turn_by_two_launches(on_cuda: FakeDriver) -> None:
    cache, q_lens = make(MATRIX, MATRIX), torch.tensor([4, 1, 0], dtype=torch.int32)
    for return_lse in (False, True):
        on_cuda.launched.clear()
        found = cache.attend(0, torch.zeros(3, 4, 6, 64).bfloat16(), q_lens, return_lse=return_lse)
        out = found[0] if return_lse else found
        assert isinstance(out, torch.Tensor) and out.shape == (3, 4, 6, 64)
        assert len(on_cuda.launched) == 2
        for launched in on_cuda.launched:
            assert launched.grid == on_cuda.launched[0].grid and launched.grid[0] >= 1
            given = arguments_of(AffineSpec(64), launched.arguments)
            assert given["waits"], "what queries see was computed since"
            assert bool(given["seq_lens"]) == (launched is on_cuda.launched[-1])


def test_compiled_attention_turns_by_two_launches(on_cuda: FakeDriver) -> None:
    cache, q = make(MATRIX, MATRIX), torch.zeros(3, 6, 64).half()
    on_cuda.launched.clear()
    compiled = torch.compile(lambda q: cache.attend(0, q), fullgraph=True, backend="eager")
    out = compiled(q)
    assert isinstance(out, torch.Tensor) and out.shape == q.shape and len(on_cuda.launched) == 2
    with pytest.raises(Exception, match="a multiple of num_kv_heads"):
        compiled(q[:, :5])


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 300.0, 1e4])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_queries_of_fp16_are_turned_within_fp16(scale: float, compiled: bool) -> None:
    """What is stored is narrow where keys are wide, and the query that reads it wide."""
    torch.manual_seed(5)
    matrix = scale * (torch.eye(64) + 0.05 * torch.randn(2, 64, 64))
    bases = [LayerBasis(Basis(torch.randn(2, 64), matrix), Basis(torch.randn(2, 64)))]
    k, v = torch.randn(2, 3, 2, 23, 64)
    k = (k @ matrix.mT).clamp(-6e4, 6e4)
    q, found = (30 * torch.randn(3, 8, 64)).half(), []
    for device in ("cpu", "cuda"):
        cache = KVCache(
            1, 3, 2, 64, 40, k_format="int8", exact_format="fp16", bases=bases, device=device
        )
        cache.append(0, k.half().to(device), v.half().to(device))

        def attend(q: torch.Tensor, cache: KVCache = cache) -> Any:
            return cache.attend(0, q, return_lse=True, sm_scale=0.02 / scale)

        call = torch.compile(attend, fullgraph=True, backend="eager") if compiled else attend
        out, lse = call(q.to(device))
        assert out.dtype == torch.float16 and bool(out.isfinite().all())
        found.append((out.cpu(), lse.cpu()))
    (expected, expected_lse), (given, given_lse) = found
    assert relative_l2(given, expected) < 8e-3
    torch.testing.assert_close(given_lse, expected_lse, rtol=2e-3, atol=0.02)
