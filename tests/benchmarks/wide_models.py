"""Models of random weights, as wide as a Llama of 8B or as DeepSeek V3 without its experts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

from kvquant import CachedModel

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
DEEPSEEK_V3: dict[str, Any] = {  # the sizes of its attention, and of its layers without experts
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def made_model(
    layers: int, positions: int, *, latent: bool = False, device: str = "cuda"
) -> CachedModel:
    """A decoder in bfloat16 with a vocabulary of 32,000 and no tokenizer.

    Args:
        layers: how many.
        positions: tokens of the longest text.
        latent: layers of DeepSeek V3 in place of Llama's.
        device: of the weights.
    """
    torch.manual_seed(0)
    given: dict[str, Any] = {"num_hidden_layers": layers, "vocab_size": 32000}
    given |= {"max_position_embeddings": positions, "dtype": torch.bfloat16}
    config: Any = LlamaConfig(**LLAMA_8B, **given)
    if latent:
        config = DeepseekV3Config(**DEEPSEEK_V3, **given, first_k_dense_replace=layers)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return CachedModel(made.eval())


def new_cache(model: CachedModel, batch: int, room: int, fmt: str) -> Any:
    """An empty cache of rows of a format."""
    if model.has_latents:
        return model.new_cache(batch, room, fmt=fmt)
    return model.new_cache(batch, room, k_format=fmt, v_format=fmt)
