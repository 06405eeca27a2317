"""The command kvquant calibrate."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from .console import (
    COUNT,
    FILE,
    FOLDER,
    NEW_FILE,
    check_output,
    progress,
    read_text,
    warn_of_length,
)
from .errors import ConfigError

NOT_MET = 3  # exit code


@click.command()
@click.argument("model", type=FOLDER)
@click.option("--text", type=FILE, help="Text to observe; its last quarter is held.")
@click.option("--held", type=FILE, help="Another text to score on, instead of the last quarter.")
@click.option("--max-kl", type=float, help="Fewest bits that keep this KL, nats per token.")
@click.option("--budget", type=float, help="Least KL within so many bits per element.")
@click.option("--format", help="One format for all layers instead; int4 by default.")
@click.option("--zero-data", is_flag=True, help="Observe no text, random tokens instead.")
@click.option(
    "--rounding",
    type=click.Choice(["feedback", "nearest"]),
    default="feedback",
    show_default=True,
    help="How rows are rounded where they are appended.",
)
@click.option("--observed", type=COUNT, default=32768, show_default=True, help="Tokens to observe.")
@click.option("--length", type=COUNT, default=4096, show_default=True, help="Of a passage of them.")
@click.option("--windows", type=COUNT, default=8, show_default=True, help="Passages to score.")
@click.option("--context", type=COUNT, default=1024, show_default=True, help="Tokens before them.")
@click.option("--scored", type=COUNT, default=64, show_default=True, help="Tokens of each scored.")
@click.option("--device", default="cpu", show_default=True, help="Where the model runs.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of weights and arithmetic; 16 bit for large models.",
)
@click.option("-o", "--output", type=NEW_FILE, required=True, help="File to write.")
def calibrate(
    model: Path,
    text: Path | None,
    held: Path | None,
    max_kl: float | None,
    budget: float | None,
    format: str | None,
    zero_data: bool,
    rounding: str,
    device: str,
    dtype: str,
    output: Path,
    **sizes: int,
) -> None:
    """Make the plan of a model's caches, and prove it.

    Keys, values and queries of the text are observed, and for every layer what its rows are stored
    as is chosen: offsets, rotation or matrix, rounding, clipping, format. Then held passages are
    decoded token by token from such caches, and the predictions compared with those of the 16-bit
    cache: KL divergence, share of equal likeliest tokens, perplexity. The table is printed; the
    plan is written. An interrupted run goes on where it was. Under torchrun, ranks share the text.

    The exit code is 3 if --max-kl cannot be met.

    \b
    Example:
      kvquant calibrate examples/llama-demo-5m --text examples/unseen.txt --windows 2 \\
          --max-kl 0.01 -o plan.safetensors
    """
    check_output(output, text, held)
    if text is None and not zero_data:
        raise ConfigError("give --text FILE to observe, or --zero-data")
    if text is None and (held is not None or max_kl is not None):
        raise ConfigError("--held and --max-kl need a text to score: give --text FILE")
    import torch

    from .calibration.report import refusal, render_plan, warnings
    from .calibration.run import Goal, Sizes
    from .calibration.run import calibrate as run
    from .model import CachedModel

    chosen = (max_kl, budget) == (None, None)
    goal = Goal(max_kl, budget, (format or "int4") if chosen else format)
    reach = Sizes(**sizes)
    device = _join_ranks(device)
    reader = CachedModel.from_pretrained(model, dtype=getattr(torch, dtype), device=device)
    warn_of_length(reader.max_positions, "a passage", reach.context + reach.scored)
    tokens = reader.encode(read_text(text)) if text else None
    scored = reader.encode(read_text(held)) if held else None
    state = output.with_name(f".{output.name}.{os.environ.get('RANK', '0')}.partial")
    with progress(300, "Calibrating") as update:
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
        )
    if plan is not None:
        plan.save(output)
        click.echo(render_plan(plan))
        click.echo(f"\n{_measured(plan.facts)}; written to {output}")
        for warning in warnings(plan):
            click.echo(f"Warning: {warning}", err=True)
    state.unlink(missing_ok=True)
    _leave_ranks()
    problem = refusal(plan) if plan is not None else None
    if problem:
        click.echo(f"Not met: {problem}", err=True)
        sys.exit(NOT_MET)


def _measured(facts: object) -> str:
    """How much text stands behind the figures."""
    assert isinstance(facts, dict)
    measured = facts["measured"]
    observed = "random tokens" if facts["zero_data"] else "tokens"
    words = f"{facts['observed_tokens']} {observed} observed"
    if measured:
        words += f", {measured['scored']} scored after {measured['context']} tokens of context"
    return words


def _leave_ranks() -> None:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _join_ranks(device: str) -> str:
    """Join the other processes that torchrun started; the device of this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return device
    import torch

    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device
