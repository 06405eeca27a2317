"""Hugging Face models on a KVCache (15 s)."""

import copy
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant import KVCache, debug
from kvquant.cache import contiguous, latent
from kvquant.cache import layer as layers
from kvquant.errors import ConfigError, ShapeError, UnsupportedError
from kvquant.kernels.cpu.decode import Work

transformers = pytest.importorskip("transformers")
from entered import calls_of  # noqa: E402
from hf_cases import (  # noqa: E402
    FAMILIES,
    FP16,
    GEMMA3N,
    GREEDY,
    LATENT_SIZES,
    SHAPE,
    SHARING,
    TOLERANCE,
    RoundedCache,
    by_kvquant,
    caching,
    needs_latents,
    random_module,
    tiny,
    tokens,
)
from refusals import assert_refused  # noqa: E402
from torch_operations import Operations  # noqa: E402
from transformers import masking_utils as masking  # noqa: E402

from kvquant.hf import attention as hf_attention  # noqa: E402
from kvquant.hf import masks  # noqa: E402
from kvquant.hf.cache import QuantizedCache  # noqa: E402
from kvquant.hf.model import CachedModel  # noqa: E402

BUNDLED = Path(__file__).parents[2] / "examples" / "llama-demo-5m"


@pytest.fixture(scope="module", params=["Llama", "Qwen2"])
def model(request: pytest.FixtureRequest) -> CachedModel:
    return tiny(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_step_on_the_cpu_enters_few_functions_in_each_layer(dtype: torch.dtype) -> None:
    """Those of four layers, so that what a step does once does not count."""
    found, text = [], tokens(1, 20)
    for count in (2, 6):
        model = by_kvquant(tiny("Llama", num_hidden_layers=count)).model.to(dtype)
        cache = QuantizedCache(model)
        step = partial(model, text[:, -1:], **caching(cache))
        model(text, **caching(cache))
        step()
        step()  # the first one binds what later ones launch
        found.append(calls_of(step))
    assert found[1] - found[0] <= 4 * 34


@pytest.mark.parametrize("kind", ["Llama", "Persimmon"])  # tells attention its positions, or not
@pytest.mark.parametrize(("start", "lens"), [(0, [20, 15]), (30, [20, 20])])
def test_positions_that_the_model_counts_otherwise_are_refused(
    kind: str, start: int, lens: list[int]
) -> None:
    own = tiny(kind, num_attention_heads=2)  # a model counts all sequences from the longest, from 0
    cache, text = own.new_cache(2, 40, **FP16), tokens(2, 20)
    cache.start_positions += start
    own.prefill(cache, text, lens)
    expected = own.step(cache.fork(), text[:, 0])
    own.model.set_attn_implementation("kvquant")
    past = QuantizedCache(cache)
    with pytest.raises(ConfigError, match=r"go on from other positions .* give it position_ids"):
        own.model(text[:, :1], **caching(past))
    assert cache.seq_lens.tolist() == lens
    if kind == "Persimmon":
        past = QuantizedCache(cache, placed=True)
    places = cache.positions[:, None]
    given = own.model(text[:, :1], **caching(past), position_ids=places).logits[:, 0]
    assert torch.equal(given, expected)


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("first", [0, 90])
def test_positions_that_leave_the_text_are_refused(new: int, first: int) -> None:
    model = by_kvquant(tiny("Llama").model)
    text, past = tokens(2, 20), QuantizedCache(model, **FP16)
    model(text[:, :10], **caching(past))
    places = {"position_ids": first + torch.arange(new).expand(2, new)}
    with pytest.raises(ConfigError, match=r"go on from other positions|read from its begin"):
        model(text[:, 10 : 10 + new], **caching(past), **places)
    places = {"position_ids": 10 + torch.arange(new)[None]}
    model(text[:, 10 : 10 + new], **caching(past), **places)
    assert past.get_seq_length() == 10 + new


def test_positions_of_images_may_be_others_than_those_of_tokens() -> None:
    """M-RoPE: a token's number, and three in which an image of many tokens takes few."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]}
    config = transformers.Qwen3VLTextConfig(**(SHAPE | {"rope_parameters": rope}))
    model = transformers.Qwen3VLTextModel._from_config(config).eval()
    text, places = tokens(2, 14), torch.arange(14).expand(4, 2, 14).clone()
    places[1:, :, 8:] -= 4
    model.set_attn_implementation("kvquant")
    wanted = model(text, position_ids=places, use_cache=False).last_hidden_state
    past = QuantizedCache(model, **FP16)
    for start, end in ((0, 10), (10, 13), (13, 14)):
        given = {"position_ids": places[..., start:end], **caching(past)}
        found = model(text[:, start:end], **given).last_hidden_state
    torch.testing.assert_close(found[:, -1], wanted[:, -1], atol=TOLERANCE, rtol=0)


def test_observers_see_keys_after_rotation_and_values(model: CachedModel) -> None:
    text, past, seen = tokens(2, 12), transformers.DynamicCache(), {}
    model.plain(text, past)
    model.observe(text, lambda layer, q, k, v, scale: seen.update({layer: (q, k, v, scale)}))
    assert sorted(seen) == [0, 1]
    for layer, (q, k, v, scale) in seen.items():
        assert q.shape == (2, 8, 12, 64) and scale == 64**-0.5
        torch.testing.assert_close(k, past.layers[layer].keys)
        torch.testing.assert_close(v, past.layers[layer].values)


def test_observers_may_begin_at_later_positions(model: CachedModel) -> None:
    """Where keys are turned further, and attention is the same."""
    text, most = tokens(2, 12), model.max_positions
    assert most is not None
    near, far = list[Any](), list[Any]()
    model.observe(text, lambda layer, *shown: near.append(shown))
    model.observe(text, lambda layer, *shown: far.append(shown), 0.5)
    for (q, k, v, _), (q_far, k_far, v_far, _) in zip(near, far, strict=True):
        assert (k - k_far).norm() > 0.1 * k.norm()
        scores = [a[:, :1] @ b[:, :1].mT for a, b in ((q, k), (q_far, k_far))]
        # angles are products of a float32 and a position
        limit = 4 * most * torch.finfo(torch.float32).eps
        assert (scores[1] - scores[0]).norm() < limit * scores[0].norm()
        assert (v_far - v).norm() < limit * v.norm()


WINDOWED: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 16},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "Gemma3Text": {
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 64,
    },
    "Phi3": {"sliding_window": 16, "pad_token_id": 0, "eos_token_id": 1},
    "Gemma2": {"sliding_window": 16, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 64},
    "GptOss": {"sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
}


KINDS: dict[str, dict[str, Any]] = WINDOWED | {
    "Llama": {},
    "Gemma3nText": GEMMA3N,
    "Gemma4Text": SHARING | {"global_head_dim": 64},
    "Gemma4Text, unlike head_dim": SHARING | {"global_head_dim": 128},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 64], ids="chunk{}".format)
def test_logits_are_those_of_a_dynamic_cache(
    kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows are those of the model; layers that share keys attend to the rows of their owner."""
    monkeypatch.setattr(layers, "SPARE", 8)  # so that rings close
    model, text = tiny(kind.split(",")[0], **KINDS[kind]), tokens(2, 54)
    recent: dict[str, Any] = {"k_format": "int8-g4", "v_format": "int8-g4", "recent_len": 5}
    caches = [
        (TOLERANCE, model.new_cache(2, 90, **FP16)),
        (TOLERANCE, model.new_cache(2, 90, **FP16 | {"recent_len": 5})),
        (0.05, model.new_cache(2, 90, **recent)),
    ]
    past = RoundedCache()
    expected = [model.plain(text[:, :42], past)]
    expected += [model.plain(column[:, None], past) for column in text[:, 42:].unbind(1)]
    for tolerance, cache in caches[: 3 if kind in WINDOWED else 2]:
        shared = model.windows().keys() - range(cache.num_layers)
        assert model.windows() == dict.fromkeys(
            [*(i for i, one in enumerate(cache.windows) if one), *shared], 16
        )
        assert cache.num_layers == 2 and bool(model.windows()) == (kind != "Llama")
        done = list[int]()
        given = [model.prefill(cache, text[:, :42], chunk=chunk, progress=done.append)]
        assert sum(done) == 42 and max(done) == min(chunk, 42)
        given += [model.step(cache, column) for column in text[:, 42:].unbind(1)]
        for got, wanted in zip(given, expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=tolerance, rtol=0)
        assert {tuple(at.seq_lens.tolist()) for at in cache.layers} == {(54, 54)}


def test_a_cache_without_the_models_windows_is_refused() -> None:
    model, text = tiny("Mistral", sliding_window=16), tokens(1, 30)
    cache = model.new_cache(1, 64, windows=None)
    model.prefill(cache, text[:, :16])  # no longer than the window
    message = r"layer 0 .* attends to the last 16 tokens, its layer of the cache to all tokens"
    with pytest.raises(UnsupportedError, match=message):
        model.step(cache, text[:, 16])
    assert cache.seq_lens.tolist() == [16]
    narrow = tiny("Llama").new_cache(1, 64, windows=[None, 8])
    with pytest.raises(
        UnsupportedError, match=r"layer 1 .* its layer of the cache to the last 8 tokens"
    ):
        tiny("Llama").prefill(narrow, text)


def test_shared_keys_of_a_chunk_are_those_before_its_rows_were_packed() -> None:
    model, text = tiny("Gemma3nText", **GEMMA3N), tokens(1, 60)
    cache = model.new_cache(1, 60, k_format="int4", v_format="int4", sink_len=0, recent_len=8)
    model.prefill(cache, text[:, :30])
    dequantized = model.new_cache(1, 60, **FP16)
    for layer, (at, origin) in enumerate(zip(dequantized.layers, cache.layers, strict=True)):
        gone = origin.seq_lens - origin.held_lens
        at.begin(gone, gone, gone)
        dequantized.append(layer, *cache.dequantized(layer, torch.float16))
    given, expected = (model.prefill(c, text[:, 30:], append=True) for c in (cache, dequantized))
    torch.testing.assert_close(given, expected, atol=0.02, rtol=0)  # the copy is rounded


@pytest.mark.parametrize("layers", [1, 5])
def test_caches_of_other_layers_or_heads_are_refused_before_anything_is_written(
    layers: int, model: CachedModel
) -> None:
    model.model.set_attn_implementation("kvquant")
    other = KVCache(layers, 1, 2, 64, 64), KVCache(2, 1, 1, 64, 64), KVCache(2, 1, 2, 128, 64)
    for cache in other:
        with pytest.raises(ShapeError, match=r"the cache has .* the model's keys and values are"):
            model.prefill(cache, tokens(1, 8))
        with pytest.raises(ShapeError, match=r"the cache has .* the model's keys and values are"):
            model.model.generate(tokens(1, 8), **caching(QuantizedCache(cache)), **OPTIONS)
        assert {at.seq_lens.item() for at in cache.layers} == {0}


@pytest.mark.parametrize("layers", [1, 3])
def test_the_cache_of_another_model_is_refused_and_stays_as_it_is(layers: int) -> None:
    model, other = (tiny("Llama", num_hidden_layers=n).model for n in (2, layers))
    for one in (model, other):
        one.set_attn_implementation("kvquant")
    text, past = tokens(2, 12), QuantizedCache(model, **FP16)
    model(text[:, :9], **caching(past))
    for more in (text[:, 9:], text[:, 9:10]):
        with pytest.raises(ShapeError, match=f"has 2 layers .* are of {layers} layers"):
            other(more, **caching(past))
        assert not past.call.is_open
    assert past.get_seq_length() == 9
    found = model(text[:, 9:], **caching(past)).logits
    again = QuantizedCache(model, **FP16)
    model(text[:, :9], **caching(again))
    assert torch.equal(found, model(text[:, 9:], **caching(again)).logits)


def test_a_layer_that_fails_after_the_last_that_is_appended_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, text = by_kvquant(tiny("Gemma3nText", **GEMMA3N)), tokens(2, 9)
    cache, attend = model.new_cache(2, 40), hf_attention._attend
    past, calls = QuantizedCache(cache), []
    model.model(text, **caching(past))

    def fail(handed: Any, *args: Any) -> torch.Tensor:
        calls.append(handed.at)
        if len(calls) == 4:  # the last layer, which attends to keys of place 1
            raise MemoryError
        return attend(handed, *args)

    monkeypatch.setattr(hf_attention, "_attend", fail)
    with pytest.raises(MemoryError):
        model.model(text[:, :3], **caching(past))
    assert calls == [0, 1, 0, 1]
    assert [at.seq_lens.tolist() for at in cache.layers] == [[9, 9]] * 2
    monkeypatch.undo()
    model.model(text[:, :3], **caching(past))
    assert [at.seq_lens.tolist() for at in cache.layers] == [[12, 12]] * 2


OF_LLAMA: list[tuple[str, dict[str, Any]]]
OF_LLAMA = [("Llama", one) for one in ({}, {"placed": True}, {"drafts": False})]
OF_LATENTS = pytest.param("DeepseekV3", {}, marks=needs_latents)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("kind", "options"), [*OF_LLAMA, OF_LATENTS], ids=str)
def test_a_step_that_fails_behind_its_append_is_taken_back(
    layer: int, kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_latent = kind == "DeepseekV3"
    model, text = by_kvquant(tiny(kind, **LATENT_SIZES if is_latent else {})), tokens(2, 20)
    first: Any = (latent, "attend_latents") if is_latent else (contiguous, "attend")
    again: Any = first if is_latent else (Work, "__call__")  # which is bound to the layer
    cache, wanted = (QuantizedCache(model.model, **options) for _ in range(2))
    model.model(text[:, :9], **caching(cache))
    model.model(text[:, :9], **caching(wanted))
    calls = []

    def fail(*args: Any, **rest: Any) -> Any:
        calls.append(args)
        if len(calls) == layer + 1:
            raise MemoryError
        return attend(*args, **rest)

    # 11: drafted ones, or a chunk, which attends before it is appended
    for new, (home, name) in ((1, first), (11, again)):
        attend = getattr(home, name)
        monkeypatch.setattr(home, name, fail)
        with pytest.raises(MemoryError):
            model.model(text[:, 9:10], **caching(cache))
        monkeypatch.undo()
        calls.clear()
        assert cache.kv is not None
        assert [at.seq_lens.tolist() for at in cache.kv.layers] == [[9, 9]] * 2
        cache.crop(0)
        given, expected = (
            model.model(text[:, 9 : 9 + new], **caching(one)).logits for one in (cache, wanted)
        )
        assert torch.equal(given, expected)
        cache.crop(-new)
        wanted.crop(-new)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("columns", [1, 5])
@pytest.mark.parametrize("layers", [1, 2])
def test_attention_that_is_not_ours_is_noticed_in_the_call(
    layers: int, columns: int, implementation: str
) -> None:
    """Of one layer there is no next one to notice it."""
    own, text = by_kvquant(tiny("Llama", num_hidden_layers=layers).model), tokens(2, 14)
    caches = [QuantizedCache(own, **FP16) for _ in range(2)]
    for past in caches:
        own(text[:, :9], **caching(past))
    own.set_attn_implementation(implementation)
    with pytest.raises(UnsupportedError, match=r"layer 0 got .* Call model\.set_attn_impl"):
        own(text[:, 9 : 9 + columns], **caching(caches[0]))
    assert caches[0].get_seq_length() == 9 and not caches[0].call.is_open
    own.set_attn_implementation("kvquant")
    found = [own(text[:, 9:], **caching(past)).logits for past in caches]
    assert torch.equal(*found)


def test_attention_that_is_not_ours_is_noticed_by_check_where_no_mask_is_made() -> None:
    own, text = tiny("Llama", num_hidden_layers=1).model, tokens(2, 9)
    past = QuantizedCache(own.config, **FP16)
    mask = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9)
    own(text, attention_mask=mask, **caching(past))
    with pytest.raises(UnsupportedError, match=r"layer 0 got .* Call model\.set_attn_impl"):
        past.check()
    past.check()
    own.set_attn_implementation("kvquant")
    own(text, **caching(past))
    assert past.get_seq_length() == 9


