"""Whether rows whose groups of elements have bits of their own pay: graded_rows.py, measured.

For each side of each layer the best graded row of int3's and of int2's bytes is searched on rows
that the moments did not see: by kind and exponent of the basis, header, number of groups, bits of
each group and spans of their codes. Then the KL of passages that were not observed is compared with
that of the plan's rows: bases, feedback and clip ratios as calibrate chooses them, in int3 or int2.

    python tests/benchmarks/bench_graded.py FOLDER --text FILE --held FILE --json graded.json

    bound    how many times less error grading could have, if rows had very many bits: (mean of
             s^2/3)^3, what feedback reaches, over the geometric mean of s^2; s as in steepness
    K, V     only this side in such rows, the other in 16 bit
    chosen   both sides: of each layer and side what had less error on the rows for choosing

A model that was trained on sheets of facts takes no text, and with --answers is asked for facts,
too: all caches by the values that attention would read of a prompt, as in peer_schemes.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from graded_rows import HEADERS, KINDS, Graded, made, searched, with_spans
from peer_schemes import PeerCache
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

from kvquant.calibration.bases import root_product
from kvquant.cli.console import COUNT
from kvquant.errors import KVQuantError
from kvquant.evaluation.evaluate import Sizes, Task, evaluate
from kvquant.rows.format import RowFormat

FORMATS = ("int3", "int2")
POWERS = (2 / 3, 1.0)
GROUPS = (4, 8)
TRIED, REFINED = 512, 3  # rows that all choices are tried on, and how many are then refined


def bound(weights: torch.Tensor, covariance: torch.Tensor) -> float:
    """See above; a mean over heads."""
    s = torch.linalg.svdvals(root_product(weights, covariance))
    return float((s.pow(2 / 3).mean(-1).pow(3) / s.log().mean(-1).mul(2).exp()).mean())


def plan_reader(subject: Subject, place: Place, fmt: RowFormat) -> Reader:
    """What is read of the plan's rows of a format."""
    return reader(clipped(subject, place, plan_basis(subject, place), fmt), fmt)


def best_graded(subject: Subject, place: Place, fmt: RowFormat) -> Graded:
    """The graded row with the bytes of a format whose error is least."""
    layer, side = place
    at, weights = subject.moments.layers[layer], subject.weights[layer][side]

    def error(one: Graded, rows: int) -> float:
        return float(error_of(subject, place, one.read, rows=rows).sum())

    tried = [
        with_spans(one, subject.rows[place])
        for kind in KINDS
        for power in POWERS
        for groups in GROUPS
        for header in HEADERS
        for one in made(
            *(weights, at.covariance(side), at.mean(side).float(), kind, power),
            *(groups, header, fmt.row_bytes),
        )
        if len(set(one.bits)) > 1
    ]
    tried.sort(key=partial(error, rows=TRIED))
    every = subject.rows[place].shape[2]
    refined = [searched(one, partial(error, rows=every)) for one in tried[:REFINED]]
    return min(refined, key=partial(error, rows=every))


def measured(subject: Subject, name: str) -> tuple[dict[str, Any], dict[str, dict[Place, Reader]]]:
    """The figures of a format's bytes, and what is read of the plan's rows and of chosen ones."""
    plan: dict[Place, Reader] = {}
    graded: dict[Place, Graded] = {}
    errors: dict[Place, tuple[float, float]] = {}
    for place, x in subject.rows.items():
        fmt = RowFormat.parse(name, x.shape[-1])
        plan[place], graded[place] = (
            plan_reader(subject, place, fmt),
            best_graded(subject, place, fmt),
        )
        one = graded[place]
        errors[place] = (
            float(error_of(subject, place, one.read).sum()),
            float(error_of(subject, place, plan[place]).sum()),
        )
        click.echo(
            f"{place} {name}: {errors[place][1] / errors[place][0]:.2f} times less error, "
            f"{one.kind} {one.header} {one.bits} of {one.row_bytes:g} bytes"
        )
    readers: dict[Place, Reader] = {place: one.read for place, one in graded.items()}
    chosen = {at: readers[at] if errors[at][0] < errors[at][1] else plan[at] for at in plan}
    kl = {}
    for what, ours in {
        "K": _of(readers, "k"),
        "V": _of(readers, "v"),
        "chosen": chosen,
    }.items():
        theirs = {at: plan[at] for at in ours}
        kl[what] = compared(subject.passages.kl(ours), subject.passages.kl(theirs))
        click.echo(f"{subject.name} {name} {what}: {kl[what]}")
    sides = [
        {
            "layer": layer,
            "side": side,
            "error": errors[layer, side][0],
            "plan_error": errors[layer, side][1],
            "kind": one.kind,
            "header": one.header,
            "bits": one.bits,
            "row_bytes": one.row_bytes,
        }
        for (layer, side), one in graded.items()
    ]
    return {"format": name, "kl": kl, "sides": sides}, {"plan": plan, "chosen": chosen}


def _of(readers: Mapping[Place, Reader], side: str) -> dict[Place, Reader]:
    return {at: read for at, read in readers.items() if at[1] == side}


def as_cache(name: str, bits: float, readers: Mapping[Place, Reader]) -> PeerCache:
    """Rows as a cache that evaluate takes, with the default window."""

    def read(
        layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return readers[layer, "k"](keys), readers[layer, "v"](values)

    return PeerCache(name, bits, read, 4, 128)


def compare(subject: Subject, answers: int | None, asked: int) -> dict[str, Any]:
    """Bounds, KL of each format, and where answers are asked for the points of retrieval."""
    bounds = [
        {side: bound(subject.weights[layer][side], at.covariance(side)) for side in "kv"}
        for layer, at in sorted(subject.moments.layers.items())
    ]
    rows, caches = [], []
    for name in FORMATS:
        figures, kinds = measured(subject, name)
        rows.append(figures)
        bits = RowFormat.parse(name, 128).bits_per_element
        caches += [as_cache(f"{name}, {kind}", bits, readers) for kind, readers in kinds.items()]
    found: dict[str, Any] = {"bounds": bounds, "rows": rows}
    if answers:
        tasks = Task(kinds=("retrieval",), retrieval=("values", "overwritten"), chat=False)
        sizes_asked = Sizes((asked,), prompts=answers, facts=(0,), batch=answers)
        run = evaluate(subject.model, caches, task=tasks, sizes=sizes_asked)
        found["retrieval"] = {
            "caches": [one["cache"] for one in run["caches"]],
            "tasks": run["retrieval"][str(asked)],
        }
        click.echo(str(found["retrieval"]))
    return found


@click.command()
@with_options
@click.option("--answers", type=COUNT, help="Prompts of each task to ask.")
@click.option("--asked", type=COUNT, default=1024, show_default=True, help="Tokens of a prompt.")
def main(
    folder: Path,
    text: Path | None,
    held: Path | None,
    json_file: Path | None,
    answers: int | None,
    asked: int,
    **sizes: int,
) -> None:
    """Compare graded rows with the plan's on one model."""
    study(folder, text, held, json_file, sizes, partial(compare, answers=answers, asked=asked))


if __name__ == "__main__":
    try:
        main()
    except KVQuantError as error:
        sys.exit(f"Error: {error}")
