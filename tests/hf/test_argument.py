"""The argument by which models take a cache."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from hf_cases import FP16, by_kvquant, tiny, tokens  # noqa: E402

from kvquant.hf.argument import ARGUMENT, as_argument  # noqa: E402
from kvquant.hf.cache import QuantizedCache  # noqa: E402


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
