"""Advance an engine's 16-bit slots on CUDA, in one launch; see kvquant/engine/window.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..runtime.launch import Launch, cached_launch
from ..runtime.spec import Spec, Table

STATE = (  # int64 but for best, int32; see Window
    *("steps", "page_tickets", "page_steps", "first_slots", "tickets", "first_pages", "ends"),
    *("used", "found", "best", "exact", "table", "counts"),
)
ADVANCE: Table = (
    ("block_table", "P"),  # [batch, width], int32, the last axis contiguous
    ("seq_lens", "P"),  # [batch], int32
    ("starts", "P"),  # [batch + 1], int64: the first new token of each sequence
    *((name, "P") for name in STATE),
    ("table_bytes", "i"),  # from one sequence to the next
    ("batch", "i"),
    ("places", "i"),  # for sequences
    ("width", "i"),
    ("max_pages", "i"),
    ("max_tokens", "i"),
    ("num_slots", "i"),
    ("page_size", "i"),
    ("recent_len", "i"),
    ("ring_len", "i"),
    ("rollback_len", "i"),
)


@dataclass(frozen=True)
class WindowSpec(Spec):
    """The kernel that advances slots, in one block."""

    warps: int = 16

    arguments = ADVANCE
    kernel = "slots.window_kernel.make_window_kernel"


def advance(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    state: Sequence[torch.Tensor],
    sizes: Mapping[str, int],
) -> None:
    """Find slots on the current stream. sizes: arguments of the kernel by name."""
    table, exact = state[STATE.index("table")], state[STATE.index("exact")]
    constants = {
        **sizes,
        "table_bytes": 4 * block_table.stride(0),
        "batch": len(starts) - 1,
        "places": len(table),
        "width": block_table.shape[1],
        "max_pages": table.shape[1],
        "max_tokens": len(exact),
    }
    index = table.get_device()
    key = WindowSpec, index, *constants.values()
    launch = cached_launch(key, None, lambda: Launch(WindowSpec(), index, (1, 1, 1), constants))
    if launch is not None:
        launch((block_table, seq_lens, starts, *state))
