"""Manifests: what a file of rows says besides its rows, as JSON, read with every value checked.

A CacheManifest describes a KVCache, a SequencesManifest sequences of a PagedKVCache. Their fields
are the keys of the JSON, which checkpoint.py and sequences.py document: these own the formats.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import islice, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np
import torch
from msgspec import Meta
from msgspec.structs import replace

from ..cache.contiguous import KVCache
from ..cache.layer import ROLLBACK, Rooms, packed_row_bytes, rooms_of
from ..errors import CheckpointError, ConfigError
from ..paged.cache import PagedKVCache
from ..paged.state import MAX_ID_BITS
from ..paged.window_pages import first_seen
from ..rows.basis import fingerprints
from ..rows.codec import one_of
from ..rows.format import RowFormat, check_head_dims
from ..rows.latent import LatentFormat
from ..rows.segment import PAGE_SIZES
from .model_id import check_identity, model_identity
from .parts import ExactPart, PagePart, Part
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
    check_transforms,
    checked,
    manifest_object,
    plain_data,
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
WINDOW_PAGES_VERSION = 4  # of sequences of layers with windows; all else is as in version 2
NAMESPACES_VERSION = 5  # of sequences with namespaces, latent rows and windows; else as version 2
MANY = 1 << 16  # numbers of pages and tokens, above which they do
LISTS = {"pages": torch.int32, "tokens": torch.int64}  # what SavedSequence lists

Read = Callable[[str, torch.dtype, int, str], list[int]]


class LayerEntry(Object, dict=True):
    """The formats of one layer's packed rows."""

    k: FormatName
    v: FormatName

    @cached_property
    def formats(self) -> tuple[RowFormat, RowFormat]:
        """Of K and of V."""
        return self.k.row_format("k"), self.v.row_format("v")


class CacheLayer(LayerEntry, dict=True, omit_defaults=True):
    """A layer of a cache: also the packed tokens of its sequences, and its window."""

    packed_lens: tuple[Length, ...]
    window: Count | None = None


class Manifest(Object, kw_only=True, dict=True, omit_defaults=True):
    """What the manifests of all files of rows have in common: the keys of the JSON.

    Attributes:
        format: FORMAT.
        version: of the file.
        writer: the program that wrote it, for people.
        model: model_identity of the model that the rows belong to; None if it is not known.
        creation: how the rows came about, for people.
        transforms: the fingerprints of each layer's bases; empty without bases.
        sha256: of each tensor.
        latent: whether K and V of each layer are the parts of latent rows.
    """

    KEY: ClassVar[str]  # of a file's metadata, where the manifest stands
    FORMAT: ClassVar[str]
    VERSIONS: ClassVar[tuple[int, ...]]
    KINDS: ClassVar[tuple[str, ...]]  # of the parts of a layer's K or V

    format: str
    version: int
    writer: Any
    num_kv_heads: Count
    sink_len: Length
    recent_len: Length
    exact_format: ExactCodec
    layers: Annotated[tuple[LayerEntry, ...], Meta(max_length=MAX_LAYERS)]
    model: ModelName | None
    creation: dict[str, Any]
    transforms: Any
    sha256: dict[str, Digest]
    latent: bool = False

    @property
    def formats(self) -> tuple[tuple[RowFormat, RowFormat], ...]:
        """Of the packed rows of K and V of each layer."""
        return tuple(entry.formats for entry in self.layers)

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
        plain = msgspec.to_builtins(replace(self, sha256=dict(digests), writer=writer))
        return json.dumps(plain, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str, read: Read = lambda *_: []) -> Self:
        """Read a manifest, and check every value.

        Args:
            text: of the manifest.
            read: gives the numbers of a tensor of `lists` by its name, dtype, how many it must
                have, and its SHA-256.

        Raises:
            CheckpointError: the manifest is not one that this version writes.
        """
        manifest = cls._parsed(manifest_object(text, cls.FORMAT, cls.VERSIONS), read)
        check_transforms(manifest.transforms, len(manifest.layers))
        for i, layer in enumerate(manifest.layers):
            for side in "kv":
                getattr(layer, side).row_format(f"layers[{i}].{side}")
        manifest._check()
        listed = manifest.parts.keys() | manifest.lists.keys()
        if manifest.sha256.keys() != listed:
            name = min(manifest.sha256.keys() ^ listed)
            raise CheckpointError(
                f"sha256 does not name the tensors that the lengths ask for: see {name!r:.80}"
            )
        return manifest

    @classmethod
    def _parsed(cls, top: dict[str, Any], read: Read) -> Self:
        """The manifest of a JSON object, each value checked by itself."""
        return checked(top, cls, "the manifest")

    def _check(self) -> None:
        """Raise CheckpointError unless the values fit one another."""
        raise NotImplementedError

    def check_model(self, path: Path, model: Mapping[str, Any] | None) -> None:
        """Raise CheckpointError unless the file belongs to a model, given by its config, or None.

        Raises:
            ConfigError: the config is no dict, or holds what JSON cannot.
        """
        if model is None:
            return
        if self.model is None:
            raise CheckpointError(
                f"{path} does not say which model it belongs to: save it with model=config, or "
                "load it with model=None if you know that it fits"
            )
        saved, advice = msgspec.to_builtins(self.model), "take the cache that was made with it"
        check_identity(saved, model, f"{path} belongs to", "to", advice)

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

    def check_readable(self) -> None:
        """Raise CheckpointError if from_json would not read what to_json writes."""
        digests = dict.fromkeys((*self.parts, *self.lists), NO_DIGEST)
        self.from_json(self.to_json(digests, ""), lambda name, *_: self.lists[name])


