"""Ragged queries of a PagedBatch: chunks of prompts and decode steps in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_cases import captured
from paged_cases import DIM, HEADS, LAYERS, begin, make, new_rows, same, values
from paged_plans import PLANS, make_paged
from relative_l2 import relative_l2
from slow_cases import mark_slow
from torch._dynamo.testing import CompileCounterWithBackend

from kvquant import AttentionVariant
from kvquant.errors import ConfigError, ShapeError
from kvquant.ops.attention import State
from kvquant.paged.batch import PagedBatch
from kvquant.paged.cache import PagedKVCache

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STEPS: list[tuple[list[str], list[int]]] = [
    (["b", "z", "a"], [1, 20, 1]),  # a chunk between decode steps
    (["new", "a", "z"], [9, 1, 0]),  # a prompt's first tokens, and none
    (["a", "b", "z", "new"], [5, 1, 1, 30]),
]


def batch_of(cache: PagedKVCache, max_tokens: int = 70, **options: Any) -> PagedBatch:
    """A batch of it; "a" has 40 tokens, "b" the same, "z" 7 and "new" none."""
    first = PagedBatch(cache, 4, 70)
    begin(first, "a", 40)
    cache.fork("a", "b")
    begin(first, "z", 7)
    cache.allocate("new")
    return PagedBatch(cache, 4, max_tokens, **options)


def padded(batch: PagedBatch, layer: int, counts: list[int], q: torch.Tensor) -> State:
    """The reference on the queries of each sequence as padded ones; zeros and -inf behind them."""
    width, total = max(counts), sum(counts)
    rows = q.new_zeros(len(counts), width, *q.shape[1:])
    is_query = torch.arange(width) < torch.tensor(counts)[:, None]
    rows[is_query] = q[:total]
    found = batch.attend(layer, rows, return_lse=True, backend="reference")
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
    out[:total], lse[:total] = (x[is_query] for x in found)
    return out, lse


def compare(found: State, expected: State, device: str) -> None:
    (out, lse), (wanted, wanted_lse) = found, expected
    seen = wanted_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen) and not out[~seen].any()
    assert relative_l2(out, wanted) < (8e-3 if device == "cuda" else 1e-5)
    assert relative_l2(lse[seen], wanted_lse[seen]) < (2e-3 if device == "cuda" else 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shared", mark_slow([None, True], [None]))
@pytest.mark.parametrize(
    "kind", mark_slow(["no plan", "windows", "matrix clip feedback", "offset"], ["windows"])
)
def test_each_sequence_is_as_with_padded_queries(
    kind: str, shared: bool | None, device: str
) -> None:
    options: dict[str, Any] = {"num_pages": 40, "device": device}
    if kind in PLANS:
        batch = batch_of(make_paged(PLANS[kind], **options), shared_prefix=shared)
    else:
        windows = {"windows": [20, None]} if kind == "windows" else {}
        batch = batch_of(make(**options, **windows), shared_prefix=shared)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for step, (ids, counts) in enumerate(STEPS):
        total = sum(counts)
        rest = 3 * (step % 2)  # rows behind those of the step, which hold anything
        q = torch.randn(total + rest, 2 * HEADS, DIM, device=device, dtype=dtype)
        k, v = new_rows(total, device)
        with batch.extend(ids, counts):
            assert batch.q_indptr.tolist()[-1] == total
            for layer in range(batch.cache.num_layers):
                if rest:
                    q[total:] = torch.nan
                batch.append(layer, k, v)
                found = batch.attend(layer, q, q_indptr=batch.q_indptr, return_lse=True)
                own = batch.q_indptr[: len(ids) + 1]
                again = batch.attend(layer, q, q_indptr=own, return_lse=True)
                expected = padded(batch, layer, counts, q)
                compare(found, expected, device)
                compare(again, expected, device)


def test_a_layer_with_a_window_takes_the_queries_of_the_step_alone() -> None:
    """Its pages before the window are free: older queries would read rows of other sequences."""
    batch = batch_of(make(num_pages=40, windows=[20, None]))
    q, given = torch.randn(9, 2 * HEADS, DIM), torch.tensor([0, 9], dtype=torch.int32)
    with batch.extend(["a"], 1):
        for layer in (0, 1):
            batch.append(layer, *new_rows(1, "cpu"))
        assert torch.isfinite(batch.attend(1, q, q_indptr=given)).all()
        with pytest.raises(ConfigError, match=r"layer 0 has a window.*give the batch's own"):
            batch.attend(0, q, q_indptr=given)
        with pytest.raises(ConfigError, match="layer 0 has a window"):
            batch.attend(0, q, q_indptr=batch.q_indptr[::2])
        own = batch.q_indptr[:2]
        assert torch.equal(batch.attend(0, q[:1], q_indptr=own), batch.attend(0, q[:1]))


def test_a_variant_and_a_step() -> None:
    batches = []
    for _ in range(2):
        torch.manual_seed(1)
        batches.append(batch_of(make(num_pages=40)))
    one, other = batches
    q, (k, v) = torch.randn(12, 6, DIM), new_rows(12)
    variant = AttentionVariant(sink_logits=torch.randn(6), score_offsets=torch.randn(12, 6))
    with one.extend(["z", "a"], [11, 1]), other.extend(["z", "a"], [11, 1]):
        for layer in range(LAYERS):
            found = one.step(layer, q, k, v, q_indptr=one.q_indptr, variant=variant)
            other.append(layer, k, v)
            attended = other.attend(layer, q, q_indptr=other.q_indptr, variant=variant)
            assert torch.equal(found, attended)
            plain = other.attend(layer, q, q_indptr=other.q_indptr)
            assert relative_l2(found, plain) > 0.01
    assert same(values(one.cache, "a"), values(other.cache, "a"))


def test_compiled_code_serves_steps_of_any_counts() -> None:
    torch._dynamo.reset()
    batch = batch_of(make(num_pages=40))

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        options: Any = {"q_indptr": batch.q_indptr, "return_lse": True}
        return [batch.step(layer, q, k, v, **options) for layer in range(LAYERS)]

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for ids, counts in STEPS:
        q, (k, v) = torch.randn(40, 2 * HEADS, DIM), new_rows(40)
        with batch.extend(ids, counts):
            for layer, found in enumerate(compiled(q, k, v)):
                compare(found, padded(batch, layer, counts, q), "cpu")
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["no plan", "matrix clip feedback"])
def test_a_graph_serves_steps_of_any_counts(kind: str) -> None:
    options: dict[str, Any] = {"num_pages": 40, "device": "cuda"}
    cache = make(**options) if kind == "no plan" else make_paged(PLANS[kind], **options)
    batch = batch_of(cache, 40)
    plain = PagedBatch(cache, 4, 40)
    q = torch.randn(40, 2 * HEADS, DIM, device="cuda").bfloat16()
    k, v = new_rows(40, "cuda")

    def layers() -> list[torch.Tensor]:
        return [
            batch.step(layer, q, k, v, q_indptr=batch.q_indptr) for layer in range(cache.num_layers)
        ]

    with batch.extend([]):
        graph, outs = captured(layers)
    for ids, counts in STEPS:
        k.copy_(torch.randn(k.shape))
        with batch.extend(ids, counts):
            graph.replay()
        assert not any(out[sum(counts) :].any() for out in outs)
        for layer, out in enumerate(outs):
            for name, count, own in zip(ids, counts, out[: sum(counts)].split(counts), strict=True):
                if count:
                    rows = q[sum(counts[: ids.index(name)]) :][:count]
                    with plain.extend([name], 0):
                        last = plain.attend(layer, rows[-1:])
                    assert relative_l2(own[-1], last[0]) < 8e-3
    with pytest.raises(ShapeError, match="places for 4 and 40"):
        batch.extend(["a"], 41).__enter__()
