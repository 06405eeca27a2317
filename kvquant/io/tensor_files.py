"""Safetensors files: written tensor by tensor, read through one descriptor into memory of our own.

Nothing is mapped, and a file is opened once: what was read stays what it was, whatever becomes of
the file, and header and tensors belong together when another file takes its place meanwhile.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Annotated, Any

import torch
from msgspec import Meta

from ..cache.memory import available_memory
from ..errors import CheckpointError
from .atomic import as_path, named
from .schema import INT64, Object, check_lists, checked, parse

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
_CHUNK = 8 << 20  # bytes that are read and hashed at a time
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}
_TICK = 20_000_000  # nanoseconds by which the clock of a file system may be behind
_WAITS = 200  # of a quarter of a tick, for a file that changes

_Size = Annotated[int, Meta(ge=0, le=INT64)]


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

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSource:
        """A tensor that is there."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: [tensor])


Metadata = Callable[[Mapping[str, str]], Mapping[str, str]]


def write_safetensors(
    file: IO[bytes], tensors: Mapping[str, TensorSource], metadata: Metadata
) -> dict[str, str]:
    """Write tensors to a new file, wide elements first, so that all of them are aligned.

    Args:
        file: an empty one.
        tensors: by name.
        metadata: makes the file's metadata from the SHA-256 of every tensor, always of one length.

    Returns:
        The SHA-256 of every tensor, in hexadecimal digits.

    Raises:
        CheckpointError: the header would be too long to be read again.
    """
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    digests = dict.fromkeys(tensors, NO_DIGEST)
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
    return digests


@contextmanager
def naming(path: Path, kinds: tuple[type[Exception], ...] = (CheckpointError,)) -> Iterator[None]:
    """Let a CheckpointError begin with the name of the file that it is about.

    Args:
        path: of the file.
        kinds: errors that become a CheckpointError: what is wrong stands in the file.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, CheckpointError) and str(error).startswith(str(path)):
            raise
        raise CheckpointError(f"{path}: {error}") from None


def sealed(key: str, text: str) -> dict[str, str]:
    """A text with its checksum, as two entries of a file's metadata."""
    return {key: text, f"{key}_sha256": hashlib.sha256(text.encode()).hexdigest()}


def unsealed(key: str, metadata: Mapping[str, str], what: str = "the manifest") -> str:
    """The text that sealed() was given; `what` it is, for the error.

    Raises:
        CheckpointError: there is none, or its checksum is another one.
    """
    text = metadata.get(key)
    if text is None:
        raise CheckpointError("it does not say that kvquant wrote it")
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get(f"{key}_sha256"):
        raise CheckpointError(
            f"{what} is damaged (its checksum differs): take another copy of the file"
        )
    return text


