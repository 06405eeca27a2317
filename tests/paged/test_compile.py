"""PagedBatch under torch.compile(fullgraph=True): one graph for steps of any lengths and pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_cases import DIM, begin, make, new_rows, rows_of, same, values
from row_kinds import KINDS, RowKind, planned
from slow_cases import mark_slow
from torch._dynamo.testing import CompileCounterWithBackend

from kvquant.errors import ConfigError
from kvquant.paged.batch import PagedBatch

# kind, options of the cache, compiler, shared_prefix
CASES: dict[str, tuple[RowKind, dict[str, Any], str, bool | None]] = {
    "heads": (KINDS["heads"], {}, "aot_eager", None),
    "packed": (KINDS["heads"], {"sink_len": 0, "recent_len": 0}, "eager", None),
    "windows": (KINDS["heads"], {"windows": [None, 20]}, "eager", True),
    "plan": (planned("offset"), {}, "eager", False),
    "shared plan": (planned("matrix clip feedback"), {}, "eager", True),
    "latents": (KINDS["latents"], {}, "aot_eager", None),
    "latents in a basis": (KINDS["latents in a basis"], {}, "aot_eager", None),
}
USUAL = "heads", "packed", "plan", "latents"


@pytest.mark.parametrize("name", mark_slow(CASES, USUAL))
def test_append_and_attend_are_one_graph_for_all_steps(name: str) -> None:
    torch._dynamo.reset()
    kind, options, compiler, shared = CASES[name]
    batches = [
        kind.batch(kind.make(num_pages=20, **options), 4, 100, shared_prefix=shared)
        for _ in range(2)
    ]
    batch, other = batches

    def layers(batch: Any, q: tuple[torch.Tensor, ...], rows: Any) -> list[torch.Tensor]:
        outs = [batch.step(0, *q, rows[0], rows[1], **kind.options)]
        for layer in range(1, batch.cache.num_layers):
            batch.append(layer, rows[0], rows[1])
            outs += kind.attend(batch, layer, q, return_lse=True)
        return outs

    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(layers, fullgraph=True, backend=counter)
    for at in batches:
        torch.manual_seed(1)
        begin(at, "a", 60)
        at.cache.fork("a", "b")
        begin(at, "z", 2)
    for step in range(10):
        if step == 5:
            for at in batches:
                at.cache.fork("z", "c")
        ids, rows, q = [*"abzc"][: 3 + step // 5], rows_of(batch.cache, 4), kind.queries(4, 6)
        with batch.extend(ids):
            outs = compiled(batch, q, rows)
        with other.extend(ids):
            torch.testing.assert_close(outs, layers(other, q, rows))
    for i in "abzc":
        torch.testing.assert_close(values(batch.cache, i), values(other.cache, i))
    assert counter.frame_count == 1
    with pytest.raises(ConfigError, match="were not appended to"), batch.extend(["a"]):
        batch.append(0, *rows_of(batch.cache, 1))  # compiled code is seen where it runs


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