OPTIONS = GREEDY | {"max_new_tokens": 12}


@pytest.fixture(scope="module", params=FAMILIES)
def generating(request: pytest.FixtureRequest) -> CachedModel:
    return tiny(request.param, **FAMILIES[request.param])


PACKED: dict[str, Any] = {"sink_len": 0, "recent_len": 0}
RECENT: dict[str, Any] = {"sink_len": 2, "recent_len": 6}


KEPT = [("int4-g4", PACKED, 1e-3), ("int8", RECENT, 1e-2)]


@pytest.mark.parametrize(("rows", "kept", "limit"), KEPT, ids=["packed", "recent tokens"])
def test_drafted_tokens_are_what_single_steps_make_of_them(
    rows: str, kept: dict[str, Any], limit: float
) -> None:
    """But for 3 tokens that the last of 4 reads in 16 bit, where there are recent ones."""
    model, text = by_kvquant(tiny("Llama")), tokens(2, 30)
    found = []
    for sizes in ([24, 1, 1, 1, 1, 1, 1], [24, 4, 2]):
        past = QuantizedCache(model.new_cache(2, 40, k_format=rows, v_format=rows, **kept))
        logits, begin = [], 0
        for size in sizes:
            part = text[:, begin : begin + size]
            out = model.model(part, **caching(past), use_cache=True)
            logits.append(out.logits)
            begin += size
        found.append(torch.cat(logits, dim=1))
    error = (found[1] - found[0])[:, 24:].norm() / found[0][:, 24:].norm()
    assert float(error) < limit  # the model's own products differ, and so may a key's last bit
    assert not kept["recent_len"] or torch.allclose(found[1][:, 24], found[0][:, 24], atol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_drafts_that_are_cropped_leave_nothing_behind(family: str) -> None:
    """Across the edge of the recent window, where the tokens behind it had been packed."""
    model, text = by_kvquant(tiny(family)), tokens(2, 40)
    found = []
    for drafts in (False, True):
        past = QuantizedCache(model.new_cache(2, 60, k_format="int4", **RECENT))

        def run(begin: int, end: int, past: QuantizedCache = past) -> torch.Tensor:
            part = text[:, begin:end]
            logits: torch.Tensor = model.model(part, **caching(past)).logits
            return logits

        run(0, 24)
        if drafts:
            run(30, 40)
            past.crop(-10)
        found.append(torch.cat([run(i, i + 1) for i in range(24, 32)], dim=1))
    assert torch.equal(*found)


def test_only_tokens_behind_others_are_drafted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a prompt, nor a chunk that CachedModel reads; nor is a graph before it a past."""
    model, text = tiny("Llama"), tokens(2, 20)
    steps: list[int] = []
    step = KVCache.step

    def note(self: KVCache, layer: int, q: torch.Tensor, *call: Any, **options: Any) -> Any:
        steps.append(q.shape[1] if q.ndim == 4 else 1)
        return step(self, layer, q, *call, **options)

    monkeypatch.setattr(KVCache, "step", note)
    cache = model.new_cache(2, 60)
    for at in cache.layers:
        at.longest = None  # as a graph leaves it
    model.prefill(cache, text[:, :6], chunk=3)
    assert not steps
    cache.reset()
    model.model.set_attn_implementation("kvquant")
    past = QuantizedCache(cache)
    for size in (5, 4, 1):
        model.model(text[:, :size], **caching(past), use_cache=True)
        if size == 5:
            assert not steps
    assert steps == [4] * cache.num_layers + [1] * cache.num_layers


@torch.enable_grad()
def test_without_a_cache_kvquant_is_sdpa(generating: CachedModel) -> None:
    model, text, mask = generating.model, tokens(2, 24), torch.ones(2, 24, dtype=torch.int64)
    mask[0, :5] = 0
    past = QuantizedCache(generating.new_cache(2, 64))

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(text, labels=text).loss
        loss.backward()
        gradient = next(p.grad for n, p in model.named_parameters() if "q_proj" in n)
        hidden = model(text, attention_mask=mask, use_cache=False).logits[:, 5:]
        causal = torch.ones(2, 1, 24, 24, dtype=torch.bool).tril()
        given = model(text, attention_mask=causal).logits
        padded = model.generate(text, attention_mask=mask, **OPTIONS)
        beams = model.generate(text, num_beams=2, **OPTIONS)
        return [loss.detach(), gradient, hidden, given, padded, beams]

    model.set_attn_implementation("sdpa")
    expected = run()
    model.set_attn_implementation("kvquant")
    for _ in range(2):
        for got, wanted in zip(run(), expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
        # a call with one between them
        model(text[:, :3], **caching(past))


@pytest.mark.parametrize("trained", ["q_proj", "v_proj"])
@torch.enable_grad()
def test_backward_through_a_step_is_refused(trained: str) -> None:
    """Around attention a gradient would flow, and be another one than the model's."""
    own = tiny("Llama")
    for name, weight in own.model.named_parameters():
        weight.requires_grad_(f"layers.1.self_attn.{trained}" in name)
    own.model.set_attn_implementation("kvquant")
    past = QuantizedCache(own.new_cache(1, 20, **FP16))
    own.model(tokens(1, 8), **caching(past)).logits.sum().backward()  # a prompt's is exact
    loss = own.model(tokens(1, 1), **caching(past)).logits.sum()
    with pytest.raises(UnsupportedError, match=r"no gradient flows .* decode under torch\.no_grad"):
        loss.backward()


def test_a_model_without_a_table_of_embeddings_is_refused() -> None:
    own = tiny("Llama")
    own.model.set_input_embeddings(torch.nn.Sequential(own.model.get_input_embeddings()))
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has no table of token embeddings"):
        own.prefill(own.new_cache(1, 20), tokens(1, 8))


def test_what_generate_cannot_have_is_told(model: CachedModel) -> None:
    own, text, cache = by_kvquant(model.model), tokens(2, 8), model.new_cache(2, 20)
    weights: dict[str, Any] = {"output_attentions": True}
    assert_refused(
        UnsupportedError,
        *(
            (lambda past=past: own(text, **caching(past), **weights), "layer 0 .* attention weig")
            for past in (QuantizedCache(cache), None)
        ),
        (lambda: QuantizedCache(cache).layers[1].values, "reads the keys of a cache by itself"),
    )
    with pytest.raises(AttributeError, match=r"Give it .* as kvquant\.QuantizedCache"):
        own.generate(text, **caching(cache), **OPTIONS)
    with pytest.raises(ValueError, match="non-LinearAttention layer"):  # transformers' own
        QuantizedCache(cache).update_conv_state(text, 0)
    assert [at.seq_lens.tolist() for at in cache.layers] == [[0, 0]] * 2


def test_generate_without_use_of_the_cache_is_told(generating: CachedModel) -> None:
    """It would append the whole text in every step, to all that is there, in silence."""
    model, past = generating.model, QuantizedCache(generating.new_cache(1, 200))
    model.set_attn_implementation("kvquant")
    with pytest.raises(ConfigError, match=r"the cache holds 8 tokens already.* use_cache=True"):
        model.generate(tokens(1, 8), **caching(past), use_cache=False, **OPTIONS)
    assert past.get_seq_length() == 8
    of_model = QuantizedCache(model)  # it sees the first call already
    with pytest.raises(ConfigError, match=r"use_cache=False came beside a cache.* use_cache=True"):
        model.generate(tokens(1, 8), **caching(of_model), use_cache=False, **OPTIONS)
    assert of_model.get_seq_length() == 0
    model(tokens(1, 8), **caching(of_model))
    assert of_model.get_seq_length() == 8
    past.reset()
    model(tokens(1, 8), **caching(past))
    model(tokens(1, 8), **caching(past))
    assert past.get_seq_length() == 16


def test_rows_of_a_mask_but_the_last_are_refused() -> None:
    whole = torch.empty(9, 1, dtype=torch.bool).expand(2, 1, 9, 12)
    assert hf_attention._whole_mask(whole, whole[:, :, -3:], 3) is whole
    for part in (whole[:, :, :3], whole[:, :, -3:-1], whole[:, :, -3:].clone(), whole[..., :9]):
        assert hf_attention._whole_mask(whole, part, part.shape[2]) is part


CAPS: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 0.5, "sliding_window": 12},
    "gpt_oss": {"sliding_window": 12},
    "mistral": {"sliding_window": 12},  # by SDPA
}


