"""Whether a model's call continues the text in its cache, by its mask and positions.

The host checks everything except the mask and position_ids of a one-token step: the device compares
these, so that the host need not wait, and QuantizedCache.check raises the errors.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import debug
from ..errors import ConfigError
from .handed import ANOTHER, OurCache
from .models.hook import Shown
from .models.positions import check_scale, check_turn
from .padding import Columns, Padding

MASK = (
    "the attention_mask of a step shows other tokens than the cache has and the new one: give it "
    "as it was, with a 1 for each new token. Read a padded prompt several tokens at a time; crop "
    "the cache to hide tokens at its end"
)
POSITIONS = (
    "the cache's sequences go on from other positions than those that the model counts, or is "
    "given. For generate pad prompts on the left (tokenizer.padding_side = 'left'), and go on with "
    "the ids and the attention_mask of the whole text; reset() begins another one. In a loop of "
    "your own give it position_ids=cache.kv.positions[:, None] + torch.arange(new_tokens), or read "
    "and decode by CachedModel"
)
WRONG = MASK, POSITIONS  # what is noted in a step
_PLACED = (
    "as this model does not show position_ids to attention, make the cache of the model, "
    "QuantizedCache(model), or QuantizedCache(..., placed=True) then"
)


def take_mask(text: OurCache, mask: torch.Tensor, columns: int) -> None:
    """Read which columns hold tokens from a mask, [batch, past and new columns] bool.

    Raises:
        ConfigError: the mask contradicts the cache's tokens; for a step on CUDA check() raises it.
    """
    if torch.compiler.is_compiling():
        _check_step_mask(text, mask)
        return
    past = text.past
    if text.told is not None or text.call.due:  # due: a call has failed, hand tells it
        return
    awaits_whole_text = text.hook is not None and text.hook.awaits_whole_text
    if awaits_whole_text and mask.shape[1] == columns:  # made before the hook cuts the ids
        columns = text.check_new(columns - past.length)
    if mask.shape[1] < past.length + columns:
        if mask.shape[1] == columns > 1 and not past.is_empty:
            text.refuse_anew()
        raise ConfigError(
            f"attention_mask has {mask.shape[1]} columns, of {past.length} in the cache and "
            f"{columns} new ones: give it for all of them. {ANOTHER}"
        )
    if text.kv is not None and mask.shape[0] != text.kv.batch and past.length:
        return  # hand tells it
    mask = mask[:, : past.length + columns]
    if text.is_step(columns):
        _check_step_mask(text, mask)
        return
    on_host = mask.cpu()
    kept = on_host[:, : past.length].sum(1).tolist()
    if past.length and kept != past.lens:
        raise ConfigError(
            f"attention_mask shows {kept} tokens in the columns that the cache holds already, "
            f"and it has {past.lens}: give ids and mask of the whole text, padded as before"
        )
    on_host = on_host[:, past.length :]
    if not bool(on_host.all()):
        text.call.padding = Padding(mask[:, past.length :], on_host)


def _check_step_mask(text: OurCache, mask: torch.Tensor) -> None:
    """Raise unless the mask of a step shows the tokens of the cache and one more."""
    assert text.kv is not None
    lens = text.kv.layers[0].seq_lens
    tokens = mask.sum(1, dtype=torch.int32).to(lens.device)
    _check(text, (tokens != lens + 1).any(), 0)


def _check(text: OurCache, is_wrong: torch.Tensor, what: int) -> None:
    """Raise what is wrong in a step, at once or, where it would have to be read, in check."""
    if not debug.may_read(is_wrong):
        assert text.wrong is not None
        text.wrong[what] |= is_wrong
    elif bool(is_wrong):
        raise ConfigError(WRONG[what])


def check_positions(text: OurCache, positions: Any, is_traced: bool) -> None:
    """Raise unless the positions of a call's tokens are those of the cache.

    Args:
        text: that the call continues.
        positions: [batch or 1, columns], from attention or else from the decoder, if any. A third
            axis means positions of images, which do not count tokens.
        is_traced: of Handed.

    Raises:
        ConfigError: the model counts from other positions than the cache, or reads a text from its
            beginning into a cache with tokens.
        UnsupportedModelError: the model turns keys or scales queries by wrong positions.
    """
    assert text.kv is not None
    columns = 1 if is_traced else text.call.columns
    told: torch.Tensor | None = None
    if not is_traced and text.hook is not None:
        if positions is None:
            positions = text.hook.take().positions
        elif text.hook.stop.alive:  # attention is shown them
            text.hook.stop()
    is_told = isinstance(positions, torch.Tensor) and positions.ndim <= 2
    if is_told and positions.shape[-1] == columns:
        own = positions.expand(text.kv.batch, columns)
        padding = None if is_traced else text.call.padding
        told = own[:, 0] if padding is None else padding.on(own.device).first(own)
    if is_traced:
        _check_traced(text, told)
        return
    past, starts, layers = text.past, text.starts, text.layers_held
    if told is not None and columns > 1 and not past.is_empty:
        _check_not_anew(text, told.tolist())
    if not text.is_placed:
        starts = _starts_by(text, told)
    known = starts, past.lens, text.counts
    if layers.turn is not None:
        check_turn(layers.turn, *known, columns)
    if layers.scaled_from is not None:
        check_scale(layers.scaled_from, *known, past.length)
    text.begin_at(starts)


def _check_traced(text: OurCache, told: torch.Tensor | None) -> None:
    """Compare the positions of a step in a graph with the next ones of the cache."""
    if text.is_placed:
        return
    if told is not None:
        _check_next(text, told)
    elif any(text.starts) or any(text.past.pads) or text.call.padding is not None:
        raise ConfigError(f"{POSITIONS}; {_PLACED}")


def check_goes_on(text: OurCache) -> None:
    """Raise if a call of other attention does not continue the cache, as far as its decoder
    shows."""
    call = Shown() if text.hook is None else text.hook.take()
    past, new = text.past.length, text.call.columns
    if not past:
        return
    begins = None if call.columns is None else call.columns - new
    told = call.positions
    if begins is None and told is not None and told.ndim <= 2:  # nothing is padded
        if new > 1 or debug.may_read(told):
            begins = int(told[..., 0].max())
    if begins == 0:
        text.refuse_anew()
    if begins is not None and begins < past:
        text.refuse_shorter()


def _check_not_anew(text: OurCache, told: list[int]) -> None:
    """Raise if a text is read from its beginning into a cache with tokens; see _starts_by."""
    known = zip(told, text.past.lens, text.counts, strict=True)
    behind = [first for first, held, count in known if held and count]
    if behind and not any(behind):
        text.refuse_anew()


def _starts_by(text: OurCache, told: torch.Tensor | None) -> list[int]:
    """The position of each sequence's first token, by what this call says of its first new one."""
    past: Columns = text.past
    starts: list[int] = text.starts
    if told is not None and text.is_step(text.call.columns):
        _check_next(text, told)
        return starts
    came, counts = None if told is None else told.tolist(), text.counts
    if came is None and starts == past.pads:  # the model counts columns
        return starts
    if came is not None and past.has_empty:
        # models count the padding before a sequence, or not: its first token tells; what a call
        # that was cropped told does not count
        held = zip(starts, came, past.lens, counts, strict=True)
        starts = [first if count and not n else start for start, first, n, count in held]
    wanted = [start + n for start, n in zip(starts, past.lens, strict=True)]
    if came is None:
        raise ConfigError(f"{POSITIONS}; {_PLACED} ({wanted} are next)")
    each = zip(came, wanted, counts, strict=True)
    came = [first if count else own for first, own, count in each]
    if all(first < own for first, own in zip(came, wanted, strict=True)):
        text.refuse_shorter()
    if came != wanted:
        raise ConfigError(f"{POSITIONS} ({came} came, {wanted} are next)")
    return starts


def _check_next(text: OurCache, told: torch.Tensor) -> None:
    """Raise unless a step's positions, [batch], are the next ones of the cache."""
    assert text.kv is not None
    now = text.kv.start_positions + text.kv.layers[0].seq_lens
    _check(text, (told.to(now.device) != now).any(), 1)
