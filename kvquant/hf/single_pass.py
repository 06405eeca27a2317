"""One pass over a text in which later tokens attend to what a cache would have kept.

It gives the predictions of decoding token by token, for models that a KVCache cannot serve (layers
without attention between those with it, caps, sink logits): a token's row does not depend on later
ones, so all scored tokens may be computed at once.

    queries before `context`    meet the keys and values of a 16-bit cache
    queries from there on       meet what `store` makes of these
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ..errors import UnsupportedError
from .switch import attending

# layer, keys and values [batch, num_kv_heads, tokens, head_dim]: what attention reads of them
Store = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
STORED = "kvquant-stored"


class _Pass(threading.local):
    """The pass that runs at the moment, in this thread."""

    store: Store | None = None
    context: int = 0
    exact: torch.dtype = torch.bfloat16


_pass = _Pass()


def exact_attention(module: torch.nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    """The attention function that computes all that a layer asks for.

    Args:
        module: calls it.
        options: that it gives: SDPA has no caps ("softcap") and no sink logits ("s_aux").
    """
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


def owner_of(key: torch.Tensor, layer: int) -> int:
    """The layer whose keys these are: the first that attends with them, which is marked on them."""
    owner: int | None = getattr(key, "kvquant_owner", None)
    if owner is None:
        owner = key.kvquant_owner = layer  # type: ignore[attr-defined]  # a mark on it
    return owner


def predict_from_rows(
    model: Any, tokens: torch.Tensor, context: int, exact: torch.dtype, store: Store
) -> torch.Tensor:
    """Predict what comes after each token from `context` on, by rows that a cache keeps.

    Args:
        model: attends through transformers' attention interface.
        tokens: [batch, tokens], int64.
        context: first tokens, which are read as from a 16-bit cache.
        exact: dtype of its rows.
        store: called with each layer's index, keys and values; gives what is read of them. A layer
            that attends to the keys of another one reads what is stored as that one's.

    Returns:
        [batch, tokens - context, vocabulary]: logits.
    """
    _pass.store, _pass.context, _pass.exact = store, context, exact
    try:
        with attending(model, STORED), torch.no_grad():
            keep = tokens.shape[1] - context
            out = model(tokens.to(model.device), use_cache=False, logits_to_keep=keep)
    finally:
        _pass.store = None
    logits: torch.Tensor = out.logits[:, -keep:]
    return logits


def _stored_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or _pass.store is None:
        raise UnsupportedError(f"{type(module).__name__} does not say which layer it is")
    attend, layer = exact_attention(module, options), owner_of(key, layer)
    key, value = (x.to(_pass.exact).to(x.dtype) for x in (key, value))
    first, _ = attend(module, query, key, value, attention_mask, **options)
    later, _ = attend(module, query, *_pass.store(layer, key, value), attention_mask, **options)
    return torch.cat([first[:, : _pass.context], later[:, _pass.context :]], dim=1), None


AttentionInterface.register(STORED, _stored_attention)
AttentionMaskInterface.register(STORED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