@pytest.mark.parametrize("kind", CAPS)
def test_without_our_cache_attention_is_that_of_transformers(kind: str) -> None:
    model, text = random_module(kind, CAPS[kind]), tokens(2, 20) % 97
    mask, short = torch.ones_like(text), OPTIONS | {"max_new_tokens": 4}
    mask[0, :5] = 0
    places = torch.cat([torch.arange(8), torch.arange(12)])[None]  # two texts in one sequence
    found = []
    for name in ("sdpa" if kind == "mistral" else "eager", "kvquant"):
        model.set_attn_implementation(name)
        found.append([model(text).logits, model(text, attention_mask=mask).logits[1]])
        for more in (
            caching(transformers.DynamicCache()),
            caching(transformers.DynamicCache(config=model.config)),
            {"cache_implementation": "static"},
            {"use_cache": False},
        ):
            found[-1].append(model.generate(text, attention_mask=mask, **short | more))
        found[-1].append(model(text, labels=text, use_cache=False).loss)
        if kind == "mistral":
            found[-1].append(model(text[:1], position_ids=places).logits)
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


def test_caps_without_eager_attention_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = by_kvquant(random_module("gemma2", CAPS["gemma2"]))
    monkeypatch.setattr(type(model.model.layers[0].self_attn), "__module__", "math")
    with pytest.raises(UnsupportedError, match=r"Gemma2Attention asks for a cap .* has no eager_"):
        model(tokens(1, 8) % 97)


