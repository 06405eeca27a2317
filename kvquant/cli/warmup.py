"""The command `kvquant warmup`: compile the CUDA kernels that caches will need."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .console import (
    COUNT,
    EITHER,
    FILE,
    FORMATS,
    HEAD_DIM,
    SOURCE,
    WINDOW,
    compile_kernels,
    given_options,
    refuse_options,
)

if TYPE_CHECKING:
    import torch

    from ..cache.contiguous import KVCache
    from ..kernels.cuda.runtime.launch import GPU

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
PROMPTS = 64, 2048  # tokens of a sequence: in a plan's basis few and many take different kernels
OF_ROWS = "head_dim", "kv_heads"
VARIANT = "soft_cap", "sink_logits"
Kind = tuple[Callable[..., "KVCache"], "int | None"]  # what makes a cache; its query heads


@click.command(epilog=FORMATS)
@click.option("--model", type=SOURCE, help="Folder, GGUF or hub name; its config is enough.")
@click.option("--plan", type=FILE, help="Of kvquant calibrate: formats and transforms.")
@click.option(
    "--format",
    "formats",
    type=EITHER,
    multiple=True,
    help="Those of caches by default, of a model's latent rows int8-g4. Or FORMAT/FORMAT, of K "
    "and V, or FORMAT+FORMAT, of latents and RoPE parts: 512 and 64 elements without a model.",
)
@click.option("--arch", type=click.Choice(ARCHS), help="Of the GPU; that of this machine's.")
@click.option("--batch", "batches", type=COUNT, multiple=True, default=(1, 8, 64))
@click.option("--max-seq-len", type=COUNT, default=8192, help="Of the caches.")
@WINDOW
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16"]),
    help="Of the model; its own, or bfloat16.",
)
@click.option(
    "--q-heads", type=COUNT, default=32, help="Without a model; of latent rows 16 and 128."
)
@click.option("--kv-heads", type=COUNT, default=8, help="Without a model.")
@click.option("--head-dim", type=HEAD_DIM, default=128, help="Without a model.")
@click.option("--soft-cap", is_flag=True, help="The attention has a soft cap (Gemma 2).")
@click.option("--sink-logits", is_flag=True, help="The attention has sink logits (gpt-oss).")
def warmup(
    model: Path | None,
    plan: Path | None,
    formats: tuple[str, ...],
    arch: str | None,
    batches: tuple[int, ...],
    **options: Any,
) -> None:
    """Compile the CUDA kernels of caches ahead of time.

    Without it the first append of a new kind of cache compiles them, in seconds. On a machine
    without a GPU give --arch. Kernels are kept in the user's cache folder, or KVQUANT_CACHE_DIR,
    and may be copied to machines with the same packages.

    \b
    Example:
      kvquant warmup --format int4-g4 --format int8 --arch sm_90
      kvquant warmup --model examples/llama-demo-5m --plan plan.safetensors
    """
    if plan is not None and formats:
        raise click.UsageError("--plan says the formats: leave --format out")
    if model is not None:
        refuse_options((*OF_ROWS, "q_heads"), "is the model's: leave it out")
    elif plan is not None:
        refuse_options(OF_ROWS, "is the plan's: leave it out")
    elif formats and all("+" in one for one in formats):
        refuse_options(OF_ROWS, "is of K and V, and these are latent rows: leave it out")
    from ..cache.warmup import Calls
    from ..kernels.cuda.runtime.warmup import kernels_of

    gpu = _gpu(arch)
    dtype, caches = _caches(model, plan, formats, options)
    calls = [
        Calls(partial(_make, make, batch, num_q_heads, options), dtype, num_q_heads, PROMPTS)
        for make, num_q_heads in caches
        for batch in batches
    ]
    kernels = kernels_of(calls, gpu)
    start = time.perf_counter()
    compiled = compile_kernels(kernels, gpu.arch)
    seconds = time.perf_counter() - start
    click.echo(
        f"{len(kernels)} kernels for {gpu.arch}: {len(kernels) - compiled} were there, "
        f"{compiled} compiled in {seconds:.0f} s"
    )


def _make(
    make: Callable[..., KVCache], batch: int, num_q_heads: int | None, options: dict[str, Any]
) -> KVCache:
    """A cache whose step_variant is set."""
    import torch

    from ..cache.warmup import likely_q_heads
    from ..rows.variant import AttentionVariant

    cache = make(batch=batch)
    if any(options[name] for name in VARIANT):
        heads = num_q_heads or likely_q_heads(cache)[0]
        cap = 1.0 if options["soft_cap"] else None  # kernels do not depend on its value
        sinks = torch.empty(heads, dtype=torch.float32, device="meta")
        cache.step_variant = AttentionVariant(cap, sinks if options["sink_logits"] else None)
    return cache


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
) -> tuple[torch.dtype, list[Kind]]:
    """The dtype, and for each cache what makes it, given batch, and its query heads."""
    import torch

    from ..cache.contiguous import KVCache
    from ..cache.latent import LatentKVCache
    from ..io.plan import CachePlan
    from ..rows.quantize import exact_codec

    dtype, loaded = options["dtype"], None if plan is None else CachePlan.load(plan)
    make: Callable[..., KVCache] | None = None
    is_latent = loaded is not None and loaded.is_latent
    if model is not None:
        from ..hf.models.configs import cache_layers, new_cache
        from ..hf.models.loading import load_config

        config = load_config(model)
        dtype = dtype or str(config.dtype).removeprefix("torch.")
        layers = cache_layers(config)
        make, is_latent = partial(new_cache, config, layers), layers.are_latent
    of_rows = torch.float16 if dtype == "float16" else torch.bfloat16
    given = {name: options[name] for name in ("max_seq_len", "sink_len", "recent_len")}
    given |= {"exact_format": exact_codec(of_rows), "device": "meta"}
    kinds: list[Kind] = []
    for name in formats or ("",):
        has_latents = is_latent or (model is None and "+" in name)
        kind = LatentKVCache if has_latents else KVCache
        # of a model they are known, of a plan and of latent rows likely
        is_open = model is not None or ((has_latents or loaded) and not given_options("q_heads"))
        num_q_heads = None if is_open else options["q_heads"]
        if loaded is not None:
            one = partial(make or kind.from_plan, plan=loaded)
            _check_heads(num_q_heads, loaded.num_kv_heads)
        elif has_latents:
            one = partial(make or partial(kind, num_layers=1), **({"fmt": name} if name else {}))
        else:
            shape = {"num_kv_heads": options["kv_heads"], "head_dim": int(options["head_dim"])}
            k, _, v = name.partition("/")
            pair = {"k_format": k, "v_format": v or k} if name else {}
            one = partial(make or partial(kind, num_layers=1, **shape), **pair)
            _check_heads(num_q_heads, options["kv_heads"])
        one = partial(one, **given)
        if has_latents:
            why = "applies to rows of K and V, these are latent rows: leave it out"
            refuse_options(VARIANT, why)
            sample = one(batch=1, max_seq_len=1, device="cpu")
            assert isinstance(sample, LatentKVCache)
            sample.check_kernels(exact_codec(of_rows))
        kinds.append((one, num_q_heads))
    return of_rows, kinds


def _check_heads(num_q_heads: int | None, num_kv_heads: int) -> None:
    if num_q_heads is not None and num_q_heads % num_kv_heads:
        raise click.UsageError(
            f"{num_q_heads} query heads do not fit {num_kv_heads} KV heads: --q-heads is a multiple"
        )
