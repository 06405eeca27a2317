"""CachedModel.generate: texts that end, tokens that are drawn, callbacks (5 s)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvquant import KVCache
from kvquant.cache import contiguous
from kvquant.cache import layer as layers
from kvquant.cli.demo import MODEL
from kvquant.errors import ConfigError, NonFiniteError

transformers = pytest.importorskip("transformers")
from hf_cases import random_module, tiny, tokens  # noqa: E402

from kvquant.hf import model as models  # noqa: E402
from kvquant.hf.hybrid import HybridModel  # noqa: E402
from kvquant.hf.model import CachedModel  # noqa: E402
from kvquant.hf.sampling import Sampler  # noqa: E402

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


# Sampling

SCORES = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
WARPED = {
    "temperature": ({"temperature": 0.5}, 6),
    "top_k": ({"temperature": 1.0, "top_k": 2}, 2),
    "top_p": ({"temperature": 2.0, "top_p": 0.6}, 3),
    "both": ({"temperature": 1.5, "top_k": 4, "top_p": 0.5}, 2),
    "all": ({"temperature": 1.0, "top_k": 99, "top_p": 1.0}, 6),
}


def sampler(batch: int, **options: Any) -> Sampler:
    given = dict.fromkeys(("temperature", "top_k", "top_p", "seed")) | options
    return Sampler(batch, **given)


@pytest.mark.parametrize("case", WARPED)
def test_tokens_are_drawn_as_often_as_they_are_likely(case: str) -> None:
    options, kept = WARPED[case]
    count = 4000
    drawn = sampler(count, seed=3, **options)(SCORES.expand(count, -1))
    wanted = (SCORES / options["temperature"])[:kept].softmax(0)
    shares = torch.bincount(drawn, minlength=6) / count
    assert not shares[kept:].any()
    # five standard deviations of a share
    assert ((shares[:kept] - wanted).abs() <= 5 * (wanted * (1 - wanted) / count).sqrt()).all()


@pytest.mark.parametrize("one", [{"top_k": 1}, {"top_p": 1e-6}])
def test_one_token_is_left_and_chosen(one: dict[str, Any]) -> None:
    choose = sampler(3, temperature=100.0, seed=0, **one)
    assert choose(torch.stack([SCORES, SCORES.flip(0), SCORES])).tolist() == [0, 5, 0]


def test_a_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    scores = torch.zeros(3, 1000)

    def texts(batch: int, **options: Any) -> list[list[int]]:
        choose = sampler(batch, temperature=1.0, **options)
        return torch.stack([choose(scores[:batch]) for _ in range(8)], 1).tolist()

    assert texts(3, seed=5)[:2] == texts(2, seed=5) != texts(2, seed=6)
    of_two = [*map(tuple, texts(3, seed=5)), *map(tuple, texts(3, seed=6))]
    assert len({*of_two}) == 6  # no text of a seed is one of the next
    torch.manual_seed(1)
    first, second = texts(2), texts(2)
    assert first != second
    torch.manual_seed(1)
    assert texts(2) == first


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_give_a_token_and_then_an_error(value: float) -> None:
    choose, scores = sampler(3, temperature=1.0, seed=0), torch.zeros(3, 6)
    choose(scores)
    choose.check()
    scores[1, 2] = value
    assert 0 <= int(choose(scores)[1]) < 6
    choose(torch.zeros(3, 6))
    with pytest.raises(NonFiniteError, match=r"logits for the sequences \[1\] hold NaN or Inf"):
        choose.check()


def test_a_tiny_temperature_takes_the_likeliest_token() -> None:
    choose = sampler(1, temperature=1e-30, seed=0)
    assert int(choose(torch.tensor([[1.0, 50.0, 3.0, 2.0]]))) == 1
    choose.check()


def test_sampled_texts_can_be_had_again(model: CachedModel) -> None:
    options: dict[str, Any] = FREE | {"temperature": 0.9, "top_k": 40, "top_p": 0.95}
    found = [model.generate(*read(model), 20, **options, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert not torch.equal(found[0], free_texts(model, 20))


# Callbacks


def test_columns_are_shown_as_they_come(model: CachedModel) -> None:
    cache, logits = read(model)
    shown: list[torch.Tensor] = []
    lens: list[int] = []

    def show(column: torch.Tensor) -> None:
        shown.append(column)
        lens.append(int(cache.seq_lens[0]))

    found = model.generate(cache, logits, 6, **FREE, on_tokens=show)
    assert torch.equal(torch.stack(shown, 1), found)
    assert lens == [12, 13, 14, 15, 16, 17]  # each before the next step


def test_a_streamer_of_transformers_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    model = CachedModel.from_pretrained(MODEL)
    streamer = transformers.TextStreamer(model.tokenizer)
    cache = model.new_cache(1, 64)
    logits = model.prefill(cache, torch.tensor([model.encode("The city of Manila")]))
    found = model.generate(cache, logits, 12, on_tokens=streamer.put)
    streamer.end()
    assert capsys.readouterr().out.strip() == model.decode(found[0]).strip()


def test_a_callback_that_raises_adds_nothing(model: CachedModel) -> None:
    cache, logits = read(model)

    def stop(column: torch.Tensor) -> None:
        if cache.seq_lens[0] == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(cache, logits, 10, **FREE, on_tokens=stop)
    assert cache.seq_lens.tolist() == [12, 7]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "cold": ({"temperature": 0}, "temperature 0 is not possible: use a number above 0, or leave"),
    "hot": ({"temperature": float("inf")}, "temperature inf is not possible"),
    "flag": ({"temperature": True}, "temperature True is not possible"),
    "text": ({"temperature": "1"}, "temperature '1' is not possible"),
    "no token": ({"temperature": 1.0, "top_k": 0}, "top_k 0 is not possible: use a whole number"),
    "half": ({"temperature": 1.0, "top_k": 1.5}, "top_k 1.5 is not possible"),
    "none": ({"temperature": 1.0, "top_p": 0.0}, "top_p 0.0 .* above 0 and at most 1, or leave it"),
    "too many": ({"temperature": 1.0, "top_p": 1.1}, "top_p 1.1 is not possible"),
    "minus": ({"temperature": 1.0, "seed": -1}, "seed -1 is not possible: use a whole number from"),
    "part": ({"temperature": 1.0, "seed": 0.5}, "seed 0.5 is not possible"),
    "k alone": ({"top_k": 5}, "top_k is 5, but without temperature the likeliest token is chosen"),
    "p alone": ({"top_p": 0.5}, "top_p is 0.5, but without temperature"),
    "seed alone": ({"seed": 0}, "seed is 0, but without temperature"),
    "beyond": ({"eos_token_id": [2, 256]}, "eos_token_id 256 is not in the vocabulary"),
    "below": ({"eos_token_id": -1}, "eos_token_id -1 is not in the vocabulary"),
    "word": ({"eos_token_id": "</s>"}, "eos_token_id is '</s>': use whole numbers"),
    "yes": ({"eos_token_id": True}, "eos_token_id is torch.bool: use whole numbers"),
    "no function": ({"on_tokens": []}, "on_tokens is of type list: give a function of a tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_that_are_not_possible_add_nothing(case: str, model: CachedModel) -> None:
    options, message = WRONG[case]
    cache, logits = read(model)
    with pytest.raises(ConfigError, match=message):
        model.generate(cache, logits, 5, **options)
    assert cache.seq_lens.tolist() == [12, 7]


def test_ranks_draw_the_same_tokens_by_a_seed(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CachedModel, "_ranks", 2)
    cache, logits = read(model)
    with pytest.raises(ConfigError, match=r"2 ranks .* give all of them the same seed"):
        model.generate(cache, logits, 5, temperature=1.0)
    assert model.generate(cache, logits, 5, **FREE, temperature=1.0, seed=1).shape == (2, 5)
