"""The manifest: what a cache file says of itself, as JSON, read with every value checked.

The keys are told in checkpoint.py, which owns the format.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import UNSET, Meta, UnsetType

from ..cache.contiguous import KVCache
from ..cache.layer import Rooms, rooms_of
from ..errors import CheckpointError, ShapeError
from ..rows.basis import fingerprints
from ..rows.format import RowFormat
from .model_id import model_identity
from .schema import (
    MAX_LAYERS,
    MAX_SEQUENCES,
    Count,
    Digest,
    ExactCodec,
    FormatName,
    Length,
    ModelName,
    Object,
    Wide,
    checked,
    manifest_object,
    plain_data,
    transforms,
)

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
        packed_as: what 16-bit rows will be quantized to, from these 16 bits; None if they stay.
        sink_len: tokens of each sequence, the first ones, whose rows stay in any case.
    """

    layer: int
    side: str
    kind: str
    fmt: RowFormat
    counts: tuple[int, ...]
    firsts: tuple[int, ...]
    packed_as: RowFormat | None = None
    sink_len: int = 0

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

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The row of the tensor that is the first one of each sequence."""
        return tuple(accumulate(self.counts[:-1], initial=0))

    def locate(self, row: int) -> tuple[int, int]:
        """Sequence and token of a row of the tensor."""
        sequence = bisect_right(self.starts, row) - 1
        return sequence, self.firsts[sequence] + row - self.starts[sequence]

    def by_token(self, rows: torch.Tensor) -> torch.Tensor:
        """The tensor as [tokens, num_kv_heads, row_bytes]."""
        return rows


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
            plain_data(creation, "creation"),
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
                    later = fmt if kind == "recent" else None
                    part = Part(i, side, kind, rows, counts, firsts, later)
                    if part.num_rows:
                        found[part.name] = part
        return found

    def _spans(self, entry: LayerEntry) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Of each kind of rows how many there are of each sequence, and their first tokens."""
        seq_lens, packed_lens = np.array(self.seq_lens), np.array(entry.packed_lens)
        sinks = np.minimum(seq_lens, self.sink_len if entry.window is None else 0)
        last = sinks + packed_lens
        first = sinks
        if entry.window is not None:
            first = np.minimum(np.maximum(seq_lens - entry.window, 0), last)
        spans = {
            "sinks": (sinks, np.zeros_like(sinks)),
            "packed": (last - first, first),
            "recent": (seq_lens - last, last),
        }
        return {
            kind: (tuple(counts.tolist()), tuple(firsts.tolist()))
            for kind, (counts, firsts) in spans.items()
        }

    def shape(self, part: Part) -> tuple[int, int, int]:
        """Shape of a part's tensor."""
        return part.num_rows, self.num_kv_heads, part.fmt.row_bytes

    def rooms(self, entry: LayerEntry, max_seq_len: int) -> Rooms:
        """Rows of each kind that a sequence has room for in a layer of a cache of max_seq_len."""
        return rooms_of(max_seq_len, self.sink_len, self.recent_len, entry.window)

    def cache_bytes(self, max_seq_len: int) -> int:
        """Bytes of the rows of a cache of max_seq_len."""
        total = sum(
            self.rooms(entry, max_seq_len).bytes_of(
                entry.k_format, entry.v_format, self.exact_format
            )
            for entry in self.layers
        )
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
        top = manifest_object(text, FORMAT, (VERSION, WINDOWS_VERSION))
        told = checked(top, _Told, "the manifest")
        manifest = cls(
            told.num_kv_heads,
            told.head_dim,
            told.max_seq_len,
            told.sink_len,
            told.recent_len,
            told.exact_format,
            told.seq_lens,
            told.start_positions,
            tuple(layer.entry(f"layers[{i}]") for i, layer in enumerate(told.layers)),
            msgspec.to_builtins(told.model),
            told.creation,
            transforms(told.transforms, len(told.layers)),
        )
        if told.version != manifest.version:
            raise CheckpointError(
                f"the file has version {told.version}, its layers are of {manifest.version}"
            )
        manifest._check(told.positions)
        if told.sha256.keys() != manifest.parts.keys():
            names = sorted(told.sha256.keys() ^ manifest.parts.keys())
            raise CheckpointError(
                f"the tensors listed do not fit the lengths: see {names[0]!r:.80}"
            )
        return manifest, told.sha256

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
        seq_lens = np.array(self.seq_lens)
        for i, entry in enumerate(self.layers):
            if len(entry.packed_lens) != self.batch:
                raise CheckpointError(
                    f"layers[{i}].packed_lens has {len(entry.packed_lens)} numbers for "
                    f"{self.batch} sequences"
                )
            most = np.maximum(seq_lens - (self.sink_len if entry.window is None else 0), 0)
            recent_len = min(self.recent_len, entry.window or self.recent_len)
            packed = np.array(entry.packed_lens)
            bad = (packed > most) | (packed < most - recent_len)
            if bad.any():
                b = int(bad.argmax())
                raise CheckpointError(
                    f"layers[{i}].packed_lens has {packed[b]} for a sequence of {seq_lens[b]} "
                    f"tokens with sink_len {self.sink_len} and recent_len {self.recent_len}"
                )


class _ToldLayer(Object):
    """A layer in a manifest."""

    k: FormatName
    v: FormatName
    packed_lens: tuple[Length, ...]
    window: Count | UnsetType = UNSET

    def entry(self, what: str) -> LayerEntry:
        """The same with its formats parsed."""
        k, v = self.k.row_format(f"{what}.k"), self.v.row_format(f"{what}.v")
        return LayerEntry(k, v, self.packed_lens, None if self.window is UNSET else self.window)


class _Told(Object):
    """A manifest as it stands in a file."""

    format: str
    version: int
    writer: Any
    num_kv_heads: Count
    head_dim: Count
    max_seq_len: Length
    sink_len: Length
    recent_len: Length
    exact_format: ExactCodec
    seq_lens: Annotated[tuple[Length, ...], Meta(max_length=MAX_SEQUENCES)]
    start_positions: tuple[Wide, ...]
    positions: tuple[Wide, ...]
    layers: Annotated[tuple[_ToldLayer, ...], Meta(max_length=MAX_LAYERS)]
    model: ModelName | None
    creation: dict[str, Any]
    transforms: Any
    sha256: dict[str, Digest]
