"""How many facts caches keep: formats, plans and other projects' schemes, by `kvquant evaluate`.

For models that train_recall.py has trained. Sheets of facts fill contexts of several lengths, so
longer contexts have more facts. First the 16-bit cache answers each task. A task that it answers to
95 % is then asked of every cache, with each number of first and last tokens in 16 bit.

Other projects' schemes are those of peer_schemes.py. They read the question, which is decoded
behind the prompt, in 16 bit. Ours packs each token that leaves the recent ones; with 0/0 that is
the question, too. So compare at 4/128 or 64/256, where few tokens leave; 0/0 favours
the others.

Plans, and OSCAR's rotations, are made on the spot from sheets of other seeds.

    python tests/benchmarks/bench_recall.py FOLDER --json recall.json
    python tests/benchmarks/bench_recall.py --from recall.json --from code.json --picture lost.svg

A file that exists keeps the runs of other models. evaluations.py says what is in it, and what its
tables mean.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import torch
from evaluations import TEST, as_run, draw, of_models, read_runs, tables, text_of
from peer_schemes import PeerCache, peers
from results import PICTURED

from kvquant.calibration.calibrate import Goal, calibrate
from kvquant.calibration.calibrate import Sizes as Amounts
from kvquant.calibration.fidelity import Planned
from kvquant.calibration.windows import spread
from kvquant.cli.console import COUNT, FILE, FOLDER, NEW_FILE
from kvquant.errors import ConfigError, KVQuantError
from kvquant.evaluation.caches import parse_cache
from kvquant.evaluation.decoding import Choice
from kvquant.evaluation.evaluate import HELD_OUT, MARGIN, Sizes, Task, evaluate
from kvquant.evaluation.prompts import Writer
from kvquant.evaluation.retrieval import TASKS
from kvquant.hf.model import CachedModel
from kvquant.io.plan import CachePlan
from kvquant.text import Column, paragraph, render_table
from kvquant.version import __version__

FORMATS = ("fp8", "int8", "int8/int4-g4", "int4-g8", "int4-g4", "int4")
PLANS = ("int4-g4", "int4")
WINDOWS = ("4/128", "0/0", "64/256")
ASKED = ("keys", "values", "overwritten", "variables", "phonebook", "copy")
OBSERVED, SCORED = 32768, 16  # tokens of sheets for plans, and decoded to see what a plan keeps
Caches = Sequence[str | Planned | PeerCache]  # without a window


class QuickTokenizer:
    """A tokenizer of transformers; its Rust is called directly, ten times as fast."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        encode = self._tokenizer.backend_tokenizer.encode
        return {"input_ids": encode(text, add_special_tokens=add_special_tokens).ids}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@dataclass(frozen=True)
class Amount:
    """How much is measured.

    Attributes:
        lengths: tokens of contexts.
        windows: first and last tokens in 16 bit; left out where they are over half of a context.
        tasks: of retrieval.
        seeds: how many; of the first, tasks are chosen.
        prompts, questions: of each seed, task and length, and of each prompt.
        least: what the 16-bit cache must answer of a task.
        seconds: from the beginning of the work on a model; no run begins later.
        with_kl: whether the KL on the packaged text is measured, too.
    """

    lengths: tuple[int, ...]
    windows: tuple[tuple[int, int], ...]
    tasks: tuple[str, ...] = ASKED
    seeds: int = 3
    prompts: int = 44
    questions: int = 8
    least: float = TEST
    seconds: float = 175.0
    with_kl: bool = False


def with_window(cache: str | Planned | PeerCache, window: tuple[int, int]) -> Choice:
    """A cache with so many first and last tokens in 16 bit."""
    sinks, recent = window
    if isinstance(cache, str):
        return parse_cache(f"{cache},sinks={sinks},recent={recent}")
    return replace(cache, sink_len=sinks, recent_len=recent)


def runs(
    model: CachedModel, caches: Caches, amount: Amount, start: float
) -> Iterator[dict[str, Any]]:
    """Measure.

    Args:
        model: decodes.
        caches: to be compared.
        amount: how much.
        start: when the work on this model began, by time.monotonic.

    Yields:
        What evaluate returns: for each length first what the 16-bit cache answers, then, by seed,
        window and length, what all caches do in the tasks that are left.
    """

    def run(given: Sequence[Choice], length: int, tasks: Sequence[str], seed: int) -> Any:
        with_kl = amount.with_kl and len(given) > 1 and not seed  # the text has none
        kinds = ("kl", "retrieval") if with_kl else ("retrieval",)
        sizes = Sizes(
            (length,),
            prompts=amount.prompts,
            questions=amount.questions,
            batch=amount.prompts,
            seed=seed,
        )
        task = Task(kinds=kinds, retrieval=tuple(tasks), chat=False)
        found = evaluate(model, given, task=task, sizes=sizes)
        click.echo(f"{time.monotonic() - start:6.1f} s: {length} tokens, seed {seed}, {given[-1]}")
        return found

    left: dict[int, list[str]] = {}
    for length in amount.lengths:
        found = run([with_window("bf16", (0, 0))], length, amount.tasks, 0)
        tasks = found["retrieval"][str(length)]
        left[length] = [name for name, one in tasks.items() if one["exact"] >= amount.least]
        yield found
    for seed in range(amount.seeds):
        for window in amount.windows:
            for length, tasks in left.items():
                if not tasks or length < 2 * sum(window):  # little to ask of, and mostly 16 bit
                    continue
                if time.monotonic() - start > amount.seconds:
                    click.echo(f"left out, {amount.seconds:g} s are over: {length}, seed {seed}")
                    continue
                yield run([with_window(one, window) for one in caches], length, tasks, seed)


