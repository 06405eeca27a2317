"""Safetensors files: ours are the library's, odd ones are refused, what was read stays."""

from __future__ import annotations

import errno
import json
import os
import random
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from example_plan import example_plan
from forged import Edit, forge, manifest_of
from refusals import assert_refused
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from saved_kinds import KINDS, Kind

from kvquant.errors import CheckpointError
from kvquant.io import tensor_files as files
from kvquant.io.export import quantize_raw
from kvquant.io.plan import CachePlan
from kvquant.io.tensor_files import DTYPES, SafetensorsFile, TensorSource, save_safetensors


def sample(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of random bits."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    bits = torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, bit for bit."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return (
        a.contiguous().flatten().view(torch.uint8).equal(b.contiguous().flatten().view(torch.uint8))
    )


SHAPES = ((), (0,), (3,), (2, 0, 5), (3, 4, 5))


def test_our_files_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = {f"{name}{i}": sample(dtype, shape) for name, dtype in DTYPES.items()
               for i, shape in enumerate(SHAPES)}  # fmt: skip
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    metadata = {"a": "b", "ü": '"\\\n', "": "x" * 1000}
    sources = {name: TensorSource.of(tensor) for name, tensor in tensors.items()}
    save_safetensors(ours, sources, lambda _: metadata)
    save_file(tensors, theirs, metadata)
    for path in (ours, theirs):
        with SafetensorsFile(path) as file, safe_open(path, "pt") as other:
            assert file.metadata == other.metadata() == metadata
            assert file.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            assert file.num_bytes == path.stat().st_size
            for name, tensor in load_file(path).items():
                assert same(file.read(name), tensor) and same(tensor, tensors[name]), name
    assert len(tensors) == len(load_file(ours))


def build(entries: Any, data: bytes = b"", *, text: bytes | None = None) -> bytes:
    """A file with a header as given."""
    header = json.dumps(entries).encode() if text is None else text
    return struct.pack("<Q", len(header)) + header + data


def entry(start: int, stop: int, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape,
            "data_offsets": [start, stop]}  # fmt: skip


ODD = {
    "empty": b"",
    "short": b"\0" * 7,
    "long header": struct.pack("<Q", 100) + b"{}",
    "endless header": struct.pack("<Q", 2**64 - 1) + b"{}",
    "list": build([]),
    "no JSON": build(None, text=b"{"),
    "space": build(None, text=b" {}"),
    "mark": build(None, text="\ufeff{}".encode()),
    "wide": build(None, text="{}".encode("utf-16-le")),
    "no text": build(None, text=b'{"\xff": 1}'),
    "deep": build(None, text=b'{"a":' * 100_000),
    "half": build(None, text=b'{"__metadata__": {"a": "\\ud800"}}'),
    "twice": build(
        None, b"ab", text=b'{"a":%b,"a":%b}' % ((json.dumps(entry(0, 2)).encode(),) * 2)
    ),
    "other metadata": build({"__metadata__": {"a": 1}}),
    "no metadata": build({"__metadata__": None}),
    "trailing": build({"a": entry(0, 1)}, b"ab"),
    "missing": build({"a": entry(0, 2)}, b"a"),
    "hole": build({"a": entry(0, 1), "b": entry(2, 3)}, b"abc"),
    "late": build({"a": entry(1, 2)}, b"ab"),
    "overlap": build({"a": entry(0, 2), "b": entry(1, 3)}, b"abc"),
    "shared": build({"a": entry(0, 2), "b": entry(0, 2)}, b"ab"),
    "backwards": build({"a": entry(2, 0, shape=[2])}, b"ab"),
    "shape": build({"a": entry(0, 2, shape=[3])}, b"ab"),
    "size": build({"a": entry(0, 2, "F32", [2])}, b"ab"),
    "dtype": build({"a": entry(0, 2, "U9")}, b"ab"),
    "negative": build({"a": entry(0, 2, shape=[-1, -2])}, b"ab"),
    "fraction": build({"a": entry(0, 2, shape=[2.0])}, b"ab"),
    "truth": build({"a": entry(0, 1, shape=[True])}, b"a"),
    "huge": build({"a": entry(0, 2, shape=[2**64])}, b"ab"),
    "product": build({"a": entry(0, 0, shape=[2**40, 2**40])}),
    "many sizes": build({"a": entry(0, 0, shape=[2**62] * 100_000)}),  # at once, not in minutes
    "key": build({"a": entry(0, 2) | {"x": 1}}, b"ab"),
    "no key": build({"a": {"dtype": "U8", "shape": [2]}}, b"ab"),
    "no object": build({"a": 1}),
    "NaN": build({"a": entry(0, 2) | {"shape": [float("nan")]}}, b"ab"),
}


def test_odd_headers_are_refused(tmp_path: Path) -> None:
    for name, data in ODD.items():
        path = tmp_path / name
        path.write_bytes(data)
        told = rf"^{path} is no safetensors file, or a damaged one"
        assert_refused(CheckpointError, (partial(SafetensorsFile, path), told))


def test_headers_that_cost_much_are_refused_first(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(build(None, text=b'{"a": ["' + b"[" * (files.MAX_HEADER_BYTES // 50) + b'"]}'))
    with pytest.raises(CheckpointError, match="more than 1048576 lists and objects"):
        SafetensorsFile(path)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", files.MAX_HEADER_BYTES + 1))
        file.truncate(files.MAX_HEADER_BYTES + 100)
    with pytest.raises(CheckpointError, match="header would have 100000001 bytes"):
        SafetensorsFile(path)


def test_what_the_library_refuses_is_refused(tmp_path: Path) -> None:
    """1,500 mutated headers: what we take the library takes too, and reads the same."""
    path, rng = tmp_path / "x", random.Random(0)
    tensors = {"a": sample(torch.float32, (2, 3)), "b": sample(torch.uint8, (5,)),
               "c": sample(torch.bfloat16, (0, 4))}  # fmt: skip
    save_file(tensors, path, {"k": "v"})
    original = path.read_bytes()
    end = 8 + struct.unpack("<Q", original[:8])[0]
    taken = 0
    for _ in range(1500):
        data = bytearray(original)
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(end)
            how = rng.randrange(4)
            if how == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif how == 1:
                data[at] = rng.choice(b'0123456789{}[]",: aB')
            elif how == 2:
                del data[at]
            else:
                data.insert(at, rng.choice(b'0123456789{}[]",: '))
        path.write_bytes(data)
        try:
            file = SafetensorsFile(path)
        except CheckpointError:
            continue
        with file:
            found = {name: file.read(name) for name in file.shapes}
        try:
            expected = load_file(path)
        except (SafetensorError, RuntimeError, ValueError, TypeError, OverflowError) as error:
            raise AssertionError(f"taken, but not by the library: {data[:end]!r}") from error
        assert found.keys() == expected.keys()
        assert all(same(found[name], expected[name]) for name in found), data[:end]
        taken += 1
    assert taken > 8


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "."):
        with pytest.raises(CheckpointError, match="is not a file: give the file itself"):
            SafetensorsFile(tmp_path / name)
    with pytest.raises(CheckpointError, match="is not a file"):
        SafetensorsFile("/dev/zero")
    (tmp_path / "file").touch()
    for name in ("none", "file/x", "a\0b"):
        with pytest.raises(FileNotFoundError):
            SafetensorsFile(tmp_path / name)
    with pytest.raises(OSError):
        SafetensorsFile(tmp_path / "loop")


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {"raw"}))  # which has no checksums
def test_every_damaged_byte_is_found(tmp_path: Path, name: str) -> None:
    kind, path, rng, taken = KINDS[name], tmp_path / "x.safetensors", random.Random(0), 0
    kind.save(0, path)
    data, expected = path.read_bytes(), kind.shown(kind.load(path))
    manifest, end = manifest_of(path), 8 + int.from_bytes(data[:8], "little")
    places = [*range(0, 400, 9), *(rng.randrange(end) for _ in range(60))]
    places += [rng.randrange(end, len(data)) for _ in range(30)]
    for damaged in (
        *(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] for at in places),
        *(data[:size] for size in (0, 3, 8, 100, end, -1)),
        data + b"\0",
    ):
        path.write_bytes(damaged)
        try:
            assert kind.shown(kind.load(path)) == expected and manifest_of(path) == manifest
            taken += 1
        except CheckpointError as error:
            assert str(error).startswith(str(path))
    assert taken < 10  # some bytes are spaces


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {"raw"}))
def test_other_tensors_than_the_manifest_has_are_refused(tmp_path: Path, name: str) -> None:
    kind, path = KINDS[name], tmp_path / "x.safetensors"
    kind.save(0, path)
    first = min(load_file(path))
    edits: dict[str, Edit] = {
        "'x' should not be there": lambda _, tensors: tensors.update(x=torch.zeros(1)),
        f"'{first}' is missing": lambda top, tensors: (tensors.pop(first), top.update(sha256=all_)),
        f"'{first}' is torch": lambda _, tensors: tensors.update({first: tensors[first][None]}),
    }
    all_ = manifest_of(path)["sha256"]
    for message, edit in edits.items():
        kind.save(0, path)
        forge(path, edit)
        with pytest.raises(CheckpointError) as caught:
            kind.load(path)
        assert message in str(caught.value) and str(caught.value).startswith(str(path))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("how", ["replaced", "cut", "overwritten"])
