"""Which layers of a model a cache holds, and why it cannot hold the others.

A cache holds layers whose keys and values have one shape. Other layers of a hybrid keep their own
state in 16 bit. If a layer attends to another one's keys, its queries and projections count there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvquant.errors import UnsupportedModelError
from kvquant.hf.model import CachedModel
from kvquant.hf.models.configs import CacheLayers
from kvquant.hf.models.observe import Observer

from .moments import LayerMoments, Moments


class HeldLayers:
    """A model as its cache sees it: the layers of the cache, counted from 0.

    Args:
        model: of all layers.
        places: the model's layer at each place of the cache.
        shared: layers that attend to the keys and values of another one, and that one.
    """

    def __init__(self, model: CachedModel, places: list[int], shared: Mapping[int, int]) -> None:
        self.model, self._shared = model, shared
        self._at = {layer: at for at, layer in enumerate(places)}

    def observe(self, tokens: torch.Tensor, observer: Observer, begin: float = 0.0) -> None:
        def show(layer: int, *shown: Any) -> None:
            if layer in self._at:
                observer(self._at[layer], *shown)

        self.model.observe(tokens, show, begin)

    def output_weights(self) -> dict[int, torch.Tensor]:
        weights = self.model.output_weights()
        found = {}
        for layer, at in self._at.items():
            readers = [layer, *_readers(layer, self._shared)]
            parts = [weights[reader] for reader in readers if reader in weights]
            if parts:
                found[at] = torch.cat(parts) if len(parts) > 1 else parts[0]
        return found


def held_layers(
    moments: Moments, cached: CacheLayers, shared: Mapping[int, int]
) -> tuple[list[int], dict[int, str]]:
    """The model's layer at each index of the cache, and why others have none, by their layer.

    Args:
        moments: of all layers that attend.
        cached: the layers of caches.
        shared: as of HeldLayers.

    Raises:
        UnsupportedModelError: caches have rows for layers that do not attend by themselves.
    """
    rows = cached.num_kv_heads, cached.k_dims[0], cached.v_dims[0]
    places, shapes = [*cached.places], {layer: _shape(at) for layer, at in moments.layers.items()}
    if odd := [layer for layer in places if shapes.get(layer) != rows or layer in shared]:
        raise UnsupportedModelError(
            f"caches of this model have rows for layers {odd}, and no such layers attend: it runs "
            "its layers several times, or with other heads than its config says, and a plan has no "
            "bases for these. Use a cache without a plan; kvquant evaluate measures its KL"
        )
    owners = {at: f"attends to the keys and values of layer {own}" for at, own in shared.items()}
    why = owners | dict(cached.others)
    left = [layer for layer in range(cached.count) if layer not in places]
    return places, {layer: f"it {why.get(layer, 'has no keys and values')}" for layer in left}


def renumbered(moments: Moments, places: list[int], shared: Mapping[int, int]) -> Moments:
    """Moments of the cache's layers, from 0; shared layers' queries go to their keys' layer."""
    held = Moments()
    for at, layer in enumerate(places):
        readers = [moments.layers[reader] for reader in _readers(layer, shared)]
        held.layers[at] = moments.layers[layer].with_queries(readers)
    return held


def _readers(layer: int, shared: Mapping[int, int]) -> list[int]:
    """The layers that attend to the keys and values of this one."""
    return sorted(reader for reader, owner in shared.items() if owner == layer)


def _shape(at: LayerMoments) -> tuple[int, int, int]:
    """KV heads, channels of a key and of a value."""
    (heads, k_dim), v_dim = at.tensors["k_sum"].shape, at.tensors["v_sum"].shape[1]
    return heads, k_dim, v_dim
