"""Slots: where the rows of new tokens go.

    packed slot = page * page_size + place in the page     (a contiguous cache: page = sequence)
    exact slot  = sequence slot * exact_len + row          (the 16-bit rows: sinks, then a ring)

A token goes to a sink, to a ring row, or straight to a packed row: the last if recent_len or more
tokens follow it in the call. A token in a ring row replaces an older one. The append packs the
older token first, from its 16-bit values, unless a packed row holds it:

    evicted    exact row now at the token's exact slot  ->  packed slot
    exact      the new token, in 16 bit                 ->  exact slot

A KVCache packs each token after the sinks when it comes. It also writes the last ones into the ring
(ops.slots.place_tokens). The lengths decide which row is read.

Negative slots write nothing. Slots are computed where the lengths are, without a wait for a GPU.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Index = TypeVar("Index", int, Ints, torch.Tensor)  # among the tokens behind the sinks
Lens = TypeVar("Lens", Ints, torch.Tensor)


class Slots(NamedTuple):
    """Where each new token goes; [num_tokens] int64 each, contiguous, negative: nowhere.

    Attributes:
        packed: slot of the token in the packed rows. The append ignores it where `evicted` is not
            negative.
        exact: slot of the token in the 16-bit rows; None where there are none of these.
        evicted: packed slot of the row that stands at the token's exact slot before the call.
    """

    packed: torch.Tensor
    exact: torch.Tensor | None = None
    evicted: torch.Tensor | None = None


class SlotsCall(NamedTuple):
    """The arguments of ops.slots.slots_of."""

    seq_lens: torch.Tensor
    packed_lens: torch.Tensor
    new_lens: torch.Tensor | None
    new_tokens: int
    page_size: int
    sink_len: int = 0
    recent_len: int = 0
    block_table: torch.Tensor | None = None
    seq_slots: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        names = "seq_lens", "packed_lens", "new_lens", "block_table", "seq_slots"
        return {name: getattr(self, name) for name in names}


def reference_slots(call: SlotsCall) -> Slots:
    """The slots of new tokens in plain torch; see ops.slots.slots_of."""
    seq_lens, packed_lens, new_lens, new_tokens, page_size, sink_len, recent_len = call[:7]
    block_table, seq_slots = call[7:]
    offsets = torch.arange(new_tokens, device=seq_lens.device)
    old_lens, first = seq_lens.long()[:, None], packed_lens.long()[:, None]
    new_lens = torch.full_like(seq_lens, new_tokens) if new_lens is None else new_lens
    is_new = offsets < new_lens[:, None]
    seq_lens_after = old_lens + is_new.sum(1, keepdim=True)
    split = Split(sink_len, recent_len, page_size)
    last = split.packed_lens(seq_lens_after, first)

    index = old_lens + offsets - sink_len  # among the tokens behind the sinks
    is_packed = is_new & (index >= 0) & (index < last)
    packed = _packed_slots(index, is_packed, split, block_table)
    if not split.exact_len:
        return Slots(packed.flatten())
    is_exact = is_new & ~is_packed
    seq_slot = (
        torch.arange(len(seq_lens), device=seq_lens.device)
        if seq_slots is None
        else seq_slots.long()
    )
    row = split.exact_row(index)
    exact = torch.where(is_exact, seq_slot[:, None] * split.exact_len + row, -1)
    leaver = first + split.ring_row(index - first)  # that may stand in the same row
    leaves = is_exact & (index >= 0) & (leaver < old_lens - sink_len)
    evicted = _packed_slots(leaver, leaves, split, block_table)
    return Slots(packed.flatten(), exact.flatten(), evicted.flatten())


def _packed_slots(
    index: torch.Tensor, chosen: torch.Tensor, split: Split, block_table: torch.Tensor | None
) -> torch.Tensor:
    """Packed slots of the tokens index [batch, new_tokens] after the sinks; -1 if not chosen."""
    if block_table is None:
        page = torch.arange(len(index), device=index.device)[:, None]
        return torch.where(chosen, page * split.page_size + split.page_row(index), -1)
    index = torch.where(chosen, index, 0)
    page = block_table.long().gather(1, index // split.page_size)
    return torch.where(chosen, page * split.page_size + split.page_row(index), -1)


class Split(NamedTuple):
    """How the tokens of a sequence are split, and which row a token has.

        tokens    0 ... sink_len          ...            n - recent_len ...  n
                  ├─ sinks ─┤├───────── packed ─────────┤├────── recent ─────┤
        rows      16-bit      pages, by the table          16-bit

        16-bit rows of a sequence slot   [0, sink_len) the sinks, then a ring of ring_len rows:
                               token i >= sink_len has row sink_len + ring_row(i - sink_len)
        packed rows            token i has the index i - sink_len

    In pages a row is quantized once, when it leaves the recent window. After a truncation into the
    packed tokens the window is empty and fills again. A KVCache has both rows of the last tokens
    (cache/layer.py).

    Attributes:
        sink_len, recent_len: first and last tokens kept in 16 bit.
        page_size: packed tokens a page holds.
        rollback_len: tokens before the recent ones that are in 16 bit in the ring, too.
    """

    sink_len: int
    recent_len: int
    page_size: int
    rollback_len: int = 0

    @classmethod
    def of(cls, sink_len: int, recent_len: int, page_size: int, max_seq_len: int) -> Split:
        """The split for sequences of up to max_seq_len tokens, without rows that none can fill."""
        sink_len = min(sink_len, max_seq_len)
        return cls(sink_len, min(recent_len, max_seq_len - sink_len), page_size)

    @property
    def ring_len(self) -> int:
        return self.recent_len + self.rollback_len

    @property
    def exact_len(self) -> int:
        return self.sink_len + self.ring_len

    def ring_row(self, index: Index) -> Index:
        """The ring row of the token with this index after the sinks."""
        return index % max(self.ring_len, 1)

    def exact_row(self, index: torch.Tensor) -> torch.Tensor:
        """The slot's row of the token with this index after the sinks; a sink's index is < 0."""
        return torch.where(index < 0, index, self.ring_row(index)) + self.sink_len

    def page_row(self, index: Index) -> Index:
        """The row in its page; without pages, the row in the packed ring."""
        return index % self.page_size

    def num_pages(self, packed_len: Index) -> Index:
        return -(-packed_len // self.page_size)

    def packed_len(self, length: int) -> int:
        """Packed tokens of a sequence that grew to this length in pages."""
        return max(length - self.sink_len - self.recent_len, 0)

    def exact_rows(self, length: int, packed_len: int) -> Ints:
        """The rows of a sequence's 16-bit tokens in its slot, in token order."""
        recent = np.arange(packed_len, max(length - self.sink_len, 0))
        ring = self.sink_len + self.ring_row(recent)
        return np.concatenate([np.arange(min(length, self.sink_len)), ring])

    def packed_lens(self, lengths: Lens, before: Lens) -> Lens:
        """Packed tokens [batch] of sequences that have grown: those that have left the window."""
        most = torch.maximum if isinstance(before, torch.Tensor) else np.maximum
        return most(before, lengths - (self.sink_len + self.recent_len))


