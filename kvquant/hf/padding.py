"""Padding: which columns of a batch hold tokens. transformers counts columns, a KVCache tokens.

    columns     0 1 2 3 4 5        tokens    0 1 2 3 4 5
    ids         · · a b c d                  a b c d
    attention   0 0 1 1 1 1                  e f g h i
    _mask       0 1 1 1 1 1

Padding may stand on the left, on the right or between the turns of a conversation. All of it is
known on the host: masks of several tokens are read once, in a step every column holds a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Padding:
    """The new columns of one call, some of which hold no token.

    Args:
        kept: [batch, columns] bool: those that hold one.
        on_host: the same, on the CPU.

    Attributes:
        on_host: as above.
        counts: tokens of each sequence.
        lens: [batch] int32, the same on the device of kept.
        order: [batch, columns] int64: the columns, those with tokens first; None if they are.
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
        """The same, with its tensors on a device."""
        if device == self.lens.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = Padding(self.on_host.to(device), self.on_host)
        return self._elsewhere[device]

    @classmethod
    def behind(cls, lens: torch.Tensor, columns: int, device: torch.device) -> Padding:
        """Padding behind the first lens[b] of the columns.

        Args:
            lens: [batch], on the CPU.
        """
        on_host = torch.arange(columns, device="cpu") < lens[:, None]
        return cls(on_host.to(device), on_host)

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """[batch, heads, columns, elements] with the tokens first, what padding holds behind."""
        if self.order is None:
            return states
        return states.take_along_dim(self.order[:, None, :, None], dim=2)

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """What was packed, in its columns again."""
        if self.order is None:
            return states
        return states.take_along_dim(self._places[:, None, :, None], dim=2)

    def first(self, columns: torch.Tensor) -> torch.Tensor:
        """[batch, columns] -> [batch]: what the first token of each sequence has."""
        return columns[:, 0] if self.order is None else columns.gather(1, self.order[:, :1])[:, 0]


class Columns:
    """All columns that a cache was given; it does not change, what comes makes another one.

    Args:
        length: columns.
        padding: where it is: the first column of a part, and [batch, columns] bool, on the CPU,
            which of these hold tokens.
        pads: columns of each sequence that hold none.

    Attributes:
        length, pads: as above.
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
        """Of sequences of which lengths are all that is known: shorter ones have padding first."""
        length = max(lens)
        pads = [length - one for one in lens]
        if not any(pads):
            return cls(length, pads)
        begins = torch.tensor(pads, device="cpu")[:, None]
        return cls(length, pads, ((0, torch.arange(length, device="cpu") >= begins),))

    @property
    def lens(self) -> list[int]:
        """Tokens of each sequence."""
        return [self.length - pads for pads in self.pads]

    def with_more(self, columns: int, padding: Padding | None) -> Columns:
        """With those of a call behind them."""
        if padding is None:
            return Columns(self.length + columns, self.pads, self._padding)
        pads = [own + columns - n for own, n in zip(self.pads, padding.counts, strict=True)]
        parts = *self._padding, (self.length, padding.on_host)
        return Columns(self.length + columns, pads, parts)

    def without_last(self, columns: int) -> Columns:
        """Without the last ones, whatever they hold."""
        length = max(self.length - columns, 0)
        parts = tuple(
            (first, kept[:, : length - first]) for first, kept in self._padding if first < length
        )
        return self._of_parts(length, parts, len(self.pads))

    def take(self, index: Sequence[int]) -> Columns:
        """Those of the sequences at these places."""
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
