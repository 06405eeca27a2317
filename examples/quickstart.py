"""A decode loop of your own: the prompt attends in 16 bit, its K and V are quantized, steps follow.

The last line compares the cache with 16-bit attention: bytes, and how far the output is off.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvquant import KVCache

device = "cuda" if torch.cuda.is_available() else "cpu"
layers, batch, q_heads, kv_heads, head_dim, prompt, steps = 2, 1, 32, 8, 128, 1000, 5
cache = KVCache(layers, batch, kv_heads, head_dim, max_seq_len=4096, device=device)


def from_your_model(tokens: int) -> list[torch.Tensor]:  # q, k, v, with RoPE in q and k
    counts = q_heads, kv_heads, kv_heads
    return [torch.randn(batch, n, tokens, head_dim, device=device).bfloat16() for n in counts]


in_16_bit = []  # only for the comparison
for layer in range(layers):  # the prompt
    q, k, v = from_your_model(prompt)
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    cache.append(layer, k, v)  # [batch, kv_heads, tokens, head_dim]
    in_16_bit.append((k, v))

for _ in range(steps):  # one new token each
    for layer in range(layers):
        q, k, v = from_your_model(1)
        out = cache.step(layer, q[:, :, 0], k, v)  # q and out: [batch, q_heads, head_dim]
        keys, values = (torch.cat(x, dim=2) for x in zip(in_16_bit[layer], (k, v), strict=True))
        exact = scaled_dot_product_attention(q, keys, values, enable_gqa=True)[:, :, 0]
        in_16_bit[layer] = keys, values

error = (out - exact).float().norm() / exact.float().norm()
in_16_bit_bytes = 2 * 2 * layers * batch * kv_heads * cache.max_seq_len * head_dim
print(f"{cache.nbytes:,} bytes in place of {in_16_bit_bytes:,}; the last output is {error:.0%} off")
