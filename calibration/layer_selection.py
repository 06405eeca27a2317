"""Which layers of a model a cache holds, and why it cannot hold the others.

A cache holds layers whose keys and values have one shape. Other layers of a hybrid keep their own
state in 16 bit. If a layer attends to another one's keys, its queries and projections count there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from kvquant.errors import UnsupportedError, UnsupportedModelError
from kvquant.hf.model import CachedModel
from kvquant.hf.models.configs import CacheLayers
from kvquant.hf.models.observe import Observer
from kvquant.rows.format import HEAD_DIMS

from .moments import LayerMoments, Moments


class HeldLayers:
    """A model as its cache sees it: the layers of the cache, counted from 0.

    Args:
        model: of all layers.
        places: the model's layer at each place of the cache.
        shared: layers that attend to the keys and values of another one, and that one.
    """

    def __init__(
        self, model: CachedModel, places: list[int], shared: Mapping[int, int] | None = None
    ) -> None:
        self.model, self.places, self._shared = model, places, shared or {}
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
    moments: Moments,
    config: Any,
    shared: Mapping[int, int] | None = None,
    cached: CacheLayers | None = None,
) -> tuple[list[int], dict[int, str]]:
    """The model's layer at each index of the cache, and why others have none, by their layer.

    Args:
        moments: of all layers that attend.
        shared: as of HeldLayers.
        config: of the text model: num_hidden_layers and layer_types.
        cached: the layers of caches by the config, if known; else those of the most frequent row
            shape.

    Raises:
        UnsupportedError: no cache can hold any layer.
        UnsupportedModelError: caches have rows for layers that do not attend by themselves.
    """
    shared = shared or {}
    shapes = {layer: _shape(at) for layer, at in moments.layers.items() if layer not in shared}
    possible = [
        shape
        for layer, shape in shapes.items()
        if moments.layers[layer].is_latent or set(shape[1:]) <= set(HEAD_DIMS)
    ]
    if not possible:
        heads, k_dim, v_dim = next(iter(shapes.values()))
        raise UnsupportedError(
            f"no layer of this model can be held by a cache: rows of K are {k_dim} wide, of V "
            f"{v_dim}; possible are {', '.join(map(str, HEAD_DIMS))}"
        )
    usual, places = Counter(possible).most_common(1)[0][0], [*shapes]
    why: Mapping[int, str] = {}
    if cached is not None:
        places, why = [*cached.places], cached.others
        if missing := [layer for layer in places if layer not in shapes]:
            raise UnsupportedModelError(
                f"caches of this model have rows for layers {missing}, and no such layers attend: "
                "it runs its layers several times, and a plan has no bases for each run. Use a "
                "cache without a plan; kvquant evaluate measures its KL"
            )
        usual = shapes[places[0]]
    heads, k_dim, v_dim = usual
    kinds = getattr(config, "layer_types", None) or []
    count = max(getattr(config, "num_hidden_layers", 0), *(layer + 1 for layer in moments.layers))
    others = {}
    for layer in range(count):
        if layer in shared:
            others[layer] = f"it attends to the keys and values of layer {shared[layer]}"
        elif layer not in shapes:
            kind = f" ({kinds[layer]})" if layer < len(kinds) else ""
            others[layer] = f"it has no keys and values{kind}"
        elif shapes[layer] != usual:
            own = shapes[layer]
            others[layer] = (
                f"its {own[0]} KV heads of {own[1]} and {own[2]} elements differ from the {heads} "
                f"of {k_dim} and {v_dim} of the cache"
            )
        elif layer not in places:
            others[layer] = why.get(layer, "caches do not have it")
    return [layer for layer in sorted(shapes) if layer not in others], others


def renumbered(
    moments: Moments, places: list[int], shared: Mapping[int, int] | None = None
) -> Moments:
    """Moments of the cache's layers, from 0; shared layers' queries go to their keys' layer."""
    held = Moments()
    for at, layer in enumerate(places):
        readers = [moments.layers[reader] for reader in _readers(layer, shared or {})]
        held.layers[at] = moments.layers[layer].with_queries(readers)
    return held


def _readers(layer: int, shared: Mapping[int, int]) -> list[int]:
    """The layers that attend to the keys and values of this one."""
    return sorted(reader for reader, owner in shared.items() if owner == layer)


def _shape(at: LayerMoments) -> tuple[int, int, int]:
    """KV heads, channels of a key and of a value."""
    (heads, k_dim), v_dim = at.tensors["k_sum"].shape, at.tensors["v_sum"].shape[1]
    return heads, k_dim, v_dim
