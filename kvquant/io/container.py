"""The reader of all files of rows: of a KVCache, one file or shards, and of sequences.

checkpoint.py and sequences.py document the formats, manifest.py reads what a file says of itself.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch

from ..errors import CheckpointError
from ..rows.format import RowFormat
from ..rows.quantize import dequantize, parameters
from ..version import __version__
from .atomic import as_path
from .manifest import CacheManifest, Manifest, SequencesManifest
from .parts import Part
from .schema import checked, parse
from .shards import found_at, is_index, shard_pattern
from .tensor_files import MAX_HEADER_BYTES, SafetensorsFile, naming, open_file, sealed, unsealed

ATTEMPTS = 100  # to open a cache whose files are replaced all the time
_PLAN = "kvquant"  # the entry of metadata that makes a file a plan
_SAFE_SCALE = 2.0**119  # of FlashMLA's rows: 448 times it is finite

M = TypeVar("M", bound=Manifest)


class RowsFile(Generic[M]):
    """A file of rows open for reading, its manifest checked.

    While another process saves to this name, it is the old file or the new one, whole. A
    CheckpointError that leaves a `with` block of it names the file.

    Args:
        path: what was given to save_cache or save_sequences, or the index of a cache's shards.
        kinds: the manifests that are taken: CacheManifest, SequencesManifest, or both.

    Attributes:
        path: the file or the index that is read.
        manifest: all but the rows.
        num_files: files that it is made of, the index included.
        num_bytes: their bytes on the disk.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is damaged, foreign or of another kind.
    """

    manifest: M

    def __init__(self, path: str | os.PathLike[str], *kinds: type[M]) -> None:
        path = as_path(path)
        self._kinds = kinds
        for attempt in range(ATTEMPTS):
            self.path, self.num_files, self.num_bytes = self._found_at(path), 0, 0
            self._files: dict[str, SafetensorsFile] = {}  # the open file of every tensor
            self._first: Any = None  # kept open, so that no other file can pass for it
            self._opened = ExitStack()
            try:
                with naming(self.path):
                    self._read_manifest()
                    self._check_tensors()
                return
            except (CheckpointError, FileNotFoundError) as error:
                is_replaced = self._is_replaced(path, error)
                self._opened.close()
                if not is_replaced or attempt + 1 == ATTEMPTS:
                    raise
            except BaseException:
                self._opened.close()
                raise

    def __enter__(self) -> RowsFile[M]:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._opened.close()
        if isinstance(error, CheckpointError):
            with naming(self.path):
                raise error

    def rows(self, part: Part) -> torch.Tensor:
        """Read one tensor, uint8, of the shape part.shape.

        Raises:
            CheckpointError: its checksum is another one, a row would decode to NaN, or would once
                it is packed.
        """
        rows = self._files[part.name].read(part.name, self.manifest.sha256[part.name])
        check_values(part.by_token(rows), part)
        return rows

    def _found_at(self, path: Path) -> Path:
        """The file that counts for a path; only caches have shards."""
        return found_at(path) if CacheManifest in self._kinds else path

    def _read_manifest(self) -> None:
        if CacheManifest in self._kinds and is_index(self.path):
            metadata = self._open_index()
        else:
            metadata = self._open(self.path).metadata
        for kind in self._kinds:
            if type(metadata.get(kind.KEY)) is str:
                text = unsealed(kind.KEY, metadata)
                self.manifest = kind.from_json(text, self._numbers)
                return
        raise CheckpointError(_refusal(metadata, self._kinds))

    def _open(self, path: Path) -> SafetensorsFile:
        file = self._opened.enter_context(SafetensorsFile(path))
        self._first = self._first or file
        self._files |= dict.fromkeys(file.shapes, file)
        self.num_files += 1
        self.num_bytes += file.num_bytes
        return file

    def _open_index(self) -> dict[str, Any]:
        """Open every shard of the index, and give the index's metadata."""
        self._first = self._opened.enter_context(open_file(self.path))
        self.num_files, self.num_bytes = 1, os.fstat(self._first.fileno()).st_size
        try:
            if self.num_bytes > MAX_HEADER_BYTES:
                raise CheckpointError("it is too large to be one")
            text = self._first.read(MAX_HEADER_BYTES + 1)
            index = checked(parse(text, "the index"), _Index, "the index")
        except CheckpointError as error:
            raise CheckpointError(
                f"this is no index of shards, or a damaged one ({error})"
            ) from None
        for shard in dict.fromkeys(index.weight_map.values()):
            if not shard_pattern(self.path).fullmatch(shard):
                raise CheckpointError(f"the index names {shard!r:.80}, which is no shard of it")
            try:
                file = self._open(self.path.with_name(shard))
            except FileNotFoundError:
                raise CheckpointError(
                    f"shard {shard} is missing: copy all shards together with the index"
                ) from None
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
                raise CheckpointError(
                    "there are more shards than this process may open files: allow it more "
                    "(ulimit -n), or save the cache in larger shards"
                ) from None
            for name in file.shapes:
                if index.weight_map.get(name) != shard:
                    raise CheckpointError(f"tensor {name!r:.80} should not be in shard {shard}")
        if index.weight_map.keys() != self._files.keys():
            name = min(index.weight_map.keys() - self._files.keys())
            raise CheckpointError(f"tensor {name!r:.80} is missing: take another copy of the file")
        return index.metadata

    def _numbers(self, name: str, dtype: torch.dtype, count: int, digest: str) -> list[int]:
        """Read a tensor of numbers, which then counts no more as one of rows."""
        file = self._files.pop(name, None)
        if file is None:
            raise CheckpointError(f"tensor {name!r} is missing: take another copy of the file")
        if (file.dtypes[name], file.shapes[name]) != (dtype, (count,)):
            raise CheckpointError(
                f"tensor {name!r} is {file.dtypes[name]} {list(file.shapes[name])!s:.80}: the "
                f"sequences ask for {dtype} {[count]}"
            )
        numbers: list[int] = file.read(name, digest).tolist()
        return numbers

    def _check_tensors(self) -> None:
        parts = self.manifest.parts
        if self._files.keys() != parts.keys():
            name = min(self._files.keys() ^ parts.keys())
            problem = "is missing" if name in parts else "should not be there"
            raise CheckpointError(f"tensor {name!r:.80} {problem}: take another copy of the file")
        for name, part in parts.items():
            file, shape = self._files[name], part.shape
            if file.dtypes[name] != torch.uint8 or file.shapes[name] != shape:
                raise CheckpointError(
                    f"tensor {name!r} is {file.dtypes[name]} {list(file.shapes[name])!s:.80}: the "
                    f"lengths and formats ask for U8 {list(shape)}"
                )

    def _is_replaced(self, path: Path, error: Exception) -> bool:
        """Whether another file counts now than the one that was opened first, or one at all."""
        try:
            if self._found_at(path) != self.path:
                return True
            now = os.stat(self.path)
        except FileNotFoundError:  # if it was there a moment ago, an index is there now
            return self._first is not None or self._found_at(path) != self.path
        except OSError:  # unknown
            return False
        if self._first is None:  # there was none, or it could not be read
            return isinstance(error, FileNotFoundError)
        return not os.path.samestat(now, os.fstat(self._first.fileno()))


