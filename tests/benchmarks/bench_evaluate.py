"""Time `kvquant evaluate` on a GPU, with a model as wide as one of 8B, with random weights.

    python tests/benchmarks/bench_evaluate.py --json evaluate.json

The script evaluates retrieval in contexts of 32,768 tokens, with 20 prompts a task and five caches
beside the 16-bit one. A model with random weights answers nothing right, so only the time counts.
If a run stops early, start it again with the same --json: it goes on where it stopped, and adds the
seconds of its parts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoTokenizer
from wide_models import made_model

from kvquant import __version__
from kvquant.cli.console import COUNT, NEW_FILE
from kvquant.evaluation.evaluate import MARGIN, Sizes, Task, evaluate
from kvquant.evaluation.retrieval import TASKS

TOKENIZER = Path(__file__).parents[2] / "examples" / "llama-demo-5m"
CACHES = ("int8", "int4-g4", "int4", "int8/int4-g4", "fp8")


def sum_of(parts: Iterable[Any]) -> float:
    """Add the seconds of the parts that the state file of an interrupted run holds."""
    return sum(sum(one["seconds"]) for one in parts)


@click.command()
@click.option("--layers", type=COUNT, default=32, show_default=True)
@click.option("--length", type=COUNT, default=32768, show_default=True)
@click.option("--prompts", type=COUNT, default=20, show_default=True, help="Of a task.")
@click.option("--batch", type=COUNT, default=4, show_default=True, help="Prompts at once.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--json", "json_file", type=NEW_FILE, required=True)
def main(layers: int, length: int, prompts: int, batch: int, device: str, json_file: Path) -> None:
    """Evaluate, and write how long each part took."""
    start = time.monotonic()
    model = made_model(layers, length + MARGIN, device=device)
    model.tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    loaded = time.monotonic() - start
    click.echo(f"{loaded:6.1f} s: the model is made")

    def told(what: str, parts: int) -> None:
        click.echo(f"{time.monotonic() - start:6.1f} s: {what}, one of {parts} parts")

    state = json_file.with_suffix(".state")
    before = sum_of(json.loads(state.read_text())["measured"].values()) if state.exists() else 0.0
    found = evaluate(
        model,
        CACHES,
        task=Task(kinds=("retrieval",), retrieval=tuple(TASKS), chat=False),
        sizes=Sizes((length,), prompts=prompts, facts=(0,), batch=batch),
        state=state,
        progress=told,
    )
    seconds = found["seconds"]
    measured = sum(map(sum, seconds.values()))
    others = time.monotonic() - start - loaded - (measured - before)
    facts = {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "kvquant": __version__,
        "layers": layers,
        "tokens": length,
        "prompts": prompts,
        "batch": batch,
        "tasks": [*found["retrieval"][str(length)]],
        "caches": [one["cache"] for one in found["caches"]],
        "cache_bytes": found["cache_bytes"],
        "seconds_to_make_the_model": loaded,
        "seconds_to_write_prompts": others,
        "seconds": seconds,
        "minutes": (loaded + others + measured) / 60,
    }
    json_file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    click.echo(f"{facts['minutes']:.1f} minutes: {seconds}")


if __name__ == "__main__":
    main()
