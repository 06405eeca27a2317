"""Small random Hugging Face models, made from a config's name."""

from __future__ import annotations

from typing import Any

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
