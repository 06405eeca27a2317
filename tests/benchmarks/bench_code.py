"""What caches cost a model of source code: KL, texts that stay the same, and what it finds.

For a model that train_code_lm.py has trained; its folder has sources of packages that it was not
trained on. KL and texts are those of test.txt; so is the code around what is asked for: facts as of
`kvquant evaluate`, functions and constants (code_tasks.py). Plans, and OSCAR's rotations, come from
valid.txt, sources of another package, and from sheets of other seeds with passages of valid.txt.

    python tests/benchmarks/bench_code.py FOLDER --json code.json --seconds 420

The caches, the file and the tables are those of bench_recall.py. Texts of 2,048 tokens are
generated from some caches alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import code_tasks
import torch
from bench_recall import ASKED, FORMATS, PLANS, Amount, measure, pairs, prepare, show
from evaluations import TEST

from kvquant.cli.console import COUNT, NEW_FILE, SOURCE
from kvquant.errors import KVQuantError

TASKS = (*code_tasks.KINDS, *ASKED)


@click.command()
@click.argument("folder", type=SOURCE)
@click.option("--length", "lengths", type=COUNT, multiple=True, default=(4096, 8064))
@click.option("--window", "windows", multiple=True, default=("4/128",), callback=pairs)
@click.option("--task", "tasks", type=click.Choice(TASKS), multiple=True, default=TASKS)
@click.option("--format", "formats", multiple=True, default=FORMATS, help="K or K/V.")
@click.option("--plan", "plans", multiple=True, default=PLANS, help="A format, with a plan.")
@click.option("--plans/--no-plans", "with_plans", default=True)
@click.option("--peers/--no-peers", "with_peers", default=True)
@click.option("--only", multiple=True, help="Caches whose name holds this word.")
@click.option("--seeds", type=COUNT, default=3, show_default=True)
@click.option("--prompts", type=COUNT, default=44, show_default=True, help="Of a seed.")
@click.option("--questions", type=COUNT, default=8, show_default=True, help="Of a prompt.")
@click.option("--passages", type=COUNT, default=32, show_default=True, help="For the KL.")
@click.option(
    "--texts", type=click.IntRange(0), default=24, show_default=True, help="To be generated."
)
@click.option("--new-tokens", type=COUNT, default=2048, show_default=True, help="Of a text.")
@click.option("--seconds", default=420.0, show_default=True, help="No run begins later.")
@click.option("--least", default=TEST, show_default=True, help="Of 16 bit, in a task to ask.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--json", "json_file", type=NEW_FILE, help="Keep what was measured.")
def main(
    folder: Path,
    formats: tuple[str, ...],
    plans: tuple[str, ...],
    with_plans: bool,
    with_peers: bool,
    only: tuple[str, ...],
    device: str,
    json_file: Path | None,
    **amounts: Any,
) -> None:
    """Measure what caches cost a model of source code, and print tables."""
    test, valid = (
        (folder / f"{name}.txt").read_text(encoding="utf-8") for name in ("test", "valid")
    )
    amount = Amount(**amounts, with_kl=True, text=test)
    plans = plans if with_plans else ()
    code_tasks.add(valid)  # sheets that plans are made from hold no line of test.txt
    subject = prepare(folder, amount.lengths, formats, plans, with_peers, device, valid, only)
    code_tasks.add(test)
    show(measure(subject, amount, json_file))


if __name__ == "__main__":
    try:
        main()
    except KVQuantError as error:
        sys.exit(f"Error: {error}")
