"""The command `kvquant bench`: the kernels' speed on this machine's GPU, or its CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigError
from ..version import __version__
from .console import (
    COUNT,
    FORMATS,
    HEAD_DIM,
    JSON,
    NEW_FILE,
    PAIR,
    POSITIVE,
    WHOLE,
    check_device,
    check_output,
    compile_kernels,
    enough_memory,
    write_json,
)

if TYPE_CHECKING:
    from ..bench.cases import Case
    from ..bench.gpu import Result
    from ..bench.timer import Machine, Timer

Rows = list[list[str]]  # of a table, in the order in which they are measured
GPU_ONLY = {
    "dtype": "--dtype",
    "page_sizes": "--page-size",
    "exact": "--exact",
    "quick": "--quick",
    "ragged": "--ragged",
    "wide": "--wide",
    "short": "--short",
    "queries": "--queries",
    "variants": "--variants",
    "mla": "--mla",
    "plot_file": "--plot",
}
# what is measured instead
MODES = "ragged", "wide", "short", "queries", "variants", "mla"


@click.command(epilog=FORMATS)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="A GPU by default, if any.")
@click.option("--format", "formats", type=PAIR, multiple=True, help="Or FORMAT/FORMAT, of K and V.")
@click.option(
    "--batch", "batches", type=COUNT, multiple=True, help="Sequences; 1 on a CPU, 64 on a GPU."
)
@click.option("--q-heads", type=COUNT, help="Query heads; 32.")
@click.option("--kv-heads", type=COUNT, help="KV heads; 8.")
@click.option("--seq-len", "seq_lens", type=COUNT, multiple=True, help="Tokens; 8192.")
@click.option("--head-dim", type=HEAD_DIM, help="Of a row; 128.")
@click.option("--seconds", type=POSITIVE, help="CPU: time for each case, 3 by default.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]), help="Of q and the output.")
@click.option("--page-size", "page_sizes", type=WHOLE, multiple=True, help="Tokens; 0: no pages.")
@click.option(
    "--exact",
    type=(WHOLE, WHOLE),
    metavar="FIRST LAST",
    multiple=True,
    help="Tokens of T in 16 bit: 4 128.",
)
@click.option("--quick", is_flag=True, help="Few cases, timed briefly.")
@click.option("--ragged", is_flag=True, help="Measure batches of unequal lengths instead.")
@click.option("--wide", is_flag=True, help="Measure many query heads on a KV head instead.")
@click.option("--short", is_flag=True, help="Measure short contexts instead, from Python too.")
@click.option("--queries", is_flag=True, help="Measure several queries a sequence instead.")
@click.option(
    "--variants", is_flag=True, help="Measure soft caps, sinks, biases and masks instead."
)
@click.option(
    "--mla", is_flag=True, help="Measure latent rows (MLA) instead, of drafted tokens too."
)
@JSON
@click.option(
    "--plot", "plot_file", type=NEW_FILE, help="Draw the share of peak bandwidth, as PNG."
)
@enough_memory("--seq-len or --batch")
def bench(
    device: str | None,
    formats: tuple[str, ...],
    batches: tuple[int, ...],
    q_heads: int | None,
    kv_heads: int | None,
    seq_lens: tuple[int, ...],
    head_dim: int | None,
    seconds: float | None,
    json_file: Path | None,
    **gpu: Any,
) -> None:
    """Time the kernels beside torch's own, each case checked first.

    On a GPU without batch, heads or tokens a default set is measured, in about a minute. Formats,
    batches, tokens, page sizes and exact tokens may be given several times: all combinations are
    measured. --ragged, --wide, --short, --queries, --variants and --mla have shapes of their own,
    --mla formats too. The options from --dtype to --mla and --plot are for GPUs only.

    "us" is one call with a cold L2 cache, launch included; "in a row" one of many calls on rotated
    inputs, "eager" one of many from Python, without a graph. GB/s count the rows; "peak" is their
    share of the peak bandwidth, as torch's sum reads it. "evenly" is a batch with as many tokens in
    all, the same of each sequence.

    \b
    Example:
      kvquant bench
      kvquant bench --format int4-g4 --batch 64 --page-size 0 --page-size 64 \\
          --plot bandwidth.png
      kvquant bench --device cpu --format int8 --seq-len 32768
    """
    check_output(json_file, endings=(".json",))
    import torch

    why = "leave it out with --device cpu"
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        why = "torch finds none here, and without it the CPU is measured"
    if device == "cpu":
        for name, option in GPU_ONLY.items():
            if gpu[name]:
                raise click.UsageError(f"{option} is for GPUs: {why}")
        shapes: dict[str, Any] = {
            "batches": batches or (1,),
            "seq_lens": seq_lens,
            "head_dim": head_dim or 128,
        }
        shapes |= {"num_q_heads": q_heads, "num_kv_heads": kv_heads}
        _bench_cpu(formats, shapes, seconds or 3.0, json_file)
        return
    if seconds is not None:
        raise click.UsageError("--seconds is for the CPU: on a GPU use --quick")
    check_device(device)
    sized = bool(batches or seq_lens or q_heads or kv_heads)
    mode = _check_gpu_options(gpu, sized, {"--format": formats, "--head-dim": head_dim})
    sizes = {
        "batches": batches,
        "seq_lens": seq_lens,
        "num_q_heads": q_heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim or 128,
        "dtype": gpu["dtype"] and getattr(torch, gpu["dtype"]),
        "page_sizes": gpu["page_sizes"],
        "exact": gpu["exact"],
    }
    from ..bench import report, timer
    from ..bench.cases import TABLES, list_cases
    from ..text import render_table

    table = mode if mode in TABLES else ""
    cases = list_cases(formats, quick=gpu["quick"], table=table, **sizes)
    watch = timer.GraphTimer(0.01 if gpu["quick"] else 0.05)
    machine = timer.describe_machine(watch, __version__)
    click.echo(report.render_machine(machine) + "\n")
    rows: Rows = []
    results: list[Result] = []
    figures: dict[str, Any] | None = None
    try:
        figures = _measure(mode, cases, watch, machine, rows, results)
    finally:  # what was measured is printed after an interrupt too, and kept in any case
        try:
            if rows:
                click.echo(render_table(report.COLUMNS[mode], rows))
        finally:
            if figures:
                write_json(json_file, {"machine": asdict(machine)} | figures)
    if gpu["plot_file"]:
        report.plot(results, machine, gpu["plot_file"])


def _check_gpu_options(gpu: dict[str, Any], sized: bool, rows: dict[str, object]) -> str:
    """What to measure, one of MODES or "decode"; raises where options do not go together.

    Args:
        gpu: values of GPU_ONLY.
        sized: whether a shape is given.
        rows: values of options that tell the rows, by option.
    """
    modes = [name for name in MODES if gpu[name]]
    if len(modes) > 1:
        raise click.UsageError(f"--{modes[0]} or --{modes[1]}: measure one after the other")
    for mode in modes:
        if sized:
            raise click.UsageError(
                f"--{mode} has shapes of its own: leave out batch, heads, tokens"
            )
        given: dict[str, object] = {"--plot": gpu["plot_file"]}
        if mode == "mla":
            # latents of 8 bits and fewer have RoPE parts in bf16, which fp16 queries cannot read
            given |= {"--dtype float16": gpu["dtype"] == "float16"} | rows
        for option, value in given.items():
            if value:
                raise click.UsageError(f"{option} does not go with --{mode}")
    if gpu["plot_file"]:
        from ..bench.report import check_plot

        check_plot(gpu["plot_file"])
        check_output(gpu["plot_file"], endings=(".png",))
    return modes[0] if modes else "decode"


def _measure(
    table: str,
    cases: Sequence[Case],
    timer: Timer,
    machine: Machine,
    rows: Rows,
    results: list[Result],
) -> dict[str, Any]:
    """Measure cases, whose kernels are compiled before, all at a time; cases that are too large
    for the GPU are named."""
    from torch import OutOfMemoryError

    from ..bench import report
    from ..bench.cases import rehearse_case
    from ..bench.gpu import Peer, measure
    from ..kernels.cuda.runtime.launch import gpu_of
    from ..kernels.cuda.runtime.warmup import kernels_of
    from ..text import progress

    gpu = gpu_of(timer.device.index)
    compile_kernels(kernels_of([partial(rehearse_case, case) for case in cases], gpu), gpu.arch)
    peers: dict[Case, Peer | str] = {}
    with progress(len(cases), "Timing") as update:
        for case in cases:
            try:
                results.append(measure(case, timer, peers))
            except OutOfMemoryError:
                size = f"{case.nbytes / 1e9:.1f} GB of rows are more than fits"
                click.echo(f"{case.title}: {size}", err=True)
            else:
                rows.append(report.cells(table, results, machine))
            update(1, case.title)
    if not results:
        raise ConfigError("none of the cases fits the GPU: use a smaller --seq-len or --batch")
    return {table: [report.figures(result, machine) for result in results]}


def _bench_cpu(
    formats: Sequence[str], sizes: dict[str, Any], seconds: float, json_file: Path | None
) -> None:
    import torch

    from ..bench import cpu
    from ..bench.cases import list_cases
    from ..text import progress

    names, head_dim = formats or cpu.FORMATS, sizes["head_dim"]
    cases = list_cases(names, dtype=torch.bfloat16, **sizes)
    alone = list(dict.fromkeys(part for name in names for part in name.split("/")))
    with progress(len(cases) + len(alone) + 1, "Timing") as update:
        machine = cpu.describe_machine(__version__)
        update(1, "peak bandwidth")
        decoded = []
        for case in cases:
            decoded.append(cpu.bench_decode(case, seconds))
            update(1, f"decode {case.name}")
        rows = []
        for name in alone:
            rows.append(cpu.bench_rows(name, shape=(8, 4096, head_dim), seconds=seconds))
            update(1, f"rows {name}")
    try:
        click.echo(cpu.render_machine(machine) + "\n")
        click.echo(f"decode attention, head_dim {head_dim}\n\n{cpu.render_decode(decoded)}\n")
        click.echo(f"rows of float32 [8, 4096, {head_dim}]\n\n{cpu.render_rows(rows)}")
    finally:
        write_json(json_file, {"machine": asdict(machine), "decode": decoded, "rows": rows})
