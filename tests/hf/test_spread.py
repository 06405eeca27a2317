"""Models of several devices: with layers on each (device_map), whose rows lie where their keys do,
or with heads on each (ranks).

On the CPU alone tensors are copied on their way to "cpu:0", which stands for another device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import is_on

from kvquant import CachedModel, CachePlan, CapturedStep, load_cache, save_cache
from kvquant.calibration.calibrate import Sizes, calibrate
from kvquant.cli.demo import MODEL
from kvquant.errors import ConfigError, DeviceError, UnsupportedModelError

transformers = pytest.importorskip("transformers")
from example_plan import example_plan  # noqa: E402
from hf_cases import (  # noqa: E402
    FP16,
    LATENT_SIZES,
    by_kvquant,
    caching,
    hands_latents,
    random_model,
    random_module,
    tiny,
    tokens,
)
from ranks import run_ranks  # noqa: E402

from kvquant.hf import cache as hf_cache  # noqa: E402
from kvquant.hf import model as hf_model  # noqa: E402
from kvquant.hf.cache import QuantizedCache  # noqa: E402
from kvquant.hf.masks import MaskMark, _Mask, _with_mark  # noqa: E402
from kvquant.hf.models.configs import layer_devices  # noqa: E402
from kvquant.io.model_id import model_identity  # noqa: E402

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    # two masks in a call: of a window, and of all tokens
    "Gemma3Text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
}
DEVICES = [
    pytest.param(["cpu", "cpu:0"], id="cpu"),
    pytest.param(["cuda:0", "cpu"], id="cuda and cpu", marks=pytest.mark.gpu),
    pytest.param(["cpu", "cuda:0"], id="cpu and cuda", marks=pytest.mark.gpu),
    pytest.param(["cuda:0", "cuda:1"], id="two GPUs", marks=pytest.mark.gpu(2)),
]
several = pytest.mark.parametrize("devices", DEVICES)


def on(device: str) -> Callable[..., Any]:
    """A hook that brings all tensors that a module is given to a device, as accelerate's do."""

    def moved(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to(device)
        return type(x)(map(moved, x)) if isinstance(x, tuple) else x

    return lambda module, args, kwargs: (
        moved(args),
        {name: moved(value) for name, value in kwargs.items()},
    )


def split(model: Any, devices: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model with its layers on these devices, the rest on the first."""
    model.to(devices[0])
    for layer, device in zip(model.model.layers, devices, strict=True):
        layer.to(device).register_forward_pre_hook(on(device), with_kwargs=True)
    model.model.norm.register_forward_pre_hook(on(devices[0]), with_kwargs=True)
    model.set_attn_implementation("kvquant")
    if devices[1] == "cpu:0":  # weights do not tell it from "cpu"
        places = [torch.device(one) for one in devices]
        for module in (hf_cache, hf_model):
            monkeypatch.setattr(module, "layer_devices", lambda *_: places)
    return model


def padded() -> dict[str, torch.Tensor]:
    """Three prompts, two of them padded on the left."""
    mask = torch.ones(3, 24, dtype=torch.int64)
    mask[1, :15], mask[2, :7] = 0, 0
    return {"input_ids": tokens(3, 24), "attention_mask": mask}


def logits_of(model: Any, past: QuantizedCache, new: torch.Tensor) -> torch.Tensor:
    """After the prompts, and after each of these tokens, [batch, tokens]."""
    ids, mask = padded().values()
    found: list[torch.Tensor] = []
    for part in (ids, *new[:, :, None].unbind(1)):
        mask = torch.cat([mask, mask.new_ones(3, part.shape[1] * bool(found))], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -part.shape[1] :]
        given = {"attention_mask": mask, "position_ids": positions}
        moved = {name: x.to(model.device) for name, x in given.items()}
        out = model(part.to(model.device), **caching(past), **moved)
        found.append(out.logits[:, -1].cpu())
    return torch.stack(found)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits are those: on CUDA queries have 16 bit, and one token more or less is 0.2."""
    return bool((found.cpu() - expected).norm() < 1e-2 * expected.norm())


def assert_spread(cache: QuantizedCache, devices: list[str]) -> None:
    assert cache.kv is not None and cache.kv.devices == [torch.device(one) for one in devices]
    for layer, name in zip(cache.kv.layers, devices, strict=True):
        assert all(is_on(x.device, name) for x in layer.tensors().values())
    cache.check()


@several
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["", "num_beams", "max_seq_len"])
def test_generate_gives_what_it_gives_on_one_device(
    kind: str, case: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = OPTIONS | ({"num_beams": 3} if case == "num_beams" else {})
    rows = FP16 | ({"max_seq_len": 40} if case == "max_seq_len" else {})
    whole = tiny(kind, **KINDS[kind]).model
    whole.generation_config.eos_token_id = None
    whole.set_attn_implementation("kvquant")
    past = QuantizedCache(whole, **rows)
    wanted = whole.generate(**padded(), **caching(past), **options)
    model = split(tiny(kind, **KINDS[kind]).model, devices, monkeypatch)
    model.generation_config.eos_token_id = None
    past = QuantizedCache(model, **rows)
    assert not past.is_compileable
    given = {name: x.to(devices[0]) for name, x in padded().items()}
    found = model.generate(**given, **caching(past), **options)
    assert_spread(past, devices)
    assert past.get_seq_length() == 31 and found.shape == wanted.shape
    if devices[1] == "cpu:0":
        assert found.tolist() == wanted.tolist()
    new = wanted[:, 24:28]
    pasts = QuantizedCache(whole, **rows), QuantizedCache(model, **rows)
    assert close(logits_of(model, pasts[1], new), logits_of(whole, pasts[0], new))


@several
def test_a_cached_model_reads_and_decodes(
    devices: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, text, lens = tiny("Llama"), tokens(3, 40), [40, 3, 17]
    caches = [whole.new_cache(3, 64, **FP16)]
    spread = CachedModel(split(tiny("Llama").model, devices, monkeypatch))
    caches.append(spread.new_cache(3, 64, **FP16))
    assert [cache.is_spread for cache in caches] == [False, True]

    logits = [
        one.prefill(cache, text, lens, chunk=16)
        for one, cache in zip((whole, spread), caches, strict=True)
    ]
    assert close(logits[1], logits[0])
    caches[1].check()
    save_cache(caches[1], tmp_path / "cache.safetensors", model=spread.config_dict)
    where = caches[1].devices
    path, config = tmp_path / "cache.safetensors", spread.config_dict
    caches.append(load_cache(path, model=config, device=where))
    for _ in range(4):
        token = logits[0].argmax(-1)
        logits[0] = whole.step(caches[0], token)
        for cache in caches[1:]:
            assert close(spread.step(cache, token), logits[0])
    with pytest.raises(DeviceError, match="several devices" if devices[0] != "cpu" else "on cpu"):
        CapturedStep(spread, caches[1])


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [["cuda:0", "cpu"], ["cpu", "cuda:0"]], ids=["cuda", "cpu"])
def test_the_cache_of_a_config_is_refused_where_layers_lie_elsewhere(
    devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = split(tiny("Llama").model, devices, monkeypatch)
    cache = QuantizedCache(model.config, **FP16)
    for text in (tokens(2, 9), tokens(2, 1)):
        with pytest.raises(UnsupportedModelError, match=r"layer 1 .* make the cache of the model"):
            model(text.to(devices[0]), **caching(cache))
        assert cache.kv is not None and cache.kv.seq_lens.tolist() == [0, 0]


@several
def test_a_spread_model_is_calibrated_and_folded(
    devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny("Llama")
    spread = CachedModel(split(tiny("Llama").model, devices, monkeypatch))
    sizes = Sizes(observed=256, length=64, windows=2, context=40, scored=4)
    text = tokens(600)
    wanted, found = (calibrate(one, text, sizes=sizes) for one in (whole, spread))
    assert wanted is not None and found is not None
    assert found.bits == wanted.bits
    for name in ("k.offset", "v.offset"):
        torch.testing.assert_close(found.tensors[name], wanted.tensors[name], atol=1e-3, rtol=1e-3)
    before = spread.plain(tokens(3, 24)).cpu()
    folded = spread.fold_values(wanted)
    assert not torch.equal(spread.plain(tokens(3, 24)).cpu(), before), "nothing was folded"
    assert close(spread.plain(tokens(3, 24)), before)
    caches = spread.new_cache(3, 64, plan=folded), whole.new_cache(3, 64, plan=wanted)
    assert caches[0].is_spread
    given = tokens(3, 24), [24, 9, 17]
    assert close(spread.prefill(caches[0], *given), whole.prefill(caches[1], *given))


def test_layers_of_transformers_get_their_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"attention_chunk_size": 16, "no_rope_layers": [1, 0]}
    changes |= {"layer_types": ["chunked_attention", "full_attention"]}
    text = torch.randint(5, 97, (2, 24), generator=torch.Generator().manual_seed(2))
    found = []
    for devices in (None, ["cpu", "cpu:0"]):
        model = by_kvquant(random_module("llama4_text", changes))
        if devices:
            split(model, devices, monkeypatch)
            monkeypatch.setattr(hf_cache, "layer_devices", lambda *_: [torch.device("cpu:0")])
        cache = QuantizedCache(model, placed=True, **FP16)
        found.append(model(text, **caching(cache)).logits)
        assert cache.describe().startswith("layer 0: DynamicSlidingWindowLayer")
        assert type(found[-1]) is torch.Tensor
    assert torch.equal(*found)


def test_a_mark_goes_with_its_mask_and_no_other() -> None:
    mark = MaskMark(window=5)
    mask = _with_mark(torch.zeros(1, 1, 3, 1, dtype=torch.bool), mark)
    copied = copy.deepcopy({"mask": mask, "again": mask})
    assert copied["again"] is copied["mask"] and torch.equal(copied["mask"], mask)
    moved = mask.to("cpu:0"), mask.to("cpu:0", non_blocking=True), mask.cpu(), mask.to("cpu")
    for one in (*moved, copied["mask"]):
        assert type(one) is _Mask and one.kvquant_mask == mark
    others = mask[:, :, -1:], mask & mask, mask.float(), torch.where(mask, 0.0, 1.0)
    for one in (*others, torch.ones(3).to(mask), mask.to(torch.float32), mask.to(torch.ones(3))):
        assert type(one) is torch.Tensor and not hasattr(one, "kvquant_mask")
    copied["mask"].fill_(True)
    assert not mask.any(), "the copy has memory of its own"


@pytest.mark.parametrize("devices", [None, ["cpu", "cpu:0"]], ids=["one", "several"])
def test_no_hook_brings_the_places_of_logits_elsewhere(
    devices: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate's hook of a whole model brings all tensors to one device, where the last layer
    need not be. "meta" is that device here."""
    accelerate = pytest.importorskip("accelerate")
    whole, text, lens = tiny("Llama"), tokens(3, 40), [40, 3, 17]
    spread = CachedModel(tiny("Llama").model)
    if devices:
        split(spread.model, devices, monkeypatch)

    def bring(module: Any, args: Any, kwargs: Any) -> Any:
        keep = accelerate.utils.send_to_device(kwargs["logits_to_keep"], "meta")
        return args, kwargs | {"logits_to_keep": keep}

    spread.model.register_forward_pre_hook(bring, with_kwargs=True)
    caches = whole.new_cache(3, 64, **FP16), spread.new_cache(3, 64, **FP16)
    assert caches[1].is_spread == bool(devices)
    wanted = whole.prefill(caches[0], text, lens, chunk=16)
    assert close(spread.prefill(caches[1], text, lens, chunk=16), wanted)
    token = wanted.argmax(-1)
    assert close(spread.step(caches[1], token), whole.step(caches[0], token))


def test_devices_are_those_of_weights_or_of_hooks(tmp_path: Path) -> None:
    model = tiny("Llama", num_hidden_layers=3).model
    assert layer_devices(model, [0, 1, 2]) is None
    model.model.layers[1].to("meta")
    assert layer_devices(model, [0, 1, 2]) is None, "nobody says where it computes"
    hook = SimpleNamespace(execution_device="cuda:3")
    model.model.layers[1].self_attn.q_proj._hf_hook = SimpleNamespace(hooks=[hook])
    cpu, gpu = torch.device("cpu"), torch.device("cuda:3")
    assert layer_devices(model, [0, 1, 2]) == [cpu, gpu, cpu]
    assert layer_devices(model, [1]) == [gpu], "the model begins on the CPU"
    assert layer_devices(model, [0, 2]) is None
    model.model.layers[2].to("meta")
    model.model.layers[2].self_attn.q_proj._hf_hook = SimpleNamespace(execution_device=cpu)
    assert layer_devices(model, [1, 2]) == [gpu, cpu]


def test_weights_that_accelerate_brings_lie_where_it_brings_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny("Llama").model
    expected = model(tokens(1, 5)).logits
    accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert all(weight.is_meta for weight in model.model.layers.parameters())
    assert layer_devices(model, [0, 1]) == [torch.device("cpu")] * 2
    model.set_attn_implementation("kvquant")
    cache = QuantizedCache(model, **FP16)
    found = model(tokens(1, 5), **caching(cache)).logits
    assert cache.kv is not None and cache.kv.devices == [torch.device("cpu")] * 2
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=0)
    cached, whole = CachedModel(model), tiny("Llama")
    assert cached.model.device.type == "meta"
    assert close(cached.plain(tokens(3, 24)), whole.plain(tokens(3, 24)))
    caches = cached.new_cache(3, 64, **FP16), whole.new_cache(3, 64, **FP16)
    given = tokens(3, 24), [24, 9, 17]
    wanted = whole.prefill(caches[1], *given)
    assert close(cached.prefill(caches[0], *given), wanted)
    token = wanted.argmax(-1)
    assert close(cached.step(caches[0], token), whole.step(caches[1], token))
    seen: list[torch.Tensor] = []
    for one in (cached, whole):
        one.observe(tokens(1, 24), lambda layer, q, k, v, scale: seen.append(k))
    assert len(seen) == 4 and all(torch.allclose(seen[i], seen[i + 2]) for i in (0, 1))
    plan = calibrate(whole, None, zero_data=True, sizes=Sizes(observed=256, length=64))
    assert plan is not None
    assert "_weights" in whole.config_dict
    with caplog.at_level("WARNING", "kvquant"):
        assert "_weights" not in cached.config_dict
        assert cached.new_cache(3, 64, plan=plan).bases is not None
        assert cached.new_cache(3, 64, plan="auto").bases is None
    assert "cannot be compared with these weights: model.embed_tokens.weight" in caplog.text
    assert "no plan is possible, the default formats are taken: model.embed_tok" in caplog.text
    for refused in (
        cached.output_weights,
        lambda: cached.fold_values(plan),
        lambda: calibrate(cached, None, zero_data=True, sizes=Sizes(observed=256, length=64)),
    ):
        with pytest.raises(UnsupportedModelError, match=r"layer 0 .*\(offloaded by device_map"):
            refused()


def dispatched(first: Any, second: Any, **options: Any) -> Any:
    """The model with its first layer on one device, the rest on another one, by accelerate."""
    accelerate = pytest.importorskip("accelerate")
    where = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), first)
    where |= dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), second)
    return accelerate.dispatch_model(tiny("Llama").model, device_map=where, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["cpu", 0])
def test_accelerate_spreads_the_layers(first: Any) -> None:
    whole, second = by_kvquant(tiny("Llama").model), 0 if first == "cpu" else "cpu"
    model = by_kvquant(dispatched(first, second, main_device="cpu"))
    past, new = QuantizedCache(model, **FP16), tokens(3, 4)
    found = logits_of(model, past, new)
    assert_spread(past, ["cpu", "cuda:0"] if first == "cpu" else ["cuda:0", "cpu"])
    assert close(found, logits_of(whole, QuantizedCache(whole, **FP16), new))
    past.reset()
    given = {name: x.to(model.device) for name, x in padded().items()}
    assert model.generate(**given, **caching(past), **OPTIONS).shape[0] == 3
    past.check()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("first", "second"), [("cpu", 0), (0, "cpu"), pytest.param(0, 1, marks=pytest.mark.gpu(2))]
)
def test_a_cached_model_where_accelerate_chooses_the_main_device(first: Any, second: Any) -> None:
    """Weights on the CPU are brought to a GPU then."""
    whole, given = tiny("Llama"), (tokens(3, 24), [24, 9, 17])
    cached = CachedModel(dispatched(first, second))
    caches = whole.new_cache(3, 64, **FP16), cached.new_cache(3, 64, **FP16)
    assert {one.type for one in caches[1].devices} == {"cuda"}
    assert caches[1].is_spread == (second == 1)
    wanted = whole.prefill(caches[0], *given)
    assert close(cached.prefill(caches[1], *given), wanted)
    token = wanted.argmax(-1)
    assert close(cached.step(caches[1], token), whole.step(caches[0], token))
    assert close(cached.plain(given[0]), whole.plain(given[0]))


SCRIPT = Path(__file__).parent.parent / "support" / "hf_rank.py"


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu(2)),
    ],
)
def test_each_rank_keeps_its_own_heads(device: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers spreads models with it")
    made = tiny("Llama", num_key_value_heads=4)
    made.model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path)
    if hands_latents:  # its tp_plan cuts kv_b_proj, which is absorbed
        sizes = {"first_k_dense_replace": 2, "vocab_size": 98}  # half for each rank
        latents = random_model("glm4_moe_lite", LATENT_SIZES | sizes)
        latents.model.save_pretrained(tmp_path / "latents")
        transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path / "latents")
    plan = example_plan(2, 4, 64)
    tensors = dict(plan.tensors) | {
        f"{side}.offset": 2 * torch.randn(2, 4, 64) for side in "kv"
    }  # each head has its own
    model = model_identity(transformers.AutoConfig.from_pretrained(tmp_path).to_dict())
    CachePlan(dict(plan.facts) | {"model": model}, tensors).save(tmp_path / "plan.safetensors")
    assert run_ranks(SCRIPT, 2, tmp_path, tmp_path, device=device) == ["right\n"] * 2


def test_parts_of_heads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = by_kvquant(tiny("Llama").model)
    monkeypatch.setattr(type(model), "tp_size", 4)
    for make in (lambda: QuantizedCache(model), lambda: CachedModel(model).new_cache(1, 8)):
        with pytest.raises(UnsupportedModelError, match=r"2 KV heads, and its tp_plan .* 4 parts"):
            make()
    monkeypatch.setattr(type(model), "tp_size", 2)
    QuantizedCache(model)


def test_one_process_has_no_ranks() -> None:
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node=2, or leave tp_plan out"):
        CachedModel.from_pretrained(MODEL, tp_plan="auto")


def test_layers_that_are_not_where_the_cache_is_are_refused() -> None:
    model = by_kvquant(tiny("Llama").model)

    def move(module: Any, args: Any, kwargs: Any) -> Any:
        return tuple(x.to("meta") for x in args), {
            name: tuple(x.to("meta") for x in value) if isinstance(value, tuple) else value
            for name, value in kwargs.items()
        }

    model.model.layers[1].to("meta").register_forward_pre_hook(move, with_kwargs=True)
    cache = QuantizedCache(model, **FP16)
    for text in (tokens(2, 9), tokens(2, 1)):
        with pytest.raises(UnsupportedModelError, match=r"layer 1 .* is on meta, its rows on cpu"):
            model(text, **caching(cache))
        assert cache.kv is not None and cache.kv.seq_lens.tolist() == [0, 0]