MASKS: dict[str, Callable[..., Any]] = {
    "window": masking.sliding_window_causal_mask_function(16),
    "window and an image": masking.or_masks(
        masking.sliding_window_causal_mask_function(16), masking.blockwise_overlay(torch.zeros(1))
    ),
    "both directions": masking.sliding_window_bidirectional_mask_function(16),
    "another window": masking.sliding_window_causal_mask_function(17),
    "chunks": masking.chunked_causal_mask_function(16, torch.zeros(1)),
    "other chunks": masking.chunked_causal_mask_function(8, torch.zeros(1)),
    "not quite": lambda b, h, q, k: (k <= q) & (k > q - 16),
}


@pytest.mark.parametrize("case", MASKS)
def test_masks_are_known_by_their_code(case: str) -> None:
    """So that a mask of few tokens, where all of these look alike, is not taken for another."""
    assert masks.is_window(MASKS[case], 16) == (case == "window")
    assert masks.is_chunk(MASKS[case], 16) == (case == "chunks")


@pytest.mark.parametrize("kind", ["Mistral", "Gemma3Text"])
def test_a_mask_costs_as_much_for_a_long_past(kind: str) -> None:
    """Counted in torch's operations and the elements that they make, on the host too."""

    model, sums = tiny(kind, **WINDOWED[kind] | {"layer_types": ["sliding_attention"] * 2}), []
    for length in (100, 20_000):
        cache = model.new_cache(1, length + 8, **FP16)
        for at in cache.layers:
            at.begin(torch.tensor([length]), torch.tensor([length]))
        with Operations() as work:
            model.step(cache, tokens(1))
        sums.append((len(work.names), sum(work.sizes)))
    assert sums[0] == sums[1]


