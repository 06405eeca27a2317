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
) -> tuple[Sequence[Callable[..., KVCache]], tuple[torch.dtype, int | None]]:
    """What makes a cache of each kind, given batch; the model's dtype and query heads."""
    import torch

    from ..cache.contiguous import KVCache
    from ..io.plan import CachePlan
    from ..rows.quantize import exact_codec

    dtype, num_q_heads = options["dtype"], options["q_heads"]
    given = {name: options[name] for name in ("max_seq_len", "sink_len", "recent_len")}
    make: Callable[..., KVCache]
    if model is not None:
        from ..errors import UnsupportedModelError
        from ..hf.configs import cache_layers, new_cache
        from ..hf.loading import load_config

        config = load_config(model)
        dtype = dtype or str(config.dtype).removeprefix("torch.")
        layers = cache_layers(config)
        if layers.are_latent:
            raise UnsupportedModelError(
                f"{model} keeps latent rows: warmup has no kernels of these, they are compiled "
                "when they are first called"
            )
        make, num_q_heads = partial(new_cache, config, layers), None
    elif plan is not None:
        make = KVCache.from_plan
        num_q_heads = num_q_heads if is_given("q_heads") else None
    else:
        shape = {"num_kv_heads": options["kv_heads"], "head_dim": int(options["head_dim"])}
        make = partial(KVCache, num_layers=1, **shape)
    of_rows = torch.float16 if dtype == "float16" else torch.bfloat16
    make = partial(make, exact_format=exact_codec(of_rows), device="meta", **given)
    loaded = None if plan is None else CachePlan.load(plan)
    kv_heads = options["kv_heads"] if loaded is None else loaded.num_kv_heads
    if num_q_heads is not None and num_q_heads % kv_heads:
        raise click.UsageError(
            f"{num_q_heads} query heads do not fit {kv_heads} KV heads: --q-heads is a multiple"
        )
    if loaded is not None:
        loaded.check_of_heads("a cache of warmup")
        return [partial(make, plan=loaded)], (of_rows, num_q_heads)
    pairs = (pair.partition("/") for pair in formats)
    caches = [partial(make, k_format=k, v_format=v or k) for k, _, v in pairs]
    return caches, (of_rows, num_q_heads)
