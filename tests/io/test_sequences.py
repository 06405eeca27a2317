"""Sequences of a paged cache as files: bit for bit, shared pages once, and nothing damaged in."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import latent_pages
import numpy as np
import pytest
import torch
from forged import forge
from invariants import check_invariants
from latent_pages import FORMATS, from_plan
from latent_plans import latent_plan
from paged_cases import begin, extend, make, new_rows, rows_of, same, seen, values
from refusals import assert_refused
from safetensors.torch import load_file

from kvquant import KVCache, LatentPagedBatch, load_cache, save_cache
from kvquant.errors import CheckpointError, ConfigError, DeviceError, OutOfPagesError
from kvquant.io.inspect import describe
from kvquant.io.plan import CachePlan
from kvquant.io.sequences import load_sequences, save_sequences
from kvquant.io.tensor_files import SafetensorsFile
from kvquant.paged.batch import PagedBatch

CONFIG = {"model_type": "toy", "hidden_size": 64}


def filled(latents: bool = False, **options: Any) -> PagedBatch | LatentPagedBatch:
    """Three sequences: "a" of 60 tokens, a fork "b" that went on, and 7 of 2 tokens."""
    batch = batch_of(latents, **options)
    begin(batch, "a", 60, range(60))
    batch.cache.fork("a", "b")
    extend(batch, ["b"], 9, range(9))
    begin(batch, 7, 2)
    return batch


def batch_of(latents: bool, **options: Any) -> PagedBatch | LatentPagedBatch:
    if latents:
        return LatentPagedBatch(latent_pages.make(fmt=FORMATS["cuda"], **options), 4, 100)
    return PagedBatch(make(**options), 4, 100)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("lengths", [(3, 5), (0, 0), (3, 0), (0, 5)], ids=str)
@pytest.mark.parametrize("latents", [False, True], ids=["heads", "latents"])
def test_a_round_trip_is_bit_exact_and_goes_on(
    latents: bool, lengths: tuple[int, int], device: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"sink_len": lengths[0], "recent_len": lengths[1]}
    batch = filled(latents, **options, device=device)
    path = tmp_path / "saved.safetensors"
    assert save_sequences(batch.cache, ["b", 7, "a"], path, creation={"by": "test"}) == path
    other = batch_of(latents, **options)
    begin(other, "c", 30)  # so that pages and sequence slots are others
    assert load_sequences(other.cache, path) == ["b", 7, "a"]
    check_invariants(other.cache)
    assert other.cache.match_prefix(range(60)) == batch.cache.match_prefix(range(60)) > 0
    for name in ("a", "b", 7):
        assert same(values(other.cache, name), [x.cpu() for x in values(batch.cache, name)])
    for name in ("a", "b", 7):
        rows = rows_of(other.cache, 20)
        extend(batch, [name], 20, rows=[x.to(device) for x in rows])
        extend(other, [name], 20, rows=rows)
        assert same(values(other.cache, name), [x.cpu() for x in values(batch.cache, name)])


def test_ids_may_be_numbers_of_other_types(tmp_path: Path) -> None:
    cache = filled().cache
    ids: Any = np.array([7])
    path = save_sequences(cache, ids, tmp_path / "saved.safetensors")
    assert load_sequences(make(), path) == [7]


def test_a_cache_on_meta_takes_no_sequences(tmp_path: Path) -> None:
    path, other = tmp_path / "saved.safetensors", make(device="meta")
    save_sequences(filled().cache, ["a"], path)
    with pytest.raises(DeviceError, match="holds no tokens"):
        load_sequences(other, path)
    assert not other.ids


def test_shared_pages_are_written_once_and_shared_again(tmp_path: Path) -> None:
    cache = filled().cache
    path = save_sequences(cache, ["a", "b"], tmp_path / "saved.safetensors")
    pages = {page for name in "ab" for page in cache.state.pool.block_table(name)}
    assert load_file(path)["layers.0.k_pages"].shape[0] == len(pages) == 5
    other = make()
    load_sequences(other, path)
    assert other.num_free_pages == 12 - len(pages)


def test_rows_that_no_sequence_has_are_not_written(tmp_path: Path) -> None:
    batch = PagedBatch(make(), 4, 100)
    begin(batch, "a", 10)
    for side in batch.cache.rows.pages:
        for rows in side.layers:
            rows[:, :, 2:] = 0xFF  # 2 tokens are packed
    path = save_sequences(batch.cache, ["a"], tmp_path / "saved.safetensors")
    assert not load_file(path)["layers.1.v_pages"][:, :, 2:].any()


def test_a_loaded_prefix_is_found_by_new_sequences(tmp_path: Path) -> None:
    path = save_sequences(filled().cache, ["a"], tmp_path / "saved.safetensors")
    batch = PagedBatch(make(), 4, 100)
    load_sequences(batch.cache, path, ids={"a": "system prompt"})
    assert batch.cache.match_prefix(range(60)) == 51
    assert batch.cache.allocate("b", range(60)) == 51
    kept = zip(values(batch.cache, "b"), values(batch.cache, "system prompt"), strict=True)
    assert all(torch.equal(x, y[:, :51]) for x, y in kept)


def test_twins_and_their_heir_are_saved_and_loaded(tmp_path: Path) -> None:
    """Two sequences with one prompt at the same time, and a third that begins with it."""
    batch = PagedBatch(make(num_pages=40, max_seq_len=150), 4, 300)
    cache, prompt = batch.cache, list(range(140))
    order = [20, 3, 8, 1, 30, 15, 11, 2, 9, 31, 6, 12, 4, 21, 0, 7, 18]
    cache.state.pool._free = [page for page in range(40) if page not in order] + order[::-1]
    for name in "ab":
        cache.allocate(name, prompt)
    extend(batch, ["a", "b"], 140, prompt * 2)
    present = cache.allocate("c", prompt)
    extend(batch, ["c"], 140 - present, prompt[present:])
    check_invariants(cache)
    path = save_sequences(cache, ["a", "b", "c"], tmp_path / "saved.safetensors")
    other = make(num_pages=40, max_seq_len=150)
    assert load_sequences(other, path) == ["a", "b", "c"]
    assert all(same(values(other, name), values(cache, name)) for name in "abc")
    check_invariants(other)


def test_a_file_is_of_one_model(tmp_path: Path) -> None:
    path = tmp_path / "saved.safetensors"
    save_sequences(filled().cache, ["a"], path, model=CONFIG)
    load_sequences(make(), path, model=CONFIG)
    with pytest.raises(CheckpointError, match="belongs to a 'toy' model"):
        load_sequences(make(), path, model={**CONFIG, "hidden_size": 65})


def test_a_file_that_does_not_fit_the_cache_is_refused(tmp_path: Path) -> None:
    heads, latents = (
        save_sequences(filled(kind).cache, ["a", "b"], tmp_path / f"{kind}.safetensors")
        for kind in (False, True)
    )
    formats = "layer 0 is int4-g4 and int8 in the file and int4-g4 and int4"
    caches: list[tuple[Path, Any, str]] = [
        (heads, make(page_size=32), "page_size is 16 in the file and 32 in the cache"),
        (heads, make(sink_len=4), "sink_len is 3 in the file and 4"),
        (heads, make(recent_len=4), "recent_len is 5 in the file and 4"),
        (heads, make(exact_format="fp16"), "exact_format is bf16"),
        (heads, make(num_layers=1), "num_layers is 2 in the file and 1"),
        (heads, make(v_format="int4"), formats),
        (heads, make(max_seq_len=68), "a sequence has 69 tokens, max_seq_len is 68"),
        (latents, make(), "latent is True in the file and False in the cache"),
        (heads, latent_pages.make(), "latent is False in the file and True in the cache"),
        (latents, latent_pages.make(), "layer 0 is int8-g4 and bf16 in the file"),
    ]
    for path, cache, message in caches:
        assert_refused(CheckpointError, (partial(load_sequences, cache, path), message))
        assert cache.ids == []


def test_files_remember_the_bases_of_a_plan_of_latents(tmp_path: Path) -> None:
    plan = latent_plan()
    batch = LatentPagedBatch(from_plan(plan), 4, 100)
    begin(batch, "a", 60, range(60))
    path = save_sequences(batch.cache, ["a"], tmp_path / "saved.safetensors")
    loaded = from_plan(plan)
    assert load_sequences(loaded, path) == ["a"]
    assert same(values(loaded, "a"), values(batch.cache, "a"))
    assert describe(path)["transformed"]
    moved = {**plan.tensors, "k.offset": plan.tensors["k.offset"] + 1}
    plain, other = latent_pages.make(fmt=["int4-g8", "bf16"]), CachePlan(plan.facts, moved)
    assert_refused(
        CheckpointError,
        (lambda: load_sequences(plain, path), "in the bases of a plan: make the cache with"),
        (lambda: load_sequences(from_plan(other), path), r"another plan \(layer 0 differs\)"),
    )


def test_files_of_the_other_kind_are_refused(tmp_path: Path) -> None:
    path = save_sequences(filled().cache, ["a"], tmp_path / "saved.safetensors")
    with pytest.raises(CheckpointError, match=r"a paged cache: load_sequences reads it"):
        load_cache(path)
    save_cache(KVCache(1, 1, 2, 64, 40), tmp_path / "cache.safetensors")
    with pytest.raises(CheckpointError, match=r"this is a kvquant cache: load_cache reads it"):
        load_sequences(make(), tmp_path / "cache.safetensors")


def test_without_room_nothing_is_loaded(tmp_path: Path) -> None:
    path = save_sequences(filled().cache, ["a", "b"], tmp_path / "saved.safetensors")
    batch = PagedBatch(make(num_pages=6), 4, 100)
    begin(batch, "c", 30, range(30))
    before = seen(batch.cache)
    with pytest.raises(OutOfPagesError, match="5 pages are needed, but 4 of 6"):
        load_sequences(batch.cache, path)
    with pytest.raises(ConfigError, match="'c' exists"):
        load_sequences(batch.cache, path, ids={"a": "c"})
    with pytest.raises(ConfigError, match="give each sequence another one"):
        load_sequences(batch.cache, path, ids={"a": "b"})
    assert seen(batch.cache) == before
    check_invariants(batch.cache)


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    cache, path = filled().cache, tmp_path / "x.safetensors"
    assert_refused(
        ConfigError,
        (lambda: save_sequences(cache, ["a"], tmp_path / "x.bin"), "NAME.safetensors"),
        (lambda: save_sequences(cache, [], path), "at least one"),
        (lambda: save_sequences(cache, ["a"] * 2, path), "each once"),
        (lambda: save_sequences(cache, ["x"], path), "no sequence 'x'"),
        (lambda: save_sequences(cache, ["a"], path, creation={"": {0}}), "not plain data"),
    )
    assert list(tmp_path.iterdir()) == []


def test_a_row_with_nan_is_not_saved(tmp_path: Path) -> None:
    batch = filled()
    rows = new_rows(20)
    rows[0, 3, 1, 0] = torch.nan
    extend(batch, ["b"], 20, rows=rows)
    extend(batch, ["b"], 10)
    message = (
        "layer 0, K, sequence 1, token 72, KV head 1: a scale is negative, or a scale or shift"
    )
    with pytest.raises(CheckpointError, match=message):
        save_sequences(batch.cache, ["a", "b"], tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_rows_that_cannot_be_packed_are_refused(tmp_path: Path) -> None:
    """They would become NaN when they leave the recent window; sinks never do."""
    cache, path = filled().cache, tmp_path / "saved.safetensors"
    rows = cache.rows.layers[1].k_exact.view(torch.bfloat16)
    rows[cache.state.seq_slot("b"), :, 2] = 1e5  # a sink
    save_sequences(cache, ["a", "b"], path)
    load_sequences(make(), path)
    token = 64  # of 69; the ring has the last 5, and this is the first of them
    rows[cache.state.seq_slot("b"), 1, 3 + (token - 3) % 5] = -1e5
    message = f"layer 1, K, sequence 1, token {token}, KV head 1: a value is too large for int4"
    with pytest.raises(CheckpointError, match=message):
        save_sequences(cache, ["a", "b"], path)
    load_sequences(make(), path)
    forge(
        path, lambda _, tensors: tensors["layers.1.k_exact"].view(torch.bfloat16)[-5, 1].fill_(-1e5)
    )
    with pytest.raises(CheckpointError, match=message):
        load_sequences(make(), path)


@pytest.mark.parametrize("token", [-(2**63), 2**63 - 1])
def test_tokens_of_64_bits_are_saved_and_loaded(tmp_path: Path, token: int) -> None:
    batch, tokens = PagedBatch(make(), 4, 100), [token] * 60
    begin(batch, "a", 60, tokens)
    path = save_sequences(batch.cache, ["a"], tmp_path / "saved.safetensors")
    other = make()
    load_sequences(other, path)
    assert other.state.tokens("a") == tokens
    assert other.match_prefix(tokens) == batch.cache.match_prefix(tokens) > 0


@pytest.mark.parametrize("kind", ["sequences", "sequences-namespace", "sequences-latent"])
def test_golden_files_still_load(kind: str) -> None:
    namespace, steps = "adapter 1" if "name" in kind else None, torch.arange(40)[:, None, None]
    rows: Any = [(steps + torch.arange(64) / 4 - 8.0).expand(40, 2, 64).bfloat16()] * 2
    batch: Any = PagedBatch(make(), 4, 100)
    loaded, model = make(), None
    if "latent" in kind:
        rows = steps / 4 + torch.arange(256) / 64 - 2.0, steps / 4 - torch.arange(32) / 8
        formats, model = ["int4-g8+fp8-g4", "int8-g4"], {"model_type": "deepseek_v3"}
        batch = LatentPagedBatch(latent_pages.make(fmt=formats), 4, 100)
        loaded = latent_pages.make(fmt=formats)
    assert batch.cache.allocate("a", namespace=namespace) == 0
    extend(batch, ["a"], [40], range(40), rows=rows)
    batch.cache.fork("a", 7)
    extend(batch, [7], 3, range(3), rows=[x[:3] for x in rows])
    golden = Path(__file__).parents[1] / "data" / f"{kind}.safetensors"
    assert load_sequences(loaded, golden, model=model) == ["a", 7]
    check_invariants(loaded)
    for name in ("a", 7):
        assert same(values(loaded, name), values(batch.cache, name))
        assert loaded.state.tokens(name) == batch.cache.state.tokens(name)
        assert loaded.namespace(name) == namespace
    for others in (None, "adapter 1", "adapter 2"):
        found = loaded.match_prefix(range(40), namespace=others)
        assert found == 35 * (others == namespace)
    assert loaded.num_free_pages == batch.cache.num_free_pages


def test_a_file_that_is_overwritten_while_it_is_loaded_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tensors are looked at before the first is used, and again when they are."""
    path = save_sequences(filled().cache, ["a", "b"], tmp_path / "saved.safetensors")
    data, read = path.read_bytes(), SafetensorsFile.read
    reads = len(load_file(path))
    for damaged in range(1, 2 * reads + 1):
        path.write_bytes(data)
        batch = PagedBatch(make(), 4, 100)
        begin(batch, "c", 30, range(30))
        before, count = [*values(batch.cache, "c")], 0

        def overwritten(self: SafetensorsFile, *given: Any, damaged: int = damaged) -> torch.Tensor:
            nonlocal count
            count += 1
            if count == damaged:
                with open(path, "r+b") as file:
                    file.seek(len(data) // 3)
                    file.write(bytes(len(data) - len(data) // 3))
            return read(self, *given)

        monkeypatch.setattr(SafetensorsFile, "read", overwritten)
        if damaged == 2 * reads:  # perhaps the last tensor had been read before
            continue
        with pytest.raises(CheckpointError, match="is damaged"):
            load_sequences(batch.cache, path)
        assert same(values(batch.cache, "c"), before)
        assert (batch.cache.ids, batch.cache.num_free_pages) == (["c"], 10)
        check_invariants(batch.cache)
        assert batch.cache.match_prefix(range(60)) == batch.cache.match_prefix(range(30))