def sheets(model: CachedModel, length: int, count: int) -> list[int]:
    """Tokens of sheets with answered questions, of seeds that are not measured."""
    filler = model.encode(HELD_OUT.read_text(encoding="utf-8"))
    ending = model.tokenizer("\n", add_special_tokens=False)["input_ids"]
    writer = Writer(model.tokenizer, length, filler, window=0, sinks=0, chat=False)
    found: list[int] = []
    number = 0
    while len(found) < count:
        prompt = writer.write([*TASKS][number % len(TASKS)], f"calibration {number}")
        number += 1
        found += prompt.context
        for one in prompt.asked:
            found += [*one.question, *one.answer, *ending]
    return found


def made_plan(model: CachedModel, tokens: list[int], length: int) -> CachePlan:
    """A plan from such a text."""
    amounts = Amounts(len(tokens), length, windows=2, context=length // 2, scored=SCORED)
    plan = calibrate(model, tokens, sizes=amounts, goal=Goal(format="int4"))
    assert plan is not None
    return plan


def all_caches(
    model: CachedModel, formats: Iterable[str], plans: Iterable[str], length: int, with_peers: bool
) -> Caches:
    """Formats, plans of formats and other projects' caches."""
    found: list[str | Planned | PeerCache] = [*formats]
    plans = [*plans]
    tokens = sheets(model, length, OBSERVED) if plans or with_peers else []
    if plans:
        plan = made_plan(model, tokens, length)
        found += [Planned(plan.with_formats(name), f"plan {name}") for name in plans]
    if with_peers:
        found += peers(model, spread(tokens, min(16, len(tokens) // length), length))
    return found


def facts(model: CachedModel, name: str) -> dict[str, Any]:
    """Of a model, and where it runs."""
    config, device = model.config, model.model.device
    return {
        "name": name,
        "parameters": sum(one.numel() for one in model.model.parameters()),
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "kvquant": __version__,
    }


def pairs(_: Any, __: Any, given: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Windows as they are written: 4/128."""
    try:
        return tuple((int(a), int(b)) for a, b in (one.split("/") for one in given))
    except ValueError:
        raise click.BadParameter("write SINKS/RECENT, such as 4/128") from None


def show(found: Sequence[Any]) -> None:
    """Print all tables."""
    for one in of_models(found):
        for heading, (titles, rows) in tables(one):
            columns = [Column(title, left=not at) for at, title in enumerate(titles)]
            click.echo(f"\n{paragraph(heading)}\n{render_table(columns, rows)}")


@click.command()
@click.argument("folders", type=FOLDER, nargs=-1)
@click.option("--length", "lengths", type=COUNT, multiple=True, default=(256, 512, 1024))
@click.option("--window", "windows", multiple=True, default=WINDOWS, callback=pairs)
@click.option("--task", "tasks", type=click.Choice([*TASKS]), multiple=True, default=ASKED)
@click.option("--format", "formats", multiple=True, default=FORMATS, help="K or K/V.")
@click.option("--plan", "plans", multiple=True, default=PLANS, help="A format, with a plan.")
@click.option("--no-plans", is_flag=True)
@click.option("--peers/--no-peers", "with_peers", default=True)
@click.option("--seeds", type=COUNT, default=3, show_default=True)
@click.option("--prompts", type=COUNT, default=44, show_default=True, help="Of a seed.")
@click.option("--questions", type=COUNT, default=8, show_default=True, help="Of a prompt.")
@click.option("--seconds", default=175.0, show_default=True, help="For each model.")
@click.option("--least", default=TEST, show_default=True, help="Of 16 bit, in a task to ask.")
@click.option("--kl", "with_kl", is_flag=True, help="Measure it, too, on the packaged text.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--json", "json_file", type=NEW_FILE, help="Keep what was measured.")
@click.option("--from", "kept", type=FILE, multiple=True, help="Print and draw these files.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path))
def main(
    folders: tuple[Path, ...],
    formats: tuple[str, ...],
    plans: tuple[str, ...],
    no_plans: bool,
    with_peers: bool,
    device: str,
    json_file: Path | None,
    kept: tuple[Path, ...],
    picture: Path | None,
    **amounts: Any,
) -> None:
    """Measure what caches keep of facts, and print tables."""
    found = [run for path in kept for run in read_runs(path)]
    amount = Amount(**amounts)
    for folder in folders:
        start, name = time.monotonic(), folder.name
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = CachedModel.from_pretrained(folder, device=device, dtype=dtype)
        model.tokenizer = QuickTokenizer(model.tokenizer)
        most = model.max_positions or max(amount.lengths) + MARGIN
        lengths = tuple(one for one in amount.lengths if one + MARGIN <= most)
        if not lengths:
            raise ConfigError(f"{name} has {most} positions: give a --length below {most - MARGIN}")
        caches = all_caches(model, formats, () if no_plans else plans, max(lengths), with_peers)
        click.echo(f"{name}: {len(caches)} caches made in {time.monotonic() - start:.0f} s")
        others = [] if json_file is None else read_runs(json_file)
        found += [one for one in others if one["model"]["name"] != name]
        for run in runs(model, caches, replace(amount, lengths=lengths), start):
            found.append(as_run(facts(model, name), run))
            if json_file is not None:
                date = datetime.now(timezone.utc).isoformat(timespec="seconds")
                text = text_of({"machine": {"date": date}}, found)
                json_file.write_text(text, encoding="utf-8")
    show(found)
    if picture is not None:
        draw(of_models(found), PICTURED, picture)


if __name__ == "__main__":
    try:
        main()
    except KVQuantError as error:
        sys.exit(f"Error: {error}")
