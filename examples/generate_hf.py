"""transformers' generate on a quantized cache: a long text, then a second turn on it."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvquant import QuantizedCache

HERE = Path(__file__).parent


def main(words: int = 400) -> None:
    """Continue the first words of unseen.txt, twice."""
    folder = HERE / "llama-demo-5m"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="kvquant")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = " ".join((HERE / "unseen.txt").read_text(encoding="utf-8").split()[:words])

    # rows of the default formats, quantized as the prompt is read; 4 + 128 tokens stay in 16 bit
    cache = QuantizedCache(model)
    ids = tokenizer(text, return_tensors="pt").input_ids
    for turn in ("", " The city"):
        more = tokenizer(turn, return_tensors="pt").input_ids.long()
        ids = torch.cat([ids, more], dim=1)  # generate takes what the cache has not seen
        answer = model.generate(ids, **cache.argument, max_new_tokens=20)
        print(f"…{text[-40:]}{turn} |{tokenizer.decode(answer[0, ids.shape[1] :])}")
        ids, text = answer, tokenizer.decode(answer[0])

    cache.check()  # raises what a GPU could not: NaN, masks that do not fit
    kv, config = cache.kv, model.config
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    bytes_16 = 2 * values * kv.max_seq_len
    print(f"room for {kv.max_seq_len} tokens takes {kv.nbytes} bytes, in 16 bit {bytes_16}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
