"""Files of sequences that somebody forged, with checksums that fit: nobody comes to another's rows.

What the manifest's single values may be is in test_sequences.py.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from invariants import check_invariants
from paged_cases import same, values
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvquant.errors import CheckpointError, KVQuantError, OutOfPagesError
from kvquant.io import sequences as pagedfile
from kvquant.io.sequences import load_sequences, save_sequences
from kvquant.ops.quantize import quantize_rows
from kvquant.paged.batch import PagedBatch
from kvquant.paged.cache import PagedKVCache
from kvquant.rows.format import RowFormat

PAGE, DIM = 16, 64
INT8, BF16 = (RowFormat.parse(name, DIM) for name in ("int8", "bf16"))


def make(sinks: int = 0, recent: int = 0, **options: Any) -> PagedKVCache:
    sizes = {"num_pages": 8, "max_num_seqs": 6, "max_seq_len": 64, **options}
    lens: dict[str, Any] = {"sink_len": sinks, "recent_len": recent, "page_size": PAGE}
    return PagedKVCache(1, 1, DIM, k_format="int8", v_format="int8", **sizes, **lens)


def sequence(
    name: int | str, length: int, pages: Sequence[int], tokens: Sequence[int] = (), packed: int = -1
) -> dict[str, Any]:
    return {
        "id": name,
        "length": length,
        "packed_len": length if packed < 0 else packed,
        "pages": list(pages),
        "tokens": list(tokens),
    }


def forge(path: Path, sequences: list[dict[str, Any]], sinks: int = 0, recent: int = 0) -> Path:
    """Write a file whose page n holds the value n in all rows, and its 16-bit rows 100."""
    pages = len({page for one in sequences for page in one["pages"]})
    exact = sum(max(one["length"] - one["packed_len"], 0) for one in sequences)
    of_pages = torch.arange(pages).float()[:, None, None, None].expand(pages, 1, PAGE, DIM)
    tensors = {}
    for side in "kv":
        tensors[f"layers.0.{side}_pages"] = quantize_rows(of_pages, INT8)
        tensors[f"layers.0.{side}_exact"] = quantize_rows(torch.full((exact, 1, DIM), 100.0), BF16)
    write(
        path,
        {
            "format": "kvquant-pages",
            "version": 1,
            "writer": "x",
            "num_kv_heads": 1,
            "page_size": PAGE,
            "sink_len": sinks,
            "recent_len": recent,
            "exact_format": "bf16",
            "layers": [{side: {"format": "int8", "head_dim": DIM} for side in "kv"}],
            "sequences": sequences,
            "model": None,
            "creation": {},
            "transforms": [],
        },
        {name: rows for name, rows in tensors.items() if rows.numel()},
    )
    return path


def write(path: Path, top: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    digests = {
        name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }
    text = json.dumps(top | {"sha256": digests})
    digest = hashlib.sha256(text.encode()).hexdigest()
    save_file(tensors, path, {"kvquant_pages": text, "kvquant_pages_sha256": digest})


ONES, TWOS, SEVENS = [1] * PAGE, [2] * PAGE, [7] * 8
REFUSED: dict[str, list[dict[str, Any]]] = {
    "the first knows no tokens": [
        sequence(0, 16, [0]),
        sequence(1, 16, [0], ONES),
        sequence(2, 16, [0], TWOS),
    ],
    "the first is shorter": [
        sequence(0, 8, [0], SEVENS),
        sequence(1, 16, [0], [*SEVENS, *ONES[:8]]),
        sequence(2, 16, [0], [*SEVENS, *TWOS[:8]]),
    ],
    "the first knows less": [
        sequence(0, 16, [0], SEVENS[:3]),
        sequence(1, 16, [0], [*SEVENS, *ONES[:8]]),
        sequence(2, 16, [0], [*SEVENS, *TWOS[:8]]),
    ],
    "the longest comes first": [
        sequence(0, 32, [0, 1], [*ONES, *ONES]),
        sequence(1, 20, [0, 1], ONES),
        sequence(2, 24, [0, 1], [*ONES, *TWOS[:8]]),
    ],
    "in other places": [sequence(0, 32, [0, 1]), sequence(1, 32, [1, 0])],
    "after other pages": [sequence(0, 32, [0, 1]), sequence(1, 32, [2, 1])],
    "as the first page": [sequence(0, 32, [0, 1], ONES * 2), sequence(1, 16, [1], ONES)],
    "one page twice": [sequence(0, 32, [0, 0])],
    "one page twice, later": [sequence(0, 48, [0, 1, 0])],
    "a page too many": [sequence(0, 16, [0, 1])],
    "a page too few": [sequence(0, 17, [0])],
    "a page of an empty sequence": [sequence(0, 0, [0])],
    "pages counted from 1": [sequence(0, 16, [1])],
    "more packed tokens than tokens": [sequence(0, 16, [0], packed=17)],
    "less packed tokens than there must be": [sequence(0, 16, [], packed=0)],
    "ids that are alike": [sequence(0, 16, [0]), sequence(0, 16, [0])],
    "more known tokens than tokens": [sequence(0, 16, [0], [*ONES, 1])],
    "of negative length": [sequence(0, -16, [])],
    "longer than the cache takes": [sequence(0, 80, range(5))],
}


@pytest.mark.parametrize("name", REFUSED)
def test_pages_are_shared_only_by_sequences_that_agree(name: str, tmp_path: Path) -> None:
    cache = make()
    with pytest.raises(CheckpointError):
        load_sequences(cache, forge(tmp_path / "x.safetensors", REFUSED[name]))
    assert (cache.ids, cache.num_free_pages, cache.num_free_seq_slots) == ([], 8, 6)
    check_invariants(cache)


def test_an_id_that_no_cache_takes_is_told_of_the_file(tmp_path: Path) -> None:
    for number in (-(2**1024), 2**1024):
        path = forge(tmp_path / "x.safetensors", [sequence(number, 4, [0])])
        with pytest.raises(CheckpointError, match=r"x.safetensors: .*\[0\].id has 1025 bits: 1024"):
            load_sequences(make(), path)
    forge(path, [sequence(2**1024 - 1, 4, [0])])
    assert load_sequences(make(), path) == [2**1024 - 1]


def test_first_tokens_that_differ_are_not_shared(tmp_path: Path) -> None:
    """Sinks stand in no page, but the rows behind them were computed with them."""
    both = [sequence(i, 18, [0], [i + 1, 9, *ONES], packed=16) for i in (0, 1)]
    cache = make(sinks=2)
    with pytest.raises(CheckpointError, match=r"sequences\[1\] cannot share page 0"):
        load_sequences(cache, forge(tmp_path / "x.safetensors", both, sinks=2))


@pytest.mark.parametrize("name", [None, "two", ""], ids=repr)
def test_two_namespaces_share_no_page(name: str | None, tmp_path: Path) -> None:
    cache = make()
    cache.allocate("a", namespace="one")
    batch = PagedBatch(cache, 1, 20)
    with batch.extend(["a"], 16, ONES):
        batch.append(0, *torch.zeros(2, 16, 1, DIM).bfloat16())
    cache.fork("a", "b")
    path = save_sequences(cache, ["a", "b"], tmp_path / "x.safetensors")
    with safe_open(path, "pt") as file:
        top = json.loads(file.metadata()["kvquant_pages"])
    assert top["version"] == 5
    top["sequences"][1]["namespace"] = name
    write(path, top, load_file(path))
    with pytest.raises(CheckpointError, match=r"sequences\[1\] cannot share page 0"):
        load_sequences(make(), path)


def test_a_page_keeps_its_name_when_another_is_wanted_for_it() -> None:
    """Were a file to come through, the pool would not be led astray."""
    cache = make()
    cache.state.place(["a", "b"], [16, 16], [16, 16], [[0], [0]], [ONES, TWOS])
    cache.insert_prefixes(["a", "b"])
    check_invariants(cache)
    assert cache.match_prefix([*ONES, 0]) == PAGE and cache.match_prefix([*TWOS, 0]) == 0
    cache.free("a")
    check_invariants(cache)
    cache.free("b")
    check_invariants(cache)


def tenant(cache: PagedKVCache, batch: PagedBatch, name: str, count: int) -> None:
    """A sequence of rows with the value 42 and tokens that nobody else has."""
    tokens = [ord(name[0])] * count
    assert cache.allocate(name, tokens) == 0
    with batch.extend([name], count, tokens):
        batch.append(0, *torch.full((2, count, 1, DIM), 42.0).bfloat16())


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_loaded_nobody_comes_to_rows_of_others(seed: int, tmp_path: Path) -> None:
    """Random files; those that are taken are used, and end, and others come to their pages."""
    draw, taken = random.Random(seed), 0
    for number in range(60):
        sinks, recent = draw.choice([(0, 0), (2, 0), (0, 5), (2, 5)])
        sequences: list[dict[str, Any]] = []
        for name in range(draw.randrange(1, 5)):
            length = draw.choice([0, 1, 8, 16, 17, 18, 24, 32, 40])
            most = max(length - sinks, 0)
            packed = draw.randint(max(most - recent, 0), most)
            count = -(-packed // PAGE)
            like = draw.choice(sequences)["pages"] if sequences and draw.random() < 0.8 else []
            new = 1 + max((page for one in sequences for page in one["pages"]), default=-1)
            pages = (like[: draw.randrange(4)] + list(range(new, new + count)))[:count]
            if draw.random() < 0.1:
                draw.shuffle(pages)
            tokens = [draw.choice([1, 1, 1, 2])] * draw.randrange(20)
            tokens = (tokens + [3] * draw.randrange(30))[: draw.randint(0, length)]
            sequences.append(sequence(name, length, pages, tokens, packed))
        path = forge(tmp_path / f"{number}.safetensors", sequences, sinks, recent)
        cache = make(sinks, recent)
        batch = PagedBatch(cache, 6, 200)
        try:
            load_sequences(cache, path)
        except (CheckpointError, OutOfPagesError):
            assert cache.ids == []
            continue
        taken += 1
        check_invariants(cache)
        found = [cache.match_prefix([*one["tokens"], 9]) for one in sequences]
        for one, present in zip(sequences, found, strict=True):
            full = sinks + one["packed_len"] // PAGE * PAGE
            known = sinks + (len(one["tokens"]) - sinks) // PAGE * PAGE
            assert present in (0, min(full, known)), "its own pages are found, or nothing"
            if cache.can_append([one["id"]]):
                with batch.extend([one["id"]], 1):
                    batch.append(0, *torch.full((2, 1, 1, DIM), 5.0).bfloat16())
            check_invariants(cache)
        draw.shuffle(sequences)
        for one in sequences:
            cache.free(one["id"])
            check_invariants(cache)
        tenant(cache, batch, "tenant", 60)
        for one in sequences:
            present = cache.allocate("stranger", [*one["tokens"], 9])
            for x in values(cache, "stranger"):
                assert not (x[:, :present].round() == 42).any()
            check_invariants(cache)
            cache.free("stranger")
        cache.free("tenant")
        for other in "xy":
            tenant(cache, batch, other, 30)
            check_invariants(cache)
            cache.free(other)
        assert cache.num_free_pages == 8
    assert taken > 5


def lists_of(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with safe_open(path, "pt") as file:
        top = json.loads(file.metadata()["kvquant_pages"])
    del top["sha256"]
    return top, load_file(path)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of version 2, whose pages and tokens stand in tensors."""
    monkeypatch.setattr(pagedfile, "MANY", 0)
    path = forge(
        tmp_path / "old.safetensors",
        [
            sequence("a", 40, [0, 1, 2], [*ONES, *range(-(2**63), 20 - 2**63)]),
            sequence("b", 20, [0, 3], ONES),
            sequence(7, 0, []),
        ],
    )
    cache = make()
    load_sequences(cache, path)
    return save_sequences(cache, ["a", "b", 7], tmp_path / "saved.safetensors")


