"""The command kvquant check."""

from __future__ import annotations

from pathlib import Path

import click

from .console import (
    COUNT,
    FILE,
    FORMAT,
    FORMATS,
    JSON,
    MODEL,
    ON_DEVICE,
    check_output,
    enough_memory,
    read_text,
    refuse_options,
    write_json,
)


@click.command(epilog=FORMATS)
@MODEL
@click.option("--memory", help="Memory for caches, as 24GiB: how many sequences it holds.")
@click.option("--size-only", is_flag=True, help="Bytes alone, from the model's config.")
@click.option(
    "--plan",
    help="A plan's file to compare, or auto: a kept plan, or a new one. A kept plan by default.",
)
@click.option("--text", type=FILE, help="Text to compare predictions on; a packaged one if absent.")
@click.option("--samples", type=COUNT, default=8, help="Passages of the text, from 4 on.")
@click.option("--k-format", type=FORMAT, help="Only probe such K rows, for engines to know.")
@ON_DEVICE
@JSON
@enough_memory("--samples or --dtype")
def check(
    model: Path,
    memory: str | None,
    size_only: bool,
    plan: str | None,
    text: Path | None,
    samples: int,
    k_format: str | None,
    device: str,
    dtype: str,
    json_file: Path | None,
) -> None:
    """Say which caches are safe for a model, and how many bytes they take.

    The command compares predictions from quantized caches with those from the 16-bit cache, with
    the 16-bit window and without it, and prints the lines to paste.

    \b
    Example:
      kvquant check examples/llama-demo-5m --memory 24GiB
    """
    check_output(json_file, model, text, endings=(".json",))
    import torch

    from ..evaluation.check import check as run
    from ..evaluation.check import check_size, parse_memory, render
    from ..hf.hybrid import HybridModel, load_decoder
    from ..hf.models.loading import load, load_config
    from ..hf.plans import plan_of_model
    from ..io.model_id import model_identity
    from ..io.plan import AUTO, as_plan
    from ..io.plan_store import stored_plan
    from ..rows.arguments import check_device
    from ..text import progress

    if k_format is not None:
        others = "memory", "size_only", "plan", "text", "samples", "json_file"
        refuse_options(others, "does not go with --k-format")
        found, _, _ = load(model, getattr(torch, dtype), has_tokenizer=False)
        HybridModel(found.to(check_device(device))).new_cache(1, 1, k_format=k_format)
        click.echo(f"K rows of {k_format} without a plan are not refused")
        return
    room = None if memory is None else parse_memory(memory)
    if size_only:
        of_file = None if plan is None or plan == AUTO else as_plan(plan)
        found = check_size(load_config(model), plan=of_file, plan_name=str(plan), memory=room)
    else:
        words = None if text is None else read_text(text)
        reader = load_decoder(model, dtype=getattr(torch, dtype), device=device)
        found_plan = plan_of_model(plan, reader)
        if plan is None:
            plan, identity = AUTO, model_identity(reader.config_dict)
            found_plan = stored_plan(identity) if "weights" in identity else None
        with progress(100, "Checking") as update:
            found = run(
                reader,
                plan=found_plan,
                plan_name=str(plan),
                memory=room,
                text=words,
                samples=samples,
                progress=lambda name, share: update(share, name),
            )
    write_json(json_file, found)
    click.echo(render(found))
