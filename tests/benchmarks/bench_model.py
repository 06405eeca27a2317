"""Milliseconds of a decode step of a whole model, beside transformers' own caches.

Run by hand on a GPU: python tests/benchmarks/bench_model.py. A Llama of random weights, as wide as
one of 8B, BF16; with --model FOLDER that model, by the default cache and by one with its plan.
Logits behind a prompt are compared first. Then caches are filled with random keys and values, and a
step of each kind is timed, medians of --rounds loops, in turn. --json keeps the figures. --memory
prints in place of times how many sequences fit beside the model, and the peak of reading a prompt.
--latent measures layers of DeepSeek V3, without experts, in place of Llama's. With --latent give
--layers 8 or fewer, and a --format of latent rows.

    captured        CapturedStep: one CUDA graph
    captured, compiled    the same with compile=True
    eager           CachedModel.step, from Python
    generate        a call of the model with a QuantizedCache, as transformers' generate makes it
    compiled        the same by torch.compile, mode="reduce-overhead"
    kernels         what the GPU was busy in an eager step, by torch's profiler; below it the
                    largest shares, all of which the JSON has
    StaticCache     compiled, mode="reduce-overhead": transformers' fastest way
    DynamicCache    SDPA, from Python
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from bench_memory import print_batches, print_peaks
from measuring import relative_error
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from wide_models import made_model, new_cache

from kvquant import CachedModel, QuantizedCache
from kvquant.hf.argument import as_argument
from kvquant.hf.compile.captured import CapturedStep

STEPS = 10  # timed together
SHOWN = 12  # kernels whose shares are printed
Step = Callable[[], Any]
Maker = Callable[[int, int], Any]  # of a cache for so many sequences of so many tokens
Figures = dict[str, Any]


def random_rows(
    shapes: Sequence[tuple[int, int]], batch: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random values for a layer's cache: K and V, or latents and RoPE parts. Each is [batch, heads,
    tokens, head_dim].

    Args:
        shapes: heads and head_dim of both.
        batch: sequences.
        tokens: of each.
    """
    options: Any = {"dtype": torch.bfloat16, "device": "cuda"}
    k, v = (torch.randn(batch, heads, tokens, dim, **options) for heads, dim in shapes)
    return k, v


def our_shapes(model: CachedModel) -> list[tuple[int, int]]:
    """Heads and head_dim of what kvquant's caches take: K and V, or latents and RoPE parts."""
    config = model.config
    if model.has_latents:
        return [(1, config.kv_lora_rank), (1, config.qk_rope_head_dim)]
    rows = model.new_cache(1, 1, device="meta").layers[0].k_format
    return [(config.num_key_value_heads, rows.head_dim)] * 2


def their_shapes(model: CachedModel) -> list[tuple[int, int]]:
    """Heads and head_dim of what transformers' caches take: K and V of all heads. Newer versions
    take latents where a model has them."""
    cache: Any = transformers.DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        model.model(token, **as_argument(model.model, cache))
    return [(x.shape[1], x.shape[3]) for x in (cache.layers[0].keys, cache.layers[0].values)]


def filled_ours(cache: Any, model: CachedModel, batch: int, tokens: int) -> Any:
    """A cache of ours."""
    for layer in range(cache.num_layers):
        for start in range(0, tokens, 4096):
            rows = random_rows(our_shapes(model), batch, min(4096, tokens - start))
            cache.append(layer, *rows)
    return cache


def filled(cache: Any, model: CachedModel, batch: int, tokens: int) -> Any:
    """A cache of transformers."""
    shapes = their_shapes(model)
    for layer in range(model.config.num_hidden_layers):
        cache.update(*random_rows(shapes, batch, tokens), layer)
    return cache


