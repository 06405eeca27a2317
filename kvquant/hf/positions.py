"""How a Hugging Face model counts positions: whether from those that it is given, and how far."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..errors import UnsupportedModelError

# names of learned position embeddings, and parts of the names of towers that have others
_TABLES = {"embed_positions", "position_embeddings", "wpe"}
_OTHERS = ("audio", "image", "speech", "vision", "visual")


def positions_of(model: Any) -> int | None:
    """How many positions a model has.

    Returns:
        Rows of its learned position embeddings, as far as tokens get them; None where positions
        are computed, and have no end.

    Raises:
        UnsupportedModelError: it does not take positions that count from 0.
    """
    kind = model.config.model_type
    forwards = {type(module).forward for module in model.modules()}
    asked = {"input_ids", "past_key_values", "position_ids"}  # of the decoder, not of its parts
    if not any(asked <= inspect.signature(one).parameters.keys() for one in forwards):
        raise UnsupportedModelError(
            f"{kind} models count the positions of all sequences alike and take no position_ids: "
            "CachedModel serves sequences of unequal lengths"
        )
    table = _table(model)
    if table is None:
        return None
    if table.padding_idx is not None:
        raise UnsupportedModelError(
            f"{kind} models count positions from padding_idx + 1 and leave padding out (as "
            "RoBERTa): CachedModel counts them from 0"
        )
    return table.num_embeddings - int(getattr(table, "offset", 0))


def _table(model: Any) -> torch.nn.Embedding | None:
    """The learned position embeddings of the text model."""
    for name, module in model.named_modules():
        *path, last = name.split(".")
        is_text = not any(other in part for other in _OTHERS for part in path)
        if isinstance(module, torch.nn.Embedding) and last in _TABLES and is_text:
            return module
    return None
