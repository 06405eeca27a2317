"""A decode loop in plain PyTorch: quantize as tokens come, attend without a dequantized copy."""

import torch

from kvquant import KVCache

layers, batch, q_heads, kv_heads, head_dim, prompt, steps = 2, 1, 32, 8, 128, 1000, 5
cache = KVCache(layers, batch, kv_heads, head_dim, prompt + steps, k_format="int4-g4")

for layer in range(layers):  # the prompt; keys are those that attention meets, after RoPE
    k, v = torch.randn(2, batch, kv_heads, prompt, head_dim)
    cache.append(layer, k, v)

for _ in range(steps):
    for layer in range(layers):  # q, k, v of the new token come from the model
        q = torch.randn(batch, q_heads, head_dim)
        k, v = torch.randn(2, batch, kv_heads, 1, head_dim)
        cache.append(layer, k, v)
        out = cache.attend(layer, q)  # [batch, q_heads, head_dim]

elements = 2 * layers * batch * kv_heads * cache.max_seq_len * head_dim
print(f"{cache.seq_lens.tolist()} tokens in {cache.nbytes} bytes, 16 bit takes {2 * elements}")
