"""What a cache file holds, for people and for programs: describe() reads it, render() prints it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch

from .cachefile import CacheFile
from .exchange import MAX_SCALE
from .layout import RowFormat
from .manifest import KINDS, VERSION, Manifest, Part
from .quant import LEVELS, dequantize_rows

SAMPLE = 4096  # tokens that the statistics of a layer's channels are taken over, at most
_FEWEST = 16  # tokens below which they say nothing
_SMALLEST_NORMAL = 2.0**-14
# a code's step over the typical deviation of a channel: above it most codes stand still
_MAX_STEP = 1.0
# Llama-like models stay below 6, those with biased keys start at 20
_MAX_OFFSET = 12.0
# over the range of the middle layer
_MAX_RANGE = 8.0


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a cache file, check all of it, and say what it holds.

    Args:
        path: what was given to save_cache, or the index of its shards.

    Returns:
        Plain data that json can write. Of every layer, for "k" and "v":
        "scale": the least, the median and the greatest scale of the packed rows, and how many are 0
        and how many subnormal; "shift": the least and the greatest; both None for 16-bit rows;
        "step": the root mean square of the scales over the typical standard deviation of a channel
        (integer codes only); "offset": the largest mean of a channel over that deviation. Channels
        are looked at over at most 4096 packed tokens; both are None where there are fewer than 16.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged or foreign.
    """
    with CacheFile(path) as file:
        manifest = file.manifest
        layers: list[dict[str, Any]] = [
            {
                "layer": i,
                "k": _describe_side(file, i, "k", entry.k_format),
                "v": _describe_side(file, i, "v", entry.v_format),
            }
            for i, entry in enumerate(manifest.layers)
        ]
        head: dict[str, Any] = {
            "path": str(file.path),
            "version": VERSION,
            "files": file.num_files,
            "file_bytes": file.num_bytes,
        }
    sides = [layer[side] for layer in layers for side in "kv"]
    num_bytes = sum(side["bytes"] for side in sides)
    elements = sum(side["elements"] for side in sides)
    packed_elements = sum(side["packed_elements"] for side in sides)
    packed_bits = sum(side["packed_elements"] * side["bits_per_element"] for side in sides)
    return head | {
        "model": manifest.model and dict(manifest.model),
        "creation": dict(manifest.creation),
        "num_layers": len(manifest.layers),
        "num_kv_heads": manifest.num_kv_heads,
        "batch": manifest.batch,
        "max_seq_len": manifest.max_seq_len,
        "sink_len": manifest.sink_len,
        "recent_len": manifest.recent_len,
        "exact_format": manifest.exact_format,
        "transformed": bool(manifest.transforms),
        "seq_lens": list(manifest.seq_lens),
        "start_positions": list(manifest.start_positions),
        "positions": list(manifest.positions),
        "bytes": num_bytes,
        "bytes_in_16_bit": 2 * elements,
        "memory_bytes": manifest.cache_bytes(manifest.max_seq_len),
        "bits_per_element": {
            "packed": packed_bits / packed_elements if packed_elements else None,
            "all": 8 * num_bytes / elements if elements else None,
        },
        "compression_ratio": 2 * elements / num_bytes if num_bytes else None,
        "layers": layers,
        "warnings": _warnings(manifest, layers),
    }


def render(description: dict[str, Any]) -> str:
    """Print what describe() returned as a table.

    Returns:
        Lines of text; what is not printable in the file's own strings is replaced.
    """
    d = description
    model = d["model"]
    made = ", ".join(f"{key}={value}" for key, value in d["creation"].items())
    bits = d["bits_per_element"]
    formats = {
        side: sorted({layer[side]["format"] for layer in d["layers"]}) for side in ("k", "v")
    }
    tokens = d["layers"][0]["k"]["tokens"]
    lines = [
        f"{_printable(d['path'])}: kvquant cache, version {d['version']}, "
        f"{size_text(d['file_bytes'])} in {_count(d['files'], 'file')}",
        f"  model      {_printable(model['type']):.100}, config {model['sha256'][:12]}"
        if model
        else "  model      not given",
        f"  made       {_printable(made or '-'):.200}",
        f"  plan       {'rows are stored in the bases of a plan' if d['transformed'] else 'none'}",
        f"  shape      {_count(d['num_layers'], 'layer')}, {_count(d['num_kv_heads'], 'KV head')}, "
        f"{_count(d['batch'], 'sequence')}",
        f"  tokens     {_some(d['seq_lens'])} of {d['max_seq_len']}; next position "
        f"{_some(d['positions'])}",
        f"  rows       K {'/'.join(formats['k'])}, V {'/'.join(formats['v'])}: {tokens['packed']} "
        f"tokens; {d['exact_format']}: {tokens['sinks']} first, {tokens['recent']} last",
        f"  bits       {_number(bits['packed'])} per element packed, {_number(bits['all'])} with "
        "the 16-bit rows",
        f"  bytes      {size_text(d['bytes'])} instead of {size_text(d['bytes_in_16_bit'])} in "
        f"16 bit: {_number(d['compression_ratio'])}x smaller; {size_text(d['memory_bytes'])} once "
        "loaded",
        "",
    ]
    columns = ["", "min", "median", "max", "step", "offset"]
    table = [["", *("K", "scale", "", "", "", ""), *("V", "scale", "", "", "", "")]]
    table.append(["layer", *columns, *columns])
    for layer in d["layers"]:
        row = [str(layer["layer"])]
        for side in (layer["k"], layer["v"]):
            scale = side["scale"] or {}
            row.append(side["format"])
            row += [_number(scale.get(name)) for name in ("min", "median", "max")]
            row += [_number(side["step"]), _number(side["offset"])]
        table.append(row)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines += [
        "",
        "step, offset: that of a code, and a channel's largest mean, in deviations of a channel",
    ]
    lines += [f"warning: {warning}" for warning in d["warnings"]]
    return "\n".join(lines)


