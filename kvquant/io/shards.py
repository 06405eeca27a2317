"""Caches that are cut into shards: what their files are called, and which file counts for a name.

    NAME.safetensors                            the cache as one file
    NAME.safetensors.index.json                 or its index
    NAME-XXXXXXXX-00001-of-00003.safetensors    and its shards

Where NAME.safetensors is no cache (a plan, say, that took its name), it counts, and not the index.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import CheckpointError, ConfigError
from .atomic import as_path, sync_folder, writing
from .tensor_files import (
    MAX_HEADER_BYTES,
    Metadata,
    SafetensorsFile,
    TensorSource,
    open_file,
    write_safetensors,
)

MANIFEST = "kvquant_cache"  # the entry of metadata that makes a file a cache
SHARD = {"format": "kvquant-cache-shard"}  # the metadata of a shard


def save_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, TensorSource], metadata: Metadata
) -> None:
    """Write a safetensors file that is no cache, whole or not at all; see write_safetensors.

    Of a cache in shards, whose name it takes, nothing is left.
    """
    with writing(path) as place:
        names = dict.fromkeys((as_path(path), place.path))
        indices = {name: index_path(name) for name in names if is_cache_index(index_path(name))}
        like = next(iter(indices.values()), None)
        with place.replaced(like=like) as file:
            write_safetensors(file, tensors, metadata)
        for name, index in indices.items():
            old = None if place.is_locked else content(index)
            with suppress(OSError):  # the file is written, and counts already
                index.unlink()
                sync_folder(index.parent)
            remove_old_shards(name, (), old)


def found_at(path: Path) -> Path:
    """The file that counts for the name of a cache: its index of shards, or itself."""
    if is_index(path):
        return path
    for place in dict.fromkeys((path, Path(os.path.realpath(path)))):
        index = index_path(place)
        if not os.path.exists(path):
            if os.path.exists(index):
                return index
        elif is_cache_index(index) and not _is_other(path):
            return index
    return path


def check_name(path: str | os.PathLike[str]) -> Path:
    """The path of a file to be written; ConfigError unless it is NAME.safetensors."""
    path = as_path(path)
    if path.suffix != ".safetensors":
        raise ConfigError(f"{path} cannot be written: give the name of a file, NAME.safetensors")
    return path


def is_index(path: Path) -> bool:
    """Whether a file is an index by its name."""
    return path.name.endswith(".index.json")


def index_path(path: Path) -> Path:
    """Where the index of a cache cut into shards stands."""
    return path.with_name(f"{path.name}.index.json")


def is_cache_index(path: Path) -> bool:
    """Whether a file is an index that kvquant wrote, be it damaged, and not another program's."""
    try:
        with open_file(path) as file:
            return f'"{MANIFEST}"'.encode() in file.read(MAX_HEADER_BYTES)
    except (FileNotFoundError, CheckpointError):
        return False


def shard_pattern(index: Path) -> re.Pattern[str]:
    """File names of an index's shards."""
    stem = index.name.removesuffix(".index.json").removesuffix(".safetensors")
    return re.compile(rf"{re.escape(stem)}-[0-9a-f]{{8}}-[0-9]{{5}}-of-[0-9]{{5}}\.safetensors")


def _is_other(path: Path) -> bool:
    """Whether a file is whole and no cache."""
    try:
        with SafetensorsFile(path) as file:
            return MANIFEST not in file.metadata
    except (CheckpointError, OSError):
        return False


def remove_old_shards(path: Path, keep: Collection[str], old: bytes | None) -> None:
    """Remove the shards of this name that are ours and that no index names any more.

    Args:
        path: of the cache.
        keep: file names of the shards in use.
        old: without a lock the index that was replaced: only its shards are nobody else's.
    """
    pattern = shard_pattern(index_path(path))
    with suppress(OSError):  # the cache is written; what stays is only space
        names = os.listdir(path.parent)
        indices = [path.with_name(name) for name in names if name.endswith(".index.json")]
        for name in names:
            if name in keep or not pattern.fullmatch(name) or not _is_shard(path.with_name(name)):
                continue
            is_named = any(name.encode() in content(index) for index in indices)
            if not is_named and (old is None or name.encode() in old):
                path.with_name(name).unlink()


def _is_shard(path: Path) -> bool:
    """Whether a file says that it is a shard of a cache."""
    try:
        with SafetensorsFile(path) as file:
            return file.metadata == SHARD and not path.is_symlink()
    except (CheckpointError, OSError):
        return False


def content(index: Path) -> bytes:
    """The bytes of an index, of whatever program; none if it cannot be read."""
    try:
        with open_file(index) as file:
            return bytes(file.read(MAX_HEADER_BYTES))
    except (CheckpointError, OSError):
        return b""
