"""Safetensors files: written tensor by tensor, read through one descriptor, never mapped.

Tensors do not change with the file after a read, and header and tensors belong together even if
another file replaces it meanwhile.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from msgspec import Meta

from ..cache.memory import available_memory
from ..errors import CheckpointError, ConfigError, refuse
from .atomic import as_path, named, replacing
from .schema import INT64, Digest, Object, check_lists, checked, parse, unsealed

if TYPE_CHECKING:
    from typing_extensions import Self

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it
NO_DIGEST = "0" * 64  # stands for a checksum that is not known yet
_MAX_DIMS = 64  # of a tensor, as numpy has it; the product of a long shape takes minutes
_CHUNK = 8 << 20  # bytes that are read and hashed at a time
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}

_Size = Annotated[int, Meta(ge=0, le=INT64)]


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write; chunks gives its bytes in order, as tensors of any shape and device."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSource:
        return cls(tensor.dtype, tuple(tensor.shape), lambda: [tensor])


Metadata = Callable[[Mapping[str, str]], Mapping[str, str]]


def save_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, TensorSource], metadata: Metadata
) -> None:
    """Write tensors by name to a safetensors file, whole or not at all.

    metadata makes the file's metadata, of constant length, from the SHA-256 of every tensor. It
    raises CheckpointError for too long a header; else as replacing.
    """
    # wide elements first, so that all tensors are aligned
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    digests = dict.fromkeys(tensors, NO_DIGEST)
    with replacing(path) as file:
        header_bytes = file.write(_header(tensors, metadata(digests)))
        for name, tensor in tensors.items():
            start, digest = file.tell(), hashlib.sha256()
            for chunk in tensor.chunks():
                data = _bytes(chunk.cpu())
                digest.update(data)
                file.write(data)
            assert file.tell() - start == tensor.nbytes, name
            digests[name] = digest.hexdigest()
        header = _header(tensors, metadata(digests))
        assert len(header) == header_bytes
        file.seek(0)
        file.write(header)


def check_name(path: str | os.PathLike[str]) -> Path:
    """The path of a file to write; ConfigError unless it is NAME.safetensors."""
    path = as_path(path)
    if path.suffix != ".safetensors":
        raise ConfigError(f"{path} cannot be written: give the name of a file, NAME.safetensors")
    return path


@contextmanager
def naming(path: Path, kinds: tuple[type[Exception], ...] = (CheckpointError,)) -> Iterator[None]:
    """Turn errors of these kinds into a CheckpointError that begins with the file's name."""
    try:
        yield
    except kinds as error:
        if isinstance(error, CheckpointError) and str(error).startswith(str(path)):
            raise
        raise CheckpointError(f"{path}: {error}") from None


class _Entry(Object):
    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Size, _Size]


