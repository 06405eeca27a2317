"""Which model a cache belongs to."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError

# what a config says of the program that runs the model, not of the keys and values that come out
_VOLATILE = {
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "experts_implementation",
    "id2label",
    "label2id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def model_identity(config: Mapping[str, Any]) -> dict[str, str]:
    """Name a model by its config, so that a cache is not continued by another one.

    Left out are keys that do not change keys and values (the library's version, dtype, paths, token
    ids and the like, and every key that starts with "_") and keys whose value is None. Two sets of
    weights with one config have one identity.

    Args:
        config: the model's config as a dict (config.to_dict() in transformers).

    Returns:
        "type", the config's model_type ("unknown" without one), and "sha256", that of the config as
        JSON with sorted keys.

    Raises:
        ConfigError: the config is no dict, or holds what JSON cannot.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"the model's config is of type {type(config).__name__}: pass config.to_dict() of a "
            "transformers model, or config_dict of a CachedModel"
        )
    try:
        text = json.dumps(_lasting(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the model's config is not plain data ({error}): pass config.to_dict()"
        ) from None
    return {
        "type": str(config.get("model_type", "unknown")),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def _lasting(value: Any) -> Any:
    """A config's value without what is volatile; 1e4 and 10000 become the same number."""
    if isinstance(value, Mapping):
        kept = {str(key): _lasting(item) for key, item in value.items() if item is not None}
        return {k: v for k, v in kept.items() if k not in _VOLATILE and not k.startswith("_")}
    if isinstance(value, (list, tuple)):
        return [_lasting(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # JSON has none
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
