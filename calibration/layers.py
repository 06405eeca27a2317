"""Which layers of a model a cache holds, and those that it cannot, with the reason of each.

A cache holds layers with attention whose keys and values have one shape. A hybrid model has others
between them: they keep their own state, in the precision of the model.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from kvquant.errors import UnsupportedError
from kvquant.layout import HEAD_DIMS

from .choose import ObservableModel, Observer
from .moments import LayerMoments, Moments


class HeldLayers:
    """A model as its cache sees it: the layers of the cache, counted from 0.

    Args:
        model: of all layers.
        places: the model's layer at each place of the cache.
    """

    def __init__(self, model: ObservableModel, places: list[int]) -> None:
        self.model, self.places = model, places
        self._at = {layer: at for at, layer in enumerate(places)}

    def observe(self, tokens: torch.Tensor, observer: Observer) -> None:
        """Show what the layers of the cache attend with; see ObservableModel."""

        def show(layer: int, *shown: Any) -> None:
            if layer in self._at:
                observer(self._at[layer], *shown)

        self.model.observe(tokens, show)

    def output_weights(self) -> dict[int, torch.Tensor]:
        """The output projections of these layers."""
        weights = self.model.output_weights()
        return {at: weights[layer] for layer, at in self._at.items() if layer in weights}

    def windows(self) -> dict[int, int]:
        """The sliding windows of these layers."""
        windows = self.model.windows()
        return {at: windows[layer] for layer, at in self._at.items() if layer in windows}


def held_layers(moments: Moments, config: Any) -> tuple[list[int], dict[int, str]]:
    """Tell the layers that a cache can hold from the others.

    Args:
        moments: of all layers that attend.
        config: of the text model; what it says of num_hidden_layers and layer_types is used.

    Returns:
        The model's layer at each place of the cache, and why others have none, by their layer.

    Raises:
        UnsupportedError: no layer can be held.
    """
    shapes = {layer: _shape(at) for layer, at in moments.layers.items()}
    possible = [shape for shape in shapes.values() if set(shape[1:]) <= set(HEAD_DIMS)]
    if not possible:
        heads, k_dim, v_dim = next(iter(shapes.values()))
        raise UnsupportedError(
            f"no layer of this model can be held by a cache: rows of K are {k_dim} wide, of V "
            f"{v_dim}; possible are {', '.join(map(str, HEAD_DIMS))}"
        )
    heads, k_dim, v_dim = usual = Counter(possible).most_common(1)[0][0]
    kinds = getattr(config, "layer_types", None) or []
    count = max(getattr(config, "num_hidden_layers", 0), *(layer + 1 for layer in shapes))
    others = {}
    for layer in range(count):
        if layer not in shapes:
            kind = f" ({kinds[layer]})" if layer < len(kinds) else ""
            others[layer] = f"it has no keys and values{kind}"
        elif shapes[layer] != usual:
            own = shapes[layer]
            others[layer] = (
                f"its {own[0]} KV heads of {own[1]} and {own[2]} elements differ from the {heads} "
                f"of {k_dim} and {v_dim} of the cache"
            )
    return [layer for layer in sorted(shapes) if layer not in others], others


def renumbered(moments: Moments, places: list[int]) -> Moments:
    """The moments of the layers of the cache, counted from 0."""
    held = Moments()
    held.layers = {at: moments.layers[layer] for at, layer in enumerate(places)}
    held.done = moments.done
    return held


def _shape(at: LayerMoments) -> tuple[int, int, int]:
    """KV heads, channels of a key and of a value."""
    (heads, k_dim), v_dim = at.tensors["k_sum"].shape, at.tensors["v_sum"].shape[1]
    return heads, k_dim, v_dim