def common_keys(
    kind: type[Manifest],
    cache: KVCache | PagedKVCache,
    model: Mapping[str, Any] | None,
    creation: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The keys that all manifests have, of a cache that is saved; all but the layers.

    Raises:
        ConfigError: model or creation is not plain data.
    """
    return {
        "format": kind.FORMAT,
        "writer": "",
        "num_kv_heads": cache.num_kv_heads,
        "sink_len": cache.sink_len,
        "recent_len": cache.recent_len,
        "exact_format": cache.exact_format,
        "model": None if model is None else ModelName(**model_identity(model)),
        "creation": plain_data(creation, "creation"),
        "transforms": fingerprints(cache.bases),
        "sha256": {},
    }


class CacheManifest(Manifest, kw_only=True, dict=True, omit_defaults=True):
    """All of a KVCache but its rows; attributes as there."""

    KEY = MANIFEST
    FORMAT = "kvquant-cache"
    VERSIONS = 1, WINDOWS_VERSION, ROLLBACK_VERSION, LATENT_VERSION, LATENT_BASES_VERSION
    KINDS = ("sinks", "packed", "recent")

    head_dim: Count
    max_seq_len: Length
    seq_lens: Annotated[tuple[Length, ...], Meta(max_length=MAX_SEQUENCES)]
    start_positions: tuple[Wide, ...]
    positions: tuple[Wide, ...]
    layers: Annotated[tuple[CacheLayer, ...], Meta(max_length=MAX_LAYERS)]
    rollback_len: Length = ROLLBACK

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.seq_lens)

    @property
    def first_version(self) -> int:
        """The first version that has all that there is in the file."""
        if self.latent:
            return LATENT_BASES_VERSION if self.transforms else LATENT_VERSION
        if self.rollback_len != ROLLBACK:
            return ROLLBACK_VERSION
        has_windows = any(entry.window is not None for entry in self.layers)
        return WINDOWS_VERSION if has_windows else 1

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The tensors of the file by name, in their order; empty ones have none."""
        found: dict[str, Part] = {}
        for i, entry in enumerate(self.layers):
            spans = self._spans(entry)
            for side, fmt in zip("kv", entry.formats, strict=True):
                exact = RowFormat.parse(self.exact_format, fmt.head_dim)
                for kind, (counts, firsts) in spans.items():
                    if not any(counts):
                        continue
                    rows = fmt if kind == "packed" else exact
                    later = fmt if kind == "recent" else None
                    part = Part(i, side, kind, rows, self.num_kv_heads, counts, firsts, later)
                    found[part.name] = part
        return found

    def _spans(self, entry: CacheLayer) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
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
            row_bytes = packed_row_bytes(*entry.formats, latent=self.latent)
            found.append(rooms_of(*sizes, entry.window, self.rollback_len, row_bytes))
        return found

    def cache_bytes(self, max_seq_len: int) -> int:
        """Bytes of the rows of a cache of max_seq_len."""
        each = zip(self.rooms(max_seq_len), self.layers, strict=True)
        total = sum(rooms.bytes_of(*entry.formats, self.exact_format) for rooms, entry in each)
        return total * self.batch * self.num_kv_heads

    def _check(self) -> None:
        if self.version != self.first_version:
            raise CheckpointError(
                f"the file has version {self.version}, what it says is of {self.first_version}"
            )
        if not self.batch or not self.layers:
            raise CheckpointError("seq_lens and layers must not be empty")
        self._check_formats()
        if self.latent and any(entry.window is not None for entry in self.layers):
            raise CheckpointError("latent rows have no windows")
        if self.latent and self.head_dim != self.formats[0][0].head_dim:
            raise CheckpointError(
                f"head_dim is {self.head_dim}: that of latent rows is their latent_dim"
            )
        ends = tuple(map(sum, zip(self.start_positions, self.seq_lens, strict=False)))
        if len(self.start_positions) != self.batch or self.positions != ends:
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


class SavedSequence(Object, omit_defaults=True):
    """A sequence of a file; attributes as in the manifest."""

    id: str | int
    length: Length
    packed_len: Length
    pages: tuple[Length, ...]
    tokens: tuple[Wide, ...]
    namespace: str | None = None


class _Counted(Object, omit_defaults=True):
    """A sequence of a file from version 2 on: how many of its tokens are known."""

    id: str | int
    length: Length
    packed_len: Length
    known: Length
    namespace: str | None = None


class _PagedManifest(Manifest, kw_only=True, dict=True, omit_defaults=True):
    """The manifest of sequences, but for the sequences."""

    page_size: Length
    windows: Annotated[tuple[Count | None, ...], Meta(max_length=MAX_LAYERS)] = ()


class _CountedManifest(_PagedManifest, kw_only=True, dict=True, omit_defaults=True):
    """The versions from 2 on, as they stand in a file."""

    sequences: Annotated[tuple[_Counted, ...], Meta(max_length=MAX_SEQUENCES)]


class SequencesManifest(_PagedManifest, kw_only=True, dict=True, omit_defaults=True):
    """All of the sequences but their rows; attributes as in PagedKVCache.

    From LISTS_VERSION on pages and tokens stand in tensors.
    """

    KEY = "kvquant_pages"
    FORMAT = "kvquant-pages"
    VERSIONS = 1, LISTS_VERSION, LATENT_PAGES_VERSION, WINDOW_PAGES_VERSION, NAMESPACES_VERSION
    KINDS = ("pages", "exact")

    sequences: Annotated[tuple[SavedSequence, ...], Meta(max_length=MAX_SEQUENCES)]

    @property
    def first_version(self) -> int:
        """The first version that has all that there is in the file."""
        if any(sequence.namespace is not None for sequence in self.sequences):
            return NAMESPACES_VERSION
        if self.latent:
            return LATENT_PAGES_VERSION
        return WINDOW_PAGES_VERSION if any(self.windows) else 1

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

    def _pages(self, window: int | None) -> dict[str, tuple[int, ...]]:
        """The pages of layers with a window, those that a sequence sees: what PagePart has."""
        seen = set(self.used)
        if window is not None:
            size, each = self.page_size, self.sequences
            tables = [x.pages[first_seen(x.packed_len, window, size) :] for x in each]
            seen = {page for table in tables for page in table}
        found = {number: page for number, page in self.used.items() if number in seen}
        used, owners, places = zip(*found.values(), strict=True) if found else ((), (), ())
        return {
            "counts": (self.page_size,) * len(found),
            "firsts": tuple(self.sink_len + at * self.page_size for at in places),
            "owners": owners,
            "used": used,
            "numbers": tuple(found),
        }

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The tensors of rows of the file by name, in their order; empty ones have none."""
        found: dict[str, Part] = {}
        packed_lens = tuple(sequence.packed_len for sequence in self.sequences)
        exact = tuple(sequence.length - sequence.packed_len for sequence in self.sequences)
        windows, zeros = self.windows or (None,) * len(self.layers), (0,) * len(exact)
        pages: dict[int | None, dict[str, Any]] = {one: self._pages(one) for one in set(windows)}
        for layer, formats in enumerate(self.formats):
            for side, fmt in zip("kv", formats, strict=True):
                fmt16 = RowFormat.parse(self.exact_format, fmt.head_dim)
                packed = fmt, self.num_kv_heads
                kept = fmt16, self.num_kv_heads, exact, zeros, fmt, self.sink_len
                for part in (
                    PagePart(layer, side, "pages", *packed, **pages[windows[layer]]),
                    ExactPart(layer, side, "exact", *kept, packed_lens=packed_lens),
                ):
                    if part.num_rows:
                        found[part.name] = part
        return found

    def to_json(self, digests: Mapping[str, str], writer: str) -> str:
        """See Manifest.to_json."""
        if self.version < LISTS_VERSION:
            return super().to_json(digests, writer)
        each = self.sequences
        counted = tuple(
            _Counted(x.id, x.length, x.packed_len, len(x.tokens), x.namespace) for x in each
        )
        keys = {name: getattr(self, name) for name in self.__struct_fields__}
        return _CountedManifest(**keys | {"sequences": counted}).to_json(digests, writer)

    @classmethod
    def _parsed(cls, top: dict[str, Any], read: Read) -> Self:
        if top["version"] == 1:
            manifest = super()._parsed(top, read)
            _check_page_size(manifest)
        else:
            try:
                counted = checked(top, _CountedManifest, "the manifest")
            except CheckpointError as error:
                version = top["version"]
                raise CheckpointError(f"the file has version {version}, and {error}") from None
            _check_page_size(counted)
            keys = {name: getattr(counted, name) for name in cls.__struct_fields__}
            manifest = cls(**keys | {"sequences": _with_lists(counted, read)})
        version, first = manifest.version, manifest.first_version
        if version != first and (version, first) != (LISTS_VERSION, 1):
            raise CheckpointError(f"the file has version {version}, what it says is of {first}")
        return manifest

    def _check(self) -> None:
        if not self.formats or not self.sequences:
            raise CheckpointError("layers and sequences must not be empty")
        if self.windows and len(self.windows) != len(self.layers):
            raise CheckpointError(f"{len(self.windows)} windows for {len(self.layers)} layers")
        if self.latent and any(self.windows):
            raise CheckpointError("latent rows have no windows")
        self._check_formats()
        for i, sequence in enumerate(self.sequences):
            if isinstance(sequence.id, int) and sequence.id.bit_length() > MAX_ID_BITS:
                raise CheckpointError(
                    f"sequences[{i}].id has {sequence.id.bit_length()} bits: {MAX_ID_BITS} are "
                    "possible"
                )
        if len({sequence.id for sequence in self.sequences}) < len(self.sequences):
            raise CheckpointError("two sequences have one id")
        size, before = self.page_size, dict[int, tuple[int | str | None, tuple[int, ...]]]()
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
            last: int | str | None = sequence.namespace  # which the first page follows
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


def _check_page_size(manifest: _PagedManifest) -> None:
    if manifest.page_size not in PAGE_SIZES:
        raise CheckpointError(f"page_size is {manifest.page_size}: it must be {one_of(PAGE_SIZES)}")


def _with_lists(given: _CountedManifest, read: Read) -> tuple[SavedSequence, ...]:
    """The sequences of a manifest from version 2 on with what its tensors list."""
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
            tuple(islice(lists["pages"], counts["pages"][i])),
            tuple(islice(lists["tokens"], counts["tokens"][i])),
            sequence.namespace,
        )
        for i, sequence in enumerate(given.sequences)
    )