class SafetensorsFile:
    """A safetensors file, open for reading, its header checked.

    A CheckpointError that leaves its `with` block begins with the name of the file.

    Attributes:
        metadata: strings.
        shapes, dtypes: of each tensor by its name.
        digests: SHA-256 of each tensor by its name; empty before manifest() has read them.
        num_bytes: of the whole file.

    Raises:
        FileNotFoundError: there is no file.
        CheckpointError: the file is no safetensors file, or a damaged one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = as_path(path)
        self.digests: dict[str, str] = {}
        self._file = open_file(self.path)
        try:
            self._opened = os.fstat(self._file.fileno())
            self.num_bytes = self._opened.st_size
            try:
                refuse(CheckpointError, self._read_header())
            except CheckpointError as error:
                raise CheckpointError(
                    f"{self.path} is no safetensors file, or a damaged one ({error}): write it "
                    "again or take another copy"
                ) from None
            with naming(self.path):
                self._check()
        except BaseException:
            self._file.close()
            raise

    def _check(self) -> None:
        """Raise CheckpointError if the file is not what a subclass reads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.close()
        if isinstance(error, CheckpointError):
            with naming(self.path):
                raise error

    def manifest(self, *kinds: str) -> dict[str, Any]:
        """The manifest of a file of one of these KINDS, without the checksums.

        It raises CheckpointError for another kind or version, damage, or other tensors.
        """
        top = unsealed(self.metadata, *kinds)
        self.digests = checked(top.pop("sha256", None), dict[str, Digest], "sha256")
        _check_names(self.shapes, self.digests)
        return top

    def check_tensors(self, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless the file has tensors of these shapes and no others."""
        _check_names(self.shapes, shapes)
        for name, shape in shapes.items():
            if (self.dtypes[name], self.shapes[name]) != (dtype, shape):
                raise CheckpointError(
                    f"tensor {name!r:.80} is {self.dtypes[name]} {list(self.shapes[name])!s:.80}: "
                    f"it must be {dtype} {list(shape)!s:.80}"
                )

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor to the CPU.

        It raises CheckpointError for a wrong checksum, a file cut short, or too little memory.
        """
        digest = self.digests.get(name)
        shape, dtype = self.shapes[name], self.dtypes[name]
        num_bytes = prod(shape) * dtype.itemsize
        available = available_memory() if num_bytes > 1 << 28 else None
        try:
            if available is not None and num_bytes > available:
                raise MemoryError
            with torch.inference_mode(False):
                data = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                tensor = data.view(dtype).view(shape)
        except (MemoryError, RuntimeError):
            raise CheckpointError(
                f"tensor {name!r:.80} of {list(shape)!s:.80} takes {num_bytes / 2**30:,.1f} GiB, "
                "more than there is"
            ) from None
        bytes_, found = data.numpy().data, hashlib.sha256()
        self._file.seek(self._start + self._offsets[name])
        for at in range(0, num_bytes, _CHUNK):
            chunk = bytes_[at : at + _CHUNK]
            self._fill(chunk)
            if digest is not None:
                found.update(chunk)
        if digest is not None and found.hexdigest() != digest:
            raise CheckpointError(
                f"tensor {name!r:.80} is damaged (its checksum differs): take another copy of the "
                "file"
            )
        return tensor

    def _read_header(self) -> Iterator[str]:
        """Read the header, and give what is wrong with it."""
        head = bytearray(8)
        if self.num_bytes < len(head):
            yield f"it has {self.num_bytes} bytes"
        self._fill(memoryview(head))
        if head.startswith(b"GGUF"):
            yield (
                "this is a GGUF file: the weights of a model, no cache and no plan. Commands take "
                "it as MODEL; `kvquant check MODEL` tells what caches of it take and lose"
            )
        (length,) = struct.unpack("<Q", head)
        self._start = len(head) + length
        if length > MAX_HEADER_BYTES or self._start > self.num_bytes:
            yield f"its header would have {length} bytes"
        text = bytearray(length)
        self._fill(memoryview(text))
        if not text.startswith(b"{"):
            yield "its header is no object"
        top = parse(bytes(text), "its header")
        self.metadata = checked(top.pop("__metadata__", {}), dict[str, str], "__metadata__")
        entries = checked(top, dict[str, _Entry], "its header")
        self.shapes = {name: entry.shape for name, entry in entries.items()}
        self.dtypes: dict[str, torch.dtype] = {}
        self._offsets = {name: entry.data_offsets[0] for name, entry in entries.items()}
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            if entry.dtype not in DTYPES:
                yield f"tensor {name!r:.80} is of unknown type {entry.dtype!r:.20}"
            dtype = self.dtypes[name] = DTYPES[entry.dtype]
            start, stop = entry.data_offsets
            if start != end or stop - start != prod(entry.shape) * dtype.itemsize:
                yield f"the bytes of tensor {name!r:.80} are not where they should"
            end = stop
        if self._start + end != self.num_bytes:
            yield f"it has {self.num_bytes} bytes in place of {self._start + end}"

    def _fill(self, target: memoryview) -> None:
        while target:
            try:
                count = self._file.readinto(target)
            except OSError as error:
                raise named(error, self.path) from error
            if not count:
                raise CheckpointError("the file was cut short while it was read")
            target = target[count:]


def open_file(path: Path) -> Any:
    """Open a file for reading, unbuffered, without a wait for pipes and the like.

    It raises FileNotFoundError, or CheckpointError for a folder, a device or the like.
    """
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)  # to open a device may do something
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if is_file else -1
    except (OSError, ValueError) as error:  # ValueError: a name with NUL
        if isinstance(error, OSError) and error.errno not in _NO_FILE:
            raise
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    if is_file and stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb", buffering=0)
    if is_file:  # another has taken its place
        os.close(descriptor)
    raise CheckpointError(f"{path} is not a file: give the file itself")


def _check_names(found: Collection[str], wanted: Collection[str]) -> None:
    """Raise CheckpointError unless exactly the wanted names are there."""
    odd = set(found) ^ set(wanted)
    if odd:
        name = min(odd)
        problem = "is missing" if name in wanted else "should not be there"
        raise CheckpointError(f"tensor {name!r:.80} {problem}: take another copy of the file")


def _header(tensors: Mapping[str, TensorSource], metadata: Mapping[str, str]) -> bytes:
    """A file's length and JSON header, padded to align tensors; CheckpointError if invalid."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    try:
        if len(text) > MAX_HEADER_BYTES - 8:
            raise ValueError(f"it has {len(text)} bytes, readers take {MAX_HEADER_BYTES}")
        check_lists(text.decode())
    except ValueError as error:
        raise CheckpointError(
            f"the header could not be read again ({error}): save less at a time, or describe it in "
            "fewer words"
        ) from None
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy if it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
