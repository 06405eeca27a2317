"""PagedKVCache from a plan: rows, attention and files as those of KVCache.from_plan (10 s)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from invariants import check_invariants
from paged_cases import DIM, begin, extend, make, same, seen, values
from paged_plans import PLAN_LAYERS, PLANS, make_contiguous, make_paged, packed_rows
from relative_l2 import relative_l2

from kvquant import KVCache
from kvquant.errors import CheckpointError
from kvquant.io.plan import CachePlan
from kvquant.io.sequences import load_sequences, save_sequences
from kvquant.paged.batch import PagedBatch
from kvquant.paged.cache import PagedKVCache

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def append(cache: KVCache, rows: torch.Tensor) -> None:
    """The rows of new tokens, the same in every layer, as extend writes them."""
    for layer in range(cache.num_layers):
        cache.append(layer, *rows.transpose(1, 2)[:, None])


def check_rows(paged: PagedKVCache, name: str, contiguous: KVCache) -> None:
    """The bytes of the packed rows and the values of all rows are those of a KVCache."""
    for layer, at in enumerate(contiguous.layers):
        k, v = packed_rows(paged, name, layer)
        assert torch.equal(k, at.k_packed[0, :, : k.shape[1]])
        assert torch.equal(v, at.v_packed[0, :, : v.shape[1]])
        assert same(
            [x[None] for x in paged.dequantized(name, layer)], contiguous.dequantized(layer)
        )


@each_plan
@pytest.mark.parametrize(
    "lengths, chunks",
    [((3, 5), [60]), ((3, 5), [2, 7, 30, 1, 1, 9]), ((0, 0), [2, 30, 1, 9])],
    ids=["one chunk", "chunks", "no windows"],
)
def test_rows_and_attention_are_those_of_kv_cache(
    plan: CachePlan, lengths: tuple[int, int], chunks: list[int]
) -> None:
    options = {"sink_len": lengths[0], "recent_len": lengths[1]}
    batch, contiguous = (
        PagedBatch(make_paged(plan, **options), 4, 100),
        make_contiguous(plan, **options),
    )
    cache = batch.cache
    assert cache.bases is not None and len(cache.bases) == PLAN_LAYERS
    cache.allocate("a")
    for count in chunks:
        append(contiguous, extend(batch, ["a"], count))
    check_rows(cache, "a", contiguous)
    begin(batch, "other", 2)
    for layer in range(PLAN_LAYERS):
        q = torch.randn(4, 6, DIM)
        q[3] = torch.nan  # of a place that is not in use
        with batch.extend(["other", "a"], 0):
            out, lse = batch.attend(layer, q, return_lse=True)
            again = batch.attend(layer, q, sm_scale=DIM**-0.5)
        reference, reference_lse = contiguous.attend(layer, q[1:2], return_lse=True)
        assert relative_l2(out[1:2], reference) < 1e-5
        assert relative_l2(lse[1:2], reference_lse) < 1e-5
        assert torch.equal(again, out)
        assert not out[2:].any() and bool((lse[2:] == -torch.inf).all())


@pytest.mark.parametrize("device", DEVICES)
@each_plan
def test_a_round_trip_through_a_file_is_bit_exact_and_goes_on(
    plan: CachePlan, device: str, tmp_path: Path
) -> None:
    batch = PagedBatch(make_paged(plan, device=device), 4, 100)
    begin(batch, "a", 60, range(60))
    batch.cache.fork("a", "b")
    extend(batch, ["b"], 9, range(9))
    path = save_sequences(batch.cache, ["b", "a"], tmp_path / "saved.safetensors")
    other = PagedBatch(make_paged(plan, device=device), 4, 100)
    assert load_sequences(other.cache, path) == ["b", "a"]
    for name in "ab":
        assert same(values(other.cache, name), values(batch.cache, name))
        rows = extend(batch, [name], 20)
        extend(other, [name], 20, rows=rows)
        assert same(values(other.cache, name), values(batch.cache, name))
    assert other.cache.allocate("c", range(60)) == 51
    check_invariants(other.cache)


def test_files_know_bases_by_how_rows_are_read(tmp_path: Path) -> None:
    """Clip and feedback say how rows are made, not how they are read."""
    path, names = tmp_path / "saved.safetensors", ("matrix", "matrix clip feedback")
    batches = [PagedBatch(make_paged(PLANS[name]), 4, 100) for name in names]
    begin(batches[0], "a", 40)
    save_sequences(batches[0].cache, ["a"], path)
    load_sequences(batches[1].cache, path)
    assert same(*(values(batch.cache, "a") for batch in batches))


def test_rows_of_one_basis_are_not_loaded_into_another(tmp_path: Path) -> None:
    plan = PLANS["matrix"]
    offset = plan.tensors["v.offset"].clone()
    offset[1, 0, 0] += 1  # of layer 1
    caches = {
        "plan": make_paged(plan),
        "plain": make(num_layers=PLAN_LAYERS, k_format=plan.k_formats, v_format=plan.v_formats),
        "other": make_paged(CachePlan(plan.facts, {**plan.tensors, "v.offset": offset})),
    }
    for name, cache in caches.items():
        begin(PagedBatch(cache, 4, 100), name, 40)
        save_sequences(cache, [name], tmp_path / f"{name}.safetensors")
    made_with = "make the cache with PagedKVCache"
    for saved, ours, message in (
        ("plan", "plain", f"stored in the bases of a plan: {made_with}"),
        ("plain", "plan", "stored without a plan: use none"),
        ("other", "plan", rf"bases of another plan \(layer 1 differs\): {made_with}"),
    ):
        before, path = seen(caches[ours]), tmp_path / f"{saved}.safetensors"
        with pytest.raises(CheckpointError, match=message) as caught:
            load_sequences(caches[ours], path)
        assert str(caught.value).startswith(str(path))
        assert seen(caches[ours]) == before
