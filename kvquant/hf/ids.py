"""Whether `generate` continues the text in its cache, by comparing token ids.

No call of a model shows that a text has another beginning: only `generate` gets all ids. The
wrapper compares them before generate computes anything, and keeps the ids that it returned: 8 bytes
a token, as a checksum could not follow crop. Steps compare and read nothing.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from transformers import GenerationMixin

from ..errors import ConfigError
from .argument import NAMES
from .cache import QuantizedCache
from .handed import ANOTHER
from .models.decoders import check_adapter

ANY, BEAM = -1, -2  # in place of ids: padding; a token of a beam, which is not that of the answer


def _watched(generate: Any) -> Any:
    """transformers' generate, which raises ConfigError for another text than its cache's."""

    @wraps(generate)
    def watched(model: Any, inputs: Any = None, *args: Any, **given: Any) -> Any:
        cache = next((given[x] for x in NAMES if isinstance(given.get(x), QuantizedCache)), None)
        if cache is None:
            return generate(model, inputs, *args, **given)
        came = given.get("input_ids") if inputs is None else inputs
        text = None
        if given.get("inputs_embeds") is None and isinstance(came, torch.Tensor):
            text = _whole(cache, came, given.get("attention_mask"))
        # PEFT puts its own there
        check_adapter(getattr(model.prepare_inputs_for_generation, "__self__", model))
        cache.has_beams = False
        known, before, sequences = cache.ids, _size(cache), None
        try:
            found = generate(model, inputs, *args, **given)
            sequences = getattr(found, "sequences", found)
            return found
        finally:
            is_refused = sequences is None and _size(cache) == before
            cache.ids = known if is_refused else None
            if text is not None and cache.kv is not None and not is_refused:
                cache.ids = _held(cache, text, came, sequences)

    return watched


def _size(cache: QuantizedCache) -> tuple[int, int]:
    """Tokens and sequences that a cache holds."""
    return cache.length_of(0), 0 if cache.kv is None else cache.kv.batch


def _whole(cache: QuantizedCache, came: torch.Tensor, mask: Any) -> torch.Tensor | None:
    """The ids of the text that a call of generate goes on with."""
    if came.ndim != 2 or came.is_floating_point():
        return None
    held, ids = cache.length_of(0), came.long()
    known = cache.ids
    columns = mask.shape[1] if isinstance(mask, torch.Tensor) and mask.ndim == 2 else ids.shape[1]
    if columns > ids.shape[1]:  # the new ones
        if known is None or known.shape[1] != held:
            return None
        new = _repeated(ids.to(known.device), len(known))
        return None if new is None else torch.cat([known, new], dim=1)
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        ids = ids.masked_fill(mask.to(ids.device) == 0, ANY)
    if known is None:  # of what others have read, as of a file: it is taken for the text that comes
        return ids
    count = min(known.shape[1], ids.shape[1])
    old, new = known[:, :count], _repeated(ids[:, :count].to(known.device), len(known))
    if new is None:  # the call tells that there are more sequences, or fewer
        return None
    differs = (old != new) & (old != ANY) & (new != ANY)  # another padding is told by the mask
    if bool(differs.any()):
        row, column = differs.nonzero()[0].tolist()
        is_token = int(old[row, column])
        holds = "a token of another beam" if is_token == BEAM else f"token {is_token}"
        raise ConfigError(
            f"another text came: the cache holds {held} tokens, in column {column} of sequence "
            f"{row} {holds}, and token {int(new[row, column])} came there. "
            f"{ANOTHER}. In a conversation give the ids that generate returned, with the new ones "
            "behind them: an answer that is decoded and encoded again may have other ids"
        )
    return ids


def _held(
    cache: QuantizedCache, text: torch.Tensor, came: Any, sequences: Any
) -> torch.Tensor | None:
    """The ids that a cache holds after a call of generate; None if unknown."""
    assert cache.kv is not None
    own = _repeated(text.to(cache.kv.device), cache.kv.batch)
    if own is None or not isinstance(sequences, torch.Tensor):
        return None if own is None else own[:, : cache.past.length]
    held = cache.length_of(0)
    new = sequences[:, came.shape[1] :].to(own)
    if cache.has_beams:
        new = own.new_full((len(own), held), BEAM)
    return torch.cat([own, new], dim=1)[:, :held] if len(new) == len(own) else own[:, :held]


def _repeated(ids: torch.Tensor, sequences: int) -> torch.Tensor | None:
    """The ids of each sequence, of which a text may have several side by side (beams, answers)."""
    times, left = divmod(sequences, len(ids))
    return None if left else ids.repeat_interleave(times, dim=0)


GenerationMixin.generate = _watched(GenerationMixin.generate)  # type: ignore[method-assign]