def take_time(step: Step) -> float:
    """Milliseconds of a step, of STEPS in a row."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / STEPS


def busy_times(step: Step) -> dict[str, float]:
    """Milliseconds that each kernel of one step takes on the GPU, all its launches together."""
    step()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for one in seen.events():
        if one.device_type == DeviceType.CUDA:
            found[one.name] += one.time_range.elapsed_us() / 1e3
    return dict(found.most_common())


def check_logits(model: CachedModel, makers: Mapping[str, Maker], fused: bool) -> None:
    """Print how far logits of a captured step are from those of a DynamicCache, beside how far
    transformers' own two ways to compute attention are from one another."""
    tokens = torch.randint(model.config.vocab_size, (2, 601), device="cuda")
    wanted = model.plain(tokens)
    model.model.set_attn_implementation("eager")
    with torch.no_grad():
        noise = relative_error(model.model(tokens, logits_to_keep=1).logits[:, -1], wanted)
    print(f"logits of transformers' eager attention and of its SDPA: {noise:.1e}")
    exact: dict[str, Maker] = {"bf16 rows": partial(new_cache, model, fmt="bf16")}
    for name, make in {**exact, **makers}.items():
        cache = make(2, 1024)
        model.prefill(cache, tokens[:, :-1])
        for kind in ("captured", "captured, compiled")[: 1 + fused]:
            step = CapturedStep(model, cache, compile=kind != "captured")
            found = step(tokens[:, -1])
            cache.check()
            cache.crop(600)
            error = relative_error(found, wanted)
            assert error < (2 * noise if name in exact else 1.0), error
            print(f"logits after a prompt and a step, {kind}, {name}: {error:.1e}", flush=True)
    torch.compiler.reset()


def our_steps(
    model: CachedModel, batch: int, tokens: int, make: Maker, ways: Sequence[str]
) -> dict[str, Step]:
    """The ways with one cache, each from the same length on."""
    cache = filled_ours(make(batch, tokens + 256), model, batch, tokens)
    token = torch.zeros(batch, dtype=torch.int64, device="cuda")

    def calling(forward: Any) -> Step:
        past = QuantizedCache(cache, placed=True, max_seq_len=cache.max_seq_len)

        def call(forward: Any = forward) -> None:
            with torch.no_grad():
                forward(input_ids=token[:, None], **past.argument, logits_to_keep=1)

        call(model.model)  # a graph comes behind a call that is none
        return call

    def from_start(step: Step) -> Step:
        left = 0

        def run() -> None:
            nonlocal left
            if not left:
                cache.crop(tokens)
                left = STEPS
            left -= 1
            step()

        return run

    model.step(cache, token)  # kernels are compiled
    compiled = torch.compile(model.model.forward, mode="reduce-overhead", fullgraph=True)
    makers: dict[str, Callable[[], Step]] = {
        "captured": lambda: partial(CapturedStep(model, cache), token),
        "captured, compiled": lambda: partial(CapturedStep(model, cache, compile=True), token),
        "eager": lambda: partial(model.step, cache, token),
        "generate": lambda: calling(model.model),
        "compiled": lambda: calling(compiled),
    }
    wanted = {name: make for name, make in makers.items() if name in {*(ways or makers), "eager"}}
    return {name: from_start(make()) for name, make in wanted.items()}


def their_steps(model: CachedModel, batch: int, tokens: int) -> dict[str, Any]:
    """transformers' own: each makes its cache when it is called, for its memory's sake."""
    config, token = model.model.config, torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
    room = tokens + 64 * STEPS

    def of(cache: Any, run: Any) -> Step:
        def step() -> None:
            with torch.no_grad():
                run(token, **as_argument(model.model, cache), logits_to_keep=1)

        return step

    def static() -> Step:
        cache = transformers.StaticCache(config=config, max_cache_len=room)
        run = torch.compile(model.model.forward, mode="reduce-overhead", fullgraph=True)
        return of(filled(cache, model, batch, tokens), run)

    def dynamic() -> Step:
        cache = transformers.DynamicCache(config=config)
        return of(filled(cache, model, batch, tokens), model.model)

    return {"StaticCache, compiled": static, "DynamicCache": dynamic}


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--model", "folder", type=click.Path(exists=True, path_type=Path))
@click.option("--layers", default=32, show_default=True)
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 32), show_default=True)
@click.option("--tokens", multiple=True, type=int, default=(4096, 32768, 131072), show_default=True)
@click.option("--format", "fmt", default="int4-g4", show_default=True)
@click.option("--way", "ways", multiple=True, help="Only these, and eager.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--theirs/--no-theirs", default=True, show_default=True)
@click.option("--latent", is_flag=True, help="Layers of DeepSeek V3.")
@click.option("--memory", is_flag=True, help="Print what fits, in place of times.")
def main(memory: bool, **options: Any) -> None:
    """Measure and print."""
    if memory:
        measure_memory(options["layers"], options["batches"], options["tokens"], options["fmt"])
    else:
        measure(**options)


