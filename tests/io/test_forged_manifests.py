"""Files whose manifests somebody forged, with checksums that fit: each is refused by name (10 s).

What sequences may share is in test_sequences_forged.py, plans are in test_plan.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import latent_pages
import paged_cases
import pytest
import torch
from forged import forge

from kvquant import KVCache, LatentPagedBatch, load_cache, load_sequences, save_cache
from kvquant.errors import CheckpointError
from kvquant.io.sequences import save_sequences
from kvquant.paged.batch import PagedBatch

GONE = object()  # in place of a value: the key goes
HUGE, ZEROS = 2**31 - 1, "0" * 64
Refused = tuple[str, Any, str]  # the place in the manifest, the value there, the message

OF_ALL: list[Refused] = [
    ("format", "x", "has no format of kvquant, but 'x'"),
    ("format", 3, "has no format of kvquant, but 3"),
    ("format", "kvquant.plan", "this is a plan, not a cache: CachePlan.load"),
    ("version", 2, "the file has version 2, this kvquant reads 1"),
    ("version", True, "the file has version True"),
    ("version", GONE, "the file has version None"),
    ("more", 1, "another key or lacks one: object contains unknown field more"),
    ("model", GONE, "lacks one: object missing required field model"),
    ("model", 3, "model is 3"),
    ("transforms", [{"rotate": 1}], "transforms[0] has another key"),
    ("transforms", [1], "transforms[0] is 1"),
    ("transforms", [dict.fromkeys("kv", ZEROS)], "1 transforms for 2 layers"),
    ("num_kv_heads", 0, "num_kv_heads is 0"),
    ("num_kv_heads", HUGE, "it must be torch.uint8"),
    ("recent_len", True, "recent_len is True"),
    ("exact_format", "x", "exact_format is 'x'"),
    ("layers", 3, "layers is 3: it must be array, got int"),
    ("layers", [], "layers is []: it must be array of length >= 1"),
    ("layers", [{}] * 4097, "length <= 4096"),
    ("layers.0.k.format", "int6", "layers[0].k"),
    ("layers.1.v.head_dim", 128, "it must be torch.uint8"),
    ("creation", {"a": [[]] * (1 << 20)}, "more than 1048576 lists"),
    ("sha256.layers/1/k_x", ZEROS, "'layers.1.k_x' is missing"),
    ("sha256.layers/1/k_x", "x", "must be 64 hexadecimal digits"),
    ("sha256", {}, "should not be there"),
    ("sha256", None, "sha256 is None"),
]
OF_CACHES: list[Refused] = [
    ("max_seq_len", HUGE, "GiB, more than there is"),
    ("max_seq_len", 2**40, "must be int <= 2147483647"),
    ("max_seq_len", 20, "23 tokens, max_seq_len is 20"),
    ("seq_lens", [24, 9], "do not fit"),
    ("seq_lens", [], "seq_lens is []: it must be array of length >= 1"),
    ("seq_lens", [0] * (1 + (1 << 20)), "length <= 1048576"),
    ("seq_lens.0", -1, "seq_lens[0] is -1: it must be int >= 0"),
    ("layers.0.packed_lens.0", 2, "packed_lens has 2"),
    ("sha256.layers/0/k_packed", ZEROS, "tensor 'layers.0.k_packed' is damaged"),
]
OF_SEQUENCES: list[Refused] = [
    ("page_size", 17, "page_size is 17"),
    ("page_size", 0, "page_size is 0"),
    ("windows", [8], "1 windows for 2 layers"),
    ("sequences", [], "sequences is []: it must be array of length >= 1"),
    ("sequences.0.namespace", "x", "cannot share page 0"),
    ("sequences.0.namespace", 3, "sequences[0].namespace is 3: it must be str | null, got int"),
    ("sequences.0.id", "b", "two sequences have one id"),
    ("sequences.0.id", 1.5, "sequences[0].id is 1.5"),
    ("sequences.0.length", -1, "sequences[0].length is -1"),
    ("sequences.0.length", 9, "length 9, packed_len 52"),
    ("sequences.0.packed_len", 40, "packed_len 40"),
    ("sequences.0.pages", [0, 1, 2], "3 pages and 60 tokens do not fit"),
    ("sequences.0.pages", [0, 1, 2, 9], "not counted from 0 without gaps"),
    ("sequences.0.pages", [0, 1, 2, 0], "sequences[0] cannot share page 0"),
    ("sequences.0.pages", [0, 5, 2, 3], "sequences[1] cannot share page 2"),
    ("sequences.0.pages.0", -1, "sequences[0].pages[0] is -1"),
    ("sequences.0.tokens", list(range(61)), "4 pages and 61 tokens do not fit"),
    ("sequences.0.tokens", [0.5], "sequences[0].tokens[0] is 0.5: it must be int, got float"),
    ("sequences.0.tokens", [2**63], "sequences[0].tokens[0]"),
    ("sequences.0.tokens", [1, *range(1, 60)], "sequences[1] cannot share page 0"),
    ("sequences.0.tokens", [*range(30), 0], "sequences[1] cannot share page 1"),
    ("sha256.layers/0/k_pages", ZEROS, "tensor 'layers.0.k_pages' is damaged"),
]
OF_LATENTS: list[Refused] = [
    ("windows", [8, 8], "latent rows have no windows"),
    ("num_kv_heads", 2, "latent rows are of one size, and of one KV head"),
    ("layers.1.k.head_dim", 64, "formats that no cache has: latent has 64 elements"),
    ("latent", GONE, "formats that no cache has: head_dim 32 is that of"),
]


def put(place: str, value: Any, top: dict[str, Any]) -> None:
    """Put a value at a place of a manifest: keys and indices with dots, names of tensors with /."""
    *keys, last = (key.replace("/", ".") for key in place.split("."))
    at: Any = top
    for key in keys:
        at = at[int(key) if isinstance(at, list) else key]
    if value is GONE:
        del at[last]
    else:
        at[int(last) if isinstance(at, list) else last] = value


def sequences(batch: PagedBatch | LatentPagedBatch, path: Path) -> Path:
    """Save "a" of 60 tokens and a fork that went on."""
    paged_cases.begin(batch, "a", 60, range(60))
    batch.cache.fork("a", "b")
    paged_cases.extend(batch, ["b"], 9, range(9))
    return save_sequences(batch.cache, ["a", "b"], path)


def ids(table: list[Refused]) -> list[str]:
    return [f"{place}-{message[:20]}" for place, _, message in table]


def refuse(path: Path, case: Refused, load: Any) -> None:
    place, value, message = case
    forge(path, lambda top, _: put(place, value, top), digests=False)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert message in str(caught.value) and str(caught.value).startswith(str(path))


@pytest.mark.parametrize("case", OF_ALL + OF_CACHES, ids=ids(OF_ALL + OF_CACHES))
def test_forged_caches_are_refused(case: Refused, tmp_path: Path) -> None:
    options: dict[str, Any] = {"k_format": "int4-g4", "v_format": "int4-g4", "sink_len": 2}
    cache = KVCache(2, 2, 2, 64, 40, recent_len=6, **options)
    for layer in range(2):
        k, v = torch.randn(2, 2, 2, 23, 64)
        cache.append(layer, k, v, [23, 9])
    refuse(save_cache(cache, tmp_path / "x.safetensors"), case, load_cache)


@pytest.mark.parametrize("case", OF_ALL + OF_SEQUENCES, ids=ids(OF_ALL + OF_SEQUENCES))
def test_forged_sequences_are_refused(case: Refused, tmp_path: Path) -> None:
    path = sequences(PagedBatch(paged_cases.make(), 4, 100), tmp_path / "x.safetensors")
    cache = paged_cases.make()
    refuse(path, case, lambda path: load_sequences(cache, path))
    assert (cache.ids, cache.num_free_pages) == ([], 12)


@pytest.mark.parametrize("case", OF_LATENTS, ids=ids(OF_LATENTS))
def test_forged_sequences_of_latent_rows_are_refused(case: Refused, tmp_path: Path) -> None:
    path = sequences(LatentPagedBatch(latent_pages.make(), 4, 100), tmp_path / "x.safetensors")
    cache = latent_pages.make()
    refuse(path, case, lambda path: load_sequences(cache, path))
    assert cache.ids == []
