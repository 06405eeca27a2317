"""Offset and rotation of rows by numba are those of torch, bit for bit; 8 s."""

from __future__ import annotations

import pytest
import torch

from kvquant.kernels.cpu.transform import transform
from kvquant.rows.rotation import rotate

BATCH, HEADS, TOKENS = 2, 3, 130  # 13 work items
ROWS = [(64, torch.float32), (80, torch.bfloat16), (96, torch.float32), (256, torch.float16)]


@pytest.mark.parametrize("with_offset", [False, True], ids=["", "offset"])
@pytest.mark.parametrize("rotates", [False, True], ids=["", "rotated"])
@pytest.mark.parametrize("head_dim, dtype", ROWS, ids=str)
def test_every_element_is_that_of_torch(
    head_dim: int, dtype: torch.dtype, rotates: bool, with_offset: bool
) -> None:
    x = torch.randn(TOKENS, BATCH, head_dim, HEADS) * 10 ** (6 * torch.rand(TOKENS, 1, 1, 1) - 3)
    x[3], x[4, :, ::2], x[5, :, 7], x[6, 0, 3] = 0.0, -0.0, torch.inf, torch.nan
    x[7] *= 1e-40  # float32's subnormals
    x = x.permute(1, 3, 0, 2).to(dtype)
    x = torch.cat([x, x], dim=-1)[..., :head_dim]  # rows apart
    offset = torch.randn(HEADS, head_dim) if with_offset else None
    expected = x.float() if offset is None else x.float() - offset[:, None]
    expected = rotate(expected) if rotates else expected
    for part in (x, x.mT.contiguous().mT, x[:, :, :1], x[1:, 1:2], x[:, :, :0]):
        whole = part.shape[1] == HEADS
        used = offset if offset is None or whole else offset[1:2].contiguous()
        wanted = expected[: len(part)] if whole else expected[1:, 1:2]
        wanted = wanted[:, :, : part.shape[2]]
        got = transform(part, used, rotates)
        assert got.dtype == torch.float32 and got.is_contiguous()
        assert torch.equal(got.isnan(), wanted.isnan())
        plain = ~wanted.isnan()
        assert torch.equal(got[plain], wanted[plain])
        assert torch.equal(got[plain].signbit(), wanted[plain].signbit())


def test_an_offset_that_reads_as_negated_is_negated() -> None:
    x, offset = torch.randn(1, 2, 3, 64), torch.randn(2, 64)
    negated = torch.complex(torch.zeros(2, 64), offset).conj().imag
    assert negated.is_neg()
    assert torch.equal(transform(x, negated, True), transform(x, -offset, True))
