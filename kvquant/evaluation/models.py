"""What an evaluation needs of hybrids, whose layers are partly outside of a KVCache.

Besides CachedModel's methods they copy states after a prompt, and give facts for the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvquant.hf.hybrid import HybridModel
from kvquant.text import spans

if TYPE_CHECKING:
    from kvquant.hf.model import CachedModel


def notes(model: CachedModel) -> Iterator[str]:
    """Sentences for the report: which layers no cache holds, and how the model attends."""
    if not isinstance(model, HybridModel):
        return
    layers = model.layers
    reasons: dict[str, list[int]] = {}
    for layer, why in layers.others.items():
        reasons.setdefault(why, []).append(layer)
    for why, numbers in reasons.items():
        are, them, each = ("is", "it", "It") if len(numbers) == 1 else ("are", "them", "Each")
        yield (
            f"{_named(numbers)} of {layers.count} {are} kept as transformers keeps layers, alike "
            f"for all caches, and no figure of bits or bytes counts {them}. {each} {why}."
        )
    if layers.states:
        yield (
            f"{_named(layers.states)} of {layers.count} have a state beside attention. The state "
            "is copied with each cache, and no figure of bits or bytes counts it."
        )
    if model.dequantizes:
        yield (
            "This model computes attention by itself, so each call gets dequantized rows (as by "
            "QuantizedCache with dequantize=True)."
        )


def _named(numbers: list[int] | tuple[int, ...]) -> str:
    return f"{'Layer' if len(numbers) == 1 else 'Layers'} {spans(numbers)}"
