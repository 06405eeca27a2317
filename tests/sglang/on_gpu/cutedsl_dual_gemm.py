"""Replaces sglang/kernels/ops/gemm/cutedsl_dual_gemm.py in the pack: a kernel of MLPs that needs
CUTLASS's Python package. On CUDA SGLang's Llama asks whether it can use the kernel. Here it cannot,
so it computes two products.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

MAX_DUAL_GEMM_DECODE_TOKENS = 0


class DualGemmQuantMode(Enum):
    """How the operands are quantized, as SGLang names it."""

    UNQUANT = 0
    DYNAMIC_PER_TOKEN = 1
    STATIC_PER_TENSOR = 2


def can_use_dual_gemm(*_: Any) -> bool:
    """Whether the kernel serves these sizes: there is none."""
    return False
