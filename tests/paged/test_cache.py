"""PagedKVCache rule by rule: rows as in KVCache, prefixes, forks, steps, refusals."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from invariants import check_invariants
from paged_cases import (
    DIM,
    HEADS,
    LAYERS,
    PAGE,
    RECENT,
    SINKS,
    begin,
    extend,
    make,
    new_rows,
    same,
    seen,
    values,
)

from kvquant import KVCache, Rope
from kvquant.errors import ConfigError, NonFiniteError
from kvquant.io.sequences import save_sequences
from kvquant.paged.batch import PagedBatch
from kvquant.rows.rotation import apply_rope


def test_formats_may_differ_by_layer_and_stand_in_stacks() -> None:
    formats = ["int4-g4", "int3", "int4-g4"]
    cache = make(num_layers=3, k_format=formats, v_format="int2")
    assert [tuple(stack.shape) for stack in cache.rows.pages[0].stacks] == [
        (2, 12, HEADS, PAGE, 48),
        (1, 12, HEADS, PAGE, 28),
    ]
    batch = PagedBatch(cache, 4, 100)
    rows = begin(batch, "a", 50)
    cache.fork("a", "b")
    extend(batch, ["a", "b"], [1, 1])
    options: Any = {"k_format": formats, "v_format": "int2"}
    contiguous = KVCache(3, 1, HEADS, DIM, 100, sink_len=SINKS, recent_len=RECENT, **options)
    for layer in range(3):
        contiguous.append(layer, *(x.transpose(0, 1)[None] for x in rows))
        expected = contiguous.dequantized(layer)
        for ours, theirs in zip(cache.dequantized("b", layer), expected, strict=True):
            assert torch.equal(ours[:, :45], theirs[0, :, :45])


def test_nbytes_counts_every_tensor() -> None:
    cache = make()
    tensors = {id(x): x for x in cache.rows.layers[0] if isinstance(x, torch.Tensor)}
    # K and V of each sequence slot: its kept sinks, and what a drafted step lets leave its window
    kept = 2 * 4 * HEADS * (SINKS + RECENT) * 2 * DIM
    expected = LAYERS * (sum(x.nbytes for x in tensors.values()) + kept)
    assert cache.nbytes == expected + cache.bad_rows.nbytes


def test_a_prefix_is_found_with_its_sinks_after_the_step_that_wrote_it() -> None:
    cache = make()
    batch = PagedBatch(cache, 4, 100)
    tokens = list(range(60))
    cache.allocate("a", tokens)
    rows = new_rows(60)
    with batch.extend(["a"], 60, tokens):
        assert cache.match_prefix(tokens) == 0
        for layer in range(LAYERS):
            batch.append(layer, *rows)
    assert cache.match_prefix(tokens) == SINKS + 3 * PAGE  # 60 - 3 - 5 are packed
    cache.free("a")
    assert cache.allocate("b", tokens) == cache.length("b") == SINKS + 3 * PAGE
    for layer in range(LAYERS):
        assert not bool(cache.dequantized("b", layer)[0].isnan().any())
        sinks = cache.dequantized("b", layer)[0][:, :SINKS]
        assert torch.equal(sinks, rows[0, :SINKS].transpose(0, 1).float())
    assert cache.allocate("c", [*tokens[:1], 99, *tokens[2:]]) == 0  # other sinks


def test_the_last_token_of_a_prompt_is_never_present() -> None:
    cache = make(sink_len=0, recent_len=0)
    batch = PagedBatch(cache, 4, 100)
    begin(batch, "a", 32, range(32))
    assert cache.match_prefix(range(33)) == 32
    assert cache.match_prefix(range(32)) == cache.allocate("b", range(32)) == 16


def test_tokens_that_a_step_does_not_tell_are_not_found() -> None:
    cache = make()
    batch = PagedBatch(cache, 4, 100)
    begin(batch, "a", 20, range(20))
    extend(batch, ["a"], 20)
    extend(batch, ["a"], 20, range(40, 60))
    assert cache.match_prefix(range(60)) == SINKS + PAGE
    assert cache.state.tokens("a") == list(range(20))


def test_sequences_of_a_step_that_raises_have_failed_until_they_are_freed() -> None:
    cache = make()
    batch = PagedBatch(cache, 4, 100)
    for name in "ab":
        begin(batch, name, 30, range(30))
    cache.fork("a", "c")
    before = values(cache, "c")
    with pytest.raises(ZeroDivisionError), batch.extend(["a"], 1, [7]):
        batch.append(0, *new_rows(1))
        raise ZeroDivisionError
    for call in (
        lambda: cache.length("a"),
        lambda: cache.namespace("a"),
        lambda: cache.fork("a", "d"),
        lambda: cache.truncate("a", 0),
        lambda: cache.swap_out("a"),
        lambda: cache.dequantized("a", 0),
        lambda: cache.can_append(["a"]),
        lambda: batch.extend(["b", "a"], 1).__enter__(),
        lambda: save_sequences(cache, ["a"], "x.safetensors"),
    ):
        with pytest.raises(ConfigError, match=r"a step of sequence 'a' has failed, .* free it"):
            call()
    with pytest.raises(ConfigError, match="sequence 'a' exists: free it"):
        cache.allocate("a")
    assert cache.ids == ["a", "b", "c"]
    check_invariants(cache)
    cache.free("a")
    assert same(values(cache, "c"), before)
    assert cache.allocate("a", range(40)) == SINKS + PAGE
    extend(batch, ["a", "b", "c"], 1)
    check_invariants(cache)


def test_places_and_tokens_beyond_the_step_are_left_alone() -> None:
    cache = make()
    batch = PagedBatch(cache, 3, 8)
    begin(batch, "a", 8)
    begin(batch, "b", 8)
    before = seen(cache)
    with batch.extend([]):
        for layer in range(LAYERS):
            batch.append(layer, *new_rows(8).fill_(torch.nan))
            assert not batch.attend(layer, torch.randn(3, 4, DIM)).any()
    assert seen(cache) == before
    assert cache.bad_rows.tolist() == [0, 0]
    assert (
        batch._segments_of(0, 2).whole[0].seq_lens.data_ptr()
        == batch._segments_of(1, 3).whole[0].seq_lens.data_ptr()
    )


def test_positions_are_those_of_the_new_tokens() -> None:
    batch = PagedBatch(make(), 3, 8)
    address = batch.positions.data_ptr()
    begin(batch, "a", 5)
    batch.cache.allocate("b")
    extend(batch, ["b", "a"], [3, 2])
    assert batch.positions.tolist() == [0, 1, 2, 5, 6, 0, 0, 0]
    assert batch.positions.data_ptr() == address


def test_bad_values_are_counted_and_decode_to_nan() -> None:
    cache = make()
    batch = PagedBatch(cache, 4, 100)
    rows = new_rows(10)
    rows[0, 1, 0, 5], rows[1, 4, :, 0] = torch.nan, torch.inf
    cache.allocate("a")
    extend(batch, ["a"], 10, rows=rows)
    assert cache.bad_rows.tolist() == [LAYERS, HEADS * LAYERS]
    words = rf"{LAYERS} rows of K and {HEADS * LAYERS} of V came with NaN.*free the sequences"
    with pytest.raises(NonFiniteError, match=words):
        cache.check()
    cache.check()  # once is enough
    k, v = cache.dequantized("a", 0)
    assert k[0, 1].isnan().all() and not k[1].isnan().any()
    assert v[:, 4].isnan().all()


def test_rope_is_that_of_append_rows() -> None:
    angles = torch.rand(9, DIM // 2)
    rope = Rope(angles.cos(), angles.sin())
    batch, other = (PagedBatch(make(), 2, 50) for _ in range(2))
    k, v = new_rows(9)
    for at, key, turn in ((batch, k, rope), (other, apply_rope(k, rope), None)):
        at.cache.allocate("a")
        with at.extend(["a"], 9):
            for layer in range(LAYERS):
                at.append(layer, key, v.to(key.dtype), rope=turn)
    assert same(values(batch.cache, "a"), values(other.cache, "a"))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"page_size": 20}, "page_size 20 does not exist"),
        ({"page_size": 16.0}, "page_size .* use a whole number"),
        ({"exact_format": "int8"}, "exact_format 'int8' does not exist"),
        ({"max_num_seqs": 0}, "max_num_seqs 0"),
        ({"num_pages": 0}, "num_pages 0"),
        ({"max_seq_len": -1}, "max_seq_len -1"),
        ({"k_format": ["int4"]}, "lists 1 formats for 2 layers"),
        ({"k_format": "int6"}, "'int6' does not exist"),
        ({"num_pages": 2**30, "max_seq_len": 2**30}, "GiB, more than there is"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_numbers_may_come_in_any_form() -> None:
    batch: Any = PagedBatch(make(), 4, 90)
    tokens: Any = np.arange(60)
    batch.cache.allocate("a", iter(tokens))
    for count, known in ((np.array([50]), tokens[:50]), ((5,), torch.arange(50, 55)), (5, None)):
        with batch.extend(("a",), count, known if known is None else iter(known)):
            for layer in range(LAYERS):
                batch.append(np.int64(layer), *new_rows(50))
    assert batch.cache.state.tokens("a") == list(range(55))
    found = batch.cache.match_prefix(range(60))
    assert 0 < found == batch.cache.match_prefix(token for token in tokens)
    assert found == batch.cache.match_prefix(torch.arange(60)) == batch.cache.match_prefix(tokens)
    assert re.search(r"^PagedKVCache\(2 layers, .* 12 pages of 16 tokens, .*\)$", repr(batch.cache))
