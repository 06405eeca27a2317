"""How a QuantizedCache is made for what comes, grows, what it reads in a step, by which argument
models take it, and what generate and pipelines do with it (8 s)."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from example_plan import example_plan

from kvquant import KVCache, debug, load_cache, save_cache
from kvquant.errors import (
    CheckpointError,
    ConfigError,
    ShapeError,
    UnsupportedError,
    UnsupportedModelError,
)

transformers = pytest.importorskip("transformers")
from hf_cases import FP16, WITH_LOGITS, by_kvquant, caching, sure_text, tiny, tokens  # noqa: E402
from refusals import assert_refused  # noqa: E402
from torch_operations import Operations  # noqa: E402

from kvquant.hf.argument import ARGUMENT, as_argument  # noqa: E402
from kvquant.hf.cache import DRAFTS, SPACE, QuantizedCache  # noqa: E402
from kvquant.hf.model import CachedModel  # noqa: E402

OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": 999}


@pytest.fixture
def own() -> CachedModel:
    made = by_kvquant(tiny("Llama"))
    return made


def test_a_cache_is_made_for_the_sequences_and_the_dtype_that_come(own: CachedModel) -> None:
    past = QuantizedCache(own.model, k_format="int8", sink_len=2, recent_len=9)
    assert past.kv is None and past.batch_size == -1 and not past.is_initialized
    assert [past.get_seq_length(), past.get_max_length()] == [0, -1]
    past.check()
    past.crop(-3)
    own.model.generate(tokens(2, 10), **caching(past), num_beams=3, **OPTIONS)
    kv = past.kv
    assert kv is not None and past.is_initialized and past.batch_size == kv.batch == 6
    same = own.new_cache(6, kv.max_seq_len, k_format="int8", sink_len=2, recent_len=9)
    assert repr(kv) == repr(same) and kv.exact_format == "bf16"
    past.reset()  # another batch, and the memory of the same one stays
    own.model.generate(tokens(6, 10), **caching(past), **OPTIONS)
    assert past.kv is kv
    past.reset()
    answers = {"num_return_sequences": 2, "do_sample": True}
    own.model.generate(tokens(1, 10), **caching(past), **OPTIONS | answers)
    assert past.kv is not None and past.kv.batch == 2
    half = QuantizedCache(own.model.config)
    own.model.half()(tokens(1, 5), **caching(half))
    assert half.kv is not None and half.kv.exact_format == "fp16"


def test_a_cache_grows_to_twice_its_room(own: CachedModel, tmp_path: Path) -> None:
    """Of a model, and of a file, which has room for its own tokens."""
    text = tokens(2, 700)
    grown = QuantizedCache(own.model, k_format="int4")
    static = QuantizedCache(own.model, k_format="int4", max_seq_len=700)

    def run(part: torch.Tensor, *caches: QuantizedCache) -> None:
        found = [own.model(part, **one.argument).logits for one in caches]
        assert all(torch.equal(one, found[0]) for one in found)

    run(text[:, :20], grown, static)
    assert grown.kv is not None
    save_cache(grown.kv, tmp_path / "cache.safetensors")
    loaded = QuantizedCache(load_cache(tmp_path / "cache.safetensors", max_seq_len=22))
    assert loaded.get_max_length() == -1 and not loaded.is_compileable
    for part in (text[:, 20:280], text[:, 280:697], *text[:, 697:].split(1, dim=1)):
        run(part, grown, static, loaded)
    for past, size in ((grown, 4 * (20 + SPACE)), (static, 700), (loaded, 1394)):
        past.check()
        assert past.kv is not None and past.kv.max_seq_len == size
        assert past.kv.seq_lens.tolist() == [700, 700]
    assert static.get_max_length() == 700
    with pytest.raises(ShapeError, match="would grow to 701 tokens, max_seq_len is 700"):
        run(text[:, :1], static)
    assert static.get_seq_length() == 700


def test_a_cache_of_a_file_keeps_the_room_that_is_asked_for(
    own: CachedModel, tmp_path: Path
) -> None:
    kv, path = own.new_cache(1, 20), tmp_path / "cache.safetensors"
    own.prefill(kv, tokens(1, 12))
    save_cache(kv, path)
    past = QuantizedCache(load_cache(path, max_seq_len=20), max_seq_len=24)
    assert past.kv is not None and past.kv.max_seq_len == past.get_max_length() == 24
    assert past.is_compileable and past.kv.seq_lens.tolist() == [12]
    with pytest.raises(ShapeError, match="max_seq_len"):
        own.model(tokens(1, 13), **past.argument)
    assert past.kv.seq_lens.tolist() == [12]
    with pytest.raises(ConfigError, match="max_seq_len is 11, the cache has room for 20"):
        QuantizedCache(kv, max_seq_len=11)


def test_what_no_cache_can_be_made_of_is_refused(own: CachedModel) -> None:
    kv = own.new_cache(1, 8)
    assert_refused(
        ConfigError,
        (lambda: QuantizedCache(own.model, k_format="int5"), "int5"),
        (lambda: QuantizedCache(own.model, max_seq_len=0), "max_seq_len"),
        (lambda: QuantizedCache(kv, recent_len=4), "give none with it, or give a model"),
        (lambda: QuantizedCache(own), "give a model of transformers, its config or a"),
        (lambda: QuantizedCache(kv, model=own.model.config), "give the model that calls the cache"),
    )
    own.model.set_attn_implementation("sdpa")
    message = r"attends by 'sdpa'.*attn_implementation='kvquant'\), or call model\.set_attn_imp"
    with pytest.raises(ConfigError, match=message):
        QuantizedCache(own.model)
    assert own.model.config._attn_implementation == "sdpa"
    past = QuantizedCache(own.model.config)
    with pytest.raises(UnsupportedError, match="layer 0 got keys from a KVCache and did not"):
        own.model(tokens(1, 8), **caching(past))


def test_a_cache_tells_what_it_is_in_three_lines(own: CachedModel) -> None:
    past = QuantizedCache(own.model, v_format="int8", sink_len=2, recent_len=9)
    assert past.describe() == "layers 0-1: K int8-g8, V int8"
    assert repr(past).splitlines() == [
        "QuantizedCache of 2 layers: K int8-g8, V int8",
        "  the first 2 and last 9 tokens in bf16",
        "  no tokens yet, 0 bytes on cpu",
    ]
    own.model(tokens(3, 10), **caching(past))
    assert past.kv is not None and past.nbytes == past.kv.nbytes > 0
    room = past.kv.max_seq_len
    assert repr(past).splitlines()[2] == (
        f"  batch 3, 10 tokens, room for {room}, {past.nbytes:,} bytes on cpu"
    )
    kv = own.new_cache(1, 8, k_format=["int8", "int4"], v_format="int8")
    assert QuantizedCache(kv).describe() == "layer 0: K int8, V int8\nlayer 1: K int4, V int8"
    assert repr(QuantizedCache(kv)).startswith(
        "QuantizedCache of 2 layers: K int8, V int8; K int4, V int8\n"
    )


def test_a_prefilled_cache_is_repeated_for_beams(own: CachedModel) -> None:
    past, text = QuantizedCache(own.model), tokens(1, 20)
    own.model(text[:, :15], **caching(past))
    with pytest.raises(ShapeError, match=r"has 1: call cache\.batch_repeat_interleave\(3\)"):
        own.model.generate(text, **caching(past), num_beams=3, **OPTIONS)
    past.batch_repeat_interleave(3)
    assert own.model.generate(text, **caching(past), num_beams=3, **OPTIONS).shape == (1, 24)
    with pytest.raises(ShapeError, match="the cache has 3: the cache is for 3 at a time"):
        own.model(tokens(4, 1), **caching(past))


def test_an_empty_prompt_is_told(own: CachedModel) -> None:
    past = QuantizedCache(own.model)
    model: Any = own.model
    for call in (model.generate, model):
        options = OPTIONS if call is not model else {}
        with pytest.raises(ConfigError, match="the prompt is empty: give the id of one token"):
            call(tokens(1, 0), **caching(past), **options)
    own.model(tokens(1, 5), **caching(past))
    with pytest.raises(ConfigError, match="the text brings nothing new"):
        own.model(tokens(1, 0), **caching(past))


@pytest.mark.parametrize("of_kv", [False, True], ids=["of the model", "of a KVCache"])
def test_phi_3_does_not_give_the_cache_up_where_it_turns_keys_otherwise(of_kv: bool) -> None:
    """transformers goes on with a cache of its own there, in silence."""
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32}
    long |= {"long_factor": [4.0] * 32, "original_max_position_embeddings": 32}
    sizes = {"hidden_size": 512, "original_max_position_embeddings": 32}
    sizes |= {"pad_token_id": 0, "eos_token_id": 1}
    own = by_kvquant(tiny("Phi3", rope_parameters=long, **sizes))

    def made() -> QuantizedCache:
        kv = own.new_cache(1, 64, **FP16)
        return QuantizedCache(kv) if of_kv else QuantizedCache(own.model, **FP16)

    past, text = made(), tokens(1, 40)
    with pytest.raises(UnsupportedModelError, match=r"'longrope'\).* beyond 32 positions"):
        own.model.generate(text[:, :30], **caching(past), **OPTIONS)
    assert past.get_seq_length() == 32
    past = made()
    found = own.model.generate(text, **caching(past), **OPTIONS)
    assert past.get_seq_length() == 43
    assert torch.equal(found, own.model.generate(text, **OPTIONS))


@pytest.mark.parametrize("room", [None, 32], ids=["growing", "static"])
def test_memory_goes_with_the_cache_and_not_with_the_collector(
    own: CachedModel, room: int | None
) -> None:
    """A GPU would be full of dead caches before Python's collector came."""
    past = QuantizedCache(own.model, **FP16, max_seq_len=room)
    found = own.model.generate(tokens(1, 10), **caching(past), **OPTIONS)
    other, kv = pickle.loads(pickle.dumps(copy.deepcopy(past))), own.new_cache(1, 32, **FP16)
    own.prefill(kv, tokens(1, 10))
    gc.collect()
    gc.disable()
    try:
        layer, held = past.layers[0], [weakref.ref(one) for one in (past.kv, kv)]
        del past, kv
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="keep the QuantizedCache"):
        layer.get_seq_length()
    assert other.layers[0].cache is other and other.layers[0].get_seq_length() == 13
    turn = torch.cat([found, tokens(1, 6)], dim=1)
    own.model.generate(turn, **caching(other), **OPTIONS)
    assert other.get_seq_length() == turn.shape[1] + 3  # all answers but the last token


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])  # with one mask, and another
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_step_reads_nothing(kind: str, is_padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of KVCache.step, which has tests of its own: here it does but count."""
    own = by_kvquant(tiny(kind, sliding_window=16) if kind == "Mistral" else tiny(kind))
    past, mask = QuantizedCache(own.model), torch.ones(2, 20, dtype=torch.int64)
    mask[0, :7] = 0 if is_padded else 1
    places = (mask.cumsum(1) - 1).clamp(min=0)
    own.model(tokens(2, 20), attention_mask=mask, position_ids=places, **caching(past))

    def step(self: KVCache, layer: int, q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        at = self.layers[layer]
        at.seq_lens += 1
        assert at.longest is not None
        at.longest += 1
        return torch.zeros_like(q)

    monkeypatch.setattr(KVCache, "step", step)
    monkeypatch.setattr(debug, "may_read", lambda tensor: False)  # as on CUDA
    with monkeypatch.context() as patch, Operations() as work:
        for name in ("cpu", "tolist", "numpy", "item", "__bool__", "__int__"):
            patch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a tensor is read"))
        for _ in range(3):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], dim=1)
            places = places[:, -1:] + 1
            own.model(tokens(2, 1), attention_mask=mask, position_ids=places, **caching(past))
            assert past.get_seq_length() == mask.shape[1]
    # what makes the host wait for a device
    assert not {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"} & {*work.names}
    past.check()
    own.model(tokens(2, 1), position_ids=places, **caching(past))  # those of the token before
    with pytest.raises(ConfigError, match="go on from other positions"):
        past.check()
    past.check()


def test_a_plan_says_the_formats(own: CachedModel) -> None:
    plan = example_plan(2, 2, 64, config=own.config_dict)
    past = QuantizedCache(own.model, plan=plan)
    own.model.generate(tokens(2, 10), **caching(past), **OPTIONS)
    assert past.kv is not None and past.kv.bases is not None
    assert repr(past.kv) == repr(own.new_cache(2, past.kv.max_seq_len, plan=plan))
    with pytest.raises(CheckpointError, match="not for this"):
        QuantizedCache(tiny("Qwen2").model.config, plan=plan)


def test_a_shallow_copy_is_refused(own: CachedModel) -> None:
    """It would share the rows, and the next call of the model would speak of padding."""
    past, text = QuantizedCache(own.model), tokens(1, 20)
    own.model(text[:, :15], **caching(past))
    with pytest.raises(UnsupportedError, match=r"a QuantizedCache would share .*copy\.deepcopy"):
        copy.copy(past)
    own.model(text[:, 15:], **caching(past))
    assert past.get_seq_length() == 20


class Older:
    """A model of one's own, written for an older transformers."""

    def forward(self, input_ids: Any, past_key_values: Any = None, **_: Any) -> None: ...


class Wrapper:
    """A model around another one (as of peft), which passes on what it gets."""

    def forward(self, *args: Any, **options: Any) -> None: ...


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_of_transformers_takes_a_cache_by_its_present_name(is_compiled: bool) -> None:
    model = tiny("Llama").model
    known = inspect.signature(model.forward).parameters
    model = torch.compile(model, backend="eager") if is_compiled else model
    assert list(as_argument(model, 1)) == [ARGUMENT] and ARGUMENT in known
    assert ARGUMENT == ("cache" if "cache" in known else "past_key_values")


def test_other_models_get_it_as_they_name_it() -> None:
    assert as_argument(Older(), 1) == {"past_key_values": 1}
    assert as_argument(Wrapper(), 1) == {ARGUMENT: 1}


def test_a_cache_tells_its_argument_and_that_it_can_be_cropped() -> None:
    model, text = by_kvquant(tiny("Mistral", sliding_window=8).model), tokens(1, 12)
    cache = QuantizedCache(model, **FP16)
    assert cache.argument == {ARGUMENT: cache}
    out = model(text, **cache.argument, use_cache=True)
    assert getattr(out, ARGUMENT) is cache
    assert all(layer.is_croppable for layer in cache.layers)


BUNDLED = Path(__file__).parents[2] / "examples" / "llama-demo-5m"
TEXT = "The first ship"


@pytest.fixture(scope="module")
def model() -> Any:
    """In float32: of 16-bit logits many are the largest."""
    found = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    found.set_attn_implementation("kvquant")
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(BUNDLED)


LONGEST: list[dict[str, Any]] = [
    {"max_new_tokens": 20},
    {"max_new_tokens": 60, "stop_sequence": "."},
]


@pytest.mark.parametrize("options", LONGEST, ids=len)
def test_a_pipeline_takes_the_cache(options: dict[str, Any], model: Any, tokenizer: Any) -> None:
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompt = tokenizer(TEXT, return_tensors="pt")
    sentence: dict[str, Any] = {"stop_strings": ["."], "tokenizer": tokenizer, "do_sample": False}
    sure_text(model.generate(**prompt, max_new_tokens=60, **sentence, **WITH_LOGITS))
    wanted = pipe(TEXT, do_sample=False, **options)[0]["generated_text"]
    cache = QuantizedCache(model, **FP16)
    found = pipe(TEXT, do_sample=False, **cache.argument, **options)[0]["generated_text"]
    assert found == wanted
    assert cache.kv is not None and int(cache.kv.seq_lens) == cache.get_seq_length() > 6
    assert not options.get("stop_sequence") or wanted.endswith(".")


def test_prompts_padded_on_the_right_are_told(model: Any, tokenizer: Any) -> None:
    batch = tokenizer([TEXT, "Nero"], padding=True, padding_side="right", return_tensors="pt")
    with pytest.raises(ConfigError, match=r"For generate pad prompts on the left \(tokenizer"):
        model.generate(**batch, **QuantizedCache(model).argument, max_new_tokens=3)


def test_kernels_of_drafts_are_compiled_where_drafts_will_come(model: Any) -> None:
    """By the first append, which is that of the prompt (tests/cache/test_warmup.py)."""
    ids, found = torch.arange(5, 15)[None], []
    kinds: list[dict[str, Any]] = [{}, {"drafts": False}, {"dequantize": True}]
    for options in kinds:
        for drafts in ({}, {"prompt_lookup_num_tokens": 3}):
            cache = QuantizedCache(model, **options)
            model.generate(ids, **cache.argument, max_new_tokens=3, **drafts)
            assert cache.kv is not None
            found.append(cache.kv.step_lens)
    assert found == [(1,), (*range(1, DRAFTS + 1),), (1,), (1,), (), ()]
