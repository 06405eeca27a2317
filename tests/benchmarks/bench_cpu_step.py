"""Milliseconds of a public model's decode step on a CPU: `QuantizedCache` beside `DynamicCache`.

    python tests/benchmarks/bench_cpu_step.py FOLDER --json FILE

Both run in transformers, eagerly, one sequence, on --threads threads. For each dtype and length the
script reads a prompt of random tokens, and first compares the logits of a step with those of the
16-bit cache. Then it times steps of both caches in turn, in --rounds rounds, and keeps the least
and the median of a round's steps. Run it alone on the machine.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvquant import QuantizedCache, __version__

STEPS, BEFORE = 24, 4  # timed steps of a round, and steps before them
MOST_KL = 0.05  # nats: rows of the default lose far less
LENGTHS = 512, 1024, 2048, 4096, 8192


class Decoding:
    """A model and a cache that holds a prompt."""

    def __init__(self, model: Any, name: str, ids: torch.Tensor) -> None:
        self.model, self.implementation = model, "sdpa" if name == "DynamicCache" else "kvquant"
        self.take()
        if name == "DynamicCache":
            self.given: dict[str, Any] = {"past_key_values": DynamicCache(config=model.config)}
        else:
            self.given = {**QuantizedCache(model).argument}
        for part in ids.split(1024, dim=1):
            self.logits = model(part, logits_to_keep=1, **self.given).logits

    def take(self) -> None:
        """Let the model attend as the cache asks."""
        self.model.set_attn_implementation(self.implementation)

    def steps(self, token: torch.Tensor, count: int) -> list[float]:
        """Milliseconds of each step."""
        self.take()
        found = []
        for _ in range(count):
            begun = time.perf_counter()
            self.logits = self.model(token, **self.given).logits
            found.append(1e3 * (time.perf_counter() - begun))
        return found


@click.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option("--dtype", "dtypes", multiple=True, default=["float32", "bfloat16"])
@click.option("--length", "lengths", multiple=True, type=int, default=LENGTHS, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), required=True)
@torch.no_grad()
def main(
    folder: Path,
    dtypes: tuple[str, ...],
    lengths: tuple[int, ...],
    threads: int,
    rounds: int,
    json_file: Path,
) -> None:
    """Print a line per dtype and length."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    facts = {"model": folder.name, "threads": threads, "torch": torch.__version__}
    facts |= {"cpu": torch.backends.cpu.get_cpu_capability(), "kvquant": __version__}
    rows = []
    for dtype in dtypes:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        model.eval()
        for length in lengths:
            ids = torch.randint(10, model.config.vocab_size, (1, length))
            both = {name: Decoding(model, name, ids) for name in ("DynamicCache", "QuantizedCache")}
            for one in both.values():
                one.steps(ids[:, -1:], BEFORE)
            exact, found = (one.logits[0, -1].double().log_softmax(-1) for one in both.values())
            kl = float((exact.exp() * (exact - found)).sum())
            assert kl < MOST_KL, (dtype, length, kl)
            times: dict[str, list[list[float]]] = {name: [] for name in both}
            for _ in range(rounds):
                for name, one in both.items():
                    times[name].append(one.steps(ids[:, -1:], STEPS))
            ms = {name: statistics.median(map(statistics.median, of)) for name, of in times.items()}
            least = {name: min(map(min, of)) for name, of in times.items()}
            ratio = ms["DynamicCache"] / ms["QuantizedCache"]
            row = {"dtype": dtype, "tokens": length, "ms": ms, "least_ms": least, "times": ratio}
            rows.append({**row, "kl": kl})
            told = ", ".join(f"{name} {one:.1f} ms" for name, one in ms.items())
            print(f"{dtype:9} {length:6,} {told}, {ratio:.2f} times as fast, KL {kl:.1e}")
            json_file.write_text(json.dumps({**facts, "steps": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
