"""Serve a few sequences from a paged cache: a shared prompt, a fork, one CUDA graph per batch."""

import torch

from kvquant import PagedBatch, PagedKVCache

device = "cuda" if torch.cuda.is_available() else "cpu"
layers, q_heads, kv_heads, head_dim, vocabulary, most = 2, 32, 8, 128, 1000, 4
torch.manual_seed(0)
to_qkv = torch.randn(vocabulary, (q_heads + 2 * kv_heads) * head_dim, device=device).bfloat16()
heads = [q_heads, kv_heads, kv_heads]

cache = PagedKVCache(layers, kv_heads, head_dim, num_pages=64, max_seq_len=2048, device=device)
prefill, batch = PagedBatch(cache, 1, max_tokens=2048), PagedBatch(cache, most)
tokens = torch.zeros(most, dtype=torch.int64, device=device)


def qkv(ids: torch.Tensor) -> list[torch.Tensor]:
    """What a layer of a model would make of its input, after RoPE: here only of the token."""
    return to_qkv[ids].view(len(ids), -1, head_dim).split(heads, dim=1)


def step() -> None:
    """A decode step of all places of the batch; `tokens` are read and written."""
    q, k, v = qkv(tokens)
    for layer in range(layers):
        batch.append(layer, k, v)
        out = batch.attend(layer, q)
    tokens.copy_(out.float().sum((1, 2)).abs().mul(100).long() % vocabulary)


run = step
if device == "cuda":
    with batch.extend([]):  # no place is in use
        step()  # compiles the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    run = graph.replay

texts = {"a": [*range(500), 7], "b": [*range(500), 8, 9]}
for name, text in texts.items():
    present = cache.allocate(name, text)  # under LoRA adapters also namespace=, the adapter's name
    print(f"{name}: {present} of {len(text)} tokens were there")
    new = text[present:-1]  # the last one starts the decoding
    with prefill.extend([name], len(new), new):
        _, k, v = qkv(torch.tensor(new, device=device))
        for layer in range(layers):
            prefill.append(layer, k, v)
cache.fork("b", "c")
texts["c"] = [*texts["b"][:-1], 10]

for _ in range(20):
    last = [text[-1] for text in texts.values()]
    tokens[: len(last)] = torch.tensor(last)
    with batch.extend(list(texts), tokens=last):
        run()
    for text, token in zip(texts.values(), tokens.tolist(), strict=False):
        text.append(token)
print({name: cache.length(name) for name in cache.ids}, cache.num_free_pages, "free pages")
