"""The manifest: what a cache file says of itself, as JSON, read with every value checked.

The keys are told in checkpoint.py, which owns the format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .basis import fingerprints
from .cache import KVCache
from .errors import CheckpointError, ConfigError, ShapeError
from .identity import model_identity
from .jsonvalues import (
    INT64,
    as_dict,
    as_list,
    check_digest,
    check_keys,
    choice,
    identity,
    parse_manifest,
    row_format,
    transforms,
    whole,
    wholes,
)
from .layer import Rooms, rooms_of
from .layout import EXACT_CODECS, RowFormat

FORMAT = "kvquant-cache"
VERSION = 1
WINDOWS_VERSION = 2  # of files with sliding windows; all else is as in version 1
KINDS = ("sinks", "packed", "recent")


@dataclass(frozen=True)
class Part:
    """The rows of K or of V of one layer in one kind of segment: one tensor of the file.

    Attributes:
        name: of the tensor.
        layer: index of the layer.
        side: "k" or "v".
        kind: "sinks", "packed" or "recent".
        fmt: format of the rows.
        counts: rows of each sequence.
        firsts: the token that the first row of each sequence holds.
    """

    layer: int
    side: str
    kind: str
    fmt: RowFormat
    counts: tuple[int, ...]
    firsts: tuple[int, ...]

    @property
    def attribute(self) -> str:
        """The attribute of LayerCache that holds the rows."""
        return f"{self.side}_{self.kind}"

    @property
    def name(self) -> str:
        """Name of the tensor in the file."""
        return f"layers.{self.layer}.{self.attribute}"

    @cached_property
    def num_rows(self) -> int:
        """Tokens of all sequences."""
        return sum(self.counts)

    def locate(self, row: int) -> tuple[int, int]:
        """Sequence and token of a row of the tensor."""
        for sequence, count in enumerate(self.counts):
            if row < count:
                return sequence, self.firsts[sequence] + row
            row -= count
        raise IndexError(row)


@dataclass(frozen=True)
class LayerEntry:
    """Formats of one layer, the packed tokens of each of its sequences, and its window."""

    k_format: RowFormat
    v_format: RowFormat
    packed_lens: tuple[int, ...]
    window: int | None = None


@dataclass(frozen=True)
class Manifest:
    """All of a cache but its rows; attributes as in KVCache."""

    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    sink_len: int
    recent_len: int
    exact_format: str
    seq_lens: tuple[int, ...]
    start_positions: tuple[int, ...]
    layers: tuple[LayerEntry, ...]
    model: Mapping[str, str] | None
    creation: Mapping[str, Any]
    transforms: tuple[Mapping[str, str], ...] = ()

    @classmethod
    def of(
        cls, cache: KVCache, model: Mapping[str, Any] | None, creation: Mapping[str, Any] | None
    ) -> Manifest:
        """Describe a cache.

        Raises:
            ShapeError: the layers hold different numbers of tokens.
            ConfigError: model or creation is not plain data.
        """
        seq_lens = cache.seq_lens
        for i, layer in enumerate(cache.layers):
            if not layer.seq_lens.equal(seq_lens):
                raise ShapeError(
                    f"layer {i} holds {layer.seq_lens.tolist()} tokens, another one "
                    f"{seq_lens.tolist()}: append this step's tokens to every layer, then save"
                )
        try:
            copied = json.loads(json.dumps(dict(creation or {}), allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"creation is not plain data ({error}): use strings, finite numbers, lists, dicts"
            ) from None
        return cls(
            cache.num_kv_heads,
            cache.head_dim,
            cache.max_seq_len,
            cache.sink_len,
            cache.recent_len,
            cache.exact_format,
            tuple(seq_lens.tolist()),
            tuple(cache.start_positions.tolist()),
            tuple(
                LayerEntry(
                    layer.k_format,
                    layer.v_format,
                    tuple(layer.packed_lens.tolist()),
                    layer.window,
                )
                for layer in cache.layers
            ),
            None if model is None else model_identity(model),
            copied,
            tuple(fingerprints(cache.bases)),
        )

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.seq_lens)

    @property
    def version(self) -> int:
        """Version of the file: the first one that has all that there is in it."""
        has_windows = any(entry.window is not None for entry in self.layers)
        return WINDOWS_VERSION if has_windows else VERSION

    @property
    def positions(self) -> tuple[int, ...]:
        """The position of the next token of each sequence."""
        return tuple(map(sum, zip(self.start_positions, self.seq_lens, strict=True)))

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The tensors of the file by name, in their order; empty ones have none."""
        found = {}
        for i, entry in enumerate(self.layers):
            spans = self._spans(entry)
            for side, fmt in (("k", entry.k_format), ("v", entry.v_format)):
                exact = RowFormat(self.exact_format, 1, fmt.head_dim)
                for kind, (counts, firsts) in spans.items():
                    rows = fmt if kind == "packed" else exact
                    part = Part(i, side, kind, rows, counts, firsts)
                    if part.num_rows:
                        found[part.name] = part
        return found

    def _spans(self, entry: LayerEntry) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Of each kind of rows how many there are of each sequence, and their first tokens."""
        sink_len = self.sink_len if entry.window is None else 0
        spans: dict[str, list[tuple[int, int]]] = {kind: [] for kind in KINDS}
        for seq_len, packed_len in zip(self.seq_lens, entry.packed_lens, strict=True):
            sinks = min(seq_len, sink_len)
            last = sinks + packed_len
            first = sinks if entry.window is None else min(max(seq_len - entry.window, 0), last)
            spans["sinks"].append((sinks, 0))
            spans["packed"].append((last - first, first))
            spans["recent"].append((seq_len - last, last))
        return {
            kind: (tuple(n for n, _ in span), tuple(first for _, first in span))
            for kind, span in spans.items()
        }

    def shape(self, part: Part) -> tuple[int, int, int]:
        """Shape of a part's tensor."""
        return part.num_rows, self.num_kv_heads, part.fmt.row_bytes

    def rooms(self, entry: LayerEntry, max_seq_len: int) -> Rooms:
        """Rows of each kind that a sequence has room for in a layer of a cache of max_seq_len."""
        return rooms_of(max_seq_len, self.sink_len, self.recent_len, entry.window)

    def cache_bytes(self, max_seq_len: int) -> int:
        """Bytes of the rows of a cache of max_seq_len."""
        total = 0
        for entry in self.layers:
            rooms = self.rooms(entry, max_seq_len)
            for fmt in (entry.k_format, entry.v_format):
                exact = RowFormat(self.exact_format, 1, fmt.head_dim).row_bytes
                total += rooms.packed * fmt.row_bytes + (rooms.sinks + rooms.recent) * exact
        return total * self.batch * self.num_kv_heads

    def to_json(self, digests: Mapping[str, str], writer: str) -> str:
        """The manifest as it stands in a file."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": self.version,
                "writer": writer,
                "num_kv_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "max_seq_len": self.max_seq_len,
                "sink_len": self.sink_len,
                "recent_len": self.recent_len,
                "exact_format": self.exact_format,
                "seq_lens": self.seq_lens,
                "start_positions": self.start_positions,
                "positions": self.positions,
                "layers": [
                    {
                        "k": {"format": str(entry.k_format), "head_dim": entry.k_format.head_dim},
                        "v": {"format": str(entry.v_format), "head_dim": entry.v_format.head_dim},
                        "packed_lens": entry.packed_lens,
                        **({} if entry.window is None else {"window": entry.window}),
                    }
                    for entry in self.layers
                ],
                "model": self.model,
                "creation": self.creation,
                "transforms": self.transforms,
                "sha256": dict(digests),
            },
            separators=(",", ":"),
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> tuple[Manifest, dict[str, str]]:
        """Read a manifest and the SHA-256 of each tensor, and check every value.

        Raises:
            CheckpointError: the manifest is not one that this version writes.
        """
        top = parse_manifest(text, FORMAT, (VERSION, WINDOWS_VERSION), _TOP_KEYS)
        manifest = cls(
            whole(top["num_kv_heads"], "num_kv_heads", low=1),
            whole(top["head_dim"], "head_dim", low=1),
            whole(top["max_seq_len"], "max_seq_len"),
            whole(top["sink_len"], "sink_len"),
            whole(top["recent_len"], "recent_len"),
            choice(top["exact_format"], "exact_format", EXACT_CODECS),
            wholes(top["seq_lens"], "seq_lens"),
            wholes(top["start_positions"], "start_positions", low=-INT64, high=INT64),
            tuple(
                _layer_entry(entry, f"layers[{i}]")
                for i, entry in enumerate(as_list(top["layers"], "layers"))
            ),
            identity(top["model"]),
            as_dict(top["creation"], "creation"),
            transforms(top["transforms"], len(top["layers"])),
        )
        if top["version"] != manifest.version:
            raise CheckpointError(
                f"the file has version {top['version']}, its layers are of {manifest.version}"
            )
        manifest._check(wholes(top["positions"], "positions", low=-INT64, high=INT64))
        digests = as_dict(top["sha256"], "sha256")
        if digests.keys() != manifest.parts.keys():
            names = sorted(digests.keys() ^ manifest.parts.keys())
            raise CheckpointError(
                f"the tensors listed do not fit the lengths: see {names[0]!r:.80}"
            )
        for name, digest in digests.items():
            check_digest(digest, f"sha256 of {name}")
        return manifest, digests

    def _check(self, positions: tuple[int, ...]) -> None:
        """Raise unless the values fit one another."""
        if not self.batch or not self.layers:
            raise CheckpointError("seq_lens and layers must not be empty")
        if len(self.start_positions) != self.batch or positions != self.positions:
            raise CheckpointError("start_positions, seq_lens and positions do not fit one another")
        if max(self.seq_lens) > self.max_seq_len:
            raise CheckpointError(
                f"a sequence has {max(self.seq_lens)} tokens, max_seq_len is {self.max_seq_len}"
            )
        for i, entry in enumerate(self.layers):
            if len(entry.packed_lens) != self.batch:
                raise CheckpointError(
                    f"layers[{i}].packed_lens has {len(entry.packed_lens)} numbers for "
                    f"{self.batch} sequences"
                )
            for seq_len, packed in zip(self.seq_lens, entry.packed_lens, strict=True):
                most = max(seq_len - (self.sink_len if entry.window is None else 0), 0)
                least = most - min(self.recent_len, entry.window or self.recent_len)
                if not max(least, 0) <= packed <= most:
                    raise CheckpointError(
                        f"layers[{i}].packed_lens has {packed} for a sequence of {seq_len} tokens "
                        f"with sink_len {self.sink_len} and recent_len {self.recent_len}"
                    )


_TOP_KEYS = set(
    "format version writer num_kv_heads head_dim max_seq_len sink_len recent_len exact_format "
    "seq_lens start_positions positions layers model creation transforms sha256".split()
)


def _layer_entry(value: Any, what: str) -> LayerEntry:
    has_window = "window" in as_dict(value, what)
    keys = {"k", "v", "packed_lens", "window"} if has_window else {"k", "v", "packed_lens"}
    check_keys(value, keys, what)
    return LayerEntry(
        row_format(value["k"], f"{what}.k"),
        row_format(value["v"], f"{what}.v"),
        wholes(value["packed_lens"], f"{what}.packed_lens"),
        whole(value["window"], f"{what}.window", low=1) if has_window else None,
    )
