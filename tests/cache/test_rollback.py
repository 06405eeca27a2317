"""Tokens that are cropped again: a cache is, bit for bit, like one that never saw them (15 s)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from slow_cases import mark_slow
from small_caches import rounding_basis

from kvquant import KVCache, load_cache, quantize_rows, save_cache
from kvquant.cache import layer
from kvquant.errors import ConfigError, NonFiniteError
from kvquant.io.inspect import describe

BATCH, HEADS, DIM, MAX, MOST = 2, 2, 64, 300, 64
ROWS = {"k_format": "int4-g4", "v_format": "int8"}
RELATIVE = 0.15  # what a token that is packed a step early may change of a result, int4-g4


KINDS: dict[str, dict[str, Any]] = {
    "recent": {"sink_len": 3, "recent_len": 8},
    "fewer recent than cropped": {"sink_len": 0, "recent_len": 2},
    "many recent": {"sink_len": 2, "recent_len": 100},
    "packed only": {"sink_len": 0, "recent_len": 0},
    "sinks only": {"sink_len": 3, "recent_len": 0},
    "windows": {"sink_len": 3, "recent_len": 8, "windows": [20, None]},
    "plan": {"sink_len": 3, "recent_len": 8, "bases": [rounding_basis()] * 2},
}


def make(kind: str, device: str = "cpu", **options: Any) -> KVCache:
    options = {**ROWS, **KINDS[kind], **options}
    return KVCache(2, BATCH, HEADS, DIM, MAX, device=device, **options)


def append(caches: list[KVCache], k: torch.Tensor, v: torch.Tensor, counts: list[int]) -> None:
    for cache in caches:
        new_lens = torch.tensor(counts, dtype=torch.int32, device=cache.device)
        for index in range(2):
            cache.append(index, k.to(cache.device), v.to(cache.device), new_lens)


def tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, BATCH, HEADS, count, DIM, generator=torch.Generator().manual_seed(seed))
    return k, v


def assert_alike(ours: KVCache, theirs: KVCache) -> None:
    """The rows that are read, where they stand, and what attention makes of them."""
    q = torch.ones(BATCH, 2 * HEADS, DIM, device=ours.device).bfloat16()
    for index, (mine, other) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        for name in ("seq_lens", "packed_lens", "exact_lens", "starts", "seen_lens"):
            assert torch.equal(getattr(mine, name), getattr(other, name)), (index, name)
        for one, two in zip(mine.segments(), other.segments(), strict=True):
            for b in range(BATCH):
                for side in "kv":
                    assert torch.equal(one.rows(b, side), two.rows(b, side)), (index, b, side)
        if mine.longest and other.longest:
            found, expected = (one.attend(index, q, return_lse=True) for one in (ours, theirs))
            assert all(map(torch.equal, found, expected)), index


class Rollback(RuleBasedStateMachine):
    """Steps of two caches; only one of them drafts."""

    @initialize(kind=st.sampled_from(sorted(KINDS)), prompt=st.integers(0, 90))
    def start(self, kind: str, prompt: int) -> None:
        self.ours, self.theirs = self.caches = [make(kind), make(kind)]
        append(self.caches, *tokens(prompt, prompt), [prompt, prompt // 2])

    @property
    def room(self) -> int:
        return MAX - int(self.ours.seq_lens.max())

    @precondition(lambda self: self.room)
    @rule(data=st.data(), seed=st.integers(0, 1 << 30))
    def grow(self, data: st.DataObject, seed: int) -> None:
        count = data.draw(st.integers(1, min(self.room, 70)))
        counts = data.draw(st.lists(st.integers(0, count), min_size=BATCH, max_size=BATCH))
        append(self.caches, *tokens(count, seed), counts)
        assert_alike(self.ours, self.theirs)

    @precondition(lambda self: self.room)
    @rule(data=st.data(), seed=st.integers(0, 1 << 30))
    def draft(self, data: st.DataObject, seed: int) -> None:
        """Some of the tokens are kept; in one call or token by token."""
        count = data.draw(st.integers(1, min(self.room, MOST)))
        kept = data.draw(st.lists(st.integers(0, count), min_size=BATCH, max_size=BATCH))
        k, v = tokens(count, seed)
        before = self.ours.seq_lens
        for part in [count] if count > 8 or data.draw(st.booleans()) else [1] * count:
            append([self.ours], k[:, :, :part], v[:, :, :part], [part] * BATCH)
            k, v = k[:, :, part:], v[:, :, part:]
        self.ours.crop(before + torch.tensor(kept))
        append([self.theirs], *tokens(count, seed), kept)
        assert_alike(self.ours, self.theirs)

    @rule(index=st.lists(st.integers(0, BATCH - 1), min_size=BATCH, max_size=BATCH))
    def fork(self, index: list[int]) -> None:
        self.ours, self.theirs = self.caches = [cache.fork(index) for cache in self.caches]
        assert_alike(self.ours, self.theirs)

    @rule()
    def reset(self) -> None:
        for cache in self.caches:
            cache.reset()


@pytest.mark.parametrize("examples", mark_slow([6, 24], [6]))
def test_drafts_that_are_taken_back_leave_nothing(examples: int) -> None:
    run_state_machine_as_test(
        Rollback, settings=settings(max_examples=examples, stateful_step_count=8)
    )


def draft_and_crop(kind: str, device: str) -> None:
    """Every number of tokens that can be kept of drafts of several lengths."""
    ours, theirs = make(kind, device), make(kind, device)
    append([ours, theirs], *tokens(120, 0), [120, 30])
    for step, count in enumerate((1, 4, 64, 17)):
        kept = [step % (count + 1), count // 2]
        before = ours.seq_lens
        append([ours], *tokens(count, step), [count] * BATCH)
        ours.crop(before.cpu() + torch.tensor(kept))
        append([theirs], *tokens(count, step), kept)
        assert_alike(ours, theirs)
    append([ours, theirs], *tokens(30, 9), [30, 30])
    assert_alike(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_drafts_leave_nothing_on_a_gpu(kind: str) -> None:
    draft_and_crop(kind, "cuda")


@pytest.mark.gpu
def test_drafts_in_a_graph_leave_nothing() -> None:
    """Appended by a replayed graph, whose lengths the host never read."""
    ours, theirs = make("recent", "cuda"), make("recent", "cuda")
    append([ours, theirs], *tokens(40, 0), [40, 9])
    k, v = (x.cuda() for x in tokens(8, 1))
    for index in range(2):  # compiled
        ours.append(index, k, v)
    ours.crop(torch.tensor([40, 9]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(2):
            ours.append(index, k, v)
    for kept in (0, 3, 8):
        before = ours.seq_lens
        graph.replay()
        ours.crop(before.cpu() + kept)
        append([theirs], *tokens(8, 1), [kept] * BATCH)
        assert_alike(ours, theirs)


def test_a_file_keeps_what_attention_reads(tmp_path: Any) -> None:
    """What is lost is how far one can roll back; the bytes of later rows are the same."""
    cache = make("recent")
    append([cache], *tokens(40, 0), [40, 17])
    save_cache(cache, tmp_path / "a.safetensors")
    loaded = load_cache(tmp_path / "a.safetensors")
    loaded.max_seq_len = cache.max_seq_len
    assert_alike(loaded, cache)
    append([cache, loaded], *tokens(20, 1), [20, 5])
    assert_alike(loaded, cache)
    for one in (cache, loaded):
        one.crop([41, 18])  # a step of 19 and 4 tokens
    assert_alike(loaded, cache)
    for one in (cache, loaded):
        one.crop([38, 15])
    assert cache.layers[0].packed_lens.tolist() == [27, 4]
    assert loaded.layers[0].packed_lens.tolist() == [29, 6], "two of each were packed in the file"


def test_several_tokens_of_a_step_see_what_the_first_one_saw() -> None:
    """Between single steps, and nearer to them than if all were packed at once."""
    cache = make("recent", k_format="int4-g4", v_format="int4-g4")
    append([cache], *tokens(100, 0), [100, 50])
    one_by_one, packed = cache.fork(), cache.fork()
    k, v = tokens(6, 1)
    q = torch.randn(BATCH, 6, 2 * HEADS, DIM)
    found = cache.step(0, q, k, v)
    packed.append(0, k, v)
    now = packed.attend(0, q)
    singles = [one_by_one.step(0, q[:, i], *(x[:, :, i : i + 1] for x in (k, v))) for i in range(6)]
    single = torch.stack(singles, dim=1)
    assert torch.allclose(found[:, 0], single[:, 0], atol=1e-5), "the first sees just that"
    error, other = ((x - single).norm() / single.norm() for x in (found, now))
    assert 0 < float(error) < RELATIVE and 0 < float(other) < RELATIVE
    for name, tensor in cache.layers[0].tensors().items():
        assert torch.equal(tensor, packed.layers[0].tensors()[name]), name


@pytest.mark.parametrize("windows", [None, [20, None]], ids=str)
def test_steps_of_tokens_that_are_never_packed_are_single_ones(windows: Any) -> None:
    cache = make("packed only", windows=windows)
    append([cache], *tokens(100, 0), [100, 50])
    other = cache.fork()
    k, v = tokens(5, 1)
    q = torch.randn(BATCH, 5, 2 * HEADS, DIM)
    for index in range(2):
        out, lse = cache.step(index, q, k, v, return_lse=True)
        for i in range(5):
            token = slice(i, i + 1)
            single = other.step(index, q[:, i], k[:, :, token], v[:, :, token], return_lse=True)
            torch.testing.assert_close(out[:, i], single[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse[:, i], single[1], rtol=1e-5, atol=1e-5)


def test_steps_that_cannot_be_append_nothing() -> None:
    cache = make("windows")
    long = torch.zeros(BATCH, HEADS, layer.SPARE + 2, DIM)
    with pytest.raises(Exception, match="attend with 513 queries"):
        cache.step(0, torch.zeros(BATCH, layer.SPARE + 2, 2 * HEADS, DIM), long, long)
    assert not cache.seq_lens.any()


@pytest.mark.parametrize("rollback_len", [0, 9, 64])
def test_a_file_keeps_rollback_len_unless_another_is_wanted(
    tmp_path: Path, rollback_len: int
) -> None:
    cache, path = KVCache(1, 1, 2, 64, 400, rollback_len=rollback_len), tmp_path / "a.safetensors"
    cache.append(0, *torch.randn(2, 1, 2, 200, 64))
    save_cache(cache, path)
    same, other = load_cache(path), load_cache(path, rollback_len=20)
    assert same.rollback_len == rollback_len and same.nbytes == cache.nbytes
    assert (
        other.rollback_len == 20
        and other.nbytes == KVCache(1, 1, 2, 64, 400, rollback_len=20).nbytes
    )
    assert describe(path)["rollback_len"] == rollback_len
    with pytest.raises(ConfigError, match="rollback_len -1"):
        load_cache(path, rollback_len=-1)


def test_recent_rows_that_the_packed_format_cannot_hold_are_counted_when_a_file_is_loaded() -> None:
    cache = KVCache(1, 1, 2, 64, 100, sink_len=0, recent_len=8)
    cache.append(0, *torch.randn(2, 1, 2, 6, 64))
    layer = cache.layers[0]
    layer.k_exact_rows[:, :, 3:4] = quantize_rows(torch.full((1, 2, 1, 64), 1e5), layer.k_exact)
    layer.pack_recent(cache.bad_rows)
    assert cache.bad_rows.tolist() == [2, 0]
    with pytest.raises(NonFiniteError, match="2 rows of K and 0 of V"):
        cache.check()
