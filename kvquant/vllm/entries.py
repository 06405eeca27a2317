"""Entries of vLLM's registry of attention backends that are kvquant's."""

from __future__ import annotations

from typing import Any

from ..rows.format import NAMES

# vLLM's CPU platform knows CPU_ATTN and those for latent attention
LATENT = ("CPU_MLA", "AMX_MLA")
OURS = ("CUSTOM", "CPU_ATTN", *LATENT)
PLUGIN = f"{__package__}.plugin"  # the module whose attributes they are
# of --kv-cache-dtype, and what they say
DTYPES: dict[str, dict[str, str]] = {"kvquant_default": {}, "kvquant_auto": {"plan": "auto"}}
DTYPES |= {f"kvquant_{name}": {"k_format": name, "v_format": name} for name in NAMES}


def asked_of(config: Any) -> Any:
    """What a VllmConfig says of kvquant's rows, None for nothing: "kvquant" in additional_config
    and, for what that leaves out, a cache dtype of kvquant's. {} is the backend CUSTOM alone."""
    given, named = config.additional_config, DTYPES.get(config.cache_config.cache_dtype)
    if isinstance(given, dict) and "kvquant" in given:
        asked = given["kvquant"]
        return {**named, **asked} if named and isinstance(asked, dict) else asked
    return {} if named is None and chooses_custom(config.attention_config) else named


def chooses_custom(attention: Any) -> bool:
    """Whether an AttentionConfig names the backend CUSTOM, for all layers or a kind of them."""
    chosen = [attention.backend, *attention.backend_per_kind.values()]
    return any(entry is not None and entry.name == OURS[0] for entry in chosen)
