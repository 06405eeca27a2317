"""Manifests: the JSON beside the rows of a file, read with every value checked.

Their fields are the keys that checkpoint.py (CacheManifest, a KVCache) and sequences.py
(SequencesManifest, sequences of a PagedKVCache) document.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import starmap
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from ..cache.contiguous import KVCache
from ..cache.latent import LatentKVCache
from ..cache.layer import ROLLBACK
from ..errors import CheckpointError, ConfigError, refuse
from ..paged.cache import PagedKVCache
from ..paged.latent import LatentPagedKVCache
from ..paged.state import MAX_ID_BITS
from ..paged.window_pages import first_seen
from ..rows.basis import LayerBasis, fingerprints
from ..rows.codec import one_of
from ..rows.format import RowFormat, check_head_dims
from ..rows.latent import LatentFormat
from ..rows.segment import PAGE_SIZES
from ..version import __version__
from .model_id import check_identity, model_identity
from .parts import ExactPart, PagePart, Part
from .schema import (
    CACHE,
    MAX_LAYERS,
    MAX_SEQUENCES,
    SEQUENCES,
    VERSION,
    Count,
    ExactCodec,
    Fingerprints,
    FormatName,
    Length,
    ModelName,
    Object,
    Wide,
    checked,
    plain_data,
)

if TYPE_CHECKING:
    from typing_extensions import Self


Sides = Sequence[tuple[str, RowFormat, RowFormat]]  # "k" or "v", its format, and that in 16 bit


class LayerEntry(Object, dict=True):
    """The formats of one layer's packed rows."""

    k: FormatName
    v: FormatName

    @cached_property
    def formats(self) -> tuple[RowFormat, RowFormat]:
        return self.k.row_format("k"), self.v.row_format("v")


class CacheLayer(LayerEntry, dict=True, omit_defaults=True):
    """A layer of a cache, with the packed tokens of its sequences and its window."""

    packed_lens: tuple[Length, ...]
    window: Count | None = None


