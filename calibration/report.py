"""What calibration tells: the table, the warnings, and the file of statistics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvquant.files import TensorSource, replaced, write_safetensors

from .collect import Statistics
from .fidelity import Fidelity

PLAN_VERSION = 1
KL_LIMIT = 0.1  # nats per token; int4 rows cost a few hundredths where they work at all
KL_NOTICE = 0.05  # above it the loss is worth a look
OFFSET_LIMIT = 10.0  # deviations; models without key biases stay below 5


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, numbers to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    rule = ["─" * width for width in widths]

    def join(line: Sequence[str]) -> str:
        cells = zip(line[1:], widths[1:], strict=True)
        return "  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in cells)])

    return "\n".join(join(line).rstrip() for line in [lines[0], rule, *lines[1:]])


def render_fidelity(found: Sequence[Fidelity]) -> str:
    """The table of what each scheme costs and keeps."""
    rows = [
        [
            str(one.scheme),
            f"{one.bits:.2f}",
            f"{16 / one.bits:.2f}x",
            f"{one.kl:.5f}",
            f"{100 * one.top1:.2f}",
            f"{one.perplexity:.3f}",
        ]
        for one in found
    ]
    header = ["cache", "bits", "smaller", "KL nats/token", "top-1 %", "perplexity"]
    return render_table(header, rows)


def warnings(statistics: Statistics | None, found: Sequence[Fidelity]) -> list[str]:
    """Say in plain words which formats this model does not bear, and why.

    Args:
        statistics: of its keys and values; None where there are none.
        found: the fidelity of each scheme.

    Returns:
        One sentence per warning; none for a model that bears every scheme.
    """
    said = []
    for one in found:
        if not one.kl <= KL_LIMIT:  # NaN too
            said.append(
                f"{one.scheme}: KL {one.kl:.2f} nats per token, only {100 * one.top1:.0f} % of the "
                "likeliest tokens are the same: do not decode this model from such a cache"
            )
        elif one.kl > KL_NOTICE:
            said.append(
                f"{one.scheme}: KL {one.kl:.3f} nats per token, {100 * one.top1:.0f} % of the "
                "likeliest tokens are the same: a noticeable loss; take more bits if you can"
            )
    if statistics is not None:
        offsets = torch.stack([layer.offset for layer in statistics.k])
        layer, head = divmod(int(offsets.argmax()), offsets.shape[1])
        worst = float(offsets.max())
        if worst > OFFSET_LIMIT:
            channel = int(statistics.k[layer].mean[head].abs().argmax())
            said.append(
                f"keys have large constant offsets, as models with a key bias have (worst in layer "
                f"{layer}, KV head {head}, channel {channel}: mean {worst:.0f} times the typical "
                "deviation): most codes of a 4-bit row are lost on them; use 8 bits for K"
            )
    return said


def plan_metadata(
    model: Mapping[str, str], statistics: Statistics, found: Sequence[Fidelity], settings: Any
) -> dict[str, Any]:
    """The file's facts as plain data.

    Args:
        model: identity of the model.
        statistics: what was observed.
        found: the fidelity of each scheme.
        settings: how it was measured.
    """
    table = [
        {
            **vars(one.scheme),
            "bits": one.bits,
            "nbytes": one.nbytes,
            "kl": one.kl,
            "top1": one.top1,
            "perplexity": one.perplexity,
        }
        for one in found
    ]
    return {
        "format": "kvquant-calibration",
        "version": PLAN_VERSION,
        "model": dict(model),
        "observed_tokens": statistics.num_tokens,
        "settings": settings,
        "fidelity": table,
        "warnings": warnings(statistics, found),
    }


def write_plan(path: Path, statistics: Statistics, metadata: Mapping[str, Any]) -> None:
    """Write the statistics as safetensors, the rest as JSON in the metadata's "kvquant" entry.

    Args:
        path: the file; an old one is replaced when the new one is whole.
        statistics: its tensors are Statistics.tensors().
        metadata: from plan_metadata.
    """
    sources = {
        name: TensorSource(tensor.dtype, tuple(tensor.shape), partial(iter, (tensor,)))
        for name, tensor in statistics.tensors().items()
    }
    text = json.dumps(metadata)
    with replaced(path) as temporary:
        write_safetensors(temporary, sources, lambda digests: {"kvquant": text})
