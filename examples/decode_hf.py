"""A Hugging Face model reads a text into a 4-bit cache, which is saved, loaded and continued."""

import sys
import tempfile
from pathlib import Path

import torch

from kvquant.hf.model import CachedModel
from kvquant.io.checkpoint import load_cache, save_cache

HERE = Path(__file__).parent


def main(words: int = 400) -> None:
    """Read the first words of unseen.txt and continue them."""
    model = CachedModel.from_pretrained(HERE / "llama-demo-5m")
    text = " ".join((HERE / "unseen.txt").read_text(encoding="utf-8").split()[:words])
    tokens = torch.tensor([model.encode(text)])

    # 4-bit rows, but for the first 4 and the last 128 tokens; read in chunks, quantized as it goes
    cache = model.new_cache(1, tokens.shape[1] + 40, k_format="int4-g4", v_format="int4-g4")
    logits = model.prefill(cache, tokens, chunk=256)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        save_cache(cache, path, model=model.config_dict)
        loaded = load_cache(path, model=model.config_dict, max_seq_len=cache.max_seq_len)

    print(f"{tokens.shape[1]} tokens in {cache.nbytes} bytes")
    for name, given in (("in memory", cache), ("from the file", loaded)):
        print(f"{name}: …{text[-60:]}{model.decode(model.generate(given, logits, 20)[0])}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
