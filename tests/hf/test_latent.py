"""Models with latent attention (DeepSeek V2, V3): absorbed attention, caches, refusals (9 s)."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from example_plan import example_plan
from latent_plans import latent_plan, orthogonal
from relative_l2 import relative_l2 as error

from kvquant import Basis, LatentKVCache, debug
from kvquant.errors import KVQuantError, NonFiniteError, UnsupportedModelError
from kvquant.rows.basis import LayerBasis

transformers = pytest.importorskip("transformers")
from hf_cases import (  # noqa: E402
    FP16_LATENTS,
    LATENT_SIZES,
    WITH_LOGITS,
    RoundedCache,
    assert_answers,
    caching,
    hands_latents,
    needs_latents,
    random_model,
    tiny,
)
from refusals import assert_refused  # noqa: E402
from slow_cases import mark_slow  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (  # noqa: E402
    DeepseekV3Attention,
)

from kvquant.hf.cache import QuantizedCache  # noqa: E402
from kvquant.hf.model import CachedModel  # noqa: E402
from kvquant.hf.models import latent  # noqa: E402
from kvquant.hf.models.latent import LatentHeads  # noqa: E402

LENS, STEPS = [25, 9], 4
# float32 sums in another order round a few rows to the neighbouring fp16 number; a wrong RoPE part,
# scale or expert moves logits by 0.1 and more
TOLERANCE = 1e-3
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
}
DENSE: dict[str, Any] = {"first_k_dense_replace": 2}  # that no router's choice hangs on a rounding
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("deepseek_v3", {}),
    "v3, plain q": ("deepseek_v3", {"q_lora_rank": None}),
    "v3, yarn": ("deepseek_v3", {"rope_parameters": YARN}),
    "v3, halves": ("deepseek_v3", {"rope_interleave": False}),
    "v2": ("deepseek_v2", {}),
    "v2, plain q, groups": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "v2, yarn": ("deepseek_v2", {"rope_parameters": YARN}),
    "wide rows": ("deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}),
}


def deepseek(case: str = "v3", **changes: Any) -> CachedModel:
    kind, own = MODELS[case]
    return random_model(kind, LATENT_SIZES | own | changes)


def texts(tokens: int = LENS[0] + STEPS) -> torch.Tensor:
    return torch.randint(5, 97, (2, tokens), generator=torch.Generator().manual_seed(0))


def read(model: CachedModel, cache: Any, chunk: int | None = 7) -> torch.Tensor:
    """Logits behind prompts of LENS and each of STEPS tokens more, [1 + STEPS, 2, vocabulary]."""
    text = texts().to(model.model.device)
    found = [model.prefill(cache, text[:, : LENS[0]], LENS, chunk=chunk)]
    found += [model.step(cache, column) for column in text[:, LENS[0] :].unbind(1)]
    return torch.stack(found)


def plain(model: CachedModel, make: Any) -> torch.Tensor:
    """As read, by transformers alone, each sequence by itself, with caches of make."""
    text, found = texts().to(model.model.device), []
    for b, length in enumerate(LENS):
        past = make()
        parts = [text[b : b + 1, :length], *text[b : b + 1, LENS[0] :].split(1, dim=1)]
        found.append(
            torch.stack([model.model(part, **caching(past)).logits[0, -1] for part in parts])
        )
    return torch.stack(found, dim=1)


@pytest.fixture(scope="module")
def model() -> CachedModel:
    return deepseek()


@needs_latents
@pytest.mark.parametrize("case", MODELS)
def test_logits_are_those_of_transformers(case: str) -> None:
    model = deepseek(case)
    cache = model.new_cache(2, LENS[0] + STEPS, **FP16_LATENTS)
    assert isinstance(cache, LatentKVCache) and cache.num_q_heads == 4
    assert error(read(model, cache), plain(model, RoundedCache)) < TOLERANCE
    assert {tuple(at.seq_lens.tolist()) for at in cache.layers} == {(29, 13)}


@needs_latents
def test_keys_and_values_of_the_cache_are_not_expanded_in_steps(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a later chunk they are, a few heads at a time."""
    wanted = read(model, model.new_cache(2, 64, **FP16_LATENTS))
    expanded: list[tuple[int, ...]] = []
    made: list[weakref.ref[torch.Tensor]] = []
    usual, theirs = LatentHeads._expand, DeepseekV3Attention.expand_kv

    def ours(self: Any, latents: Any, ropes: Any, weight: Any) -> Any:
        expanded.append((latents.shape[2], weight.shape[0] // (48 + 40)))
        assert not any(one() is not None for one in made)  # those of the heads before are gone
        found = usual(self, latents, ropes, weight)
        made.extend(weakref.ref(one) for one in found)
        return found

    def of_model(self: Any, latents: Any, ropes: Any) -> Any:
        expanded.append((latents.shape[2], 4))
        return theirs(self, latents, ropes)

    monkeypatch.setattr(LatentHeads, "_expand", ours)
    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", of_model)
    monkeypatch.setattr(latent, "EXPANDED", 2 * 25 * (48 + 40 + 48 + 32) * 4 * 3)  # three heads
    cache = model.new_cache(2, 64, **FP16_LATENTS)
    text = texts()
    model.prefill(cache, text[:, :15], [15, 4])
    assert expanded == [(15, 4)] * 2  # by the model itself, of new tokens
    expanded.clear()
    given = model.prefill(cache, text[:, 15:25], [10, 5], append=True)
    assert expanded == [(10, 4), (25, 3), (25, 1)] * 2
    assert error(given[:1], wanted[0, :1]) < TOLERANCE
    expanded.clear()
    model.step(cache, text[:, 25])
    assert expanded == [(1, 4)] * 2  # of the new token, whose keys are not used


@needs_latents
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}])
def test_generate_of_transformers_takes_a_quantized_cache(options: dict[str, Any]) -> None:
    """Padded on the left, with beams, with drafted tokens; rows that grow and rows that do not."""
    model = deepseek(eos_token_id=None, **DENSE).model
    text = texts()
    if "prompt_lookup_num_tokens" in options:
        text = torch.cat([text[:1, :10]] * 3, dim=1)  # something to look up
    mask = torch.ones_like(text)
    if not options.get("prompt_lookup_num_tokens"):
        text[0, :5] = mask[0, :5] = 0
    given = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False} | options
    model.set_attn_implementation("kvquant")
    for room in (None, 64):
        cache = QuantizedCache(model, max_seq_len=room, **FP16_LATENTS)
        assert cache.describe() == "layers 0-1: latent rows fp16"
        assert cache.is_compileable == bool(room)
        found = model.generate(text, **caching(cache), **given, **WITH_LOGITS)
        assert_answers(model, found, mask)
        assert isinstance(cache.kv, LatentKVCache)


