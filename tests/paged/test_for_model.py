"""A paged cache that is made of a model, or of its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from example_plan import example_plan

from kvquant import CachePlan, LatentPagedKVCache, PagedBatch, PagedKVCache
from kvquant.errors import CheckpointError, ConfigError, UnsupportedModelError
from kvquant.io.model_id import model_identity

transformers = pytest.importorskip("transformers")
from kvquant.hf.argument import as_argument  # noqa: E402
from kvquant.hf.models import configs  # noqa: E402
from kvquant.hf.models.configs import cache_layers  # noqa: E402

SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 97}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
CACHE: dict[str, Any] = {"num_pages": 8, "max_num_seqs": 2, "max_seq_len": 256}


def config(kind: str, **changes: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(**SMALL | {"head_dim": 64} | changes)


def deepseek(**changes: Any) -> Any:
    return config("DeepseekV3", kv_lora_rank=256, qk_rope_head_dim=32, **changes)


def test_a_model_gives_shape_windows_dtype_and_device() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    changes = {"sliding_window": 48, "layer_types": kinds, "dtype": "float16"}
    for source in (
        one := config("Gemma3Text", **changes),
        transformers.AutoModelForCausalLM.from_config(one, dtype=torch.float16),
    ):
        cache = PagedKVCache.for_model(source, **CACHE, k_format="int8")
        rows = cache.rows.layers[0]
        assert (cache.num_layers, cache.num_kv_heads, rows.k_format.head_dim) == (4, 2, 64)
        assert (str(rows.k_format), str(rows.v_format)) == ("int8", "int4-g4")
        assert cache.windows == [48, None, 48, None]
        assert (cache.exact_format, cache.device) == ("fp16", torch.device("cpu"))
        assert (cache.max_seq_len, cache.num_free_seq_slots, cache.num_free_pages) == (256, 2, 8)
    given = {"exact_format": "bf16", "windows": None}
    cache = PagedKVCache.for_model(source, **CACHE | given)
    assert (cache.exact_format, cache.windows) == ("bf16", [None] * 4)


@pytest.mark.parametrize(
    ("options", "heads"),
    [({}, 1), ({"multi_query": False}, 2), ({"new_decoder_architecture": True}, 2)],
)
def test_falcon_says_in_words_how_many_kv_heads_its_keys_have(
    options: dict[str, bool], heads: int
) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 97}
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, **options))
    keys = model(torch.tensor([[1, 2]])).past_key_values.layers[0].keys
    found = PagedKVCache.for_model(model, num_pages=1, max_seq_len=64, max_num_seqs=1).num_kv_heads
    assert found == keys.shape[1] == heads


def test_layers_of_unlike_head_dim_and_layers_that_own_no_rows() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    changes = {"sliding_window": 48, "layer_types": kinds, "num_kv_shared_layers": 2}
    gemma = config("Gemma4Text", **changes, global_head_dim=128, attention_k_eq_v=False)
    cache = PagedKVCache.for_model(gemma, **CACHE)
    assert [one.k_format.head_dim for one in cache.rows.layers] == [64, 128]
    assert cache.windows == [48, None] and cache_layers(gemma).places == (0, 1)


def test_the_rows_of_a_model_fit() -> None:
    """Its own keys and values, of each layer, are appended and read."""
    model = transformers.AutoModelForCausalLM.from_config(config("Llama")).eval()
    cache = PagedKVCache.for_model(model, **CACHE)
    batch, past = PagedBatch(cache, 1, 40), transformers.DynamicCache()
    with torch.no_grad():
        model(torch.arange(40)[None], **as_argument(model, past))
    cache.allocate("a")
    with batch.extend(["a"], 40):
        for layer, rows in enumerate(past.layers):
            batch.append(layer, rows.keys[0].transpose(0, 1), rows.values[0].transpose(0, 1))
    for layer, rows in enumerate(past.layers):
        k, v = cache.dequantized("a", layer)
        assert torch.equal(k, rows.keys[0].bfloat16().float())  # all are recent
        assert torch.equal(v, rows.values[0].bfloat16().float())


def test_memory_is_divided_by_the_shape_of_a_model() -> None:
    llama = config("Llama")
    options: dict[str, Any] = {"seq_len": 200, "max_seq_len": 256}
    cache = PagedKVCache.for_memory(4_000_000, model=llama, **options)
    assert repr(cache) == repr(PagedKVCache.for_memory(4_000_000, 4, 2, 64, **options))
    latents = LatentPagedKVCache.for_memory(4_000_000, model=deepseek(), **options)
    assert 3_500_000 < latents.nbytes <= 4_000_000
    with pytest.raises(ConfigError, match=r"no shape: behind nbytes give num_layers"):
        PagedKVCache.for_memory(2**20)
    with pytest.raises(ConfigError, match=r"a model has a shape of its own: .* \[4, 2, 64\]"):
        PagedKVCache.for_memory(4_000_000, 4, 2, 64, model=llama)


def test_sizes_are_those_of_the_model() -> None:
    with pytest.raises(ConfigError, match="num_layers and head_dim cannot be given"):
        PagedKVCache.for_model(config("Llama"), **CACHE, num_layers=1, head_dim=64)


def test_latent_models_have_a_class_of_their_own() -> None:
    cache = LatentPagedKVCache.for_model(deepseek(dtype="float16"), **CACHE)
    assert type(cache) is LatentPagedKVCache
    assert [str(one) for one in cache.formats] == ["int8-g4+fp16"] * 4
    assert (cache.formats[0].latent_dim, cache.formats[0].rope_dim) == (256, 32)
    cache = LatentPagedKVCache.for_model(deepseek(), **CACHE, fmt="int4-g8+int8-g4")
    assert str(cache.formats[0]) == "int4-g8+int8-g4"
    with pytest.raises(ConfigError, match="deepseek_v3 model keeps latent rows: use LatentPagedKV"):
        PagedKVCache.for_model(deepseek(), **CACHE)
    with pytest.raises(ConfigError, match="keys and values of heads: use PagedKVCache"):
        LatentPagedKVCache.for_model(config("Llama"), **CACHE)


def test_a_plan_of_the_model_says_formats_and_bases() -> None:
    plan = example_plan(num_layers=4)
    llama = config("Llama")
    with pytest.raises(CheckpointError):
        PagedKVCache.for_model(llama, **CACHE, plan=plan)
    facts = {**plan.facts, "model": model_identity(llama.to_dict())}
    cache = PagedKVCache.for_model(llama, **CACHE, plan=CachePlan(facts, plan.tensors))
    assert cache.bases is not None and cache.num_layers == 4
    assert [one.k_format for one in cache.rows.layers] == plan.k_formats


@pytest.mark.parametrize(
    "source, kind, message",
    [
        (Path("folder"), ConfigError, "model is .*Path: give a model of transformers, or its con"),
        (torch.nn.Linear(1, 1), ConfigError, "model is .*Linear: give a model of transformers"),
        (config("Qwen3Next"), UnsupportedModelError, "layer 0 is 'linear_attention'"),
        (config("Llama4Text"), UnsupportedModelError, "attends to chunks of 8192 tokens"),
        (config("T5"), UnsupportedModelError, "have an encoder before the decoder"),
    ],
)
def test_what_gives_no_cache_is_refused(source: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        PagedKVCache.for_model(source, num_pages=8, max_num_seqs=1)
    with pytest.raises(ConfigError, match="fmt is the format of latent rows"):
        PagedKVCache.for_model(config("Llama"), **CACHE, fmt="int8-g4")


def test_a_model_on_several_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config("Llama"))
    devices = [torch.device("cpu")] * 3 + [torch.device("meta")]
    monkeypatch.setattr(configs, "layer_devices", lambda *given: devices)
    with pytest.raises(UnsupportedModelError, match="layers are on 2 devices"):
        PagedKVCache.for_model(model, **CACHE)
    assert PagedKVCache.for_model(model, **CACHE, device="cpu").device.type == "cpu"