def _describe_side(file: CacheFile, layer: int, side: str, fmt: RowFormat) -> dict[str, Any]:
    """What is to be said of K or V of one layer."""
    manifest = file.manifest
    tokens = dict.fromkeys(KINDS, 0)
    num_bytes = elements = 0
    found: dict[str, Any] = {"scale": None, "shift": None, "step": None, "offset": None}
    for kind in KINDS:
        part = manifest.parts.get(f"layers.{layer}.{side}_{kind}")
        if part is None:
            continue
        rows = file.rows(part)  # every tensor, for its checksum
        tokens[kind] = part.num_rows
        num_bytes += rows.numel()
        elements += part.num_rows * manifest.num_kv_heads * fmt.head_dim
        if kind == "packed":
            found |= _describe_packed(rows, part)
    return {
        "format": str(fmt),
        "head_dim": fmt.head_dim,
        "bits_per_element": fmt.bits_per_element,
        "tokens": tokens,
        "bytes": num_bytes,
        "elements": elements,
        "packed_elements": tokens["packed"] * manifest.num_kv_heads * fmt.head_dim,
    } | found


def _describe_packed(rows: torch.Tensor, part: Part) -> dict[str, Any]:
    """Scales, shifts and channels of rows [tokens, num_kv_heads, row_bytes]."""
    fmt, found = part.fmt, dict[str, Any]()
    if not fmt.is_exact:
        params = rows[..., : fmt.header_bytes].contiguous().view(torch.float16).float()
        scales, shifts = params[..., 0::2], params[..., 1::2]
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
            if fmt.codec in LEVELS:
                found["step"] = scales.square().mean().sqrt().item() / deviation
    return found


def _warnings(manifest: Manifest, layers: list[dict[str, Any]]) -> list[str]:
    """What may go wrong with these rows, a sentence each."""

    def where(holds: Callable[[str, dict[str, Any]], bool]) -> str:
        """The layers of K and of V for which something holds."""
        found = []
        for side in "kv":
            numbers = [layer["layer"] for layer in layers if holds(side, layer[side])]
            if numbers:
                noun = "layer" if len(numbers) == 1 else "layers"
                found.append(f"{side.upper()} of {noun} {_spans(numbers)}")
        return ", ".join(found)

    middle = {}
    for side in "kv":
        ranges = [_range(layer[side]) for layer in layers if layer[side]["scale"]]
        middle[side] = median(ranges) if len(ranges) > 2 else float("inf")

    def scale(side: dict[str, Any], name: str) -> float:
        return float(side["scale"][name]) if side["scale"] else 0.0

    checks = {
        "a code's step is larger than what most channels vary by: expect loss; calibrate, or "
        "take more groups or 8 bits": lambda _, s: (s["step"] or 0) > _MAX_STEP,
        f"channels with means over {_MAX_OFFSET:g} deviations (biased keys): expect loss at 4 "
        "bits; calibrate": lambda _, s: (s["offset"] or 0) > _MAX_OFFSET,
        f"ranges over {_MAX_RANGE:g} times those of the middle layer: give it more bits": (
            lambda side, s: s["scale"] is not None and _range(s) > _MAX_RANGE * middle[side]
        ),
        f"scales over {MAX_SCALE['int4']:.1f}, which FBGEMM and xFormers cannot read": (
            lambda _, s: s["format"].startswith("int4") and scale(s, "max") > MAX_SCALE["int4"]
        ),
        "scales of 0: groups whose elements are all alike": (lambda _, s: scale(s, "zeros") > 0),
        "subnormal scales, which hold fewer digits: the values are tiny": (
            lambda _, s: scale(s, "subnormals") > 0
        ),
    }
    warnings = []
    for text, holds in checks.items():
        places = where(holds)
        if places:
            warnings.append(f"{places}: {text}")
    if manifest.model is None:
        warnings.append("the file does not say which model it belongs to")
    return warnings


def _range(side: dict[str, Any]) -> float:
    """The typical range of a group's elements."""
    codes = LEVELS.get(side["format"].split("-")[0], 896.0)  # FP8: from -448 to 448
    return float(side["scale"]["median"]) * codes


def _spans(numbers: Iterable[int]) -> str:
    """Ascending numbers as "0, 3-5"."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, ... ({min(numbers)} to {max(numbers)})"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def size_text(num_bytes: float) -> str:
    """Bytes in the unit that suits them: "4.2 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