def test_a_file_is_one_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, how: str
) -> None:
    """At any read another file takes its place, or it is cut or overwritten."""
    path = tmp_path / "x.safetensors"
    kind.save(0, path)
    old, size = kind.shown(kind.load(path)), path.stat().st_size
    fill, left, refused = SafetensorsFile._fill, 0, 0

    def filled(self: SafetensorsFile, target: memoryview) -> None:
        nonlocal left
        left -= 1
        if left == 0 and how == "replaced":
            kind.save(1, path)
        elif left == 0 and how == "cut":
            os.truncate(path, size // 2)
        elif left == 0:
            with open(path, "r+b") as file:
                file.seek(size // 2)
                file.write(bytes(size // 2))
        fill(self, target)

    monkeypatch.setattr(SafetensorsFile, "_fill", filled)
    for when in range(1, 40):
        left = 0  # not while it is saved
        kind.save(0, path)
        left = when
        try:
            assert kind.shown(kind.load(path)) == old
        except CheckpointError:
            assert how != "replaced"
            refused += 1
        if left > 0:  # there are no more reads
            break
    assert how == "replaced" or refused


def test_a_tensor_larger_than_memory_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, num_bytes = tmp_path / "x", 1 << 29
    data = build({"a": entry(0, num_bytes)})
    with open(path, "wb") as file:  # sparse: it takes no space
        file.write(data)
        file.truncate(len(data) + num_bytes)
    monkeypatch.setattr(files, "available_memory", lambda: num_bytes - 1)
    with SafetensorsFile(path) as opened:
        with pytest.raises(CheckpointError, match=r"takes 0.5 GiB, more than there is"):
            opened.read("a")


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="Linux tells what is mapped")
def test_no_file_stays_mapped(tmp_path: Path) -> None:
    example_plan().save(tmp_path / "plan.safetensors")
    plan = CachePlan.load(tmp_path / "plan.safetensors")
    KINDS["raw"].save(0, tmp_path / "raw.safetensors")
    cache = quantize_raw(tmp_path / "raw.safetensors")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert plan.layers and cache.batch


def test_an_error_of_the_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "raw.safetensors"
    path.write_bytes(build({"a": entry(0, 2)}, b"ab"))
    file = SafetensorsFile(path)
    file._file.close()

    class Failing:
        def readinto(self, target: memoryview) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(file, "_file", Failing())
    with pytest.raises(OSError, match="Input/output error") as found:
        file._fill(memoryview(bytearray(2)))
    assert found.value.filename == str(path)
