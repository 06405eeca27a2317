"""Which layers of a model a cache holds, and why it cannot hold the others.

A cache holds layers whose keys and values have one shape. Other layers of a hybrid keep their own
state in 16 bit. If a layer attends to another one's keys, its queries and projections count there.
"""

from __future__ import annotations

from typing import Any

import torch

from kvquant.errors import UnsupportedModelError
from kvquant.hf.model import CachedModel
from kvquant.hf.models.configs import CacheLayers
from kvquant.hf.models.observe import Observer

from .moments import LayerMoments, Moments


class HeldLayers:
    """A model as its cache sees it: the layers of the cache, counted from 0."""

    def __init__(self, model: CachedModel, layers: CacheLayers) -> None:
        self.model, self._layers = model, layers

    def observe(self, tokens: torch.Tensor, observer: Observer, begin: float = 0.0) -> None:
        def show(layer: int, *shown: Any) -> None:
            if layer in self._layers.at:
                observer(self._layers.at[layer], *shown)

        self.model.observe(tokens, show, begin)

    def output_weights(self) -> dict[int, torch.Tensor]:
        weights = self.model.output_weights()
        found = {}
        for layer, at in self._layers.at.items():
            readers = [layer, *_readers(layer, self._layers)]
            parts = [weights[reader] for reader in readers if reader in weights]
            if parts:
                found[at] = torch.cat(parts) if len(parts) > 1 else parts[0]
        return found


def left_out(moments: Moments, layers: CacheLayers) -> dict[int, str]:
    """Why the model's other layers are not in its cache.

    Args:
        moments: of all layers that attend.
        layers: of the cache.

    Raises:
        UnsupportedModelError: caches have rows for layers that do not attend by themselves.
    """
    rows = layers.num_kv_heads, layers.k_dims[0], layers.v_dims[0]
    shapes = {layer: _shape(at) for layer, at in moments.layers.items()}
    if odd := [layer for layer in layers.places if shapes.get(layer) != rows]:
        raise UnsupportedModelError(
            f"caches of this model have rows for layers {odd}, and no such layers attend: it runs "
            "its layers several times, or with other heads than its config says, and a plan has no "
            "bases for these. Use a cache without a plan; kvquant evaluate measures its KL"
        )
    owners = layers.shared.items()
    why = {at: f"attends to the keys and values of layer {owner}" for at, owner in owners}
    why |= layers.others
    others = [layer for layer in range(layers.count) if layer not in layers.at]
    return {layer: f"it {why.get(layer, 'has no keys and values')}" for layer in others}


def renumbered(moments: Moments, layers: CacheLayers) -> Moments:
    """Moments of the cache's layers, from 0; shared layers' queries go to their keys' layer."""
    held = Moments()
    for layer, at in layers.at.items():
        readers = [moments.layers[reader] for reader in _readers(layer, layers)]
        held.layers[at] = moments.layers[layer].with_queries(readers)
    return held


def _readers(layer: int, layers: CacheLayers) -> list[int]:
    """The layers that attend to the keys and values of this one."""
    return sorted(reader for reader, owner in layers.shared.items() if owner == layer)


def _shape(at: LayerMoments) -> tuple[int, int, int]:
    """KV heads, channels of a key and of a value."""
    (heads, k_dim), v_dim = at.tensors["k_sum"].shape, at.tensors["v_sum"].shape[1]
    return heads, k_dim, v_dim
