"""The command kvquant evaluate."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError
from .console import (
    COUNT,
    FILE,
    FORMATS,
    HTML,
    JSON,
    MODEL,
    NEW_FILE,
    ON_DEVICE,
    POSITIVE,
    WHOLE,
    check_output,
    enough_memory,
    read_text,
    refuse_options,
    write_json,
)

EXCEEDED, UNKNOWN = 3, 4  # exit codes


@click.command(epilog=FORMATS)
@MODEL
@click.option(
    "--cache",
    "caches",
    multiple=True,
    default=("default",),
    help="K[/V][,sinks=N][,recent=N], K and V each a FORMAT; in place of K/V: default, a plan's "
    "file, or auto for the model's plan. Repeat it for more caches.",
)
@click.option(
    "--tasks", default="kl,retrieval", help="Tasks, with commas: kl, retrieval, generation."
)
@click.option("--retrieval", help="Retrieval tasks, with commas; six by default.")
@click.option(
    "--length",
    "lengths",
    type=COUNT,
    multiple=True,
    help="Tokens of a context; by default 1024 on a CPU and 4096 on a GPU, or fewer if the model "
    "has fewer positions. Repeat it for more lengths.",
)
@click.option(
    "--facts",
    type=WHOLE,
    multiple=True,
    default=(4, 16, 64, 0),
    help="Facts in a retrieval prompt, 0 for as many as fit. Each task takes the largest number "
    "that the 16-bit cache can answer.",
)
@click.option(
    "--text", type=FILE, help="Held-out text for kl and generation; a packaged one by default."
)
@click.option(
    "--prompts",
    "examples",
    type=FILE,
    help='Prompts for generation, JSON lines: {"prompt": "...", "answer": "..."}.',
)
@click.option("--pattern", help="Regular expression: its last match in a text is the answer.")
@click.option("--samples", type=COUNT, default=4, help="Prompts, or passages, of a task.")
@click.option(
    "--questions", type=COUNT, default=8, help="Questions to a retrieval prompt, at most."
)
@click.option("--scored", type=COUNT, default=128, help="Tokens of a passage that kl compares.")
@click.option("--new-tokens", type=COUNT, default=128, help="Tokens of a generated text.")
@click.option("--batch", type=COUNT, default=2, help="Prompts decoded together.")
@click.option("--chunk", type=COUNT, help="Read prompts in chunks of so many tokens.")
@click.option(
    "--prompts-from-rows", is_flag=True, help="With --chunk: chunks attend to packed rows."
)
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Whether retrieval applies the chat template; by default if there is one.",
)
@click.option("--max-drop", type=POSITIVE, help="Points of accuracy that a cache may lose.")
@click.option("--seed", type=WHOLE, default=0, help="Seed of retrieval prompts and sampled texts.")
@ON_DEVICE
@JSON
@click.option("--report", type=NEW_FILE, help="Also write an HTML page with figures to this file.")
@enough_memory("--length, --batch or --dtype")
def evaluate(
    model: Path,
    caches: tuple[str, ...],
    tasks: str,
    retrieval: str | None,
    text: Path | None,
    examples: Path | None,
    pattern: str | None,
    samples: int,
    chunk: int | None,
    prompts_from_rows: bool,
    chat: bool | None,
    max_drop: float | None,
    device: str,
    dtype: str,
    json_file: Path | None,
    report: Path | None,
    **sizes: Any,
) -> None:
    """Compare what a model does with quantized caches and with its 16-bit cache.

    Each task decodes from caches of the same prompts: predictions of a held-out text (kl), freely
    running texts (generation), and questions about facts among similar ones (retrieval). Where the
    model fails a task in 16 bit, the tables say "not asked". With --json, start an interrupted run
    again and it continues where it stopped.

    With --max-drop the exit code is 3 if a cache loses more than so many points and two standard
    errors, and 4 if there are too few samples to know.

    \b
    Example:
      kvquant evaluate examples/llama-demo-5m --cache int8 --cache int4-g4,recent=64 \\
          --length 512 --samples 4 --json evaluation.json --report evaluation.html
    """
    check_output(json_file, model, text, examples, endings=(".json",))
    check_output(report, model, text, examples, endings=HTML)
    state = None if json_file is None else json_file.with_name(f".{json_file.name}.partial")
    import torch

    from ..evaluation.decoding import Reading
    from ..evaluation.evaluate import Sizes, Task
    from ..evaluation.evaluate import evaluate as run
    from ..evaluation.report import against_limit, render, render_page
    from ..hf.hybrid import load_decoder
    from ..io.atomic import save_text
    from ..report.page import check_libraries
    from ..text import paragraph, progress

    if report is not None:
        check_libraries("kvquant evaluate --report")
    options: dict[str, Any] = {"kinds": _names(tasks), "chat": chat}
    options |= {} if retrieval is None else {"retrieval": _names(retrieval)}
    options |= {} if pattern is None else {"pattern": pattern}
    reach = Sizes(prompts=samples, passages=samples, **sizes)
    task, reading = Task(**options), Reading(chunk, prompts_from_rows)
    reader = load_decoder(model, dtype=getattr(torch, dtype), device=device)
    given = [] if examples is None else _examples(examples, reader, chat)
    answered = any(one.answer is not None for one in given)
    asked = "retrieval" in task.kinds
    if not asked and not answered:
        refuse_options(["max_drop"], "needs the task retrieval, or prompts with answers")
    if not asked:
        refuse_options(["retrieval"], "needs the task retrieval: name it in --tasks")
    if not answered:
        refuse_options(["pattern"], 'needs answers to compare: give --prompts with "answer"')
    done = 0  # parts
    with progress(100, "Evaluating") as update:

        def told(what: str, parts: int) -> None:
            nonlocal done
            done += 1
            update(100 * done // parts - 100 * (done - 1) // parts, what)

        found = run(
            reader,
            caches,
            task=task,
            sizes=reach,
            text=None if text is None else read_text(text),
            examples=given,
            reading=reading,
            state=state,
            progress=told,
        )
    write_json(json_file, found)
    if report is not None:
        inputs = {"model": model, "text": text, "prompts": examples}
        names = {what: path.resolve().name for what, path in inputs.items() if path is not None}
        save_text(report, render_page(found, names, max_drop))
    if state is not None:
        state.unlink(missing_ok=True)
    click.echo(render(found))
    if max_drop is not None:
        verdict, reasons = against_limit(found, max_drop)
        for reason in reasons:
            click.echo(paragraph(reason), err=True)
        if verdict != "met":
            sys.exit(EXCEEDED if verdict == "exceeded" else UNKNOWN)


def _names(text: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in text.split(",") if one.strip())


def _examples(path: Path, reader: Any, chat: bool | None) -> list[Any]:
    """The prompts of a file of JSON lines, in the chat template where the tokenizer has one."""
    from ..evaluation.evaluate import Example
    from ..evaluation.prompts import has_chat, in_chat
    from ..io.schema import parse

    found, tokenizer = [], reader.tokenizer
    for number, line in enumerate(read_text(path).split("\n"), 1):  # strings may hold U+2028
        if not line.strip():
            continue
        one = parse(line, f"{path}, line {number},")
        prompt = one.get("prompt") if isinstance(one, Mapping) else None
        answer = one.get("answer") if isinstance(one, Mapping) else None
        if not isinstance(prompt, str) or not prompt or not isinstance(answer, str | None):
            raise ConfigError(
                f'{path}, line {number}: write {{"prompt": "...", "answer": "..."}}, or leave the '
                "answer out"
            )
        if has_chat(tokenizer, chat):
            whole = in_chat(tokenizer, prompt)
            tokens = tokenizer(whole, add_special_tokens=False)["input_ids"]
        else:
            tokens = reader.encode(prompt)
        found.append(Example(tokens, answer))
    if not found:
        raise ConfigError(f"{path} has no prompts: write one JSON object a line")
    return found
