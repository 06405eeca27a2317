"""Small random Hugging Face models, made from a config's name."""

from __future__ import annotations

from typing import Any

import torch
from hf_cases import tiny

from kvquant.hf.model import CachedModel


def tiny_model(kind: str, *, bias: float = 3.0, **changes: Any) -> CachedModel:
    """A random model with logits of size 1 or so.

    Args:
        kind: "Llama" for transformers' LlamaConfig.
        bias: standard deviation of biases.
        changes: of the config.
    """
    return tiny(kind, bias=bias, **{"hidden_size": 256, "num_attention_heads": 4, **changes})


def biased_model(size: float = 300.0) -> CachedModel:
    """A model in which a few channels of keys are large, and queries and keys vary beside them."""
    model = tiny_model("Qwen2", bias=1e-3)
    with torch.no_grad():
        for layer in model.model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.mul_(2)
            layer.self_attn.k_proj.bias[30::64] = size  # turns slowly: all keys have it
    return model
