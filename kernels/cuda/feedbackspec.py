"""What the feedback kernel is compiled for, and its arguments: plain numbers.

A row belongs to `lanes` lanes of a warp: one where there are rows for the whole GPU, more where
there are few, so that a row is done sooner.

    stages   TILE rows of the feedback matrix, the block's: those that are used, those that come
    errors   of each row, its warp's

Both are padded by 16 bytes a row, so that lanes that read the same place of different rows find
them in different banks.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvquant.layout import RowFormat

from .rowspec import ELEMENTS

TILE = ELEMENTS  # of a row between two barriers
STAGES = 2
PAD = 16  # bytes
MOST_SHARED = 99 << 10  # bytes that a block may have on every GPU from sm_80 on

# name and struct code: Q uint64 (an address), i int32
FEEDBACK = (
    ("x", "Q"),  # float32 [batch, num_heads, tokens, head_dim], contiguous as are all
    ("rows", "Q"),  # uint8 [batch, num_heads, tokens, row_bytes]
    ("feedback", "Q"),  # float32 [num_heads, head_dim, head_dim]
    ("num_rows", "i"),  # of a head: batch * tokens
    ("tokens", "i"),
    ("num_heads", "i"),
)


@dataclass(frozen=True)
class FeedbackSpec:
    """All that the machine code depends on, but for the GPU's architecture.

    Attributes:
        fmt: the rows: int4 or int8.
        lanes: of a row: 1, 2, 4 or 8.
    """

    fmt: RowFormat
    lanes: int = 1

    @property
    def warps(self) -> int:
        """Warps of a block: as many as shared memory allows."""
        stages = STAGES * self.stage_bytes
        return next(n for n in (4, 2, 1) if stages + n * self.warp_bytes <= MOST_SHARED)

    @property
    def rows(self) -> int:
        """Rows that a warp has at a time."""
        return 32 // self.lanes

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return self.warps * self.rows

    @property
    def stride(self) -> int:
        """Bytes from a row in shared memory to the next."""
        return 4 * self.fmt.head_dim + PAD

    @property
    def stage_bytes(self) -> int:
        """A tile of the feedback matrix."""
        return TILE * self.stride

    @property
    def warp_bytes(self) -> int:
        """The errors of a warp's rows."""
        return self.rows * self.stride

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return STAGES * self.stage_bytes + self.warps * self.warp_bytes

    @property
    def arguments(self) -> str:
        """The kernel's arguments as a struct format; every field is naturally aligned."""
        return "=" + "".join(code for _, code in FEEDBACK)
