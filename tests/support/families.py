"""The model types of the tables in kvquant/hf/README.md, and what small random models need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hf_cases import GEMMA3N, LATENT_SIZES, SHARING

import kvquant

README = Path(kvquant.__file__).parent / "hf" / "README.md"
# the first cells of the table "More model types"
ALL_LAYERS, LATENT_ROWS = "all layers are packed", "latent rows"
SOME_LAYERS = (
    "some layers are packed; transformers keeps the others, with states or (`llama4`) attention "
    "to chunks"
)
COPIES = "`dequantize=True` is needed"
MIXED = ["sliding_attention", "full_attention"] * 2
LATENT = {"deepseek_v2", "deepseek_v3", "kimi_linear", "bailing_hybrid"}
ALL_EXPERTS = LATENT_SIZES | {"num_experts_per_tok": 8, "topk_group": 2}
STATES = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
LINEAR = {
    "num_hidden_layers": 4,
    "shared_expert_intermediate_size": 32,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
CONVOLVED = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
WINDOWED: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": MIXED}
CHUNKED = {"num_hidden_layers": 4, "attention_chunk_size": 8, "intermediate_size_mlp": 96}
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": ALL_EXPERTS,
    "deepseek_v3": ALL_EXPERTS,
    "kimi_linear": ALL_EXPERTS | STATES,
    "bailing_hybrid": ALL_EXPERTS | STATES,
    "qwen3_moe": {"num_experts_per_tok": 2},  # that no router's choice hangs on a rounding
    "llama4_text": CHUNKED,
    "qwen3_next": LINEAR,
    "gemma2": WINDOWED | {"attn_logit_softcapping": 0.5},
    "gemma3_text": WINDOWED,
    "gemma3n_text": GEMMA3N,  # the last two layers read the rows of the first two
    # rows of 256 elements with a window and of 512 without, as the large models have them
    "gemma4_text": SHARING | {"head_dim": 256, "global_head_dim": 512},
    "gpt_oss": WINDOWED | {"num_experts_per_tok": 2},
    "cohere2": WINDOWED,
    "mimo_v2_flash": {  # keys wider than values, twice the heads and sink logits in windows
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "num_attention_heads": 4,
        "head_dim": 128,
        "v_head_dim": 64,
        "num_experts_per_tok": 2,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_period": 9,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 8,
        "shared_intermediate_size": 64,
    },
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8},
    "zamba2": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "mamba_headdim": 64,
        "mamba_d_state": 8,
        "num_mem_blocks": 1,
    },
    "lfm2": CONVOLVED,
    # the types of the table "More model types"
    "lfm2_moe": CONVOLVED | {"num_dense_layers": 1},
    "lfm3": CONVOLVED,
    "qwen3_5_text": LINEAR | STATES,
    "qwen3_5_moe_text": LINEAR | STATES,
    "qwen3_5": {"text_config": LINEAR | STATES},
    "qwen3_5_moe": {"text_config": LINEAR | STATES},
    "bamba": {
        "num_hidden_layers": 4,
        "attn_layer_indices": [1, 3],
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 8,
    },
    "zamba": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "axk1": LATENT_SIZES,
    "glm4_moe_lite": LATENT_SIZES,
    "minicpm3": LATENT_SIZES,
    "sarvam_mla": LATENT_SIZES,
    "youtu": LATENT_SIZES,
    "cwm": WINDOWED,
    "exaone4": WINDOWED,
    "gemma3": {"text_config": WINDOWED},
    "gemma4": {"text_config": SHARING | {"head_dim": 256, "global_head_dim": 512}},
    "llama4": {"text_config": CHUNKED},
    "ministral": WINDOWED,
    "modernbert-decoder": WINDOWED,
    "olmo3": WINDOWED,
    "dots1": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "jetmoe": {"kv_channels": 64},
}


def lines() -> dict[str, list[str]]:
    """The cells of the table, by model_type."""
    table = README.read_text().split("## Families", 1)[1].split("\n#", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \|(.+)\|$", table, re.MULTILINE)
    return {kind: [cell.strip() for cell in cells.split("|")] for kind, cells in rows}


def others() -> dict[str, str]:
    """The model types of the table "More model types", and the first cell of their line."""
    text = README.read_text().split("### More model types", 1)[1].split("\n#", 1)[0]
    lists = re.findall(r"^\| (.+?) \| (`\w.+) \|$", text, re.MULTILINE)
    return {kind: kept for kept, names in lists for kind in re.findall(r"`([\w-]+)`", names)}
