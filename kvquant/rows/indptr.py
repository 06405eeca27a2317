"""q_indptr: which rows of ragged queries are whose.

    q_indptr  0 3 3 4 6    sequence 0 has rows 0 to 2 of q, 1 none, 2 row 3, 3 rows 4 and 5

q is [total, num_q_heads, head_dim], and the queries of a sequence are those of its last tokens.
"""

from __future__ import annotations

import torch

from .. import debug
from ..errors import ShapeError
from .arguments import (
    check_same_device,
    check_tensor,
    check_tensors,
)


def check_indptr(
    q: torch.Tensor, q_indptr: torch.Tensor, q_lens: torch.Tensor | None = None
) -> None:
    check_tensors(q_indptr=q_indptr)
    if q.ndim != 3:
        raise ShapeError(
            f"q_indptr is given with q {list(q.shape)}: it needs q [total, num_q_heads, head_dim], "
            "the queries of all sequences one behind another"
        )
    if q_lens is not None:
        raise ShapeError(
            "q_lens and q_indptr are both given: use q_indptr with q [total, num_q_heads, "
            "head_dim], q_lens with q [batch, q_len, num_q_heads, head_dim]"
        )
    check_tensor("q_indptr", q_indptr, [torch.int32])
    if q_indptr.ndim != 1 or not q_indptr.shape[0]:
        raise ShapeError(f"q_indptr is {list(q_indptr.shape)}: it must be [batch + 1]")
    check_same_device(q=q, q_indptr=q_indptr)


def check_indptr_values(q: torch.Tensor, q_indptr: torch.Tensor, *, padded: bool = False) -> None:
    """Raise ShapeError unless q_indptr rises from 0 to the rows of q (or less if `padded`)."""
    if debug.is_recorded(q_indptr):
        return
    starts, total = q_indptr.cpu().numpy(), q.shape[0]
    if starts[0] != 0:
        raise ShapeError(f"q_indptr begins with {starts[0]}: it must begin with 0")
    falls = starts[1:] < starts[:-1]
    if falls.any():
        at = int(falls.argmax())
        raise ShapeError(
            f"q_indptr falls from {starts[at]} to {starts[at + 1]} at sequence {at}: each entry "
            "must be the one before it or more, a sequence has the rows from one to the next"
        )
    if starts[-1] != total and not (padded and starts[-1] < total):
        how = "no more" if padded else "that; rows of padding may belong to a sequence of 0 tokens"
        raise ShapeError(
            f"q_indptr ends with {starts[-1]}, and q has {total} rows: it must end with {how}"
        )


def visible_to_rows(seq_lens: torch.Tensor, q_indptr: torch.Tensor, total: int) -> torch.Tensor:
    """How many tokens of its sequence each row of q sees, counted from the first: [total], int32.

    It is 0 for rows after the last sequence's, and for queries before the first token.
    """
    ends, row = q_indptr[1:], torch.arange(total, dtype=torch.int32, device=q_indptr.device)
    # of each row; for rows after the last, the batch
    sequence = torch.searchsorted(ends.contiguous(), row, right=True)
    before_first = torch.nn.functional.pad(seq_lens - ends, (0, 1), value=-(1 << 30))
    return (before_first[sequence] + row + 1).clamp(min=0)
