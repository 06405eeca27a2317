"""Put a CachePlan together from what was observed and chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvquant.io.plan import FORMAT, VERSION, CachePlan

from .basis_search import STEPS, Chosen
from .moments import Moments
from .score_stats import ScoreObserver


def assemble(
    moments: Moments,
    chosen: Mapping[int, Mapping[str, Chosen]],
    scores: ScoreObserver | None,
    start: str,
    exact: str,
    kept: Mapping[int, str],
    facts: Mapping[str, Any],
) -> CachePlan:
    """Make the plan, with one format for all layers and nothing measured yet.

    Args:
        moments: what was observed.
        chosen: for every layer and side.
        scores: their statistics, if there are any.
        start: the format.
        exact: the 16-bit format of layers that are kept.
        kept: these layers, and why.
        facts: "model", "observed_tokens", "zero_data" and "settings".
    """
    order = sorted(moments.layers)
    tensors: dict[str, torch.Tensor] = {}
    for side in "kv":
        per_layer: list[dict[str, torch.Tensor]] = []
        for layer in order:
            per_layer.append(_tensors(side, moments, layer, chosen[layer][side]))
        for name in per_layer[0]:
            tensors[f"{side}.{name}"] = torch.stack([each[name].float() for each in per_layer])
        bases = [chosen[layer][side].basis for layer in order]
        if all(basis.kind != "matrix" for basis in bases):
            del tensors[f"{side}.matrix"]
        if all(basis.feedback is None for basis in bases):
            del tensors[f"{side}.feedback"]
    layers = []
    for layer in order:
        entry: dict[str, Any] = {"kept": kept.get(layer)}
        for side in "kv":
            basis = chosen[layer][side].basis
            rounding = "nearest" if basis.feedback is None else "feedback"
            entry[side] = {
                "format": exact if layer in kept else start,
                "basis": "none" if layer in kept else basis.kind,
                "rounding": "nearest" if layer in kept else rounding,
            }
        layers.append(entry)
    clips = next(iter(chosen[order[0]].values())).clips
    whole = {
        "format": FORMAT,
        "version": VERSION,
        **facts,
        "layers": layers,
        "steps": [*STEPS, "feedback", "clip"],
        "candidates": list(clips),
        "measured": None,
    }
    plan = CachePlan(whole, tensors | (scores.tensors() if scores else {}))
    return CachePlan(whole | {"bits": plan.bits}, plan.tensors)


def _tensors(side: str, moments: Moments, layer: int, chosen: Chosen) -> dict[str, torch.Tensor]:
    """The tensors of one side of one layer by their names in CachePlan, without "k."."""
    at, basis = moments.layers[layer], chosen.basis
    heads, dim = basis.offset.shape
    eye = torch.eye(dim, dtype=torch.float32, device="cpu").expand(heads, dim, dim)
    covariance = at.covariance(side)
    stored = covariance
    if basis.matrix is not None:
        inverse = torch.linalg.inv(basis.matrix.double())
        stored = inverse @ covariance @ inverse.mT
    return {
        "offset": basis.offset.cpu(),
        "matrix": basis.matrix.cpu()
        if basis.kind == "matrix" and basis.matrix is not None
        else eye,
        "feedback": eye if basis.feedback is None else basis.feedback.cpu(),
        "mean": at.mean(side).cpu(),
        "std": at.std(side).cpu(),
        "min": at.tensors[f"{side}_min"].cpu(),
        "max": at.tensors[f"{side}_max"].cpu(),
        "absmax": at.absmax(side).cpu(),
        "stored.std": stored.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt().cpu(),
        **{f"clip.{name}": clip for name, clip in chosen.clips.items()},
        **chosen.errors,
    }
