"""The command `kvquant bench`: the kernels' speed on this machine's GPU, or its CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigError, DeviceError
from ..version import __version__
from .console import (
    COUNT,
    EITHER,
    FORMATS,
    HEAD_DIM,
    JSON,
    MODEL_OR_NONE,
    POSITIVE,
    check_output,
    compile_kernels,
    enough_memory,
    refuse_options,
    write_json,
)

if TYPE_CHECKING:
    from ..bench.cases import Case
    from ..bench.timer import Machine, Timer

OTHERS = "int4-g4", "int4", "int3", "int2", "int8", "fp8", "bf16"  # beside the default pair
LATENTS = "int8-g4", "int4-g8+int8-g4", "int4-g4", "bf16"


@click.command(epilog=FORMATS)
@MODEL_OR_NONE
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="A GPU by default, if any.")
@click.option(
    "--format",
    "formats",
    type=EITHER,
    multiple=True,
    help="Or FORMAT/FORMAT, of K and V, or FORMAT+FORMAT, of latents and RoPE parts.",
)
@click.option(
    "--batch", "batches", type=COUNT, multiple=True, help="Sequences; 1, on a GPU 1, 8 and 64."
)
@click.option("--seq-len", "seq_lens", type=COUNT, multiple=True, help="Tokens; 8192.")
@click.option("--q-heads", type=COUNT, help="Query heads; 32 without MODEL.")
@click.option("--kv-heads", type=COUNT, help="KV heads; 8 without MODEL.")
@click.option("--head-dim", type=HEAD_DIM, help="Elements of a row; 128 without MODEL.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]), help="Of q; bfloat16.")
@click.option("--seconds", type=POSITIVE, help="Time for a case, 3; on a GPU for a call, 0.05.")
@JSON
@enough_memory("--seq-len or --batch")
def bench(
    model: Path | None,
    device: str | None,
    formats: tuple[str, ...],
    batches: tuple[int, ...],
    seq_lens: tuple[int, ...],
    dtype: str | None,
    seconds: float | None,
    json_file: Path | None,
    **shape: Any,
) -> None:
    """Time attention of one decode step beside torch's own on a 16-bit cache.

    MODEL is a folder, a GGUF file or a name on the hub. Its config gives heads and head_dim; no
    weights are read. All combinations of formats, batches and tokens are measured. Each result is
    compared with the reference in float64 before anything is timed.

    "us" is one call, on a GPU with a cold L2 cache, launch included. "in a row" is one of many
    calls on a GPU, on inputs that outgrow the L2 cache. GB/s count kvquant's rows. "peak" is their
    share of the peak bandwidth, which torch's sum of float32 reads. The ratio is torch's time
    divided by kvquant's.

    \b
    Example:
      kvquant bench
      kvquant bench MODEL --batch 1 --batch 32 --seq-len 32768
      kvquant bench --device cpu --format int8 --format int8-g4/int4-g4
    """
    check_output(json_file, endings=(".json",))
    import torch

    from ..bench.cases import list_cases
    from ..bench.measure import render_machine, render_results
    from ..bench.timer import GraphTimer, Timer, describe_machine

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("--device cuda: torch finds no GPU here; use --device cpu")
    shape = _shape(model, shape)
    cases = list_cases(
        formats or _formats(int(shape["head_dim"])),
        batches=batches or ((1,) if device == "cpu" else (1, 8, 64)),
        seq_lens=seq_lens,
        num_q_heads=shape["q_heads"],
        num_kv_heads=shape["kv_heads"],
        head_dim=int(shape["head_dim"]),
        dtype=getattr(torch, dtype or "bfloat16"),
    )
    timer = Timer(seconds or 3.0) if device == "cpu" else GraphTimer(seconds or 0.05)
    machine = describe_machine(timer, __version__)
    click.echo(render_machine(machine) + "\n")
    results: list[dict[str, Any]] = []
    try:
        _measure(cases, timer, machine, results)
    finally:  # what was measured is printed after an interrupt too, and kept in any case
        try:
            if results:
                click.echo(render_results(results))
        finally:
            if results:
                write_json(json_file, {"machine": asdict(machine), "decode": results})


def _shape(model: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """Heads and head_dim, those of the first layer that a model's cache has."""
    if model is None:
        return given | {"head_dim": given["head_dim"] or 128}
    refuse_options([*given], "is the model's: leave it out")
    from ..hf.models.configs import cache_layers
    from ..hf.models.loading import load_config

    config = load_config(model)
    layers = cache_layers(config)
    return {
        "q_heads": config.get_text_config(decoder=True).num_attention_heads,
        "kv_heads": layers.num_kv_heads,
        "head_dim": layers.k_dims[0] + (layers.v_dims[0] if layers.are_latent else 0),
    }


def _formats(head_dim: int) -> Sequence[str]:
    """The default pair of caches, then the others that this head_dim has."""
    from ..rows.defaults import RECENT, SINKS, default_format
    from ..rows.format import HEAD_DIMS

    if head_dim not in HEAD_DIMS:
        return LATENTS
    k, v = (default_format(side, head_dim, SINKS, RECENT) for side in "kv")
    if k == v:  # CUDA kernels read few formats at this head_dim
        return k, "bf16"
    return f"{k}/{v}", *(OTHERS if head_dim in (64, 128, 256) else ("int8", "bf16"))


def _measure(
    cases: Sequence[Case], timer: Timer, machine: Machine, results: list[dict[str, Any]]
) -> None:
    """Measure cases, all kernels compiled first; name the cases that are too large for the GPU."""
    from torch import OutOfMemoryError

    from ..bench.cases import rehearse_case
    from ..bench.measure import measure
    from ..text import progress

    if timer.device.type == "cuda":
        from ..kernels.cuda.runtime.launch import gpu_of
        from ..kernels.cuda.runtime.warmup import kernels_of

        gpu = gpu_of(timer.device.index)
        compile_kernels(kernels_of([partial(rehearse_case, case) for case in cases], gpu), gpu.arch)
    with progress(len(cases), "Timing") as update:
        for case in cases:
            try:
                results.append(measure(case, timer, machine))
            except OutOfMemoryError:
                size = f"{case.nbytes / 1e9:.1f} GB of rows are more than fits"
                click.echo(f"{case.title}: {size}", err=True)
            update(1, case.title)
    if not results:
        raise ConfigError("none of the cases fits the GPU: use a smaller --seq-len or --batch")
