"""Models of which a KVCache holds a part: in a QuantizedCache transformers' own layers follow what
is done with it, and a HybridModel decodes as a CachedModel does."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant import load_cache, save_cache
from kvquant.cache.layer import LayerCache
from kvquant.errors import ConfigError, ShapeError, UnsupportedModelError

transformers = pytest.importorskip("transformers")
from families import CHANGES, LATENT, lines  # noqa: E402
from hf_cases import (  # noqa: E402
    FP16,
    GEMMA3N,
    SHAPE,
    SHARING,
    WITH_LOGITS,
    assert_answers,
    by_kvquant,
    caching,
    hands_latents,
    random_module,
    tiny,
    tokens,
)
from slow_cases import mark_slow  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from kvquant import KVCache  # noqa: E402
from kvquant.calibration.fidelity import Scheme, quantized_copy  # noqa: E402
from kvquant.hf.cache import QuantizedCache  # noqa: E402
from kvquant.hf.hybrid import HybridModel, decoder_of  # noqa: E402
from kvquant.hf.model import CachedModel  # noqa: E402

HYBRID_KIND = "qwen3_next"
HYBRID = CHANGES[HYBRID_KIND] | {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
TOLERANCE = 0.02  # of the logits' deviation


@pytest.fixture(scope="module")
def model() -> Any:
    found = random_module(HYBRID_KIND, HYBRID)
    found.generation_config.eos_token_id = None
    found.set_attn_implementation("kvquant")
    return found


def prompt() -> torch.Tensor:
    return torch.randint(5, 97, (2, 12), generator=torch.Generator().manual_seed(2))


def run(model: Any, cache: Any, text: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(text, **caching(cache), use_cache=True).logits[:, -1]
    return logits


def test_bytes_of_layers_that_transformers_keeps_count(model: Any) -> None:
    cache = QuantizedCache(model)
    assert cache.nbytes == 0
    run(model, cache, prompt())
    state, kv = cache.layers[0], cache.kv
    own = [x for x in tree_leaves(vars(state)) if isinstance(x, torch.Tensor)]
    assert kv is not None and len(own) >= 2
    assert cache.nbytes == kv.nbytes + sum(x.nbytes for x in own)
    assert f"{cache.nbytes:,} bytes on cpu" in repr(cache)


OF_STATES = "LinearAttentionLayer of transformers, as it is 'linear_attention', which keeps other"
NEMOTRON: dict[str, Any] = {
    "head_dim": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "moe", "full_attention", "moe"],
}
DESCRIBED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    HYBRID_KIND: (
        SHAPE | HYBRID,
        {"k_format": "int8"},
        [f"layer 0: {OF_STATES}", "layer 1: K int8, V int4"],
    ),
    "nemotron_h": (
        NEMOTRON,
        {},
        [
            f"layer 0: {OF_STATES}",
            "layer 1: nothing, it has no attention",
            "layer 2: K int8-g4, V int4-g4",
            "layer 3: nothing, it has no attention",
        ],
    ),
    "gemma3n_text": (
        SHAPE | GEMMA3N,
        {"k_format": "int8"},
        ["layer 0: K int8,", "layer 1: K int8,", "layers 2-3: the rows of another layer"],
    ),
    "falcon": (
        {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2},
        {"v_format": "int8", "dequantize": True},
        ["layers 0-1: K int8-g4, V int8, dequantized in each call"],
    ),
}


@pytest.mark.parametrize("kind", DESCRIBED)
def test_each_layer_is_described(kind: str) -> None:
    changes, options, told = DESCRIBED[kind]
    config = transformers.AutoConfig.for_model(kind, **changes)
    found = QuantizedCache(config, **options).describe().splitlines()
    for line, begin in zip(found, told, strict=True):
        assert line.startswith(begin)


def test_layers_may_share_the_keys_of_a_layer_of_transformers() -> None:
    """Layers that see all tokens have rows of a size that no format has."""
    own = tiny("Gemma4Text", **SHARING, global_head_dim=320)
    ids = tokens(2, 25)
    own.model.set_attn_implementation("kvquant")
    cache = QuantizedCache(own.model, **FP16)
    *_, kept, third, last = cache.describe().splitlines()
    assert kept.startswith("layer 1: DynamicLayer of transformers")
    assert third == "layer 2: the rows of another layer"
    assert last == "layer 3: the keys of another layer, of transformers"
    options = {"max_new_tokens": 6, "do_sample": False} | WITH_LOGITS
    assert_answers(own.model, own.model.generate(ids, **caching(cache), **options))
    cache, plain = QuantizedCache(own.model, **FP16), transformers.DynamicCache(config=own.config)
    for text in (ids, ids[:, :1], ids[:, 1:2]):
        got, expected = (run(own.model, one, text) for one in (cache, plain))
        assert float((got - expected).abs().max() / expected.std()) < TOLERANCE


def test_beams_are_those_of_transformers(model: Any) -> None:
    text = prompt()
    mask = torch.ones_like(text)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "num_beams": 2, "max_new_tokens": 5, "do_sample": False}
    given = options | caching(QuantizedCache(model, **FP16)) | WITH_LOGITS
    found = model.generate(text, **given)
    assert_answers(model, found, mask, TOLERANCE * float(found.logits[0].std()))


@pytest.mark.parametrize("is_beside", [False, True], ids=["layers", "beside rows"])
def test_states_follow_sequences(model: Any, is_beside: bool) -> None:
    text = prompt()
    if is_beside:
        model = by_kvquant(random_module("falcon_h1", CHANGES["falcon_h1"]))
    cache = QuantizedCache(model, **FP16)
    run(model, cache, text)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    got = run(model, cache, torch.tensor([[7], [7]]))
    plain = transformers.DynamicCache(config=model.config)
    run(model, plain, text.flip(0))
    wanted = run(model, plain, torch.tensor([[7], [7]]))
    assert float((got - wanted).abs().max() / wanted.std()) < TOLERANCE
    with pytest.raises(ShapeError, match="index has 1 places, the batch 2"):
        cache.reorder_cache(torch.tensor([1]))
    cache.reorder_cache(torch.tensor([1, 0]))
    got = run(model, cache, torch.tensor([[8], [8]]))
    wanted = run(model, plain, torch.tensor([[8], [8]])).flip(0)
    assert float((got - wanted).abs().max() / wanted.std()) < TOLERANCE
    cache.reset()
    for given in (text, text.repeat(3, 1)):  # of more sequences, too
        again = run(model, cache, given)
        wanted = run(model, transformers.DynamicCache(config=model.config), given)
        assert float((again - wanted).abs().max() / wanted.std()) < TOLERANCE
        cache.reset()


def test_a_mask_that_is_refused_leaves_the_states(model: Any) -> None:
    """No layer has run: nothing is torn."""
    cache, text = QuantizedCache(model, **FP16), prompt()
    run(model, cache, text)
    wrong = torch.ones(text.shape[0], text.shape[1] + 2, dtype=torch.int64)
    wrong[:, 0] = 0
    more = torch.tensor([[7, 8], [7, 8]])
    with pytest.raises(ConfigError, match="attention_mask shows"):
        model(more, attention_mask=wrong, **caching(cache))
    assert not cache.call.is_open
    plain = transformers.DynamicCache(config=model.config)
    run(model, plain, text)
    got, wanted = (run(model, one, more) for one in (cache, plain))
    assert float((got - wanted).abs().max() / wanted.std()) < TOLERANCE


def test_a_state_cannot_be_cropped_as_in_transformers(model: Any) -> None:
    cache = QuantizedCache(model, **FP16)
    run(model, cache, prompt())
    with pytest.raises(RuntimeError, match="does not track past states"):
        cache.crop(-2)
    assert cache.kv is not None and cache.kv.seq_lens.tolist() == [12, 12]


def test_a_call_that_fails_leaves_states_that_only_reset_can_clear(model: Any) -> None:
    cache = QuantizedCache(model, **FP16)
    run(model, cache, prompt())
    with pytest.raises(ShapeError, match=r"layer 1 of the model came, .* waits for none of"):
        cache.update(*torch.zeros(2, 2, 2, 1, 64), 1)  # outside a call
    with pytest.raises(ShapeError, match=r"reset\(\) the cache"):
        run(model, cache, torch.tensor([[7], [7]]))
    cache.reset()
    assert run(model, cache, prompt()).isfinite().all()


def test_states_are_cropped_only_where_rows_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a window refuse, of which the states could not be put back."""
    lfm2 = random_module("lfm2", {"layer_types": ["conv", "full_attention"]})
    if lfm2._is_stateful:
        pytest.skip("older transformers drafts for no hybrid")
    lfm2.set_attn_implementation("kvquant")
    caches = [QuantizedCache(lfm2, **FP16) for _ in range(2)]
    for cache in caches:
        run(lfm2, cache, prompt())
        cache.activate_past_recording()
        run(lfm2, cache, prompt()[:, :3])

    def refuse(*_: Any) -> None:
        raise ShapeError("windows are overwritten")

    with monkeypatch.context() as patch:
        patch.setattr(LayerCache, "check_crop", refuse)
        with pytest.raises(ShapeError, match="overwritten"):
            caches[0].crop(-2)
    found = [run(lfm2, cache, torch.tensor([[7], [8]])) for cache in caches]
    assert torch.equal(*found) and caches[0].get_seq_length() == 16


