"""PageManifest: what a file of sequences of a paged cache says of itself; read with checks.

The format is told in sequences.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from ..errors import CheckpointError
from ..paged.state import MAX_ID_BITS
from ..rows.format import RowFormat
from ..rows.segment import PAGE_SIZES
from .manifest import Part
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
    transforms,
)

FORMAT, VERSION = "kvquant-pages", 1
LISTS_VERSION = 2  # of files whose pages and tokens stand in tensors; all else is as in version 1
MANY = 1 << 16  # numbers of pages and tokens, above which they do
LISTS = {"pages": torch.int32, "tokens": torch.int64}  # what SavedSequence lists

Read = Callable[[str, torch.dtype, int, str], list[int]]


class SavedSequence(Object):
    """A sequence of the file; attributes as in the manifest."""

    id: str | int
    length: Length
    packed_len: Length
    pages: tuple[Length, ...]
    tokens: tuple[Wide, ...]


class _Counted(Object):
    """A sequence of a file of version 2: how many of its tokens are known."""

    id: str | int
    length: Length
    packed_len: Length
    known: Length


@dataclass(frozen=True)
class PagePart(Part):
    """The pages of K or V of one layer: counts and firsts of each page; `owners` use it first."""

    owners: tuple[int, ...] = ()

    def locate(self, row: int) -> tuple[int, int]:
        """Sequence and token of a row, counted through all pages."""
        page, token = super().locate(row)
        return self.owners[page], token

    def by_token(self, rows: torch.Tensor) -> torch.Tensor:
        """The tensor as [tokens, num_kv_heads, row_bytes]: pages one after another."""
        return rows.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class SequencePart(Part):
    """The 16-bit rows of K or V of one layer: of each sequence its sinks, then its recent tokens;
    `packed_lens` tokens are between them."""

    packed_lens: tuple[int, ...] = ()

    def locate(self, row: int) -> tuple[int, int]:
        """Sequence and token of a row."""
        sequence, token = super().locate(row)
        return sequence, token + (self.packed_lens[sequence] if token >= self.sink_len else 0)


@dataclass(frozen=True)
class PageManifest:
    """All of the sequences but their rows; attributes as in PagedKVCache.

    In LISTS_VERSION pages and tokens stand in tensors.
    """

    num_kv_heads: int
    page_size: int
    sink_len: int
    recent_len: int
    exact_format: str
    formats: tuple[tuple[RowFormat, RowFormat], ...]
    sequences: tuple[SavedSequence, ...]
    model: Mapping[str, str] | None
    creation: Mapping[str, Any]
    transforms: tuple[Mapping[str, str], ...] = ()
    version: int = VERSION

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
        """For each page its rows in use, the first sequence that has it, and its place there."""
        found: dict[int, tuple[int, int, int]] = {}
        for i, sequence in enumerate(self.sequences):
            for at, page in enumerate(sequence.pages):
                rows = min(sequence.packed_len - at * self.page_size, self.page_size)
                before, owner, place = found.get(page, (0, i, at))
                found[page] = max(rows, before), owner, place
        return dict(sorted(found.items()))

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The tensors of rows of the file by name, in their order; empty ones have none."""
        found: dict[str, Part] = {}
        packed_lens = tuple(sequence.packed_len for sequence in self.sequences)
        exact = tuple(sequence.length - sequence.packed_len for sequence in self.sequences)
        owners = tuple(owner for _, owner, _ in self.used.values())
        firsts = tuple(self.sink_len + at * self.page_size for _, _, at in self.used.values())
        for layer, formats in enumerate(self.formats):
            for side, fmt in zip("kv", formats, strict=True):
                counts = (self.page_size,) * len(self.used)
                pages = PagePart(layer, side, "pages", fmt, counts, firsts, owners=owners)
                fmt16, zeros = RowFormat(self.exact_format, 1, fmt.head_dim), (0,) * len(exact)
                seq_slots = layer, side, "exact", fmt16, exact, zeros, fmt, self.sink_len
                rows = SequencePart(*seq_slots, packed_lens=packed_lens)
                found |= {part.name: part for part in (pages, rows) if part.num_rows}
        return found

    def shape(self, part: Part) -> tuple[int, ...]:
        """Shape of a part's tensor."""
        if isinstance(part, PagePart):
            return len(self.used), self.num_kv_heads, self.page_size, part.fmt.row_bytes
        return part.num_rows, self.num_kv_heads, part.fmt.row_bytes

    def to_json(self, digests: Mapping[str, str], writer: str) -> str:
        """The manifest as it stands in a file."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": self.version,
                "writer": writer,
                "num_kv_heads": self.num_kv_heads,
                "page_size": self.page_size,
                "sink_len": self.sink_len,
                "recent_len": self.recent_len,
                "exact_format": self.exact_format,
                "layers": [
                    {
                        side: {"format": str(fmt), "head_dim": fmt.head_dim}
                        for side, fmt in zip("kv", formats, strict=True)
                    }
                    for formats in self.formats
                ],
                "sequences": [self._told(sequence) for sequence in self.sequences],
                "model": self.model,
                "creation": self.creation,
                "transforms": self.transforms,
                "sha256": dict(digests),
            },
            separators=(",", ":"),
            sort_keys=True,
        )

    def _told(self, sequence: SavedSequence) -> dict[str, Any]:
        found = {name: getattr(sequence, name) for name in SavedSequence.__struct_fields__}
        if self.version >= LISTS_VERSION:
            found["known"] = len(sequence.tokens)
            del found["pages"], found["tokens"]
        return found

    @classmethod
    def from_json(cls, text: str, read: Read) -> tuple[PageManifest, dict[str, str]]:
        """Read a manifest and the SHA-256 of each tensor, and check every value.

        Args:
            text: of the manifest.
            read: gives the numbers of a tensor of the file by its name, dtype, how many it must
                have, and its SHA-256.

        Raises:
            CheckpointError: the manifest is not one that this version writes.
        """
        top = manifest_object(text, FORMAT, (VERSION, LISTS_VERSION))
        told: _Told | _ToldCounts
        if top["version"] == VERSION:
            told = checked(top, _Told, "the manifest")
        else:
            try:
                told = checked(top, _ToldCounts, "the manifest")
            except CheckpointError as error:
                raise CheckpointError(f"the file has version 2, and {error}") from None
        if told.page_size not in PAGE_SIZES:
            raise CheckpointError(f"page_size is {told.page_size}: it must be 16, 32, 64 or 128")
        sequences = told.sequences if isinstance(told, _Told) else _with_lists(told, read)
        manifest = cls(
            told.num_kv_heads,
            told.page_size,
            told.sink_len,
            told.recent_len,
            told.exact_format,
            tuple(
                (pair.k.row_format(f"layers[{i}].k"), pair.v.row_format(f"layers[{i}].v"))
                for i, pair in enumerate(told.layers)
            ),
            sequences,
            msgspec.to_builtins(told.model),
            told.creation,
            transforms(told.transforms, len(told.layers)),
            told.version,
        )
        manifest._check_sequences()
        if told.sha256.keys() != manifest.parts.keys() | manifest.lists.keys():
            raise CheckpointError("sha256 does not name the tensors that the sequences ask for")
        return manifest, told.sha256

    def _check_sequences(self) -> None:
        """Raise unless lengths, pages and tokens fit one another."""
        if not self.formats or not self.sequences:
            raise CheckpointError("layers and sequences must not be empty")
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


class _Pair(Object):
    """The formats of a layer."""

    k: FormatName
    v: FormatName


class _Base(Object):
    """A manifest as it stands in a file, but for the sequences."""

    format: str
    version: int
    writer: Any
    num_kv_heads: Count
    page_size: Length
    sink_len: Length
    recent_len: Length
    exact_format: ExactCodec
    layers: Annotated[tuple[_Pair, ...], Meta(max_length=MAX_LAYERS)]
    model: ModelName | None
    creation: dict[str, Any]
    transforms: Any
    sha256: dict[str, Digest]


class _Told(_Base):
    """Version 1."""

    sequences: Annotated[tuple[SavedSequence, ...], Meta(max_length=MAX_SEQUENCES)]


class _ToldCounts(_Base):
    """Version 2."""

    sequences: Annotated[tuple[_Counted, ...], Meta(max_length=MAX_SEQUENCES)]


def _with_lists(told: _ToldCounts, read: Read) -> tuple[SavedSequence, ...]:
    """The sequences of a manifest of version 2 with what its tensors list."""
    counts = {
        "pages": [-(-sequence.packed_len // told.page_size) for sequence in told.sequences],
        "tokens": [sequence.known for sequence in told.sequences],
    }
    lists: dict[str, Iterator[int]] = {}
    for name, dtype in LISTS.items():
        key, count = f"sequences.{name}", sum(counts[name])
        numbers = read(key, dtype, count, told.sha256.get(key, "")) if count else []
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
        for i, sequence in enumerate(told.sequences)
    )
