"""A plan as `kvquant calibrate` writes it, made up: keys with offsets in a few channels."""

from __future__ import annotations

from typing import Any

import torch

from kvquant.io.model_id import model_identity
from kvquant.io.plan import CachePlan

ERRORS: dict[str, Any] = {"kl_error": 0.0002, "top1_error": 0.003, "kl_passages": []}
MEASURED: dict[str, Any] = {"top1": 0.9539, "perplexity": 15.114, "exact_perplexity": 15.025}
MEASURED |= {"context": 2048, "scored": 8192, "passages": 8, "in_one_pass": None}
MEASURED |= {"sink_len": 0, "recent_len": 0}
FORMATS = {"int4": 4.25, "int4-g4": 5.0, "int8": 8.25}


def example_plan(
    num_layers: int = 3,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    *,
    config: dict[str, Any] | None = None,
    kl: float = 0.0066,
    max_kl: float | None = 0.01,
    met: bool = True,
) -> CachePlan:
    """Make a plan whose last layer is kept in 16 bit, of a model with this config, or of none."""
    torch.manual_seed(0)
    shape = (num_layers, num_kv_heads)
    tensors: dict[str, torch.Tensor] = {}
    for side, spread in (("k", 40.0), ("v", 3.0)):
        tensors[f"{side}.offset"] = torch.zeros(*shape, head_dim)
        tensors[f"{side}.offset"][..., 7] += spread
        tensors[f"{side}.matrix"] = torch.eye(head_dim).repeat(*shape, 1, 1)
        for name in FORMATS:
            tensors[f"{side}.clip.{name}"] = 0.8 + 0.2 * torch.rand(shape)
    facts = example_facts(num_layers, kl, max_kl, met)
    facts |= {} if config is None else {"model": model_identity(config)}
    return CachePlan({**facts, "bits": CachePlan(facts, tensors).bits}, tensors)


def example_facts(num_layers: int, kl: float, max_kl: float | None, met: bool) -> dict[str, Any]:
    """Make its facts."""
    side = {"format": "int4", "basis": "matrix", "rounding": "nearest"}
    layers: list[dict[str, Any]] = [
        {"k": side, "v": side | {"basis": "none"}, "kept": None} for _ in range(num_layers)
    ]
    exact = {"format": "bf16", "basis": "none", "rounding": "nearest"}
    layers[0] = layers[0] | {"v": side | {"format": "int8"}}
    layers[-1] = {"k": exact, "v": exact, "kept": "its rows are 72 wide"}
    return {
        "model": {"type": "qwen2", "sha256": "ab" * 32},
        "layers": layers,
        "observed_tokens": 32768,
        "candidates": list(FORMATS),
        "zero_data": False,
        "measured": {"kl": kl, **MEASURED, **ERRORS},
        "windowed": None,
        "others": [],
        "limit": {"max_kl": max_kl, "budget": None, "met": met},
        "blamed": [] if met else [1, 0],
        "sensitivity": [
            {"layer": layer, "k_format": k, "v_format": v, "kl": (1 + layer) * 0.01 / bits**2}
            for layer in range(num_layers - 1)
            for name, bits in FORMATS.items()
            for k, v in ((name, "bf16"), ("bf16", name))
        ],
        "comparison": [
            {"format": name, "plan": plan, "bits": bits, "kl": kl_at / bits**6, **ERRORS, **rest}
            for plan, kl_at, rest in (
                (False, 2.318 * 4.25**6, {"top1": 0.3625, "perplexity": 161.0}),
                (True, 0.0066 * 4.25**6, {"top1": 0.954, "perplexity": 15.1}),
            )
            for name, bits in FORMATS.items()
        ],
        "settings": {"text": "valid <2>.txt"},
    }
