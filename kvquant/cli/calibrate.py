"""The command kvquant calibrate."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from .console import (
    COUNT,
    FILE,
    FORMATS,
    JSON,
    LATENT,
    MODEL,
    NEW_FILE,
    ON_DEVICE,
    POSITIVE,
    WINDOW,
    check_output,
    enough_memory,
    given_options,
    read_text,
    refuse_options,
    warn_of_length,
    write_json,
)

NOT_MET = 3  # exit code
# these need a text to score
SCORING = "held", "max_kl", "windows", "context", "scored", "sink_len", "recent_len"
# with one of these a plan is another than plan="auto" makes
PLAN_OPTIONS = "text", *SCORING, "budget", "format", "zero_data", "rounding", "observed", "length"


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
    help="How append rounds rows; latent rows always to the nearest code.",
)
@click.option("--observed", type=COUNT, default=8192, help="Tokens to observe.")
@click.option("--length", type=COUNT, default=1024, help="Tokens of a passage to observe.")
@click.option("--windows", type=COUNT, default=8, help="Passages to score.")
@click.option(
    "--context", type=COUNT, default=1024, help="Tokens of a passage before the scored ones."
)
@click.option("--scored", type=COUNT, default=64, help="Tokens of a passage to score.")
@WINDOW
@ON_DEVICE
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

    The command observes keys, values and queries of the text and chooses how each layer stores its
    rows. Then it predicts held-out passages from such caches and from the 16-bit cache, and
    compares the predictions.

    Without options that change the plan it keeps the plan in your cache folder, where plan="auto"
    finds it. The exit code is 3 if --max-kl cannot be met.

    \b
    Example:
      kvquant calibrate examples/llama-demo-5m
      kvquant calibrate examples/llama-demo-5m --text examples/unseen.txt \\
          --context 256 --max-kl 0.01 -o plan.safetensors
    """
    if (os.environ.get("WORLD_SIZE") or "1") != "1":
        raise click.UsageError("calibrate runs in one process: start it without torchrun")
    own = given_options(*PLAN_OPTIONS)
    if output is None and own:
        raise click.UsageError(f"give -o FILE: with {own[0]} the plan is not kept for plan='auto'")
    if text is None and zero_data:
        why = "needs a text to score: give --text FILE, or leave --zero-data out"
        refuse_options(SCORING, why)
    check_output(output, model, text, held)
    check_output(json_file, model, text, held, endings=(".json",))
    import torch

    from ..calibration.calibrate import Goal, Sizes
    from ..calibration.calibrate import calibrate as run
    from ..hf.model import CachedModel
    from ..io.atomic import named
    from ..io.plan_store import keep_plan, make_folder
    from ..text import progress

    if output is None:
        try:
            make_folder()
        except OSError as error:
            raise click.UsageError(f"give -o FILE: no plan can be kept ({error})") from error
    goal = Goal(max_kl, budget, format) if (max_kl, budget, format) != (None,) * 3 else None
    reach = Sizes(**sizes) if own else None
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
            progress=lambda stage, share: update(share, stage),
            window=(sink_len, recent_len),
        )
    places = []
    if output:
        plan.save(output)
        places.append(output)
    if not own:
        try:
            places.append(keep_plan(plan))
        except OSError as error:
            if not output:
                raise
            words = f"the plan is saved in {output}, and not kept for plan='auto'"
            raise named(error, error.filename or "the folder of plans", words) from error
    _show(plan, places, not own, json_file)


def _show(plan: Any, places: list[Path], is_auto: bool, json_file: Path | None) -> None:
    """Print what was found, and end with NOT_MET if the limit is not met."""
    from ..calibration.report import notes, sections
    from ..calibration.verdict import next_steps, verdict
    from ..report.page import Section, text

    said, steps = verdict(plan), next_steps(plan, str(places[0]), is_auto=is_auto)
    written = f"Written to {' and '.join(map(str, places))}"
    try:
        click.echo(text([*sections(plan), said, written, Section("What to do next", steps=steps)]))
    finally:
        figures = {"verdict": vars(said), "next": [line for _, line in steps], **plan.facts}
        write_json(json_file, figures)
    for note in notes(plan):
        click.echo(f"Warning: {note}", err=True)
    limit, used = plan.facts["limit"], plan.facts["windowed"] or plan.facts["measured"]
    if not limit["met"]:
        click.echo(
            f"Not met: the limit of {limit['max_kl']:g} nats per token. The best plan has a KL of "
            f"{used['kl']:.4g} at {plan.bits:.2f} bits per element. Allow more, "
            "or keep more tokens in 16 bit (--sink-len, --recent-len, within --context)",
            err=True,
        )
        sys.exit(NOT_MET)
