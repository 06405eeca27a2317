"""How many sequences fit on a GPU beside a model, and what reading a prompt takes at most.

Run by hand: python tests/benchmarks/bench_model.py --memory. Caches alone are allocated to find the
largest batch, by bisection; then the model makes one step with it, and with some sequences fewer
where there is no room for that. Rows are zeros: memory does not hang on what they hold.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers

from kvquant import CachedModel
from kvquant.errors import ConfigError

ROOM = 16  # tokens that a cache has room for beyond those that it holds
Make = Callable[[int], Any]


def largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, where each below it fits as well; 0 if none does."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def has_room(call: Callable[..., Any], *args: Any) -> bool:
    """Whether there is memory for a call, which is free again then."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        call(*args)
    except torch.OutOfMemoryError:
        return False
    except ConfigError as error:  # of a KVCache that takes more than there is
        if "more than there is" not in str(error):
            raise
        return False
    return True


def caches(model: CachedModel, tokens: int, formats: tuple[str, ...]) -> Iterator[tuple[str, Make]]:
    """Ways to hold so many tokens of each sequence, by their names."""
    config = model.model.config
    heads, dim, device = config.num_key_value_heads, config.head_dim, model.model.device

    def dynamic(batch: int) -> Any:
        cache = transformers.DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            rows = torch.zeros(batch, heads, tokens, dim, dtype=model.dtype, device=device)
            at: Any = cache.layers[layer]
            at.lazy_initialization(rows[:1, :, :0], rows[:1, :, :0])
            at.keys, at.values = rows, torch.zeros_like(rows)
        return cache

    def static(batch: int) -> Any:
        cache = transformers.StaticCache(config=config, max_cache_len=tokens + ROOM)
        cache.early_initialization(batch, heads, dim, model.dtype, device)
        return cache

    yield "DynamicCache", dynamic
    yield "StaticCache", static
    for fmt in formats:

        def ours(batch: int, fmt: str = fmt) -> Any:
            cache = model.new_cache(batch, tokens + ROOM, k_format=fmt, v_format=fmt)
            lens = torch.full((batch,), tokens, dtype=torch.int32, device=device)
            for layer in cache.layers:
                layer.begin(lens, lens - cache.sink_len - cache.recent_len)
            return cache

        yield f"{fmt} rows", ours


def step(model: CachedModel, make: Make, batch: int) -> None:
    """One token of each sequence behind a cache."""
    cache, token = make(batch), torch.zeros(batch, dtype=torch.int64, device=model.model.device)
    if isinstance(cache, transformers.Cache):
        model.plain(token[:, None], cache)
    else:
        model.step(cache, token)


def print_batches(model: CachedModel, tokens: int, formats: tuple[str, ...]) -> None:
    """The largest batch of each kind of cache."""
    free = torch.cuda.mem_get_info()[0] / 2**30
    print(f"{tokens} tokens a sequence, {free:.1f} GiB beside the model", flush=True)
    first = None
    for name, make in caches(model, tokens, formats):
        has_room(step, model, make, 1)  # kernels are compiled
        alone = batch = largest(partial(has_room, make))
        while batch and not has_room(step, model, make, batch):
            batch -= max(batch // 64, 1)
        first = first or batch
        ratio = batch / first if first else float("nan")
        print(f"    {name:14} {batch:5} sequences {ratio:5.2f}x   (alone {alone})", flush=True)


def print_peaks(model: CachedModel, batch: int, tokens: int, formats: tuple[str, ...]) -> None:
    """What reading a prompt takes beside the model, its cache included."""
    text = torch.randint(model.config.vocab_size, (batch, tokens), device=model.model.device)
    print(f"peak of reading {batch} x {tokens} tokens, and what the cache takes of it", flush=True)
    for name in ("transformers", *formats):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept: list[Any] = []  # the cache, so that it is still there when its bytes are counted

        def read(name: str = name, kept: list[Any] = kept) -> None:
            if name == "transformers":
                kept.append(model.new_plain_cache())
                model.plain(text, kept[0])
            else:
                kept.append(model.new_cache(batch, tokens + ROOM, k_format=name, v_format=name))
                model.prefill(kept[0], text)

        is_read = has_room(read)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        held = (torch.cuda.memory_allocated() - before) / 2**30
        kept.clear()
        shown = f"{peak:7.2f} GiB, {held:6.2f}" if is_read else "out of memory"
        print(f"    {name:14} {shown}", flush=True)
