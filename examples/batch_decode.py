"""Prompts of several lengths in one batch, padded on the left: each gets what it gets alone."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvquant import QuantizedCache

PROMPTS = [
    "The city of Manila was founded",
    "He was",
    "The first ironclad warships were built of wood, and of iron plates that",
]


def main() -> None:
    """Continue the prompts together, and the shortest one alone."""
    folder = Path(__file__).parent / "llama-demo-5m"
    # in float32: of 16-bit logits two are often the largest, and a batch may choose the other one
    options = {"attn_implementation": "kvquant", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")

    for prompts in (PROMPTS, PROMPTS[1:2]):
        batch = tokenizer(prompts, padding=True, return_tensors="pt")  # ids and attention_mask
        cache = QuantizedCache(model, k_format="int8", v_format="int8")
        answers = model.generate(**batch, **cache.argument, max_new_tokens=16)
        for text, tokens in zip(answers, cache.kv.seq_lens.tolist(), strict=True):
            print(f"{tokens} tokens: {tokenizer.decode(text, skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
