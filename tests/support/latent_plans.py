"""Plans and bases of latent rows, made up: latents with outlier channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvquant import Basis
from kvquant.io.model_id import model_identity
from kvquant.io.plan import CachePlan
from kvquant.rows.basis import LayerBasis

CONFIG: dict[str, Any] = {"model_type": "deepseek_v3", "kv_lora_rank": 256, "qk_rope_head_dim": 32}


def orthogonal(dim: int, seed: int = 0) -> torch.Tensor:
    """[1, dim, dim], float32, at random."""
    made = torch.Generator().manual_seed(seed)
    found: torch.Tensor = torch.linalg.qr(
        torch.randn(dim, dim, dtype=torch.float64, generator=made)
    )[0]
    return found.float()[None]


def random_basis(latent_dim: int = 256, rope_dim: int = 32, seed: int = 0) -> LayerBasis:
    """Offsets and an orthogonal matrix of both parts."""
    made = torch.Generator().manual_seed(seed)
    return LayerBasis(
        *(
            Basis(torch.randn(1, dim, generator=made), orthogonal(dim, seed))
            for dim in (latent_dim, rope_dim)
        )
    )


def latent_plan(
    num_layers: int = 2,
    config: Mapping[str, Any] = CONFIG,
    *,
    fmt: tuple[str, str] = ("int4-g8", "bf16"),
    exact: str = "bf16",
) -> CachePlan:
    """A plan with a random basis of each layer; the last one of several is kept in 16 bit."""
    dims = config["kv_lora_rank"], config["qk_rope_head_dim"]
    tensors: dict[str, torch.Tensor] = {}
    bases = [random_basis(*dims, seed=layer) for layer in range(num_layers)]
    for name in "kv":
        sides: list[Basis] = [getattr(basis, name) for basis in bases]
        tensors[f"{name}.offset"] = torch.stack([side.offset for side in sides])
        tensors[f"{name}.matrix"] = torch.stack([_matrix(side) for side in sides])
        tensors[f"{name}.clip.int4-g8"] = torch.full((num_layers, 1), 0.95)
    layers: list[dict[str, Any]] = [
        {
            side: {"format": name, "basis": "matrix", "rounding": "nearest"}
            for side, name in zip("kv", fmt, strict=True)
        }
        | {"kept": None}
        for _ in range(num_layers)
    ]
    if num_layers > 1:
        kept = {"format": exact, "basis": "none", "rounding": "nearest"}
        layers[-1] = {"k": kept, "v": kept, "kept": "its latents go up to 1e5"}
    facts = {
        "latent": True,
        "model": model_identity(config),
        "layers": layers,
        "observed_tokens": 0,
        "candidates": ["int4-g8"],
        "zero_data": True,
        "measured": None,
        "limit": {"max_kl": None, "budget": None, "met": True},
        "blamed": [],
        "sensitivity": [],
        "comparison": [],
        "settings": {},
    }
    plan = CachePlan(facts, tensors)
    return CachePlan({**facts, "bits": plan.bits}, tensors)


def _matrix(side: Basis) -> torch.Tensor:
    assert side.matrix is not None
    return side.matrix
