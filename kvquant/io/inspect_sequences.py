"""What a file of sequences of a paged cache holds; inspect.py calls this for such files."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch

from ..rows.format import RowFormat
from .row_stats import (
    count_text,
    describe_side,
    formats_text,
    printable,
    render_layers,
    render_origin,
    render_totals,
    size_text,
    totals,
    warnings,
)
from .sequences_manifest import PageManifest
from .sequences_reader import PageReader
from .tables import Column, paragraph, render_table

SHOWN = 20  # sequences that are printed
SEQUENCES = (
    Column("sequence", left=True),
    *map(Column, ("tokens", "packed", "16 bit", "pages", "shared", "known ids")),
)


def describe_pages(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file of sequences, check all of it, and say what it holds.

    Args:
        path: what was given to save_sequences.

    Returns:
        Plain data that json can write. "sequences": of each its id, length, how many tokens are
        "packed" and how many "exact" (16 bit), its "pages", how many of them are "shared" with
        others of the file, and of how many first tokens the ids are "known". "pages": all in the
        file, each once; "shared_pages" of them are of several sequences, "page_uses" is what they
        would be without sharing. "bytes" counts the rows of the file, the unused ones of last pages
        too; "bytes_in_16_bit" those in use. "layers" and "warnings" as in inspect.describe.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged or foreign.
    """
    with PageReader(path) as file:
        manifest = file.manifest
        layers: list[dict[str, Any]] = [
            {
                "layer": i,
                "k": _describe_side(file, i, "k", k_format),
                "v": _describe_side(file, i, "v", v_format),
            }
            for i, (k_format, v_format) in enumerate(manifest.formats)
        ]
        head = {
            "path": str(file.path),
            "kind": "pages",
            "version": manifest.version,
            "files": 1,
            "file_bytes": file.num_bytes,
        }
    uses = Counter(page for sequence in manifest.sequences for page in sequence.pages)
    return (
        head
        | {
            "model": manifest.model and dict(manifest.model),
            "creation": dict(manifest.creation),
            "num_layers": len(manifest.formats),
            "num_kv_heads": manifest.num_kv_heads,
            "page_size": manifest.page_size,
            "sink_len": manifest.sink_len,
            "recent_len": manifest.recent_len,
            "exact_format": manifest.exact_format,
            "transformed": bool(manifest.transforms),
            "sequences": [
                {
                    "id": sequence.id,
                    "length": sequence.length,
                    "packed": sequence.packed_len,
                    "exact": sequence.length - sequence.packed_len,
                    "pages": len(sequence.pages),
                    "shared": sum(uses[page] > 1 for page in sequence.pages),
                    "known": len(sequence.tokens),
                }
                for sequence in manifest.sequences
            ],
            "pages": len(uses),
            "shared_pages": sum(times > 1 for times in uses.values()),
            "page_uses": uses.total(),
        }
        | totals(layers)
        | {"layers": layers, "warnings": warnings(layers, manifest.model)}
    )


def render_pages(description: dict[str, Any]) -> str:
    """Print what describe_pages() returned as tables.

    Returns:
        Lines of text; what is not printable in the file's own strings is replaced.
    """
    d = description
    tokens = d["layers"][0]["k"]["tokens"]
    rows = []
    for sequence in d["sequences"][:SHOWN]:
        cells = [f"{printable(str(sequence['id'])):.40}"]
        names = ("length", "packed", "exact", "pages", "shared", "known")
        rows.append(cells + [str(sequence[name]) for name in names])
    more = len(d["sequences"]) - SHOWN
    return "\n".join(
        [
            f"{printable(d['path'])}: kvquant sequences of a paged cache, version {d['version']}, "
            f"{size_text(d['file_bytes'])}",
            *render_origin(d),
            f"  shape      {count_text(d['num_layers'], 'layer')}, "
            f"{count_text(d['num_kv_heads'], 'KV head')}, "
            f"{count_text(len(d['sequences']), 'sequence')}",
            f"  pages      {d['pages']} of {d['page_size']} tokens; {d['shared_pages']} are "
            f"shared: {d['page_uses']} without sharing",
            f"  rows       {formats_text(d['layers'])}: {tokens['packed']} tokens; "
            f"{d['exact_format']}: {tokens['exact']}, the first {d['sink_len']} and the last "
            f"{d['recent_len']} of each sequence",
            *render_totals(d),
            "",
            render_table(SEQUENCES, rows),
            *([f"... and {more} more"] if more > 0 else []),
            "",
            render_layers(d["layers"]),
            *(paragraph(f"warning: {warning}", "  ") for warning in d["warnings"]),
        ]
    )


def _describe_side(file: PageReader, layer: int, side: str, fmt: RowFormat) -> dict[str, Any]:
    """What is to be said of K or V of one layer."""
    manifest, num_bytes, packed = file.manifest, 0, None
    tokens = dict.fromkeys(("packed", "exact"), 0)
    for kind in ("pages", "exact"):
        part = manifest.parts.get(f"layers.{layer}.{side}_{kind}")
        if part is None:
            continue
        rows = file.rows(part)  # every tensor, for its checksum
        num_bytes += rows.numel()
        if kind == "exact":
            tokens["exact"] = part.num_rows
        else:
            packed = part.by_token(rows)[_in_use(manifest)]
            tokens["packed"] = len(packed)
    return describe_side(fmt, manifest.num_kv_heads, tokens, num_bytes, packed)


def _in_use(manifest: PageManifest) -> torch.Tensor:
    """[pages * page_size]: which rows of the pages hold a token."""
    used = torch.tensor([rows for rows, _, _ in manifest.used.values()], device="cpu")
    return (torch.arange(manifest.page_size, device="cpu") < used[:, None]).flatten()
