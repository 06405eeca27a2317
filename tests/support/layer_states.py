"""Small layers, steps and crops drawn at random, and what placing tokens makes of a layer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from kvquant import debug
from kvquant.cache import layer
from kvquant.cache.layer import LayerCache
from kvquant.ops import slots
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
    found: list[Slots] = []
    counts = None if new_lens is None else torch.tensor(new_lens).clamp(0, new_tokens)
    rows = torch.zeros(len(at.seq_lens), 1, new_tokens, FORMAT.head_dim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(debug, "is_recorded", lambda tensor: True)
        patch.setattr(slots, "_are_on_cpu", lambda *tensors: False)  # torch's way
        patch.setattr(layer, "write_rows", lambda call, **options: found.append(call.slots))
        at.append(rows, rows, counts, torch.zeros(2, dtype=torch.int32), overflow)
    return found[0]


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
