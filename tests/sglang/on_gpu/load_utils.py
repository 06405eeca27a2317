"""Replaces sgl_kernel/load_utils.py in the pack, which loads SGLang's compiled operators.

These operators are built for torch 2.14. They need names that torch 2.11 lacks
(torch::Library::_def with torch::headeronly::Tag), so the pack has no compiled operators. torch
computes SGLang's norms, activations and rotary embeddings (SGLANG_FORCE_FUSED_OP_BACKEND). This
file defines what else engines call. Any other operator fails by its name, because
torch.ops.sgl_kernel does not have it.
"""

from __future__ import annotations

import torch

_library = torch.library.Library("sgl_kernel", "FRAGMENT")


def _load_architecture_specific_ops() -> None:
    """Define the operators that engines call whatever the layers are."""
    _library.define("weak_ref_tensor(Tensor x) -> Tensor")
    # SGLang's operator gives a view whose memory the owner may free. This one keeps the memory, so
    # CUDA graphs of prompts take more.
    _library.impl("weak_ref_tensor", lambda x: x.view_as(x), "CompositeImplicitAutograd")


def _preload_cuda_library() -> None:
    """Do nothing: torch has loaded the library."""
