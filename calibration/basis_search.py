"""Choose the basis, the rounding and the clip ratios of every layer by measured, weighted errors.

The error e of a row counts as eᵀ W e: for K its mean squared effect on scores, for V on the layer's
output; of latent rows see error_weights. It is measured on tokens that the moments did not see, and
given as a share: the root of its sum over that of the rows about their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvquant.ops.quantize import dequantize_rows, quantize_calibrated
from kvquant.rows.basis import Basis
from kvquant.rows.format import RowFormat

from .bases import candidates, output_moment
from .moments import Moments
from .windows import begin_of

if TYPE_CHECKING:
    from kvquant.hf.model import CachedModel

    from .layer_selection import HeldLayers

BATCH = 2  # windows read at a time
BASE_FORMAT = "int4"  # in which bases are compared
# shares of its range that a group may keep, by the bits of a code: the fewer codes there are, the
# more of them the rare large elements cost
CLIPS = {2: (1.0, 0.85, 0.75, 0.65, 0.55), 3: (1.0, 0.92, 0.85, 0.78, 0.7)}
WIDE_CLIPS = (1.0, 0.95, 0.9, 0.85)  # of 4 bits and more
Weights = dict[int, dict[str, torch.Tensor]]


class ErrorMeter:
    """Weighted squared errors of the rows of one layer and side.

    Args:
        rows: of batches, [batch, num_kv_heads, tokens, head_dim] each.
        weights: [num_kv_heads, head_dim, head_dim]: W.
        mean: [num_kv_heads, head_dim] of the rows.
    """

    def __init__(
        self, rows: Sequence[torch.Tensor], weights: torch.Tensor, mean: torch.Tensor
    ) -> None:
        self._rows, self._weights = rows, weights.float()
        spread = self._sum(x.float() - mean[:, None].float() for x in rows)
        self._spread = spread.clamp(min=torch.finfo(torch.float32).tiny)

    def measure(self, basis: Basis, fmt: RowFormat) -> torch.Tensor:
        """[num_kv_heads], float64: the sum of errors of rows in a basis and a format."""
        return self._sum(
            basis.decode(dequantize_rows(stored_rows(x, basis, fmt), fmt)) - x.float()
            for x in self._rows
        )

    def share(self, basis: Basis, fmt: RowFormat) -> torch.Tensor:
        """[num_kv_heads], float32: the root of the error over the spread."""
        error = self.measure(basis, fmt).clamp(min=0)
        return (error / self._spread).sqrt().float().cpu()

    def _sum(self, errors: Iterable[torch.Tensor]) -> torch.Tensor:
        each = [((x @ self._weights) * x).sum((0, 2, 3), dtype=torch.float64) for x in errors]
        return sum(each[1:], each[0])


def stored_rows(x: torch.Tensor, basis: Basis, fmt: RowFormat) -> torch.Tensor:
    """Rows [batch, num_kv_heads, tokens, head_dim] as a cache stores them in a basis."""
    return quantize_calibrated(basis.encode(x), fmt, clip=basis.clip, feedback=basis.feedback)


@dataclass
class Chosen:
    """The choice for one side of one layer.

    Attributes:
        basis: with feedback, if that is better, and without clipping.
        clips: for each format [num_kv_heads], float32.
        errors: for each format [num_kv_heads], float32, with these clip ratios.
    """

    basis: Basis
    clips: dict[str, torch.Tensor] = field(default_factory=dict)
    errors: dict[str, torch.Tensor] = field(default_factory=dict)


def error_weights(model: CachedModel | HeldLayers, moments: Moments) -> Weights:
    """W of every layer and side, float64.

    A latent is K and V: an error e changes scores by s = q·e, and outputs by W_O W_UV e of each
    head. Where attention gives a token the share p, the first changes the head's output by p s
    (its value - the mean of the others'), the second by p W_O W_UV e. So with the covariance C of
    latents and F of LatentHeads.output_factor

        W = E[q qᵀ] tr(F C Fᵀ) + Fᵀ F       of latents, heads alike
        W = E[q qᵀ] tr(F C Fᵀ)              of RoPE parts, which are only K
    """
    projections = model.output_weights()
    found: Weights = {}
    for layer, at in moments.layers.items():
        heads, dim = at.tensors["v_sum"].shape
        if at.is_latent:
            output = output_moment(projections[layer], 1, at.queries.shape[-1])
            output = output.to(at.queries.device)
            spread = (output * at.covariance("k")).sum()
            found[layer] = {"k": at.queries * spread + output, "v": at.rope_queries * spread}
            continue
        output = output_moment(projections.get(layer), heads, dim).to(at.queries.device)
        found[layer] = {"k": at.queries, "v": output}
    return found


def choose(
    model: CachedModel | HeldLayers,
    windows: torch.Tensor,
    moments: Moments,
    formats: Mapping[str, tuple[RowFormat, RowFormat]],
    *,
    base_format: str = BASE_FORMAT,
    rounding: str = "feedback",
    progress: Callable[[int], None] = lambda amount: None,
) -> dict[int, dict[str, Chosen]]:
    """Choose for every layer and side.

    Args:
        model: reads the windows.
        windows: [num_windows, tokens], int64, of tokens that the moments did not see.
        moments: of the model.
        formats: the candidates for K and V, by their short names, base_format among them.
        base_format: in which bases are compared.
        rounding: "feedback", if it is better, or "nearest".
        progress: called with 1 for each layer of each batch, and once more for each layer.
    """
    weights = error_weights(model, moments)

    def offered(layer: int, side: str) -> dict[str, Basis]:
        found = candidates(moments.layers[layer], weights[layer], side)
        with_feedback = rounding == "feedback"
        return {name: one for name, one in found.items() if with_feedback or one.feedback is None}

    # layers on one device launch the same kernels
    firsts = {at.tensors["count"].device: layer for layer, at in [*moments.layers.items()][::-1]}
    some = {(layer, side): offered(layer, side) for layer in firsts.values() for side in "kv"}
    _warm_up(some, formats, base_format, windows)
    rows: dict[int, dict[str, list[torch.Tensor]]] = {}

    def keep(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
    ) -> None:
        both = rows.setdefault(layer, {"k": [], "v": []})
        both["k"].append(k)
        both["v"].append(v)
        progress(1)

    for number, part in enumerate(windows.split(BATCH), 1):
        model.observe(part, keep, begin_of(number))
    chosen: dict[int, dict[str, Chosen]] = {}
    for layer in moments.layers:
        chosen[layer] = {
            side: _chosen(
                ErrorMeter(x, weights[layer][side], moments.layers[layer].mean(side)),
                offered(layer, side),
                {name: pair["kv".index(side)] for name, pair in formats.items()},
                base_format,
            )
            for side, x in rows.pop(layer).items()
        }
        progress(1)
    return chosen


def _chosen(
    meter: ErrorMeter,
    bases: Mapping[str, Basis],
    formats: Mapping[str, RowFormat],
    base_format: str,
) -> Chosen:
    """Choose for one layer and side."""
    fmt = formats[base_format]
    found = Chosen(min(bases.values(), key=lambda basis: float(meter.measure(basis, fmt).sum())))
    ones = torch.ones_like(found.basis.offset[:, 0])
    for name, fmt in formats.items():
        clips = CLIPS.get(fmt.bits, WIDE_CLIPS)
        shares = [meter.share(found.basis.with_clip(ratio * ones), fmt) for ratio in clips]
        found.errors[name], best = torch.stack(shares).min(0)
        found.clips[name] = torch.tensor(clips, dtype=torch.float32, device="cpu")[best]
    return found


def _warm_up(
    options: Mapping[tuple[int, str], Mapping[str, Basis]],
    formats: Mapping[str, tuple[RowFormat, RowFormat]],
    base_format: str,
    windows: torch.Tensor,
) -> None:
    """Compile what storing rows with feedback launches where they are on CUDA, all at a time."""
    counts = {min(BATCH, len(windows)), len(windows) % BATCH} - {0}
    calls: dict[torch.device, dict[tuple[str, int, int], Callable[[], None]]] = {}
    for (_, side), bases in options.items():
        for basis in bases.values():
            kinds = calls.setdefault(basis.offset.device, {})
            if basis.feedback is not None:  # other rows are rounded by torch
                own = {name: pair["kv".index(side)] for name, pair in formats.items()}
                shapes = [(count, windows.shape[1]) for count in counts]
                call = partial(_rehearse, basis, own, base_format, shapes)
                kinds.setdefault((side, *basis.offset.shape), call)
    from kvquant.kernels.cuda.runtime.warmup import warm_up

    for device, kinds in calls.items():
        warm_up(device, kinds.values())


def _rehearse(
    basis: Basis, formats: Mapping[str, RowFormat], base: str, shapes: Iterable[tuple[int, int]]
) -> None:
    """Rehearse what stores and clips rows [count, heads, tokens, dim] of each of these shapes."""
    heads, dim = basis.offset.shape
    clipped = basis.with_clip(torch.ones_like(basis.offset[:, 0])).to("meta")
    for count, tokens in shapes:
        x = torch.empty(count, heads, tokens, dim, dtype=torch.float32, device="meta")
        stored_rows(x, basis.to("meta"), formats[base])
        for fmt in formats.values():
            stored_rows(x, clipped, fmt)
