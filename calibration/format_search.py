"""Choose the format of K and V of every layer: the fewest bits that keep the predictions.

What a side of a layer costs, in KL, is measured once by decoding with this side alone in the
cheapest format; in another format it is taken to shrink as the square of the weighted error of its
rows. Costs add up, times a factor that the decoding of the whole plan tells. So the best choice of
all is found layer by layer: of the choices for some layers only those count that no other one beats
in both bits and KL. K keeps at least the bits of V, unless V alone was measured to cost more than K
alone, or the sides are the parts of latent rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

Side = tuple[int, str]  # layer, "k" or "v"


@dataclass(frozen=True)
class Costs:
    """What formats cost.

    Attributes:
        kl: for every side and format, nats per token.
        bits: of every format that K may take, per element of a row, cheapest first.
        v_bits: the same of V; that of K when None.
        v_width: elements of a row of V for each of K.
        k_first: whether K keeps at least the bits of V.
    """

    kl: Mapping[Side, Mapping[str, float]]
    bits: Mapping[str, float]
    v_bits: Mapping[str, float] | None = None
    v_width: float = 1.0
    k_first: bool = True

    def total(self, formats: Mapping[Side, str]) -> float:
        """The KL of all sides."""
        return sum(self.kl[side][name] for side, name in formats.items())

    def mean_bits(self, formats: Mapping[Side, str]) -> float:
        """Bits per element."""
        taken = sum(self.row_bits(side, name) for side, name in formats.items())
        return taken / self.width(formats)

    def offered(self, side: Side) -> Mapping[str, float]:
        """Bits per element of every format that a side may take, cheapest first."""
        return self.bits if side[1] == "k" else self.v_bits or self.bits

    def row_bits(self, side: Side, name: str) -> float:
        """Bits of a row of a side, over the elements of a row of K."""
        return self.offered(side)[name] * (1.0 if side[1] == "k" else self.v_width)

    def width(self, sides: Collection[Side]) -> float:
        """Elements of the rows of sides, over those of a row of K."""
        return sum(1.0 if side[1] == "k" else self.v_width for side in sides)


def allocate(
    costs: Costs, *, max_kl: float | None = None, budget: float | None = None
) -> dict[Side, str]:
    """Choose formats: the best of all choices, by the costs that are given.

    Args:
        costs: what they cost.
        max_kl: the fewest bits whose costs add up to no more; the least cost when None.
        budget: bits per element to stay within; any number when None.

    Returns:
        The format of every side; the best within the budget where max_kl is out of reach, and the
        cheapest where the budget is.
    """
    # choices of the layers so far that no other one beats in bits and in KL, by their bits
    bits, kl = np.zeros(1), np.zeros(1)
    taken: list[tuple[NDArray[np.intp], list[dict[Side, str]]]] = []
    for options in _by_layer(costs):
        more = [sum(costs.row_bits(*one) for one in option.items()) for option in options]
        bits = np.add.outer(bits, more).ravel()
        kl = np.add.outer(kl, [costs.total(option) for option in options]).ravel()
        order = np.lexsort((kl, bits.round(6)))  # sums of the same bits differ in their last digits
        least = np.minimum.accumulate(kl[order])
        kept = order[np.append(True, least[1:] < least[:-1])]
        taken.append((kept, options))
        bits, kl = bits[kept], kl[kept]
    if budget is not None:
        within = int((bits <= (budget + 1e-9) * costs.width(costs.kl)).sum())
        bits, kl = bits[: max(within, 1)], kl[: max(within, 1)]
    enough = np.flatnonzero(kl <= (-np.inf if max_kl is None else max_kl))
    place = int(enough[0]) if len(enough) else len(kl) - 1
    formats: dict[Side, str] = {}
    for kept, options in reversed(taken):
        place, option = divmod(int(kept[place]), len(options))
        formats |= options[option]
    return {side: formats[side] for side in costs.kl}


def _by_layer(costs: Costs) -> Iterator[list[dict[Side, str]]]:
    """The formats that the sides of each layer may take together."""
    for layer in dict.fromkeys(layer for layer, _ in costs.kl):
        sides = [(layer, side) for side in "kv" if (layer, side) in costs.kl]
        names = [costs.offered(side) for side in sides]
        options = [dict(zip(sides, pair, strict=True)) for pair in product(*names)]
        yield [option for option in options if _may_take(costs, option, layer)]


def worst_layers(costs: Costs, formats: Mapping[Side, str], *, count: int = 3) -> list[int]:
    """The layers that cost the most, worst first."""
    layers: dict[int, float] = {}
    for (layer, side), name in formats.items():
        layers[layer] = layers.get(layer, 0.0) + costs.kl[layer, side][name]
    worst = sorted(layers, key=lambda layer: -layers[layer])
    half = sum(layers.values()) / 2
    chosen, total = [], 0.0
    for layer in worst[:count]:
        chosen.append(layer)
        total += layers[layer]
        if total > half:
            break
    return chosen


def _may_take(costs: Costs, formats: Mapping[Side, str], layer: int) -> bool:
    """Whether K keeps at least the bits of V, or V was measured to need more."""
    k, v = (layer, "k"), (layer, "v")
    if not costs.k_first or not formats.keys() >= {k, v}:
        return True
    cheapest = next(iter(costs.bits))
    if costs.kl[v][cheapest] > costs.kl[k][cheapest]:
        return True
    return costs.bits[formats[v]] <= costs.bits[formats[k]]
