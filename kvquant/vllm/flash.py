"""Attention of a prompt's tokens to 16-bit K and V, by vLLM's FlashAttention."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from vllm.logger import init_logger

from ..engine.contract import CausalAttention, Lengths

logger = init_logger(f"vllm.{__name__}")
MOST = 256  # elements of a head that these versions take
VERSIONS = 2, 3  # of FlashAttention: the next one compiles a kernel where it is first called


def causal_attention_of(impl: Any, v_size: int, device: torch.device) -> CausalAttention | None:
    """vLLM's kernel for a layer's prompts; None, and a line in the log, for torch's."""
    if device.type != "cuda":
        return None
    version, size = None, impl.head_size
    why = f"K of some layers has {size} elements, V {v_size}"
    if v_size == size <= MOST:
        try:
            from vllm.v1.attention.backends.fa_utils import (
                flash_attn_varlen_func,
                get_flash_attn_version,
            )

            version = get_flash_attn_version(
                requires_alibi=impl.alibi_slopes is not None,
                head_size=size,
                has_sinks=impl.sinks is not None,
                requires_softcap=bool(impl.soft_cap),
            )
            why = f"vLLM's FlashAttention for some layers is {version}"
        except (ImportError, TypeError) as error:  # TypeError: of another version of vLLM
            why = f"vLLM's FlashAttention cannot be asked for, {error}"
    if version not in VERSIONS or (version == 2 and impl.sinks is not None):
        _tell(f"torch's kernels: {why}")
        return None
    _tell(f"FlashAttention {version} of vLLM")
    slopes: torch.Tensor | None = None
    if impl.alibi_slopes is not None:
        slopes = torch.tensor(impl.alibi_slopes, dtype=torch.float32, device=device)
    window = None if impl.sliding_window is None else [impl.sliding_window - 1, 0]

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, out: torch.Tensor
    ) -> None:
        flash_attn_varlen_func(
            q,
            k,
            v,
            out=out,
            cu_seqlens_q=lengths.query_starts,
            max_seqlen_q=max(lengths.queries),
            cu_seqlens_k=lengths.key_starts,
            max_seqlen_k=max(lengths.keys),
            softmax_scale=impl.scale,
            causal=True,
            window_size=window,
            softcap=impl.soft_cap or 0.0,
            alibi_slopes=slopes,
            fa_version=version,
            s_aux=impl.sinks,
        )

    return attend


@lru_cache
def _tell(kernel: str) -> None:
    logger.info("kvquant: prompts attend by %s", kernel)
