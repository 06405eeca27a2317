"""PEFT: adapters of weights are served, and those that put virtual tokens in front are refused.

peft need not be installed: Adapted has what kvquant sees of its models.
"""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvquant.errors import UnsupportedModelError

transformers = pytest.importorskip("transformers")
from hf_cases import FP16, caching, random_module, tokens  # noqa: E402

from kvquant.hf.cache import QuantizedCache  # noqa: E402
from kvquant.hf.hybrid import HybridModel  # noqa: E402
from kvquant.hf.model import CachedModel  # noqa: E402

VIRTUAL = 4
OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


class Kind(str, Enum):
    """As PeftType."""

    PROMPT_TUNING = "PROMPT_TUNING"
    PREFIX_TUNING = "PREFIX_TUNING"
    LORA = "LORA"


class Around(torch.nn.Module):
    """A module around a model, with the model's attributes."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_model = base

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)


class Adapted(Around):
    """As PeftModelForCausalLM: the base model, and the config of the adapter that is active."""

    def __init__(self, base: Any, kind: Kind) -> None:
        super().__init__(base)
        is_prompt_learning = kind is not Kind.LORA
        config = SimpleNamespace(peft_type=kind, is_prompt_learning=is_prompt_learning)
        self.active_peft_config = config

    def forward(self, input_ids: torch.Tensor, cache: Any = None, **given: Any) -> Any:
        return self.base_model(input_ids, **caching(cache), **given)

    def generate(self, *args: Any, **given: Any) -> Any:
        self.base_model.prepare_inputs_for_generation = self.prepare_inputs_for_generation
        try:
            return self.base_model.generate(*args, **given)
        finally:
            del self.base_model.prepare_inputs_for_generation

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.base_model).prepare_inputs_for_generation(self.base_model, *args, **kwargs)


class Prefixed(Around):
    """A wrapper of one's own that puts columns in front, and does not say so."""

    def forward(self, input_ids: torch.Tensor, cache: Any = None, **given: Any) -> Any:
        given.pop("position_ids", None)
        states = self.base_model.get_input_embeddings()(input_ids)
        states = torch.cat([states.new_ones(len(states), VIRTUAL, states.shape[2]), states], dim=1)
        return self.base_model(inputs_embeds=states, **caching(cache), **given)


@pytest.mark.parametrize("kind", [Kind.PROMPT_TUNING, Kind.PREFIX_TUNING])
def test_virtual_tokens_are_refused_by_name(kind: Kind, llama: Any) -> None:
    """By each door, and where the cache knows the base model only."""
    adapted = Adapted(llama, kind)
    told = rf"the active adapter of this \w+ is PEFT's {kind.value}, which puts virtual tokens"
    for dequantize in (False, True):
        with pytest.raises(UnsupportedModelError, match=told):
            QuantizedCache(adapted, dequantize=dequantize)
    for door in (CachedModel, HybridModel):
        with pytest.raises(UnsupportedModelError, match=told):
            door(adapted)
    for source in (llama, llama.config):
        past = QuantizedCache(source, **FP16)
        with pytest.raises(UnsupportedModelError, match=told):
            adapted.generate(input_ids=tokens(1, 6), **caching(past), **OPTIONS)
        assert past.get_seq_length() == 0
    found = llama.generate(tokens(1, 6), **caching(past), **OPTIONS)  # the base alone is served
    assert found.shape[1] == 10


def test_adapters_of_weights_are_served(llama: Any) -> None:
    """By both classes, with the answer of transformers' own cache."""
    ids, adapted = tokens(1, 6), Adapted(llama, Kind.LORA)
    wanted = adapted.generate(input_ids=ids, **OPTIONS)
    past = QuantizedCache(adapted, **FP16)
    assert torch.equal(adapted.generate(input_ids=ids, **caching(past), **OPTIONS), wanted)
    served = CachedModel(adapted)
    cache = served.new_cache(1, 16, **FP16)
    found = served.generate(cache, served.prefill(cache, ids), 4, eos_token_id=())
    assert torch.equal(found, wanted[:, 6:])


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_columns_that_were_not_given_are_told(kind: str) -> None:
    """In the first chunk, so no step answers from them. What the cache held stays."""
    base = random_module(
        kind, {"layer_types": ["conv", "full_attention"]} if kind == "lfm2" else {}
    )
    door = HybridModel if kind == "lfm2" else CachedModel
    model = door(Prefixed(base))
    cache = model.new_cache(1, 32)
    with pytest.raises(
        UnsupportedModelError, match=r"given 6 columns .* layers get 10: its forward"
    ):
        model.prefill(cache, tokens(1, 6) % 90)
    assert cache.seq_lens.tolist() == [0]
    if kind == "lfm2":  # a HybridModel steps behind its own prompts only
        return
    plain = door(base)
    plain.prefill(cache, tokens(1, 6) % 90)
    with pytest.raises(
        UnsupportedModelError, match=r"given 1 columns .* layers get 5: its forward"
    ):
        model.step(cache, torch.tensor([5]))
    assert cache.seq_lens.tolist() == [6]
