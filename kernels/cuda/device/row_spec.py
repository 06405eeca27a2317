"""What the append and the dequantize kernels are compiled for, and their arguments: plain numbers.

A row belongs to `lanes` lanes of a warp, 16 elements each: 8 lanes for a head_dim of 128, so that a
warp has 4 rows at a time. Rows pass through shared memory on both sides, a warp's own:

    ring    stages of elements or of rows, by asynchronous copies: how far a warp reads ahead
    out     rows or elements as they will be written, so that stores are as wide as rows allow

Where head_dim is no power of two times 16 some lanes have no elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvquant.rows.format import RowFormat

ELEMENTS = 16  # of a row that a lane has
UNIT = 16  # bytes
STAGES = 4
SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of an element

# name and struct code: Q uint64 (an address, or bytes), i int32, I uint32
APPEND = (
    ("packed", "Q"),  # slots: int64 [num_tokens] each; exact and leaving may be 0
    ("exact", "Q"),
    ("evicted", "Q"),
    ("cos", "Q"),  # float32 [num_tokens, rotary_dim / 2], or 0
    ("sin", "Q"),
    ("bad", "Q"),  # int32 [2], or 0
    ("num_tokens", "i"),
    ("num_heads", "i"),
    ("heads_per_block", "i"),
    ("num_slots", "I"),  # larger slots are as negative ones
    ("page_size", "I"),
    ("page_factor", "I"),  # see divisor
    ("page_shift", "I"),
    ("num_exact", "I"),
    ("exact_len", "I"),
    ("exact_factor", "I"),
    ("exact_shift", "I"),
)
APPEND_SIDE = (  # K, then V
    ("x", "Q"),
    ("rows", "Q"),
    ("exact_rows", "Q"),
    ("offset", "Q"),  # float32 [num_heads, head_dim], or 0
    ("clip", "Q"),  # float32 [num_heads], or 0
    ("x_stride_token", "Q"),  # bytes
    ("x_stride_head", "Q"),
    ("stride_page", "Q"),
    ("stride_head", "Q"),
    ("stride_row", "Q"),
    ("exact_stride_seq_slot", "Q"),
    ("exact_stride_head", "Q"),
    ("exact_stride_row", "Q"),
)
DEQUANTIZE = (
    ("slots", "Q"),  # int64 [num_tokens]
    ("rows", "Q"),
    ("out", "Q"),  # [num_tokens, num_heads, head_dim]
    ("stride_page", "Q"),  # bytes
    ("stride_head", "Q"),
    ("stride_row", "Q"),
    ("num_tokens", "i"),
    ("num_heads", "i"),
    ("heads_per_block", "i"),
    ("num_slots", "I"),
    ("page_size", "I"),
    ("page_factor", "I"),
    ("page_shift", "I"),
)


def divisor(number: int) -> tuple[int, int]:
    """(factor, shift): n // number is n * factor >> shift, for 0 <= n < 2**31.

    Source: Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994.
    """
    shift = 31 + (number - 1).bit_length()
    return -(-(1 << shift) // number), shift


def lanes_of(*formats: RowFormat) -> int:
    """Lanes that rows of these formats belong to."""
    most = max(fmt.head_dim for fmt in formats)
    return 1 << (most // ELEMENTS - 1).bit_length()


def unit_of(fmt: RowFormat) -> int:
    """Bytes of the widest access that every row of a format allows, and its codes too."""
    header = fmt.header_bytes & -fmt.header_bytes or UNIT
    return min(UNIT, fmt.alignment, header)


def prefix_of(fmt: RowFormat) -> int:
    """Bytes before the codes of a row in shared memory: the header, which ends at a unit."""
    return -(-fmt.header_bytes // UNIT) * UNIT


def staged_bytes(fmt: RowFormat) -> int:
    """Bytes from a row in shared memory to the next."""
    return prefix_of(fmt) + -(-fmt.code_bytes // UNIT) * UNIT


@dataclass(frozen=True)
class Side:
    """What is done to K or to V.

    Attributes:
        fmt: the packed rows.
        offset: whether a vector is subtracted.
        rotate: whether rows are rotated then.
        clip: whether groups keep a share of their range only; int4 and int8.
    """

    fmt: RowFormat
    offset: bool = False
    rotate: bool = False
    clip: bool = False


class _RowSpec:
    """How rows are shared out; a spec tells its warps, the lanes of a row, the bytes of a warp."""

    warps: int

    @property
    def lanes(self) -> int:
        """Lanes of a row."""
        raise NotImplementedError

    @property
    def warp_bytes(self) -> int:
        """A warp's shared memory."""
        raise NotImplementedError

    @property
    def rows(self) -> int:
        """Rows that a warp has at a time."""
        return 32 // self.lanes

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return self.warps * self.rows

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.warps * self.warp_bytes


