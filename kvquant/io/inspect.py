"""What a cache file holds, for people and for programs: describe() reads it, render() prints it."""

from __future__ import annotations

import os
from typing import Any

from ..errors import CheckpointError
from ..rows.format import RowFormat
from .container import CacheFile
from .inspect_sequences import describe_pages, render_pages
from .manifest import KINDS, Manifest
from .row_stats import (
    count_text,
    describe_side,
    formats_text,
    printable,
    render_layers,
    render_origin,
    render_totals,
    size_text,
    spans,
    totals,
    warnings,
)
from .sequences_reader import holds_pages
from .tables import paragraph


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a cache file, check all of it, and say what it holds.

    Args:
        path: what was given to save_cache, or the index of its shards, or to save_sequences.

    Returns:
        Plain data that json can write. "kind" is "cache", or "pages" for a file of save_sequences,
        of which describe_pages tells the rest. Of every layer "window", the last tokens that it
        sees (of a cache; None: all), and for "k" and "v":
        "scale": the least, the median and the greatest scale of the packed rows, and how many are 0
        and how many subnormal; "shift": the least and the greatest; both None for 16-bit rows;
        "step": the root mean square of the scales over the typical standard deviation of a channel
        (integer codes only); "offset": the largest mean of a channel over that deviation. Channels
        are looked at over at most 4096 packed tokens; both are None where there are fewer than 16.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged or foreign.
    """
    is_pages = holds_pages(path)
    try:
        return describe_pages(path) if is_pages else _describe_cache(path)
    except (CheckpointError, FileNotFoundError):
        if holds_pages(path) == is_pages:
            raise
        return describe(path)  # a file of the other kind has taken its place


def render(description: dict[str, Any]) -> str:
    """Print what describe() returned as a table.

    Returns:
        Lines of text; what is not printable in the file's own strings is replaced.
    """
    d = description
    if d["kind"] == "pages":
        return render_pages(d)
    return "\n".join(
        [
            f"{printable(d['path'])}: kvquant cache, version {d['version']}, "
            f"{size_text(d['file_bytes'])} in {count_text(d['files'], 'file')}",
            *render_origin(d),
            f"  shape      {count_text(d['num_layers'], 'layer')}, "
            f"{count_text(d['num_kv_heads'], 'KV head')}, {count_text(d['batch'], 'sequence')}",
            f"  tokens     {_some(d['seq_lens'])} of {d['max_seq_len']}; next position "
            f"{_some(d['positions'])}",
            *_rows_lines(d),
            *render_totals(d),
            f"  memory     {size_text(d['memory_bytes'])} once loaded",
            "",
            render_layers(d["layers"]),
            *(paragraph(f"warning: {warning}", "  ") for warning in d["warnings"]),
        ]
    )


def _rows_lines(d: dict[str, Any]) -> list[str]:
    """Formats and where the tokens are, of layers that see all of them; and the windows."""
    windows: dict[int, list[int]] = {}
    for layer in d["layers"]:
        if layer["window"] is not None:
            windows.setdefault(layer["window"], []).append(layer["layer"])
    rows = f"  rows       {formats_text(d['layers'])}"
    full = next((layer["k"]["tokens"] for layer in d["layers"] if layer["window"] is None), None)
    if full:
        rows += f": {full['packed']} tokens; {d['exact_format']}: {full['sinks']} first, "
        rows += f"{full['recent']} last"
    shown = [
        f"{'layer' if len(layers) == 1 else 'layers'} {spans(layers)}: "
        f"the last {count_text(window, 'token')}"
        for window, layers in windows.items()
    ]
    return [rows, f"  windows    {'; '.join(shown)}"] if shown else [rows]


def _describe_cache(path: str | os.PathLike[str]) -> dict[str, Any]:
    with CacheFile(path) as file:
        manifest = file.manifest
        layers: list[dict[str, Any]] = [
            {
                "layer": i,
                "window": entry.window,
                "k": _describe_side(file, i, "k", entry.k_format),
                "v": _describe_side(file, i, "v", entry.v_format),
            }
            for i, entry in enumerate(manifest.layers)
        ]
        head: dict[str, Any] = {
            "path": str(file.path),
            "kind": "cache",
            "version": manifest.version,
            "files": file.num_files,
            "file_bytes": file.num_bytes,
        }
    return (
        head
        | {
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
            "memory_bytes": manifest.cache_bytes(manifest.max_seq_len),
        }
        | totals(layers)
        | {
            "layers": layers,
            "warnings": _all_exact(manifest, layers) + warnings(layers, manifest.model),
        }
    )


def _all_exact(manifest: Manifest, layers: list[dict[str, Any]]) -> list[str]:
    """A sentence if there are tokens and none of them is packed."""
    sides = [layer[side] for layer in layers for side in "kv"]
    if any(side["packed_elements"] for side in sides) or not any(side["bytes"] for side in sides):
        return []
    return [
        f"no token is packed: the first {manifest.sink_len} and the last {manifest.recent_len} of "
        "each sequence stay in 16 bit, and there are no others: a longer text, or a smaller "
        "sink_len and recent_len (--sink-len, --recent-len), lets rows be packed"
    ]


def _describe_side(file: CacheFile, layer: int, side: str, fmt: RowFormat) -> dict[str, Any]:
    """What is to be said of K or V of one layer."""
    tokens, num_bytes, packed = dict.fromkeys(KINDS, 0), 0, None
    for kind in KINDS:
        part = file.manifest.parts.get(f"layers.{layer}.{side}_{kind}")
        if part is None:
            continue
        rows = file.rows(part)  # every tensor, for its checksum
        tokens[kind] = part.num_rows
        num_bytes += rows.numel()
        if kind == "packed":
            packed = rows
    return describe_side(fmt, file.manifest.num_kv_heads, tokens, num_bytes, packed)


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, ... ({min(numbers)} to {max(numbers)})"
