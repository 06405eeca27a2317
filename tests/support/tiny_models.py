"""Small random Hugging Face models, made from a config's name."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from kvquant.hf.model import CachedModel

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


def tiny_model(kind: str, *, bias: float = 3.0, **changes: Any) -> CachedModel:
    """A random model with logits of size 1 or so.

    Args:
        kind: "Llama" for transformers' LlamaConfig.
        bias: standard deviation of biases.
        changes: of the config.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SHAPE | changes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            elif "bias" in name:
                weight.normal_(std=bias)
    return CachedModel(model)