def test_what_is_taken_back_is_not_counted(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug, "may_read", lambda tensor: False)  # as on CUDA
    cache, text = model.new_cache(1, 64), tokens(1, 8)

    def fail(*_: Any) -> None:
        cache.bad_rows += 1
        cache.overflow_tokens += 1
        raise KeyboardInterrupt

    hook = model.model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model.prefill(cache, text)
    hook.remove()
    assert cache.bad_rows.tolist() == [0, 0] and cache.overflow_tokens.tolist() == [0]
    model.prefill(cache, text)
    assert cache.seq_lens.tolist() == [8]


@pytest.mark.gpu
def test_large_queries_stay_finite_with_fp16_rows_on_a_gpu() -> None:
    model = tiny("Qwen3")
    for at in model.model.model.layers:
        at.self_attn.q_norm.weight.fill_(1e5)
        at.self_attn.k_norm.weight.fill_(1e-5)
    on_gpu = CachedModel(copy.deepcopy(model.model).cuda(), exact_format="fp16")
    text, found = tokens(1, 20), []
    for one in (model, on_gpu):
        cache = one.new_cache(1, 64, k_format="fp16", v_format="fp16", exact_format="fp16")
        one.prefill(cache, text[:, :-1])
        found.append(one.step(cache, text[:, -1]).float().cpu())
    torch.testing.assert_close(found[1], found[0], atol=0.05, rtol=0.05)