class _Entry(Object):
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class SafetensorsFile:
    """A safetensors file, open for reading, its header checked.

    Args:
        path: of the file.
        wait: for files without checksums: wait until the clock is past the time of its last
            change, so that check_unchanged sees every later one. That takes some milliseconds; of
            a file that somebody keeps writing to, a second.

    Attributes:
        path: as given.
        metadata: strings.
        shapes: of each tensor by its name.
        dtypes: of each tensor by its name.
        num_bytes: of the whole file.

    Raises:
        FileNotFoundError: there is no file.
        CheckpointError: it is no safetensors file, or a damaged one; with wait, it is written to
            all the time.
    """

    def __init__(self, path: str | os.PathLike[str], *, wait: bool = False) -> None:
        self.path = as_path(path)
        self._file = open_file(self.path)
        try:
            self._changed = self._settled() if wait else os.fstat(self._file.fileno())
            self.num_bytes = self._changed.st_size
            try:
                self._read_header()
            except CheckpointError as error:
                raise CheckpointError(
                    f"{self.path} is no safetensors file, or a damaged one ({error}): write it "
                    "again or take another copy"
                ) from None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was read stays."""
        self._file.close()

    def read(self, name: str, digest: str | None = None) -> torch.Tensor:
        """Read a tensor to the CPU.

        Args:
            name: one of shapes.
            digest: its SHA-256 in hexadecimal digits; not looked at when None.

        Raises:
            CheckpointError: the bytes have another checksum, the file is shorter than it was, or
                there is not enough memory.
        """
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

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file was written to since it was opened."""
        now = os.fstat(self._file.fileno())
        before = self._changed.st_mtime_ns, self._changed.st_size
        if (now.st_mtime_ns, now.st_size) != before:
            raise self._was_written_to()

    def fileno(self) -> int:
        """The descriptor."""
        return int(self._file.fileno())

    def _settled(self) -> os.stat_result:
        """What the system says of the file, once its clock is past the last change."""
        for _ in range(_WAITS):
            facts = os.fstat(self._file.fileno())
            if not 0 <= time.time_ns() - facts.st_mtime_ns < _TICK:
                return facts
            time.sleep(_TICK / 4e9)
        raise self._was_written_to()

    def _was_written_to(self) -> CheckpointError:
        return CheckpointError(f"{self.path} is being written to: read it when the writer is done")

    def _read_header(self) -> None:
        head = bytearray(8)
        if self.num_bytes < len(head):
            raise CheckpointError(f"it has {self.num_bytes} bytes")
        self._fill(memoryview(head))
        if head.startswith(b"GGUF"):
            raise CheckpointError(
                "this is a GGUF file: the weights of a model, no cache and no plan. Commands take "
                "it as MODEL; `kvquant check MODEL` tells what caches of it take and lose"
            )
        (length,) = struct.unpack("<Q", head)
        self._start = len(head) + length
        if length > MAX_HEADER_BYTES or self._start > self.num_bytes:
            raise CheckpointError(f"its header would have {length} bytes")
        text = bytearray(length)
        self._fill(memoryview(text))
        if not text.startswith(b"{"):
            raise CheckpointError("its header is no object")
        top = parse(bytes(text), "its header")
        self.metadata = checked(top.pop("__metadata__", {}), dict[str, str], "__metadata__")
        entries = checked(top, dict[str, _Entry], "its header")
        self.shapes = {name: entry.shape for name, entry in entries.items()}
        self.dtypes: dict[str, torch.dtype] = {}
        self._offsets = {name: entry.data_offsets[0] for name, entry in entries.items()}
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            if entry.dtype not in DTYPES:
                raise CheckpointError(f"tensor {name!r:.80} is of unknown type {entry.dtype!r:.20}")
            dtype = self.dtypes[name] = DTYPES[entry.dtype]
            start, stop = entry.data_offsets
            if start != end or stop - start != prod(entry.shape) * dtype.itemsize:
                raise CheckpointError(f"the bytes of tensor {name!r:.80} are not where they should")
            end = stop
        if self._start + end != self.num_bytes:
            raise CheckpointError(f"it has {self.num_bytes} bytes in place of {self._start + end}")

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
    """Open a file for reading, unbuffered; what is none is not waited for.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is a folder, a device or the like.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)  # to open a device may do something
        descriptor = os.open(path, flags) if is_file else -1
    except (OSError, ValueError) as error:  # ValueError: a name with NUL
        if isinstance(error, OSError) and error.errno not in _NO_FILE:
            raise
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    if is_file and stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb", buffering=0)
    if is_file:  # another has taken its place
        os.close(descriptor)
    raise CheckpointError(f"{path} is not a file: give the file itself")


def sha256(tensor: torch.Tensor) -> str:
    """The SHA-256 of a CPU tensor's bytes, in hexadecimal digits."""
    return hashlib.sha256(_bytes(tensor)).hexdigest()


def _header(tensors: Mapping[str, TensorSource], metadata: Mapping[str, str]) -> bytes:
    """The length and the JSON that open a safetensors file, padded so that tensors are aligned."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = header_text(entries, "the header")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def header_text(entries: Mapping[str, Any], what: str) -> bytes:
    """What stands at the head of a file, as JSON; CheckpointError if it could not be read again."""
    text = json.dumps(entries, separators=(",", ":"))
    try:
        if len(text) > MAX_HEADER_BYTES - 8:
            raise ValueError(f"it has {len(text)} bytes, readers take {MAX_HEADER_BYTES}")
        check_lists(text)
    except ValueError as error:
        raise CheckpointError(
            f"{what} could not be read again ({error}): save less at a time, or describe it in "
            "fewer words"
        ) from None
    return text.encode()


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy where it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
