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


def make_basis(
    kind: str = "none",
    seed: int = 0,
    *,
    size: float = 1.0,
    clip: float | None = None,
    feedback: bool = False,
) -> Basis:
    """Offsets of a size and, of kind "matrix", matrices with an inverse; of a seed the same."""
    torch.manual_seed(seed)
    matrix = torch.eye(DIM) + 0.1 * torch.randn(HEADS, DIM, DIM)
    return Basis(
        size * torch.randn(HEADS, DIM),
        matrix if kind == "matrix" else None,
        None if clip is None else torch.full((HEADS,), clip),
        feedback_matrix((matrix @ matrix.mT).double()).float() if feedback else None,
    )


def layer_basis(kind: str) -> LayerBasis:
    return LayerBasis(make_basis(kind), make_basis(kind, 5))


def rounding_basis() -> LayerBasis:
    """Offsets, clip ratios and feedback. No matrix, whose products depend in their
    last bits on how many rows are multiplied."""
    return LayerBasis(make_basis(clip=0.9), make_basis(seed=5, feedback=True))