class Manifest(Object, kw_only=True, dict=True, omit_defaults=True):
    """The keys that the manifests of all files of rows have.

    Attributes:
        format, version: FORMAT and 1.
        writer: the program that wrote the file, for people.
        num_kv_heads: KV heads of every layer.
        sink_len, recent_len: first and last tokens of each sequence in 16 bit.
        exact_format: "bf16" or "fp16", of the 16-bit rows.
        layers: of each the formats of k and v, {"format": short name, "head_dim": elements}.
        model: model_identity of the model that the rows belong to; None if it is not known.
        creation: how the rows came about, for people.
        transforms: the fingerprints {"k", "v"} of each layer's bases; empty without bases.
        latent: True if k are latents and v RoPE parts, of one KV head; else left out.
    """

    FORMAT: ClassVar[str]
    KINDS: ClassVar[tuple[str, ...]]  # of the parts of a layer's K or V

    format: str
    version: int
    writer: Any
    num_kv_heads: Count
    sink_len: Length
    recent_len: Length
    exact_format: ExactCodec
    layers: Annotated[tuple[LayerEntry, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    model: ModelName | None
    creation: dict[str, Any]
    transforms: tuple[Fingerprints, ...]
    latent: bool = False

    @classmethod
    def read(cls, top: dict[str, Any]) -> Self:
        """Read a manifest's JSON object; CheckpointError unless all values are possible."""
        manifest = checked(top, cls, "the manifest")
        for i, layer in enumerate(manifest.layers):
            for side in "kv":
                getattr(layer, side).row_format(f"layers[{i}].{side}")
        refuse(CheckpointError, itertools.chain(manifest._odd_layers(), manifest._problems()))
        return manifest

    def plain(self) -> dict[str, Any]:
        """The JSON object of this manifest; CheckpointError if read() would refuse it."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        self.read(found)
        return found

    @property
    def formats(self) -> tuple[tuple[RowFormat, RowFormat], ...]:
        """The packed formats of K and V of each layer."""
        return tuple(entry.formats for entry in self.layers)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """How many last tokens each layer sees; None for all."""
        raise NotImplementedError

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The tensors of the file by name, in order, without empty ones."""
        found = {}
        for layer, formats in enumerate(self.formats):
            exact = [RowFormat.parse(self.exact_format, fmt.head_dim) for fmt in formats]
            for part in self._parts_of(layer, [*zip("kv", formats, exact, strict=True)]):
                if part.num_rows:
                    found[part.name] = part
        return found

    def _parts_of(self, layer: int, sides: Sides) -> Iterator[Part]:
        """The tensors of a layer, empty ones too."""
        raise NotImplementedError

    def _problems(self) -> Iterator[str]:
        """What is not possible, of the keys that a subclass has."""
        raise NotImplementedError

    def _odd_layers(self) -> Iterator[str]:
        """What is not possible, of layers and their formats."""
        if self.latent and any(self.layer_windows):
            yield "latent rows have no windows"
        if len(self.transforms) not in (0, len(self.layers)):
            yield f"{len(self.transforms)} transforms for {len(self.layers)} layers"
        try:
            if not self.latent:
                check_head_dims(*itertools.chain(*self.formats))
                return
            sizes = {(fmt.latent_dim, fmt.rope_dim) for fmt in starmap(LatentFormat, self.formats)}
            if len(sizes) > 1 or self.num_kv_heads != 1:
                yield "latent rows are of one size, and of one KV head"
        except ConfigError as error:
            yield f"layers have formats that no cache has: {error}"

    def check_bases(self, bases: Sequence[LayerBasis] | None, how: str) -> None:
        """Raise CheckpointError, with `how` to use a plan, unless rows have these bases."""
        saved, ours = self.transforms, tuple(Fingerprints(**x) for x in fingerprints(bases))
        # zeros of other shapes have the same fingerprint
        shapes = [(self.num_kv_heads, fmt.head_dim) for pair in self.formats for fmt in pair]
        theirs = [tuple(side.offset.shape) for basis in bases or () for side in basis]
        if saved == ours and (not saved or shapes == theirs):
            return
        same = [x == y for x, y in zip(saved, ours, strict=False)]
        where = f" (layer {same.index(False)} differs)" if False in same else ""
        kept = f"in the bases of {f'another plan{where}' if ours else 'a plan'}: {how}"
        raise CheckpointError(
            f"its rows are stored {kept if saved else 'without a plan: use none'}"
        )

    def check_model(self, model: Mapping[str, Any] | None) -> None:
        """Raise CheckpointError unless the file belongs to the model of a config; None fits all."""
        if model is None:
            return
        if self.model is None:
            raise CheckpointError(
                "the file does not say which model it belongs to: save it with model=config, or "
                "load it with model=None if you know that it fits"
            )
        saved, advice = msgspec.to_builtins(self.model), "take the cache that was made with it"
        check_identity(saved, model, "the file belongs to", "to", advice)


def common_keys(
    kind: type[Manifest],
    cache: KVCache | PagedKVCache,
    model: Mapping[str, Any] | None,
    creation: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The keys that all manifests share, but for the layers."""
    return {
        "format": kind.FORMAT,
        "version": VERSION,
        "writer": f"kvquant {__version__}",
        "num_kv_heads": cache.num_kv_heads,
        "sink_len": cache.sink_len,
        "recent_len": cache.recent_len,
        "exact_format": cache.exact_format,
        "model": None if model is None else ModelName(**model_identity(model)),
        "creation": plain_data(creation, "creation"),
        "transforms": tuple(Fingerprints(**each) for each in fingerprints(cache.bases)),
        "latent": isinstance(cache, LatentKVCache | LatentPagedKVCache),
    }


class CacheManifest(Manifest, kw_only=True, dict=True, omit_defaults=True):
    """A KVCache without its rows; attributes as there."""

    FORMAT = CACHE
    KINDS = ("sinks", "packed", "recent")

    head_dim: Count
    max_seq_len: Length
    seq_lens: Annotated[tuple[Length, ...], Meta(min_length=1, max_length=MAX_SEQUENCES)]
    start_positions: tuple[Wide, ...]
    positions: tuple[Wide, ...]
    layers: Annotated[tuple[CacheLayer, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    rollback_len: Length = ROLLBACK

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        return tuple(entry.window for entry in self.layers)

    def _parts_of(self, layer: int, sides: Sides) -> Iterator[Part]:
        spans = self._spans(self.layers[layer])
        for side, fmt, exact in sides:
            for kind, (counts, firsts) in spans.items():
                rows = fmt if kind == "packed" else exact
                later = fmt if kind == "recent" else None
                yield Part(layer, side, kind, rows, self.num_kv_heads, counts, firsts, later)

    def _spans(self, entry: CacheLayer) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Rows of each kind for each sequence, and their first tokens."""
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

    def _problems(self) -> Iterator[str]:
        if self.latent and self.head_dim != self.formats[0][0].head_dim:
            yield f"head_dim is {self.head_dim}: that of latent rows is their latent_dim"
        ends = tuple(map(sum, zip(self.start_positions, self.seq_lens, strict=False)))
        if len(self.start_positions) != len(self.seq_lens) or self.positions != ends:
            yield "start_positions, seq_lens and positions do not fit one another"
        if max(self.seq_lens) > self.max_seq_len:
            yield f"a sequence has {max(self.seq_lens)} tokens, max_seq_len is {self.max_seq_len}"
        seq_lens = np.array(self.seq_lens)
        for i, entry in enumerate(self.layers):
            if (count := len(entry.packed_lens)) != len(seq_lens):
                yield f"layers[{i}].packed_lens has {count} numbers for {len(seq_lens)} sequences"
            most = np.maximum(seq_lens - (self.sink_len if entry.window is None else 0), 0)
            recent_len = min(self.recent_len, entry.window or self.recent_len)
            packed = np.array(entry.packed_lens)
            bad = (packed > most) | (packed < most - recent_len)
            if bad.any():
                b = int(bad.argmax())
                yield (
                    f"layers[{i}].packed_lens has {packed[b]} for a sequence of {seq_lens[b]} "
                    f"tokens with sink_len {self.sink_len} and recent_len {self.recent_len}"
                )


class SavedSequence(Object, omit_defaults=True):
    id: str | int
    length: Length
    packed_len: Length
    pages: tuple[Length, ...]
    tokens: tuple[Wide, ...]
    namespace: str | None = None


class SequencesManifest(Manifest, kw_only=True, dict=True, omit_defaults=True):
    """Sequences without their rows; attributes as in PagedKVCache."""

    FORMAT = SEQUENCES
    KINDS = ("pages", "exact")

    page_size: Length
    sequences: Annotated[tuple[SavedSequence, ...], Meta(min_length=1, max_length=MAX_SEQUENCES)]
    windows: Annotated[tuple[Count | None, ...], Meta(max_length=MAX_LAYERS)] = ()

    @cached_property
    def used(self) -> dict[int, tuple[int, int, int]]:
        """For each page its rows in use, its first sequence, and its index there."""
        found: dict[int, tuple[int, int, int]] = {}
        for i, sequence in enumerate(self.sequences):
            for at, page in enumerate(sequence.pages):
                rows = min(sequence.packed_len - at * self.page_size, self.page_size)
                before, owner, first = found.get(page, (0, i, at))
                found[page] = max(rows, before), owner, first
        return dict(sorted(found.items()))

    def _pages(self, window: int | None) -> dict[str, tuple[int, ...]]:
        """The pages that sequences see in layers with a window, for PagePart."""
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

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        return self.windows or (None,) * len(self.layers)

    @cached_property
    def _seen_pages(self) -> dict[int | None, dict[str, Any]]:
        return {window: self._pages(window) for window in set(self.layer_windows)}

    def _parts_of(self, layer: int, sides: Sides) -> Iterator[Part]:
        heads, pages = self.num_kv_heads, self._seen_pages[self.layer_windows[layer]]
        packed_lens = tuple(sequence.packed_len for sequence in self.sequences)
        counts = tuple(sequence.length - sequence.packed_len for sequence in self.sequences)
        for side, fmt, exact in sides:
            yield PagePart(layer, side, "pages", fmt, heads, **pages)
            rows = counts, (0,) * len(counts), fmt, self.sink_len, packed_lens
            yield ExactPart(layer, side, "exact", exact, heads, *rows)

    def _problems(self) -> Iterator[str]:
        if self.page_size not in PAGE_SIZES:
            yield f"page_size is {self.page_size}: it must be {one_of(PAGE_SIZES)}"
        if self.windows and len(self.windows) != len(self.layers):
            yield f"{len(self.windows)} windows for {len(self.layers)} layers"
        for i, sequence in enumerate(self.sequences):
            bits = sequence.id.bit_length() if isinstance(sequence.id, int) else 0
            if bits > MAX_ID_BITS:
                yield f"sequences[{i}].id has {bits} bits: {MAX_ID_BITS} are possible"
        if len({sequence.id for sequence in self.sequences}) < len(self.sequences):
            yield "two sequences have one id"
        size, before = self.page_size, dict[int, tuple[int | str | None, tuple[int, ...]]]()
        for i, sequence in enumerate(self.sequences):
            most = max(sequence.length - self.sink_len, 0)
            if (
                not max(most - self.recent_len, 0) <= sequence.packed_len <= most
                or len(sequence.pages) != -(-sequence.packed_len // size)
                or len(sequence.tokens) > sequence.length
            ):
                yield (
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
                    yield f"sequences[{i}] cannot share page {page}"
                if len(tokens) > len(longest):  # what others know of the page is compared with it
                    before[page] = last, tokens
                last = page
        if list(self.used) != list(range(len(self.used))):
            yield "the pages are not counted from 0 without gaps"
