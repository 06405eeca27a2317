"""Padding: which columns of a batch hold tokens. transformers counts columns, a KVCache tokens.

    columns     0 1 2 3 4 5        tokens    0 1 2 3 4 5
    ids         · · a b c d                  a b c d
    attention   0 0 1 1 1 1                  e f g h i
    _mask       0 1 1 1 1 1

Padding may stand on the left, on the right or between turns. The host knows all of it: it reads
masks of several tokens once, and in a step every column holds a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Padding:
    """The new columns of one call, some of which hold no token.

    Attributes:
        on_host: [batch, columns] bool on the CPU: columns that hold a token.
        counts: tokens of each sequence.
        lens: [batch] int32, the same on the device of kept.
        order: [batch, columns] int64: columns with tokens first; None if they already are.
    """

    def __init__(self, kept: torch.Tensor, on_host: torch.Tensor) -> None:
        self.on_host = on_host
        self.counts: list[int] = on_host.sum(1).tolist()
        self.lens = kept.sum(1, dtype=torch.int32)
        self.order: torch.Tensor | None = None
        if bool((on_host[:, 1:] & ~on_host[:, :-1]).any()):
            self.order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)
            self._places = self.order.argsort(1)
        self._elsewhere: dict[torch.device, Padding] = {}

    def on(self, device: torch.device) -> Padding:
        if device == self.lens.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = Padding(self.on_host.to(device), self.on_host)
        return self._elsewhere[device]

    @classmethod
    def behind(cls, lens: torch.Tensor, columns: int, device: torch.device) -> Padding:
        """Padding after the first lens[b] columns; lens is [batch] on the CPU."""
        on_host = torch.arange(columns, device="cpu") < lens[:, None]
        return cls(on_host.to(device), on_host)

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """[batch, heads, columns, elements] with the tokens first."""
        if self.order is None:
            return states
        return states.take_along_dim(self.order[:, None, :, None], dim=2)

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """The inverse of pack."""
        if self.order is None:
            return states
        return states.take_along_dim(self._places[:, None, :, None], dim=2)

    def first(self, columns: torch.Tensor) -> torch.Tensor:
        """[batch, columns] -> [batch]: the value of each sequence's first token."""
        return columns[:, 0] if self.order is None else columns.gather(1, self.order[:, :1])[:, 0]


class Columns:
    """All columns of a cache's texts; immutable.

    Attributes:
        length: columns.
        padding: parts: the first column, and [batch, columns] bool, on the CPU: tokens.
        pads: columns of each sequence that hold no token.
        is_empty: no sequence has a token yet.
        has_empty: a sequence has none, or there is no sequence.
    """

    def __init__(
        self, length: int, pads: list[int], padding: tuple[tuple[int, torch.Tensor], ...] = ()
    ) -> None:
        self.length, self.pads, self._padding = length, pads, padding
        self.is_empty = min(pads, default=length) == length
        self.has_empty = max(pads, default=length) == length

    @classmethod
    def of_lens(cls, lens: Sequence[int]) -> Columns:
        """Columns of sequences with known lengths: shorter ones have padding first."""
        length = max(lens)
        pads = [length - one for one in lens]
        if not any(pads):
            return cls(length, pads)
        begins = torch.tensor(pads, device="cpu")[:, None]
        return cls(length, pads, ((0, torch.arange(length, device="cpu") >= begins),))

    @property
    def lens(self) -> list[int]:
        return [self.length - pads for pads in self.pads]

    def with_more(self, columns: int, padding: Padding | None) -> Columns:
        """With those of a call appended."""
        if padding is None:
            return Columns(self.length + columns, self.pads, self._padding)
        pads = [own + columns - n for own, n in zip(self.pads, padding.counts, strict=True)]
        parts = *self._padding, (self.length, padding.on_host)
        return Columns(self.length + columns, pads, parts)

    def without_last(self, columns: int) -> Columns:
        length = max(self.length - columns, 0)
        parts = tuple(
            (first, kept[:, : length - first]) for first, kept in self._padding if first < length
        )
        return self._of_parts(length, parts, len(self.pads))

    def take(self, index: Sequence[int]) -> Columns:
        places = torch.tensor(index, device="cpu")
        parts = tuple((first, kept[places]) for first, kept in self._padding)
        return self._of_parts(self.length, parts, len(index))

    @classmethod
    def _of_parts(
        cls, length: int, parts: tuple[tuple[int, torch.Tensor], ...], batch: int
    ) -> Columns:
        pads = [0] * batch
        for _, kept in parts:
            pads = [own + n for own, n in zip(pads, (~kept).sum(1).tolist(), strict=True)]
        return cls(length, pads, parts)
