"""Steps of a paged cache: each layer is appended to once.

See test_failures.py for steps whose copies fail, and test_compile.py for compiled ones.
"""

from __future__ import annotations

import pytest
import torch
from invariants import check_invariants
from paged_cases import DIM, LAYERS, begin, extend, make, new_rows, same, values

from kvquant.errors import ConfigError, ShapeError
from kvquant.paged.batch import PagedBatch


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
