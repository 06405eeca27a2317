"""Entries of vLLM's registry of attention backends that are kvquant's."""

from __future__ import annotations

from typing import Any

# vLLM's CPU platform knows CPU_ATTN and those for latent attention
LATENT = ("CPU_MLA", "AMX_MLA")
OURS = ("CUSTOM", "CPU_ATTN", *LATENT)
PLUGIN = f"{__package__}.plugin"  # the module whose attributes they are


def asked_of(config: Any) -> Any:
    """What a VllmConfig says of kvquant's rows: "kvquant" in additional_config, {} for the backend
    CUSTOM without it, and None if neither is there."""
    given = config.additional_config
    if isinstance(given, dict) and "kvquant" in given:
        return given["kvquant"]
    return {} if chooses_custom(config.attention_config) else None


def chooses_custom(attention: Any) -> bool:
    """Whether an AttentionConfig names the backend CUSTOM, for all layers or a kind of them."""
    chosen = [attention.backend, *attention.backend_per_kind.values()]
    return any(entry is not None and entry.name == OURS[0] for entry in chosen)
