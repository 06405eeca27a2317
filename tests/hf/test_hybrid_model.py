"""HybridModel: models of which a KVCache holds a part, in the form of a CachedModel."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from families import CHANGES, LATENT, lines  # noqa: E402
from hf_cases import caching, hands_latents, random_module, tiny  # noqa: E402
from slow_cases import mark_slow  # noqa: E402

from kvquant import KVCache, UnsupportedModelError  # noqa: E402
from kvquant.calibration.fidelity import Scheme, quantized_copy  # noqa: E402
from kvquant.errors import ConfigError, ShapeError  # noqa: E402
from kvquant.hf.hybrid import HybridModel, decoder_of  # noqa: E402
from kvquant.hf.model import CachedModel  # noqa: E402

PROMPT, STEPS = 30, 6
TOLERANCE = 0.02  # of the logits' deviation, as in test_families_table.py
# of the table in kvquant/hf/README.md, those that a KVCache alone does not serve
KINDS = [kind for kind, cells in lines().items() if "`" in cells[0]] + ["falcon_h1", "zaya"]
USUAL = ["qwen3_next", "jamba", "falcon_h1", "falcon", "mimo_v2_flash"]


def text() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, 97, (2, PROMPT + STEPS), generator=generator)


def model_of(kind: str, **changes: Any) -> HybridModel:
    if kind in LATENT and not hands_latents:
        pytest.skip("needs transformers 5.17, which hands a cache latents")
    found = decoder_of(random_module(kind, CHANGES.get(kind, {}) | changes), exact_format="fp16")
    assert isinstance(found, HybridModel)
    return found


def cache_of(model: HybridModel, name: str = "fp16") -> KVCache:
    rows: Any = {"fmt": f"{name}+fp16"} if model.has_latents else {"k_format": name}
    rows |= {} if model.has_latents else {"v_format": name}
    return model.new_cache(2, 64, sink_len=0, recent_len=0, **rows)


def decoded(model: HybridModel, cache: KVCache) -> torch.Tensor:
    """[steps, batch, vocabulary]: the logits behind the prompt."""
    step = model.stepper(cache, STEPS)
    return torch.stack([step(column) for column in text()[:, PROMPT:].unbind(1)])


@torch.no_grad()
def wanted(model: HybridModel) -> torch.Tensor:
    """[1 + steps, batch, vocabulary]: by transformers' own cache."""
    inner = model.model
    inner.set_attn_implementation("eager")
    cache, found = transformers.DynamicCache(config=inner.config), []
    for part in [slice(0, PROMPT), *(slice(at, at + 1) for at in range(PROMPT, PROMPT + STEPS))]:
        found.append(inner(text()[:, part], **caching(cache), use_cache=True).logits[:, -1])
    return torch.stack(found)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # transformers' own
@pytest.mark.parametrize("kind", mark_slow(KINDS, USUAL))
def test_a_model_decodes_as_with_the_cache_of_transformers(kind: str) -> None:
    """In chunks, too; and once more from the end of the prompt, and from a copy of its rows."""
    model = model_of(kind)
    expected = wanted(model)
    deviation = float(expected.std())
    for chunk in (None, None if kind == "jamba" else 16):
        cache = cache_of(model)
        logits = model.prefill(cache, text()[:, :PROMPT], chunk=chunk)
        first = decoded(model, cache)
        found = torch.cat([logits[None], first])
        assert float((found - expected).abs().max()) / deviation < TOLERANCE
    cache.crop(PROMPT)
    assert torch.equal(decoded(model, cache), first)
    cache.crop(PROMPT)
    copy = quantized_copy(model, cache, Scheme("fp16", "fp16"))
    model.copy_states(cache, copy)
    assert torch.equal(decoded(model, copy), first)
    assert torch.equal(decoded(model, cache), first)  # which the copy has not moved
    cache.crop(PROMPT)
    coarse = Scheme("int4-g4", "fp16" if model.has_latents else "int4-g4")
    copy = quantized_copy(model, cache, coarse)
    model.copy_states(cache, copy)
    distance = float((decoded(model, copy) - first).abs().max())
    assert distance > 1e-4 * deviation


def test_states_are_known_behind_the_prompt_only() -> None:
    model = model_of("lfm2")
    cache = cache_of(model)
    with pytest.raises(ConfigError, match="the prompt has no tokens"):
        model.copy_states(cache, cache_of(model))
    model.prefill(cache, text()[:, :PROMPT])
    decoded(model, cache)
    cache.crop(PROMPT + 2)
    with pytest.raises(ConfigError, match=rf"holds 32 tokens.* known behind {PROMPT} \(the prompt"):
        decoded(model, cache)
    with pytest.raises(ConfigError, match=r"the prompt has 30 tokens, the copy \[32, 32\]"):
        model.copy_states(cache, cache)
    other = quantized_copy(model, cache, Scheme("fp16", "fp16"))
    with pytest.raises(ConfigError, match="states are known behind no"):
        decoded(model, other)


def test_states_go_with_their_cache() -> None:
    model = model_of("lfm2")
    cache = cache_of(model)
    model.prefill(cache, text()[:, :PROMPT])
    layers = [weakref.ref(layer) for layer in model._now[cache].layers]
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None and all(layer() is None for layer in layers)


def test_sequences_have_one_length() -> None:
    model = model_of("lfm2")
    with pytest.raises(ShapeError, match="reads sequences of one length"):
        model.prefill(cache_of(model), text()[:, :PROMPT], [PROMPT, PROMPT - 1])
    caches = cache_of(model), cache_of(model)
    padded = model.prefill(caches[0], text()[:, : PROMPT + 2], [PROMPT, PROMPT])
    torch.testing.assert_close(padded, model.prefill(caches[1], text()[:, :PROMPT]))
    assert torch.equal(model.step(caches[0], text()[:, -1]), model.step(caches[1], text()[:, -1]))


def test_jamba_is_read_in_one_call() -> None:
    """In chunks transformers' own code gives other logits."""
    model = model_of("jamba")
    with pytest.raises(UnsupportedModelError, match="jamba models of transformers forget"):
        model.prefill(cache_of(model), text()[:, :PROMPT], chunk=16)


def test_keys_and_values_of_transformers_are_shared_by_copies() -> None:
    model = model_of("mimo_v2_flash")
    cache = cache_of(model)
    model.prefill(cache, text()[:, :PROMPT])
    copy = quantized_copy(model, cache, Scheme("int8", "int8"))
    model.copy_states(cache, copy)
    one, other = (model._now[at].layers[1] for at in (cache, copy))
    assert one is not other and one.keys.data_ptr() == other.keys.data_ptr()


def test_the_first_form_that_serves_a_model_is_taken() -> None:
    assert type(decoder_of(tiny("Llama").model)) is CachedModel
    falcon, jamba = model_of("falcon"), model_of("jamba")
    assert falcon.dequantizes and not falcon.layers.others
    assert not jamba.dequantizes and list(jamba.layers.others) == [0, 2]
    # it attends to other values than it caches, which the first call shows
    assert model_of("diffllama").dequantizes


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mamba", "no layer of this mamba model attends"),
        ("deepseek_v32", r"holds no layer of this deepseek_v32 model: layer 0 is '\w+_attention'"),
        ("minimax", "minimax models of transformers refuse it: MiniMax uses cache of its own"),
    ],
)
def test_other_models_are_refused_with_reasons(kind: str, message: str) -> None:
    module = random_module(kind, {})
    with pytest.raises(UnsupportedModelError, match=rf"(?s){message}.*Take a model of a family"):
        decoder_of(module)
