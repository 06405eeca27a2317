"""QuantizedCache(dequantize=True): packed rows for attention that is not "kvquant" (8 s)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant import load_cache, save_cache
from kvquant.errors import ConfigError, ShapeError, UnsupportedError, UnsupportedModelError

transformers = pytest.importorskip("transformers")
from hf_cases import (  # noqa: E402
    FP16,
    GREEDY,
    TOLERANCE,
    WITH_LOGITS,
    assert_answers,
    caching,
    random_module,
    tiny,
    tokens,
)

from kvquant.hf.cache import QuantizedCache  # noqa: E402

OPTIONS = GREEDY | {"max_new_tokens": 6}


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("Llama").model


@pytest.fixture(scope="module")
def falcon() -> Any:
    return random_module("falcon", {})


def logits(model: Any, past: Any, *parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(part, **caching(past)).logits for part in parts], dim=1)


@pytest.mark.parametrize("row_format", ["int4-g4", "int8"])
@pytest.mark.parametrize("recent_len", [0, 8])
def test_it_reads_what_the_fused_call_reads(llama: Any, row_format: str, recent_len: int) -> None:
    text, found = tokens(2, 60), []
    drafted = 4 if recent_len == 0 else 1
    parts = text[:, :30], text[:, 30:50], *text[:, 50:].split(drafted, dim=1)
    for name, dequantize in (("kvquant", False), ("sdpa", True), ("kvquant", True)):
        llama.set_attn_implementation(name)
        rows: dict[str, Any] = {"recent_len": recent_len, "dequantize": dequantize}
        past = QuantizedCache(llama, k_format=row_format, v_format=row_format, **rows)
        found.append(logits(llama, past, *parts))
        assert past.kv is not None and past.kv.seq_lens.tolist() == [60, 60]
        past.check()
    torch.testing.assert_close(found[1], found[0], atol=2e-3, rtol=0)
    torch.testing.assert_close(found[2], found[1], atol=1e-4, rtol=0)
    llama.set_attn_implementation("sdpa")
    exact = logits(llama, transformers.DynamicCache(), *parts)
    assert float((found[1] - exact).abs().max()) > 0.02  # the rows are quantized


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 5}], ids=str)
@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_padding_and_windows_are_those_of_the_models_own_mask(
    name: str, options: dict[str, Any]
) -> None:
    model, text = tiny("Mistral", sliding_window=12).model, tokens(3, 20)
    mask = torch.ones_like(text)
    mask[0, :9], mask[2, :4] = 0, 0
    model.set_attn_implementation(name)
    past = QuantizedCache(model, **FP16, dequantize=True)
    given = OPTIONS | options | past.argument | WITH_LOGITS
    assert_answers(model, model.generate(text, attention_mask=mask, **given), mask)
    assert past.kv is not None and set(past.kv.seq_lens.tolist()) == {25}  # padding among them
    assert past.kv.windows == [None, None] and not past.is_compileable


def test_drafts_and_crops(falcon: Any) -> None:
    text = torch.randint(5, 97, (1, 6), generator=torch.Generator().manual_seed(3)).repeat(1, 4)
    past = QuantizedCache(falcon, **FP16, dequantize=True)
    given = OPTIONS | past.argument | WITH_LOGITS
    found = assert_answers(falcon, falcon.generate(text, **given, prompt_lookup_num_tokens=4))
    assert past.get_seq_length() == found.shape[1] - 1
    past.crop(-5)
    assert_answers(falcon, falcon.generate(found[:, :-5], **given))


def test_it_goes_on_from_a_file(falcon: Any, tmp_path: Path) -> None:
    text, path = tokens(2, 20) % 97, tmp_path / "cache.safetensors"
    past = QuantizedCache(falcon, k_format="int8", dequantize=True)
    logits(falcon, past, text)
    assert past.kv is not None
    save_cache(past.kv, path)
    again = QuantizedCache(load_cache(path), dequantize=True)
    found = [logits(falcon, one, text[:, :1], text[:, 3:4]) for one in (past, again)]
    assert torch.equal(*found)


def test_it_is_asked_for(falcon: Any) -> None:
    message = r"FalconForCausalLM computes attention by itself.*: QuantizedCache\(model, dequant"
    with pytest.raises(UnsupportedModelError, match=message):
        QuantizedCache(falcon)
    with pytest.raises(UnsupportedModelError, match=r"did not attend .*model, dequantize=True\)"):
        logits(falcon, QuantizedCache(falcon.config, **FP16), tokens(1, 4) % 97)
    with pytest.raises(ConfigError, match="dequantize is 'yes': use True or False"):
        QuantizedCache(falcon, dequantize="yes")  # type: ignore[arg-type]


def test_caches_that_miss_columns_are_refused() -> None:
    own = tiny("Mistral", sliding_window=8)
    with pytest.raises(
        ConfigError, match="the last 8 tokens of a layer, and dequantize=True needs"
    ):
        QuantizedCache(own.new_cache(1, 20), dequantize=True)
    plain = tiny("Llama")
    cache = plain.new_cache(2, 20)
    plain.prefill(cache, tokens(2, 9), [9, 5])
    with pytest.raises(ConfigError, match=r"holds \[9, 5\] tokens, and with dequantize=True all"):
        QuantizedCache(cache, dequantize=True)


def test_a_text_that_is_given_anew_is_refused(llama: Any) -> None:
    llama.set_attn_implementation("sdpa")
    past = QuantizedCache(llama, dequantize=True)
    with pytest.raises(ConfigError, match="use_cache=False came beside a cache"):
        llama.generate(tokens(2, 9), **past.argument, **OPTIONS, use_cache=False)
    assert past.kv is None
    for kind in ("falcon", "bloom"):  # BLOOM is given no positions, and a mask with padding only
        own, text = random_module(kind, {}), tokens(2, 9) % 90
        past = QuantizedCache(own, dequantize=True)
        with pytest.raises(ConfigError, match="use_cache=False came beside a cache"):
            own.generate(text, **past.argument, **OPTIONS, use_cache=False)
        assert past.kv is None
        past = QuantizedCache(own, dequantize=True)
        logits(own, past, text)
        mask = torch.ones_like(text)
        with pytest.raises(ConfigError, match="a text is read from its beginning"):
            own(text, attention_mask=mask, **past.argument)
    model = random_module("mpt", {})
    past = QuantizedCache(model, dequantize=True)
    with pytest.raises(ConfigError, match=r"use_cache=False came .*config.use_cache = True"):
        model.generate(tokens(1, 9) % 90, **past.argument, **OPTIONS)
    assert past.kv is None


def test_a_prompt_is_read_in_chunks_of_padding(falcon: Any) -> None:
    """The first chunk has a token at most, and all its positions are those of padding."""
    text, mask = tokens(1, 16) % 90, (torch.arange(16) >= 7).long()[None]
    past = QuantizedCache(falcon, **FP16, dequantize=True)
    given = {"attention_mask": mask, "prefill_chunk_size": 8} | OPTIONS | past.argument
    assert_answers(falcon, falcon.generate(text, **given, **WITH_LOGITS), mask)


def test_a_call_that_fails_is_taken_back(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llama.set_attn_implementation("sdpa")
    text, past = tokens(2, 12), QuantizedCache(llama, **FP16, dequantize=True, max_seq_len=12)
    wanted = logits(llama, QuantizedCache(llama, **FP16, dequantize=True), text[:, :9], text[:, 9:])
    before = logits(llama, past, text[:, :9])
    with pytest.raises(ShapeError):
        logits(llama, past, text)
    with monkeypatch.context() as patch:
        patch.setattr(llama.model.layers[1].mlp, "forward", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # behind all appends: the last layer's stay
            logits(llama, past, text[:, 9:])
    past.crop(-3)
    after = logits(llama, past, text[:, 9:])
    torch.testing.assert_close(torch.cat([before, after], dim=1), wanted, atol=TOLERANCE, rtol=0)


@torch.enable_grad()
def test_no_gradient_flows_through_rows(llama: Any) -> None:
    llama.set_attn_implementation("sdpa")
    past = QuantizedCache(llama, **FP16, dequantize=True)
    logits(llama, past, tokens(1, 6))
    loss = llama(tokens(1, 1), **past.argument).logits.sum()
    with pytest.raises(UnsupportedError, match="no gradient flows through the rows"):
        loss.backward()


def test_attention_weights_are_given(llama: Any) -> None:
    llama.set_attn_implementation("eager")
    past, text = QuantizedCache(llama, **FP16, dequantize=True), tokens(1, 10)
    logits(llama, past, text[:, :6])
    found = llama(text[:, 6:], **past.argument, output_attentions=True).attentions
    wanted = llama(text, use_cache=False, output_attentions=True).attentions
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other[:, :, 6:], atol=1e-3, rtol=0)