class TokenSlots(NamedTuple):
    """Slots of new tokens and their positions, [num_tokens] each; see slots.Slots."""

    packed: Ints
    exact: Ints
    evicted: Ints
    positions: Ints


def token_slots(
    split: Split,
    seq_slots: Ints,
    lengths: Ints,
    packed_lens: Ints,
    counts: Ints,
    tables: NDArray[np.int32],
) -> TokenSlots:
    """The slots of counts[i] tokens after the first lengths[i] of each sequence.

    seq_slots, lengths, packed_lens and counts are [batch], from before the step; tables
    [max_num_seqs, max_pages] holds the pages after it.
    """
    sink_len, recent_len, page_size, _ = split
    first = lengths - sink_len
    index, end, seq_slot, before = first, first + counts, seq_slots, packed_lens
    if (counts != 1).any():  # else a token is its own owner
        owner = np.repeat(np.arange(len(counts)), counts)
        index = np.arange(len(owner)) + (end - np.cumsum(counts))[owner]
        first, end, seq_slot, before = first[owner], end[owner], seq_slots[owner], before[owner]
    sink = index < 0
    recent = (index >= end - recent_len) & ~sink

    def packed_slot(at: Ints, chosen: NDArray[np.bool_]) -> Ints:
        if not chosen.any():
            return np.full(len(at), -1)
        page = tables[seq_slot, np.where(chosen, at // page_size, 0)].astype(np.int64)
        return np.where(chosen, page * page_size + split.page_row(at), -1)

    row = np.where(sink, index + sink_len, sink_len + split.ring_row(index))
    exact = np.where(sink | recent, seq_slot * split.exact_len + row, -1)
    old = before + split.ring_row(index - before)  # of this ring row, if it was in use
    evicted = packed_slot(old, recent & (old < first))
    packed = packed_slot(index, ~(sink | recent))
    return TokenSlots(packed, exact, evicted, index + sink_len)
