"""The identity of the model that a cache belongs to."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError, ConfigError

WEIGHTS = "_weights"  # where a config has the fingerprint of the weights; transformers has no such
# there if the weights are in float16: rounded from float32 they have another fingerprint
HALF = "_float16"
log = logging.getLogger("kvquant")

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
    """Name a model by its config, so that no other model continues its cache.

    Args:
        config: config.to_dict() in transformers, or config_dict of a CachedModel, whose
            "_weights" is the fingerprint of the weights.

    Returns:
        "type", the config's model_type or "unknown"; "sha256" of the config as JSON without keys
        that do not change keys and values; and "weights" if the config has them.

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
        **({"weights": config[WEIGHTS]} if WEIGHTS in config else {}),
    }


def check_identity(
    saved: Mapping[str, str], config: Mapping[str, Any], what: str, to: str, advice: str
) -> None:
    """Raise CheckpointError unless a config has the saved model_identity.

    Weights are compared if both sides have them (engines do not). Different float16 weights only
    warn: rounding may cause that. The error uses what, to and advice ("the plan was made for",
    "for", what to do).
    """
    given = model_identity(config)
    for key, name in (("sha256", "config"), ("weights", "weights")):
        ours, theirs = saved.get(key), given.get(key)
        if not ours or not theirs or ours == theirs:
            continue
        if key == "weights" and config.get(HALF):
            log.warning(
                "kvquant: %s weights %s, and these are %s: in float16 only you know whether they "
                "are the same ones, rounded",
                *(what, ours[:12], theirs[:12]),
            )
        else:
            raise CheckpointError(
                f"{what} a {saved['type']!r:.40} model with {name} {ours[:12]}, not {to} this "
                f"{given['type']!r:.40} model with {name} {theirs[:12]}: {advice}"
            )


def _lasting(value: Any) -> Any:
    """A config's value without volatile parts; 1e4 and 10000 become the same number."""
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
