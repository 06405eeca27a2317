"""CacheFile: a cache file open for reading, one file or shards; its names, seals and checks.

The format is told in checkpoint.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError
from .files import check_file, open_safetensors, read_tensor, sha256
from .manifest import Manifest, Part

MAX_INDEX_BYTES = 100_000_000  # as safetensors limits its headers
_INFINITE = {"bf16": 0x7F80, "fp16": 0x7C00}  # Inf as bits; NaN lies above
_MANIFEST, _MANIFEST_SHA256 = "kvquant_cache", "kvquant_cache_sha256"
_PLAN = "kvquant"  # what a calibration file has in its metadata
PAGES = "kvquant_pages"  # of sequences of a paged cache


class CacheFile:
    """A cache file open for reading, one file or shards, its manifest checked.

    Args:
        path: what was given to save_cache, or the index of its shards.

    Attributes:
        path: the file or the index that is read.
        manifest: all of the cache but its rows.
        num_files: files that it is made of, the index included.
        num_bytes: their bytes on the disk.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is damaged or foreign.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        index = index_path(self.path)
        if not self.path.name.endswith(".index.json") and (
            is_cache_index(index) or (index.exists() and not self.path.exists())
        ):
            self.path = index
        self.num_files = self.num_bytes = 0
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}  # the open file of every tensor
        try:
            if self.path.name.endswith(".index.json"):
                metadata = self._open_shards()
            else:
                metadata = self._open(self.path).metadata() or {}
            self.manifest, self._digests = unsealed(metadata)
            self._check_tensors()
        except CheckpointError as error:
            self._stack.close()
            raise self._error(error) from None
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> CacheFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def rows(self, part: Part) -> torch.Tensor:
        """Read one tensor: [tokens of all sequences, num_kv_heads, row_bytes], uint8.

        Raises:
            CheckpointError: its checksum is another one, or a row would decode to NaN.
        """
        try:
            rows = read_tensor(self._files[part.name], part.name)
            if sha256(rows) != self._digests[part.name]:
                raise CheckpointError(
                    f"tensor {part.name!r} is damaged (its checksum differs): take another copy "
                    "of the file"
                )
            check_values(rows, part)
        except CheckpointError as error:
            raise self._error(error) from None
        return rows

    def _open(self, path: Path) -> Any:
        file = self._stack.enter_context(open_safetensors(path))
        self.num_files += 1
        self.num_bytes += path.stat().st_size
        for name in file.keys():
            if name in self._files:
                raise CheckpointError(f"tensor {name!r:.80} stands in two shards")
            self._files[name] = file
        return file

    def _open_shards(self) -> dict[str, Any]:
        """Open every shard of the index, and give the index's metadata."""
        check_file(self.path)
        self.num_files, self.num_bytes = 1, self.path.stat().st_size
        if self.num_bytes > MAX_INDEX_BYTES:
            raise CheckpointError("the index is too large to be one")
        try:
            index = json.loads(self.path.read_bytes())
            metadata, shards = dict(index["metadata"]), set(dict(index["weight_map"]).values())
        except (ValueError, TypeError, KeyError, RecursionError):
            raise CheckpointError("this is no index of shards, or a damaged one") from None
        for shard in shards:
            if type(shard) is not str or not shard_pattern(self.path).fullmatch(shard):
                raise CheckpointError(f"the index names {shard!r:.80}, which is no shard of it")
            try:
                self._open(self.path.with_name(shard))
            except FileNotFoundError:
                raise CheckpointError(
                    f"shard {shard} is missing: copy all shards together with the index"
                ) from None
        return metadata

    def _check_tensors(self) -> None:
        parts = self.manifest.parts
        if self._files.keys() != parts.keys():
            name = min(self._files.keys() ^ parts.keys())
            problem = "is missing" if name in parts else "should not be there"
            raise CheckpointError(f"tensor {name!r:.80} {problem}: take another copy of the file")
        for name, part in parts.items():
            view = self._files[name].get_slice(name)
            dtype, shape = view.get_dtype(), tuple(view.get_shape())
            if dtype != "U8" or shape != self.manifest.shape(part):
                raise CheckpointError(
                    f"tensor {name!r} is {dtype} {list(shape)}: the lengths and formats ask for U8 "
                    f"{list(self.manifest.shape(part))}"
                )

    def _error(self, error: CheckpointError) -> CheckpointError:
        text = str(error)
        return error if text.startswith(str(self.path)) else CheckpointError(f"{self.path}: {text}")


