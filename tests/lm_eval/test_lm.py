"""Scores and texts of KvquantLM are those of decode loops written by hand; requests are shared."""

from __future__ import annotations

import doctest
import logging
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the lm-eval extra")
from hf_cases import RoundedCache
from refusals import assert_refused

import kvquant.lm_eval.batches
import kvquant.lm_eval.model
from kvquant.cli.demo import MODEL, TEXT
from kvquant.errors import ConfigError
from kvquant.hf.model import CachedModel
from kvquant.lm_eval.model import KvquantLM

EXACT, PACKED = "bf16,sinks=0,recent=0", "int4,sinks=0,recent=0"
UNSEEN = TEXT.read_text(encoding="utf-8")
WORDS = UNSEEN[:1500]
# contexts that several requests share, of one length or not, of one token, and none
PAIRS = [
    (WORDS, " the"),
    (WORDS, " a"),
    (WORDS, " the ships of the line"),
    (WORDS[:400], " the"),
    (WORDS[:400], " was a"),
    ("The", " city of Manila"),
    ("", "The city"),
    ("   ", "The city"),
]


class Rounding(RoundedCache):
    dtype = torch.bfloat16


@pytest.fixture(scope="module")
def model() -> CachedModel:
    return CachedModel.from_pretrained(MODEL)


