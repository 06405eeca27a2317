"""What the feedback kernel is compiled for, and its arguments: plain numbers.

A row is made ready by `lanes` lanes of a warp, as in the append kernel, and then rounded by `share`
lanes: one where there are rows for the whole GPU, more where there are few, so that a row is done
sooner.

    stages   TILE rows of the feedback matrix, the block's: those that are used, those that come
    buffers  a row each, its warp's: elements as they came, then float32 as they are stored, whose
             places errors take tile by tile; behind them scales and shifts

Rows are an odd number of units of 16 bytes apart, so that lanes that read the same place of
different rows find them in different banks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvquant.rows.format import RowFormat

from ..device.row_spec import ELEMENTS, UNIT, Side, lanes_of

TILE = ELEMENTS  # of a row between two barriers
STAGES = 2
MOST_SHARED = 99 << 10  # bytes that a block may have on every GPU from sm_80 on
PAD = "4x"  # between the arguments of two sides

# of each side; name and struct code: Q uint64 (an address, or bytes), i int32, I uint32; as in
# device/row_spec.py
FEEDBACK = (
    ("packed", "Q"),
    ("exact", "Q"),
    ("evicted", "Q"),
    ("cos", "Q"),
    ("sin", "Q"),
    ("bad", "Q"),  # int32, or 0
    ("x", "Q"),
    ("rows", "Q"),
    ("exact_rows", "Q"),
    ("offset", "Q"),
    ("clip", "Q"),
    ("feedback", "Q"),  # float32 [num_heads, head_dim, head_dim]
    ("x_stride_token", "Q"),  # bytes
    ("x_stride_head", "Q"),
    ("stride_page", "Q"),
    ("stride_head", "Q"),
    ("stride_row", "Q"),
    ("exact_stride_seq_slot", "Q"),
    ("exact_stride_head", "Q"),
    ("exact_stride_row", "Q"),
    ("num_tokens", "i"),
    ("num_slots", "I"),
    ("page_size", "I"),
    ("page_factor", "I"),
    ("page_shift", "I"),
    ("num_exact", "I"),
    ("exact_len", "I"),
    ("exact_factor", "I"),
    ("exact_shift", "I"),
)


@dataclass(frozen=True)
class FeedbackSide:
    """What is done to K or to V.

    Attributes:
        side: the rows, int4 or int8, and what is done to them before.
        source, exact, rotary_dim, interleaved: as of AppendSpec.
        share: lanes that round a row: 1, 2 or 4.
        warps: of a block.
    """

    side: Side
    source: str = "fp32"
    exact: str = ""
    rotary_dim: int = 0
    interleaved: bool = False
    share: int = 1
    warps: int = 4

    @property
    def fmt(self) -> RowFormat:
        """The rows."""
        return self.side.fmt

    @property
    def lanes(self) -> int:
        """Lanes of a row that is made ready."""
        return lanes_of(self.fmt)

    @property
    def rows(self) -> int:
        """Rows that a warp has at a time."""
        return 32 // self.share

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return self.warps * self.rows

    @property
    def stride(self) -> int:
        """Bytes from a row of the feedback matrix in shared memory to the next."""
        return 4 * self.fmt.head_dim + UNIT

    @property
    def stage_bytes(self) -> int:
        """A tile of the feedback matrix."""
        return TILE * self.stride

    @property
    def buffer_bytes(self) -> int:
        """A row, and its scales and shifts."""
        return 4 * self.fmt.head_dim + UNIT * (-(-self.fmt.header_bytes // UNIT) | 1)

    @property
    def warp_bytes(self) -> int:
        """A warp's rows."""
        return self.rows * self.buffer_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return STAGES * self.stage_bytes + self.warps * self.warp_bytes


@dataclass(frozen=True)
class FeedbackSpec:
    """All that the machine code depends on, but for the GPU's architecture.

    Attributes:
        sides: K and V, or one of them; their blocks have the same tokens.
    """

    sides: tuple[FeedbackSide, ...]

    @property
    def block_rows(self) -> int:
        """Tokens of a block."""
        return self.sides[0].block_rows

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.sides[0].warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return max(side.shared_bytes for side in self.sides)

    @property
    def arguments(self) -> str:
        """The kernel's arguments as a struct format; every field is naturally aligned."""
        return "=" + PAD.join("".join(code for _, code in FEEDBACK) for _ in self.sides)


def make_feedback_spec(sides: Sequence[FeedbackSide]) -> FeedbackSpec:
    """The spec of these sides, with as many warps as shared memory allows."""
    for warps in (4, 2, 1):
        spec = FeedbackSpec(tuple(replace(side, warps=warps) for side in sides))
        if spec.shared_bytes <= MOST_SHARED:
            break
    return spec