def test_many_tokens_stand_in_tensors(saved: Path) -> None:
    top, tensors = lists_of(saved)
    assert (top["version"], "tokens" in json.dumps(top["sequences"])) == (2, False)
    assert tensors["sequences.pages"].tolist() == [0, 1, 2, 0, 3]
    old, cache = make(), make()
    load_sequences(old, saved.with_name("old.safetensors"))
    assert load_sequences(cache, saved) == ["a", "b", 7]
    for name in cache.ids:
        assert same(values(cache, name), values(old, name))
        assert cache.state.tokens(name) == old.state.tokens(name)
    assert cache.match_prefix([*ONES, 0]) == PAGE


FORGERIES: dict[str, Callable[[dict[str, Any], dict[str, torch.Tensor]], object]] = {
    "the file has version 2, and sequences[0]": lambda top, _: top["sequences"][0].update(pages=[]),
    "the file has version 2, and sequences[1].known": lambda top, _: top["sequences"][1].update(
        known=-1
    ),
    "the sequences ask for torch.int64 [53]": lambda top, _: top["sequences"][1].update(known=17),
    "the sequences ask for torch.int64 [52]": lambda _, tensors: tensors.update(
        {"sequences.tokens": tensors["sequences.tokens"].int()}
    ),
    "'sequences.pages' is missing": lambda _, tensors: tensors.pop("sequences.pages"),
    "sequences.pages has -1": lambda _, tensors: tensors["sequences.pages"].fill_(-1),
    "sequences[1] cannot share page 0": lambda _, tensors: tensors["sequences.tokens"].copy_(
        torch.arange(52)
    ),
    "sha256 does not name": lambda _, tensors: tensors.update(x=torch.zeros(1)),
    "page_size is 0": lambda top, _: top.update(page_size=0),
    "has another key": lambda top, _: top.update(version=1),
}


@pytest.mark.parametrize("message", FORGERIES)
def test_a_forged_file_of_version_2_is_refused(message: str, saved: Path) -> None:
    top, tensors = lists_of(saved)
    FORGERIES[message](top, tensors)
    write(saved, top, tensors)
    cache = make()
    with pytest.raises(CheckpointError) as caught:
        load_sequences(cache, saved)
    assert message in str(caught.value)
    assert cache.ids == []


def test_numbers_of_a_file_that_are_damaged_are_found(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    place = data.index(torch.tensor([-(2**63), 1 - 2**63]).numpy().tobytes())
    data[place] ^= 1
    saved.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"'sequences\.tokens' is damaged"):
        load_sequences(make(), saved)


def test_what_would_not_be_read_is_not_written(tmp_path: Path) -> None:
    cache = make()
    cache.allocate("x" * 200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvquant.io.tensor_files.MAX_HEADER_BYTES", 500)
        with pytest.raises(KVQuantError, match="header"):
            save_sequences(cache, cache.ids, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []
