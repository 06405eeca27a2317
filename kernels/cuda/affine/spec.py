"""What the kernel that turns rows is compiled for, and its arguments: plain numbers.

A block has 32 * width columns of a KV head's matrix, and as many rows at a time as it has warps.

    rows    float32 [head_dim, warps]: element after element of all rows, as warps read them
    sums    float32 [warps, warps, width, 32]: of each warp's part of a row, of each row
"""

from __future__ import annotations

from dataclasses import dataclass

COLUMNS = 32  # of a block, one of each lane, times its width

# name and struct code: Q uint64 (an address or bytes), i int32, I uint32
TURN = (
    ("x", "Q"),  # [batch, num_heads, head_dim], a multiple of 4 bytes, as are its strides
    ("y", "Q"),  # likewise, contiguous; float32 where rows are encoded
    ("matrix", "Q"),  # float32 [num_kv_heads, head_dim, head_dim]
    ("offset", "Q"),  # float32 [num_kv_heads, head_dim], contiguous; 0: none
    ("seq_lens", "Q"),  # int32 [batch]: where it is 0, so is y; 0: all as if 1
    ("x_stride_batch", "Q"),  # bytes, as are all strides
    ("x_stride_head", "Q"),
    ("matrix_stride", "Q"),  # from one KV head to the next
    ("lens_stride", "Q"),
    ("num_heads", "i"),
    ("ratio", "i"),  # query heads on a KV head
    ("ratio_factor", "I"),  # row_spec.divisor
    ("ratio_shift", "I"),
    ("num_rows", "i"),  # of a KV head: batch * ratio
    ("rows_of_block", "i"),  # a multiple of warps
)


@dataclass(frozen=True)
class TurnSpec:
    """All that the machine code depends on, but for the GPU's architecture.

    Attributes:
        head_dim: elements of a row, a multiple of 2 * warps.
        source: "bf16" or "fp16", the codec of x and, but for encoded rows, of y.
        product: whether rows are multiplied by a matrix.
        encodes: whether y is (x - offset) M in float32, and not x M + offset.
        width: columns of a lane.
        warps: of a block, 4 or 8.
    """

    head_dim: int
    source: str = "bf16"
    product: bool = True
    encodes: bool = False
    width: int = 1
    warps: int = 8

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 4 * self.warps * (self.head_dim + self.warps * COLUMNS * self.width) * self.product

    @property
    def arguments(self) -> str:
        """The kernel's arguments as a struct format; every field is naturally aligned."""
        return "=" + "".join(code for _, code in TURN)