@needs_latents
def test_a_call_that_fails_is_taken_back(model: CachedModel) -> None:
    cache, text = model.new_cache(2, 64), texts()
    logits = model.prefill(cache, text[:, :9])
    norm = model.model.model.layers[1].self_attn.kv_a_layernorm
    kept = norm.weight.detach().clone()
    norm.weight[3] = torch.nan
    for tokens in (text[:, 9:10], text):
        with pytest.raises(NonFiniteError):
            model.prefill(cache, tokens, append=True)
        assert {tuple(at.seq_lens.tolist()) for at in cache.layers} == {(9, 9)}
    norm.weight.copy_(kept)
    other = model.new_cache(2, 64)
    assert torch.equal(model.prefill(other, text[:, :9]), logits)
    assert torch.equal(model.step(cache, text[:, 9]), model.step(other, text[:, 9]))


@needs_latents
def test_latents_of_a_layer_that_has_failed_are_not_those_of_another_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the module that failed, with as many tokens, and no mask that tells the cache."""
    model, text = deepseek().model, texts()
    at, hidden = model.model.layers[1].self_attn, torch.randn(2, 1, 128)
    turns = model.model.rotary_emb(hidden, torch.tensor([[9]]))
    alone = at(hidden, turns, None)[0]
    model.set_attn_implementation("kvquant")
    cache, wanted = QuantizedCache(model), QuantizedCache(model)
    for one in (cache, wanted):
        model(text[:, :9], **caching(one))

    for is_other in (True, False):
        monkeypatch.setattr(at, "expand_kv", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(text[:, 9:10], **caching(cache))
        monkeypatch.undo()
        if is_other:
            with pytest.raises(UnsupportedModelError, match="taken back now: call again"):
                at(hidden, turns, None)
            assert error(at(hidden, turns, None)[0], alone) < 1e-5
        else:
            with pytest.raises(UnsupportedModelError, match="taken back now: call again"):
                model(text[:, 9:10], **caching(cache))
        assert cache.latents is None and cache.kv is not None
        assert [one.seq_lens.tolist() for one in cache.kv.layers] == [[9, 9]] * 2
    given, expected = (model(text[:, 9:10], **caching(one)).logits for one in (cache, wanted))
    assert torch.equal(given, expected)


@needs_latents
def test_autocast_reads_and_steps() -> None:
    """No further from float32 than transformers' own, whose products are those of bf16 too."""
    model, text, found = deepseek(**DENSE).model, texts(), []
    for name, make, dtype in (
        ("sdpa", transformers.DynamicCache, torch.float32),
        ("sdpa", transformers.DynamicCache, torch.bfloat16),
        ("kvquant", lambda: QuantizedCache(model, fmt="bf16"), torch.bfloat16),
    ):
        model.set_attn_implementation(name)
        past = make()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            parts = [model(part, **caching(past)).logits for part in text.split(7, dim=1)]
        found.append(torch.cat(parts, dim=1).float())
    wanted, theirs, ours = found
    assert text.shape[1] % 7 == 1  # a step at the end
    assert error(ours, wanted) < 2 * error(theirs, wanted)


