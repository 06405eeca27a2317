"""Files of sequences that somebody forged, with checksums that fit: nobody comes to another's rows.

What the manifest's single values may be is in test_sequences.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import forge as forge_file
from forged import write
from invariants import check_invariants
from paged_cases import values

from kvquant.errors import CheckpointError, OutOfPagesError
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
    lens = {"length": length, "packed_len": length if packed < 0 else packed}
    return {"id": name, **lens, "pages": list(pages), "tokens": list(tokens)}


def forge(path: Path, sequences: list[dict[str, Any]], sinks: int = 0, recent: int = 0) -> Path:
    """Write a file whose page n holds the value n in all rows, and its 16-bit rows 100."""
    pages = len({page for one in sequences for page in one["pages"]})
    exact = sum(max(one["length"] - one["packed_len"], 0) for one in sequences)
    of_pages = torch.arange(pages).float()[:, None, None, None].expand(pages, 1, PAGE, DIM)
    tensors = {}
    for side in "kv":
        tensors[f"layers.0.{side}_pages"] = quantize_rows(of_pages, INT8)
        tensors[f"layers.0.{side}_exact"] = quantize_rows(torch.full((exact, 1, DIM), 100.0), BF16)
    top: dict[str, Any] = {"format": "kvquant.sequences", "version": 1, "writer": "x"}
    top |= {"num_kv_heads": 1, "model": None, "creation": {}, "transforms": []}
    top |= {"page_size": PAGE, "sink_len": sinks, "recent_len": recent, "exact_format": "bf16"}
    top |= {"layers": [{side: {"format": "int8", "head_dim": DIM} for side in "kv"}]}
    top["sequences"] = sequences
    write(path, top, {name: rows for name, rows in tensors.items() if rows.numel()})
    return path


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
    "one page twice, later": [sequence(0, 48, [0, 1, 0])],
    "a page of an empty sequence": [sequence(0, 0, [0])],
    "more packed tokens than tokens": [sequence(0, 16, [0], packed=17)],
    "less packed tokens than there must be": [sequence(0, 16, [], packed=0)],
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
    forge_file(path, lambda top, _: top["sequences"][1].update(namespace=name))
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
