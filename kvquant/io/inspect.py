"""What a file of rows holds: describe() reads it, for programs, and render() prints it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from ..rows.format import RowFormat
from ..rows.latent import LatentFormat
from ..text import Column, count_text, number, paragraph, printable, render_table, size_text, spans
from .checkpoint import empty_cache
from .container import RowsFile
from .manifest import CacheManifest, Manifest, SequencesManifest
from .row_stats import describe_side, totals, warnings

SHOWN = 20  # sequences of a paged cache that are printed
SEQUENCES = (
    Column("sequence", left=True),
    *map(Column, ("tokens", "packed", "16 bit", "pages", "shared", "known ids")),
)
FIGURES = "scale\nmin", "median", "max", "step", "offset"  # of "k" and of "v" of a layer
OF_ALL = "version", "creation", "num_kv_heads", "sink_len", "recent_len", "exact_format", "latent"
OF_HEADS, OF_LATENTS = ("K", "V"), ("latent", "RoPE")  # what these are


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a file of rows, and describe it.

    Args:
        path: as given to save_cache or save_sequences.

    Returns:
        Plain data that json can write. "kind" is "cache", or "pages" for a file of save_sequences.

        Every layer has for "k" and "v" (latents and RoPE parts where it is "latent"): "scale", the
        least, median and greatest scale of packed rows and how many are 0 and subnormal; "shift",
        the least and greatest; "step", the root mean square of the scales of integer codes over the
        median standard deviation of a channel; "offset", the largest mean of a channel over that
        deviation. Each is None where it has no meaning; step and offset need 16 packed tokens.
        "window" is how many last tokens the layer sees, None for all.

        Of sequences: "sequences" has of each its length, tokens that are "packed" and "exact" (16
        bit), "pages", "shared" ones, "known" ids, "namespace". "pages" counts each page once,
        "page_uses" once for each sequence. "bytes" counts unused rows of last pages, too.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged or foreign.
    """
    with RowsFile[Manifest](path, SequencesManifest, CacheManifest) as file:
        manifest = file.contents
        layers: list[dict[str, Any]] = [
            {"layer": i}
            | {
                side: _describe_side(file, i, side, fmt)
                for side, fmt in zip("kv", formats, strict=True)
            }
            for i, formats in enumerate(manifest.formats)
        ]
        described = {
            "path": str(file.path),
            "kind": "cache" if isinstance(manifest, CacheManifest) else "pages",
            "file_bytes": file.num_bytes,
            "model": manifest.model and msgspec.to_builtins(manifest.model),
            "num_layers": len(layers),
            **{name: getattr(manifest, name) for name in OF_ALL},
            "transformed": bool(manifest.transforms),
        }
    if manifest.latent:
        for layer, formats in zip(layers, manifest.formats, strict=True):
            layer["format"] = str(LatentFormat(*formats))
            layer["k"]["format"] = layer["format"].partition("+")[0]  # FlashMLA's is "fp8"
    for layer, window in zip(layers, manifest.layer_windows, strict=True):
        layer["window"] = window
    problems = []
    if isinstance(manifest, CacheManifest):
        described |= _describe_cache(manifest)
        problems = _all_exact(manifest, layers)
    elif isinstance(manifest, SequencesManifest):
        described |= _describe_sequences(manifest)
    problems += warnings(layers, manifest.model, _sides(described))
    return described | totals(layers) | {"layers": layers, "warnings": problems}


def render(description: dict[str, Any]) -> str:
    """Tables, as lines, of what describe() returned; unprintable characters are replaced."""
    d = description
    what = "cache" if d["kind"] == "cache" else "sequences of a paged cache"
    lines = [
        f"{printable(d['path'])}: kvquant {what}, version {d['version']}, "
        f"{size_text(d['file_bytes'])}",
        *(f"  {title:<11}{words}" for title, words in _facts(d)),
        "",
        *([] if d["kind"] == "cache" else [_sequences_table(d), ""]),
        _layers_table(d),
        *(paragraph(f"warning: {warning}", "  ") for warning in d["warnings"]),
    ]
    return "\n".join(lines)


def _describe_side(
    file: RowsFile[Manifest], layer: int, side: str, fmt: RowFormat
) -> dict[str, Any]:
    """K or V of one layer; every tensor is read, for its checksum."""
    manifest, num_bytes, packed = file.contents, 0, None
    tokens: dict[str, int] = {}
    for kind in manifest.KINDS:
        count, part = 0, manifest.parts.get(f"layers.{layer}.{side}_{kind}")
        if part is not None:
            tensor = file.rows(part)
            rows = part.in_use(tensor)
            count, num_bytes = len(rows), num_bytes + tensor.numel()
            if kind in ("packed", "pages"):
                packed = rows
        tokens["packed" if kind == "pages" else kind] = count
    return describe_side(fmt, manifest.num_kv_heads, tokens, num_bytes, packed)


def _describe_cache(manifest: CacheManifest) -> dict[str, Any]:
    return {
        "batch": len(manifest.seq_lens),
        "max_seq_len": manifest.max_seq_len,
        "rollback_len": manifest.rollback_len,
        "seq_lens": list(manifest.seq_lens),
        "start_positions": list(manifest.start_positions),
        "positions": list(manifest.positions),
        "memory_bytes": empty_cache(manifest, manifest.max_seq_len, "meta").nbytes,
    }


def _describe_sequences(manifest: SequencesManifest) -> dict[str, Any]:
    uses = Counter(page for sequence in manifest.sequences for page in sequence.pages)
    return {
        "page_size": manifest.page_size,
        "sequences": [
            {
                "id": sequence.id,
                "length": sequence.length,
                "packed": sequence.packed_len,
                "exact": sequence.length - sequence.packed_len,
                "pages": len(sequence.pages),
                "shared": sum(uses[page] > 1 for page in sequence.pages),
                "known": len(sequence.tokens),
                "namespace": sequence.namespace,
            }
            for sequence in manifest.sequences
        ],
        "pages": len(uses),
        "shared_pages": sum(times > 1 for times in uses.values()),
        "page_uses": uses.total(),
    }


def _all_exact(manifest: CacheManifest, layers: list[dict[str, Any]]) -> list[str]:
    """A sentence if there are tokens, but no packed ones."""
    sides = [layer[side] for layer in layers for side in "kv"]
    if any(side["packed_elements"] for side in sides) or not any(side["bytes"] for side in sides):
        return []
    return [
        f"no token is packed: the first {manifest.sink_len} and the last {manifest.recent_len} of "
        "each sequence stay in 16 bit, and there are no others: a longer text, or a smaller "
        "sink_len and recent_len (--sink-len, --recent-len), lets rows be packed"
    ]


