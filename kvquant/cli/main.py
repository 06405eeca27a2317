"""The command kvquant. Each command imports what it needs when it runs, so that --help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError
from ..version import __version__
from .bench import bench
from .calibrate import calibrate
from .check import check
from .console import (
    COUNT,
    FILE,
    FORMAT,
    FORMATS,
    JSON,
    LATENT,
    MODEL_OR_NONE,
    OUTPUT,
    PLAN,
    WINDOW,
    Commands,
    check_output,
    enough_memory,
    given_options,
    json_text,
    read_text,
    refuse_options,
    warn_of_length,
    write_json,
)
from .evaluate import evaluate
from .report import report
from .warmup import warmup


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, prog_name="kvquant")
def main() -> None:
    """Make, inspect, export and measure quantized KV caches.

    \b
    Example:
      kvquant quantize examples/llama-demo-5m --prompt examples/unseen.txt \\
          --tokens 2000 -o cache.safetensors
      kvquant inspect cache.safetensors
    """


@main.command(epilog=FORMATS)
@MODEL_OR_NONE
@click.option("--prompt", type=FILE, help="Text that the model reads.")
@click.option("--tokens", type=COUNT, help="Read so many of its tokens; all by default.")
@click.option("--from", "raw", type=FILE, help="16-bit K and V of another program instead.")
@click.option("--plan", type=PLAN, help="Of kvquant calibrate, or auto: formats and transforms.")
@click.option(
    "--format",
    "both",
    type=LATENT,
    help="Of K and V; a safe pair by default. Or FORMAT+FORMAT, of latents and RoPE parts.",
)
@click.option("--k-format", type=FORMAT, help="Of K, where it differs.")
@click.option("--v-format", type=FORMAT, help="Of V, where it differs.")
@WINDOW
@click.option("--max-seq-len", type=COUNT, help="Room for tokens; those of the prompt by default.")
@click.option("--chunk", type=COUNT, default=512, help="Tokens read at a time.")
@click.option("--accept-loss", is_flag=True, help="Go on where K rows of few bits ruin MODEL.")
@OUTPUT
@enough_memory("--chunk or --max-seq-len")
def quantize(
    model: Path | None,
    prompt: Path | None,
    tokens: int | None,
    raw: Path | None,
    plan: Path | str | None,
    both: str | None,
    k_format: str | None,
    v_format: str | None,
    sink_len: int,
    recent_len: int,
    max_seq_len: int | None,
    chunk: int,
    accept_loss: bool,
    output: Path,
) -> None:
    """Make a quantized cache of a text or of raw tensors.

    MODEL (a folder, a GGUF file, or a name on the Hugging Face hub) reads the text of --prompt.
    With --from, keys and values come from a safetensors file of tensors layers.0.k, layers.0.v,
    layers.1.k and so on, [batch, num_kv_heads, tokens, head_dim]. A model with latent attention
    (DeepSeek V2, V3) has latent rows in --format, int8-g4 by default: int4-g8 has RoPE parts of 16
    bit, int4-g8+int8-g4 has them in int8-g4.

    \b
    Example:
      kvquant quantize examples/llama-demo-5m --prompt examples/unseen.txt \\
          --tokens 2000 --format int4-g4 --max-seq-len 4096 -o cache.safetensors
      kvquant quantize --from kv.safetensors --k-format int8 --v-format int4 \\
          -o cache.safetensors
    """
    if (raw is None) == (model is None) or (model is None) != (prompt is None):
        raise click.UsageError("give either MODEL and --prompt FILE, or --from FILE alone")
    if plan is not None and (raw or both or k_format or v_format or accept_loss):
        raise click.UsageError(
            "--plan says the formats and needs MODEL: leave --from, formats and --accept-loss out"
        )
    if both and k_format and v_format:
        raise click.UsageError("--k-format and --v-format leave nothing to --format: leave one out")
    if raw:
        reading = "chunk", "tokens", "accept_loss"
        refuse_options(reading, "is for MODEL, which reads: leave it out with --from")
        _check_of_heads(both, raw)
    check_output(output, model, prompt, raw, plan if isinstance(plan, Path) else None)
    options: dict[str, Any] = {"k_format": k_format or both, "v_format": v_format or both}
    options = {name: value for name, value in {**options, "plan": plan}.items() if value}
    options |= {"sink_len": sink_len, "recent_len": recent_len}
    creation: dict[str, Any] = {"program": f"kvquant {__version__}"}
    config = None
    if raw is not None:
        from ..io.export import quantize_raw

        cache = quantize_raw(raw, max_seq_len=max_seq_len, **options)
        creation["source"] = raw.name
    elif model is not None and prompt is not None:
        import torch

        from ..hf.model import CachedModel
        from ..text import progress

        reader = CachedModel.from_pretrained(model)
        if reader.has_latents:
            options = _of_latents(options, both)
        else:
            _check_of_heads(both, model)
            options["accept_loss"] = accept_loss
        ids = reader.encode(read_text(prompt))[:tokens]
        if not ids:
            raise ConfigError(f"{prompt} holds no text: the cache would be empty")
        if max_seq_len is not None and len(ids) > max_seq_len:
            raise ConfigError(
                f"{prompt} has {len(ids)} tokens, --max-seq-len is {max_seq_len}: use {len(ids)} "
                "or more"
            )
        warn_of_length(reader.max_positions, str(prompt), len(ids))
        cache = reader.new_cache(1, max_seq_len or len(ids), **options)
        with progress(len(ids), "Reading") as update:
            reader.prefill(cache, torch.tensor([ids]), chunk=chunk, progress=update)
        creation |= {"source": prompt.name, "chunk": chunk}
        config = reader.config_dict
    from ..io.checkpoint import save_cache
    from ..io.inspect import describe, render

    save_cache(cache, output, model=config, creation=creation)
    click.echo(render(describe(output)))


@main.command()
@click.argument("cache", type=FILE)
@click.option(
    "--to",
    type=click.Choice(["bf16", "fp16", "fbgemm", "xformers", "flashmla"]),
    required=True,
    help="16-bit tensors, or the byte layout of another project; flashmla of latent rows.",
)
@click.option("--plan", type=FILE, help="The plan that the cache was made with, if there was one.")
@OUTPUT
@enough_memory("cache")
def export(cache: Path, to: str, plan: Path | None, output: Path) -> None:
    """Write a cache in a form that other programs read.

    \b
    Example:
      kvquant export cache.safetensors --to bf16 -o kv.safetensors
    """
    from ..io.checkpoint import load_cache
    from ..io.export import export_cache
    from ..text import paragraph, size_text

    check_output(output, plan, cache)
    notes = export_cache(load_cache(cache, plan=plan), output, to)
    click.echo(f"{output}: {to}, {size_text(output.stat().st_size)}")
    for note in notes:
        click.echo(paragraph(note))


@main.command()
@click.argument("file", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@enough_memory("cache")
def inspect(file: Path, as_json: bool) -> None:
    """Show what a file of a cache or of sequences holds, and what looks wrong.

    \b
    Example:
      kvquant inspect cache.safetensors
      kvquant inspect cache.safetensors --json
    """
    from ..io.inspect import describe, render

    description = describe(file)
    click.echo(json_text(description) if as_json else render(description))


@main.command()
@MODEL_OR_NONE
@click.option("--text", type=FILE, help="What it reads; a packaged text by default.")
@click.option("--context", type=COUNT, help="Tokens of a prompt; 1024, or 3072 without MODEL.")
@JSON
@enough_memory("--context")
def demo(
    model: Path | None, text: Path | None, context: int | None, json_file: Path | None
) -> None:
    """Let a model decode from caches of several formats.

    MODEL is a folder, a GGUF file, or a name on the Hugging Face hub; without it, a small model of
    the checkout. 135 million parameters take up to three minutes on two cores.

    \b
    Example:
      kvquant demo
      kvquant demo HuggingFaceTB/SmolLM2-135M-Instruct
      kvquant demo MODEL --text FILE --json demo.json
    """
    check_output(json_file, model, text, endings=(".json",))
    from ..text import progress
    from .demo import STAGES, render_demo, run_demo

    with progress(STAGES, "Demo") as update:
        result = run_demo(model, text, context=context, report=lambda stage: update(1, stage))
    try:
        click.echo(render_demo(result))
    finally:
        write_json(json_file, result)


for command in (bench, calibrate, check, evaluate, report, warmup):
    main.add_command(command)


def _of_latents(options: dict[str, Any], fmt: str | None) -> dict[str, Any]:
    """The options of a cache of latent rows."""
    if given_options("k_format", "v_format", "accept_loss"):
        raise click.UsageError(
            "this model keeps latent rows, not K and V: give --format or --plan, and none of "
            "--k-format, --v-format and --accept-loss"
        )
    kept = {name: options[name] for name in ("sink_len", "recent_len", "plan") if name in options}
    return kept | ({"fmt": fmt} if fmt else {})


def _check_of_heads(fmt: str | None, source: Path) -> None:
    """Refuse the format of a latent row for keys and values."""
    if fmt and "+" in fmt:
        raise click.UsageError(
            f"--format {fmt} is of latent rows, and {source} has K and V: give one FORMAT, or "
            "--k-format and --v-format"
        )
