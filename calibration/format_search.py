"""Choose the format of K and V of every layer: the fewest bits that keep the predictions.

The cost of a layer's side, in KL, is measured once by decoding with this side alone in the cheapest
format; other formats scale it by the square of their weighted error. Costs add up, times a factor
from decoding the whole plan. The greedy step saves the most KL per bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

Side = tuple[int, str]  # layer, "k" or "v"


@dataclass(frozen=True)
class Costs:
    """What formats cost.

    Attributes:
        kl: for every side and format, nats per token.
        bits: of every format that K may take, per element of a row, cheapest first.
        v_bits: the same of V; that of K when None.
        v_width: elements of a row of V for each of K.
    """

    kl: Mapping[Side, Mapping[str, float]]
    bits: Mapping[str, float]
    v_bits: Mapping[str, float] | None = None
    v_width: float = 1.0

    def total(self, formats: Mapping[Side, str]) -> float:
        return sum(self.kl[side][name] for side, name in formats.items())

    def mean_bits(self, formats: Mapping[Side, str]) -> float:
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
    """Choose the format of every side; the best within the budget if max_kl is out of reach.

    Args:
        costs: what they cost.
        max_kl: stop as soon as the costs add up to no more; never when None.
        budget: bits per element to stay within; any number when None.
    """
    formats = {side: next(iter(costs.offered(side))) for side in costs.kl}
    while max_kl is None or costs.total(formats) > max_kl:
        steps = [
            (saved / more, side, name)
            for side, now in formats.items()
            for name in costs.offered(side)
            if (more := costs.row_bits(side, name) - costs.row_bits(side, now)) > 0
            and (saved := costs.kl[side][now] - costs.kl[side][name]) > 0
            and (
                budget is None
                or costs.mean_bits(formats) + more / costs.width(formats) <= budget + 1e-9
            )
        ]
        if not steps:
            break
        _, side, name = max(steps)
        formats[side] = name
    return formats


def worst_layers(costs: Costs, formats: Mapping[Side, str]) -> list[int]:
    """The layers that cost the most, three at most, worst first."""
    layers: dict[int, float] = {}
    for (layer, side), name in formats.items():
        layers[layer] = layers.get(layer, 0.0) + costs.kl[layer, side][name]
    worst = sorted(layers, key=lambda layer: -layers[layer])
    half = sum(layers.values()) / 2
    chosen, total = [], 0.0
    for layer in worst[:3]:
        chosen.append(layer)
        total += layers[layer]
        if total > half:
            break
    return chosen
