"""Predict a text in one pass whose tokens attend to what a cache would have kept.

The result is that of decoding token by token, because a token's row does not depend on later
tokens. Each scored token attends to

    packed rows     of the tokens that a cache would have packed by then: what `store` makes of them
    16-bit rows     of the first and the last tokens up to it, if the cache has a 16-bit window

Exact attention reads the context once, and a pass computes the scored tokens alone. Models that
cannot continue from kept keys and values (states, shared keys) read the context in each pass.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ..errors import UnsupportedError
from .argument import as_argument
from .models.configs import input_device
from .switch import attending, hooked, linears, plain_implementation

# layer, keys and values [batch, num_kv_heads, tokens, head_dim]: what attention reads of them
Store = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
STORED = "kvquant-stored"
PREFILL = 4096  # tokens of a call that reads contexts: what lies between layers stays small


class _Pass(threading.local):
    """The pass that runs at the moment, in this thread; see Passages.predict."""

    store: Store | None = None
    context: int = 0
    window: tuple[int, int] = 0, 0
    exact: torch.dtype = torch.bfloat16


_pass = _Pass()


def exact_attention(module: torch.nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    """The attention function that computes a layer's options; SDPA lacks softcap and s_aux."""
    if all(options.get(name) is None for name in ("softcap", "s_aux")):
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return attend
    home = sys.modules[type(module).__module__]
    eager: Callable[..., Any] | None = getattr(home, "eager_attention_forward", None)
    if eager is None:
        raise UnsupportedError(
            f"{type(module).__name__} asks for a cap or sink logits, and {home.__name__} has no "
            "eager_attention_forward that computes them"
        )
    return eager


def added_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as eager attention adds it to scores of a dtype: made of a bool one, or as it came."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def owner_of(key: torch.Tensor, layer: int) -> int:
    """The layer whose marked keys these are."""
    owner: int | None = getattr(key, "kvquant_owner", None)
    if owner is None:
        owner = key.kvquant_owner = layer  # type: ignore[attr-defined]  # a mark on it
    return owner


class Passages:
    """Passages of a text: predictions from rows, after a context.

    Args:
        model: of transformers; it attends through transformers' attention interface.
        tokens: [batch, tokens], int64.
        context: how many first tokens exact attention reads.
        exact: dtype of a cache's 16-bit rows.
        keeps_context: whether every layer can continue from the context's keys and values.
        tick: called after each linear layer of the context.
    """

    def __init__(
        self,
        model: Any,
        tokens: torch.Tensor,
        context: int,
        exact: torch.dtype,
        *,
        keeps_context: bool = False,
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        self._model, self._context, self._exact = model, context, exact
        self._tokens = tokens.to(input_device(model))
        self._past: DynamicCache | None = None
        if keeps_context:
            past = DynamicCache(config=model.config)
            options = {**as_argument(model, past), "use_cache": True, "logits_to_keep": 1}
            chunk = max(PREFILL // len(tokens), 1)
            ticking = hooked(one.register_forward_hook(lambda *_: tick()) for one in linears(model))
            with attending(model, plain_implementation(model)), torch.no_grad(), ticking:
                for part in self._tokens[:, :context].split(chunk, dim=1):
                    model(part, **options)
            self._past = past

    def predict(self, store: Store, window: tuple[int, int] = (0, 0)) -> torch.Tensor:
        """Logits [batch, tokens - context, vocabulary] after each token that follows the context.

        Args:
            store: maps a layer's index, keys and values to what packed rows give. A layer with the
                keys of another one reads that one's.
            window: sink_len and recent_len, the tokens that stay in 16 bit.
        """
        tokens, options = self._tokens, {"use_cache": False}
        keep = tokens.shape[1] - self._context
        if self._past is not None:
            tokens = tokens[:, self._context :]
            options = {**as_argument(self._model, _continued(self._past)), "use_cache": True}
        _pass.store, _pass.context, _pass.exact = store, self._context, self._exact
        _pass.window = window
        try:
            with attending(self._model, STORED), torch.no_grad():
                out = self._model(tokens, **options, logits_to_keep=keep)
        finally:
            _pass.store = None
        logits: torch.Tensor = out.logits[:, -keep:]
        return logits


def _continued(past: DynamicCache) -> DynamicCache:
    """Extend a cache that itself stays unchanged: layers replace their tensors, never write into
    them."""
    found = copy.copy(past)
    found.layers = [copy.copy(layer) for layer in past.layers]
    return found


def _stored_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to packed rows and, by a mask, to 16-bit rows; the last query is of the last key's
    token."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or _pass.store is None:
        raise UnsupportedError(f"{type(module).__name__} does not say which layer it is")
    attend, layer = exact_attention(module, options), owner_of(key, layer)
    key, value = (x.to(_pass.exact).to(x.dtype) for x in (key, value))
    new, held = query.shape[2], key.shape[2]
    place = torch.arange(held, device=key.device)
    own = place[held - new :, None]  # of each query's token among the keys
    sinks, recent = _pass.window
    # keys of a layer with a sliding window need not begin at the first token, and a cache of its
    # rows has no sinks
    sinks = 0 if options.get("sliding_window") else sinks
    is_exact = (place < sinks) | (place > own - recent)
    if new == held:  # the context is read in this pass, too
        is_exact |= own < _pass.context
    if attention_mask is None:
        attention_mask = (place <= own)[None, None]
    attention_mask = added_mask(attention_mask, query.dtype)[..., :held]
    packed = _pass.store(layer, key, value)
    needed = is_exact.any(0)
    if bool(needed.any()):
        least = torch.finfo(attention_mask.dtype).min
        hidden = attention_mask.masked_fill(is_exact, least)
        beside = attention_mask.masked_fill(~is_exact, least)[..., needed]
        attention_mask = torch.cat([hidden, beside], dim=-1)
        key, value = (
            torch.cat([rows, x[:, :, needed]], dim=2)
            for rows, x in zip(packed, (key, value), strict=True)
        )
    else:
        key, value = packed
    return attend(module, query, key, value, attention_mask, **options)[0], None


AttentionInterface.register(STORED, _stored_attention)
AttentionMaskInterface.register(STORED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
