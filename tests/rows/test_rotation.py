"""RoPE in plain torch."""

from __future__ import annotations

import pytest
import torch

from kvquant.rows.rotation import Rope, apply_rope


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_multiplies_pairs_by_complex_numbers(interleaved: bool) -> None:
    """Elements behind the first rotary_dim pass."""
    x, theta = torch.randn(5, 2, 64), 6 * torch.rand(5, 24)
    found = apply_rope(x, Rope(theta.cos(), theta.sin(), interleaved))
    shape, last = ((24, 2), -1) if interleaved else ((2, 24), -2)
    given, turned = (rows[..., :48].unflatten(-1, shape).unbind(last) for rows in (x, found))
    expected = torch.complex(*given) * torch.polar(torch.ones_like(theta), theta)[:, None]
    torch.testing.assert_close(torch.complex(*turned), expected, rtol=0, atol=1e-5)
    assert torch.equal(found[..., 48:], x[..., 48:])
