"""Keys and values of a whole text, dequantized: for attention that is not "kvquant".

With QuantizedCache(dequantize=True) any attention gets all keys and values in 16 bit; each call
makes this copy anew, one layer at a time. Padding columns and tokens beyond a window stay in the
cache, and the model's own mask hides them. Steps read what the fused call reads, but of n drafted
tokens all except the last read up to n - 1 tokens packed that are still 16-bit rows otherwise.
"""

from __future__ import annotations

import torch

from .gradients import without_gradient
from .handed import Handed


def append_and_dequantize(
    handed: Handed, keys: torch.Tensor, values: torch.Tensor, is_step: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append a layer's new tokens, and return all of its tokens.

    Args:
        handed: where they go.
        keys, values: [batch, num_kv_heads, columns, head_dim]; or latents and RoPE parts.
        is_step: read the new tokens as stored, as the fused call does; else as they came.

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
