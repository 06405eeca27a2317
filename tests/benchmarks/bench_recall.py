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
    python tests/benchmarks/bench_recall.py --from tests/benchmarks/results/code.json

A file that exists keeps the runs of other models. evaluations.py says what is in it, and what its
tables mean. --from prints a file's tables. The files in results/ came from these calls, each with
--json and --texts 0, on one or four GPUs:

    recall          bench_recall.py examples/llama-recall-5m --length 512 --length 1024
                    --length 1984 --least 0.9 --seconds 400
    recall-few      the same --length 1024 --length 1984 --window 4/128 --window 64/256
                    --format int3 --format int2 --plan 2.5 --plan 3.25 --plan int2 --plan int3
                    --no-peers
    code, code-few  train_code_lm.py code-lm --length 2048 --seconds 190, then --resume
                    --length 8192 --rate 7e-4 --last 3e-5 --seconds 180; bench_code.py code-lm
                    --length 8064 --task functions --task keys --task overwritten --task phonebook
                    --task copy
    kinds           train_code_lm.py code-biased --sources code-lm --kind biased --width 512
                    --layers 4 --length 1024 --length 2048 --last 3e-5 --seconds 300; bench_code.py
                    code-biased --length 1000 --length 1984 --window 4/128 --window 0/0
    code-sinks,     the same training with --kind sinks (190 s) and --kind latent (120 s);
    code-latent     bench_code.py --window 4/128 --length 1984 --no-peers --seeds 2, six tasks
                    --seeds 1 --no-peers --format int8 --format int4-g4 --plan int4 --texts 24
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
from evaluations import TEST, Run, as_run, of_models, read_runs, tables, text_of
from peer_schemes import PeerCache, peers

from kvquant.calibration.calibrate import Goal, calibrate
from kvquant.calibration.calibrate import Sizes as Amounts
from kvquant.calibration.fidelity import Planned
from kvquant.calibration.windows import spread
from kvquant.cli.console import COUNT, FILE, NEW_FILE, SOURCE
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
# formats of latents of 256 elements that have a CUDA kernel; RoPE parts are 16 bit
LATENT_FORMATS = ("fp8-g4", "int8-g4", "int4-g8", "int4-g4")
LATENT_PLANS = ("int4-g8", "int4-g4")
WINDOWS = ("4/128", "0/0", "64/256")
ASKED = ("keys", "values", "overwritten", "variables", "phonebook", "copy")
GENERATING = ("int8", "int4-g4", "plan int4", "TurboQuant, 4 bits", "KIVI-4, groups of 128")
OBSERVED, SCORED = 32768, 16  # tokens of sheets for plans, and decoded to see what a plan keeps
Caches = Sequence[str | Planned | PeerCache]  # without a window


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
        with_kl: whether the KL on the text is measured, too.
        passages: of the text, for that.
        text: for that, for generation and for the front of contexts; the packaged one when None.
        texts: how many texts are generated, greedily and sampled, behind contexts of the shortest
            length. Only some caches do that, the GENERATING ones.
        new_tokens: of each.
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
    passages: int = 8
    text: str | None = None
    texts: int = 0
    new_tokens: int = 2048


