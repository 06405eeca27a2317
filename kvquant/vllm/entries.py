"""Entries of vLLM's registry of attention backends that are kvquant's."""

from __future__ import annotations

# vLLM's CPU platform knows CPU_ATTN and those for latent attention
LATENT = ("CPU_MLA", "AMX_MLA")
OURS = ("CUSTOM", "CPU_ATTN", *LATENT)
PLUGIN = f"{__package__}.plugin"  # the module whose attributes they are
