"""Checks of values in tensors (lengths, seats, pages, members, new rows), which the host must read.

On the CPU they always run. On a GPU reading waits for all its work, so there they run in debug mode
only: with KVQUANT_DEBUG=1 in the environment when kvquant is imported, or after
`kvquant.debug.enabled = True`. Without it

    a kernel     takes a length over the capacity for the capacity, and a page, a seat or a start
                 that does not exist reads memory that is not the cache's
    an append    writes a row with NaN, Inf or what its format cannot hold as one that decodes to
                 NaN, and counts it; KVCache.check raises what was counted

Nothing can be read while a CUDA graph is captured or torch.compile traces, in debug mode neither.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import ShapeError
from .segments import Segment

Numbers: TypeAlias = "NDArray[np.integer[Any]]"

enabled = os.environ.get("KVQUANT_DEBUG", "0") not in ("", "0")


def may_read(values: torch.Tensor) -> bool:
    """Whether values are to be looked at."""
    return (values.is_cpu or enabled) and not is_recorded(values)


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether what runs now is kept to run again: torch.compile traces it, or CUDA captures it."""
    if torch.compiler.is_compiling():
        return True
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def check_values(segments: Sequence[Segment]) -> None:
    """Raise unless every length, start and page in use exists.

    Nothing can be read, and nothing is checked, while a CUDA graph is captured.

    Raises:
        ShapeError: which sequence has what instead.
    """
    for segment in segments:
        if segment.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        lens, capacity = segment.seq_lens.cpu().numpy(), segment.capacity
        _check_range("seq_lens", lens, capacity, f"there is room for 0 to {capacity} rows")
        if segment.starts is not None:
            last = max(capacity - segment.sinks - 1, 0)  # a ring without rows starts at 0
            _check_range("starts", segment.starts.cpu().numpy(), last, f"rows are 0 to {last}")
        if segment.seats is not None:
            last = segment.k_rows.shape[0] - 1
            seats = segment.seats.cpu().numpy()
            _check_range("seats", seats, last, f"there are rows for 0 to {last}")
        if segment.block_table is not None:
            _check_pages(segment, segment.block_table, lens)


def _check_pages(segment: Segment, block_table: torch.Tensor, lens: Numbers) -> None:
    """Look at the entries in use; a table is as wide as the longest sequence there may be."""
    num_pages, _, page_size, _ = segment.k_rows.shape
    used = -(-lens // page_size)
    table = block_table[:, : used.max(initial=0)].cpu().numpy()
    sequence = np.repeat(np.arange(len(used)), used)
    entry = np.arange(len(sequence)) - np.repeat(np.cumsum(used) - used, used)
    pages, allowed = table[sequence, entry], f"pages are 0 to {num_pages - 1}"
    _check_range("block_table", pages, num_pages - 1, allowed, sequence, entry)


def _check_range(name: str, values: Numbers, last: int, allowed: str, *place: Numbers) -> None:
    """values: one for each sequence, or for each place: a sequence and an entry; 0 to last."""
    if not values.size or (values.min() >= 0 and values.max() <= last):
        return
    at = int(((values < 0) | (values > last)).argmax())
    sequence, *entry = [int(one[at]) for one in place] or [at]
    where = f", entry {entry[0]}," if entry else ""
    raise ShapeError(f"{name} of sequence {sequence}{where} is {int(values[at])}: {allowed}")