def with_window(
    cache: str | Planned | PeerCache, window: tuple[int, int], *, latent: bool = False
) -> Choice:
    """A cache with so many first and last tokens in 16 bit."""
    sinks, recent = window
    if isinstance(cache, str):
        return parse_cache(f"{cache},sinks={sinks},recent={recent}", latent=latent)
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

    def run(
        kinds: Sequence[str],
        given: Caches,
        window: tuple[int, int],
        length: int,
        tasks: Sequence[str] = ASKED,
        seed: int = 0,
    ) -> Any:
        sizes = Sizes(
            (length,),
            prompts=amount.texts if "generation" in kinds else amount.prompts,
            questions=amount.questions,
            facts=(0,),
            passages=amount.passages,
            new_tokens=amount.new_tokens,
            batch=max(amount.prompts, amount.texts),
            seed=seed,
        )
        task = Task(kinds=tuple(kinds), retrieval=tuple(tasks), chat=False)
        choices = [with_window(one, window, latent=model.has_latents) for one in given]
        found = evaluate(model, choices, task=task, sizes=sizes, text=amount.text)
        spent = time.monotonic() - start
        what = ", ".join(kinds)
        click.echo(f"{spent:6.1f} s: {what}; {length} tokens, seed {seed}, {choices[-1]}")
        return found

    def in_time(what: str) -> bool:
        left = time.monotonic() - start <= amount.seconds
        if not left:
            click.echo(f"left out, {amount.seconds:g} s are over: {what}")
        return left

    left: dict[int, list[str]] = {}
    for length in amount.lengths:
        found = run(["retrieval"], ["bf16"], (0, 0), length, amount.tasks)
        tasks = found["retrieval"][str(length)]
        left[length] = [name for name, one in tasks.items() if one["exact"] >= amount.least]
        yield found
    for seed in range(amount.seeds):
        for window in amount.windows:
            for length, tasks in left.items():
                with_kl = amount.with_kl and not seed  # the text has none
                kinds = ["kl"] * with_kl + ["retrieval"] * bool(tasks)
                # in windows of half a context there is little to ask of
                if not kinds or length < 2 * sum(window):
                    continue
                if in_time(f"{length}, seed {seed}"):
                    yield run(kinds, caches, window, length, tasks or ASKED, seed)
        if amount.texts and not seed and in_time("generation"):
            some = [one for one in caches if _name(one) in GENERATING]
            yield run(["generation"], some, amount.windows[0], min(amount.lengths))


def _name(cache: str | Planned | PeerCache) -> str:
    return cache if isinstance(cache, str) else cache.name


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


