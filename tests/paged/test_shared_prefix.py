"""Steps of sequences that share a prefix: its pages are read once, with the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attend import attend_segments
from cuda_cases import captured
from paged_cases import DIM, HEADS, begin, extend, make, new_rows, rows_of
from relative_l2 import relative_l2
from row_kinds import KINDS, RowKind, planned
from variant_cases import variant_with

from kvquant import AttentionVariant, LatentPagedBatch, PagedKVCache
from kvquant.errors import ShapeError
from kvquant.ops.mla import attend_latents
from kvquant.ops.shared_prefix import attend_shared
from kvquant.paged import shared_prefix as sharedprefix
from kvquant.paged.batch import PagedBatch
from kvquant.paged.shared_prefix import find_prefix, pays, pays_of_latents
from kvquant.rows.call import LatentCall

POSITIONAL = ("window",), ("alibi_slopes",)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WITH_PLAN = KINDS | {"plan": planned("matrix clip feedback")}
LIMITS = {"cpu": 1e-5, "cuda": 4e-3}  # of relative errors: queries and results of 32 and 16 bit


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


def test_of_rows_that_the_decode_kernel_reads_it_never_pays() -> None:
    for head_dim, is_read in ((256, True), (512, False)):
        cache = PagedKVCache(1, 8, head_dim, num_pages=2, max_num_seqs=1, max_seq_len=128)
        assert PagedBatch(cache, 1, 8).pays(64, 64, 16384, 4) == is_read


def test_it_pays_with_few_heads_and_many_sequences() -> None:
    assert pays_of_latents(64, 64, 8192, 16) and pays_of_latents(64, 60, 8192, 16)
    assert not pays_of_latents(64, 64, 1024, 16) and not pays_of_latents(64, 20, 8192, 16)
    assert not pays_of_latents(2, 2, 8192, 16)
    assert not pays_of_latents(64, 64, 1 << 20, 128), "as many products"


def sequences(batch: PagedBatch | LatentPagedBatch) -> None:
    """Three of a common prompt, forked at 70 tokens, and one of its own."""
    begin(batch, "a", 70)
    batch.cache.fork("a", "b")
    batch.cache.fork("a", "c")
    begin(batch, "z", 20)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", WITH_PLAN.values(), ids=WITH_PLAN)
@pytest.mark.parametrize("lengths", [(0, 0), (3, 5)], ids=str)
def test_results_are_those_without_it(lengths: tuple[int, int], kind: RowKind, device: str) -> None:
    """Of one query and of several, of unequal numbers; rows and places not in use are NaN."""
    full = (70 - sum(lengths)) // 16 * 16  # tokens in full pages when the others were forked
    batches = []
    for shared in (True, False):
        torch.manual_seed(0)
        options: dict[str, Any] = {"sink_len": lengths[0], "recent_len": lengths[1]}
        cache = kind.make(device=device, num_pages=40, **options)
        batch = kind.batch(cache, 5, 70, shared_prefix=shared)
        sequences(batch)
        batches.append(batch)
    for ids, counts in (
        (["c", "z", "a", "b"], [1, 1, 1, 1]),
        (["z"], [1]),
        (["b", "a"], [0, 0]),
        (["b", "z", "a"], [3, 2, 1]),
        ([], []),
    ):
        many = max(counts, default=1) > 1
        shape = (len(ids) + 1, max(counts), 6) if many else (len(ids) + 1, 6)
        q, rows = kind.queries(*shape, device=device), rows_of(batches[0].cache, sum(counts))
        for x in q:  # padding
            x[len(ids) :] = torch.nan
            for place, count in enumerate(counts if many else []):
                x[place, count:] = torch.nan
        results = []
        for batch in batches:
            with batch.extend(ids, counts):
                for layer in range(batch.cache.num_layers if sum(counts) else 0):
                    batch.append(layer, *rows)
                results.append(kind.attend(batch, 1, q, return_lse=True))
        (ours, our_lse), (theirs, their_lse) = results
        empty = their_lse == -torch.inf
        assert torch.equal(our_lse == -torch.inf, empty) and not ours[empty].any()
        if ids:
            # Queries in a basis are rounded to 16 bit again, alike for both. The plan's results are
            # rounded beside an offset that is five times as large.
            limit = LIMITS[device] * (5 if kind is WITH_PLAN["plan"] else 1)
            assert relative_l2(ours, theirs) < limit
            torch.testing.assert_close(our_lse, their_lse, atol=1e-3, rtol=1e-4)
        wanted = full if sum(x in "abc" for x in ids) > 1 else 0
        assert int(batches[0]._staged.tensors["prefix_lens"]) == wanted


@pytest.mark.parametrize("device", DEVICES)
def test_variants_are_those_without_it(device: str) -> None:
    cache = make(num_pages=40, device=device)
    batch = PagedBatch(cache, 4, 70, shared_prefix=True)
    sequences(batch)
    ids, q_len, heads = ["c", "z", "a", "b"], 4, 2 * HEADS
    q = torch.randn(len(ids), q_len, heads, DIM, device=device).bfloat16()
    for names in (("soft_cap", "sink_logits"), ("tree_mask", "score_offsets"), *POSITIONAL):
        made: dict[str, Any] = variant_with(names, len(ids), q_len, heads)._asdict()
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


COSTS = {"heads": {"PREFIX": 0, "FIXED": 0}, "latents": {"MANY": 1, "FIXED_LATENT": 0, "FEW": 1}}


@pytest.mark.parametrize("kind", COSTS)
def test_it_is_used_where_it_pays(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, read = KINDS[kind], []
    batch, q = of.batch(of.make(num_pages=40), 4, 70), of.queries(3, 2 * HEADS)
    sequences(batch)

    def shared(*given: Any) -> Any:
        read.append(True)
        return attend_shared(*given)

    def latents(call: LatentCall, *stored: Any) -> Any:
        read.extend([True] * (call.prefix is not None))
        return attend_latents(call, *stored)

    monkeypatch.setattr("kvquant.paged.batch.attend_shared", shared)
    monkeypatch.setattr("kvquant.paged.latent_batch.attend_latents", latents)
    for name, value in COSTS[kind].items():
        monkeypatch.setattr(sharedprefix, name, value)
    # at first it is not known how many query heads there are
    for ids, expected in (("abc", 0), ("abc", 48), ("z", 0)):
        with batch.extend([*ids], 0):
            of.attend(batch, 0, q)
            assert batch._staged.tensors["prefix_lens"].tolist() == [expected]
        assert len(read) == (expected > 0 or ids == "z")


def test_sequences_that_were_not_captured_are_refused() -> None:
    batch = PagedBatch(make(num_pages=40), 4, 70)
    sequences(batch)
    batch._captured = [2, 2, 2]
    with pytest.raises(ShapeError, match="has captured 2 and 2"):
        batch.extend(["a", "b", "c"]).__enter__()


@pytest.mark.gpu
def test_a_graph_that_shares_serves_any_steps() -> None:
    cache = make(num_pages=40, device="cuda")
    prefill, plain = PagedBatch(cache, 4, 70), PagedBatch(cache, 4, shared_prefix=False)
    batch = PagedBatch(cache, 4, shared_prefix=True)
    sequences(prefill)
    q = torch.randn(4, 2 * HEADS, DIM, device="cuda").bfloat16()
    with batch.extend([]):
        graph, out = captured(lambda: batch.attend(0, q))
    assert isinstance(out, torch.Tensor)
    for ids in (["a", "b", "c", "z"], ["z"], ["b", "a"]):
        extend(plain, ids)
        with batch.extend(ids, 0):
            graph.replay()
        with plain.extend(ids, 0):
            expected = plain.attend(0, q)
        assert isinstance(expected, torch.Tensor)
        assert relative_l2(out[: len(ids)], expected[: len(ids)]) < 4e-3
