"""Run a model over text and collect the statistics of every layer's keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .observers import ChannelObserver

STATISTICS = ("mean", "std", "min", "max", "absmax", "offset")


class ObservableModel(Protocol):
    """A model that shows its keys and values; kvquant.model.CachedModel is one."""

    def observe(
        self, tokens: torch.Tensor, observer: Callable[[int, torch.Tensor, torch.Tensor], None]
    ) -> None:
        """Call the observer with every layer's index, K and V, as attention meets them."""


@dataclass(frozen=True)
class Statistics:
    """What was observed: one observer per layer, for keys and for values."""

    k: list[ChannelObserver]
    v: list[ChannelObserver]

    @property
    def num_tokens(self) -> int:
        """Tokens seen."""
        return self.k[0].count

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything as float32 tensors, the layers first.

        Returns:
            "k.mean", "k.std", "k.min", "k.max", "k.absmax": [layers, num_kv_heads, head_dim];
            "k.offset", and for each format "k.error.int4-g4": [layers, num_kv_heads]. "v" likewise.
        """
        found = {}
        for kind, layers in (("k", self.k), ("v", self.v)):
            for name in STATISTICS:
                found[f"{kind}.{name}"] = torch.stack([getattr(layer, name) for layer in layers])
            for name in layers[0].errors:
                errors = [layer.errors[name] for layer in layers]
                found[f"{kind}.error.{name}"] = torch.stack(errors)
        return found


def collect(
    model: ObservableModel,
    windows: torch.Tensor,
    formats: Sequence[str],
    *,
    batch: int = 4,
    progress: Callable[[int], None] | None = None,
) -> Statistics:
    """Observe the keys and values of text that a model reads with exact attention.

    Args:
        model: shows its keys and values.
        windows: [num_windows, tokens], int64: each is read by itself, from position 0.
        formats: short names of the formats whose error is measured.
        batch: windows read at a time.
        progress: called with the number of tokens read.

    Returns:
        The statistics over all tokens of all windows.
    """
    k_layers: dict[int, ChannelObserver] = {}
    v_layers: dict[int, ChannelObserver] = {}

    def observe(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        for layers, x in ((k_layers, k), (v_layers, v)):
            if layer not in layers:
                layers[layer] = ChannelObserver(x.shape[1], x.shape[3], formats)
            layers[layer].update(x)

    for part in windows.split(batch):
        model.observe(part, observe)
        if progress:
            progress(part.numel())
    return Statistics(
        [k_layers[layer] for layer in sorted(k_layers)],
        [v_layers[layer] for layer in sorted(v_layers)],
    )