def _facts(d: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What the lines above the tables say, each with its title."""
    model, is_cache = d["model"], d["kind"] == "cache"
    named = "not given"
    if model:
        weights = model.get("weights", "not known")[:12]
        config = f"config {model['sha256'][:12]}, weights {weights}"
        named = f"{printable(model['type']):.100}, {config}"
    yield "model", named
    made = ", ".join(f"{key}={value}" for key, value in d["creation"].items())
    yield "made", f"{printable(made or '-'):.200}"
    yield "plan", "rows are stored in the bases of a plan" if d["transformed"] else "none"
    heads = [] if d["latent"] else [count_text(d["num_kv_heads"], "KV head")]
    sequences = count_text(d["batch"] if is_cache else len(d["sequences"]), "sequence")
    yield "shape", ", ".join([count_text(d["num_layers"], "layer"), *heads, sequences])
    yield from _cache_facts(d) if is_cache else _pages_facts(d)
    bits, ratio = d["bits_per_element"], number(d["compression_ratio"])
    with_exact = f"{number(bits['all'])} with the 16-bit rows"
    yield "bits", f"{number(bits['packed'])} per element packed, {with_exact}"
    in_16_bit = f"{size_text(d['bytes_in_16_bit'])} in 16 bit: {ratio}x smaller"
    yield "bytes", f"{size_text(d['bytes'])} instead of {in_16_bit}"
    if is_cache:
        yield "memory", f"{size_text(d['memory_bytes'])} once loaded"


def _cache_facts(d: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Tokens, formats and kinds of rows, and windows."""
    ends = f"next position {_some(d['positions'])}"
    yield "tokens", f"{_some(d['seq_lens'])} of {d['max_seq_len']}; {ends}"
    full = next((layer["k"]["tokens"] for layer in d["layers"] if layer["window"] is None), None)
    rows = _formats_text(d)
    if full:
        rows += f": {full['packed']} tokens; {d['exact_format']}: {full['sinks']} first, "
        rows += f"{full['recent']} last"
    yield "rows", rows
    windows: dict[int, list[int]] = {}
    for layer in d["layers"]:
        if layer["window"] is not None:
            windows.setdefault(layer["window"], []).append(layer["layer"])
    shown = [
        f"{'layer' if len(layers) == 1 else 'layers'} {spans(layers)}: "
        f"the last {count_text(window, 'token')}"
        for window, layers in windows.items()
    ]
    if shown:
        yield "windows", "; ".join(shown)


def _pages_facts(d: dict[str, Any]) -> Iterator[tuple[str, str]]:
    tokens = d["layers"][0]["k"]["tokens"]
    sharing = f"{d['shared_pages']} are shared: {d['page_uses']} without sharing"
    yield "pages", f"{d['pages']} of {d['page_size']} tokens; {sharing}"
    exact = f"{tokens['exact']}, the first {d['sink_len']} and the last {d['recent_len']} of each"
    rows = f"{tokens['packed']} tokens; {d['exact_format']}: {exact} sequence"
    yield "rows", f"{_formats_text(d)}: {rows}"


def _sequences_table(d: dict[str, Any]) -> str:
    names = ["length", "packed", "exact", "pages", "shared", "known"]
    columns, shown = [*SEQUENCES], d["sequences"][:SHOWN]
    if any(sequence["namespace"] is not None for sequence in d["sequences"]):
        names, columns = [*names, "namespace"], [*columns, Column("namespace", left=True)]
    each = [["-" if one[name] is None else one[name] for name in ("id", *names)] for one in shown]
    rows = [[f"{printable(str(value)):.40}" for value in values] for values in each]
    more = len(d["sequences"]) - SHOWN
    return render_table(columns, rows) + (f"\n... and {more} more" if more > 0 else "")


def _layers_table(d: dict[str, Any]) -> str:
    columns = [Column("layer")]
    for part, title in enumerate(_sides(d), 1):
        columns += [Column(title, True, part), *(Column(name, False, part) for name in FIGURES)]
    rows = []
    for layer in d["layers"]:
        row = [str(layer["layer"])]
        for side in (layer["k"], layer["v"]):
            scale = side["scale"] or {}
            row.append(side["format"])
            row += [number(scale.get(name)) for name in ("min", "median", "max")]
            row += [number(side["step"]), number(side["offset"])]
        rows.append(row)
    words = "step, offset: that of a code, and a channel's largest mean, in deviations of a channel"
    return f"{render_table(columns, rows)}\n\n{paragraph(words)}"


def _formats_text(d: dict[str, Any]) -> str:
    """The formats of all layers: "K int4-g4, V int4/int8", or "latent rows int8-g4"."""
    if d["latent"]:
        return f"latent rows {'/'.join(sorted({layer['format'] for layer in d['layers']}))}"
    each = {side: sorted({layer[side]["format"] for layer in d["layers"]}) for side in "kv"}
    return ", ".join(f"{side.upper()} {'/'.join(names)}" for side, names in each.items())


def _sides(d: dict[str, Any]) -> tuple[str, str]:
    return OF_LATENTS if d["latent"] else OF_HEADS


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, ... ({min(numbers)} to {max(numbers)})"
