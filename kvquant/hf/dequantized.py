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

from .gradients import without_gradient
from .text import Handed


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
        k, v = layer.dequantized(keys.dtype)
        return without_gradient(k, keys, values), without_gradient(v, keys, values)
    found = keys, values
    if bool(layer.held_lens.any()):
        found = layer.dequantized(keys.dtype, room=new)
        for whole, own in zip(found, (keys, values), strict=True):
            whole[:, :, -new:] = own
    handed.to.append(handed, keys, values)
    return found
