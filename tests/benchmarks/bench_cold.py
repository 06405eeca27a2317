"""Seconds that a user waits: kvquant calibrate and the first generate, with and without kernels.

Run by hand on a GPU: python tests/benchmarks/bench_cold.py --text FILE. Each run is a process of
its own with a cache folder of its own; cold, nothing is compiled, warm, the same run has been made
there before. A process takes as long for its imports alone as the first line says.

    calibrate    `kvquant calibrate`, default options, of a random Llama of 16 M parameters, float32
    generate     the first model.generate with a new QuantizedCache, 20 tokens, of a random Llama of
                 4 layers as wide as one of 8B, bfloat16; it grows, or is static, where transformers
                 compiles the steps
    8B           calibrate() of a random Llama with the layers of one of 8B, bfloat16, kernels there
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
IMPORTS = "import torch\nfrom kvquant.cli import main\nfrom kvquant.calibration import calibrate"


def random_llama(dtype: torch.dtype, device: str, **config: Any) -> Any:
    """A Llama of random weights."""
    import transformers

    torch.manual_seed(0)
    made = transformers.LlamaConfig(**({"max_position_embeddings": 1 << 17} | config))
    with torch.device(device):
        return transformers.LlamaForCausalLM._from_config(made, dtype=dtype).eval()


def generate(kind: str) -> None:
    """Print seconds of the first generate of this process, and of the second."""
    import transformers
    from wide_models import LLAMA_8B

    from kvquant import QuantizedCache
    from kvquant.hf.argument import as_argument

    sizes = LLAMA_8B | {"vocab_size": 32000, "num_hidden_layers": 4}
    model = random_llama(torch.bfloat16, "cuda", **sizes)
    model.set_attn_implementation("kvquant")
    ids = torch.randint(8000, (2, 300), device="cuda")
    with torch.no_grad():
        # libraries make themselves ready
        model(ids, **as_argument(model, transformers.DynamicCache()))
    taken = []
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        cache = QuantizedCache(model, max_seq_len=1024 if kind == "static" else None)
        options: Any = {**cache.argument, "max_new_tokens": 20, "pad_token_id": 0}
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    print(f"{kind} QuantizedCache: first generate {taken[0]:.1f} s, second {taken[1]:.2f} s")


def calibrate_8b(layers: int, text: Path) -> None:
    """Print seconds of calibrate, of few layers and then of all, whose kernels are there then."""
    import transformers
    from wide_models import LLAMA_8B

    from kvquant import CachedModel
    from kvquant.calibration.calibrate import calibrate

    sizes = LLAMA_8B | {"vocab_size": 128256}
    tokenizer = transformers.AutoTokenizer.from_pretrained(EXAMPLES / "llama-demo-5m")
    tokens = tokenizer(text.read_text(encoding="utf-8")).input_ids
    for count in (2, layers):
        made = random_llama(torch.bfloat16, "cuda", **(sizes | {"num_hidden_layers": count}))
        start = time.perf_counter()
        calibrate(CachedModel(made), tokens)
        taken = time.perf_counter() - start
        print(f"calibrate, {count} layers of 8B: {taken:.1f} s", flush=True)
        del made


def run(folder: Path, *command: object) -> float:
    """Seconds of a process whose kernels are kept in a folder."""
    start = time.perf_counter()
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, "KVQUANT_CACHE_DIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    if "QuantizedCache" in done.stdout or "layers of 8B" in done.stdout:
        print(done.stdout.strip(), flush=True)
    return time.perf_counter() - start


@click.command()
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--layers", default=32, show_default=True, help="Of the Llama of 8B; 0: leave it.")
@click.option("--only", hidden=True, help="In a process of its own.")
def main(text: Path, layers: int, only: str | None) -> None:
    """Measure and print."""
    if only is not None:
        calibrate_8b(layers, text) if only == "8B" else generate(only)
        return
    print(torch.cuda.get_device_name(), "torch", torch.__version__, os.cpu_count(), "cores")
    with tempfile.TemporaryDirectory() as room:
        home = Path(room)
        model = home / "model"
        random_llama(torch.bfloat16, "cpu", **SMALL).save_pretrained(model)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(EXAMPLES / "llama-demo-5m" / name, model)
        for _ in range(2):  # the first one lets Python compile the modules
            imports = run(home, sys.executable, "-c", IMPORTS)
        print(f"imports: {imports:.1f} s")
        command = [sys.executable, "-m", "kvquant", "calibrate", model, "--text", text]
        for kind in ("cold", "warm"):
            given = [*command, "--device", "cuda", "-o", home / f"{kind}.safetensors"]
            print(f"calibrate, {kind}: {run(home / 'kernels', *given):.1f} s", flush=True)
        own = [sys.executable, __file__, "--text", text, "--layers", layers, "--only"]
        for kind in ("growing", "static"):
            run(home / kind, *own, kind)
        if layers:
            run(home / "kernels", *own, "8B")


if __name__ == "__main__":
    main()
