"""Whole files or none: safetensors streamed tensor by tensor, synced, then renamed into place."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open

from .errors import CheckpointError

DTYPE_NAMES = {
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}
_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written without being held in memory as a whole.

    Attributes:
        dtype: of the tensor.
        shape: of the tensor.
        chunks: makes the iterator over its bytes in order, as tensors of any shape and device.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: Path,
    tensors: Mapping[str, TensorSource],
    metadata: Callable[[Mapping[str, str]], Mapping[str, str]],
) -> dict[str, str]:
    """Write a new safetensors file and sync it to the disk.

    Args:
        path: a file that does not exist yet.
        tensors: by name, in the order in which their bytes are to stand.
        metadata: makes the file's metadata from the SHA-256 of every tensor, always of one length.

    Returns:
        The SHA-256 of every tensor, in hexadecimal digits.
    """
    digests = dict.fromkeys(tensors, _NO_DIGEST)
    with open(path, "xb") as file:
        room = file.write(_header(tensors, metadata(digests)))
        for name, tensor in tensors.items():
            start, digest = file.tell(), hashlib.sha256()
            for chunk in tensor.chunks():
                data = _bytes(chunk.cpu())
                digest.update(data)
                file.write(data)
            assert file.tell() - start == tensor.nbytes, name
            digests[name] = digest.hexdigest()
        header = _header(tensors, metadata(digests))
        assert len(header) == room
        file.seek(0)
        file.write(header)
        _sync(file)
    return digests


def write_text(path: Path, text: str) -> None:
    """Write a new text file and sync it to the disk."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        _sync(file)


def sha256(tensor: torch.Tensor) -> str:
    """The SHA-256 of a CPU tensor's bytes, in hexadecimal digits."""
    return hashlib.sha256(_bytes(tensor)).hexdigest()


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give a name beside path to write to; what stands there takes path's place at the end.

    After an exception path is as before. A killed process leaves path as before too, and a file
    that is_temporary() knows.
    """
    temporary = path.with_name(f".{path.name}.{token()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def is_temporary(name: str, path: Path) -> bool:
    """Whether a file name is one that replaced(path) gives."""
    return bool(re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.tmp", name))


def token() -> str:
    """Eight hexadecimal digits that nobody else has drawn."""
    return secrets.token_hex(4)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory last, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network file systems refuse
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file for reading tensor by tensor.

    Returns:
        What safetensors.safe_open gives: a context manager.

    Raises:
        FileNotFoundError: there is no file.
        CheckpointError: it is no safetensors file, or a damaged one.
    """
    check_file(path)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no safetensors file, or a damaged one ({error}): write it again or take "
            "another copy"
        ) from None


def read_tensor(file: Any, name: str) -> torch.Tensor:
    """Read one tensor of a file that open_safetensors opened.

    Raises:
        CheckpointError: torch cannot hold it.
    """
    try:
        tensor: torch.Tensor = file.get_tensor(name)
    except (SafetensorError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"tensor {name!r} cannot be read ({error})") from None
    return tensor


def check_file(path: Path) -> None:
    """Raise unless path is a file."""
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file: give the file itself")


def _header(tensors: Mapping[str, TensorSource], metadata: Mapping[str, str]) -> bytes:
    """The length and the JSON that open a safetensors file, padded so that tensors are aligned."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy where it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