def made_plan(model: CachedModel, tokens: list[int], length: int, goal: Goal) -> CachePlan:
    """A plan from such a text. Formats that a budget chooses are chosen on more of it."""
    windows, scored = (2, SCORED) if goal.budget is None else (4, 4 * SCORED)
    if windows * (length // 2 + scored) > len(tokens) // 4:  # a plan is scored on 30 % of it
        windows = 2
    amounts = Amounts(len(tokens), length, windows, length // 2, scored)
    plan = calibrate(model, tokens, sizes=amounts, goal=goal)
    assert plan is not None
    return plan


def made_plans(
    model: CachedModel, names: Sequence[str], tokens: list[int], length: int
) -> Iterator[Planned]:
    """Plans by their names: a format of all layers, or the bits of a budget."""
    budgets = {name: float(name) for name in names if name[0].isdigit()}
    made = {
        name: made_plan(model, tokens, length, Goal(budget=bits)) for name, bits in budgets.items()
    }
    plans = [*made.values()]
    for name in names:
        if name in made:
            yield Planned(made[name], f"plan for {name} bits")
            continue
        plan = next((one for one in plans if name in one.facts["candidates"]), None)
        if plan is None:
            plan = made_plan(model, tokens, length, Goal(format=name))
            plans.append(plan)
        yield Planned(plan.with_formats(name), f"plan {name}")


def all_caches(
    model: CachedModel,
    formats: Iterable[str],
    plans: Iterable[str],
    with_peers: bool,
    tokens: list[int],
    length: int,
) -> Caches:
    """Formats, plans of formats and other projects' caches.

    Args:
        model: reads the tokens.
        formats: K or K/V, or of latents.
        plans: formats of plans, or budgets in bits.
        with_peers: whether others' caches are there.
        tokens: of a text, for plans and for rotations; cut into passages of this length.
        length: of a passage.
    """
    found: list[str | Planned | PeerCache] = [*formats]
    found += made_plans(model, [*plans], tokens, length)
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


@dataclass(frozen=True)
class Subject:
    """A model with the caches that are to be compared.

    Attributes:
        name: of the model.
        model: decodes.
        caches: without a window.
        lengths: of contexts, those that the model has positions for.
        start: when the work on it began, by time.monotonic.
    """

    name: str
    model: CachedModel
    caches: Caches
    lengths: tuple[int, ...]
    start: float


def prepare(
    folder: Path,
    lengths: tuple[int, ...],
    formats: Sequence[str],
    plans: Sequence[str],
    with_peers: bool,
    device: str,
    text: str = "",
    only: Sequence[str] = (),
) -> Subject:
    """Load a model and make its caches.

    Args:
        folder: of the model.
        lengths: of contexts.
        formats, plans, with_peers: which caches, as of all_caches.
        device: where.
        text: a half of what plans are made from, if any; sheets of the tasks as they are now are
            the rest.
        only: caches whose names hold one of these words; all of them where there is none.
    """
    start, name = time.monotonic(), folder.name
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = CachedModel.from_pretrained(folder, device=device, dtype=dtype)
    most = model.max_positions or max(lengths) + MARGIN
    lengths = tuple(one for one in lengths if one + MARGIN <= most)
    if not lengths:
        raise ConfigError(f"{name} has {most} positions: give a --length below {most - MARGIN}")
    if model.has_latents:
        with_peers = False  # they have K and V of heads
        formats = LATENT_FORMATS if formats == FORMATS else formats
        plans = LATENT_PLANS if plans == PLANS else plans
    tokens: list[int] = []
    if plans or with_peers:
        tokens = model.encode(text)[: OBSERVED // 2] if text else []
        tokens += sheets(model, max(lengths), OBSERVED - len(tokens))
    caches = all_caches(model, formats, plans, with_peers, tokens, max(lengths))
    caches = [one for one in caches if not only or any(word in _name(one) for word in only)]
    click.echo(f"{name}: {len(caches)} caches made in {time.monotonic() - start:.0f} s")
    return Subject(name, model, caches, lengths, start)


def measure(subject: Subject, amount: Amount, json_file: Path | None) -> list[Run]:
    """Measure a model.

    Args:
        subject: the model and its caches.
        amount: how much; the subject's lengths count.
        json_file: gets the runs, too; those of other models in it stay.

    Returns:
        The runs of this model.
    """
    others = [] if json_file is None else read_runs(json_file)
    others = [one for one in others if one["model"]["name"] != subject.name]
    known, found = facts(subject.model, subject.name), list[Run]()
    amount = replace(amount, lengths=subject.lengths)
    for run in runs(subject.model, subject.caches, amount, subject.start):
        found.append(as_run(known, run))
        if json_file is not None:
            date = datetime.now(timezone.utc).isoformat(timespec="seconds")
            whole = text_of({"machine": {"date": date}}, [*others, *found])
            json_file.write_text(whole, encoding="utf-8")
    return found


@click.command()
@click.argument("folders", type=SOURCE, nargs=-1)
@click.option("--length", "lengths", type=COUNT, multiple=True, default=(256, 512, 1024))
@click.option("--window", "windows", multiple=True, default=WINDOWS, callback=pairs)
@click.option("--task", "tasks", type=click.Choice([*TASKS]), multiple=True, default=ASKED)
@click.option("--format", "formats", multiple=True, default=FORMATS, help="K or K/V.")
@click.option(
    "--plan", "plans", multiple=True, default=PLANS, help="A format, or bits of a budget."
)
@click.option("--no-plans", is_flag=True)
@click.option("--peers/--no-peers", "with_peers", default=True)
@click.option("--only", multiple=True, help="Caches whose name holds this word.")
@click.option("--seeds", type=COUNT, default=3, show_default=True)
@click.option("--prompts", type=COUNT, default=44, show_default=True, help="Of a seed.")
@click.option("--questions", type=COUNT, default=8, show_default=True, help="Of a prompt.")
@click.option("--seconds", default=175.0, show_default=True, help="For each model.")
@click.option("--least", default=TEST, show_default=True, help="Of 16 bit, in a task to ask.")
@click.option("--kl", "with_kl", is_flag=True, help="Measure it, too, on the packaged text.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--json", "json_file", type=NEW_FILE, help="Keep what was measured.")
@click.option("--from", "kept", type=FILE, multiple=True, help="Print these files, too.")
def main(
    folders: tuple[Path, ...],
    formats: tuple[str, ...],
    plans: tuple[str, ...],
    no_plans: bool,
    with_peers: bool,
    only: tuple[str, ...],
    device: str,
    json_file: Path | None,
    kept: tuple[Path, ...],
    **amounts: Any,
) -> None:
    """Measure what caches keep of facts, and print tables."""
    found: list[Run] = []
    amount = Amount(**amounts)
    for folder in folders:
        made = () if no_plans else plans
        subject = prepare(folder, amount.lengths, formats, made, with_peers, device, only=only)
        found += measure(subject, amount, json_file)
    if json_file is not None:
        found = read_runs(json_file)  # of other models, too
    found += [run for path in kept for run in read_runs(path)]
    show(found)


if __name__ == "__main__":
    try:
        main()
    except KVQuantError as error:
        sys.exit(f"Error: {error}")
