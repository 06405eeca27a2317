"""Small layers, steps and crops drawn at random, and what placing tokens makes of a layer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from kvquant.cache import layer
from kvquant.cache.layer import LayerCache
from kvquant.rows.format import RowFormat
from kvquant.rows.slots import Slots

SPARE = 6
FORMAT = RowFormat.parse("int8", 64)


class Split(NamedTuple):
    """Sizes of a layer, small ones."""

    sink_len: int
    recent_len: int
    max_seq_len: int
    window: int | None = None
    rollback_len: int = 64


SPLITS = {
    "no 16-bit rows": Split(0, 0, 30),
    "sinks": Split(3, 0, 30),
    "recent": Split(0, 5, 30),
    "both": Split(3, 5, 30),
    "one recent": Split(2, 1, 30),
    "16-bit rows only": Split(3, 5, 8),
    "window": Split(3, 4, 60, 12),
    "window all recent": Split(0, 9, 60, 5),
    "window without recent": Split(0, 0, 60, 7),
    "few to roll back": Split(3, 5, 40, None, 2),
    "window, few to roll back": Split(0, 4, 60, 12, 3),
    "window longer than the cache": Split(0, 4, 30, 100),
}


def make_layer(split: Split, batch: int, device: str = "cpu") -> LayerCache:
    """An empty layer; rings of windows close soon."""
    sink_len, recent_len, max_seq_len, window, rollback_len = split
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "SPARE", SPARE)
        formats = (FORMAT, FORMAT, sink_len, recent_len, "bf16")
        options: dict[str, Any] = {"window": window, "rollback_len": rollback_len}
        return LayerCache(batch, 1, max_seq_len, *formats, torch.device(device), **options)


def place(
    at: LayerCache, new_lens: Sequence[int] | None, new_tokens: int, overflow: torch.Tensor
) -> Slots:
    """The reference: slots, lengths and overflow of a step whose lengths are not read."""
    wanted = torch.full_like(at.seq_lens, new_tokens)
    if new_lens is not None:
        wanted = torch.tensor(new_lens).clamp(0, new_tokens).int()
    counts = torch.minimum(wanted, at.max_seq_len - at.seq_lens)
    overflow += (wanted - counts).sum()
    found = torch.full((2, len(wanted), new_tokens), -1)  # packed, exact
    seq_lens, split = at.seq_lens + counts, at.split
    for b, (old, new) in enumerate(zip(at.seq_lens.tolist(), seq_lens.tolist(), strict=True)):
        for place, token in enumerate(range(old, new)):
            index, end = token - at.sink_len, new - at.sink_len
            first = b * split.exact_len + at.sink_len
            if index < 0:
                found[1, b, place] = first + index
                continue
            if at.packed_len and (at.window is None or index >= end - at.packed_len):
                found[0, b, place] = b * split.page_size + split.page_row(index)
            if index >= end - split.ring_len:
                found[1, b, place] = first + split.ring_row(index)
    at.set_lens(seq_lens, split.packed_lens(seq_lens, at.packed_lens))
    packed, exact = found.flatten(1)
    return Slots(packed, exact, torch.full_like(exact, -1)) if split.exact_len else Slots(packed)


def random_lens(draw: random.Random, batch: int, new_tokens: int) -> list[int] | None:
    """New tokens of each sequence; more and fewer than can be, too."""
    if draw.random() < 0.2:
        return None
    return [draw.choice([0, 1, new_tokens, draw.randint(-1, new_tokens + 1)]) for _ in range(batch)]


def random_crop(draw: random.Random, at: LayerCache) -> None:
    """Drop tokens as far as the layer can go back, or all."""
    wanted = at.seq_lens - torch.tensor([draw.choice([0, 1, 4, 100]) for _ in at.seq_lens])
    wanted = wanted.clamp(min=0)
    if at.window is not None:
        gone = ((wanted - at.window).clamp(min=0) < at.firsts) & (wanted > 0)
        wanted = torch.where(gone, at.seq_lens, wanted)
    at.crop(wanted)
