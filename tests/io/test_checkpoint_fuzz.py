"""Cache files that a hostile writer changes and seals: what is accepted hangs together.

Damaged bytes are in test_tensor_files.py.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import mark_slow

from kvquant import KVCache
from kvquant.errors import CheckpointError
from kvquant.io.checkpoint import load_cache, save_cache

Mutation = Callable[[bytearray, random.Random], None]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are only slowed down by threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_cache() -> KVCache:
    cache = KVCache(
        *(2, 2, 2, 64, 12), k_format=["int4-g2", "fp8"], v_format="int8", sink_len=1, recent_len=2
    )
    generator = torch.Generator().manual_seed(0)
    cache.start_positions.copy_(torch.tensor([3, 50]))
    for layer in range(2):
        k, v = torch.randn(2, 2, 2, 6, 64, generator=generator)
        cache.append(layer, k, v, [6, 4])
    return cache


def header_end(data: bytes | bytearray) -> int:
    (length,) = struct.unpack("<Q", data[:8])
    return 8 + int(length)


def edit_manifest(data: bytearray, rng: random.Random) -> None:
    """Values of the manifest change, and its checksum with them."""
    header = json.loads(data[8 : header_end(data)])
    manifest = json.loads(header["__metadata__"]["kvquant_file"])
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        mutate_json(manifest, rng)
    seal(header, manifest)
    replace_header(data, header)


def edit_tensor(data: bytearray, rng: random.Random) -> None:
    """Bytes of a tensor change, and both checksums with them: headers become NaN or negative."""
    end = header_end(data)
    header = json.loads(data[8:end])
    manifest = json.loads(header["__metadata__"]["kvquant_file"])
    name = rng.choice([name for name in header if name != "__metadata__"])
    start, stop = (end + offset for offset in header[name]["data_offsets"])
    row_bytes = header[name]["shape"][2]
    at = rng.randrange(start, stop, row_bytes)
    data[at : at + row_bytes] = rng.randbytes(row_bytes)
    manifest["sha256"][name] = hashlib.sha256(data[start:stop]).hexdigest()
    seal(header, manifest)
    replace_header(data, header)


def mutate_json(value: Any, rng: random.Random) -> None:
    """Put something hostile at a random place of a JSON value, in place."""
    places: list[tuple[Any, Any]] = []

    def walk(at: Any) -> None:
        for key in at if isinstance(at, dict) else range(len(at)):
            places.append((at, key))
            if isinstance(at[key], (dict, list)):
                walk(at[key])

    walk(value)
    at, key = rng.choice(places)
    action = rng.randrange(6)
    if action == 0:
        del at[key]
    elif action == 1 and isinstance(at, list):
        at.append(at[key])
    elif action == 1:
        at[f"{key}x"] = at[key]
    elif action == 2 and type(at[key]) is int:
        at[key] += rng.choice((-1, 1))
    elif action == 3:
        other, other_key = rng.choice(places)
        at[key] = json.loads(json.dumps(other.get(other_key) if isinstance(other, dict) else key))
    else:
        hostile: list[Any] = [-1, 0, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**64, 10**400, 1e308]
        hostile += [0.5, float("nan")]
        hostile += [None, True, "", "int4-g3", "int8", "x" * 5000, "\ud800", [], [[]], {}, {"": 0}]
        hostile += ["int4-g" + "9" * 5000, [0] * 1000, "9" * 64, "layers.0.k_packed"]
        at[key] = rng.choice(hostile)


def dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def seal(header: dict[str, Any], manifest: Any) -> None:
    text, metadata = dump(manifest), header["__metadata__"]
    metadata["kvquant_file"] = text
    metadata["kvquant_file_sha256"] = hashlib.sha256(text.encode()).hexdigest()


def replace_header(data: bytearray, header: dict[str, Any]) -> None:
    text = dump(header).encode()
    data[: header_end(data)] = struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize("share", mark_slow([8, 1], [8]))  # one of so many mutations
@pytest.mark.parametrize("mutate", [edit_manifest, edit_tensor])
def test_sealed_mutations_are_refused_or_hang_together(
    tmp_path: Path, mutate: Mutation, share: int
) -> None:
    path = tmp_path / "c.safetensors"
    save_cache(make_cache(), path, model={"model_type": "x"}, creation={"a": [1, {"b": 2}]})
    original = path.read_bytes()
    rng = random.Random(mutate.__name__)
    accepted = 0
    for _ in range(600 // share):
        data = bytearray(original)
        mutate(data, rng)
        path.write_bytes(data)
        try:
            cache = load_cache(path)
        except CheckpointError:
            continue
        accepted += 1
        for layer in range(cache.num_layers):
            k, v = cache.dequantized(layer)
            assert k.isfinite().all() and v.isfinite().all()
            assert k.shape[2] == int(cache.seq_lens.max()) <= cache.max_seq_len
            one = torch.zeros(cache.batch, cache.num_kv_heads, 1, k.shape[3])
            if k.shape[2] < cache.max_seq_len:
                cache.append(layer, one, one[..., : v.shape[3]])
    assert accepted  # the row stays readable if only codes change
