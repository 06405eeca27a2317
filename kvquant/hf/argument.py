"""The argument by which a model takes its cache."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from transformers.masking_utils import create_causal_mask

NAMES = "cache", "past_key_values"
# of this transformers: its generate, and its own models
ARGUMENT = next(x for x in NAMES if x in inspect.signature(create_causal_mask).parameters)


def as_argument(model: Any, past: Any) -> dict[str, Any]:
    """{"cache": past} for model(tokens, ...); "past_key_values" before transformers 5.24."""
    kind: Any = type(getattr(model, "_orig_mod", model))
    return {_argument_of(kind): past}


@cache
def _argument_of(kind: Any) -> str:
    known = inspect.signature(kind.forward).parameters
    return next((name for name in NAMES if name in known), ARGUMENT)
