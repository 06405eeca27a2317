"""Engines of vLLM on a GPU, each in a process of its own: kvquant's rows beside vLLM's attention.

    python tests/benchmarks/bench_vllm.py --json bench.json --part answers --part decode
    python tests/benchmarks/bench_vllm.py --json bench.json --part load

The model is a Llama as wide as one of 8B, with random weights, or --model. With --ranks 2 each
engine takes two GPUs, among which vLLM splits heads and weights. Engines start side by side, as
many as the GPU has memory for, and are measured one by one. Parts:

    answers   the demo model's texts, compared with TRITON_ATTN's; first, for all that follows
    decode    --batch prompts of --context tokens, and then steps in which all decode; the same
              with --fewer prompts
    memory    the same with as many sequences as fit in the memory that 16 bit takes for --batch
    load      arrivals at 50, 70 and 90 % of the rate that saturates FLASH_ATTN in 16 bit: requests
              that come at once, by the seconds until all are answered; it is found first (or
              --rate); the same arrivals for all engines. Prompts have a sixteenth of --context to
              twice as many tokens, outputs 128 to 512

The file is written after each measurement, and another call adds to it: parts, engines and rounds.
`tests/benchmarks/results.py keep vllm bench.json` keeps it. vLLM 0.32 must be installed, or be
brought there (tests/vllm/on_gpu/).
"""

from __future__ import annotations

import datetime
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # before vLLM is imported

import click
import torch
from decoding import ROOM, Figures
from transformers import AutoConfig, AutoTokenizer, LlamaConfig
from vllm_process import EngineProcess

from kvquant import __version__

ROOT = Path(__file__).resolve().parents[2]
MODEL, TEXT = ROOT / "examples" / "llama-demo-5m", ROOT / "examples" / "unseen.txt"
PARTS = "answers", "decode", "memory", "load"
SHARES = 0.5, 0.7, 0.9  # of the rate that saturates SATURATED
SATURATED, REFERENCE = "flash", "triton"
OUTPUTS = 128, 512  # tokens under load
MOST_SEQUENCES = 256  # at once
GRAPHS = [1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 208, 256]  # sequences in each


def ours(**rows: Any) -> Figures:
    """Options of an engine with rows of kvquant."""
    asked = {"attention_backend": "CUSTOM", "additional_config": {"kvquant": rows}}
    return {"block_size": 64, **asked}


INT4 = {"k_format": "int4-g4", "v_format": "int4-g4"}
ENGINES: dict[str, Figures] = {
    "flash": {"attention_backend": "FLASH_ATTN"},
    "kvquant": ours(**INT4, recent_len=0),
    "kvquant-window": ours(**INT4, recent_len=128),
    "default": ours(recent_len=0),
    "default-window": ours(recent_len=128),
    "plan": ours(plan="auto", recent_len=0),
    "flash-fp8": {"attention_backend": "FLASH_ATTN", "kv_cache_dtype": "fp8"},
    "triton": {"attention_backend": "TRITON_ATTN"},
}
# KL to TRITON_ATTN that an engine may have at most; int4-g4 has .005
MOST_KL = {"flash": 0.001, "kvquant": 0.02, "flash-fp8": 0.01, "triton": 0.001}
MOST_KL |= {"kvquant-window": 0.005, "default": 0.005, "default-window": 0.002, "plan": 0.006}
PASSAGES, PASSAGE, ANSWER = 16, 200, 64  # of the demo model: texts, tokens of a prompt and a text
GIB, HEAD_DIM = 1 << 30, 128


