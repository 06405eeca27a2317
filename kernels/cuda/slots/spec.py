"""What the kernel that places new tokens is compiled for, and its arguments: plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

# name and struct code: Q uint64 (an address or bytes), i int32
PLACE = (
    ("seq_lens", "Q"),  # [batch], int32, contiguous, as are all lengths; see kvquant/cache/layer.py
    ("packed_lens", "Q"),
    ("exact_lens", "Q"),
    ("starts", "Q"),
    ("seen_lens", "Q"),  # with a window, as the next two
    ("seen_starts", "Q"),
    ("firsts", "Q"),
    ("new_lens", "Q"),  # [batch], int32 or int64; 0: new_tokens for all
    ("overflow", "Q"),  # [1], int32
    ("room", "Q"),  # [3, batch * new_tokens + batch], int64
    ("new_lens_step", "Q"),  # bytes from one to the next
    ("new_lens_bytes", "i"),  # of one: 4 or 8
    ("new_tokens", "i"),
    ("sink_len", "i"),
    ("packed_len", "i"),
    ("recent_len", "i"),
    ("max_seq_len", "i"),
    ("window", "i"),  # 0: none
    ("batch", "i"),
)


@dataclass(frozen=True)
class SlotSpec:
    """All that the machine code depends on, but for the GPU's architecture.

    Attributes:
        threads: of a block, which has one sequence.
    """

    threads: int = 512

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: none."""
        return 0

    @property
    def arguments(self) -> str:
        """The kernel's arguments as a struct format; every field is naturally aligned."""
        return "=" + "".join(code for _, code in PLACE)
