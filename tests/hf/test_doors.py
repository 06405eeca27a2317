"""What a newcomer mixes up: told by the first call that can know it, with what to do (6 s)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from hf_cases import FP16, TOLERANCE, by_kvquant, random_module, tiny, tokens  # noqa: E402
from refusals import assert_refused  # noqa: E402

from kvquant import CachedModel, QuantizedCache, save_cache  # noqa: E402
from kvquant.errors import ConfigError, UnsupportedModelError  # noqa: E402

BUNDLED = Path(__file__).parents[2] / "examples" / "llama-demo-5m"
TEXTS = ["The city of Manila was founded", "Nero"]


@pytest.fixture(scope="module")
def llama() -> CachedModel:
    return tiny("Llama")


# A cache that holds tokens


@pytest.mark.parametrize("dequantize", [False, True], ids=["", "dequantize"])
@pytest.mark.parametrize("text", ["Nero", TEXTS[0]])
def test_the_next_text_of_a_pipeline_is_told_as_another_one(text: str, dequantize: bool) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED)
    model.set_attn_implementation("kvquant")
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED, padding_side="left")
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 3, "do_sample": False}
    cache = QuantizedCache(model, dequantize=dequantize)
    with pytest.raises(ConfigError, match=r"(holds|of) 9.*\. A cache belongs to one.*len\(texts\)"):
        pipe([TEXTS[0], text], **cache.argument, **options)
    assert cache.get_seq_length() == 9
    if not dequantize:  # what the message says
        batch = QuantizedCache(model)
        assert len(pipe([TEXTS[0], text], **batch.argument, **options, batch_size=2)) == 2
        cache.reset()
        found = pipe(text, **cache.argument, **options)
        assert found == pipe(text, **QuantizedCache(model).argument, **options)


@pytest.mark.parametrize(("kind", "length"), [("llama", 10), ("falcon", 9), ("falcon", 10)])
def test_a_shorter_text_is_told(kind: str, length: int) -> None:
    """Of 6 tokens behind 11 generate gives the model one, as in a step."""
    options, text = {"do_sample": False, "max_new_tokens": 3}, torch.arange(5, 5 + length)[None]
    model = by_kvquant(tiny("Llama").model) if kind == "llama" else random_module(kind, {})
    cache = QuantizedCache(model, dequantize=kind == "falcon")
    model.generate(text, **cache.argument, **options)
    held = length + 2
    for count in (length, 4, 6):
        # before transformers 5.24 other ids come, which contradict the mask
        with pytest.raises(ConfigError, match=rf"(the cache holds {held}|of {held} in the cache)"):
            model.generate(text[:, :count], **cache.argument, **options)
        assert cache.get_seq_length() == held


# Models


def made(kind: str, head: str, **sizes: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}{head}")(config).eval()


SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 128, "num_hidden_layers": 2}
HEADS = SMALL | {"num_attention_heads": 2, "intermediate_size": 64}
T5: dict[str, Any] = {"vocab_size": 97, "d_model": 128, "d_kv": 64, "num_heads": 2, "num_layers": 1}
EYES: dict[str, Any] = HEADS | {"image_size": 32, "patch_size": 16}
NOT_SERVED: dict[str, tuple[Callable[[], Any], str]] = {
    "mamba": (
        lambda: made("Mamba", "ForCausalLM", **SMALL),
        "no layer of this mamba model attends",
    ),
    "rwkv": (
        lambda: made("Rwkv", "ForCausalLM", **SMALL, attention_hidden_size=128),
        "this rwkv model has no attention heads",
    ),
    "t5": (
        lambda: made("T5", "ForConditionalGeneration", **T5),
        "t5 models have an encoder before the decoder",
    ),
    "t5 encoder": (lambda: made("T5", "EncoderModel", **T5), "T5EncoderModel attends in both"),
    "bert": (lambda: made("Bert", "ForMaskedLM", **HEADS), "BertForMaskedLM attends in both"),
    "bert with a head": (
        lambda: made("Bert", "LMHeadModel", **HEADS),
        r"BertLMHeadModel attends in both .* \(as a decoder it is loaded with is_decoder=True\)",
    ),
    "vit": (lambda: made("ViT", "Model", **EYES), "ViTModel attends in both directions"),
    "xlnet": (
        lambda: made("XLNet", "LMHeadModel", vocab_size=97, d_model=128, n_layer=1, n_head=2),
        "no part of XLNetLMHeadModel takes a cache",
    ),
}


@pytest.mark.parametrize("kind", NOT_SERVED)
def test_models_that_cannot_be_served_are_told_when_an_object_is_made_of_them(kind: str) -> None:
    make, message = NOT_SERVED[kind]
    model = make()
    if kind == "t5 encoder" and not any(hasattr(one, "is_causal") for one in model.modules()):
        pytest.skip("T5's attention of older transformers does not say that it is not causal")
    makers: list[Callable[[], Any]] = [
        lambda: CachedModel(model),
        lambda: QuantizedCache(model),  # before it is set to "kvquant"
        lambda: QuantizedCache(model, dequantize=True),
    ]
    for maker in makers:
        with pytest.raises(UnsupportedModelError, match=f"{message}.*: kvquant serves decoders"):
            maker()


def test_models_that_cached_model_alone_cannot_serve_are_told_by_it() -> None:
    trunk = tiny("Llama").model.model
    with pytest.raises(UnsupportedModelError, match="LlamaModel predicts no next token: load it"):
        CachedModel(trunk)
    trunk.set_attn_implementation("kvquant")
    cache = QuantizedCache(trunk)
    trunk(tokens(1, 5), **cache.argument)
    assert cache.get_seq_length() == 5
    with pytest.raises(UnsupportedModelError, match=r"attention by itself.*model, dequantize=True"):
        CachedModel(random_module("falcon", {}))


def test_an_encoder_that_is_loaded_as_a_decoder_is_served() -> None:
    model = CachedModel(made("Bert", "LMHeadModel", **HEADS, is_decoder=True))
    text, cache = tokens(2, 12) % 97, model.new_cache(2, 32, **FP16)
    found = model.prefill(cache, text, [12, 5])
    torch.testing.assert_close(found[:1], model.plain(text[:1]), atol=TOLERANCE, rtol=0)


# Names that transformers has as well


def test_arguments_of_the_other_quantized_cache_are_told(llama: CachedModel) -> None:
    config: Any = llama.model.config
    ours: Any = QuantizedCache
    message = "came as to transformers' QuantizedCache, and this is kvquant's: .*from transformers"
    assert_refused(
        ConfigError,
        (
            lambda: ours(backend="quanto", config=config, nbits=4),
            f"d and config and nbits {message}",
        ),
        (lambda: ours("quanto", config), f"2 arguments without a name {message}"),
        (lambda: ours(config, q_group_size=64), f"q_group_size {message}"),
        (ours, "source is NoneType: give a model of transformers, its"),
    )
    with pytest.raises(TypeError, match="unexpected keyword argument 'k_fromat'"):
        ours(config, k_fromat="int8")


def test_caches_of_transformers_in_place_of_ours_are_named(
    llama: CachedModel, tmp_path: Path
) -> None:
    theirs, ours = transformers.DynamicCache(), QuantizedCache(llama.model.config)
    named = r"of type transformers\.DynamicCache: .*\(from kvquant import Quanti"
    assert_refused(
        ConfigError,
        (lambda: llama.prefill(theirs, tokens(1, 4)), named),
        (lambda: llama.step(theirs, tokens(1)), named),
        (lambda: llama.stepper(theirs, 1), named),
        (lambda: llama.generate(theirs, torch.zeros(1, 256), 2), named),
        (lambda: save_cache(theirs, tmp_path / "cache.safetensors"), named),
        (lambda: QuantizedCache(theirs), r"source is transformers\.DynamicCache: give a model"),
        (lambda: QuantizedCache(ours), "source is a QuantizedCache: give its kv"),
        (lambda: llama.plain(tokens(1, 4), ours), r"past is of type .*: give a cache of trans"),
        (lambda: llama.plain(tokens(1, 4), llama.new_cache(1, 8)), "past is of type .*: give a c"),
    )


def test_prefill_goes_on_where_it_is_told_to(llama: CachedModel) -> None:
    text, cache, whole = tokens(2, 40), *(llama.new_cache(2, 64, **FP16) for _ in range(2))
    for start, end in ((0, 17), (17, 18), (18, 40)):  # the first part too, of a cache still empty
        given = llama.prefill(cache, text[:, start:end], append=True)
    torch.testing.assert_close(given, llama.prefill(whole, text), atol=TOLERANCE, rtol=0)
    assert cache.seq_lens.tolist() == [40, 40]


def test_one_line_makes_the_attention_known_to_transformers() -> None:
    code = f"""
from kvquant import QuantizedCache
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained({str(BUNDLED)!r}, attn_implementation="kvquant")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
