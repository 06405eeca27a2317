"""Drafted tokens: a lookup in the prompt proposes several, one call of the model checks them."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvquant import QuantizedCache

TEXT = "The city of Manila was built in 1888. The city of Manila"


def main() -> None:
    """Continue a text token by token, and with drafts: the same tokens in fewer calls."""
    folder = Path(__file__).parent / "llama-demo-5m"
    # in float32: of 16-bit logits two are often the largest, and drafts may choose the other one
    options = {"attn_implementation": "kvquant", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(TEXT, return_tensors="pt")
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))

    # Drafts that are wrong are cropped, and the cache is what it would be without them. An
    # assistant works alike: assistant_model= in place of prompt_lookup_num_tokens=.
    for name, drafts in (("alone", {}), ("drafted", {"prompt_lookup_num_tokens": 6})):
        cache = QuantizedCache(model, k_format="int8", v_format="int8")
        calls.clear()
        text = model.generate(**prompt, **cache.argument, max_new_tokens=40, **drafts)
        answer = tokenizer.decode(text[0, prompt.input_ids.shape[1] :])
        print(f"{name}, {len(calls)} calls: {answer}")


if __name__ == "__main__":
    main()
