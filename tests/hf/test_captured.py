"""CapturedStep: what single steps give, from one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from kvquant import CachedModel, KVCache
from kvquant.errors import (
    ConfigError,
    DeviceError,
    NonFiniteError,
    ShapeError,
    UnsupportedModelError,
)
from kvquant.hf.captured import CapturedStep

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
LENS = [70, 300, 1]


def make(device: str, windows: bool = False, **config: Any) -> CachedModel:
    torch.manual_seed(0)
    model: Any
    if windows:
        model = MistralForCausalLM(MistralConfig(**(SHAPE | {"sliding_window": 160} | config)))
    else:
        model = LlamaForCausalLM(LlamaConfig(**(SHAPE | config)))
    return CachedModel(model.to(torch.bfloat16).to(device).eval())


def filled(model: CachedModel, **options: Any) -> tuple[KVCache, torch.Tensor]:
    cache = model.new_cache(len(LENS), 512, **options)
    tokens = torch.randint(512, (len(LENS), max(LENS)), generator=torch.Generator().manual_seed(1))
    return cache, model.prefill(cache, tokens.to(cache.device), LENS).argmax(-1)


@pytest.mark.gpu
@pytest.mark.parametrize("windows", [False, True], ids=["full", "windows"])
@pytest.mark.parametrize("fmt", ["bf16", "int8", "int4-g4"])
def test_it_gives_what_single_steps_give(fmt: str, windows: bool) -> None:
    model = make("cuda", windows)
    cache, first = filled(model, k_format=fmt, v_format=fmt)
    other = cache.fork()
    step = CapturedStep(model, cache)
    for _ in range(2):  # the second time after a crop, and from other lengths
        token = first
        for _ in range(20):
            found, expected = step(token).clone(), model.step(other, token)
            error = (found - expected).float().norm() / expected.float().norm()
            assert error < 1e-2  # work may be cut otherwise: a graph is planned for all lengths
            token = expected.argmax(-1)
        cache.check()
        assert cache.seq_lens.tolist() == other.seq_lens.tolist() == [n + 20 for n in LENS]
        cache.crop(LENS)
        other.crop(LENS)


@pytest.mark.gpu
def test_nothing_is_lost_silently() -> None:
    model = make("cuda")
    cache, token = filled(model)
    step = CapturedStep(model, cache)
    step(token)
    cache.crop(LENS)
    model.step(cache, token)  # tokens that others append count
    for _ in range(512 - 301):
        step(token)
    with pytest.raises(ShapeError, match="all 512 tokens"):
        step(token)
    cache.check()
    cache.crop(LENS)
    step(token)
    cache.check()
    with torch.no_grad():
        model.model.model.layers[1].self_attn.k_proj.weight.fill_(float("nan"))
    step(token)
    with pytest.raises(NonFiniteError):
        cache.check()
    with pytest.raises(ShapeError, match="give \\[3\\]"):
        step(token[:2])


@pytest.mark.gpu
def test_a_model_that_looks_at_lengths_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = make("cuda", rope_parameters=rope)
    cache, _ = filled(model)
    with pytest.raises(UnsupportedModelError, match="length of the text"):
        CapturedStep(model, cache)


def test_it_needs_a_gpu() -> None:
    model = make("cpu")
    with pytest.raises(DeviceError, match="on CUDA only"):
        CapturedStep(model, model.new_cache(1, 64))


@pytest.mark.gpu
def test_a_cache_that_has_grown_is_captured_again() -> None:
    model = make("cuda")
    cache, token = filled(model)
    step = CapturedStep(model, cache)
    step(token)
    cache.grow(1024)
    with pytest.raises(ConfigError, match="has grown since"):
        step(token)
    del model  # the graph reads its weights
    CapturedStep(step._model, cache)(token)
    assert cache.seq_lens.tolist() == [n + 2 for n in LENS]