@needs_latents
def test_logits_of_a_plan_are_those_of_transformers(model: CachedModel) -> None:
    """In 16-bit rows, which are rounded in the bases, and so otherwise; chunks and steps."""
    plan = latent_plan(2, model.config_dict, fmt=("int8-g4", "int8-g4"), exact="fp16")
    given: dict[str, Any] = {**FP16_LATENTS, "latent_dim": 256, "rope_dim": 32}
    cache = LatentKVCache(2, 2, 64, bases=plan.layers, **given)
    assert cache.bases is not None and cache.bases[0].k.kind == "matrix"
    assert error(read(model, cache), plain(model, RoundedCache)) < 3 * TOLERANCE
    model.model.set_attn_implementation("kvquant")
    quantized = QuantizedCache(model.model, plan=plan, exact_format="fp16")
    told = "layer 0: latent rows int8-g4+int8-g4\nlayer 1: latent rows fp16"
    assert quantized.describe() == told


def in_bases(model: CachedModel, exact: str = "bf16") -> Any:
    """A cache in the bases of a plan: matrices and offsets of layer 0, none of layer 1."""
    plan = latent_plan(2, model.config_dict, fmt=("int8-g4", "int8-g4"), exact=exact)
    return model.new_cache(2, 64, plan=plan, exact_format=exact, recent_len=8)


