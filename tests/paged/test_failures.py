"""A paged cache when copies fail, ids and numbers are odd, prefixes are bad: as it was, or told."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from invariants import check_invariants
from paged_cases import LAYERS, PAGE, SINKS, SlowEvent, begin, extend, make, new_rows, seen

from kvquant.errors import ConfigError, OutOfPagesError, ShapeError
from kvquant.io.sequences import load_sequences, save_sequences
from kvquant.paged.batch import PagedBatch


def filled() -> PagedBatch:
    """Sequences "a" of 45 tokens, and two forks of it, all with a partly filled shared page."""
    batch = PagedBatch(make(num_pages=20), 4, 90)
    begin(batch, "a", 45, range(45))
    batch.cache.fork("a", "b")
    batch.cache.fork("a", "c")
    return batch


def test_a_step_without_its_block_is_none() -> None:
    batch = filled()
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
    batch = filled()
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
    batch = filled()
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
