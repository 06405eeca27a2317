"""The one error measure of all tests."""

from __future__ import annotations

import torch


def relative_l2(x: torch.Tensor, reference: torch.Tensor) -> float:
    """|x - reference| / |reference| in float64; inf where x is not finite."""
    assert x.shape == reference.shape, f"{list(x.shape)} against {list(reference.shape)}"
    x, reference = x.double(), reference.double()
    if not bool(x.isfinite().all()):
        return float("inf")
    return float((x - reference).norm() / reference.norm().clamp(min=1e-300))
