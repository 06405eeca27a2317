"""Time of reading a prompt with a model, CachedModel.prefill beside transformers' own caches.

    python tests/benchmarks/bench_prefill.py                 4 layers as wide as a Llama of 8B, CUDA
    python tests/benchmarks/bench_prefill.py --latent        4 layers of DeepSeek V3, no experts
    python tests/benchmarks/bench_prefill.py --model FOLDER  another model, on the CPU too

A prompt into an empty cache, beside a call of the model with a DynamicCache and torch's SDPA. Then
--turn tokens on a past of --past, which DynamicCache has in 16 bit. Times are medians of --rounds,
in turn. First logits are compared, with 16-bit rows (they differ by rounding) and with --format.
Peak memory is what a call takes beyond what is there before it, its cache included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import torch
from measuring import relative_error
from transformers import AutoModelForCausalLM
from wide_models import made_model, new_cache

from kvquant import CachedModel


def wait(device: torch.device) -> None:
    """Until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds of a call, and GiB that it takes at most beyond what is held before it."""
    before = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    taken = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    return taken, peak / 2**30


@click.command()
@click.option("--model", "folder", help="A folder with a model.")
@click.option("--layers", default=4, show_default=True, help="Of the model that is made up.")
@click.option("--latent", is_flag=True, help="Layers of DeepSeek V3: give --format int8-g4.")
@click.option("--tokens", multiple=True, type=int, default=(16384, 32768, 65536), show_default=True)
@click.option("--batch", default=1, show_default=True)
@click.option("--past", default=32768, show_default=True)
@click.option("--turn", default=8192, show_default=True, help="0: no second turn.")
@click.option("--format", "fmt", default="int4-g4", show_default=True)
@click.option("--chunk", "chunks", multiple=True, type=int, help="Beside the default.")
@click.option("--rounds", default=5, show_default=True)
def main(
    folder: str | None,
    layers: int,
    latent: bool,
    tokens: tuple[int, ...],
    batch: int,
    past: int,
    turn: int,
    fmt: str,
    chunks: tuple[int, ...],
    rounds: int,
) -> None:
    """Measure and print."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    longest = max(*tokens, past + turn)
    if folder:
        torch.manual_seed(0)
        made: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = CachedModel(made.to(device).eval())
    else:
        model = made_model(layers, longest, latent=latent, device=device.type)
    text = torch.randint(model.config.vocab_size, (batch, longest), device=device)

    def plain(count: int, held: Any = None) -> torch.Tensor:
        return model.plain(text[:, :count], model.new_plain_cache() if held is None else held)

    def ours(count: int, fmt: str = fmt, **options: Any) -> torch.Tensor:
        return model.prefill(cache(count, fmt), text[:, :count], **options)

    def cache(count: int, fmt: str = fmt) -> Any:
        return new_cache(model, batch, count, fmt)

    count = min(tokens)
    wanted = plain(count)
    exact = model.exact_format
    for name, options in ((exact, {}), (exact, {"chunk": count // 4}), (fmt, {})):
        error = relative_error(ours(count, name, **options), wanted)
        assert error < (0.02 if name == exact else 1.0), error
        print(
            f"logits after {count} tokens, {name} rows, {options or 'default chunk'}: {error:.1e}"
        )

    def compare(what: str, calls: dict[str, Callable[[], Callable[[], Any]]]) -> None:
        """Print times and peaks of calls, each made ready anew before it is timed."""
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for _ in range(rounds + 1):  # the first one warms up
            for name, ready in calls.items():
                call = ready()
                found[name].append(measure(call, device))
                del call
        first = None
        for name, pairs in found.items():
            taken = statistics.median(seconds for seconds, _ in pairs[1:])
            first = first or taken
            peak = max(gib for _, gib in pairs[1:])
            line = f"{what:18} {name:28} {1e3 * taken:8.1f} ms  {taken / first:5.2f}x"
            print(f"{line}  {peak:5.2f} GiB", flush=True)

    for n in tokens:
        calls: dict[str, Callable[[], Callable[[], Any]]] = {
            "transformers, one shot": lambda n=n: lambda: plain(n),  # type: ignore[misc]
            f"{fmt} rows, default": lambda n=n: lambda: ours(n),  # type: ignore[misc]
        }
        for chunk in chunks:
            calls[f"{fmt} rows, chunk {chunk}"] = (
                lambda n=n, chunk=chunk: lambda: ours(n, chunk=chunk)  # type: ignore[misc]
            )
        compare(f"{n} tokens", calls)
    if turn:
        kept = model.new_plain_cache()
        plain(past, kept)
        packed = cache(past + turn)
        model.prefill(packed, text[:, :past])

        def again_plain() -> Callable[[], Any]:
            if more := kept.get_seq_length() - past:
                kept.crop(-more)
            return lambda: model.plain(text[:, past : past + turn], kept)

        def again() -> Callable[[], Any]:
            fresh = packed.fork()  # windows cannot be cropped so far
            return lambda: model.prefill(fresh, text[:, past : past + turn], append=True)

        compare(
            f"{turn} on {past}",
            {"transformers, 16-bit cache": again_plain, f"{fmt} rows": again},
        )


if __name__ == "__main__":
    main()
