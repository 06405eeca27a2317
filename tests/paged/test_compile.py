"""PagedBatch under torch.compile(fullgraph=True): one graph for steps of any lengths and pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_cases import DIM, LAYERS, begin, make, new_rows, same, values
from slow_cases import mark_slow
from torch._dynamo.testing import CompileCounterWithBackend

from kvquant.errors import ConfigError
from kvquant.paged.batch import PagedBatch

WAYS = [(lengths, compiler) for lengths in ((3, 5), (0, 0)) for compiler in ("eager", "aot_eager")]


@pytest.mark.parametrize("way", mark_slow(WAYS, [WAYS[1], WAYS[2]]), ids=str)
def test_append_and_attend_are_one_graph_for_all_steps(way: tuple[tuple[int, int], str]) -> None:
    lengths, compiler = way
    torch._dynamo.reset()
    batch, other = (
        PagedBatch(make(sink_len=lengths[0], recent_len=lengths[1]), 4, 100) for _ in range(2)
    )

    def layers(
        batch: PagedBatch, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor
    ) -> list[torch.Tensor]:
        outs = []
        for layer in range(LAYERS):
            batch.append(layer, k, v)
            out = batch.attend(layer, q)
            assert isinstance(out, torch.Tensor)
            outs.append(out)
        return outs

    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(layers, fullgraph=True, backend=counter)
    for at in (batch, other):
        torch.manual_seed(1)
        begin(at, "a", 30)
        begin(at, "b", 2)
    for step in range(12):
        if step == 5:
            for at in (batch, other):
                at.cache.fork("a", "c")
        ids = ["a", "b", "c"][: 2 + step // 6]
        rows, q = new_rows(4), torch.randn(4, 4, DIM)
        with batch.extend(ids):
            outs = compiled(batch, rows[0], rows[1], q)
        with other.extend(ids):
            expected = layers(other, rows[0], rows[1], q)
        assert same(outs, expected)
    for name in "abc":
        assert same(values(batch.cache, name), values(other.cache, name))
    assert counter.frame_count == 1
    with pytest.raises(ConfigError, match="were not appended to"), batch.extend(["a"]):
        batch.append(0, *new_rows(1))  # compiled code is seen in the steps that it runs in


def test_compiled_code_outside_of_a_step_is_refused() -> None:
    """It would write to the slots of the last step again, over rows that others may have now."""
    batch = PagedBatch(make(), 4, 100)
    rows, q = new_rows(2), torch.randn(4, 4, DIM)
    append = torch.compile(lambda rows: batch.append(0, rows[0], rows[1]), backend="eager")
    attend = torch.compile(lambda q: batch.attend(0, q), backend="eager")
    whole = torch.compile(lambda q: batch.attend(0, q), backend="eager", fullgraph=True)

    def refused() -> None:
        before = values(batch.cache, "a")
        with pytest.raises(ConfigError, match="no step of this batch is open"):
            append(rows)
        with pytest.raises(ConfigError, match="no step of this batch is open"):
            attend(q)
        with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="no step of this batch"):
            whole(q)
        assert same(values(batch.cache, "a"), before)

    begin(batch, "a", 2)
    refused()
    with batch.extend(["a"], 2):
        append(rows)
        batch.append(1, *rows)
        assert torch.equal(attend(q), whole(q)) and attend(q)[0].any()
    refused()
    with batch.extend(["a"], 0):
        assert attend(q)[0].any()


def test_a_step_without_an_append_is_told_behind_a_compiled_call_outside() -> None:
    """An error while Dynamo traces makes it compile inner functions by themselves."""
    torch._dynamo.reset()
    batch = PagedBatch(make(), 4, 100)
    rows, q = new_rows(2), torch.randn(4, 4, DIM)

    def body(rows: Any, q: torch.Tensor) -> Any:
        batch.append(0, rows[0], rows[1])
        batch.append(1, rows[0], rows[1])
        return batch.attend(0, q)

    compiled = torch.compile(body, backend="eager")
    begin(batch, "a", 2)
    with pytest.raises(ConfigError, match="no step of this batch is open"):
        compiled(rows, q)
    with batch.extend(["a"], 2):
        compiled(rows, q)
    with pytest.raises(ConfigError, match="were not appended to"), batch.extend(["a"], 1):
        pass
