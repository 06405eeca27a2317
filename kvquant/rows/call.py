"""One call of attention, as it is passed from the public function to the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .segment import Segment
from .variant import AttentionVariant


class AttentionCall(NamedTuple):
    """What a call of attention asks for.

    A named tuple, because one is made in every call: a frozen dataclass takes .5 microseconds more.

    Attributes:
        q: [batch, num_q_heads, head_dim], or [batch, q_len, num_q_heads, head_dim] for the queries
            of each sequence's last tokens; float32, bfloat16 or float16.
        segments: rows to attend to, at least one segment; all have the same batch, number of KV
            heads and head dims. With several queries a sequence the segments are in the order of
            their tokens, but that the first Segment.sinks rows of a ring come before all others:
            [packed, ring with sinks] are sinks, packed rows, recent tokens.
        sm_scale: factor on q·k; 1 / sqrt(head_dim) when None.
        num_splits: splits of the tokens, as in decode_attention; chosen when None.
        return_lse: whether the log-sum-exp is wanted.
        q_lens: [batch], int32, with q of four axes: how many of q_len are queries, the first ones;
            all when None.
        variant: what the model changes in attention; None for plain attention.
        backend: "cpu", "cuda" or "reference"; by the device of q when None.
    """

    q: torch.Tensor
    segments: Sequence[Segment]
    sm_scale: float | None = None
    num_splits: int | None = None
    return_lse: bool = True
    q_lens: torch.Tensor | None = None
    variant: AttentionVariant | None = None
    backend: str | None = None


class LatentPrefix(NamedTuple):
    """First tokens that sequences have in common, read once for all of them.

    Attributes:
        rows: the tokens, of one sequence (batch 1), linear or in pages; none of them is one of the
            queries', but that a sequence's only query may be the last one's. Their number may be 0.
        shares: [batch], int32: whether each sequence begins with them: 1 or 0.
    """

    rows: Segment
    shares: torch.Tensor


class LatentCall(NamedTuple):
    """What a call of attention over latent rows asks for.

    Attributes:
        q_latent: [batch, num_heads, latent_dim], or [batch, q_len, num_heads, latent_dim]: W_UK^T q
            of each head; float32, bfloat16 or float16.
        q_rope: the same shape but for its last axis, rope_dim, and the same dtype.
        segments: of ops.mla.latent_segment; of several queries in the order that AttentionCall
            states, and on CUDA at most two of them. There each is a launch, cut into num_splits,
            and another one combines them.
        sm_scale: factor on the scores.
        num_splits, return_lse, q_lens, backend: as in AttentionCall.
        prefix: tokens before those of the segments, in which they are not; None if there are none.
            On CUDA all sequences' queries are multiplied with it, whether they share it or not.
    """

    q_latent: torch.Tensor
    q_rope: torch.Tensor
    segments: Sequence[Segment]
    sm_scale: float
    num_splits: int | None = None
    return_lse: bool = True
    q_lens: torch.Tensor | None = None
    prefix: LatentPrefix | None = None
    backend: str | None = None

    @property
    def all_segments(self) -> list[Segment]:
        """The segments, and before them that of the prefix."""
        return [*([] if self.prefix is None else [self.prefix.rows]), *self.segments]
