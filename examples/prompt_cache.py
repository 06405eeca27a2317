"""Save the cache of a prompt, and go on from the file in a new process."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvquant import QuantizedCache, load_cache, save_cache

HERE = Path(__file__).parent
# in float32: of 16-bit logits two are often the largest, and a process may choose the other one
OPTIONS = {"attn_implementation": "kvquant", "dtype": torch.float32}
model = AutoModelForCausalLM.from_pretrained(HERE / "llama-demo-5m", **OPTIONS)
tokenizer = AutoTokenizer.from_pretrained(HERE / "llama-demo-5m")
TEXT = " ".join((HERE / "unseen.txt").read_text(encoding="utf-8").split()[:300])
QUESTION = " In the"
PROMPT = tokenizer(TEXT, return_tensors="pt").input_ids


def ask(question: str, cache: QuantizedCache) -> str:
    """Continue the prompt and a question, from a cache that holds the prompt."""
    ids = torch.cat([PROMPT, tokenizer(question, return_tensors="pt").input_ids], dim=1)
    answer = model.generate(ids, **cache.argument, max_new_tokens=16)
    return tokenizer.decode(answer[0, PROMPT.shape[1] :])


def go_on(path: str) -> None:
    """In the new process; the cache grows as it did."""
    kv = load_cache(path, model=model.config.to_dict())
    print("from the file:", ask(QUESTION, QuantizedCache(kv)))


def main() -> None:
    """Read the prompt once, save what it left, and ask here and there."""
    cache = QuantizedCache(model)
    with torch.no_grad():
        model(PROMPT, **cache.argument, logits_to_keep=1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "prompt.safetensors")
        save_cache(cache.kv, path, model=model.config.to_dict())
        print(f"{PROMPT.shape[1]} tokens in {Path(path).stat().st_size} bytes")
        print("in memory:", ask(QUESTION, cache), flush=True)
        done = subprocess.run(
            [sys.executable, __file__, path], check=True, capture_output=True, text=True
        )
    print(done.stdout, end="")


if __name__ == "__main__":
    go_on(sys.argv[1]) if len(sys.argv) > 1 else main()