class Bench:
    """What was asked for, and what was found so far."""

    def __init__(
        self, settings: Figures, json_file: Path, rounds: int, seconds: float, rate: float | None
    ) -> None:
        self.settings, self.json_file, self.rounds, self.rate = settings, json_file, rounds, rate
        self.until = time.monotonic() + seconds
        self.found: Figures = {"machine": machine(), "settings": settings, "engines": {}}
        if json_file.exists():
            before = json.loads(json_file.read_text(encoding="utf-8"))
            if before["settings"] != settings:
                raise click.UsageError(
                    f"{json_file} has {before['settings']}, and this is {settings}: name another"
                )
            self.found = before
        self.begun = time.monotonic()

    def say(self, words: str) -> None:
        print(f"{time.monotonic() - self.begun:6.1f} s  {words}", flush=True)

    def of(self, name: str) -> Figures:
        """What was found of an engine."""
        found: Figures = self.found["engines"].setdefault(name, {})
        return found

    def keep(self, name: str, part: str, figures: Figures) -> None:
        """Add a measurement, and write the file."""
        self.of(name).setdefault(part, []).append(figures)
        self.save()
        told = (f"{key} {show(value)}" for key, value in figures.items())
        self.say(f"{name:10} {part}: {', '.join(told)}")

    def save(self) -> None:
        self.json_file.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")

    def has_time(self) -> bool:
        """Whether another measurement may begin."""
        left = self.until - time.monotonic()
        if left <= 0:
            self.say("no time is left (--seconds)")
        return left > 0

    @contextmanager
    def engines(self, names: Sequence[str], options: Figures) -> Any:
        """Engines that have started, side by side, by name; one that fails is told and left out."""
        with ExitStack() as stack:
            started, ready = {}, {}
            for name in names:
                log = self.json_file.with_name(f"{name}.log")
                started[name] = EngineProcess(options | ENGINES[name], log)
                stack.callback(started[name].close)
            for name, process in started.items():
                try:
                    figures = process.answer()
                except RuntimeError as error:
                    self.fail(name, error)
                    continue
                ready[name] = process
                self.say(f"{name:10} is up after {figures['start_s']:.0f} s, {figures['tokens']:,}")
                self.of(name).update(figures)
            yield ready

    def measure(self, process: EngineProcess, name: str, measure: str, **given: Any) -> Any:
        """What an engine answers; None where it failed."""
        try:
            return process.ask(measure, **given)
        except RuntimeError as error:
            self.fail(name, error)
            return None

    @property
    def lengths(self) -> Figures:
        """Of prompts and outputs under load."""
        context = self.settings["context"]
        return {"prompts": (context // 16, 2 * context), "outputs": self.settings["outputs"]}

    def fail(self, name: str, error: Exception) -> None:
        self.of(name).setdefault("errors", []).append(str(error))
        self.save()
        self.say(f"{name} FAILED: {error}")


def show(value: object) -> str:
    """A figure as it is printed."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def machine() -> Figures:
    """Where and when."""
    from vllm import __version__ as version

    on_gpu = torch.cuda.is_available()
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else "none",
        "torch": torch.__version__,
        "vllm": version,
        "kvquant": __version__,
        "date": now.isoformat(timespec="seconds"),
    }


def compare_answers(bench: Bench, names: Sequence[str]) -> list[str]:
    """Compare texts of the demo model; the engines whose answers are near enough."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    step = (len(ids) - PASSAGE) // PASSAGES
    prompts = [ids[i * step :][: PASSAGE - 9 * i] for i in range(PASSAGES)]
    options = {"model": str(MODEL), "max_model_len": 1024, "max_num_seqs": PASSAGES}
    options |= {"dtype": "bfloat16", "kv_cache_memory_bytes": GIB // 2, "max_logprobs": 20}
    options |= usual([1, 4, PASSAGES]) | {"tensor_parallel_size": bench.settings["ranks"]}
    wanted = list(dict.fromkeys([REFERENCE, *names]))
    with bench.engines(wanted, options) as engines:
        texts = {
            name: bench.measure(process, name, "answers", prompts=prompts, tokens=ANSWER)
            for name, process in engines.items()
        }
    right = []
    for name in names:
        found, reference = texts.get(name), texts.get(REFERENCE)
        if found is None or reference is None:
            continue
        kl, count = divergence(reference, found)
        is_right = kl < MOST_KL[name] and count > PASSAGES * ANSWER / 8  # texts part early
        bench.keep(name, "answers", {"kl": kl, "steps": count, "right": is_right})
        right += [name] if is_right else []
    return right


def divergence(wanted: Any, found: Any) -> tuple[float, int]:
    """Mean KL of steps behind equal tokens, of the likeliest tokens and the rest; how many."""
    total, count = 0.0, 0
    for (ids, steps), (other_ids, other_steps) in zip(wanted, found, strict=True):
        for token, other, here, there in zip(ids, other_ids, steps, other_steps, strict=True):
            both = here.keys() & there.keys()
            parts = [(math.exp(here[x]), math.exp(there[x])) for x in both]
            rest = [max(1 - sum(part[i] for part in parts), 1e-9) for i in (0, 1)]
            total += sum(p * math.log(p / q) for p, q in [*parts, (rest[0], rest[1])])
            count += 1
            if token != other:
                break
    return total / max(count, 1), count


def usual(graphs: Sequence[int]) -> Figures:
    """Options of all engines. A batch is padded to the next size that has a graph."""
    if not torch.cuda.is_available():
        return {"enforce_eager": True}  # to try this script
    return {
        "gpu_memory_utilization": 0.2,  # what has to be free at the start; pages take their bytes
        "compilation_config": {"cudagraph_capture_sizes": list(graphs)},
    }


def measure_engines(
    bench: Bench, names: Sequence[str], parts: Sequence[str], options: Figures, together: int
) -> None:
    """The parts with random weights."""
    for start in range(0, len(names), together):
        with bench.engines(names[start : start + together], options) as engines:
            for process in engines.values():  # kernels that are compiled late
                process.ask("load", rate=None, count=4, seed=0, **bench.lengths)
            for part in parts:
                PART[part](bench, engines)


def decode(bench: Bench, engines: Mapping[str, EngineProcess]) -> None:
    """In equal batch."""
    for batch in (*bench.settings["fewer"], bench.settings["batch"]):
        repeat(bench, engines, "decode", dict.fromkeys(engines, batch))


def memory(bench: Bench, engines: Mapping[str, EngineProcess]) -> None:
    """In equal memory; where as many fit as in equal batch that is measured already."""
    each = bench.settings["context"] + ROOM
    counts = {name: bench.of(name)["tokens"] // each // 4 * 4 for name in engines}
    counts = {name: min(count, MOST_SEQUENCES) for name, count in counts.items()}
    more = {name: count for name, count in counts.items() if count > bench.settings["batch"]}
    repeat(bench, engines, "memory", more)


def repeat(
    bench: Bench, engines: Mapping[str, EngineProcess], part: str, batches: Mapping[str, int]
) -> None:
    """Rounds of an engine after the other."""
    for seed in range(bench.rounds):
        for name, batch in batches.items():
            if not bench.has_time():
                return
            given = {"batch": batch, "context": bench.settings["context"], "seed": seed}
            figures = bench.measure(engines[name], name, "decode", **given)
            if figures is not None:
                bench.keep(name, part, figures)


def load(bench: Bench, engines: Mapping[str, EngineProcess]) -> None:
    """At shares of the rate that saturates, all engines at each before the next round."""
    if bench.rate is None:
        bench.rate = bench.found.get("saturating_rate")
    requests = bench.settings["requests"]
    if bench.rate is None:
        if SATURATED not in engines:
            raise click.UsageError(f"give --rate, or measure {SATURATED} first")
        given = {"rate": None, "count": 2 * requests, "seed": 1000, **bench.lengths}
        figures = bench.measure(engines[SATURATED], SATURATED, "load", **given)
        if figures is None:
            return
        bench.keep(SATURATED, "saturated", figures)
        bench.rate = figures["requests_per_s"]
    bench.found["saturating_rate"] = bench.rate
    for seed in range(bench.rounds):
        for share in SHARES:
            given = {"rate": share * bench.rate, "count": requests, "seed": seed, **bench.lengths}
            for name, process in engines.items():
                if not bench.has_time():
                    return
                figures = bench.measure(process, name, "load", **given)
                if figures is not None:
                    bench.keep(name, "load", {"share": share, **figures})


PART = {"decode": decode, "memory": memory, "load": load}


def random_model(layers: int, width: int) -> LlamaConfig:
    """As wide as a Llama 3 8B, or of width 8192 as one of 70B, or in the proportions of 8B."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_DIM,
        num_key_value_heads=min(width // HEAD_DIM // 4, 8),
        head_dim=HEAD_DIM,
        vocab_size=32000,
        max_position_embeddings=1 << 17,
        dtype="bfloat16",
    )
    config.architectures = ["LlamaForCausalLM"]
    return config


def how_many_fit(config: LlamaConfig, pages: int) -> int:
    """Engines that the GPU has memory for at once.

    Args:
        config: of the model.
        pages: bytes of an engine's pages.
    """
    if not torch.cuda.is_available():
        return len(ENGINES)
    width, layers = config.hidden_size, config.num_hidden_layers
    weights = 2 * width * (layers * (3 * config.intermediate_size + 5 * width // 2) + 2 * 32000)
    total = torch.cuda.get_device_properties(0).total_memory
    return max(total // (pages + weights + 7 * GIB), 1)


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS)
@click.option("--engine", "names", multiple=True, type=click.Choice([*ENGINES]), default=[*ENGINES])
@click.option("--layers", default=8, show_default=True)
@click.option("--width", default=4096, show_default=True, help="Of the hidden states.")
@click.option("--model", default="", help="The folder of a model in place of random weights.")
@click.option("--ranks", default=1, show_default=True, help="GPUs of each engine.")
@click.option("--batch", default=64, show_default=True)
@click.option("--fewer", type=int, multiple=True, help="Further batches of the part decode.")
@click.option("--context", default=8192, show_default=True)
@click.option("--outputs", nargs=2, type=int, default=(128, 512), show_default=True)
@click.option("--requests", default=150, show_default=True, help="Under each load.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--rate", type=float, help="Requests a second that saturate; else it is measured.")
@click.option("--together", type=int, help="Engines at once; else as many as fit.")
@click.option("--seconds", default=3600.0, help="After these no measurement begins.")
def main(
    json_file: Path,
    parts: tuple[str, ...],
    names: tuple[str, ...],
    rounds: int,
    rate: float | None,
    together: int | None,
    seconds: float,
    model: str,
    **settings: Any,
) -> None:
    """Measure, print, and write the file after each measurement."""
    settings |= {key: list(settings[key]) for key in ("outputs", "fewer")}
    settings["model"] = Path(model).name
    bench = Bench(settings, json_file, rounds, seconds, rate)
    bench.say(f"{bench.found['machine']}, {settings}")
    if "answers" in parts:
        names = tuple(compare_answers(bench, names))
    parts = tuple(part for part in PARTS if part in PART and part in parts)
    if not parts or not names:
        return
    with TemporaryDirectory() as folder:
        config: Any = random_model(settings["layers"], settings["width"])
        dummy = {"load_format": "dummy"}
        if model:
            folder, dummy = model, {}
            config = AutoConfig.from_pretrained(model)
        else:
            config.save_pretrained(folder)
        context, outputs = settings["context"], max(settings["outputs"])
        # what 16 bit needs for the batch: bytes of K and V
        heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        token = 4 * config.num_hidden_layers * heads * dim // settings["ranks"]
        pages = token * (settings["batch"] * (context + ROOM) + 64 * 64)
        options = {
            **usual(GRAPHS),
            **dummy,
            "model": folder,
            "tensor_parallel_size": settings["ranks"],
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "max_model_len": 2 * context + max(outputs, ROOM),
            "max_num_seqs": MOST_SEQUENCES,
            "max_num_batched_tokens": 8192,
            "kv_cache_memory_bytes": pages,
        }
        measure_engines(bench, names, parts, options, together or how_many_fit(config, pages))


if __name__ == "__main__":
    main()
