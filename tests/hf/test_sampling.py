"""CachedModel.generate: texts that end, tokens that the caller chooses (5 s)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvquant import KVCache
from kvquant.cache import contiguous
from kvquant.cache import layer as layers

pytest.importorskip("transformers")
from hf_cases import random_module, tiny, tokens

from kvquant.hf import model as models
from kvquant.hf.hybrid import HybridModel
from kvquant.hf.model import CachedModel

FREE: dict[str, Any] = {"eos_token_id": ()}  # no text ends


@pytest.fixture(scope="module")
def model() -> CachedModel:
    return tiny("Llama")


def read(model: CachedModel, batch: int = 2, **options: Any) -> tuple[KVCache, torch.Tensor]:
    """A cache of prompts of unequal lengths, and the logits after them."""
    cache = model.new_cache(batch, 160, **({"sink_len": 2, "recent_len": 4} | options))
    text = tokens(batch, 12)
    return cache, model.prefill(cache, text, [12, 7, 9][:batch])


def end_of_first(texts: torch.Tensor) -> tuple[int, int]:
    """A token that comes early in the first text and late or never in the second, and its place."""
    first, second = texts.tolist()
    for place, token in enumerate(first[:8]):
        if token not in first[:place] and token not in second[:-8]:
            return token, place
    raise AssertionError("give another prompt: no token ends the first text early")


def free_texts(model: CachedModel, count: int, **options: Any) -> torch.Tensor:
    return model.generate(*read(model, **options), count, **FREE)


def assert_same_text(one: KVCache, other: KVCache, sequence: int) -> None:
    """The caches go on alike in this sequence, bit for bit."""
    q = torch.ones(one.batch, 4, one.head_dim)
    for index, (mine, theirs) in enumerate(zip(one.layers, other.layers, strict=True)):
        for name in ("seq_lens", "packed_lens"):
            assert getattr(mine, name)[sequence] == getattr(theirs, name)[sequence]
        found, wanted = one.attend(index, q), other.attend(index, q)
        assert torch.equal(found[sequence], wanted[sequence])


@pytest.mark.parametrize("rollback_len", [4, 64])
def test_a_text_that_ends_first_leaves_what_it_has_alone(
    rollback_len: int, model: CachedModel
) -> None:
    """Behind its end 30 more steps come, after which a crop alone would leave tokens packed."""
    options = {"rollback_len": rollback_len, "recent_len": 8}
    free = free_texts(model, 40, **options)
    end, place = end_of_first(free)
    cache, logits = read(model, **options)
    found = model.generate(cache, logits, 40, eos_token_id=end)
    count = found.shape[1]
    assert count > place + 20
    assert torch.equal(found[1], free[1, :count])
    assert torch.equal(found[0, : place + 1], free[0, : place + 1])
    assert set(found[0, place:].tolist()) == {end}
    assert cache.seq_lens.tolist() == [12 + place, 7 + count - 1]
    wanted, logits = read(model, **options)
    model.generate(wanted, logits, place + 1, **FREE)
    assert_same_text(cache, wanted, 0)


def test_windows_forget_what_came_behind_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layers, contiguous, models):
        monkeypatch.setattr(module, "SPARE", 8)
    model = tiny("Mistral", sliding_window=16)
    end, place = end_of_first(free_texts(model, 50))
    cache, logits = read(model)
    found = model.generate(cache, logits, 50, eos_token_id=end)
    wanted, logits = read(model)
    model.generate(wanted, logits, place + 1, **FREE)
    assert cache.seq_lens.tolist() == [12 + place, 7 + found.shape[1] - 1]
    assert_same_text(cache, wanted, 0)


def test_the_model_says_which_tokens_end_a_text(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = free_texts(model, 12)
    starts = free[:, 0].tolist()
    assert starts[0] != starts[1]
    for ends, count in ((starts, 1), (None, 12)):
        monkeypatch.setattr(model.model.generation_config, "eos_token_id", ends)
        cache, logits = read(model)
        assert torch.equal(model.generate(cache, logits, 12), free[:, :count])
        assert cache.seq_lens.tolist() == [11 + count, 6 + count]
    monkeypatch.setattr(model.model.generation_config, "eos_token_id", starts[0])
    assert model.end_tokens == [starts[0]]
    found = model.generate(*read(model), 12)
    assert set(found[0].tolist()) == {starts[0]} and found.shape[1] > 1


def test_a_hybrid_fills_texts_up_that_have_ended() -> None:
    sizes = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32}
    model = HybridModel(random_module("falcon_h1", sizes))

    def continued(**options: Any) -> tuple[KVCache, torch.Tensor]:
        cache = model.new_cache(2, 64)
        return cache, model.generate(cache, model.prefill(cache, tokens(2, 6) % 97), 12, **options)

    _, free = continued(**FREE)
    first, second = free.tolist()
    assert first[0] != second[0]
    cache, found = continued(eos_token_id=first[0])
    count = found.shape[1]
    assert found[1].tolist() == second[:count] and set(found[0].tolist()) == {first[0]}
    assert cache.seq_lens.tolist() == [6 + count - 1] * 2


# Tokens that the caller chooses


def test_tokens_are_those_that_are_chosen(model: CachedModel) -> None:
    cache, logits = read(model)
    lens: list[int] = []

    def second(scores: torch.Tensor) -> torch.Tensor:
        lens.append(int(cache.seq_lens[0]))
        return scores.topk(2).indices[:, 1]

    found = model.generate(cache, logits, 6, **FREE, choose=second)
    assert lens == [12, 13, 14, 15, 16, 17]  # each before the next step
    wanted, scores = read(model)
    for column in found.T:
        assert torch.equal(column, second(scores))
        scores = model.step(wanted, column)
    assert not torch.equal(found, free_texts(model, 6))
