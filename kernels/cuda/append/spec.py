"""What the append and the feedback kernels are compiled for, and their arguments: plain numbers.

With feedback `lanes` lanes of a warp make a row ready and `share` lanes round it: one where rows
fill the GPU, more where there are few.

    stages   TILE rows of the feedback matrix, the block's: those that are used, those that come
    buffers  a row each, its warp's: elements, then float32, whose places errors take; after them
             scales and shifts

Rows are an odd number of 16-byte units apart, so that lanes meet different banks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvquant.rows.format import RowFormat

from ..device.row_layout import (
    ELEMENTS,
    PRODUCT_ROWS,
    PRODUCT_WARPS,
    SIZES,
    STAGES,
    UNIT,
    RowSpec,
    lanes_of,
    product_bytes,
    refuse_latents,
    staged_bytes,
)
from ..runtime.spec import Spec, Table

TILE = ELEMENTS  # of a row between two barriers
TILES = 2  # of the feedback matrix in shared memory
SHARE = TILE  # lanes that have a row of a step
MOST_SHARED = 99 << 10  # bytes that a block may have on every GPU from sm_80 on

CALL = (
    ("packed", "P"),  # slots: int64 [num_tokens] each; exact and evicted may be 0
    ("exact", "P"),
    ("evicted", "P"),
    ("cos", "P"),  # float32 [num_tokens, rotary_dim / 2], or 0
    ("sin", "P"),
    ("bad", "P"),  # int32 [2], or 0
)
ROWS = (
    ("x", "P"),
    ("rows", "P"),
    ("exact_rows", "P"),
    ("offset", "P"),  # float32 [num_heads, head_dim], or 0
    ("clip", "P"),  # float32 [num_heads], or 0
)
STRIDES = (
    ("x_stride_token", "Q"),
    ("x_stride_head", "Q"),
    ("stride_page", "Q"),
    ("stride_head", "Q"),
    ("stride_row", "Q"),
    ("exact_stride_seq_slot", "Q"),
    ("exact_stride_head", "Q"),
    ("exact_stride_row", "Q"),
)
SLOTS = (
    ("num_slots", "I"),  # larger slots are as negative ones
    ("page_size", "I"),
    ("page_factor", "I"),  # row_layout.divisor
    ("page_shift", "I"),
    ("num_exact", "I"),
    ("exact_len", "I"),
    ("exact_factor", "I"),
    ("exact_shift", "I"),
)
SIDE = (*ROWS, *STRIDES)
APPEND: Table = (
    *CALL,
    ("num_tokens", "i"),
    ("num_heads", "i"),
    ("heads_per_block", "i"),
    *SLOTS,
    ("k", SIDE),
    ("v", SIDE),
)
STEP: Table = (
    ("k_matrix", "P"),  # float32 [num_heads, head_dim, head_dim], or 0
    ("v_matrix", "P"),
    ("k_feedback", "P"),  # the same
    ("v_feedback", "P"),
    ("q", "P"),  # [num_tokens, num_q_heads, head_dim of K], or 0
    ("q_out", "P"),  # the same, contiguous
    ("q_matrix", "P"),  # float32 [num_heads, head_dim, head_dim]
    ("q_stride_token", "Q"),
    ("q_stride_head", "Q"),
    ("q_matrix_stride", "Q"),  # from one KV head to the next
    ("ratio", "i"),  # query heads on a KV head
)
FEEDBACK: Table = (
    ("k_feedback", "P"),  # float32 [num_heads, head_dim, head_dim]
    ("v_feedback", "P"),
)


@dataclass(frozen=True)
class Side:
    """What is done to K or to V, whose packed rows are fmt.

    Attributes:
        offset: whether a vector is subtracted.
        clip: whether groups keep a share of their range only; where codes are integers.
    """

    fmt: RowFormat
    offset: bool = False
    clip: bool = False


@dataclass(frozen=True)
class AppendSpec(RowSpec, Spec):
    """The append kernel of the sides k and v.

    Attributes:
        source: "bf16", "fp16" or "fp32", of the new rows.
        exact: "bf16" or "fp16", of 16-bit rows; "" if there are none.
        rotary_dim: elements of K that RoPE rotates; 0 for none.
        interleaved: whether it rotates neighbours, not halves.
        converts_fp8: whether the GPU has instructions for E4M3; asked for where a side is fp8 only.
    """

    k: Side
    v: Side
    source: str = "bf16"
    exact: str = ""
    rotary_dim: int = 0
    interleaved: bool = False
    converts_fp8: bool = True
    warps: int = 4
    overlaps: bool = False

    arguments = APPEND
    kernel = "append.kernel.make_append_kernel"

    @property
    def lanes(self) -> int:
        return lanes_of(self.k.fmt, self.v.fmt)

    def stage_bytes(self, side: Side) -> int:
        """The new rows that a warp has at a time."""
        return self.rows * side.fmt.head_dim * SIZES[self.source]

    @property
    def warp_bytes(self) -> int:
        sides = self.k, self.v
        return max(STAGES * self.stage_bytes(side) + self.out_bytes(side) for side in sides)

    def out_bytes(self, side: Side) -> int:
        exact = 2 * side.fmt.head_dim if self.exact else 0
        return self.rows * max(staged_bytes(side.fmt), exact)


@dataclass(frozen=True)
class StepSpec(AppendSpec):
    """The append kernel of a decode step; new rows that have a matrix are 16-bit rows, without
    RoPE.

    Attributes:
        k_matrix, v_matrix: whether rows are multiplied by one.
        k_feedback, v_feedback: whether they are rounded with feedback; head_dim 64 to 128.
        query: "bf16" or "fp16", of queries that are multiplied, too; "" for none.
        groups: of PRODUCT_ROWS tokens that a block has; 1 with feedback.
    """

    k_matrix: bool = False
    v_matrix: bool = False
    k_feedback: bool = False
    v_feedback: bool = False
    query: str = ""
    groups: int = 1
    warps: int = PRODUCT_WARPS

    arguments = (*APPEND, ("step", STEP))
    kernel = "append.step_kernel.make_step_kernel"

    @property
    def tokens(self) -> int:
        return PRODUCT_ROWS * self.groups

    @property
    def row_warps(self) -> int:
        """Warps that have rows of the block's tokens, once they are multiplied."""
        return -(-self.tokens // self.rows)

    @property
    def kinds(self) -> tuple[tuple[Side, bool, bool], ...]:
        """Of K and of V: the side, whether it has a matrix, and feedback."""
        k = self.k, self.k_matrix, self.k_feedback
        return k, (self.v, self.v_matrix, self.v_feedback)

    @property
    def are_alike(self) -> bool:
        """Whether the same code appends K and V."""
        return self.kinds[0] == self.kinds[1] and not self.rotary_dim

    def results_at(self, side: Side, has_feedback: bool) -> int:
        """Bytes before the rows that are multiplied, float32: the product, and the tiles of L."""
        tiles = TileLayout(side.fmt.head_dim).nbytes if has_feedback else 0
        return tiles + product_bytes(side.fmt.head_dim, self.groups)

    def feedback_side(self, side: Side, has_matrix: bool) -> FeedbackSide:
        """A side with feedback as the feedback kernel sees it; with a matrix, once multiplied."""
        if has_matrix:
            return FeedbackSide(side.fmt, side.clip, "fp32", self.exact)
        rotary = (self.rotary_dim, self.interleaved) if side is self.k else (0, False)
        return FeedbackSide(side.fmt, side.clip, self.source, self.exact, *rotary)

    def _bytes_of(self, side: Side, has_matrix: bool, has_feedback: bool) -> int:
        results = self.results_at(side, has_feedback)
        if has_feedback:
            rows = self.feedback_side(side, has_matrix).buffer_bytes + UNIT
            return results + PRODUCT_ROWS * rows
        if has_matrix:
            rows = 4 * self.tokens * side.fmt.head_dim
            return results + rows + self.row_warps * self.out_bytes(side)
        return self.row_warps * self.warp_bytes

    @property
    def shared_bytes(self) -> int:
        queries = product_bytes(self.k.fmt.head_dim, self.groups) if self.query else 0
        return max(queries, *(self._bytes_of(*kind) for kind in self.kinds))


@dataclass(frozen=True)
class TileLayout:
    """The lower triangle of a feedback matrix in shared memory: feedback_step.py."""

    head_dim: int

    @property
    def tiles(self) -> int:
        return self.head_dim // TILE

    @property
    def stride(self) -> int:
        """Bytes from a row to the next: an odd number of units."""
        return 4 * TILE * (self.tiles + 1) + UNIT

    @property
    def nbytes(self) -> int:
        return -(-self.tiles // 2) * TILE * self.stride

    def place_of(self, tile: int) -> int:
        """Where a tile begins: those of the second half stand beside one of the first."""
        first = min(tile, self.tiles - 1 - tile)
        return TILE * self.stride * first + 4 * TILE * (first + 1) * (tile > first)


@dataclass(frozen=True)
class FeedbackSide:
    """What is done to K or V, as of Side and AppendSpec. The kernel takes the offset as an
    argument.

    share: lanes that round a row: 1, 2 or 4.
    """

    fmt: RowFormat
    clip: bool = False
    source: str = "fp32"
    exact: str = ""
    rotary_dim: int = 0
    interleaved: bool = False
    share: int = 1
    warps: int = 4

    @property
    def lanes(self) -> int:
        refuse_latents(self.fmt)
        return lanes_of(self.fmt)

    @property
    def rows(self) -> int:
        return 32 // self.share

    @property
    def block_rows(self) -> int:
        return self.warps * self.rows

    @property
    def stride(self) -> int:
        """Bytes from a row of the feedback matrix in shared memory to the next."""
        return 4 * self.fmt.head_dim + UNIT

    @property
    def stage_bytes(self) -> int:
        return TILE * self.stride

    @property
    def buffer_bytes(self) -> int:
        return 4 * self.fmt.head_dim + UNIT * (-(-self.fmt.header_bytes // UNIT) | 1)

    @property
    def warp_bytes(self) -> int:
        return self.rows * self.buffer_bytes

    @property
    def shared_bytes(self) -> int:
        return TILES * self.stage_bytes + self.warps * self.warp_bytes


@dataclass(frozen=True)
class FeedbackSpec(Spec):
    """The feedback kernel of K and V, or of one of them; their blocks have the same tokens."""

    sides: tuple[FeedbackSide, ...]

    arguments = (*APPEND, ("feedback", FEEDBACK))
    kernel = "append.feedback_kernel.make_feedback_kernel"

    @property
    def block_rows(self) -> int:
        return self.sides[0].block_rows

    @property
    def threads(self) -> int:
        return 32 * self.sides[0].warps

    @property
    def shared_bytes(self) -> int:
        return max(side.shared_bytes for side in self.sides)


def make_feedback_spec(sides: Sequence[FeedbackSide]) -> FeedbackSpec:
    """The spec of these sides, with as many warps as shared memory allows."""
    for warps in (4, 2, 1):
        spec = FeedbackSpec(tuple(replace(side, warps=warps) for side in sides))
        if spec.shared_bytes <= MOST_SHARED:
            break
    return spec