@needs_latents
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", mark_slow(["v2", "v3, plain q"], ["v2"]))
def test_weights_that_hold_the_bases_cost_one_rounding(
    case: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside products with the bases in each step; in 16 bit no further from float32 than twice."""
    model, exact = deepseek(case, **DENSE), "fp16" if dtype == "float16" else "bf16"
    found = {}
    for of in ("float32", dtype):
        model.model.to(getattr(torch, of))
        for is_folded in (True, False):
            with monkeypatch.context() as patch:
                if not is_folded:
                    patch.setattr(LatentHeads, "read_in_basis", lambda *_: None)
                cache = in_bases(CachedModel(model.model), exact)
                found[of, is_folded] = read(CachedModel(model.model), cache).float()
            assert [one is not None for one in cache.folded] == [is_folded, False]
    assert error(found["float32", True], found["float32", False]) < 1e-4
    if dtype != "float32":
        errors = [error(found[dtype, way], found["float32", False]) for way in (True, False)]
        assert 0 < errors[0] < 2 * errors[1]


@needs_latents
def test_a_step_multiplies_no_latents_with_a_basis(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the new ones, on their way into the cache. Of queries it does RoPE parts."""
    cache, seen = in_bases(model), []
    logits = model.prefill(cache, texts())
    for name in ("transform_query", "restore"):
        usual = getattr(Basis, name)

        def note(self: Basis, x: torch.Tensor, usual: Any = usual, name: str = name) -> Any:
            seen.append((name, x.shape[-1]))
            return usual(self, x)

        monkeypatch.setattr(Basis, name, note)
    model.step(cache, logits.argmax(-1))
    assert seen == [("transform_query", 32)]


@needs_latents
def test_caches_share_weights_as_long_as_these_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = deepseek(**DENSE)
    at = model.model.model.layers[0].self_attn
    plan = latent_plan(2, model.config_dict, fmt=("int8-g4", "bf16"))
    caches = [model.new_cache(2, 64, plan=plan) for _ in range(2)]
    with torch.inference_mode():
        first = read(model, caches[0])
    caches.append(caches[1].fork())
    caches.append(copy.deepcopy(caches[0]))
    assert torch.equal(read(model, caches[1]), first)
    caches[2].grow(128)
    read(model, caches[2])
    kept = {id(cache.folded[0]) for cache in caches}  # type: ignore[attr-defined]  # of latents
    assert len(kept) == 1 and len(latent._folded[at]) == 1
    at.kv_b_proj.weight.mul_(0.5)
    cache = model.new_cache(2, 64, plan=plan)
    assert error(read(model, cache), plain(model, transformers.DynamicCache)) < 0.05
    caches[0].reset()
    assert torch.equal(read(model, caches[0]), read(model, model.new_cache(2, 64, plan=plan)))
    assert id(caches[0].folded[0]) not in kept  # type: ignore[attr-defined]  # of latents
    at.kv_b_proj.weight.data = at.kv_b_proj.weight.data.clone()
    monkeypatch.setattr(debug, "is_recorded", lambda _: True)
    heads = LatentHeads(at, "layer 0", latent_dim=256, rope_dim=32)
    with pytest.raises(UnsupportedModelError, match=r"layer 0 meets rows .* read a token"):
        heads.read_in_basis(cache, 0)  # type: ignore[arg-type]  # of latents
    del caches, cache, heads
    gc.collect()
    assert not latent._folded[at]


@needs_latents
@pytest.mark.parametrize("kind", ["none", "matrix"])
def test_a_large_basis_leaves_queries_within_fp16(kind: str) -> None:
    """Scores and outputs of a row are those of the row as it came, in float64."""
    module = deepseek("wide rows").model.model.layers[0].self_attn.half()
    made = torch.Generator().manual_seed(0)
    offset = 10 * torch.randn(1, 512, generator=made)
    matrix = 300 * orthogonal(512) if kind == "matrix" else None
    basis = LayerBasis(Basis(offset, matrix), Basis(torch.zeros(1, 64)))
    cache = LatentKVCache(1, 1, 64, bases=[basis], exact_format="fp16", fmt="fp16")
    plain_heads, heads = (
        LatentHeads(module, "layer 0", latent_dim=512, rope_dim=64) for _ in range(2)
    )
    folded = heads.read_in_basis(cache, 0)
    assert folded is not None
    assert (folded.weight.data_ptr() == heads.weight.data_ptr()) == (kind == "none")
    query = 300 * torch.randn(1, 4, 48 + 64, generator=made)
    row = torch.randn(1, 1, 1, 512, generator=made)
    stored = basis.k.encode(row)[0, 0].double()
    q_latent, q_rope = heads.absorb(query.half())
    assert q_latent.dtype == q_rope.dtype == torch.float16 and q_latent.isfinite().all()
    wanted, ropes = (x.double() for x in plain_heads.absorb(query.half()))
    scale = heads.scale_of(1.0)
    assert scale is not None and error(scale * q_rope.double(), ropes) < 1e-3
    missing = wanted @ offset[0].double()
    scores = scale * (q_latent.double() @ stored.mT)[..., 0]
    whole = (wanted @ row[0, 0].double().mT)[..., 0]
    assert float((scores + missing - whole).norm()) < 5e-3 * float(wanted.norm() * row.norm())
    outs = heads.values(stored.half()[:, None].expand(1, 4, 512)).double()
    expected = plain_heads.values(row[0].half().expand(1, 4, 512)).double()
    assert error(outs, expected) < 3e-2


@needs_latents
def test_what_does_not_fit_the_model_is_refused(model: CachedModel) -> None:
    new, llama = partial(model.new_cache, 2, 64), tiny("Llama", vocab_size=97)
    plan, of_one = (
        latent_plan(2, model.config_dict),
        LatentKVCache(1, 2, 64, latent_dim=256, rope_dim=32),
    )
    latents, rows = new(), llama.new_cache(2, 64)
    assert_refused(
        KVQuantError,
        (lambda: new(k_format="int8"), "k_format cannot be given.* as fmt"),
        (lambda: new(v_format="int8"), "v_format cannot be given.* as fmt"),
        (lambda: new(windows=[None] * 2), "windows cannot be given.* as fmt"),
        (lambda: new(plan=example_plan()), "was made for a 'qwen2' model"),
        (lambda: new(fmt="fp8"), "fp8 is FlashMLA's layout, of 512 latents"),
        (lambda: new(plan=plan, fmt="int8"), r"plan\.with_formats"),
        (lambda: model.fold_values(plan), "plan is of latent rows, and fold_values"),
        (lambda: llama.new_cache(2, 64, plan=plan), "for a 'deepseek_v3' model"),
        (lambda: llama.new_cache(2, 64, fmt="int8-g4"), "llama model .* give k_format and"),
        (lambda: model.prefill(rows, texts()), "and .* keeps latent rows"),
        (lambda: llama.prefill(latents, texts()), "has latent rows, and "),
        (lambda: model.prefill(of_one, texts()), "the cache has 1 layers"),
    )


@needs_latents
def test_a_layer_that_attends_otherwise_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer expands is compared once; its shapes are in each call."""
    model, text = deepseek(), texts()
    cache = model.new_cache(2, 64)
    model.prefill(cache, text[:, :9])
    at = model.model.model.layers[1].self_attn
    usual = at.expand_kv
    monkeypatch.setattr(at, "expand_kv", lambda *rows: [x[:, :2] for x in usual(*rows)])
    message = r"layer 1 .* queries \[2, 4, 1, 80\] to keys \[2, 2, 1, 80\]"
    with pytest.raises(UnsupportedModelError, match=message):
        model.step(cache, text[:, 9])
    assert [one.seq_lens.tolist() for one in cache.layers] == [[9, 9]] * 2


@needs_latents
@pytest.mark.parametrize("option", [{"softcap": 5.0}, {"s_aux": torch.zeros(4)}], ids=list)
def test_caps_and_sinks_beside_latents_are_refused(
    option: dict[str, Any], model: CachedModel
) -> None:
    at = model.model.model.layers[0].self_attn
    model.model.set_attn_implementation("kvquant")
    cache = QuantizedCache(model.model)
    rows = cache.update(torch.randn(2, 1, 3, 256), torch.randn(2, 1, 3, 32), 0)
    keys, values = at.expand_kv(*rows)
    attend = ALL_ATTENTION_FUNCTIONS["kvquant"]
    with pytest.raises(UnsupportedModelError, match=r"layer 0 .* and a cap or sink logits as well"):
        attend(at, torch.randn(2, 4, 3, 80), keys, values, None, scaling=0.1, **option)
    model.model.set_attn_implementation("sdpa")


@needs_latents
def test_weights_that_are_elsewhere_are_refused() -> None:
    module = deepseek().model.model.layers[0].self_attn.to("meta")
    with pytest.raises(UnsupportedModelError, match=r"layer 0 has its weights elsewhere"):
        LatentHeads(module, "layer 0", latent_dim=256, rope_dim=32)


@needs_latents
def test_a_float16_model_is_described_as_it_is_stored() -> None:
    model = deepseek().model.half()
    model.set_attn_implementation("kvquant")
    cache = QuantizedCache(model)
    before = cache.describe()
    model(texts(), **caching(cache))
    assert before == cache.describe() and before.startswith("layers 0-1: latent rows int8-g4+fp16")


class _Other(torch.nn.Linear):
    """As the layers of quantized weights, and adapters."""


class _Packed(torch.Tensor):
    """As the weights of torchao."""


# what takes which place of a layer, and the error
OTHERWISE: dict[str, tuple[str, Any, str]] = {
    "subclass": ("kv_b_proj", lambda: _Other(256, 352, bias=False), "by _Other, whose weight can"),
    "packed": ("", None, "keys and values by Linear of a _Packed, whose weight cannot be absorbed"),
    "bias": ("kv_b_proj", lambda: torch.nn.Linear(256, 352), "by Linear, whose weight cannot"),
    "rows": ("kv_b_proj", lambda: torch.nn.Linear(256, 90, bias=False), r"\[90, 256\]: a head has"),
    "indexer": ("indexer", lambda: torch.nn.Linear(1, 1), "tokens that an indexer chooses"),
    "order": ("", None, "makes other keys and values of latents than DeepSeek's"),
}


@needs_latents
@pytest.mark.parametrize("case", OTHERWISE)
def test_layers_that_make_keys_otherwise_are_refused(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deepseek()
    at = model.model.model.layers[1].self_attn
    if case == "packed":
        at.kv_b_proj.weight = torch.nn.Parameter(at.kv_b_proj.weight.detach().as_subclass(_Packed))
    elif case == "order":
        usual = at.expand_kv
        monkeypatch.setattr(at, "expand_kv", lambda *rows: [x.flip(-1) for x in usual(*rows)])
    else:
        name, made, _ = OTHERWISE[case]
        setattr(at, name, made())
    *_, message = OTHERWISE[case]
    with pytest.raises(
        UnsupportedModelError, match=rf"layer 1 \(DeepseekV3Attention\) .*{message}"
    ):
        model.new_cache(2, 64)
    model.model.set_attn_implementation("kvquant")
    cache = QuantizedCache(model.model)
    if case == "rows":
        return  # the model does not run
    with pytest.raises(UnsupportedModelError, match=message):
        model.model(texts(), **caching(cache))
    assert cache.kv is not None and not cache.kv.seq_lens.any()


def test_transformers_that_hand_keys_of_all_heads_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if hands_latents:
        monkeypatch.delattr(DeepseekV3Attention, "expand_kv")
    model = deepseek()
    with pytest.raises(UnsupportedModelError, match=r"layer 0 .* install transformers 5\.17"):
        model.new_cache(2, 64)
    model.model.set_attn_implementation("kvquant")
    cache = QuantizedCache(model.model)
    rows = cache.update(torch.zeros(2, 1, 9, 256), torch.zeros(2, 1, 9, 32), 0)
    assert cache.latents is not None and cache.kv is not None
    cache.append(cache.latents, *rows)
    assert cache.kv.layers[0].seq_lens.tolist() == [9, 9]
    with pytest.raises(UnsupportedModelError, match=r"layer 1 .* install transformers 5\.17"):
        cache.update(torch.zeros(2, 4, 9, 80), torch.zeros(2, 4, 9, 40), 1)
    assert not any(at.seq_lens.any() for at in cache.kv.layers)


@needs_latents
@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["bf16", "int8-g4", "int8-g4 in a plan's bases"])
def test_logits_on_cuda_are_those_of_the_cpu(rows: str) -> None:
    """Of a model in bf16 there and in float32 here, no further than transformers' own are."""
    model = deepseek("wide rows", num_attention_heads=16, num_key_value_heads=16, **DENSE)
    options: dict[str, Any] = {"fmt": rows, "recent_len": 8}
    if "plan" in rows:
        plan = latent_plan(2, model.config_dict, fmt=("int8-g4", "bf16"))
        options = {"plan": plan, "recent_len": 8}
    model.model.bfloat16().cuda()
    on_cuda = CachedModel(model.model)
    cache = on_cuda.new_cache(2, 64, **options)
    theirs = plain(model, transformers.DynamicCache).float().cpu()
    ours = read(on_cuda, cache).float().cpu()
    cache.check()
    model.model.float().cpu()
    wanted = read(model, model.new_cache(2, 64, **options))
    exact = plain(model, transformers.DynamicCache)
    assert error(ours, wanted) < 2 * error(theirs, exact)


@needs_latents
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 6.3e-3)])
def test_absorbed_attention_is_that_of_keys_and_values(dtype: str, bound: float) -> None:
    """Of one step, beside softmax in float64 over what the model makes of the dequantized rows.

    Queries, output and values are rounded to bfloat16, each by 2.1e-3 at most.
    """
    of = getattr(torch, dtype)
    module = deepseek("wide rows").model.model.layers[0].self_attn.to(of)
    heads = LatentHeads(module, "layer 0", latent_dim=512, rope_dim=64)
    torch.manual_seed(0)
    cache = LatentKVCache(1, 2, 64, fmt="int4-g8", sink_len=2, recent_len=8)
    rows = torch.randn(2, 1, 41, 576).to(of)
    cache.append(0, rows[:, :, :40, :512], rows[:, :, :40, 512:], [40, 17])
    query = torch.randn(2, 4, 48 + 64).to(of)
    queries = heads.absorb(query)
    new = rows[:, :, 40:]
    out = cache.step(0, *queries, new[..., :512], new[..., 512:], sm_scale=0.1)
    given = heads.values(out).detach()
    keys, values = (
        module.double().requires_grad_(False).expand_kv(*(x.double() for x in cache.dequantized(0)))
    )
    for b, length in enumerate((41, 18)):
        scores = 0.1 * torch.einsum("hd,htd->ht", query[b].double(), keys[b, :, :length])
        wanted = torch.einsum("ht,htd->hd", scores.softmax(-1), values[b, :, :length])
        assert error(given[b].double(), wanted) < bound


@needs_latents
def test_memory_that_is_not_in_use_is_not_read(model: CachedModel) -> None:
    caches = [model.new_cache(2, 64, fmt="int8-g4", recent_len=8) for _ in range(2)]
    for at in caches[1].layers:
        for rows in (at.packed, at.exact_rows):  # type: ignore[attr-defined]  # of latents
            rows.fill_(255)  # NaN as a scale, as bf16 and as fp16
    assert torch.equal(read(model, caches[0]), read(model, caches[1]))
