"""Serve requests: continuous batching of a transformers model whose rows are in a paged cache."""

from contextlib import suppress
from pathlib import Path

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from kvquant import OutOfPagesError, PagedBatch, PagedKVCache

HERE, NEW, STEP = Path(__file__).parent, 16, 64  # tokens of an answer, and of a step at most
TEXT = (HERE / "unseen.txt").read_text(encoding="utf-8")
ROWS = {"k_format": "int8", "v_format": "int8", "recent_len": 32, "page_size": 16}


def attend(module, q, k, v, mask, scaling, **options):  # [1, heads, tokens, head_dim] each
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # all texts' tokens, one after another
    out = batch.step(module.layer_idx, q, k, v, q_indptr=batch.q_indptr, sm_scale=scaling)
    return out[None], None


AttentionInterface.register("paged", attend)
tokenizer = AutoTokenizer.from_pretrained(HERE / "llama-demo-5m")
model = AutoModelForCausalLM.from_pretrained(HERE / "llama-demo-5m", dtype=torch.float32)
prompts = [tokenizer(TEXT[:700] + TEXT[at:][:240]).input_ids for at in range(700, 2400, 280)]
model.set_attn_implementation("paged")
cache = PagedKVCache.for_memory(800_000, 4, 1, 128, max_num_seqs=4, **ROWS)  # 4 layers, 1 KV head
batch = PagedBatch(cache, max_batch=4, max_tokens=STEP)
texts = {name: list(ids) for name, ids in enumerate(prompts)}
waiting, found, swaps = list(texts), 0, 0
while waiting or cache.ids or cache.swapped_ids:
    with suppress(OutOfPagesError):  # come back, or begin, where there is room
        for name in cache.swapped_ids:
            cache.swap_in(name)
        for name in waiting[:1]:
            # with LoRA adapters, images or tenants also namespace=: each finds its own rows
            found += cache.allocate(name, texts[name], room=len(texts[name]))
            waiting.remove(name)
    new = {}  # what the cache lacks: of each text its last token, or a chunk of its prompt
    for name in cache.ids:
        new[name] = texts[name][cache.length(name) :][: STEP - sum(map(len, new.values()))]
    while not cache.can_append(list(new), counts := list(map(len, new.values()))):
        cache.swap_out(new.popitem()[0])  # the last one makes room
        cache.finish_swaps()
        swaps += 1
    row = [token for ids in new.values() for token in ids]
    with batch.extend(list(new), counts, row), torch.no_grad():
        out = model(torch.tensor([row]), None, batch.positions[None, : len(row)], use_cache=False)
    for name, end in zip(new, torch.tensor(counts).cumsum(0), strict=True):
        if cache.length(name) == len(texts[name]):  # all is read
            texts[name].append(int(out.logits[0, end - 1].argmax()))
        if len(texts[name]) == len(prompts[name]) + NEW:
            cache.free(name)
print(f"{found} tokens were there already, {swaps} were swapped out, {cache}")
model.set_attn_implementation("sdpa")  # each text alone, its keys and values in 16 bit or more
for name, text in texts.items():
    logits = model(torch.tensor([text])).logits[0, -NEW - 1 : -1].detach()
    lack = (logits.amax(-1) - logits[range(NEW), text[-NEW:]]).max()
    print(f"{name}, at most {lack:.2f} below the likeliest: …{tokenizer.decode(text[-NEW:])}")
