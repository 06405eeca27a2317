"""One call of attention or of append, as it goes from the public function to the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .basis import Encoding
from .format import RowFormat
from .rotation import Rope
from .segment import Segment
from .slots import Slots
from .variant import AttentionVariant


class AttentionCall(NamedTuple):
    """What a call of attention asks for; a frozen dataclass would take .5 microseconds more.

    Attributes:
        q: [batch, num_q_heads, head_dim], or [batch, q_len, num_q_heads, head_dim] for the queries
            of each sequence's last tokens, or with q_indptr [total, num_q_heads, head_dim];
            float32, bfloat16 or float16.
        segments: rows to attend to, at least one segment; all have the same batch, number of KV
            heads and head dims. With several queries a sequence the segments are in the order of
            their tokens, except that sinks (the first Segment.sinks rows of a ring) come first:
            [packed, ring with sinks] means sinks, packed rows, recent tokens.
        sm_scale, num_splits, return_lse: as in decode_attention.
        q_lens: [batch], int32, with q of four axes: how many of q_len are queries; None for
            all.
        variant: what the model changes in attention; None for plain attention.
        backend: "cpu", "cuda" or "reference"; by the device of q when None.
        q_indptr: [batch + 1], int32: each sequence's first row in a ragged q (see indptr.py).
        padded: whether rows of a ragged q may follow those of the last sequence.
    """

    q: torch.Tensor
    segments: Sequence[Segment]
    sm_scale: float | None = None
    num_splits: int | None = None
    return_lse: bool = False
    q_lens: torch.Tensor | None = None
    variant: AttentionVariant | None = None
    backend: str | None = None
    q_indptr: torch.Tensor | None = None
    padded: bool = False


class LatentPrefix(NamedTuple):
    """First tokens that sequences have in common, read once for all of them.

    Attributes:
        rows: the tokens of one sequence (batch 1), linear or in pages; may be empty. Queries
            come after these tokens; only the query of a sequence with one query may be the last of
            them.
        shares: [batch], int32: 1 where a sequence begins with the prefix, else 0.
    """

    rows: Segment
    shares: torch.Tensor


class LatentCall(NamedTuple):
    """What a call of attention over latent rows asks for.

    Attributes:
        q_latent: [batch, num_heads, latent_dim], or [batch, q_len, num_heads, latent_dim]: W_UK^T q
            of each head; float32, bfloat16 or float16.
        q_rope: the same shape but for its last axis, rope_dim, and the same dtype.
        segments: of latent_segment, ordered as in AttentionCall; on CUDA at most two.
        sm_scale: factor on the scores.
        num_splits, return_lse, q_lens, backend: as in AttentionCall.
        prefix: tokens before those of the segments; None without. On CUDA the queries of all
            sequences are multiplied with it.
    """

    q_latent: torch.Tensor
    q_rope: torch.Tensor
    segments: Sequence[Segment]
    sm_scale: float
    num_splits: int | None = None
    return_lse: bool = False
    q_lens: torch.Tensor | None = None
    prefix: LatentPrefix | None = None
    backend: str | None = None

    @property
    def all_segments(self) -> list[Segment]:
        return [*([] if self.prefix is None else [self.prefix.rows]), *self.segments]


class AppendSide(NamedTuple):
    """K or V of an append: new rows, where they are written, and how.

    Attributes:
        x: [num_tokens, num_kv_heads, head_dim], the new rows.
        rows: [num_pages, num_kv_heads, page_size, row_bytes], uint8.
        fmt: format of rows.
        exact_rows: [max_num_seqs, num_kv_heads, exact_len, 16-bit row bytes], uint8, or None.
        transform: what is done to x before it is stored.
    """

    x: torch.Tensor
    rows: torch.Tensor
    fmt: RowFormat
    exact_rows: torch.Tensor | None = None
    transform: Encoding = Encoding()

    @property
    def is_calibrated(self) -> bool:
        """Whether CUDA needs more than one plain launch."""
        return not (self.transform.matrix is None and self.transform.feedback is None)

    @property
    def is_rounded(self) -> bool:
        """Whether rows are clipped or rounded with feedback."""
        return not (self.transform.clip is None and self.transform.feedback is None)


class AppendCall(NamedTuple):
    """The arguments of append_rows; `bad` [2], int32, counts NaN rows of K and of V."""

    k: AppendSide
    v: AppendSide
    slots: Slots
    exact_format: str = "bf16"
    rope: Rope | None = None
    bad: torch.Tensor | None = None
