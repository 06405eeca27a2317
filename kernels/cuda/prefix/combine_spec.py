"""What the kernel that merges states is compiled for, and its arguments: plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

# name and struct code: Q uint64 (an address), i int32
MERGE = (
    ("out", "Q"),  # [batch, num_heads, head_dim], contiguous, as are all
    ("lse", "Q"),  # [batch, num_heads], float32, base e
    ("prefix_out", "Q"),  # float32 [splits, num_kv_heads, num_members * ratio, head_dim]
    ("prefix_lse", "Q"),  # float32 [splits, num_kv_heads, num_members * ratio], base e
    ("members", "Q"),  # int64 [num_members]: places in the batch, all else nobody; 0: 0, 1, 2 ...
    ("batch", "i"),
    ("num_heads", "i"),
    ("ratio", "i"),  # query heads on a KV head
    ("splits", "i"),  # at most 32
    ("num_rows", "i"),  # num_members * num_heads
)


@dataclass(frozen=True)
class MergeSpec:
    """All that the machine code depends on, but for the GPU's architecture.

    Attributes:
        head_dim: elements of a row of out, a multiple of 4.
        query: "bf16" or "fp16", the codec of out.
        warps: warps of a block, each with one row.
    """

    head_dim: int
    query: str = "bf16"
    warps: int = 4

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: none."""
        return 0

    @property
    def arguments(self) -> str:
        """The kernel's arguments as a struct format; every field is naturally aligned."""
        return "=" + "".join(code for _, code in MERGE)