@pytest.mark.parametrize("kind", [HYBRID_KIND, "lfm2", "llama4_text", "falcon_h1"])
def test_a_hybrid_cannot_go_on_from_a_file(kind: str, tmp_path: Path) -> None:
    own = by_kvquant(random_module(kind, CHANGES[kind] | (HYBRID if kind == HYBRID_KIND else {})))
    cache, path = QuantizedCache(own), tmp_path / "cache.safetensors"
    if kind == "falcon_h1":
        told = "layers 0-1: K int8-g4, V int4-g4, beside a state of transformers"
        assert cache.describe() == told and not cache.is_compileable
    run(own, cache, prompt())
    with pytest.raises(ConfigError, match=r"QuantizedCache: give a KVCache, of a Quan.* its kv"):
        save_cache(cache, path)  # type: ignore[arg-type]
    assert cache.kv is not None
    save_cache(cache.kv, path)
    loaded = QuantizedCache(load_cache(path))
    with pytest.raises(UnsupportedModelError, match=r"layer 0 .*no file has \w+: read the text"):
        run(own, loaded, torch.tensor([[7], [7]]))
    assert loaded.kv is not None and loaded.kv.seq_lens.tolist() == [12, 12]


PROMPT, STEPS = 30, 6
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


@pytest.mark.parametrize("kind", ["mamba", "deepseek_v32", "minimax"])
def test_other_models_are_refused_with_reasons(kind: str) -> None:
    message = {
        "mamba": "no layer of this mamba model attends",
        "deepseek_v32": r"no layer of this deepseek_v32 model: layer 0 is '\w+_attention'",
        "minimax": "minimax models of transformers refuse it: MiniMax uses cache of its own",
    }[kind]
    module = random_module(kind, {})
    with pytest.raises(UnsupportedModelError, match=rf"(?s){message}.*Take a model of a family"):
        decoder_of(module)
