"""Steps of sequences that share a prefix: its pages are read once, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attend import attend_segments
from paged_cases import DIM, HEADS, begin, extend, make, new_rows
from torch._dynamo.testing import CompileCounterWithBackend
from variant_cases import variant_with

from kvquant import AttentionVariant
from kvquant.errors import ConfigError, ShapeError
from kvquant.paged import shared_prefix as sharedprefix
from kvquant.paged.batch import PagedBatch
from kvquant.paged.shared_prefix import find_prefix, pays

Measure = Callable[[torch.Tensor, torch.Tensor], float]
POSITIONAL = ("window",), ("alibi_slopes",), ("key_bias",)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_the_longest_common_pages_of_the_most_sequences_are_found() -> None:
    tables = np.array([[7, 8, 3, 0], [1, 2, 3, 4], [7, 8, 4, 0], [7, 9, 9, 9], [1, 2, 3, 5]])
    lens = np.array([60, 64, 63, 40, 50])
    found = find_prefix(tables, lens, 16)
    assert found is not None
    assert found.members.tolist() == [0, 2, 3] and found.pages.tolist() == [7]
    found = find_prefix(tables[:3], lens[:3], 16)
    assert found is not None
    assert found.members.tolist() == [0, 2] and found.pages.tolist() == [7, 8]
    found = find_prefix(tables[[1, 4]], lens[[1, 4]], 16)  # of the second's last page 2 tokens
    assert found is not None and found.pages.tolist() == [1, 2, 3]
    many = np.arange(640).reshape(64, 10)
    many[:, :8] = np.arange(8)
    many[3, 1:] = 700  # one that parts early does not spoil it for the others
    found = find_prefix(many, np.full(64, 160), 16)
    assert found is not None and len(found.pages) == 8 and len(found.members) == 63
    assert find_prefix(tables[:2], lens[:2], 16) is None
    assert find_prefix(tables[[0, 2]], np.array([60, 15]), 16) is None
    assert find_prefix(tables[:0], lens[:0], 16) is None


def test_it_pays_with_many_sequences_and_long_prefixes() -> None:
    assert pays(64, 16384, 8, 4) and pays(64, 16384, 32, 1) and pays(64, 1024, 32, 1)
    assert pays(64, 16384, 8, 8) and not pays(64, 1024, 8, 8)
    assert not pays(64, 64, 8, 4) and not pays(2, 1024, 8, 4) and not pays(2, 1 << 20, 8, 4)


def sequences(batch: PagedBatch) -> None:
    """Three of a common prompt, forked at 70 tokens, and one of its own."""
    begin(batch, "a", 70)
    batch.cache.fork("a", "b")
    batch.cache.fork("a", "c")
    begin(batch, "z", 20)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [(0, 0), (3, 5)], ids=str)
def test_results_are_those_without_it(
    relative_l2: Measure, lengths: tuple[int, int], device: str
) -> None:
    full = (70 - sum(lengths)) // 16 * 16  # tokens in full pages when the others were forked
    batches = []
    for shared in (True, False):
        torch.manual_seed(0)
        cache = make(sink_len=lengths[0], recent_len=lengths[1], num_pages=40, device=device)
        batch = PagedBatch(cache, 5, 70, shared_prefix=shared)
        sequences(batch)
        batches.append(batch)
    for ids in (["c", "z", "a", "b"], ["z"], ["b", "a"], []):
        rows = torch.randn(2, len(ids), HEADS, DIM, device=device).bfloat16()
        q = torch.randn(len(ids) + 1, 2 * HEADS, DIM, device=device).bfloat16()
        results = []
        for batch in batches:
            extend(batch, ids, rows=rows)
            with batch.extend(ids, 0):
                results.append(batch.attend(1, q, return_lse=True))
        (ours, our_lse), (theirs, their_lse) = results
        assert not ours[len(ids) :].any() and bool((our_lse[len(ids) :] == -torch.inf).all())
        if ids:
            assert relative_l2(ours[: len(ids)], theirs[: len(ids)]) < 4e-3
            assert relative_l2(our_lse[: len(ids)], their_lse[: len(ids)]) < 1e-3
        assert int(batches[0]._staged.tensors["prefix_lens"]) == (full if len(ids) > 1 else 0)


@pytest.mark.parametrize("device", DEVICES)
def test_variants_are_those_without_it(relative_l2: Measure, device: str) -> None:
    cache = make(num_pages=40, device=device)
    batch = PagedBatch(cache, 4, 70, shared_prefix=True)
    sequences(batch)
    ids, q_len, heads = ["c", "z", "a", "b"], 4, 2 * HEADS
    q = torch.randn(len(ids), q_len, heads, DIM, device=device).bfloat16()
    for names in (("soft_cap", "sink_logits"), ("tree_mask", "score_offsets"), *POSITIONAL):
        made: dict[str, Any] = variant_with(names, len(ids), q_len, heads, 100)._asdict()
        tensors = {name: x.to(device) for name, x in made.items() if isinstance(x, torch.Tensor)}
        options: dict[str, Any] = {"variant": AttentionVariant(**{**made, **tensors})}
        options["return_lse"] = True
        rows = new_rows(len(ids) * q_len, device)
        with batch.extend(ids, q_len):
            batch.append(0, *rows)
            batch.append(1, *rows)
            assert int(batch._staged.tensors["prefix_lens"]) == 48
            ours, our_lse = batch.attend(1, q, **options)
            whole = batch._segments_of(1, len(ids)).whole
            theirs, lse = attend_segments(q, whole, q_lens=batch.new_lens[: len(ids)], **options)
        seen = lse > -torch.inf
        assert bool(theirs.any()) and torch.equal(our_lse > -torch.inf, seen)
        assert relative_l2(ours, theirs) < 4e-3
        assert relative_l2(our_lse[seen], lse[seen]) < 1e-3


def test_it_is_used_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = PagedBatch(make(num_pages=40), 4, 70)
    sequences(batch)
    q = torch.randn(3, 2 * HEADS, DIM)
    prefix_len = batch._staged.tensors["prefix_lens"]
    monkeypatch.setattr(sharedprefix, "PREFIX", 0.0)
    monkeypatch.setattr(sharedprefix, "FIXED", 0.0)
    for expected in (0, 48):  # at first it is not known how many query heads there are
        with batch.extend(["a", "b", "c"], 0):
            batch.attend(0, q)
            assert prefix_len.tolist() == [expected]
    with batch.extend(["z"], 0):
        batch.attend(0, q)
        assert not prefix_len.any()


@pytest.mark.parametrize("shared", [None, True, False])
def test_compiled_code_serves_all_steps(relative_l2: Measure, shared: bool | None) -> None:
    batch = PagedBatch(make(num_pages=40), 3, 70, shared_prefix=shared)
    sequences(batch)
    q = torch.randn(3, 2 * HEADS, DIM)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda q: batch.attend(0, q), backend=counter, fullgraph=True)
    for ids in (["a", "b", "c"], ["z"], ["c", "a"]):
        with batch.extend(ids, 0):
            found, expected = compiled(q), batch.attend(0, q)
        assert isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)
        assert relative_l2(found[: len(ids)], expected[: len(ids)]) < 1e-5
    assert counter.frame_count == 1


def test_rows_are_not_written_outside_a_step_of_the_batch() -> None:
    cache = make(num_pages=40)
    batch, other = PagedBatch(cache, 4, 70), PagedBatch(cache, 4, 70)
    sequences(batch)
    q = torch.randn(4, HEADS, DIM)
    for use in (lambda: batch.append(0, *new_rows(70)), lambda: batch.attend(0, q)):
        with pytest.raises(ConfigError, match="no step of this batch is open"):
            use()
        with (
            other.extend(["z"], 0),
            pytest.raises(ConfigError, match="no step of this batch is open"),
        ):
            use()
    step = batch.extend(["z"], 0)
    with step:
        pass
    with pytest.raises(ConfigError, match="no step of this batch is open"), step:
        pass
    cache.check_invariants()


def test_a_step_that_cannot_be_staged_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = PagedBatch(make(num_pages=40), 4, 70)
    sequences(batch)

    def fail() -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(batch._staged, "send", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            batch.extend(["z"])
    batch.cache.check_invariants()
    assert batch.cache.length("z") == 20
    extend(batch, ["z"])


def test_texts_and_sequences_that_were_not_captured_are_refused() -> None:
    batch = PagedBatch(make(num_pages=40), 4, 70)
    sequences(batch)
    with pytest.raises(ConfigError, match="give a list of ids"):
        batch.extend("az")
    batch._captured = [2, 2, 2]
    with pytest.raises(ShapeError, match="has captured 2 and 2"):
        batch.extend(["a", "b", "c"])


@pytest.mark.gpu
def test_a_graph_that_shares_serves_any_steps(relative_l2: Measure) -> None:
    cache = make(num_pages=40, device="cuda")
    prefill, plain = PagedBatch(cache, 4, 70), PagedBatch(cache, 4, shared_prefix=False)
    batch = PagedBatch(cache, 4, shared_prefix=True)
    sequences(prefill)
    q = torch.randn(4, 2 * HEADS, DIM, device="cuda").bfloat16()
    with batch.extend([]):
        batch.attend(0, q)  # compiled
    graph = torch.cuda.CUDAGraph()
    with batch.extend([]), torch.cuda.graph(graph):
        out = batch.attend(0, q)
    assert isinstance(out, torch.Tensor)
    for ids in (["a", "b", "c", "z"], ["z"], ["b", "a"]):
        extend(plain, ids)
        with batch.extend(ids, 0):
            graph.replay()
        with plain.extend(ids, 0):
            expected = plain.attend(0, q)
        assert isinstance(expected, torch.Tensor)
        assert relative_l2(out[: len(ids)], expected[: len(ids)]) < 4e-3