@dataclass(frozen=True)
class AppendSpec(_RowSpec):
    """All that the machine code of an append kernel depends on, but for the GPU's architecture.

    Attributes:
        k, v: the sides.
        source: "bf16", "fp16" or "fp32", of the new rows.
        exact: "bf16" or "fp16", of 16-bit rows; "" if there are none.
        rotary_dim: elements of K that RoPE turns; 0 for none.
        interleaved: whether it turns neighbours, not halves.
        converts_fp8: whether the GPU has instructions for E4M3 (sm_89 and newer); asked for where a
            side is fp8 only.
        warps: of a block.
    """

    k: Side
    v: Side
    source: str = "bf16"
    exact: str = ""
    rotary_dim: int = 0
    interleaved: bool = False
    converts_fp8: bool = True
    warps: int = 4

    @property
    def lanes(self) -> int:
        """Lanes of a row."""
        return lanes_of(self.k.fmt, self.v.fmt)

    def stage_bytes(self, side: Side) -> int:
        """The new rows that a warp has at a time."""
        return self.rows * side.fmt.head_dim * SIZES[self.source]

    @property
    def warp_bytes(self) -> int:
        """A warp's shared memory."""
        return max(STAGES * self.stage_bytes(side) + self._out_bytes(side) for side in self.sides)

    def _out_bytes(self, side: Side) -> int:
        exact = 2 * side.fmt.head_dim if self.exact else 0
        return self.rows * max(staged_bytes(side.fmt), exact)

    @property
    def sides(self) -> tuple[Side, Side]:
        """K and V."""
        return self.k, self.v

    @property
    def arguments(self) -> str:
        """The kernel's arguments as a struct format; every field is naturally aligned."""
        return "=" + "".join(code for _, code in APPEND) + "4x" + 2 * side_arguments()


def side_arguments() -> str:
    """Those of a side."""
    return "".join(code for _, code in APPEND_SIDE)


@dataclass(frozen=True)
class DequantizeSpec(_RowSpec):
    """All that the machine code of a dequantize kernel depends on, but for the architecture.

    Attributes:
        fmt: the rows.
        target: "bf16", "fp16" or "fp32".
        converts_fp8, warps: as of AppendSpec.
    """

    fmt: RowFormat
    target: str = "bf16"
    converts_fp8: bool = True
    warps: int = 4

    @property
    def lanes(self) -> int:
        """Lanes of a row."""
        return lanes_of(self.fmt)

    @property
    def stage_bytes(self) -> int:
        """The rows that a warp has at a time."""
        return self.rows * staged_bytes(self.fmt)

    @property
    def warp_bytes(self) -> int:
        """A warp's shared memory."""
        out = self.rows * self.fmt.head_dim * SIZES[self.target]
        return STAGES * self.stage_bytes + out

    @property
    def arguments(self) -> str:
        """The kernel's arguments as a struct format; every field is naturally aligned."""
        return "=" + "".join(code for _, code in DEQUANTIZE)
