"""Bases of rows of few bits: the plan's own, and OSCAR's weight of values and its rotations.

OSCAR (arXiv 2605.17757) weighs the second moment of values by what scores each token gets from all
queries, w = kᵀ (QᵀQ) k, and stores rows in the eigenvectors of such moments times a Hadamard
matrix. Here, all with the plan's offsets, feedback and clip ratios:

    plan        what calibrate chooses among the candidates of calibration/bases.py
    weighted    V: the same candidates from values weighted by w, chosen by errors weighted by w
    centred     the same, w of keys about their mean: a large common offset hides what differs
    oscar       OSCAR's rotation: of V from values weighted by w, of K from queries

"taken" counts the layers where oscar has a smaller error than plan on the rows for choosing: where
calibrate would take it if it were a candidate.

    python tests/benchmarks/bench_bases.py FOLDER --text FILE --held FILE --json bases.json

KL is that of one side alone in int2 or int3 rows, the other in 16 bit: row_study.py. A model that
was trained on sheets of facts takes no text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import click
import torch
from row_study import (
    Place,
    Subject,
    best_basis,
    clipped,
    compared,
    reader,
    study,
    with_options,
)

from kvquant.calibration.bases import candidates, spreading, with_feedback
from kvquant.calibration.moments import LayerMoments
from kvquant.errors import KVQuantError
from kvquant.rows.basis import Basis
from kvquant.rows.format import RowFormat

FORMATS = ("int3", "int2")
Score = Callable[[int, torch.Tensor], torch.Tensor]  # layer, keys: what each token counts


def score_of(subject: Subject, *, centred: bool) -> Score:
    """OSCAR's weight of tokens: keys [heads, tokens, dim] to [heads, tokens], of mean 1."""

    def score(layer: int, keys: torch.Tensor) -> torch.Tensor:
        at = subject.moments.layers[layer]
        keys = keys.double() - (at.mean("k")[:, None] if centred else 0)
        found = ((keys @ at.queries) * keys).sum(-1)
        return found / found.mean(-1, keepdim=True)

    return score


def weighted_moments(subject: Subject, score: Score) -> list[LayerMoments]:
    """The moments of all layers with values that count by their tokens' scores."""
    sums: dict[int, list[torch.Tensor]] = {}

    def take(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
    ) -> None:
        keys, rows = (x.transpose(0, 1).flatten(1, 2).double() for x in (k, v))
        counted = score(layer, keys)[..., None] * rows
        parts = [counted.sum(1), counted.mT @ rows]
        known = sums.setdefault(layer, [torch.zeros_like(one) for one in parts])
        sums[layer] = [a + b for a, b in zip(known, parts, strict=True)]

    for window in subject.observed:
        subject.model.observe(window[None], take)
    found = []
    for layer, at in sorted(subject.moments.layers.items()):
        one = copy(at)
        one.tensors = {**at.tensors, **dict(zip(("v_sum", "v_outer"), sums[layer], strict=True))}
        found.append(one)
    return found


def rotation(subject: Subject, place: Place, moment: torch.Tensor, offset: torch.Tensor) -> Basis:
    """OSCAR's basis: eigenvectors of a moment [heads, dim, dim] times a Hadamard matrix."""
    layer, side = place
    matrix = torch.linalg.eigh(moment)[1] @ spreading(moment.shape[-1])
    return with_feedback(Basis(offset, "matrix", matrix.float()), subject.weights[layer][side])


def bases_of(
    subject: Subject, place: Place, weighted: Mapping[str, LayerMoments]
) -> dict[str, tuple[Basis, torch.Tensor | None]]:
    """The bases to compare, and what tokens count where their clip ratios are chosen."""
    layer, side = place
    at, weights = subject.moments.layers[layer], subject.weights[layer]

    def plan(
        moments: LayerMoments, shares: torch.Tensor | None
    ) -> tuple[Basis, torch.Tensor | None]:
        options = candidates(moments, weights, side)
        return options[best_basis(subject, place, options, shares)], shares

    found = {"plan": plan(at, None)}
    offset = found["plan"][0].offset
    moment = at.queries
    if side == "v":
        keys = subject.rows[layer, "k"][0]
        for name, moments in weighted.items():
            score = score_of(subject, centred=name == "centred")
            found[name] = plan(moments, score(layer, keys).float())
        turned = weighted["weighted"]
        moment = turned.tensors["v_outer"] / turned.count
    found["oscar"] = rotation(subject, place, moment, offset), None
    return found


def measured(subject: Subject) -> list[dict[str, Any]]:
    """A row for each side, format and basis: its KL beside the plan's."""
    weighted = {
        name: weighted_moments(subject, score_of(subject, centred=name == "centred"))
        for name in ("weighted", "centred")
    }
    layers = sorted(subject.moments.layers)
    rows: list[dict[str, Any]] = []
    for side in "kv":
        bases = {
            layer: bases_of(subject, (layer, side), {n: m[at] for n, m in weighted.items()})
            for at, layer in enumerate(layers)
        }
        taken = 0
        for layer, one in bases.items():
            options = {kind: one[kind][0] for kind in ("plan", "oscar")}
            taken += best_basis(subject, (layer, side), options) == "oscar"
        for name in FORMATS:
            plan: list[float] = []
            for kind in bases[layers[0]]:
                readers = {}
                for layer in layers:
                    basis, shares = bases[layer][kind]
                    fmt = RowFormat.parse(name, basis.offset.shape[-1])
                    place = layer, side
                    basis = clipped(subject, place, basis, fmt, shares)
                    readers[place] = reader(basis, fmt)
                kl = subject.passages.kl(readers)
                plan = plan or kl
                of = {"side": side, "format": name, "basis": kind, "taken": taken}
                rows.append(of | compared(kl, plan))
                click.echo(f"{subject.name} {rows[-1]}")
    return rows


@click.command()
@with_options
def main(
    folder: Path, text: Path | None, held: Path | None, json_file: Path | None, **sizes: int
) -> None:
    """Compare bases on one model."""
    study(folder, text, held, json_file, sizes, lambda subject: {"bases": measured(subject)})


if __name__ == "__main__":
    try:
        main()
    except KVQuantError as error:
        sys.exit(f"Error: {error}")