def measure_memory(
    layers: int, batches: tuple[int, ...], tokens: tuple[int, ...], fmt: str
) -> None:
    """Print how many sequences of so many tokens fit, and peaks of prompts of the first batch."""
    model = made_model(layers, max(tokens) + 1024)
    for count in tokens:
        print_batches(model, count, ("bf16", fmt))
        print_peaks(model, batches[0], count, ("bf16", fmt))


def measure(
    folder: Path | None,
    layers: int,
    batches: tuple[int, ...],
    tokens: tuple[int, ...],
    fmt: str,
    ways: tuple[str, ...],
    rounds: int,
    theirs: bool,
    latent: bool,
    json_file: Path | None,
) -> None:
    """Measure, print, and keep what has been measured in the file after each case."""
    print(torch.cuda.get_device_name(), "torch", torch.__version__, transformers.__version__)
    if folder is None:
        model = made_model(layers, max(tokens) + 1024, latent=latent)
        makers: dict[str, Maker] = {"": partial(new_cache, model, fmt=fmt)}
    else:
        model = CachedModel.from_pretrained(folder, device="cuda", dtype=torch.bfloat16)
        layers, fmt = model.config.num_hidden_layers, "default"
        makers = {"": model.new_cache, ", plan": partial(model.new_cache, plan="auto")}
        assert makers[", plan"](1, 8).layers[0].basis is not None, "auto takes no plan"
    check_logits(model, makers, not ways or "captured, compiled" in ways)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    figures: Figures = {"gpu": torch.cuda.get_device_name(), **versions, "cases": []}
    name = model.config.model_type if folder is None else folder.name
    figures |= {"model": name, "layers": layers, "format": fmt}
    for batch in batches:
        for count in tokens:
            print(f"batch {batch}, {count} tokens, {layers} layers", flush=True)
            times: dict[str, float | None] = {}
            case: dict[str, Any] = {"batch": batch, "tokens": count, "ms": times}
            for kind, make in makers.items():
                model.model.set_attn_implementation("kvquant")
                steps = our_steps(model, batch, count, make, ways)
                shares = case[f"kernels{kind}"] = busy_times(steps["eager"])
                times[f"kernels{kind}"] = sum(shares.values())
                for name, step in steps.items():
                    take_time(step)
                    times[name + kind] = statistics.median(take_time(step) for _ in range(rounds))
                del steps, step
                torch.compiler.reset()
            model.model.set_attn_implementation("sdpa")
            others = their_steps(model, batch, count) if theirs else {}
            for name in [one for one in others if one in (ways or others)]:
                torch.cuda.empty_cache()
                try:
                    step = others[name]()
                    take_time(step)  # compiles
                    times[name] = statistics.median(take_time(step) for _ in range(rounds))
                    del step
                except torch.OutOfMemoryError:
                    times[name] = None
                torch.compiler.reset()
            for name, taken in times.items():
                if taken is None:
                    print(f"    {name:24} out of memory", flush=True)
                else:
                    print(f"    {name:24} {taken:9.2f} ms", flush=True)
            for name, taken in list(case["kernels"].items())[:SHOWN]:
                print(f"        {name[:60]:60} {taken:9.3f} ms", flush=True)
            figures["cases"].append(case)
            if json_file is not None:
                json_file.write_text(json.dumps(figures, indent=1) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
