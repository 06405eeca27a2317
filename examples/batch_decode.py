"""Prompts of several lengths in one batch, padded on the left: each gets what it gets alone."""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvquant import QuantizedCache

PROMPTS = [
    "The city of Manila was founded",
    "Nero",
    "The first ironclad warships were built of wood, and of iron plates that",
]


def main() -> None:
    """Continue the prompts together, and the shortest one alone."""
    folder = Path(__file__).parent / "llama-demo-5m"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="kvquant")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")

    for prompts in (PROMPTS, PROMPTS[1:2]):
        batch = tokenizer(prompts, padding=True, return_tensors="pt")  # ids and attention_mask
        cache = QuantizedCache(model, k_format="int8", v_format="int8")
        answers = model.generate(**batch, **cache.argument, max_new_tokens=16)
        for text, tokens in zip(answers, cache.kv.seq_lens.tolist(), strict=True):
            print(f"{tokens} tokens: {tokenizer.decode(text, skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
