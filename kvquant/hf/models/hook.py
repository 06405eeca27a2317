"""A hook on a model's decoder: it shows the cache a call's arguments, and cuts them to new tokens.

When generate drafts (prompt lookup, an assistant), its first call has the ids of the whole text, so
a DynamicCache of transformers 5.24 keeps the cached part twice. Here the decoder gets new ids only.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any, NamedTuple

import torch

from ...errors import ConfigError
from ..argument import NAMES

# what a decoder gets of each new token, by the dimension of tokens; masks are of the past, too
_OF_TOKENS = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "position_ids": -1,
    "cache_position": -1,
    "token_type_ids": -1,
    "mm_token_type_ids": -1,
    "moe_mm_token_type_ids": -1,
}
UNUSED = (
    "use_cache=False came beside a cache, and generate would read the whole text into it in every "
    "step: give use_cache=True, or set model.generation_config.use_cache = True; or give no cache"
)


class Shown(NamedTuple):
    """A decoder's arguments in a call.

    Attributes:
        positions: its position_ids, if any.
        columns: of its attention_mask [batch, columns], if any.
    """

    positions: torch.Tensor | None = None
    columns: int | None = None


class DecoderHook:
    """A hook on the decoder of a cache's model, which shows the arguments of its calls.

    Some models do not pass them on to attention (Llama 4, Granite 4 hybrids). The hook ignores
    calls without a QuantizedCache, and goes with this object.

    Attributes:
        shown: the decoder's arguments in this call.
        awaits_whole_text: in the next call: generate drafts.
        names_positions: the model does, so that generate gives it position_ids.
        stop: removes the hook, which listen sets again.
    """

    def __init__(self, decoder: torch.nn.Module, *, names_positions: bool) -> None:
        self._decoder, self.names_positions = weakref.ref(decoder), names_positions
        self.shown, self.awaits_whole_text = Shown(), False
        self.stop: Any = None
        self.listen()

    @classmethod
    def of(cls, model: Any) -> DecoderHook:
        names_positions = "position_ids" in inspect.signature(model.forward).parameters
        return cls(model.get_decoder(), names_positions=names_positions)

    def listen(self) -> bool:
        """Hook the decoder, if that is not hooked; False if it is gone."""
        decoder = self._decoder()
        if decoder is not None and not (self.stop and self.stop.alive):
            hook = decoder.register_forward_pre_hook(_see, with_kwargs=True)
            self.stop = weakref.finalize(self, hook.remove)
        return decoder is not None

    def take(self) -> Shown:
        """The decoder's arguments in this call; the next one has others."""
        shown, self.shown = self.shown, Shown()
        return shown

    def copied(self) -> DecoderHook | None:
        """The hook of another cache on the same decoder."""
        decoder = self._decoder()
        if decoder is None:
            return None
        hook = DecoderHook(decoder, names_positions=self.names_positions)
        if not (self.stop and self.stop.alive):  # attention has shown what this one looks for
            hook.stop()
        return hook


def _see(
    decoder: torch.nn.Module, args: Any, given: dict[str, Any] | None = None
) -> tuple[tuple[()], dict[str, Any]] | None:
    if given is None:  # torch calls a hook so that was removed while the call began
        return None
    past: Any = next((given[name] for name in NAMES if name in given), None)
    hook = getattr(past, "hook", None)
    if not isinstance(hook, DecoderHook) or torch.compiler.is_compiling():
        return None
    if given.get("use_cache") is False:
        past.end_call()  # masks may have been made before
        raise ConfigError(UNUSED)
    mask, cut = given.get("attention_mask"), None
    columns = mask.shape[1] if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
    if hook.awaits_whole_text:
        hook.awaits_whole_text = False
        names = inspect.signature(decoder.forward).parameters
        given = dict(zip(names, args, strict=False)) | given
        both = given.get("input_ids"), given.get("inputs_embeds")
        came = next((one.shape[1] for one in both if one is not None), 0)
        # generate gives positions to every model that names them. The user's own call may leave
        # them out after a generate that failed before it drafted
        is_of_generate = given.get("position_ids") is not None or not hook.names_positions
        held = past.length_of(0)
        if is_of_generate and _is_whole(came, columns, given.get("position_ids"), held):
            try:
                given = _behind(given, past.held_of(came), came)
            except ConfigError:
                past.end_call()  # masks may have been made before
                raise
            cut = (), given
    hook.shown = Shown(given.get("position_ids"), columns)
    return cut


def _is_whole(came: int, columns: int | None, positions: torch.Tensor | None, held: int) -> bool:
    """Whether the first call with drafts gives the whole text. One token is a step."""
    if came == 1:
        return False
    if positions is not None:
        return not bool(positions[..., 0].any())
    return came > held if columns is None else came == columns


def _behind(given: dict[str, Any], held: int, whole: int) -> dict[str, Any]:
    """The decoder's arguments, cut to the tokens that the cache does not hold."""
    if given.get("output_hidden_states"):
        raise ConfigError(
            f"the hidden states of {whole} tokens are asked for, and the cache holds {held} of "
            "them already: leave output_hidden_states out, or go on without drafts"
        )
    found = dict(given)
    for name, dim in _OF_TOKENS.items():
        one = given.get(name)
        if isinstance(one, torch.Tensor) and one.shape[dim] == whole:
            found[name] = one.narrow(dim, held, whole - held)
    return found