def test_exact_rows_follow_the_dtype_that_was_saved(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED, tmp_path / "half")
    config = tmp_path / "half" / "config.json"
    config.write_text(config.read_text().replace("bfloat16", "float16"))
    model = CachedModel.from_pretrained(tmp_path / "half")
    assert (model.model.dtype, model.exact_format) == (torch.float32, "fp16")
    assert CachedModel.from_pretrained(BUNDLED).exact_format == "bf16"


def test_the_bundled_model_loads_and_knows_its_text(capfd: pytest.CaptureFixture[str]) -> None:
    model = CachedModel.from_pretrained(BUNDLED)
    text = "The ironclad was developed as a result of the vulnerability of wooden warships. " * 500
    ids = model.encode(text)
    assert len(ids) > 4096
    assert model.decode(ids) == text
    assert model.max_positions == 4096
    cache = model.new_cache(1, 8)
    assert isinstance(cache, KVCache)
    assert [cache.num_layers, cache.num_kv_heads, cache.head_dim] == [4, 1, 128]
    assert model.config_dict["model_type"] == "llama"
    captured = capfd.readouterr()
    assert captured.err == captured.out == ""  # no progress bars, no advice


def test_transformers_can_crop_reorder_and_reset_the_cache(model: CachedModel) -> None:
    cache = model.new_cache(2, 40, **FP16)
    model.prefill(cache, tokens(2, 20))
    view = QuantizedCache(cache, max_seq_len=40)
    assert [view.get_seq_length(), view.get_max_length()] == [20, 40]
    before = cache.dequantized(1)[0]
    view.crop(-5)
    assert cache.seq_lens.tolist() == [15, 15]
    view.crop(0)
    with pytest.raises(ConfigError, match=r"crop\(15\) is not possible, as in transformers"):
        view.crop(15)
    assert cache.seq_lens.tolist() == [15, 15]
    view.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(cache.dequantized(1)[0], before[[1, 1], :, :15])
    view.crop(-16)
    assert cache.seq_lens.tolist() == [0, 0]
    model.prefill(cache, tokens(2, 20))
    view.reset()
    assert view.get_seq_length() == 0
