"""Statistics of stored rows: their scales and channels, their bytes, and what may go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from ..ops.quantize import dequantize_rows
from ..rows.codec import CODECS, Codec
from ..rows.format import RowFormat
from ..rows.quantize import parameters
from ..text import spans
from .export import MAX_SCALE

SAMPLE = 4096  # tokens that the statistics of a layer's channels are taken over, at most
_FEWEST = 16  # tokens below which they say nothing
_SMALLEST_NORMAL = 2.0**-14
# a code's step over the typical deviation of a channel: above it most codes stand still
_MAX_STEP = 1.0
_GAUSSIAN = 6  # deviations that a row without outliers goes over; more than the steps of INT2
# over the range of the middle layer
_MAX_RANGE = 8.0
_NOT_FOUND: dict[str, Any] = {"scale": None, "shift": None, "step": None, "offset": None}

Layers = Sequence[dict[str, Any]]


def describe_side(
    fmt: RowFormat,
    num_kv_heads: int,
    tokens: dict[str, int],
    num_bytes: int,
    packed: torch.Tensor | None,
) -> dict[str, Any]:
    """Describe K or V of one layer (see inspect.describe), from tokens by place and packed rows."""
    per_token = num_kv_heads * fmt.head_dim
    found = _NOT_FOUND if packed is None else _NOT_FOUND | _describe_packed(packed, fmt)
    return {
        "format": str(fmt),
        "head_dim": fmt.head_dim,
        "bits_per_element": fmt.bits_per_element,
        "tokens": tokens,
        "bytes": num_bytes,
        "elements": sum(tokens.values()) * per_token,
        "packed_elements": tokens["packed"] * per_token,
    } | found


def totals(layers: Layers) -> dict[str, Any]:
    """Bytes and bits of all layers, from describe_side."""
    sides = [layer[side] for layer in layers for side in "kv"]
    num_bytes = sum(side["bytes"] for side in sides)
    elements = sum(side["elements"] for side in sides)
    packed_elements = sum(side["packed_elements"] for side in sides)
    packed_bits = sum(side["packed_elements"] * side["bits_per_element"] for side in sides)
    return {
        "bytes": num_bytes,
        "bytes_in_16_bit": 2 * elements,
        "bits_per_element": {
            "packed": packed_bits / packed_elements if packed_elements else None,
            "all": 8 * num_bytes / elements if elements else None,
        },
        "compression_ratio": 2 * elements / num_bytes if num_bytes else None,
    }


def warnings(layers: Layers, model: object, sides: tuple[str, str]) -> list[str]:
    """Warnings about these rows, a sentence each; sides are the names of "k" and "v"."""

    def where(holds: Callable[[str, dict[str, Any]], bool]) -> str:
        found = []
        for side, name in zip("kv", sides, strict=True):
            numbers = [layer["layer"] for layer in layers if holds(side, layer[side])]
            if numbers:
                noun = "layer" if len(numbers) == 1 else "layers"
                found.append(f"{name} of {noun} {spans(numbers)}")
        return ", ".join(found)

    middle = {}
    for side in "kv":
        ranges = [_range(layer[side]) for layer in layers if layer[side]["scale"]]
        middle[side] = median(ranges) if len(ranges) > 2 else float("inf")

    def scale(side: dict[str, Any], name: str) -> float:
        return float(side["scale"][name]) if side["scale"] else 0.0

    checks = {
        "a code's step is larger than what most channels vary by: expect loss; calibrate, or "
        "take more groups or 8 bits": (
            lambda _, s: (s["step"] or 0) * min(1, _codec(s).levels / _GAUSSIAN) > _MAX_STEP
        ),
        f"ranges over {_MAX_RANGE:g} times those of the middle layer: give it more bits": (
            lambda side, s: s["scale"] is not None and _range(s) > _MAX_RANGE * middle[side]
        ),
        f"scales over {MAX_SCALE['int4']:.1f}, which FBGEMM and xFormers cannot read": (
            lambda _, s: _codec(s).name == "int4" and scale(s, "max") > MAX_SCALE["int4"]
        ),
        "scales of 0: groups whose elements are all alike": (lambda _, s: scale(s, "zeros") > 0),
        "subnormal scales, which hold fewer digits: the values are tiny": (
            lambda _, s: scale(s, "subnormals") > 0
        ),
    }
    found = []
    for text, holds in checks.items():
        places = where(holds)
        if places:
            found.append(f"{places}: {text}")
    if model is None:
        found.append("the file does not say which model it belongs to")
    return found


def _describe_packed(rows: torch.Tensor, fmt: RowFormat) -> dict[str, Any]:
    """Scales, shifts and channels of rows [tokens, num_kv_heads, row_bytes]."""
    found = dict[str, Any]()
    if not fmt.is_exact:
        scales, shifts = parameters(rows, fmt)
        found["scale"] = {
            "min": scales.min().item(),
            "median": scales.median().item(),
            "max": scales.max().item(),
            "zeros": int((scales == 0).sum()),
            "subnormals": int(((scales > 0) & (scales < _SMALLEST_NORMAL)).sum()),
        }
        found["shift"] = {"min": shifts.min().item(), "max": shifts.max().item()}
    if len(rows) >= _FEWEST:
        stride = -(-len(rows) // SAMPLE)
        values = dequantize_rows(rows[::stride], fmt).double()
        deviation = values.std(0).median().item()
        if deviation > 1e-30:
            found["offset"] = values.mean(0).abs().max().item() / deviation
            if fmt.facts.is_integer:
                found["step"] = scales.square().mean().sqrt().item() / deviation
    return found


def _range(side: dict[str, Any]) -> float:
    """The typical range of a group's elements."""
    codec = _codec(side)
    times = codec.pick(integers=1.0, e4m3=2.0)  # E4M3: from -448 to 448
    return float(side["scale"]["median"]) * codec.levels * times


def _codec(side: dict[str, Any]) -> Codec:
    return CODECS[side["format"].partition("-")[0]]
