"""A small cache with sinks and recent tokens, and tokens for it."""

from __future__ import annotations

from typing import Any

import torch

from kvquant import KVCache
from kvquant.rows.basis import Basis, LayerBasis
from kvquant.rows.quantize import feedback_matrix

BATCH, HEADS, DIM, MAX = 3, 2, 64, 24
ROWS = {"k_format": "int4-g4", "v_format": "int8"}


def make(device: str = "cpu", **options: Any) -> KVCache:
    """Two layers of it."""
    options = {"sink_len": 2, "recent_len": 5, **ROWS, **options}
    return KVCache(2, BATCH, HEADS, DIM, MAX, device=device, **options)


def tokens(count: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """New keys and values of a layer."""
    k, v = torch.randn(2, BATCH, HEADS, count, DIM).bfloat16()
    return k.to(device), v.to(device)


def assert_same(cache: KVCache, other: KVCache) -> None:
    """Compare all tensors of all layers, wherever they lie."""
    for one, two in zip(cache.layers, other.layers, strict=True):
        for name, tensor in one.tensors().items():
            assert torch.equal(tensor.cpu(), two.tensors()[name].cpu()), name


def rounding_basis() -> LayerBasis:
    """Offsets, clip ratios and feedback. No matrix, whose products depend in their
    last bits on how many rows are multiplied."""
    torch.manual_seed(5)
    roots = torch.randn(HEADS, DIM, DIM).double()
    feedback = feedback_matrix(roots @ roots.mT + 0.1 * torch.eye(DIM)).float()
    k = Basis(torch.randn(HEADS, DIM), clip=torch.full((HEADS,), 0.9))
    return LayerBasis(k, Basis(torch.randn(HEADS, DIM), feedback=feedback))
