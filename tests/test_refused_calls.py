"""After each refused call of each public cache its whole state is what it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from snapshots import changes, snapshot

from kvquant import (
    AttentionVariant,
    ContextParallelCache,
    KVCache,
    LatentKVCache,
    LatentPagedBatch,
    LatentPagedKVCache,
    PagedBatch,
    PagedKVCache,
)
from kvquant.errors import (
    ConfigError,
    DeviceError,
    KVQuantError,
    NonFiniteError,
    OutOfPagesError,
    ShapeError,
    UnsupportedError,
)

LAYERS, BATCH, HEADS, Q_HEADS, DIM, ROOM = 2, 3, 2, 4, 64, 40
LATENT, ROPE = 256, 32


# what a refused call may move: counts of calls that may have changed something, what was made to be
# found again, what an interrupt would undo, how many heads queries had, and what transformers notes
KNOWN = {"changes", "_segments", "_slots", "step_masks", "_growing", "_moving", "_ratio"}
KNOWN |= {"_is_user_defined"}


class Refused(NamedTuple):
    """A call that is refused: what to do with the object, and the error."""

    call: Callable[[Any], object]
    error: Any  # a class, or several


Table = dict[str, Refused]


def calls(name: str, *given: Any, **options: Any) -> Callable[[Any], object]:
    """A method of what is given."""
    return lambda it: getattr(it, name)(*given, **options)


def rows(count: int, *, batch: int = BATCH, heads: int = HEADS, dim: int = DIM) -> torch.Tensor:
    return torch.ones(batch, heads, count, dim)


def bad(value: float, *axes: int) -> torch.Tensor:
    """Rows of these axes with a value that no format holds."""
    found = torch.ones(axes)
    found.view(-1)[-1] = value
    return found


# what append of [batch, heads, tokens, dim] refuses; k and v are of other widths in latent caches
def bad_appends(heads: int, k_dim: int, v_dim: int) -> Table:
    def k(count: int, batch: int = BATCH, heads: int = heads, dim: int = k_dim) -> torch.Tensor:
        return rows(count, batch=batch, heads=heads, dim=dim)

    def v(count: int, batch: int = BATCH, heads: int = heads, dim: int = v_dim) -> torch.Tensor:
        return rows(count, batch=batch, heads=heads, dim=dim)

    table = {
        "no such layer": ((9, k(1), v(1)), ConfigError),
        "a layer from the end": ((-1, k(1), v(1)), ConfigError),
        "no number of a layer": (("0", k(1), v(1)), ConfigError),
        "no tensor": ((0, None, v(1)), ConfigError),
        "no axis of tokens": ((0, k(1)[:, :, 0], v(1)[:, :, 0]), ShapeError),
        "another batch": ((0, k(4, batch=2), v(4, batch=2)), ShapeError),
        "other heads": ((0, k(4, heads=5), v(4, heads=5)), ShapeError),
        "other widths of k": ((0, k(4, dim=48), v(4)), ShapeError),
        "other widths of v": ((0, k(1), v(1, dim=48)), ShapeError),
        "several tokens, other widths of v": ((0, k(4), v(4, dim=48)), ShapeError),
        "more k than v": ((0, k(4), v(3)), ShapeError),
        "float64": ((0, k(4).double(), v(4).double()), ConfigError),
        "a float64 token": ((0, k(1), v(1).double()), ConfigError),
        "whole numbers": ((0, k(4).int(), v(4)), ConfigError),
        "another device": ((0, k(1), v(1).to("meta")), (ConfigError, DeviceError)),
        "several tokens, another device": ((0, k(4), v(4).to("meta")), (ConfigError, DeviceError)),
        "NaN in k": ((0, bad(math.nan, BATCH, heads, 4, k_dim), v(4)), NonFiniteError),
        "NaN in a v": ((0, k(1), bad(math.nan, BATCH, heads, 1, v_dim)), NonFiniteError),
        "more than 16 bit hold": ((0, bad(7e4, BATCH, heads, 4, k_dim), v(4)), NonFiniteError),
        "more than there is room": ((0, k(ROOM + 1), v(ROOM + 1)), ShapeError),
        "too few counts": ((0, k(4), v(4), [1]), ShapeError),
        "a negative count": ((0, k(4), v(4), [1, -1, 1]), ShapeError),
        "a count over the tokens": ((0, k(4), v(4), [1, 5, 1]), ShapeError),
        "no whole counts": ((0, k(4), v(4), [1.5, 1, 1]), ConfigError),
    }
    return {
        f"append: {name}": Refused(calls("append", *given), error)
        for name, (given, error) in table.items()
    }


BAD_OPTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "no such backend": ({"backend": "tpu"}, ConfigError),
    "the backend of another device": ({"backend": "cuda"}, DeviceError),
    "NaN as scale": ({"sm_scale": math.nan}, ConfigError),
    "no flag": ({"return_lse": 1}, ConfigError),
    "no number of splits": ({"num_splits": 0}, ConfigError),
}


def bad_steps(*, rank: bool = False) -> Table:
    """What step of keys and values refuses."""
    q, k = torch.ones(BATCH, Q_HEADS, DIM), rows(1)
    window = AttentionVariant(window=3)
    table: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]] = {
        "no such layer": ((9, q, k, k), {}, ConfigError),
        "other query heads": ((0, torch.ones(BATCH, 3, DIM), k, k), {}, ShapeError),
        "another batch of queries": ((0, q[:2], k, k), {}, ShapeError),
        "other widths of queries": ((0, q[..., :48], k, k), {}, ShapeError),
        "float64 queries": ((0, q.double(), k, k), {}, ConfigError),
        "more tokens than queries": ((0, q, rows(2), rows(2)), {}, ShapeError),
        "NaN": ((0, q, k, bad(math.nan, BATCH, HEADS, 1, DIM)), {}, NonFiniteError),
        "sinks of other heads": (
            (0, q, k, k),
            {"variant": AttentionVariant(sink_logits=torch.ones(3))},
            ShapeError,
        ),
    }
    for name, (options, error) in BAD_OPTIONS.items():
        if not (rank and {"return_lse", "num_splits"} & {*options}):
            table[name] = (0, q, k, k), options, error
    if rank:
        table["a window"] = (0, q, k, k), {"variant": window}, UnsupportedError
    return {
        f"step: {name}": Refused(calls("step", *a, **o), error)
        for name, (a, o, error) in table.items()
    }


def bad_latent_steps() -> Table:
    q, rope = torch.ones(BATCH, 16, LATENT), torch.ones(BATCH, 16, ROPE)
    new = rows(1, heads=1, dim=LATENT), rows(1, heads=1, dim=ROPE)
    table: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]] = {
        "no scale": ((0, q, rope, *new), {}, ConfigError),
        "other widths of queries": ((0, q[..., :48], rope, *new), {"sm_scale": 1.0}, ShapeError),
        "another batch of queries": ((0, q[:2], rope[:2], *new), {"sm_scale": 1.0}, ShapeError),
        "another batch of RoPE parts": ((0, q, rope[:2], *new), {"sm_scale": 1.0}, ShapeError),
        "no RoPE parts": ((0, q, None, *new), {"sm_scale": 1.0}, ConfigError),
        "a variant": (
            (0, q, rope, *new),
            {"sm_scale": 1.0, "variant": AttentionVariant(soft_cap=2.0)},
            UnsupportedError,
        ),
        "NaN": (
            (0, q, rope, new[0], bad(math.nan, BATCH, 1, 1, ROPE)),
            {"sm_scale": 1.0},
            NonFiniteError,
        ),
    }
    for name, (options, error) in BAD_OPTIONS.items():
        table[name] = (0, q, rope, *new), {"sm_scale": 1.0, **options}, error
    return {
        f"step: {name}": Refused(calls("step", *a, **o), error)
        for name, (a, o, error) in table.items()
    }


REORDERS: Table = {
    "reorder: no such place": Refused(lambda cache: cache.reorder([0, 1, 3]), ShapeError),
    "reorder: a place from the end": Refused(lambda cache: cache.reorder([0, 1, -1]), ShapeError),
    "reorder: too few places": Refused(lambda cache: cache.reorder([0, 1]), ShapeError),
    "reorder: no whole numbers": Refused(lambda cache: cache.reorder([0.5, 1, 2]), ConfigError),
}
CROPS: Table = {
    "crop: more than there is": Refused(lambda cache: cache.crop([9, 99, 9]), ShapeError),
    "crop: a negative length": Refused(lambda cache: cache.crop([1, -1, 1]), ShapeError),
    "crop: below nothing": Refused(lambda cache: cache.crop(-1), ShapeError),
    "crop: too few lengths": Refused(lambda cache: cache.crop([1]), ShapeError),
    "crop: no whole numbers": Refused(lambda cache: cache.crop([0.5, 1, 1]), ConfigError),
}


def raising(cache: KVCache) -> None:
    with cache.attempt(3):
        for layer in cache.layers:
            layer.check_filled(0)
        raise ConfigError("of the caller")


OTHERS: Table = {
    "select: no such place": Refused(lambda cache: cache.select([3]), ShapeError),
    "select: nothing": Refused(lambda cache: cache.select([]), ShapeError),
    "fork: no such place": Refused(lambda cache: cache.fork([-1]), ShapeError),
    "repeat: no times": Refused(lambda cache: cache.repeat(0), ConfigError),
    "repeat: too often": Refused(lambda cache: cache.repeat(2**31 - 1), ConfigError),
    "grow: less": Refused(lambda cache: cache.grow(ROOM - 1), ConfigError),
    "grow: more than all memory": Refused(lambda cache: cache.grow(2**40), ConfigError),
    "attempt: no number": Refused(lambda cache: cache.attempt(-1).__enter__(), ConfigError),
    "dequantized: no such dtype": Refused(
        lambda cache: cache.dequantized(0, torch.int8), ConfigError
    ),
    "segments: no such layer": Refused(lambda cache: cache.segments(9), ConfigError),
}


def attends(*q: torch.Tensor, **options: Any) -> Table:
    found = {
        "attend: no such layer": Refused(lambda cache: cache.attend(9, *q, **options), ConfigError),
        "attend: another batch": Refused(
            lambda cache: cache.attend(0, *(x[:2] for x in q), **options), ShapeError
        ),
    }
    for name, (others, error) in BAD_OPTIONS.items():
        found[f"attend: {name}"] = Refused(calls("attend", 0, *q, **options | others), error)
    return found


def contiguous(**options: Any) -> KVCache:
    return KVCache(LAYERS, BATCH, HEADS, DIM, ROOM, sink_len=2, recent_len=5, **options)


def filled_contiguous(**options: Any) -> KVCache:
    cache = contiguous(**options)
    for layer in range(LAYERS):
        cache.append(layer, rows(12), rows(12), [12, 4, 9])
    return cache


def latents() -> LatentKVCache:
    return LatentKVCache(
        LAYERS, BATCH, ROOM, latent_dim=LATENT, rope_dim=ROPE, sink_len=2, recent_len=5
    )


def filled_latents() -> LatentKVCache:
    cache = latents()
    for layer in range(LAYERS):
        cache.append(layer, rows(12, heads=1, dim=LATENT), rows(12, heads=1, dim=ROPE), [12, 4, 9])
    return cache


def spread() -> ContextParallelCache:
    return ContextParallelCache(contiguous(), block_len=4)


def filled_spread() -> ContextParallelCache:
    cache = spread()
    for layer in range(LAYERS):
        cache.append(layer, rows(12), rows(12), [12, 4, 9])
    return cache


# the paged caches: pages of 16 tokens, of which two sequences share some; one that is swapped out,
# pages of one that has ended, and one for which pages are reserved
PAGE, SLOTS, MOST = 16, 5, 100
Batch = PagedBatch | LatentPagedBatch
SIZES: dict[str, Any] = {
    "max_num_seqs": SLOTS,
    "max_seq_len": MOST,
    "page_size": PAGE,
    "sink_len": 3,
    "recent_len": 5,
}


def paged(kind: type[Batch], **options: Any) -> Batch:
    if kind is PagedBatch:
        cache = PagedKVCache(LAYERS, HEADS, DIM, 8, **SIZES, **options)
        batch: Batch = PagedBatch(cache, max_batch=3, max_tokens=60)
    else:
        latent = LatentPagedKVCache(LAYERS, 8, latent_dim=LATENT, rope_dim=ROPE, **SIZES)
        batch = LatentPagedBatch(latent, max_batch=3, max_tokens=60)
    cache = batch.cache
    for name, count in (("a", 40), ("ended", 30), ("out", 20)):
        first = {"a": 0, "ended": 1000, "out": 2000}[name]
        cache.allocate(name)
        grow(batch, [name], [count], list(range(first, first + count)))
    cache.fork("a", "b")
    grow(batch, ["b"], [3], [7, 8, 9])
    cache.free("ended")
    cache.swap_out("out")
    cache.finish_swaps()
    cache.allocate("reserved", room=50)
    return batch


def new_tokens(batch: Batch, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(batch, PagedBatch):
        return torch.ones(count, HEADS, DIM), torch.ones(count, HEADS, DIM)
    return torch.ones(count, 1, LATENT), torch.ones(count, 1, ROPE)


def grow(batch: Batch, ids: list[str], counts: list[int], tokens: list[int] | None = None) -> None:
    with batch.extend(ids, counts, tokens):
        for layer in range(LAYERS):
            batch.append(layer, *new_tokens(batch, sum(counts)))


def full(batch: Batch) -> PagedKVCache:
    """Let every sequence slot be taken."""
    while batch.cache.num_free_seq_slots:
        batch.cache.allocate(f"more {batch.cache.num_free_seq_slots}")
    return batch.cache


PAGED: Table = {
    "allocate: a name in use": Refused(lambda b: b.cache.allocate("a"), ConfigError),
    "allocate: the name of what is out": Refused(lambda b: b.cache.allocate("out"), ConfigError),
    "allocate: no name": Refused(lambda b: b.cache.allocate(["x"]), ConfigError),
    "allocate: no token ids": Refused(lambda b: b.cache.allocate("x", [0.5]), ConfigError),
    "allocate: a negative room": Refused(lambda b: b.cache.allocate("x", room=-1), ConfigError),
    "allocate: too much room": Refused(lambda b: b.cache.allocate("x", room=MOST + 1), ShapeError),
    "allocate: too few pages": Refused(
        lambda b: b.cache.allocate("x", [*range(1000, 1040)], room=MOST), OutOfPagesError
    ),
    "match_prefix: no token ids": Refused(lambda b: b.cache.match_prefix(["x"]), ConfigError),
    "fork: no such sequence": Refused(lambda b: b.cache.fork("x", "y"), ConfigError),
    "fork: a name in use": Refused(lambda b: b.cache.fork("a", "b"), ConfigError),
    "fork: of what is out": Refused(lambda b: b.cache.fork("out", "y"), ConfigError),
    "truncate: no such sequence": Refused(lambda b: b.cache.truncate("x", 0), ConfigError),
    "truncate: a negative length": Refused(lambda b: b.cache.truncate("a", -1), ShapeError),
    "truncate: more than there is": Refused(lambda b: b.cache.truncate("a", 41), ShapeError),
    "truncate: no whole number": Refused(lambda b: b.cache.truncate("a", 0.5), ConfigError),
    "free: no such sequence": Refused(lambda b: b.cache.free("x"), ConfigError),
    "can_append: no such sequence": Refused(lambda b: b.cache.can_append(["x"]), ConfigError),
    "can_append: more than a sequence": Refused(
        lambda b: b.cache.can_append(["a"], 61), ShapeError
    ),
    "swap_out: no such sequence": Refused(lambda b: b.cache.swap_out("x"), ConfigError),
    "swap_out: what is out": Refused(lambda b: b.cache.swap_out("out"), ConfigError),
    "swap_in: what is here": Refused(lambda b: b.cache.swap_in("a"), ConfigError),
    "length: no such sequence": Refused(lambda b: b.cache.length("x"), ConfigError),
    "dequantized: no such sequence": Refused(lambda b: b.cache.dequantized("x", 0), ConfigError),
    "dequantized: no such layer": Refused(lambda b: b.cache.dequantized("a", 9), ConfigError),
    "dequantized: what is out": Refused(lambda b: b.cache.dequantized("out", 0), ConfigError),
    "extend: no such sequence": Refused(lambda b: b.extend(["a", "x"]).__enter__(), ConfigError),
    "extend: what is out": Refused(lambda b: b.extend(["a", "out"]).__enter__(), ConfigError),
    "extend: twice": Refused(lambda b: b.extend(["a", "a"]).__enter__(), ConfigError),
    "extend: no list of names": Refused(lambda b: b.extend("ab").__enter__(), ConfigError),
    "extend: a negative count": Refused(
        lambda b: b.extend(["a", "b"], [1, -1]).__enter__(), ShapeError
    ),
    "extend: no whole counts": Refused(lambda b: b.extend(["a"], [0.5]).__enter__(), ConfigError),
    "extend: too few counts": Refused(lambda b: b.extend(["a", "b"], [1]).__enter__(), ShapeError),
    "extend: more tokens than places": Refused(
        lambda b: b.extend(["a", "b"], 31).__enter__(), ShapeError
    ),
    "extend: more than a sequence": Refused(lambda b: b.extend(["b"], 58).__enter__(), ShapeError),
    "extend: other numbers of tokens": Refused(
        lambda b: b.extend(["a", "b"], 2, [1, 2, 3]).__enter__(), ShapeError
    ),
    "extend: no token ids": Refused(lambda b: b.extend(["a"], 1, [0.5]).__enter__(), ConfigError),
    "append: no step": Refused(lambda b: b.append(0, *new_tokens(b, 3)), ConfigError),
    "attend: no step": Refused(lambda b: attend(b), ConfigError),
    "step: no step": Refused(lambda b: step(b), ConfigError),
}
PAGED_FULL: Table = {
    "allocate: no slot": Refused(lambda b: b.cache.allocate("x"), OutOfPagesError),
    "fork: no slot": Refused(lambda b: b.cache.fork("a", "x"), OutOfPagesError),
    "swap_in: no slot": Refused(lambda b: b.cache.swap_in("out"), OutOfPagesError),
    "extend: too few pages": Refused(
        lambda b: b.extend(["more 2", "more 1"], 30).__enter__(), OutOfPagesError
    ),
}


def attend(batch: Batch, layer: int = 0, *, rows: int = 2, heads: int = 4, **options: Any) -> Any:
    """Attend with one query of each sequence."""
    if isinstance(batch, PagedBatch):
        return batch.attend(layer, torch.ones(rows, heads, DIM), **options)
    q = torch.ones(rows, heads, LATENT), torch.ones(rows, heads, ROPE)
    return batch.attend(layer, *q, **{"sm_scale": 1.0, **options})


def step(
    batch: Batch,
    layer: int = 0,
    *,
    rows: int = 2,
    heads: int = 4,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """Append and attend."""
    new, axes = new_tokens(batch, 5), (rows, heads)
    if isinstance(batch, PagedBatch):
        return batch.step(layer, torch.ones(*axes, DIM, dtype=dtype), *new, **options)
    q = torch.ones(*axes, LATENT, dtype=dtype), torch.ones(*axes, ROPE, dtype=dtype)
    return batch.step(layer, *q, *new, **{"sm_scale": 1.0, **options})


def append(batch: Batch, count: int = 5, layer: int = 1, change: Any = None) -> None:
    k, v = new_tokens(batch, count)
    batch.append(layer, *((k, v) if change is None else change(k, v)))


# in the block of a step of five tokens, which were appended to layer 0 and not to layer 1
IN_STEP: Table = {
    "append: no such layer": Refused(lambda b: append(b, layer=9), ConfigError),
    "append: twice": Refused(lambda b: append(b, layer=0), ConfigError),
    "append: too few tokens": Refused(lambda b: append(b, 4), ShapeError),
    "append: more tokens than places": Refused(lambda b: append(b, 61), ShapeError),
    "append: no tensors": Refused(lambda b: append(b, change=lambda k, v: (1, v)), ConfigError),
    "append: an axis more": Refused(
        lambda b: append(b, change=lambda k, v: (k[None], v[None])), ShapeError
    ),
    "append: other widths": Refused(
        lambda b: append(b, change=lambda k, v: (k[..., :16], v)), ShapeError
    ),
    "append: other heads": Refused(
        lambda b: append(b, change=lambda k, v: (k.repeat(1, 3, 1), v.repeat(1, 3, 1))), ShapeError
    ),
    "append: fewer v": Refused(lambda b: append(b, change=lambda k, v: (k, v[:3])), ShapeError),
    "append: float64": Refused(
        lambda b: append(b, change=lambda k, v: (k.double(), v)), ConfigError
    ),
    "append: another device": Refused(
        lambda b: append(b, change=lambda k, v: (k, v.to("meta"))), (ConfigError, DeviceError)
    ),
    "attend: a layer without the tokens": Refused(lambda b: attend(b, 1), ConfigError),
    "attend: no such layer": Refused(lambda b: attend(b, 9), ConfigError),
    "attend: too few queries": Refused(lambda b: attend(b, rows=1), ShapeError),
    "attend: more queries than places": Refused(lambda b: attend(b, rows=4), ShapeError),
    "step: no such layer": Refused(lambda b: step(b, 9), ConfigError),
    "step: too few queries": Refused(lambda b: step(b, 1, rows=1), ShapeError),
    "step: more queries than places": Refused(lambda b: step(b, 1, rows=4), ShapeError),
    "step: float64 queries": Refused(lambda b: step(b, 1, dtype=torch.float64), ConfigError),
    "step: whole numbers": Refused(lambda b: step(b, 1, dtype=torch.int32), ConfigError),
    "extend: a step is open": Refused(lambda b: b.extend(["a"]).__enter__(), ConfigError),
    "allocate: a step is open": Refused(lambda b: b.cache.allocate("x"), ConfigError),
    "fork: a step is open": Refused(lambda b: b.cache.fork("a", "x"), ConfigError),
    "truncate: a step is open": Refused(lambda b: b.cache.truncate("a", 3), ConfigError),
    "free: a step is open": Refused(lambda b: b.cache.free("a"), ConfigError),
    "swap_out: a step is open": Refused(lambda b: b.cache.swap_out("a"), ConfigError),
    "swap_in: a step is open": Refused(lambda b: b.cache.swap_in("out"), ConfigError),
    **{
        f"{name}: {what}": Refused(partial(call, layer=layer, **options), error)
        for what, (options, error) in BAD_OPTIONS.items()
        for name, call, layer in (("attend", attend, 0), ("step", step, 1))
    },
}
IN_STEP_OF_HEADS: Table = {
    "attend: other query heads": Refused(lambda b: attend(b, heads=3), ShapeError),
    "step: other query heads": Refused(lambda b: step(b, 1, heads=3), ShapeError),
    "step: sinks of other heads": Refused(
        lambda b: step(b, 1, variant=AttentionVariant(sink_logits=torch.ones(3))), KVQuantError
    ),
    "step: no q_indptr": Refused(lambda b: step(b, 1, q_indptr=[0, 1]), ConfigError),
    "step: q_indptr of fewer": Refused(
        lambda b: step(b, 1, q_indptr=torch.zeros(1, dtype=torch.int32)), ShapeError
    ),
    **{
        f"step: q_indptr {starts}": Refused(
            partial(step, layer=1, rows=5, q_indptr=torch.tensor(starts, dtype=torch.int32)),
            (ShapeError, ConfigError),  # layers with a window refuse any of the caller's own
        )
        for starts in ([0, 3, 9], [0, 6, 5], [1, 3, 5])
    },
}


@contextmanager
def in_step(kind: type[Batch], **options: Any) -> Iterator[Batch]:
    batch = paged(kind, **options)
    with suppress(KeyboardInterrupt), batch.extend(["a", "b"], [2, 3]):
        append(batch, layer=0)
        yield batch
        raise KeyboardInterrupt  # the step is not to be completed


@contextmanager
def when_full(kind: type[Batch]) -> Iterator[Batch]:
    batch = paged(kind)
    full(batch)
    yield batch


HEADS_APPENDS = bad_appends(HEADS, DIM, DIM)
QUERY = torch.ones(BATCH, Q_HEADS, DIM)
OF_HEADS: Table = {
    **HEADS_APPENDS,
    **bad_steps(),
    **attends(QUERY),
    **REORDERS,
    **CROPS,
    **OTHERS,
}
OF_RANK: Table = {
    **HEADS_APPENDS,
    **bad_steps(rank=True),
    **REORDERS,
    **CROPS,
}
OF_LATENTS: Table = {
    **bad_appends(1, LATENT, ROPE),
    **bad_latent_steps(),
    **attends(torch.ones(BATCH, 16, LATENT), torch.ones(BATCH, 16, ROPE), sm_scale=1.0),
    **REORDERS,
    **CROPS,
    **OTHERS,
}


# the caches of models: two sequences of a small Llama, 9 and 4 tokens, or 9 of each


class Reader(NamedTuple):
    """A model, and a cache of its own."""

    model: Any
    cache: Any


@cache
def tiny_llama() -> Any:
    return pytest.importorskip("tiny_models").tiny_model("Llama")


def reader() -> Reader:
    model = tiny_llama()
    held = model.new_cache(2, 32, sink_len=2, recent_len=5)
    model.prefill(held, ids(2, 9), [9, 4])
    return Reader(model, held)


def ids(batch: int, count: int) -> torch.Tensor:
    return torch.arange(batch * count).reshape(batch, count)


def quantized() -> Reader:
    module = tiny_llama().model
    module.set_attn_implementation("kvquant")
    held = import_module("kvquant").QuantizedCache(module, sink_len=2, recent_len=5)
    with torch.no_grad():
        module(ids(2, 9), **held.argument, use_cache=True)
    held.crop(0)  # it counts what came when it is asked
    return Reader(module, held)


def reads(*tokens: Any, **options: Any) -> Callable[[Reader], object]:
    return lambda of: of.model.prefill(of.cache, *tokens, **{"append": True, **options})


def writes(count: Any = 3, batch: int = 2, **options: Any) -> Callable[[Reader], object]:
    return lambda of: of.model.generate(of.cache, torch.ones(batch, 256), count, **options)


OF_MODEL: Table = {
    "prefill: it holds tokens": Refused(reads(ids(2, 3), append=False), ConfigError),
    "prefill: no flag": Refused(reads(ids(2, 3), append=1), ConfigError),
    "prefill: no tensor": Refused(reads([[1], [2]]), ConfigError),
    "prefill: another batch": Refused(reads(ids(3, 3)), ShapeError),
    "prefill: no axis of tokens": Refused(reads(ids(2, 3)[0]), ShapeError),
    "prefill: no token ids": Refused(reads(ids(2, 3).float()), ConfigError),
    "prefill: beyond the vocabulary": Refused(reads(ids(2, 3) + 253), ConfigError),
    "prefill: too few lengths": Refused(reads(ids(2, 3), [3]), ShapeError),
    "prefill: a length of nothing": Refused(reads(ids(2, 3), [3, 0]), ShapeError),
    "prefill: no chunk": Refused(reads(ids(2, 3), chunk=0), ConfigError),
    "prefill: more than there is room": Refused(reads(ids(2, 24)), ShapeError),
    "step: another batch": Refused(lambda of: of.model.step(of.cache, ids(1, 3)[0]), ShapeError),
    "step: beyond the vocabulary": Refused(
        lambda of: of.model.step(of.cache, ids(1, 2)[0] + 255), ConfigError
    ),
    "generate: another batch": Refused(writes(batch=3), ShapeError),
    "generate: no tokens": Refused(writes(0), ConfigError),
    "generate: more than there is room": Refused(writes(25), ShapeError),
    "generate: an end beyond the vocabulary": Refused(writes(eos_token_id=256), ConfigError),
    "generate: no function": Refused(writes(choose=1), ConfigError),
}
OF_TRANSFORMERS: Table = {
    "crop: no negative number": Refused(lambda of: of.cache.crop(1), ConfigError),
    "reorder: no such place": Refused(
        lambda of: of.cache.reorder_cache(torch.tensor([0, 2])), ShapeError
    ),
    "reorder: too few places": Refused(
        lambda of: of.cache.reorder_cache(torch.tensor([0])), ShapeError
    ),
    "select: no such place": Refused(
        lambda of: of.cache.batch_select_indices(torch.tensor([2])), ShapeError
    ),
    "select: nothing": Refused(
        lambda of: of.cache.batch_select_indices(torch.tensor([False, False])), ShapeError
    ),
    "repeat: no times": Refused(lambda of: of.cache.batch_repeat_interleave(0), ShapeError),
    "its keys": Refused(lambda of: of.cache.layers[0].keys, UnsupportedError),
    "another batch": Refused(
        lambda of: of.model(ids(3, 9), **of.cache.argument, use_cache=True), ShapeError
    ),
    "generate: a text that ends before": Refused(
        lambda of: of.model.generate(ids(2, 4), **of.cache.argument, max_new_tokens=2), ConfigError
    ),
}
KINDS: dict[str, tuple[Callable[[], Any], Table]] = {
    "KVCache": (filled_contiguous, OF_HEADS),
    "empty KVCache": (contiguous, HEADS_APPENDS),
    "KVCache with windows": (partial(filled_contiguous, windows=[None, 6]), OF_HEADS),
    "LatentKVCache": (filled_latents, OF_LATENTS),
    "ContextParallelCache": (filled_spread, OF_RANK),
    "empty ContextParallelCache": (spread, OF_RANK),
    "PagedKVCache": (partial(paged, PagedBatch), PAGED),
    "PagedKVCache with windows": (partial(paged, PagedBatch, windows=[None, 20]), PAGED),
    "LatentPagedKVCache": (partial(paged, LatentPagedBatch), PAGED),
    "full PagedKVCache": (partial(when_full, PagedBatch), PAGED_FULL),
    "step of a PagedBatch": (partial(in_step, PagedBatch), IN_STEP | IN_STEP_OF_HEADS),
    "step of a LatentPagedBatch": (partial(in_step, LatentPagedBatch), IN_STEP),
    "CachedModel": (reader, OF_MODEL),
    "QuantizedCache": (quantized, OF_TRANSFORMERS),
}
OF_HF = {"CachedModel", "QuantizedCache"}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """torch.distributed, for ContextParallelCache."""
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[pytest.mark.extra("hf")] * (kind in OF_HF))
        for kind, (_, table) in KINDS.items()
        for name in table
    ],
)
def test_a_refused_call_changes_nothing(kind: str, name: str) -> None:
    make, table = KINDS[kind]
    made = make()
    with made if hasattr(made, "__enter__") else nullcontext(made) as held:
        before = snapshot(held, KNOWN)
        with pytest.raises(table[name].error):
            table[name].call(held)
        assert not changes(before, snapshot(held, KNOWN))
