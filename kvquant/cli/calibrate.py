"""The command kvquant calibrate."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ..errors import ConfigError, DeviceError, KVQuantError
from .console import (
    COUNT,
    DTYPE,
    FILE,
    FORMATS,
    JSON,
    LATENT,
    MODEL,
    NEW_FILE,
    ON_DEVICE,
    POSITIVE,
    WHOLE,
    check_device,
    check_output,
    enough_memory,
    is_given,
    read_text,
    warn_of_length,
    write_json,
)

NOT_MET = 3  # exit code
# with one of these a plan is another than plan="auto" makes
PLAN_OPTIONS = (
    *("text", "held", "max_kl", "budget", "format", "zero_data", "rounding"),
    *("observed", "length", "windows", "context", "scored", "sink_len", "recent_len"),
)


@click.command(epilog=FORMATS)
@MODEL
@click.option(
    "--text",
    type=FILE,
    help="Text to observe; its last quarter is kept apart and scored. Packaged texts by default.",
)
@click.option("--held", type=FILE, help="Another text to score, in place of that quarter.")
@click.option(
    "--max-kl",
    type=POSITIVE,
    help="Choose formats: fewest bits with at most this KL, in nats per token.",
)
@click.option(
    "--budget",
    type=POSITIVE,
    help="Choose formats: least KL with at most so many bits per element.",
)
@click.option(
    "--format",
    type=LATENT,
    help="One format for all layers; int4 by default. For latent rows FORMAT+FORMAT, or FORMAT "
    "with RoPE parts in bf16; int4-g8 by default.",
)
@click.option("--zero-data", is_flag=True, help="Observe random tokens, without a text.")
@click.option(
    "--rounding",
    type=click.Choice(["feedback", "nearest"]),
    default="feedback",
    show_default=True,
    help="How append rounds rows; latent rows always to the nearest code.",
)
@click.option("--observed", type=COUNT, default=8192, show_default=True, help="Tokens to observe.")
@click.option(
    "--length", type=COUNT, default=1024, show_default=True, help="Tokens of a passage to observe."
)
@click.option("--windows", type=COUNT, default=8, show_default=True, help="Passages to score.")
@click.option(
    "--context",
    type=COUNT,
    default=1024,
    show_default=True,
    help="Tokens of a passage before the scored ones.",
)
@click.option(
    "--scored", type=COUNT, default=64, show_default=True, help="Tokens of a passage to score."
)
@click.option(
    "--sink-len",
    type=WHOLE,
    default=4,
    show_default=True,
    help="First tokens that the cache will keep in 16 bit: the plan is measured with them too.",
)
@click.option(
    "--recent-len",
    type=WHOLE,
    default=128,
    show_default=True,
    help="Last tokens that the cache will keep in 16 bit.",
)
@ON_DEVICE
@DTYPE
@click.option(
    "-o",
    "--output",
    type=NEW_FILE,
    help="Write the plan to this file; needed with the options above it, but --device and --dtype.",
)
@JSON
@enough_memory("--length, --windows, --context or --dtype")
def calibrate(
    model: Path,
    text: Path | None,
    held: Path | None,
    max_kl: float | None,
    budget: float | None,
    format: str | None,
    zero_data: bool,
    rounding: str,
    sink_len: int,
    recent_len: int,
    device: str,
    dtype: str,
    output: Path | None,
    json_file: Path | None,
    **sizes: int,
) -> None:
    """Make a plan for the caches of a model, and measure what it costs.

    The command observes keys, values and queries of the text. For every layer it chooses how rows
    are stored: offset, rotation or matrix, rounding, clipping, format. Then it predicts held-out
    passages from the rows of such caches. It compares the predictions with those of the 16-bit
    cache: KL divergence, share of equal likeliest tokens, perplexity. It prints the table and
    writes the plan.

    Without --text the command reads packaged texts (encyclopedia, code, dialogue). Without options
    that change the plan it keeps the plan in your cache folder, where plan="auto" finds it.

    With -o, start an interrupted run again and it continues where it stopped. Under torchrun the
    ranks share the text. The exit code is 3 if --max-kl cannot be met.

    \b
    Example:
      kvquant calibrate examples/llama-demo-5m
      kvquant calibrate examples/llama-demo-5m --text examples/unseen.txt \\
          --context 256 --max-kl 0.01 -o plan.safetensors
    """
    own = [name for name in PLAN_OPTIONS if is_given(name)]
    is_auto = not own
    if output is None and own:
        raise click.UsageError(
            f"give -o FILE: with --{own[0].replace('_', '-')} the plan is not kept for plan='auto'"
        )
    if text is None and zero_data:
        unscored = "held", "max_kl", "windows", "context", "scored", "sink_len", "recent_len"
        for name in unscored:
            if is_given(name):
                raise click.UsageError(
                    f"--{name.replace('_', '-')} needs a text to score: give --text FILE, or leave "
                    "--zero-data out"
                )
    if format and (max_kl or budget):
        raise click.UsageError("--max-kl and --budget choose formats: leave --format out")
    rank, ranks = _ranks()
    state = output and output.with_name(f".{output.name}.{rank}.partial")
    if output and state:
        check_output(output, model, text, held)
        check_output(state, model, text, held, endings=(state.suffix,))
    check_output(json_file, model, text, held, endings=(".json",))
    import torch

    from ..calibration.calibrate import Goal, Sizes
    from ..calibration.calibrate import calibrate as run
    from ..calibration.text_report import refusal, render_plan, warnings
    from ..calibration.verdict import next_steps, verdict
    from ..hf.model import CachedModel
    from ..io.plan_store import keep_plan, make_folder
    from ..text import paragraph, progress

    if output is None:
        try:
            make_folder()
        except OSError as error:
            raise click.UsageError(f"give -o FILE: no plan can be kept ({error})") from error
    check_device(device)
    is_given_any = (max_kl, budget, format) != (None, None, None)
    goal = Goal(max_kl, budget, format) if is_given_any else None
    reach = None if is_auto else Sizes(**sizes)
    with _joined(rank, ranks, device) as device, _kept(state):
        reader = CachedModel.from_pretrained(model, dtype=getattr(torch, dtype), device=device)
        if reach is not None:
            warn_of_length(reader.max_positions, "a passage", reach.context + reach.scored)
        tokens = reader.encode(read_text(text)) if text else None
        scored = reader.encode(read_text(held)) if held else None
        with progress(400, "Calibrating") as update:
            plan = run(
                reader,
                tokens,
                scored,
                sizes=reach,
                goal=goal,
                rounding=rounding,
                zero_data=zero_data,
                state=state,
                progress=lambda stage, share: update(share, stage),
                window=(sink_len, recent_len),
            )
        places = []
        if plan is not None and output:
            plan.save(output)
            places.append(output)
        if plan is not None and is_auto:
            places.append(keep_plan(plan))
        if state:
            state.unlink(missing_ok=True)
    if plan is None:
        return
    kind, mark, sentence, further = verdict(plan)
    steps = next_steps(plan, str(places[0]), is_auto=is_auto)
    try:
        click.echo(f"{render_plan(plan)}\n")
        written = " and ".join(map(str, places))
        words = [f"{_measured(plan.facts)}; written to {written}", f"{mark} {sentence}", *further]
        for sentences in words:
            click.echo(paragraph(sentences))
        for what, line in steps:
            if len(line) > 76:  # a terminal has 80 columns
                line = line.replace(" -o ", " \\\n        -o ")
            click.echo(f"\n{what}:\n    {line}")
    finally:
        said = {"kind": kind, "mark": mark, "sentence": sentence, "further": further}
        write_json(json_file, {"verdict": said, "next": [line for _, line in steps], **plan.facts})
    for warning in warnings(plan):
        click.echo(f"Warning: {warning}", err=True)
    problem = refusal(plan)
    if problem:
        click.echo(f"Not met: {problem}", err=True)
        sys.exit(NOT_MET)


def _measured(facts: object) -> str:
    """How much text stands behind the figures."""
    from ..text import count_text

    assert isinstance(facts, dict)
    measured = facts["measured"]
    observed = "random tokens" if facts["zero_data"] else "tokens"
    words = f"{facts['observed_tokens']} {observed} observed"
    if measured:
        words += (
            f", {measured['scored']} scored after {measured['context']} tokens of context in "
            f"{count_text(measured['passages'], 'passage')}"
        )
    return words


@contextmanager
def _kept(state: Path | None) -> Iterator[None]:
    """Say where the sums are that a run leaves which does not come to its end."""
    if state is None:
        yield
        return
    before = _stamp(state)
    try:
        yield
    except BaseException as error:
        # who is refused will be again, and what lies there may be of another run
        is_refused = isinstance(error, KVQuantError)
        if (now := _stamp(state)) and (now != before or not is_refused):
            which = "one with the same text and sizes" if is_refused else "the same command"
            click.echo(f"What was observed is kept in {state}: {which} goes on from it", err=True)
        raise


def _stamp(path: Path) -> tuple[int, int] | None:
    """What changes where a file is written anew; None if there is none."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns


