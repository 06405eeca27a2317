"""Checks of values in tensors (lengths, pages, members, slots, new rows), which the host must read.

On the CPU they always run. On a GPU reading waits for all its work, so there they run in debug mode
only: with KVQUANT_DEBUG=1 in the environment when kvquant is imported, or after
`kvquant.debug.enabled = True`. Without it

    a kernel     takes a length over the capacity for the capacity, and reads memory outside of
                 the cache for a page, a start or a sequence slot that does not exist
    an append    writes a row with NaN, Inf or what its format cannot hold as one that decodes to
                 NaN, and counts it; KVCache.check raises

While a CUDA graph is captured or torch.compile traces, nothing can be read, even in debug mode.
"""

from __future__ import annotations

import os

import torch

from .rehearsal import is_rehearsed

enabled = os.environ.get("KVQUANT_DEBUG", "0") not in ("", "0")


def may_read(values: torch.Tensor) -> bool:
    """Whether the host may read values: on the CPU, or in debug mode, and not while recording."""
    return (values.is_cpu or (enabled and not is_rehearsed(values))) and not is_recorded(values)


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether torch.compile or a CUDA graph records what runs now."""
    if torch.compiler.is_compiling():
        return True
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
