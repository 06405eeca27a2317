"""Where the new tokens of a step go in a paged cache: numpy, without tensors.

    tokens    0 ... sink_len          ...            n - recent_len ...  n
              ├─ sinks ─┤├───────── packed ─────────┤├────── recent ─────┤
    rows      exact       pages, by the table          exact

    exact rows of a sequence slot   [0, sink_len) the sinks, then a ring of recent_len rows:
                           token i >= sink_len has row sink_len + (i - sink_len) % recent_len
    packed rows            token i has the packed index i - sink_len

A row is quantized once, when it leaves the recent window; what is packed stays packed, so after a
truncation into the packed tokens the window is empty and fills again (see layer.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]


class Split(NamedTuple):
    """How the tokens of a sequence are split.

    Attributes:
        sink_len: first tokens kept in 16 bit.
        recent_len: last tokens kept in 16 bit.
        page_size: packed tokens a page holds.
    """

    sink_len: int
    recent_len: int
    page_size: int

    @classmethod
    def of(cls, sink_len: int, recent_len: int, page_size: int, max_seq_len: int) -> Split:
        """The same for sequences of up to max_seq_len tokens, without rows that none can fill."""
        sink_len = min(sink_len, max_seq_len)
        return cls(sink_len, min(recent_len, max_seq_len - sink_len), page_size)

    @property
    def exact_len(self) -> int:
        """Exact rows of a sequence slot."""
        return self.sink_len + self.recent_len

    def exact_rows(self, length: int, packed_len: int) -> Ints:
        """Where the exact tokens of a sequence stand in its sequence slot, in their order."""
        recent = np.arange(packed_len, max(length - self.sink_len, 0))
        ring = self.sink_len + recent % max(self.recent_len, 1)
        return np.concatenate([np.arange(min(length, self.sink_len)), ring])

    def by_token(
        self, packed: NDArray[Any], exact: NDArray[Any], length: int, packed_len: int
    ) -> NDArray[Any]:
        """What is told of the rows of a sequence in the order of its tokens: [length].

        Args:
            packed: of the rows of its pages, [pages, page_size].
            exact: of the rows of its sequence slot, [exact_len].
            length, packed_len: tokens, and how many of them are packed.
        """
        kept, sinks = exact[self.exact_rows(length, packed_len)], min(length, self.sink_len)
        return np.concatenate([kept[:sinks], packed.reshape(-1)[:packed_len], kept[sinks:]])

    def packed_lens(self, lengths: Ints, before: Ints) -> Ints:
        """Packed tokens of sequences that have grown to these lengths."""
        return np.maximum(before, lengths - self.exact_len)


class TokenSlots(NamedTuple):
    """Where the new tokens go, [num_tokens] each, slots -1 for none; see slots.Slots.

    Attributes:
        packed: page * page_size + place in it, of a token that is quantized at once.
        exact: sequence slot * exact_len + row, of a token that is kept in 16 bit.
        leaving: the packed slot of the row that the token takes the place of in the ring.
        positions: of the token in its sequence.
    """

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
    """The slots of counts[i] tokens after the first lengths[i] ones of each sequence.

    Args:
        split: how tokens are split.
        seq_slots: [batch], the sequence slots of the sequences.
        lengths: [batch], tokens before the step.
        packed_lens: [batch], packed tokens before the step.
        counts: [batch], new tokens.
        tables: [max_num_seqs, max_pages], the pages after the step.
    """
    sink_len, recent_len, page_size = split
    owner = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(owner)) + (lengths - np.cumsum(counts) + counts - sink_len)[owner]
    seq_slot, before, end = (
        seq_slots[owner],
        packed_lens[owner],
        (lengths + counts - sink_len)[owner],
    )
    sink = index < 0
    recent = (index >= end - recent_len) & ~sink

    def packed_slot(at: Ints, chosen: NDArray[np.bool_]) -> Ints:
        page = tables[seq_slot, np.where(chosen, at // page_size, 0)].astype(np.int64)
        return np.where(chosen, page * page_size + at % page_size, -1)

    ring = max(recent_len, 1)
    row = np.where(sink, index + sink_len, sink_len + index % ring)
    exact = np.where(sink | recent, seq_slot * split.exact_len + row, -1)
    old = before + (index - before) % ring  # of this ring row, if it was in use
    evicted = packed_slot(old, recent & (old < (lengths - sink_len)[owner]))
    packed = packed_slot(index, ~(sink | recent))
    return TokenSlots(packed, exact, evicted, index + sink_len)
