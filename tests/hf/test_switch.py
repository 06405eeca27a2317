"""The user's model is as it was after a call, whatever the call did; Ctrl-C at any line of a call
leaves a cache that holds what it says (4 s)."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from threads import run_in_threads

from kvquant.errors import ConfigError, NonFiniteError, UnsupportedModelError

transformers = pytest.importorskip("transformers")
from hf_cases import FP16, TOLERANCE, by_kvquant, caching, tiny, tokens  # noqa: E402
from interrupts import interrupted  # noqa: E402
from slow_cases import mark_slow  # noqa: E402

from kvquant.errors import KVQuantError  # noqa: E402
from kvquant.hf import attention, cache, call, continuation, masks, switch  # noqa: E402
from kvquant.hf.cache import QuantizedCache  # noqa: E402
from kvquant.hf.model import CachedModel  # noqa: E402
from kvquant.hf.single_pass import Passages  # noqa: E402
from kvquant.hf.switch import attending  # noqa: E402


def passed(model: CachedModel, text: torch.Tensor, *, keeps_context: bool) -> torch.Tensor:
    passages = Passages(model.model, text, 4, torch.float16, keeps_context=keeps_context)
    return passages.predict(lambda layer, k, v: (k, v), (1, 2))


CALLS: dict[str, Any] = {
    "prefill": lambda model, text: model.prefill(model.new_cache(1, 16), text),
    "step": lambda model, text: model.step(model.new_cache(1, 16), text[:, 0]),
    "plain": lambda model, text: model.plain(text),
    "observe": lambda model, text: model.observe(text, lambda *shown: None),
    "projections": lambda model, text: model.output_weights(),
    "one pass": lambda model, text: passed(model, text, keeps_context=False),
    "one pass behind a kept context": lambda model, text: passed(model, text, keeps_context=True),
}


def state(model: Any) -> Any:
    return model.config._attn_implementation, [module.training for module in model.modules()]


@pytest.fixture(scope="module")
def model() -> CachedModel:
    return tiny("Llama")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "kvquant"])
@pytest.mark.parametrize("is_training", [False, True], ids=["eval", "training"])
def test_a_model_is_as_before_after_a_call(
    call: str, implementation: str, is_training: bool, model: CachedModel
) -> None:
    model.model.set_attn_implementation(implementation)
    model.model.train(is_training)
    model.model.lm_head.eval()  # not all parts alike
    before, inside = state(model.model), []

    def note(*_: Any) -> None:
        inside.append(state(model.model))

    hook = model.model.lm_head.register_forward_pre_hook(note)
    try:
        CALLS[call](model, tokens(1, 8))
    finally:
        hook.remove()
    assert state(model.model) == before
    assert all(not any(modules) for _, modules in inside) and inside


def test_a_call_that_raises_leaves_the_model_as_it_was_too() -> None:
    model = tiny("Llama")
    model.model.train()
    before = state(model.model)
    with torch.no_grad():
        model.model.model.layers[1].self_attn.v_proj.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        model.prefill(model.new_cache(1, 16), tokens(1, 8))
    assert state(model.model) == before
    with (
        pytest.raises(UnsupportedModelError, match="attention by itself"),
        attending(tiny_bloom(), "kvquant"),
    ):
        pass


def tiny_bloom() -> Any:
    config = transformers.BloomConfig(vocab_size=16, hidden_size=32, n_layer=1, n_head=2)
    return transformers.BloomForCausalLM(config)


def test_parts_keep_implementations_of_their_own() -> None:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        ),
        text_config=tiny("Llama").config,
        image_token_index=255,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    cached = CachedModel(model)
    for _ in range(2):
        cached.prefill(cached.new_cache(1, 16), tokens(1, 8) % 200)
        parts = config.text_config, config.vision_config
        assert [part._attn_implementation for part in parts] == ["sdpa", "eager"]


def test_modules_are_searched_for_configs_once(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = model.new_cache(1, 16)
    model.step(cache, tokens(1))
    monkeypatch.setattr(type(model.model), "set_attn_implementation", None)  # it looks at them all
    monkeypatch.setattr(switch, "_Switch", None)
    model.step(cache, tokens(1))


def test_a_call_inside_one_of_another_kind_is_refused(model: CachedModel) -> None:
    cache = model.new_cache(1, 16)

    def observer(*_: Any) -> None:
        model.plain(tokens(1, 4))

    with pytest.raises(ConfigError, match="runs with attention 'kvquant-observed' around this"):
        model.observe(tokens(1, 4), observer)
    model.prefill(cache, tokens(1, 4))


def test_threads_of_one_kind_share_a_model_and_others_wait(model: CachedModel) -> None:
    model.model.set_attn_implementation("eager")
    inside, leave, order = threading.Barrier(3), threading.Event(), []

    def run(implementation: str, together: bool) -> None:
        with attending(model.model, implementation):
            order.append(model.model.config._attn_implementation)
            if together:
                inside.wait(60)
                leave.wait(60)

    alike = [threading.Thread(target=run, args=("kvquant", True)) for _ in range(2)]
    other = threading.Thread(target=run, args=("sdpa", False))
    for thread in alike:
        thread.start()
    inside.wait(60)  # both are inside
    other.start()
    leave.set()
    for thread in (*alike, other):
        thread.join(60)
    assert order == ["kvquant", "kvquant", "sdpa"]
    assert model.model.config._attn_implementation == "eager"


def test_threads_decode_from_caches_of_their_own(model: CachedModel) -> None:
    model.model.set_attn_implementation("sdpa")
    text, found = tokens(4, 12), {}

    def run(row: int) -> None:
        cache = model.new_cache(1, 32, **FP16)
        logits = model.prefill(cache, text[row : row + 1], chunk=5)
        plain = model.plain(text[row : row + 1])
        found[row] = model.generate(cache, logits, 6), plain

    run(0)  # compiled
    expected = {}
    for row in range(4):
        run(row)
    expected, found = found, {}
    run_in_threads(run, range(4))
    for row in range(4):
        assert torch.equal(found[row][0], expected[row][0])
        torch.testing.assert_close(found[row][1], expected[row][1])


def test_a_model_is_not_kept() -> None:
    model = tiny("Llama").model
    with attending(model, "kvquant"):
        pass
    gone = weakref.ref(model)
    assert model in switch._switches and copy.deepcopy(model) not in switch._switches
    del model
    gc.collect()
    assert gone() is None


COUNTS = {str(one.__file__) for one in (call, cache)}
ALL = COUNTS | {str(one.__file__) for one in (attention, continuation, masks)}


CASES = [("counts", 1, 2), ("counts", 5, 2), ("all", 1, 2), ("all", 5, 2), ("all", 1, 1)]


@torch.no_grad()
@pytest.mark.parametrize("case", mark_slow(CASES, CASES[:1]), ids=str)
def test_a_text_goes_on_behind_an_interrupt_at_any_line(case: tuple[str, int, int]) -> None:
    files, new, layers = case
    model = by_kvquant(tiny("Llama", num_hidden_layers=layers).model)
    ids, number = tokens(2, 15), 0
    wanted = model(ids, use_cache=False).logits

    def read(past: QuantizedCache, first: int, end: int) -> None:
        found = model(ids[:, first:end], **caching(past)).logits
        torch.testing.assert_close(found, wanted[:, first:end], atol=TOLERANCE, rtol=0)

    while True:
        past, number = QuantizedCache(model, **FP16), number + 1
        read(past, 0, 8)
        call = partial(model, ids[:, 8 : 8 + new], **caching(past))
        if not interrupted(call, COUNTS if files == "counts" else ALL, number):
            break
        with suppress(KVQuantError):  # told once, if there is something to take back
            read(past, past.get_seq_length(), 14)
        held = past.get_seq_length()
        assert held in (8, 8 + new, 14)
        read(past, held, 15)
        past.check()
        assert past.kv is not None and past.kv.seq_lens.tolist() == [15, 15]
    assert number > 100
