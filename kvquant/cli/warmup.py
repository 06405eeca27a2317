"""The command `kvquant warmup`: compile the CUDA kernels that caches will need."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .console import COUNT, FILE, FOLDER, FORMATS, HEAD_DIM, PAIR, WHOLE, compile_kernels, is_given

if TYPE_CHECKING:
    import torch

    from ..cache.contiguous import KVCache
    from ..kernels.cuda.runtime.launch import GPU

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
DEFAULT_FORMAT = "int4-g4"
PROMPTS = 64, 2048  # tokens of a sequence: in a plan's basis few and many take different kernels
OF_MODEL = "head_dim", "q_heads", "kv_heads"


@click.command(epilog=FORMATS)
@click.option("--model", type=FOLDER, help="A Hugging Face model; its config.json is enough.")
@click.option("--plan", type=FILE, help="Of kvquant calibrate: formats and transforms.")
@click.option("--format", "formats", type=PAIR, multiple=True, help="Or FORMAT/FORMAT, of K and V.")
@click.option("--arch", type=click.Choice(ARCHS), help="Of the GPU; that of this machine's.")
@click.option(
    "--batch", "batches", type=COUNT, multiple=True, default=(1, 8, 64), show_default=True
)
@click.option("--max-seq-len", type=COUNT, default=8192, show_default=True, help="Of the caches.")
@click.option("--sink-len", type=WHOLE, default=4, show_default=True, help="First 16-bit tokens.")
@click.option(
    "--recent-len", type=WHOLE, default=128, show_default=True, help="Last 16-bit tokens."
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16"]),
    help="Of the model; its own, or bfloat16.",
)
@click.option("--q-heads", type=COUNT, default=32, show_default=True, help="Without a model.")
@click.option("--kv-heads", type=COUNT, default=8, show_default=True, help="Without a model.")
@click.option("--head-dim", type=HEAD_DIM, default=128, show_default=True, help="Without a model.")
def warmup(
    model: Path | None,
    plan: Path | None,
    formats: tuple[str, ...],
    arch: str | None,
    batches: tuple[int, ...],
    **options: Any,
) -> None:
    """Compile the CUDA kernels of caches ahead of time.

    Without it the first append of a new kind of cache compiles them, in seconds. All cores of this
    machine are used, and no GPU is needed: give --arch then. Kernels are kept in the user's cache
    folder, or KVQUANT_CACHE_DIR, and may be copied to machines with the same packages.

    \b
    Example:
      kvquant warmup --format int4-g4 --format int8 --arch sm_90
      kvquant warmup --model examples/llama-demo-5m --plan plan.safetensors
    """
    if plan is not None and formats:
        raise click.UsageError("--plan says the formats: leave --format out")
    for name in OF_MODEL:
        if model is not None and is_given(name):
            raise click.UsageError(f"--{name.replace('_', '-')} is the model's: leave it out")
    from ..cache.warmup import Calls, kernels_of

    gpu = _gpu(arch)
    caches, about = _caches(model, plan, formats or (DEFAULT_FORMAT,), options)
    made = (partial(make, batch=batch) for make in caches for batch in batches)
    kernels = kernels_of((Calls(make, *about, PROMPTS) for make in made), gpu)
    start = time.perf_counter()
    compiled = compile_kernels(kernels, gpu.arch)
    seconds = time.perf_counter() - start
    click.echo(
        f"{len(kernels)} kernels for {gpu.arch}: {len(kernels) - compiled} were there, "
        f"{compiled} compiled in {seconds:.0f} s"
    )


def _gpu(arch: str | None) -> GPU:
    """The GPU of this machine, or one of an architecture."""
    import torch

    from ..kernels.cuda.runtime.launch import GPUS, gpu_of

    here = gpu_of(torch.cuda.current_device()) if torch.cuda.is_available() else None
    if here is not None and arch in (None, here.arch):
        return here
    if arch is None:
        raise click.UsageError("torch finds no GPU here: say which one by --arch, such as sm_90")
    return GPUS[arch]


def _caches(
    model: Path | None, plan: Path | None, formats: tuple[str, ...], options: dict[str, Any]
) -> tuple[list[Callable[..., KVCache]], tuple[torch.dtype, int | None]]:
    """What makes a cache of each kind, given batch; the model's dtype and query heads."""
    import torch

    from ..cache.checks import row_formats
    from ..cache.contiguous import KVCache
    from ..io.plan import CachePlan
    from ..rows.quantize import exact_codec

    config, dtype = None, options["dtype"]
    num_kv_heads, num_q_heads = options["kv_heads"], options["q_heads"]
    k_dims: Sequence[int] = (int(options["head_dim"]),)
    v_dims, windows = k_dims, None
    if model is not None:
        from ..hf.configs import cache_layers
        from ..hf.loading import load_config

        config = load_config(model)
        layers, dtype = cache_layers(config), dtype or str(config.dtype).removeprefix("torch.")
        num_q_heads = config.get_text_config(decoder=True).num_attention_heads
        num_kv_heads, windows = layers.num_kv_heads, layers.windows
        k_dims, v_dims = layers.k_dims, layers.v_dims
    of_rows = torch.float16 if dtype == "float16" else torch.bfloat16
    given = {name: options[name] for name in ("max_seq_len", "sink_len", "recent_len")}
    given |= {"exact_format": exact_codec(of_rows), "windows": windows, "device": "meta"}
    if plan is not None:
        found = CachePlan.load(plan, model=None if config is None else config.to_dict())
        if config is None and not is_given("q_heads"):
            num_q_heads = None
        return [partial(KVCache.from_plan, found, **given)], (of_rows, num_q_heads)
    given |= {"num_layers": len(k_dims), "num_kv_heads": num_kv_heads, "head_dim": max(k_dims)}
    caches: list[Callable[..., KVCache]] = []
    for pair in formats:
        k_name, _, v_name = pair.partition("/")
        k_format = row_formats("k_format", k_name, k_dims)
        v_format = row_formats("v_format", v_name or k_name, v_dims)
        caches.append(partial(KVCache, k_format=k_format, v_format=v_format, **given))
    return caches, (of_rows, num_q_heads)