def index_path(path: Path) -> Path:
    """Where the index of a cache cut into shards stands."""
    return path.with_name(f"{path.name}.index.json")


def is_cache_index(path: Path) -> bool:
    """Whether a file is an index that kvquant wrote, be it damaged, and not another program's."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return f'"{_MANIFEST}"'.encode() in file.read(MAX_INDEX_BYTES)


def shard_pattern(index: Path) -> re.Pattern[str]:
    """File names of an index's shards."""
    stem = index.name.removesuffix(".safetensors.index.json")
    return re.compile(rf"{re.escape(stem)}-[0-9a-f]{{8}}-\d{{5}}-of-\d{{5}}\.safetensors")


def sealed(manifest: Manifest, digests: Mapping[str, str]) -> dict[str, str]:
    """The manifest and its checksum, as a file's metadata holds them."""
    try:
        writer = f"kvquant {version('kvquant')}"
    except PackageNotFoundError:  # a checkout that is not installed
        writer = "kvquant"
    text = manifest.to_json(digests, writer)
    return {_MANIFEST: text, _MANIFEST_SHA256: hashlib.sha256(text.encode()).hexdigest()}


def unsealed(metadata: Mapping[str, Any]) -> tuple[Manifest, dict[str, str]]:
    """The manifest and the checksums of the tensors from a file's metadata."""
    text, digest = metadata.get(_MANIFEST), metadata.get(_MANIFEST_SHA256)
    if type(text) is not str and type(metadata.get(_PLAN)) is str:
        raise CheckpointError(
            f"this is a calibration file, not a cache: {_plan_summary(metadata[_PLAN])}"
        )
    if type(text) is not str and PAGES in metadata:
        raise CheckpointError(
            "these are sequences of a paged cache: read them by kvquant.pagedfile.load_sequences"
        )
    if type(text) is not str:
        raise CheckpointError(
            "this is no kvquant cache: raw K and V tensors are read by quantize_raw "
            "(`kvquant quantize --from`)"
        )
    if hashlib.sha256(text.encode("utf-8", "replace")).hexdigest() != digest:
        raise CheckpointError(
            "the manifest is damaged (its checksum differs): take another copy of the file"
        )
    return Manifest.from_json(text)


def _plan_summary(text: str) -> str:
    """What a calibration file holds, in one line."""
    try:
        facts = json.loads(text)
        model, tokens = facts["model"], facts["observed_tokens"]
        return (
            f"it holds the plan of caches for a {model['type']!r:.40} model with config "
            f"{model['sha256'][:12]!r}, from {tokens!r:.20} tokens"
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return "its metadata cannot be read"


def check_values(rows: torch.Tensor, part: Part, start: int = 0) -> None:
    """Raise if a row would decode to NaN or Inf.

    Args:
        rows: [tokens, num_kv_heads, row_bytes], some of the part's rows.
        part: which rows they are.
        start: the row of the part's tensor that is the first of them.

    Raises:
        CheckpointError: names the first such row.
    """
    fmt = part.fmt
    header = rows if fmt.is_exact else rows[..., : fmt.header_bytes]
    bits = header.contiguous().view(torch.int16)  # isfinite() is ten times slower
    bad = (bits & 0x7FFF) >= _INFINITE["bf16" if fmt.codec == "bf16" else "fp16"]
    problem = "a value is NaN or infinite"
    if not fmt.is_exact:
        bad[..., 0::2] |= bits[..., 0::2] < 0
        problem = "a scale is negative, or a scale or shift is NaN or infinite"
        if fmt.codec == "fp8" and not bool(bad.any()):
            bad = (rows[..., fmt.header_bytes :] & 0x7F) == 0x7F
            problem = "a code is NaN"
    if bool(bad.any()):
        row, head, _ = bad.nonzero()[0].tolist()
        sequence, place = part.locate(start + row)
        raise CheckpointError(
            f"layer {part.layer}, {part.side.upper()}, sequence {sequence}, token {place}, KV head "
            f"{head}: {problem}; make the cache anew from finite keys and values"
        )
