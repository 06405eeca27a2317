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

import torch

from .errors import ShapeError
from .segments import Segment

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
        lens, capacity = segment.seq_lens.cpu(), segment.capacity
        _check_range("seq_lens", lens, capacity, f"there is room for 0 to {capacity} rows")
        if segment.starts is not None:
            last = max(capacity - segment.sinks - 1, 0)  # a ring without rows starts at 0
            _check_range("starts", segment.starts.cpu(), last, f"rows are 0 to {last}")
        if segment.seats is not None:
            last = segment.k_rows.shape[0] - 1
            _check_range("seats", segment.seats.cpu(), last, f"there are rows for 0 to {last}")
        if segment.block_table is not None:
            table = segment.block_table.cpu()
            num_pages, _, page_size, _ = segment.k_rows.shape
            in_use = page_size * torch.arange(table.shape[1], device="cpu") < lens[:, None]
            allowed = f"pages are 0 to {num_pages - 1}"
            _check_range("block_table", table, num_pages - 1, allowed, in_use)


def _check_range(
    name: str, values: torch.Tensor, last: int, allowed: str, in_use: torch.Tensor | None = None
) -> None:
    """values: [batch] or [batch, entries], 0 to last."""
    used = values if in_use is None else values[in_use]
    if not used.numel():
        return
    lowest, highest = (int(value) for value in used.aminmax())
    if lowest < 0 or highest > last:
        bad = (values < 0) | (values > last)
        if in_use is not None:
            bad &= in_use
        sequence, *entry = bad.nonzero()[0].tolist()
        place = f", entry {entry[0]}," if entry else ""
        value = int(values[(sequence, *entry)])
        raise ShapeError(f"{name} of sequence {sequence}{place} is {value}: {allowed}")
