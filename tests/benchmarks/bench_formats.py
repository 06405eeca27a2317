"""How formats are chosen: by calibration/format_search.py, and by trying all choices.

For a small model, with 2, 3, 4 and 8 bits for K and V of each layer, in the plan's rows:

    allocate     kvquant's choice, step by step: always that which saves the most KL for its bits
    exhaustive   the best of all choices, by the same costs
    measured     allocate's choice where each side's KL was measured in each format, and not taken
                 from that in the cheapest one by the error of its rows
    uniform      one format for all
    sample       choices drawn at random that use the budget: the one of least measured KL

    python tests/benchmarks/bench_formats.py FOLDER --text FILE --held FILE --json formats.json

"predicted" is what the costs add up to, "kl" what was measured: row_study.py.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import click
from row_study import (
    Place,
    Reader,
    Subject,
    clipped,
    compared,
    error_of,
    plan_basis,
    reader,
    study,
    with_options,
)

from kvquant.calibration.format_search import Costs, Side, allocate, may_take
from kvquant.cli.console import COUNT
from kvquant.errors import KVQuantError
from kvquant.rows.format import RowFormat

FORMATS = ("int2", "int3", "int4", "int8")
Formats = dict[Side, str]


def every_choice(costs: Costs) -> list[Formats]:
    """All choices in which K keeps the bits of V where calibrate has it so."""
    layers = sorted({layer for layer, _ in costs.kl})
    options = []
    for layer in layers:
        sides = [(layer, side) for side in "kv"]
        pairs = (dict(zip(sides, names, strict=True)) for names in product(costs.bits, repeat=2))
        options.append([p for p in pairs if may_take(costs, p, sides[1], p[sides[1]])])
    return [{k: v for one in choice for k, v in one.items()} for choice in product(*options)]


def exhaustive(costs: Costs, budget: float) -> Formats:
    """The best of all choices."""
    within = [one for one in every_choice(costs) if costs.mean_bits(one) <= budget + 1e-9]
    return min(within, key=costs.total)


def drawn(costs: Costs, budget: float, count: int) -> list[Formats]:
    """Choices at random that leave less than a quarter of a bit of a budget."""
    near = [
        one for one in every_choice(costs) if budget - 0.25 < costs.mean_bits(one) <= budget + 1e-9
    ]
    return random.Random(0).sample(near, count)


def ranks(values: Iterable[float]) -> list[int]:
    """The rank of each value."""
    order = sorted(enumerate(values), key=lambda one: one[1])
    found = {at: rank for rank, (at, _) in enumerate(order)}
    return [found[at] for at in range(len(found))]


def costs_of(
    subject: Subject, readers: Mapping[tuple[Place, str], Reader], bits: Mapping[str, float]
) -> tuple[Costs, Costs]:
    """The costs that calibrate would have, and those that were all measured; 8 bits as there."""
    scaled: dict[Side, dict[str, float]] = {}
    known: dict[Side, dict[str, float]] = {}
    for place in subject.rows:
        errors = {
            name: float(error_of(subject, place, readers[place, name]).sum()) for name in FORMATS
        }
        alone = {
            name: statistics.fmean(subject.passages.kl({place: readers[place, name]}))
            for name in FORMATS[:-1]
        }
        first = FORMATS[0]
        scaled[place] = {name: alone[first] * errors[name] / errors[first] for name in FORMATS}
        known[place] = scaled[place] | alone
        click.echo(f"{place}: {scaled[place]} {alone}")
    return Costs(scaled, bits), Costs(known, bits)


def measured(subject: Subject, budgets: Iterable[float], sample: int) -> dict[str, Any]:
    """The choices within each budget, and what they cost."""
    readers: dict[tuple[Place, str], Reader] = {}
    for place, x in subject.rows.items():
        basis = plan_basis(subject, place)
        for name in FORMATS:
            fmt = RowFormat.parse(name, x.shape[-1])
            readers[place, name] = reader(clipped(subject, place, basis, fmt), fmt)
    dim = next(iter(subject.rows.values())).shape[-1]
    bits = {name: RowFormat.parse(name, dim).bits_per_element for name in FORMATS}
    scaled, known = costs_of(subject, readers, bits)

    def kl(formats: Formats) -> list[float]:
        return subject.passages.kl({side: readers[side, name] for side, name in formats.items()})

    found = {}
    for budget in budgets:
        choices = {
            "allocate": allocate(scaled, budget=budget),
            "exhaustive": exhaustive(scaled, budget),
            "measured": allocate(known, budget=budget),
        }
        for name, cost in bits.items():
            if abs(cost - budget) < 1e-9:
                choices["uniform"] = dict.fromkeys(scaled.kl, name)
        unlike = {str(one): one for one in choices.values()}  # the same choice costs the same
        once = {key: kl(one) for key, one in unlike.items()}
        parts = {what: once[str(one)] for what, one in choices.items()}
        rows = {
            what: {
                "formats": [f"{k} {v}" for k, v in _pairs(one)],
                "bits": scaled.mean_bits(one),
                "predicted": scaled.total(one),
            }
            | compared(parts[what], parts["allocate"])
            for what, one in choices.items()
        }
        tried = drawn(scaled, budget, sample)
        costs = [kl(one) for one in tried]
        means = [*map(statistics.fmean, costs)]
        best = min(range(len(tried)), key=means.__getitem__)
        rows["sample"] = {
            "formats": [f"{k} {v}" for k, v in _pairs(tried[best])],
            "bits": scaled.mean_bits(tried[best]),
            "predicted": scaled.total(tried[best]),
            "drawn": sample,
            "rank_correlation": statistics.correlation(
                ranks(means), ranks(map(scaled.total, tried))
            ),
        } | compared(costs[best], parts["allocate"])
        found[f"{budget:g}"] = rows
        for what, row in rows.items():
            click.echo(f"{subject.name} {budget:g} {what}: {row}")
    return found


def _pairs(formats: Formats) -> Iterable[tuple[str, str]]:
    layers = sorted({layer for layer, _ in formats})
    return [(formats[layer, "k"], formats[layer, "v"]) for layer in layers]


@click.command()
@with_options
@click.option("--budget", "budgets", type=float, multiple=True, default=(2.5, 3.25))
@click.option("--sample", type=COUNT, default=12, show_default=True, help="Choices drawn.")
def main(
    folder: Path,
    text: Path | None,
    held: Path | None,
    json_file: Path | None,
    budgets: tuple[float, ...],
    sample: int,
    **sizes: int,
) -> None:
    """Compare ways to choose formats for one model."""

    def measure(subject: Subject) -> dict[str, Any]:
        return {"budgets": measured(subject, budgets, sample)}

    study(folder, text, held, json_file, sizes, measure)


if __name__ == "__main__":
    try:
        main()
    except KVQuantError as error:
        sys.exit(f"Error: {error}")
