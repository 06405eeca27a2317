"""Manifests: what a file of rows says besides its rows, as JSON, read with every value checked.

A CacheManifest describes a KVCache, a SequencesManifest sequences of a PagedKVCache. Their keys are
documented in checkpoint.py and sequences.py, which own the formats.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np
import torch
from msgspec import UNSET, Meta, UnsetType

from ..cache.contiguous import KVCache
from ..cache.layer import ROLLBACK, Rooms, packed_row_bytes, rooms_of
from ..errors import CheckpointError, ConfigError
from ..paged.cache import PagedKVCache
from ..paged.state import MAX_ID_BITS
from ..rows.basis import fingerprints
from ..rows.format import RowFormat, check_head_dims
from ..rows.latent import LatentFormat
from ..rows.segment import PAGE_SIZES
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
from .shards import MANIFEST
from .tensor_files import NO_DIGEST

if TYPE_CHECKING:
    from typing_extensions import Self

WINDOWS_VERSION = 2  # of caches with sliding windows; all else is as in version 1
ROLLBACK_VERSION = 3  # of caches with another rollback_len than 64; all else is as in version 2
LATENT_VERSION = 4  # of caches of latent rows; all else is as in version 3
LATENT_BASES_VERSION = 5  # of those whose rows are in bases; all else is as in version 4
LISTS_VERSION = 2  # of sequences whose pages and tokens stand in tensors; all else is the same
LATENT_PAGES_VERSION = 3  # of sequences of latent rows; all else is as in version 2
MANY = 1 << 16  # numbers of pages and tokens, above which they do
LISTS = {"pages": torch.int32, "tokens": torch.int64}  # what SavedSequence lists

Read = Callable[[str, torch.dtype, int, str], list[int]]


@dataclass(frozen=True)
class Part:
    """The rows of K or of V of one layer in one kind of segment: one tensor of the file.

    Attributes:
        layer: index of the layer.
        side: "k" or "v".
        kind: "sinks", "packed" or "recent"; of sequences "pages" or "exact".
        fmt: format of the rows.
        num_kv_heads: KV heads.
        counts: rows of each sequence.
        firsts: the token that the first row of each sequence holds.
        packed_as: what 16-bit rows will be quantized to, from these 16 bits; None if they stay.
        sink_len: tokens of each sequence, the first ones, whose rows stay in any case.
    """

    layer: int
    side: str
    kind: str
    fmt: RowFormat
    num_kv_heads: int
    counts: tuple[int, ...]
    firsts: tuple[int, ...]
    packed_as: RowFormat | None = None
    sink_len: int = 0

    @cached_property
    def attribute(self) -> str:
        """The attribute of the cache's layer that holds the rows."""
        return f"{self.side}_{self.kind}"

    @cached_property
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

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.num_rows, self.num_kv_heads, self.fmt.row_bytes

    def locate(self, row: int) -> tuple[int, int]:
        """Sequence and token of a row of the tensor."""
        sequence = bisect_right(self.starts, row) - 1
        return sequence, self.firsts[sequence] + row - self.starts[sequence]

    def by_token(self, rows: torch.Tensor) -> torch.Tensor:
        """The tensor as [tokens, num_kv_heads, row_bytes]."""
        return rows

    def in_use(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of the tensor that hold a token: [tokens, num_kv_heads, row_bytes]."""
        return rows


@dataclass(frozen=True)
class PagePart(Part):
    """The pages of K or V of one layer: counts and firsts of each page.

    Attributes:
        owners: the first sequence that uses each page.
        used: rows of each page that hold a token, the first ones.
    """

    owners: tuple[int, ...] = ()
    used: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """[pages, num_kv_heads, page_size, row_bytes]."""
        return len(self.counts), self.num_kv_heads, self.counts[0], self.fmt.row_bytes

    def locate(self, row: int) -> tuple[int, int]:
        """Sequence and token of a row, counted through all pages."""
        page, token = super().locate(row)
        return self.owners[page], token

    def by_token(self, rows: torch.Tensor) -> torch.Tensor:
        """The tensor as [tokens, num_kv_heads, row_bytes]: pages one after another."""
        return rows.transpose(1, 2).flatten(0, 1)

    def in_use(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all pages that hold a token: [tokens, num_kv_heads, row_bytes]."""
        used = torch.tensor(self.used, device="cpu")[:, None]
        return self.by_token(rows)[(torch.arange(self.counts[0], device="cpu") < used).flatten()]


@dataclass(frozen=True)
class ExactPart(Part):
    """The 16-bit rows of K or V of one layer: of each sequence its sinks, then its recent tokens;
    `packed_lens` tokens are between them."""

    packed_lens: tuple[int, ...] = ()

    def locate(self, row: int) -> tuple[int, int]:
        """Sequence and token of a row."""
        sequence, token = super().locate(row)
        return sequence, token + (self.packed_lens[sequence] if token >= self.sink_len else 0)


_ORIGIN = (  # what all manifests have, as it stands in a file
    "num_kv_heads",
    "sink_len",
    "recent_len",
    "exact_format",
    "model",
    "creation",
    "transforms",
)


@dataclass(frozen=True)
class LayerEntry:
    """Formats of one layer; of a cache also the packed tokens of its sequences, and its window."""

    k_format: RowFormat
    v_format: RowFormat
    packed_lens: tuple[int, ...] = ()
    window: int | None = None

    def formats(self) -> dict[str, Any]:
        """The formats as they stand in a file."""
        return {
            side: {"format": str(fmt), "head_dim": fmt.head_dim}
            for side, fmt in (("k", self.k_format), ("v", self.v_format))
        }


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the manifests of all files of rows have in common; attributes as in the caches.

    Attributes:
        model: model_identity of the model that the rows belong to; None if it is not known.
        creation: how the rows came about, for people.
        transforms: the fingerprints of each layer's bases; empty without bases.
        latent: whether K and V of each layer are the parts of latent rows.
    """

    KEY: ClassVar[str]  # of a file's metadata, where the manifest stands
    FORMAT: ClassVar[str]
    KINDS: ClassVar[tuple[str, ...]]  # of the parts of a layer's K or V

    num_kv_heads: int
    sink_len: int
    recent_len: int
    exact_format: str
    layers: tuple[LayerEntry, ...]
    model: Mapping[str, str] | None
    creation: Mapping[str, Any]
    transforms: tuple[Mapping[str, str], ...] = ()
    latent: bool = False

    @property
    def version(self) -> int:
        """Version of the file."""
        raise NotImplementedError

    @property
    def formats(self) -> tuple[tuple[RowFormat, RowFormat], ...]:
        """Of the packed rows of K and V of each layer."""
        return tuple((entry.k_format, entry.v_format) for entry in self.layers)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The tensors of rows of the file by name, in their order; empty ones have none."""
        raise NotImplementedError

    @cached_property
    def lists(self) -> dict[str, list[int]]:
        """The tensors of the file that hold numbers and no rows."""
        return {}

    def to_json(self, digests: Mapping[str, str], writer: str) -> str:
        """The manifest as it stands in a file."""
        return json.dumps(
            {
                "format": self.FORMAT,
                "version": self.version,
                "writer": writer,
                **{name: getattr(self, name) for name in _ORIGIN},
                **({"latent": True} if self.latent else {}),
                **self._own(),
                "sha256": dict(digests),
            },
            separators=(",", ":"),
            sort_keys=True,
        )

    def _own(self) -> dict[str, Any]:
        """The keys that only this kind of file has."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str, read: Read) -> tuple[Self, dict[str, str]]:
        """Read a manifest and the SHA-256 of each tensor, and check every value.

        Args:
            text: of the manifest.
            read: gives the numbers of a tensor of `lists` by its name, dtype, how many it must
                have, and its SHA-256.

        Raises:
            CheckpointError: the manifest is not one that this version writes.
        """
        raise NotImplementedError

    def check_model(self, path: Path, model: Mapping[str, Any] | None) -> None:
        """Raise CheckpointError unless the file belongs to a model, given by its config, or None.

        Raises:
            ConfigError: the config is no dict, or holds what JSON cannot.
        """
        if model is None:
            return
        ours, theirs = self.model, model_identity(model)
        if ours is None:
            raise CheckpointError(
                f"{path} does not say which model it belongs to: save it with model=config, or "
                "load it with model=None if you know that it fits"
            )
        if ours["sha256"] != theirs["sha256"]:
            raise CheckpointError(
                f"{path} belongs to a {ours['type']!r:.40} model with config {ours['sha256'][:12]}"
                f", not to this {theirs['type']!r:.40} model with config "
                f"{theirs['sha256'][:12]}: take the cache that was made with this model"
            )

    def _check_formats(self) -> None:
        """Raise CheckpointError unless there are caches of such rows."""
        try:
            if not self.latent:
                check_head_dims(*itertools.chain(*self.formats))
                return
            sizes = {(fmt.latent_dim, fmt.rope_dim) for fmt in starmap(LatentFormat, self.formats)}
        except ConfigError as error:
            raise CheckpointError(f"layers have formats that no cache has: {error}") from None
        if len(sizes) > 1 or self.num_kv_heads != 1:
            raise CheckpointError("latent rows are of one size, and of one KV head")
        if any(entry.window is not None for entry in self.layers):
            raise CheckpointError("latent rows have no windows")

    def check_readable(self) -> None:
        """Raise CheckpointError if from_json would not read what to_json writes."""
        digests = dict.fromkeys((*self.parts, *self.lists), NO_DIGEST)
        self.from_json(self.to_json(digests, ""), lambda name, *_: self.lists[name])


def origin(
    cache: KVCache | PagedKVCache,
    model: Mapping[str, Any] | None,
    creation: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The attributes that all manifests have, of a cache that is saved.

    Raises:
        ConfigError: model or creation is not plain data.
    """
    return {
        "num_kv_heads": cache.num_kv_heads,
        "sink_len": cache.sink_len,
        "recent_len": cache.recent_len,
        "exact_format": cache.exact_format,
        "model": None if model is None else model_identity(model),
        "creation": plain_data(creation, "creation"),
        "transforms": tuple(fingerprints(cache.bases)),
    }


class _Fields(Object):
    """What stands in the manifests of all files."""

    format: str
    version: int
    writer: Any
    num_kv_heads: Count
    sink_len: Length
    recent_len: Length
    exact_format: ExactCodec
    model: ModelName | None
    creation: dict[str, Any]
    transforms: Any
    sha256: dict[str, Digest]

    def origin(self, num_layers: int) -> dict[str, Any]:
        """The attributes that all manifests have."""
        return {
            "num_kv_heads": self.num_kv_heads,
            "sink_len": self.sink_len,
            "recent_len": self.recent_len,
            "exact_format": self.exact_format,
            "model": msgspec.to_builtins(self.model),
            "creation": self.creation,
            "transforms": transforms(self.transforms, num_layers),
        }


class _LayerFields(Object):
    """A layer in a manifest."""

    k: FormatName
    v: FormatName

    def entry(self, what: str) -> LayerEntry:
        """The same with its formats parsed."""
        return LayerEntry(self.k.row_format(f"{what}.k"), self.v.row_format(f"{what}.v"))


@dataclass(frozen=True, kw_only=True)
class CacheManifest(Manifest):
    """All of a KVCache but its rows; attributes as there."""

    KEY = MANIFEST
    FORMAT = "kvquant-cache"
    KINDS = ("sinks", "packed", "recent")

    head_dim: int
    max_seq_len: int
    seq_lens: tuple[int, ...]
    start_positions: tuple[int, ...]
    rollback_len: int = ROLLBACK

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.seq_lens)

    @property
    def version(self) -> int:
        """Version of the file: the first one that has all that there is in it."""
        if self.latent:
            return LATENT_BASES_VERSION if self.transforms else LATENT_VERSION
        if self.rollback_len != ROLLBACK:
            return ROLLBACK_VERSION
        has_windows = any(entry.window is not None for entry in self.layers)
        return WINDOWS_VERSION if has_windows else 1

    @property
    def positions(self) -> tuple[int, ...]:
        """The position of the next token of each sequence."""
        return tuple(map(sum, zip(self.start_positions, self.seq_lens, strict=True)))

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The tensors of the file by name, in their order; empty ones have none."""
        found: dict[str, Part] = {}
        for i, entry in enumerate(self.layers):
            spans = self._spans(entry)
            for side, fmt in (("k", entry.k_format), ("v", entry.v_format)):
                exact = RowFormat.parse(self.exact_format, fmt.head_dim)
                for kind, (counts, firsts) in spans.items():
                    if not any(counts):
                        continue
                    rows = fmt if kind == "packed" else exact
                    later = fmt if kind == "recent" else None
                    part = Part(i, side, kind, rows, self.num_kv_heads, counts, firsts, later)
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
        counts = sinks, last - first, seq_lens - last
        firsts = np.zeros_like(sinks), first, last
        return {
            kind: (tuple(count.tolist()), tuple(start.tolist()))
            for kind, count, start in zip(self.KINDS, counts, firsts, strict=True)
        }

    def rooms(self, max_seq_len: int) -> list[Rooms]:
        """Capacity of a sequence in rows of each kind, by layer, in a cache of max_seq_len."""
        sizes = max_seq_len, self.sink_len, self.recent_len
        found = []
        for entry in self.layers:
            row_bytes = packed_row_bytes(entry.k_format, entry.v_format, latent=self.latent)
            found.append(rooms_of(*sizes, entry.window, self.rollback_len, row_bytes))
        return found

    def cache_bytes(self, max_seq_len: int) -> int:
        """Bytes of the rows of a cache of max_seq_len."""
        each = zip(self.rooms(max_seq_len), self.layers, strict=True)
        total = sum(
            rooms.bytes_of(entry.k_format, entry.v_format, self.exact_format)
            for rooms, entry in each
        )
        return total * self.batch * self.num_kv_heads

    def _own(self) -> dict[str, Any]:
        names = ["head_dim", "max_seq_len", "seq_lens", "start_positions", "positions"]
        layers = [
            {
                **entry.formats(),
                "packed_lens": entry.packed_lens,
                **({} if entry.window is None else {"window": entry.window}),
            }
            for entry in self.layers
        ]
        if self.rollback_len != ROLLBACK:
            names.append("rollback_len")
        return {name: getattr(self, name) for name in names} | {"layers": layers}

    @classmethod
    def from_json(cls, text: str, read: Read | None = None) -> tuple[Self, dict[str, str]]:
        """See Manifest.from_json; there is nothing to read besides."""
        latent = LATENT_VERSION, LATENT_BASES_VERSION
        versions = 1, WINDOWS_VERSION, ROLLBACK_VERSION, *latent
        top = manifest_object(text, cls.FORMAT, versions)
        given = checked(top, _CacheFields, "the manifest")
        manifest = cls(
            layers=tuple(layer.entry(f"layers[{i}]") for i, layer in enumerate(given.layers)),
            **given.origin(len(given.layers)),
            head_dim=given.head_dim,
            max_seq_len=given.max_seq_len,
            seq_lens=given.seq_lens,
            start_positions=given.start_positions,
            rollback_len=ROLLBACK if given.rollback_len is UNSET else given.rollback_len,
            latent=given.latent is True,
        )
        if given.version != manifest.version:
            raise CheckpointError(
                f"the file has version {given.version}, what it says is of {manifest.version}"
            )
        manifest._check(given.positions)
        if given.sha256.keys() != manifest.parts.keys():
            names = sorted(given.sha256.keys() ^ manifest.parts.keys())
            raise CheckpointError(
                f"the tensors listed do not fit the lengths: see {names[0]!r:.80}"
            )
        return manifest, given.sha256

    def _check(self, positions: tuple[int, ...]) -> None:
        """Raise unless the values fit one another."""
        if not self.batch or not self.layers:
            raise CheckpointError("seq_lens and layers must not be empty")
        self._check_formats()
        if self.latent and self.head_dim != self.formats[0][0].head_dim:
            raise CheckpointError(
                f"head_dim is {self.head_dim}: that of latent rows is their latent_dim"
            )
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


class _CacheLayer(_LayerFields):
    """A layer in the manifest of a cache."""

    packed_lens: tuple[Length, ...]
    window: Count | UnsetType = UNSET

    def entry(self, what: str) -> LayerEntry:
        """The same with its formats parsed."""
        window = None if self.window is UNSET else self.window
        return replace(super().entry(what), packed_lens=self.packed_lens, window=window)


class _CacheFields(_Fields):
    """The manifest of a cache as it stands in a file."""

    head_dim: Count
    max_seq_len: Length
    seq_lens: Annotated[tuple[Length, ...], Meta(max_length=MAX_SEQUENCES)]
    start_positions: tuple[Wide, ...]
    positions: tuple[Wide, ...]
    layers: Annotated[tuple[_CacheLayer, ...], Meta(max_length=MAX_LAYERS)]
    rollback_len: Length | UnsetType = UNSET
    latent: bool | UnsetType = UNSET


class SavedSequence(Object):
    """A sequence of a file; attributes as in the manifest."""

    id: str | int
    length: Length
    packed_len: Length
    pages: tuple[Length, ...]
    tokens: tuple[Wide, ...]


@dataclass(frozen=True, kw_only=True)
class SequencesManifest(Manifest):
    """All of the sequences but their rows; attributes as in PagedKVCache.

    From LISTS_VERSION on pages and tokens stand in tensors.
    """

    KEY = "kvquant_pages"
    FORMAT = "kvquant-pages"
    KINDS = ("pages", "exact")

    page_size: int
    sequences: tuple[SavedSequence, ...]
    version: int = 1

    @cached_property
    def lists(self) -> dict[str, list[int]]:
        """The tensors of the file that hold numbers of all sequences, one after another."""
        if self.version < LISTS_VERSION:
            return {}
        found = {
            f"sequences.{name}": [n for sequence in self.sequences for n in getattr(sequence, name)]
            for name in LISTS
        }
        return {name: numbers for name, numbers in found.items() if numbers}

    @cached_property
    def used(self) -> dict[int, tuple[int, int, int]]:
        """For each page its rows in use, the first sequence that has it, and its index there."""
        found: dict[int, tuple[int, int, int]] = {}
        for i, sequence in enumerate(self.sequences):
            for at, page in enumerate(sequence.pages):
                rows = min(sequence.packed_len - at * self.page_size, self.page_size)
                before, owner, first = found.get(page, (0, i, at))
                found[page] = max(rows, before), owner, first
        return dict(sorted(found.items()))

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The tensors of rows of the file by name, in their order; empty ones have none."""
        found: dict[str, Part] = {}
        packed_lens = tuple(sequence.packed_len for sequence in self.sequences)
        exact = tuple(sequence.length - sequence.packed_len for sequence in self.sequences)
        used = tuple(rows for rows, _, _ in self.used.values())
        owners = tuple(owner for _, owner, _ in self.used.values())
        firsts = tuple(self.sink_len + at * self.page_size for _, _, at in self.used.values())
        counts, zeros = (self.page_size,) * len(self.used), (0,) * len(exact)
        for layer, formats in enumerate(self.formats):
            for side, fmt in zip("kv", formats, strict=True):
                fmt16 = RowFormat.parse(self.exact_format, fmt.head_dim)
                packed = fmt, self.num_kv_heads, counts, firsts
                kept = fmt16, self.num_kv_heads, exact, zeros, fmt, self.sink_len
                for part in (
                    PagePart(layer, side, "pages", *packed, owners=owners, used=used),
                    ExactPart(layer, side, "exact", *kept, packed_lens=packed_lens),
                ):
                    if part.num_rows:
                        found[part.name] = part
        return found

    def _own(self) -> dict[str, Any]:
        sequences = [
            {name: getattr(sequence, name) for name in SavedSequence.__struct_fields__}
            for sequence in self.sequences
        ]
        if self.version >= LISTS_VERSION:
            for found in sequences:
                found["known"] = len(found.pop("tokens"))
                del found["pages"]
        layers = [entry.formats() for entry in self.layers]
        return {"page_size": self.page_size, "layers": layers, "sequences": sequences}

    @classmethod
    def from_json(cls, text: str, read: Read) -> tuple[Self, dict[str, str]]:
        """See Manifest.from_json."""
        versions = 1, LISTS_VERSION, LATENT_PAGES_VERSION
        top = manifest_object(text, cls.FORMAT, versions)
        given: _SequencesFields | _CountedFields
        if top["version"] == 1:
            given = checked(top, _SequencesFields, "the manifest")
        else:
            try:
                given = checked(top, _CountedFields, "the manifest")
            except CheckpointError as error:
                version = top["version"]
                raise CheckpointError(f"the file has version {version}, and {error}") from None
        if given.page_size not in PAGE_SIZES:
            raise CheckpointError(f"page_size is {given.page_size}: it must be 16, 32, 64 or 128")
        if isinstance(given, _SequencesFields):
            sequences, latent = given.sequences, False
        else:
            sequences, latent = _with_lists(given, read), given.latent is True
        if latent != (given.version == LATENT_PAGES_VERSION):
            what = f"{'is' if latent else 'is not'} of latent rows"
            raise CheckpointError(f"the file has version {given.version}, and {what}")
        manifest = cls(
            layers=tuple(layer.entry(f"layers[{i}]") for i, layer in enumerate(given.layers)),
            **given.origin(len(given.layers)),
            page_size=given.page_size,
            sequences=sequences,
            version=given.version,
            latent=latent,
        )
        manifest._check()
        if given.sha256.keys() != manifest.parts.keys() | manifest.lists.keys():
            raise CheckpointError("sha256 does not name the tensors that the sequences ask for")
        return manifest, given.sha256

    def _check(self) -> None:
        """Raise unless lengths, pages and tokens fit one another."""
        if not self.formats or not self.sequences:
            raise CheckpointError("layers and sequences must not be empty")
        self._check_formats()
        for i, sequence in enumerate(self.sequences):
            if isinstance(sequence.id, int) and sequence.id.bit_length() > MAX_ID_BITS:
                raise CheckpointError(
                    f"sequences[{i}].id has {sequence.id.bit_length()} bits: {MAX_ID_BITS} are "
                    "possible"
                )
        if len({sequence.id for sequence in self.sequences}) < len(self.sequences):
            raise CheckpointError("two sequences have one id")
        size, before = self.page_size, dict[int, tuple[int | None, tuple[int, ...]]]()
        for i, sequence in enumerate(self.sequences):
            most = max(sequence.length - self.sink_len, 0)
            if (
                not max(most - self.recent_len, 0) <= sequence.packed_len <= most
                or len(sequence.pages) != -(-sequence.packed_len // size)
                or len(sequence.tokens) > sequence.length
            ):
                raise CheckpointError(
                    f"sequences[{i}]: length {sequence.length}, packed_len {sequence.packed_len}, "
                    f"{len(sequence.pages)} pages and {len(sequence.tokens)} tokens do not fit"
                )
            last: int | None = None
            for at, page in enumerate(sequence.pages):  # pages are shared from the first on
                end = self.sink_len + min((at + 1) * size, sequence.packed_len)
                start = self.sink_len + at * size if at else 0
                tokens = sequence.tokens[start:end]
                shared_with, longest = before.setdefault(page, (last, tokens))
                both = min(len(tokens), len(longest))
                if shared_with != last or tokens[:both] != longest[:both]:
                    raise CheckpointError(f"sequences[{i}] cannot share page {page}")
                if len(tokens) > len(longest):  # what others know of the page is compared with it
                    before[page] = last, tokens
                last = page
        if list(self.used) != list(range(len(self.used))):
            raise CheckpointError("the pages are not counted from 0 without gaps")


class _Counted(Object):
    """A sequence of a file of version 2 or 3: how many of its tokens are known."""

    id: str | int
    length: Length
    packed_len: Length
    known: Length


class _PagedFields(_Fields):
    """The manifest of sequences as it stands in a file, but for the sequences."""

    page_size: Length
    layers: Annotated[tuple[_LayerFields, ...], Meta(max_length=MAX_LAYERS)]


class _SequencesFields(_PagedFields):
    """Version 1."""

    sequences: Annotated[tuple[SavedSequence, ...], Meta(max_length=MAX_SEQUENCES)]


class _CountedFields(_PagedFields):
    """Versions 2 and 3."""

    sequences: Annotated[tuple[_Counted, ...], Meta(max_length=MAX_SEQUENCES)]
    latent: bool | UnsetType = UNSET


def _with_lists(given: _CountedFields, read: Read) -> tuple[SavedSequence, ...]:
    """The sequences of a manifest of version 2 or 3 with what its tensors list."""
    counts = {
        "pages": [-(-sequence.packed_len // given.page_size) for sequence in given.sequences],
        "tokens": [sequence.known for sequence in given.sequences],
    }
    lists: dict[str, Iterator[int]] = {}
    for name, dtype in LISTS.items():
        key, count = f"sequences.{name}", sum(counts[name])
        numbers = read(key, dtype, count, given.sha256.get(key, "")) if count else []
        lists[name] = iter(numbers)
        if name == "pages" and min(numbers, default=0) < 0:
            raise CheckpointError(f"{key} has {min(numbers)}: pages are 0 and more")
    return tuple(
        SavedSequence(
            sequence.id,
            sequence.length,
            sequence.packed_len,
            *(tuple(islice(lists[name], counts[name][i])) for name in LISTS),
        )
        for i, sequence in enumerate(given.sequences)
    )