@pytest.fixture
def stepped(model: CachedModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each step of the model has."""
    counts: list[int] = []
    stepper = model.stepper

    def counting(cache: Any, num_tokens: int) -> Any:
        step = stepper(cache, num_tokens)

        def counted(tokens: torch.Tensor) -> torch.Tensor:
            counts.append(len(tokens))
            return step(tokens)

        return counted

    monkeypatch.setattr(model, "stepper", counting)
    return counts


def requests(*args: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=one) for one in args]


def tokens_of(model: CachedModel, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """As the harness has it: tokens of the whole, and spaces belong to the continuation."""
    words = context.rstrip()
    before = model.encode(words) if words else [model.tokenizer.bos_token_id]
    whole = model.encode(context + continuation)
    return before, whole[len(before) :] if words else whole


def forward(model: CachedModel, before: list[int], scored: list[int]) -> float:
    """The log-likelihood by one pass of the model as transformers has it, in float32."""
    with torch.no_grad():
        logits = model.model(torch.tensor([before + scored])).logits[0, len(before) - 1 : -1]
    return float(logits.log_softmax(-1)[range(len(scored)), scored].double().sum())


def scored_by(
    step: Callable[[torch.Tensor], torch.Tensor], fed: list[int], scored: list[int]
) -> float:
    """The log-likelihood of tokens, each after the step of the one before."""
    scores = torch.cat([step(torch.tensor([token])) for token in fed]).log_softmax(-1)
    return float(scores[range(len(scored)), scored].double().sum())


def in_16_bit(model: CachedModel, before: list[int], scored: list[int]) -> float:
    """By steps of transformers' cache that rounds, of a context as well."""
    past = Rounding()
    if before[:-1]:
        model.plain(torch.tensor([before[:-1]]), past)
    fed = [before[-1], *scored[:-1]]
    return scored_by(lambda token: model.plain(token[None], past), fed, scored)


def in_int4(model: CachedModel, before: list[int], scored: list[int]) -> float:
    """By steps of a cache whose every row is packed."""
    exact, packed = (
        model.new_cache(1, 1000, k_format=one, v_format=one, sink_len=0, recent_len=0)
        for one in ("bf16", "int4")
    )
    if before[:-1]:
        model.prefill(exact, torch.tensor([before[:-1]]))
        for layer in range(len(packed.layers)):
            packed.append(layer, *exact.dequantized(layer, torch.bfloat16))
    return scored_by(partial(model.step, packed), [before[-1], *scored[:-1]], scored)


@pytest.mark.parametrize(("cache", "batch_size"), [(EXACT, 2), (PACKED, 1), (PACKED, 3)])
def test_scores_are_those_of_a_loop_over_the_rows_of_the_cache(
    model: CachedModel, cache: str, batch_size: int
) -> None:
    given = [tokens_of(model, *pair) for pair in PAIRS]
    exact = torch.tensor([forward(model, *one) for one in given])
    by_loop = in_16_bit if cache == EXACT else in_int4
    wanted = torch.tensor([by_loop(model, *one) for one in given])
    lm = KvquantLM(model, cache, batch_size=batch_size)
    scores = torch.tensor([one for one, _ in lm.loglikelihood(requests(*PAIRS), True)])
    moved = (wanted - exact).abs()  # by the roundings of keys and values
    if cache == EXACT:
        assert 1e-4 < moved.max() < 0.1
        # sums in another order round less than a 16th of the elements to a neighbour: errors add
        # up as their squares do
        assert (scores - wanted).abs().max() < moved.max() / 4
    else:
        # that all elements are packed; one that another order of sums moves is one of 10,000
        assert moved.min() > 1e-3, "each reads packed rows, single tokens too"
        assert (scores - wanted).abs().max() < moved.max() / 10


def test_greedy_is_told_of_the_likeliest_continuation(model: CachedModel) -> None:
    context = next(iter(SURE))
    _, tokens = sure_text(model, context, 4)
    before = model.encode(context)
    lm = KvquantLM(model, EXACT)
    asked = [(None, before, tokens), (None, before, [*tokens[:-1], tokens[-1] ^ 1])]
    assert [greedy for _, greedy in lm._loglikelihood_tokens(asked, True)] == [True, False]


def test_a_context_is_read_once_and_equal_tokens_are_fed_once(
    model: CachedModel, stepped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, ...]] = []
    prefill = model.prefill

    def count_prefill(cache: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        read.append(tuple(tokens.shape))
        return prefill(cache, tokens, **options)

    monkeypatch.setattr(model, "prefill", count_prefill)
    lm = KvquantLM(model, PACKED, batch_size=2)
    asked = [
        (None, [5] * 90, [7]),
        (None, [6] * 90, [7, 8]),
        (None, [5] * 90, [8]),  # fed as the first one
        (None, [5] * 90, [7]),
        (None, [6] * 90, [9, 8, 7]),
        (None, [4] * 80, [9]),
    ]
    found = lm._loglikelihood_tokens(asked, True)
    assert read == [(2, 89), (1, 79)]
    assert stepped == [2] * 3 + [2] * 2 + [1]
    alone = [lm._loglikelihood_tokens([one], True)[0][0] for one in asked]
    assert [one for one, _ in found] == pytest.approx(alone, abs=0.1)
    assert len({round(one, 1) for one, _ in found}) == 5


def test_continuations_beyond_what_crop_takes_back_begin_behind_the_context(
    model: CachedModel,
) -> None:
    """The 16-bit window of the second one is whole again."""
    lm = KvquantLM(model, "int4,sinks=0,recent=32")
    before, long = model.encode(WORDS), model.encode(WORDS)[:80]
    asked = [(None, before, [*long, 5]), (None, before, [*long[::-1], 6])]
    both = lm._loglikelihood_tokens(asked, True)
    alone = [lm._loglikelihood_tokens([one], True)[0] for one in asked]
    for (found, _), (wanted, _) in zip(both, alone, strict=True):
        assert found == pytest.approx(wanted, abs=0.1)


def test_rolling_scores_go_on_in_windows(model: CachedModel) -> None:
    lm = KvquantLM(model, EXACT, max_length=32, batch_size=4)
    texts = [WORDS[:300], "The city", ""]
    found = lm.loglikelihood_rolling(requests(*[(text,) for text in texts]), True)
    for text, score in zip(texts, found, strict=True):
        tokens, wanted = model.encode(text), 0.0
        for start in range(0, len(tokens), 32):  # the last window has as much before it as it can
            part = tokens[start : start + 32]
            behind = start + len(part)
            before = [model.tokenizer.bos_token_id, *tokens][max(behind - 32, 0) : start + 1]
            wanted += forward(model, before, part)
        # each token moves by less than a tenth of a nat, at random
        assert score == pytest.approx(wanted, abs=0.1 * max(len(tokens), 1) ** 0.5)
    assert found[2] == 0


def test_long_requests_lose_their_first_tokens_and_short_ones_are_told(
    model: CachedModel, caplog: pytest.LogCaptureFixture
) -> None:
    lm = KvquantLM(model, "int4,sinks=2,recent=14", max_length=20)
    before = model.encode(WORDS)[:40]
    with caplog.at_level(logging.WARNING, "kvquant"):
        long, cut, short = lm._loglikelihood_tokens(
            [(None, before, [5, 6]), (None, before[-19:], [5, 6]), (None, before[:3], [5])], True
        )
    assert long == cut and short[0] < 0
    first, second = caplog.messages
    assert "1 of 3 requests are longer than max_length, 20 tokens" in first
    assert "1 of 3 requests fit into the 16-bit window" in second and "sink_len=0" in second
    assert lm.get_model_info()["kvquant"] == {
        "cache": "int4 + 2 sinks, 14 recent",
        "requests": 3,
        "beyond_window": 2,
        "cut": 1,
    }
    caplog.clear()
    KvquantLM(model, "bf16")._loglikelihood_tokens([(None, before[:3], [5])], True)
    assert not caplog.messages, "a 16-bit cache packs nothing, with and without a window"
    for count in (0, 21):
        with pytest.raises(ConfigError, match=f"a continuation has {count} tokens: 1 to"):
            lm._loglikelihood_tokens([(("x", "y"), before, [5] * count)], True)


def sure_text(model: CachedModel, context: str, count: int) -> tuple[str, list[int]]:
    """Greedy tokens of float32 keys and values; the margins of all leave no doubt in 16 bit."""
    past, tokens = model.new_plain_cache(), list[int]()
    logits = model.plain(torch.tensor([model.encode(context)]), past)
    for _ in range(count):
        best, second = logits[0].topk(2).values.tolist()
        assert best - second > 0.2, "choose another context"
        tokens.append(int(logits.argmax()))
        logits = model.plain(torch.tensor([[tokens[-1]]]), past)
    return model.decode(tokens), tokens


# where the demo's model is sure of so many tokens
SURE = {text.rsplit(" ", 1)[0]: count for text, count in ((UNSEEN[:700], 10), (UNSEEN[:750], 8))}


def generated(lm: KvquantLM, *contexts: str, **settings: Any) -> list[str]:
    return lm.generate_until(requests(*[(one, settings) for one in contexts]), True)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_texts_end_at_stops_ends_and_the_most_tokens(
    model: CachedModel, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = KvquantLM(model, EXACT, batch_size=batch_size)
    sure = [sure_text(model, *one) for one in SURE.items()]
    (first, tokens), _ = sure
    assert generated(lm, *SURE, max_gen_toks=8) == [model.decode(ids[:8]) for _, ids in sure]
    # a stop may begin within a token
    middle = first[len(first) // 2 :]
    found = generated(lm, *SURE, until=[middle[:3], "\n\n"], max_gen_toks=8)
    assert found[0] == first[: first.index(middle[:3])] and found[1]
    monkeypatch.setattr(lm, "_ends", {tokens[3]})
    place = tokens.index(tokens[3])
    assert generated(lm, *SURE, max_gen_toks=8)[0] == model.decode(tokens[:place])
    # a likeliest token stays so whatever is cut off below it
    assert generated(lm, *SURE, max_gen_toks=2, do_sample=False, top_p=0.1, num_beams=1) == [
        model.decode(ids[:2]) for _, ids in sure
    ]
    assert lm.get_model_info()["kvquant"]["requests"] == 8


def test_a_text_ends_decoding_when_it_has_its_stop(model: CachedModel, stepped: list[int]) -> None:
    context, _ = next(iter(SURE.items()))
    text, tokens = sure_text(model, context, 3)
    last = model.decode(tokens[2:])
    found = generated(KvquantLM(model, EXACT), context, until=last, max_gen_toks=100)
    assert found == [text.removesuffix(last)] and stepped == [1, 1]


def test_samples_follow_the_seed_and_differ_from_one_another(model: CachedModel) -> None:
    lm = KvquantLM(model, EXACT, batch_size=2)
    hot = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 8}
    one = generated(lm, WORDS, WORDS, WORDS, **hot)
    assert len({*one}) == 3
    assert generated(lm, WORDS, WORDS, WORDS, **hot) == one
    torch.manual_seed(1)
    assert generated(lm, WORDS, WORDS, WORDS, **hot) != one


def test_packed_rows_change_texts(model: CachedModel) -> None:
    """A text of a context of one token reads rows, too, and one of none begins with BOS."""
    contexts = [WORDS, WORDS[:400], "The", ""]
    exact, packed = (
        generated(KvquantLM(model, cache), *contexts, max_gen_toks=40) for cache in (EXACT, PACKED)
    )
    assert all(exact) and all(packed)
    assert any(one != other for one, other in zip(exact, packed, strict=True))


def test_contexts_leave_room_for_the_text(model: CachedModel) -> None:
    lm = KvquantLM(model, EXACT, max_length=40)
    cut, whole = model.encode(WORDS)[-32:], model.decode(model.encode(WORDS)[-32:])
    assert model.encode(whole) == cut, "choose another text"
    assert generated(lm, WORDS, max_gen_toks=8) == generated(lm, whole, max_gen_toks=8)
    assert lm.get_model_info()["kvquant"]["cut"] == 1


def test_answers_are_kept_for_use_cache_under_the_harness_own_names(model: CachedModel) -> None:
    kept: list[tuple[str, Any]] = []
    lm = KvquantLM(model, EXACT)
    lm.set_cache_hook(SimpleNamespace(add_partial=lambda *told: kept.append(told[:2])))
    lm.loglikelihood(requests(("The", " city")), True)
    lm.loglikelihood_rolling(requests(("The city",)), True)
    settings = {"until": ["."], "max_gen_toks": 2}
    lm.generate_until(requests(("The", settings)), True)
    assert kept == [
        ("loglikelihood", ("The", " city")),
        ("loglikelihood_rolling", ("The city",)),
        ("generate_until", ("The", settings)),
    ]
    assert settings == {"until": ["."], "max_gen_toks": 2}


def test_chats_are_written_by_the_template(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = KvquantLM(model, EXACT)
    chat = [{"role": "user", "content": "Hello"}]
    with pytest.raises(ConfigError, match="no chat template: leave --apply_chat_template out"):
        lm.apply_chat_template(chat)
    template = "{{bos_token}}{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}"
    template += "{% if add_generation_prompt %}<answer>{% endif %}"
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    begin = model.tokenizer.bos_token
    assert lm.chat_template(True) == template
    assert lm.apply_chat_template(chat) == f"{begin}<user>Hello<answer>"
    chat.append({"role": "assistant", "content": "Hi"})
    text = lm.apply_chat_template(chat, add_generation_prompt=False)
    assert text == f"{begin}<user>Hello<assistant>Hi"
    # of a tokenizer that puts BOS before each text there is one, not two
    added: list[Any] = []

    class Adding:
        bos_token = begin

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            added.append(options.get("add_special_tokens", True))
            return {"input_ids": [1]}

    monkeypatch.setattr(lm, "tokenizer", Adding())
    for given in (text, "Hello"):
        lm.tok_encode(given)
    lm.tok_encode("Hello", add_special_tokens=False)
    assert added == [False, True, False]
    assert "/" not in KvquantLM(model, EXACT).tokenizer_name


def test_what_is_not_served_is_told(model: CachedModel) -> None:
    lm, bare = KvquantLM(model, EXACT), CachedModel(model.model)
    settings: list[tuple[dict[str, Any], str]] = [
        ({"num_beams": 4}, "num_beams=4, which kvquant does not serve"),
        ({"do_sample": True, "top_p": 0.9}, "top_p=0.9, which kvquant does not serve"),
        ({"max_gen_toks": 4096}, "max_gen_toks is 4096, and max_length 4096 has room for 1 to"),
        ({"max_gen_toks": 0}, "max_gen_toks is 0"),
    ]
    assert_refused(
        ConfigError,
        *((partial(generated, lm, WORDS, **given), words) for given, words in settings),
        (lambda: KvquantLM(model, EXACT, max_length=4097), "is beyond the 4096 positions"),
        (lambda: KvquantLM(model, "int6"), "'int6' is no format"),
        (lambda: KvquantLM(model, EXACT, batch_size=0), "batch_size 0 is not possible"),
        (lambda: KvquantLM(bare, EXACT), "lm_eval needs a tokenizer, and this CachedModel has"),
    )


def test_a_text_without_a_context_needs_a_first_token(model: CachedModel) -> None:
    lm = KvquantLM(model, EXACT)
    lm.tokenizer = SimpleNamespace(bos_token_id=None, eos_token_id=3)
    assert lm.prefix_token_id == lm.eot_token_id == 3
    lm.tokenizer.eos_token_id = None
    with pytest.raises(ConfigError, match="neither BOS nor EOS"):
        lm._loglikelihood_tokens([(None, [], [5])], True)


@pytest.mark.parametrize("module", [kvquant.lm_eval.batches, kvquant.lm_eval.model])
def test_examples_of_docstrings_run(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert tried and not failed
