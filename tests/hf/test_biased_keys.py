"""A model whose keys have large biases is named in the log when it gets rows of few bits."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kvquant import CachedModel, QuantizedCache
from kvquant.hf.models.biases import largest_offset

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


def qwen(bias: float) -> Any:
    """A Qwen2 with one large key bias in the second layer."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    projection = model.model.layers[1].self_attn.k_proj
    with torch.no_grad():
        deviation = projection.weight[5].norm()
        projection.bias[5] = bias * deviation
    return model


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


@pytest.mark.parametrize("way", ["CachedModel", "QuantizedCache"])
def test_rows_of_few_bits_are_warned_of_once(way: str, caplog: pytest.LogCaptureFixture) -> None:
    model = qwen(-40.0)

    def make(**options: Any) -> None:
        if way == "CachedModel":
            CachedModel(model).new_cache(1, 16, **options)
        else:
            model.set_attn_implementation("kvquant")
            QuantizedCache(model, **options)

    make(k_format="int8", v_format="int4-g4")
    assert not warnings(caplog)
    make()
    (told,) = warnings(caplog)
    assert "in 1 of 3 layers keys have biases, up to 40 times" in told
    assert "Rows of 4 bits without a plan" in told and "kvquant calibrate" in told
    make(k_format="int2")
    assert len(warnings(caplog)) == 1, "once for a model"


def test_other_models_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    CachedModel(qwen(8.0)).new_cache(1, 16)
    CachedModel(LlamaForCausalLM(LlamaConfig(**SIZES))).new_cache(1, 16)
    assert not warnings(caplog)


def test_weights_that_are_no_matrices_are_not_looked_at() -> None:
    assert largest_offset(torch.nn.Linear(4, 4, bias=False)) == 0.0
    assert largest_offset(torch.nn.Linear(4, 4, device="meta")) == 0.0
    packed = torch.nn.Linear(4, 4)
    packed.weight = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    assert largest_offset(packed) == 0.0
    packed.weight = torch.nn.Parameter(torch.zeros(8, 1))  # two rows of codes in one
    assert largest_offset(packed) == 0.0
