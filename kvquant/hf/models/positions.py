"""How a model counts positions, and whether keys or queries depend on the text's length."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ...errors import UnsupportedModelError
from ..argument import NAMES
from .configs import Turn

# names of learned position embeddings, and parts of the names of towers that have others
_TABLES = {"embed_positions", "position_embeddings", "wpe"}
_OTHERS = ("audio", "image", "speech", "vision", "visual")


def positions_of(model: Any) -> int | None:
    """How many rows of learned position embeddings tokens can get; None if positions are computed.

    Raises:
        UnsupportedModelError: the model takes no positions that count from 0.
    """
    kind = model.config.model_type
    forwards = {type(module).forward for module in model.modules()}
    asked = {"input_ids", "position_ids"}  # of the decoder, not of its parts
    known = [inspect.signature(one).parameters.keys() for one in forwards]
    if not any(asked <= names and not names.isdisjoint(NAMES) for names in known):
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


def check_turn(
    turn: Turn, starts: list[int], lens: list[int], counts: list[int], columns: int
) -> None:
    """Raise if the model would rotate a call's keys, or those of the past, in another way.

    Args:
        turn: of the model.
        starts: the position of each sequence's first token.
        lens: tokens of each sequence before the call.
        counts: those of the call.
        columns: of the call, padding included.
    """
    limit = turn.positions
    before = [start + held for start, held in zip(starts, lens, strict=True)]
    if max(before) + columns <= limit:
        return
    fits = all(
        own + count > limit and (held == 0 or (own > limit and not turn.again))
        for own, held, count in zip(before, lens, counts, strict=True)
    )
    if not fits:
        raise UnsupportedModelError(
            f"this model's RoPE (rope_type {turn.kind!r}) depends on the length of the text: "
            f"beyond {limit} positions it rotates cached keys again, and packed rows cannot be "
            "rotated. Stay below, or read a longer prompt in one call, without shorter ones "
            "beside it" + (", and no token after it" if turn.again else "")
        )


def check_scale(
    scaled_from: int, starts: list[int], lens: list[int], counts: list[int], counted: int
) -> None:
    """Raise if another sequence's position (counted) would scale a call's queries."""
    for start, held, count in zip(starts, lens, counts, strict=True):
        before = start + held
        if before != counted and count and max(before, counted) + count > scaled_from:
            raise UnsupportedModelError(
                f"this model scales queries from position {scaled_from} on and counts the "
                "positions of all sequences alike: stay below, or read and decode sequences of one "
                "length at a time, from position 0"
            )


def _table(model: Any) -> torch.nn.Embedding | None:
    """The learned position embeddings of the text model."""
    for name, module in model.named_modules():
        *path, last = name.split(".")
        is_text = not any(other in part for other in _OTHERS for part in path)
        if isinstance(module, torch.nn.Embedding) and last in _TABLES and is_text:
            return module
    return None