class _Index(msgspec.Struct):
    """An index of shards."""

    metadata: dict[str, Any]
    weight_map: dict[str, str]


def seal(manifest: Manifest, digests: Mapping[str, str]) -> dict[str, str]:
    """The manifest and its checksum, as a file's metadata holds them."""
    return sealed(manifest.KEY, manifest.to_json(digests, f"kvquant {__version__}"))


def _refusal(metadata: Mapping[str, Any], kinds: tuple[type[Manifest], ...]) -> str:
    """Why a file of none of these kinds is not read."""
    if CacheManifest not in kinds:
        return "this is no file of a paged cache: caches of save_cache are read by load_cache"
    if _PLAN in metadata:
        what = _plan_summary(metadata[_PLAN])
        return f"this is a calibration file, not a cache: {what} (`kvquant report` shows it)"
    if SequencesManifest.KEY in metadata:
        return "these are sequences of a paged cache: read them by kvquant.load_sequences"
    return (
        "this is no kvquant cache: K and V tensors, named layers.0.k, layers.0.v and so on, are "
        "read by `kvquant quantize --from`"
    )


def _plan_summary(text: Any) -> str:
    """What a calibration file holds, in one line."""
    try:
        facts = parse(text, "the plan", nan=True)
        model, tokens = facts["model"], facts["observed_tokens"]
        return (
            f"it holds the plan of caches for a {model['type']!r:.40} model with config "
            f"{model['sha256'][:12]!r:.20}, from {tokens!r:.20} tokens"
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return "its metadata cannot be read"


def check_values(rows: torch.Tensor, part: Part, start: int = 0) -> None:
    """Raise if a row would decode to NaN or Inf, or would once it is packed.

    Args:
        rows: [tokens, num_kv_heads, row_bytes], some of the part's rows.
        part: which rows they are.
        start: the row of the part's tensor that is the first of them.

    Raises:
        CheckpointError: names the first such row.
    """
    fmt = part.fmt
    if not rows.numel():
        return
    codes = rows[..., fmt.code_offset :][..., : fmt.code_bytes]
    has_nan = fmt.pick(e4m3=True, integers=False, bf16=False, fp16=False)
    if has_nan and bool((is_nan := (codes & 0x7F) == 0x7F).any()):
        _refuse(is_nan, part, start, "a code is NaN")
    if fmt.pick(scales=True, pairs=False, none=False):
        scales, _ = parameters(rows, fmt)
        bad = ~((scales > 0) & scales.isfinite())
        bad &= (rows != 0).any(-1, keepdim=True)  # zeros stand behind the last row in use of a page
        _refuse(bad, part, start, "a scale is no positive number")
        if bool((scales > _SAFE_SCALE).any()):
            is_infinite = ~dequantize(rows, fmt).isfinite()
            _refuse(is_infinite, part, start, "a scale is so large that a value is infinite")
        return
    header = rows if fmt.is_exact else rows[..., : fmt.header_bytes]
    bits = header.contiguous().view(torch.int16)  # isfinite() is ten times slower
    sizes = bits & 0x7FFF
    # Inf as bits; NaN lies above
    largest, infinite = int(sizes.max()), fmt.pick(bf16=0x7F80, fp16=0x7C00, pairs=0x7C00)
    if fmt.is_exact:
        if largest >= infinite:
            _refuse(sizes >= infinite, part, start, "a value is NaN or infinite")
        packed = part.packed_as
        if packed and packed.max_abs < fmt.max_abs and largest > (most := _bf16_bits(packed)):
            problem = f"a value is too large for {packed} rows, as which it will be packed"
            _refuse(sizes > most, part, start, problem, part.sink_len)
        return
    if largest >= infinite or bool((bits[..., 0::2] < 0).any()):
        bad = sizes >= infinite
        bad[..., 0::2] |= bits[..., 0::2] < 0
        _refuse(bad, part, start, "a scale is negative, or a scale or shift is NaN or infinite")


def _bf16_bits(fmt: RowFormat) -> int:
    """The largest bf16 that a format holds, as bits."""
    return int.from_bytes(struct.pack(">f", fmt.max_abs)[:2], "big")


def _refuse(bad: torch.Tensor, part: Part, start: int, problem: str, first: int = 0) -> None:
    """Raise for the first bad row of a token from `first` on, if there is one."""
    for row, head in bad.any(-1).nonzero().tolist():
        sequence, token = part.locate(start + row)
        if token >= first:
            raise CheckpointError(
                f"layer {part.layer}, {part.side.upper()}, sequence {sequence}, token {token}, KV "
                f"head {head}: {problem}; make the cache anew from finite keys and values"
            )
