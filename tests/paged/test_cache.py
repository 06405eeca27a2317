"""PagedKVCache rule by rule: rows as in KVCache, prefixes, forks, steps, what fails, refusals."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
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
    SlowEvent,
    begin,
    extend,
    make,
    new_rows,
    rows_of,
    same,
    seen,
    values,
)
from paged_plans import PLANS, make_paged
from row_kinds import KINDS

from kvquant import KVCache
from kvquant.errors import ConfigError, OutOfPagesError, ShapeError
from kvquant.io.sequences import load_sequences, save_sequences
from kvquant.paged.batch import PagedBatch


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


@pytest.mark.parametrize("layers", [[], [0], [1]])
def test_a_step_that_leaves_a_layer_out_fails_and_is_not_found(layers: list[int]) -> None:
    batch = PagedBatch(make(), 4, 100)
    cache = batch.cache
    missing = [layer for layer in range(LAYERS) if layer not in layers]
    cache.allocate("b")
    with (
        pytest.raises(ConfigError, match=rf"layers \[{str(missing)[1:-1]}\] were not appended to"),
        batch.extend(["b"], 60, [1] * 60),
    ):
        for layer in layers:
            batch.append(layer, *new_rows(60))
    assert cache.match_prefix([1] * 60) == 0
    check_invariants(cache)
    cache.free("b")
    assert cache.match_prefix([1] * 60) == 0
    begin(batch, "b", 60, [1] * 60)
    assert cache.match_prefix([1] * 60) > 0


def test_a_step_with_an_unknown_option_appends_nothing() -> None:
    batch, wrong = PagedBatch(make(), 4, 100), {"scale": 1.0}
    begin(batch, "a", 20)
    with batch.extend(["a"]):
        with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
            batch.step(0, torch.randn(1, 4, DIM), *new_rows(1), **wrong)  # type: ignore[call-overload]
        for layer in range(LAYERS):  # twice would be an error
            batch.step(layer, torch.randn(1, 4, DIM), *new_rows(1), sm_scale=1.0)
    assert batch.cache.length("a") == 21


def test_sequences_without_tokens_attend_beside_others_only() -> None:
    batch, q = PagedBatch(make(), 4, 100), torch.randn(4, 4, DIM)
    batch.cache.allocate("empty")
    with batch.extend(["empty"], 0), pytest.raises(ShapeError, match="layer 1 holds no tokens of"):
        batch.attend(1, q)
    begin(batch, "a", 20)
    with batch.extend(["empty", "a"], 0):
        assert batch.attend(1, q).flatten(1).any(1).tolist() == [False, True, False, False]


def test_layers_that_a_graph_appends_to_may_be_attended_to() -> None:
    batch, q = PagedBatch(make(), 4, 10), torch.randn(4, 4, DIM)
    batch._in_graphs.add(1)
    batch.cache.allocate("a")
    with batch.extend(["a"]):
        batch.append(0, *new_rows(1))
        batch.attend(1, q)


def test_an_append_that_was_refused_may_be_made_again() -> None:
    batch = PagedBatch(make(), 4, 100)
    batch.cache.allocate("a")
    rows = new_rows(10)
    with batch.extend(["a"], 10):
        for layer in range(LAYERS):
            with pytest.raises(ConfigError, match="float64"):
                batch.append(layer, *rows.double())
            batch.append(layer, *rows)
    assert batch.cache.length("a") == 10


def test_layers_that_a_graph_appends_to_may_have_been_written_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, rows = PagedBatch(make(), 4, 10), new_rows(10)
    with batch.extend([]), monkeypatch.context() as patch:
        patch.setattr(batch, "_on_cuda", True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        batch.append(0, *rows)
        batch.append(0, *rows)  # what runs when it is replayed is not known
    batch.cache.allocate("a")
    with batch.extend(["a"], 10):
        batch.append(1, *rows)  # and a replay
    with pytest.raises(ConfigError, match=r"layers \[1\] were not"), batch.extend(["a"], 10):
        batch.append(0, *rows)


@pytest.mark.parametrize("inside", [False, True], ids=["made outside", "made inside"])
def test_a_cache_is_used_inside_and_outside_of_inference_mode(inside: bool) -> None:
    with torch.inference_mode(inside):
        batch = PagedBatch(make(), 4, 100)
    cache, turn, rows = batch.cache, inside, new_rows(60)
    for name in ("a", "b", "c"):
        turn = not turn
        with torch.inference_mode(turn):
            present = cache.allocate(name, range(60))
            extend(batch, [name], 60 - present, range(present, 60), rows[:, present:])
            with batch.extend([name], 0):
                batch.attend(0, torch.randn(1, 4, 64))
    with torch.inference_mode(not turn):
        cache.free("a")
        cache.fork("b", "d")
        cache.swap_out("c")
        cache.swap_in("c")
        assert same(values(cache, "d"), values(cache, "b"))
        extend(batch, ["d", "c"], 3, rows=rows[:, :6])
        cache.check()
    extend(batch, ["d", "c", "b"], 3, rows=rows[:, :9])
    check_invariants(cache)


def forked() -> PagedBatch:
    """Sequences "a" of 45 tokens, and two forks of it, all with a partly filled shared page."""
    batch = PagedBatch(make(num_pages=20), 4, 90)
    begin(batch, "a", 45, range(45))
    batch.cache.fork("a", "b")
    batch.cache.fork("a", "c")
    return batch


def test_a_step_without_its_block_is_none() -> None:
    batch = forked()
    before = seen(batch.cache)
    batch.extend(["a", "b"], [5, 30], range(35))
    with pytest.raises(ConfigError, match="no step of this batch is open"):
        batch.append(0, *new_rows(45))
    assert seen(batch.cache) == before
    extend(batch, ["a", "b"], 1)
    check_invariants(batch.cache)


def test_a_copy_of_pages_takes_no_memory_of_their_size() -> None:
    stacks = make(num_pages=4).rows.pages[0]
    stacks.stacks[0][:] = torch.randint(255, stacks.stacks[0].shape, dtype=torch.uint8)
    before = stacks.stacks[0].clone()
    taken: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not out._is_view():
                taken.append(out.untyped_storage().nbytes())
            return out

    with Watch():  # type: ignore[no-untyped-call]
        stacks.copy_units([(0, 2), (1, 3)])
    assert torch.equal(stacks.stacks[0], before[:, [0, 1, 0, 1]])
    assert not [n for n in taken if n != before.nbytes]


def test_ids_are_kept_as_what_a_file_can_hold(tmp_path: Path) -> None:
    batch = forked()
    cache = batch.cache
    for name in (True, 1.5, None, ["x"], np.bool_(True)):
        with pytest.raises(ConfigError, match="give a string or a whole number"):
            cache.allocate(name)  # type: ignore[arg-type]
    for name in (2**1024, -(2**1024), 10**5000):
        with pytest.raises(ConfigError, match="a whole number of up to 1024 bits"):
            cache.allocate(name)
        with pytest.raises(ConfigError, match="no sequence"):
            cache.length(name)
    with pytest.raises(ConfigError, match="must be integers of 64 bits"):
        cache.allocate("t", [10**5000])
    for count in (10**5000, [10**5000], 2**63, [2**63]):
        with pytest.raises(ConfigError, match="must be whole numbers"):
            cache.can_append(["a"], count)
    with pytest.raises(ShapeError, match="would grow to"):
        cache.can_append(["a"], 2**63 - 1)

    class Text(str, Enum):
        NAME = "value"

    cache.allocate(Text.NAME)
    assert (cache.ids[-1], cache.length(Text.NAME), cache.length("value")) == ("value", 0, 0)
    cache.free(Text.NAME)
    cache.allocate(np.int64(3))
    assert [type(name) for name in cache.ids] == [str, str, str, int]
    extend(batch, [np.int64(3)], 2, [True, np.int64(2**63 - 1)])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"tokens .* must be integers of 64 bits"):
        batch.extend([3], 1, [2**63]).__enter__()
    path = save_sequences(cache, [3], tmp_path / "x.safetensors")
    other = make()
    assert load_sequences(other, path) == [3]
    assert [type(token) for token in other.state.tokens(3)] == [int, int]
    with pytest.raises(ConfigError, match=r"ids names \['3'\]: the file has \[3\]"):
        load_sequences(other, path, ids={"3": "x"})


def test_lack_of_pages_or_seats_says_who_is_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(num_pages=3, max_num_seqs=2)
    batch = PagedBatch(cache, 2, 90)
    begin(batch, "a", 40)
    cache.allocate("b")
    monkeypatch.setattr(cache.swap_space, "_event", SlowEvent)
    cache.swap_out("a")
    hint = r"swap out .* or call finish_swaps\(\): 1 sequences are being swapped out"
    for call in (
        lambda: batch.extend(["b"], 40).__enter__(),
        lambda: cache.allocate("c"),
        lambda: cache.fork("b", "c"),
    ):
        with pytest.raises(OutOfPagesError, match=hint):
            call()
    cache.finish_swaps()
    extend(batch, ["b"], 40)
    with pytest.raises(OutOfPagesError) as caught:
        cache.swap_in("a")
    assert "finish_swaps" not in str(caught.value)


def test_a_prompt_attends_to_rows_that_were_present() -> None:
    batch = forked()
    cache = batch.cache
    present = cache.allocate("d", range(80))
    assert present == SINKS + 2 * PAGE
    rows = new_rows(80 - present)
    with batch.extend(["d"], 80 - present, range(present, 80)):
        for layer in range(LAYERS):
            batch.append(layer, *rows)
            k, v = cache.dequantized("d", layer)
            assert k.shape[1] == v.shape[1] == 80
            assert torch.equal(k[:, -5:], rows[0, -5:].transpose(0, 1).float())
            old = zip((k, v), cache.dequantized("a", layer), strict=True)
            assert all(torch.equal(x[:, :present], y[:, :present]) for x, y in old)
        with pytest.raises(ConfigError, match="no sequence 'x'"):
            cache.dequantized("x", 0)
    assert cache.length("d") == 80


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_append_and_attend(kind: str, device: str) -> None:
    of = KINDS[kind]
    batches = []
    for _ in range(2):
        torch.manual_seed(0)
        is_planned = kind == "heads" and device == "cpu"
        cache = make_paged(PLANS["matrix"]) if is_planned else of.make(device=device)
        batch = of.batch(cache, 2, 40)
        begin(batch, "a", 30)
        batches.append(batch)
    one, other = batches
    for axes, count in (((1, 6), 1), ((1, 3, 6), 3)):
        q, rows = of.queries(*axes, device=device), rows_of(one.cache, count)
        with one.extend(["a"], count), other.extend(["a"], count):
            for layer in range(one.cache.num_layers):
                found = one.step(layer, *q, *rows, **of.options, return_lse=True)
                other.append(layer, *rows)
                assert same(found, of.attend(other, layer, q, return_lse=True))
    assert same(values(one.cache, "a"), values(other.cache, "a"))
