"""Speed of SGLang's engines on a GPU: kvquant's rows beside SGLang's own attention.

    python tests/benchmarks/bench_sglang.py bench.json [--engine kvquant --engine triton ...]

The model is a Llama as wide as one of 8B, with random weights, or --model. Engines run one after
another, each in its own process. In each of --rounds rounds an engine reads --batch prompts of
--context tokens, and then decodes all of them at once (decoding.py). The script makes one more
round before these and leaves it out, because the engine compiles kernels in it. The script writes
the file after each engine. If an engine fails the script prints the end of its log and leaves the
engine out. The engines flashinfer and fa3 run only where their packages are installed.

Install SGLang 0.5.23, or bring it to the machine as one file (tests/sglang/on_gpu/). With that file
torch computes norms, activations and rotary embeddings in all engines, so steps take longer than
with an installed SGLang.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch
from bench_vllm import INT4, random_model
from decoding import ROOM, Figures, measure_decode

PAGE = 64  # tokens
# kvquant's rows, or the name of SGLang's own backend
ENGINES: dict[str, Figures | str] = {
    "kvquant": {**INT4, "accept_loss": True},
    "default": {},
    "default-window": {"recent_len": 128},
    "plan": {"plan": "auto"},
    "triton": "triton",
    "flashinfer": "flashinfer",
    "fa3": "fa3",
}


def is_there(name: str) -> bool:
    """Whether what an engine needs is installed."""
    if name == "flashinfer":
        return find_spec("flashinfer") is not None
    if name == "fa3":
        kernels = find_spec("sgl_kernel")
        folders = kernels.submodule_search_locations if kernels is not None else None
        return any([*Path(one).glob("flash_ops*.so")] for one in folders or [])
    return True


def sampling(tokens: int) -> Figures:
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def finish(engine: Any, ids: Sequence[int], tokens: int) -> None:
    """Wait until the engine has generated so many tokens for a prompt."""
    await engine.async_generate(input_ids=list(ids), sampling_params=sampling(tokens))


async def stream(engine: Any, ids: Sequence[int], tokens: int) -> Any:
    """Yield how many tokens an engine has generated for a prompt since it last told."""
    told = 0
    given = {"input_ids": list(ids), "sampling_params": sampling(tokens), "stream": True}
    async for found in await engine.async_generate(**given):
        count = found["meta_info"]["completion_tokens"]
        yield count - told
        told = count


def measure(name: str, model: str, batch: int, context: int, rounds: int) -> Figures:
    """Measure an engine in this process."""
    import sglang

    on_gpu, rows = torch.cuda.is_available(), ENGINES[name]
    if not isinstance(rows, str):
        os.environ["KVQUANT_SGLANG"] = json.dumps(rows)
    options = {
        "model_path": model,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",
        "page_size": PAGE,
        "chunked_prefill_size": 8192,
        "context_length": context + ROOM + PAGE,
        "max_running_requests": batch,
        "max_total_tokens": batch * (context + ROOM + PAGE) + 64 * PAGE,
        "random_seed": 0,
        "attention_backend": rows if isinstance(rows, str) else "kvquant",
    }
    if not [*Path(model).glob("*.safetensors")]:
        options["load_format"] = "dummy"
    if on_gpu:  # graphs of prompts would take memory, and time at each start
        options |= {"cuda_graph_max_bs_decode": batch, "cuda_graph_backend_prefill": "disabled"}
    else:  # to try this script
        options |= {"device": "cpu"}
    begun = time.perf_counter()
    engine = sglang.Engine(**options)
    found: Figures = {"start_s": time.perf_counter() - begun, "decode": []}
    found["tokens"] = engine.get_server_info()["internal_states"][0]["memory_usage"]

    async def run() -> None:
        for seed in range(rounds + 1):
            await engine.tokenizer_manager.flush_cache()
            ask = partial(finish, engine), partial(stream, engine)
            figures = await measure_decode(*ask, batch, context, seed)
            if seed:
                found["decode"].append(figures)

    engine.loop.run_until_complete(run())
    engine.shutdown()
    return found


@click.command()
@click.argument("json_file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--engine", "names", multiple=True, type=click.Choice([*ENGINES]), default=[*ENGINES])
@click.option("--layers", default=8, show_default=True)
@click.option("--width", default=4096, show_default=True, help="Of the hidden states.")
@click.option("--batch", default=64, show_default=True)
@click.option("--context", default=8192, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", default=280.0, show_default=True, help="Of an engine, at most.")
@click.option("--model", default="", help="The folder of a model in place of random weights.")
@click.option("--here", is_flag=True, help="Measure one engine in this process.")
def main(
    json_file: Path,
    names: tuple[str, ...],
    layers: int,
    width: int,
    batch: int,
    context: int,
    rounds: int,
    seconds: float,
    model: str,
    here: bool,
) -> None:
    """Measure, print, and write the file after each engine."""
    sizes = {"batch": batch, "context": context, "rounds": rounds}
    if here:
        found = measure(names[0], model, **sizes)
        json_file.write_text(json.dumps(found), encoding="utf-8")
        os._exit(0)  # whatever SGLang has left
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    everything: Figures = {"gpu": gpu, "torch": torch.__version__, "layers": layers, "width": width}
    everything |= {**sizes, "model": Path(model).name, "engines": {}}
    with TemporaryDirectory() as folder:
        random_model(layers, width).save_pretrained(folder)
        for name in filter(is_there, names):
            log, one = json_file.with_name(f"{name}.log"), Path(folder) / f"{name}.json"
            command = [sys.executable, __file__, str(one), "--here", "--engine", name]
            command += ["--model", model or folder]
            command += [part for key, x in sizes.items() for part in (f"--{key}", str(x))]
            with log.open("w") as file:
                try:
                    subprocess.run(command, stdout=file, stderr=file, timeout=seconds, check=False)
                except subprocess.TimeoutExpired:
                    print(f"{name}: more than {seconds:.0f} s", flush=True)
            if not one.exists():
                print(f"FAILED {name}\n{log.read_text(errors='replace')[-3000:]}", flush=True)
                continue
            found = json.loads(one.read_text(encoding="utf-8"))
            everything["engines"][name] = found
            json_file.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
            for round_ in found["decode"]:
                told = ", ".join(f"{key} {value:.4g}" for key, value in round_.items())
                print(f"{name:10} {told}", flush=True)


if __name__ == "__main__":
    main()
