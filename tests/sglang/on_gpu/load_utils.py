"""Stands in the pack for sgl_kernel/load_utils.py, which loads SGLang's compiled operators.

Those are built for torch 2.14, and torch 2.11 lacks names that they need (torch::Library::_def with
torch::headeronly::Tag). So there are none. SGLang's norms, activations and rotary embeddings come
from torch instead (SGLANG_FORCE_FUSED_OP_BACKEND), and what else an operator is called for is here.
Any other operator fails by its name, as torch.ops.sgl_kernel does not have it.
"""

from __future__ import annotations

import torch

_library = torch.library.Library("sgl_kernel", "FRAGMENT")


def _load_architecture_specific_ops() -> None:
    """Define the operators that engines call whatever the layers are."""
    _library.define("weak_ref_tensor(Tensor x) -> Tensor")
    # SGLang's is the same memory, whose owner may give it back. This one keeps it: CUDA graphs of
    # prompts take more memory.
    _library.impl("weak_ref_tensor", lambda x: x.view_as(x), "CompositeImplicitAutograd")


def _preload_cuda_library() -> None:
    """Torch has loaded it."""
