"""Keys and values of a whole text, dequantized: for attention that is not "kvquant".

A QuantizedCache(dequantize=True) keeps packed rows and gives each layer what a cache of
transformers would, all keys and values in 16 bit, so that any attention computes with them. One
layer at a time has such a copy, made anew in each call.

Tokens are the columns that the model counts, padding among them, which the model's own mask hides;
windows are that mask's, too, so a layer with one keeps all tokens.

A step reads what the fused call reads. Of n drafted tokens all but the last read packed what has
left the recent window with them, up to n - 1 tokens; with recent_len 0 nothing differs.
"""

from __future__ import annotations

import torch

from ..cache.contiguous import KVCache
from ..errors import ConfigError
from .attention import Handed, NoGradient


def append_and_dequantize(
    handed: Handed, keys: torch.Tensor, values: torch.Tensor, is_step: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append a layer's new tokens, and give those before with them.

    Args:
        handed: where they go.
        keys, values: [batch, num_kv_heads, columns, head_dim]; or latents and RoPE parts.
        is_step: the new tokens are read as they are stored, as the fused call reads them; else
            (a chunk of a prompt) as they come, behind the dequantized past.

    Returns:
        [batch, num_kv_heads, past and new columns, head_dim] twice, of the dtype of keys.
    """
    layer, new = handed.kv.layers[handed.at], keys.shape[2]
    if is_step:
        handed.to.append(handed, keys, values)
        found = layer.dequantized(keys.dtype)
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            k, v = (NoGradient.apply(x, keys, values) for x in found)  # type: ignore[no-untyped-call]  # torch's
            return k, v
        return found
    found = keys, values
    if bool(layer.held_lens.any()):
        found = layer.dequantized(keys.dtype, room=new)
        for whole, own in zip(found, (keys, values), strict=True):
            whole[:, :, -new:] = own
    handed.to.append(handed, keys, values)
    return found


def check_columns(kv: KVCache, lens: list[int]) -> None:
    """Raise ConfigError unless the rows of a cache are all columns that a model counts."""
    windows = [window for window in kv.windows if window]
    if windows:
        raise ConfigError(
            f"the cache keeps the last {windows[0]} tokens of a layer, and dequantize=True needs "
            "all of them: make it by QuantizedCache(model, dequantize=True)"
        )
    if len(set(lens)) > 1:
        raise ConfigError(
            f"the cache holds {lens} tokens, and with dequantize=True all sequences have as many, "
            "padding among them: make it by QuantizedCache(model, dequantize=True)"
        )