def _ranks() -> tuple[int, int]:
    """Which of how many processes this is, as torchrun says in the environment."""
    ranks = _from_environment("WORLD_SIZE", 1) if "WORLD_SIZE" in os.environ else 1
    return (_from_environment("RANK", 0, ranks) if ranks > 1 else 0), ranks


def _from_environment(name: str, least: int, limit: int = 1 << 20) -> int:
    """A number below a limit that torchrun sets."""
    text = os.environ.get(name, "")
    if text.isascii() and text.isdecimal() and len(text) < 8 and least <= int(text) < limit:
        return int(text)
    raise ConfigError(
        f"{name} is {text!r:.40} in the environment, not a number from {least} to {limit - 1}: "
        "unset WORLD_SIZE, or start all processes by torchrun"
    )


@contextmanager
def _joined(rank: int, ranks: int, device: str) -> Iterator[str]:
    """Join the other processes that torchrun started; gives the device of this one."""
    if ranks < 2:
        yield device
        return
    import torch

    if device == "cuda":
        device = f"cuda:{_from_environment('LOCAL_RANK', 0)}"
        check_device(device)
    try:
        torch.distributed.init_process_group(
            "nccl" if device.startswith("cuda") else "gloo", rank=rank, world_size=ranks
        )
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DeviceError(f"the {ranks} processes cannot find one another: {reason}") from error
    try:
        yield device
    finally:
        torch.distributed.destroy_process_group()
