"""Models of several devices: heads spread over ranks, and layers that are not where a cache is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant import CachedModel, CachePlan
from kvquant.cli.demo import MODEL
from kvquant.errors import ConfigError, UnsupportedModelError

transformers = pytest.importorskip("transformers")
from example_plan import example_plan  # noqa: E402
from hf_cases import (  # noqa: E402
    FP16,
    LATENT_SIZES,
    by_kvquant,
    caching,
    hands_latents,
    random_model,
    tiny,
    tokens,
)
from ranks import run_ranks  # noqa: E402

from kvquant.hf.cache import QuantizedCache  # noqa: E402
from kvquant.io.model_id import model_identity  # noqa: E402

SCRIPT = Path(__file__).parent.parent / "support" / "hf_rank.py"


@pytest.mark.slow
def test_each_rank_keeps_its_own_heads(tmp_path: Path) -> None:
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
    assert run_ranks(SCRIPT, 2, tmp_path, tmp_path) == ["right\n"] * 2


def test_parts_of_heads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = by_kvquant(tiny("Llama").model)
    monkeypatch.setattr(type(model), "tp_size", 4)
    with pytest.raises(UnsupportedModelError, match=r"2 KV heads, and its tp_plan .* 4 parts"):
        QuantizedCache(model)
    with pytest.raises(UnsupportedModelError, match=r"2 KV heads, and its tp_plan .* 4 parts"):
        CachedModel(model).new_cache(1, 8)
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
