"""What calls of each public cache refuse: each a clear error, and the whole state is as before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from refusals import refused
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
    Rope,
    debug,
    load_sequences,
    save_cache,
    save_sequences,
)

LAYERS, BATCH, HEADS, Q_HEADS, DIM, ROOM = 2, 3, 2, 4, 64, 40
LATENT, ROPE = 256, 32


# what a refused call may move: counts of calls that may have changed something, what was made to be
# found again, what an interrupt would undo, how many heads queries had, and what transformers notes
KNOWN = {"changes", "_segments", "_slots", "step_masks", "_growing", "_moving", "_ratio"}
KNOWN |= {"_is_user_defined"}


Row = tuple[Callable[[Any], object], str]  # a call of the object; the error, and words that it has
Table = dict[str, Row]


def table(*rows: Row) -> Table:
    return {f"{i}: {text}": (call, text) for i, (call, text) in enumerate(rows)}


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
def bad_appends(heads: int, k_dim: int, v_dim: int, names: str = "k v", must: str = "") -> Table:
    def k(count: int, batch: int = BATCH, heads: int = heads, dim: int = k_dim) -> torch.Tensor:
        return rows(count, batch=batch, heads=heads, dim=dim)

    def v(count: int, batch: int = BATCH, heads: int = heads, dim: int = v_dim) -> torch.Tensor:
        return rows(count, batch=batch, heads=heads, dim=dim)

    def odd(value: float) -> torch.Tensor:
        return bad(value, BATCH, heads, 4, k_dim)

    x, y = names.split()
    k_must, v_must = (must and f": it must be [3, {heads}, {must}, {n}]" for n in (k_dim, v_dim))
    no_layer, taken = "does not exist: the cache has layers 0 to 1", "use float32, bfloat16 or fl"
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((9, k(1), v(1)), f"ConfigError: layer 9 {no_layer}"),
        ((-1, k(1), v(1)), f"ConfigError: layer -1 {no_layer}"),
        (("0", k(1), v(1)), f"ConfigError: layer '0' {no_layer}"),
        ((0, None, v(1)), f"ConfigError: {x} is of type NoneType: give a tensor"),
        ((0, [1], v(1)), f"ConfigError: {x} is of type list: give a tensor"),
        ((0, k(1)[:, :, 0], v(1)[:, :, 0]), f"ShapeError: {x} is [3, {heads}, {k_dim}]{k_must}"),
        ((0, k(4, 2), v(4, 2)), f"ShapeError: {x} is [2, {heads}, 4, {k_dim}]{k_must}"),
        ((0, k(4, heads=5), v(4, heads=5)), f"ShapeError: {x} is [3, 5, 4, {k_dim}]{k_must}"),
        ((0, k(4, dim=48), v(4)), f"ShapeError: {x} is [3, {heads}, 4, 48]{k_must}"),
        ((0, k(1), v(1, dim=48)), f"ShapeError: {y} is [3, {heads}, 1, 48]{v_must}"),
        ((0, k(4), v(4, dim=48)), f"ShapeError: {y} is [3, {heads}, 4, 48]{v_must}"),
        ((0, k(4), v(3)), f"ShapeError: {x} has 4 new tokens, {y} 3" if must else "ShapeError"),
        ((0, k(4).double(), v(4).double()), f"ConfigError: {x} is torch.float64: {taken}"),
        ((0, k(1), v(1).double()), f"ConfigError: {y} is torch.float64: {taken}"),
        ((0, k(4).int(), v(4)), f"ConfigError: {x} is torch.int32: {taken}"),
        ((0, k(4), v(4).int()), f"ConfigError: {y} is torch.int32: {taken}"),
        ((0, k(1), v(1).to("meta")), f"DeviceError: the cache is on cpu, {y} on meta"),
        ((0, k(4), v(4).to("meta")), f"DeviceError: the cache is on cpu, {y} on meta"),
        ((0, odd(math.nan), v(4)), "NonFiniteError: values up to 65504; look for NaN and Inf"),
        ((0, k(1), bad(math.nan, BATCH, heads, 1, v_dim)), f"NonFiniteError: {y}[2, {heads - 1}, "),
        ((0, odd(-math.inf), v(4)), f"NonFiniteError: {x}[2, {heads - 1}, 3, {k_dim - 1}] is -inf"),
        ((0, odd(7e4), v(4)), "NonFiniteError: 70000.0"),
        ((0, odd(7e4), v(4)), "NonFiniteError: to 65504; give the format 'bf16', for 16-bit rows"),
        ((0, odd(65536.0).bfloat16(), v(4)), "NonFiniteError: is 65536.0"),
        ((0, odd(65500.0), v(4)), "NonFiniteError: ; nothing was appended"),  # 65536 in bf16
        ((0, k(ROOM + 1), v(ROOM + 1)), "ShapeError: sequence 0 would grow to"),
        ((0, k(41), v(41), [1, 1, 41]), "ShapeError: sequence 2 would grow to"),
        ((0, k(41), v(41), [1, 1, 41]), "ShapeError: max_seq_len is 40: crop it, or make a larger"),
        ((0, k(4), v(4), [1]), "ShapeError: [1]: give ["),
        ((0, k(4), v(4), [1, -1, 1]), "ShapeError: new_lens "),
        ((0, k(4), v(4), [1, 5, 1]), "ShapeError: [1, 5, 1]: give ["),
        ((0, k(4), v(4), [1, 5, 1]), "ShapeError: ] of 0 to 4"),
        ((0, k(4), v(4), [1.5, 1, 1]), "ConfigError: new_lens is torch.float32: use whole numbers"),
    ]
    return table(*((calls("append", *given), text) for given, text in cases))


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"backend": "tpu"}, "ConfigError: backend 'tpu' does not exist: use cpu, cuda or reference"),
    ({"backend": "cuda"}, "DeviceError: backend 'cuda' takes CUDA tensors, not cpu"),
    ({"sm_scale": math.nan}, "ConfigError: sm_scale is nan: use a finite number"),
    ({"return_lse": 1}, "ConfigError: return_lse is 1: use True or False"),
    ({"num_splits": 0}, "ConfigError: num_splits 0 is not possible: use a whole number from 1"),
]
# queries and keys of another order, and what to do
ORDERS = [
    ((3, 4, 64), (3, 1, 2, 64), "the heads before the tokens: give k.transpose(1, 2)"),
    ((3, 4, 64), (3, 2, 64), "new_tokens, 64]: give k.unsqueeze(2)"),
    ((3, 5, 4, 64), (3, 5, 2, 64), "the heads before the tokens: give k.transpose(1, 2)"),
    ((3, 4, 5, 64), (3, 2, 5, 64), "Tokens come before heads in q: give q.transpose(1, 2)"),
    ((3, 2, 5, 64), (3, 2, 5, 64), "Tokens come before heads in q: give q.transpose(1, 2)"),
    ((3, 5, 4, 64), (3, 2, 6, 64), "k is [3, 2, 6, 64], of 6 new tokens, and q [3, 5, 4, 64] has"),
]


def bad_steps(*, rank: bool = False) -> Table:
    """What step of keys and values refuses."""
    q, k = torch.ones(BATCH, Q_HEADS, DIM), rows(1)
    found: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((9, q, k, k), {}, "ConfigError: layer 9 does not exist"),
        ((0, q[:, :3], k, k), {}, "ShapeError: num_q_heads a multiple of 2, or [3, new_tokens"),
        ((0, q[:2], k, k), {}, "ShapeError: q is [2, 4, 64]: it must be [3, num_q_heads, 64]"),
        ((0, q[..., :48], k, k), {}, "ShapeError: q is [3, 4, 48]: it must be [3, num_q_heads"),
        ((0, q.double(), k, k), {}, "ConfigError: q is torch.float64: use float32, bfloat16 or fl"),
        ((0, q.long(), k, k), {}, "ConfigError: q is torch.int64"),
        ((0, q, rows(2), rows(2)), {}, "ShapeError: q [3, 4, 64] has 1 of each sequ"),
        ((0, q, k, bad(math.nan, BATCH, HEADS, 1, DIM)), {}, "NonFiniteError: v[2, 1, 0, 63] is"),
    ]
    for variant, text in (
        (AttentionVariant(sink_logits=torch.ones(3)), "ShapeError: sink_logits is [3]: it must be"),
        (AttentionVariant(soft_cap=1e5), "ConfigError: soft_cap"),
        (AttentionVariant(alibi_slopes=torch.full((4,), math.nan)), "ConfigError: alibi_slopes"),
        (AttentionVariant(window=3), "UnsupportedError: a variant with window needs positions"),
    ):
        if rank == (variant.window is not None) or variant.sink_logits is not None:
            found.append(((0, q, k, k), {"variant": variant}, text))
    for options, text in BAD_OPTIONS:
        if not (rank and {"return_lse", "num_splits"} & {*options}):
            found.append(((0, q, k, k), options, text))
    if not rank:
        for of_q, of_k, text in ORDERS:
            given = 0, torch.ones(of_q), torch.ones(of_k), torch.ones(of_k)
            found.append((given, {}, f"ShapeError: {text}"))
    return table(*((calls("step", *a, **o), text) for a, o, text in found))


def bad_latent_steps() -> Table:
    q, rope = torch.ones(BATCH, 16, LATENT), torch.ones(BATCH, 16, ROPE)
    new = rows(1, heads=1, dim=LATENT), rows(1, heads=1, dim=ROPE)
    spoiled = new[0], bad(math.nan, BATCH, 1, 1, ROPE)
    soft: dict[str, Any] = {"variant": AttentionVariant(soft_cap=2.0)}
    found: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((0, q, rope, *new), {"sm_scale": None}, "ConfigError: sm_scale is None: give the model's"),
        ((0, q[..., :48], rope, *new), {}, "ShapeError: q is [3, 16, 48]: it must be [3, num_q_h"),
        ((0, q[:2], rope[:2], *new), {}, "ShapeError: q is [2, 16, 256]: it must be [3, num_q_he"),
        ((0, q, rope[:2], *new), {}, "ShapeError: q_latent is [3, 16, 256] and q_rope [2, 16, 32]"),
        ((0, q, rope[:, :5], *new), {}, "ShapeError: q_rope [3, 5, 32]: they must be"),
        ((0, q, None, *new), {}, "ConfigError: q_rope is of type NoneType"),
        ((0, q, rope, *new), soft, "UnsupportedError: latent rows have none, leave it out"),
        ((0, q, rope, *spoiled), {}, "NonFiniteError: rope[2, 0, 0, 31] is nan"),
        *(((0, q, rope, *new), options, text) for options, text in BAD_OPTIONS),
    ]
    return table(*((calls("step", *a, **{"sm_scale": 1.0, **o}), text) for a, o, text in found))


PLACES = "give places from 0 to 2, one or more"
REORDERS = [
    (calls("reorder", [0, 1, 3]), f"ShapeError: index is [0, 1, 3]: {PLACES}"),
    (calls("reorder", [0, 1, -1]), f"ShapeError: index is [0, 1, -1]: {PLACES}"),
    (calls("reorder", []), f"ShapeError: {PLACES}"),
    (calls("reorder", [[0, 1, 2]]), "ShapeError: index"),
    (calls("reorder", 1), "ShapeError: index"),
    (calls("reorder", [0, 1]), "ShapeError: index has 2 places, the batch 3"),
    (calls("reorder", [0.5, 1, 2]), "ConfigError: index is torch.float32: use whole numbers"),
    (calls("reorder", torch.arange(3.0)), "ConfigError: index is torch.float32: use whole numbers"),
    (calls("reorder", [10**30, 0, 1]), "ConfigError: use whole numbers"),
]
LENGTHS = "give lengths from 0 to the present ones"
CROPS = [
    *(
        (calls("crop", lens), f"ShapeError: {LENGTHS}")
        for lens in ([9, 99, 9], [1, -1, 1], -1, [1], [[10, 9, 0]])
    ),
    *(
        (calls("crop", lens), "ConfigError: use whole numbers")
        for lens in ([0.5, 1, 1], True, 1.0, None, "3", torch.ones(3), torch.ones(3).bool())
    ),
]


OTHERS = [
    (calls("select", [3]), f"ShapeError: index is [3]: {PLACES}"),
    (calls("select", [-1]), f"ShapeError: index is [-1]: {PLACES}"),
    (calls("select", []), f"ShapeError: index is []: {PLACES}"),
    *(
        (calls("fork", index), f"ShapeError: {PLACES}")
        for index in ([], 5, [-1], [0, 1, 3], [[0, 1, 2]], 1)
    ),
    *(
        (calls("fork", index), "ConfigError: use whole numbers")
        for index in ("0", [True, False], [0, None], torch.tensor([True, False]))
    ),
    *((calls("repeat", n), f"ConfigError: times {n!r} is not possible") for n in (0, -1, 1.5, "2")),
    (calls("repeat", 2**31 - 1), "ConfigError: more than there is: use a smaller number of times"),
    (calls("grow", ROOM - 1), "ConfigError: has room for 40 tokens: it can only grow"),
    (calls("grow", 2**40), "ConfigError: max_seq_len 1099511627776 is not possible"),
    (lambda cache: cache.attempt(-1).__enter__(), "ConfigError: new_tokens -1 is not possible"),
    (calls("dequantized", 0, torch.int8), "ConfigError: dtype torch.int8 is not supported: use fl"),
    (calls("segments", 9), "ConfigError: layer 9 does not exist"),
    (calls("crop", -(10**30)), f"ShapeError: {LENGTHS}"),
]


def attends(*q: torch.Tensor, **options: Any) -> Table:
    several = [x[:, None] for x in q]
    found = [
        (calls("attend", 9, *q, **options), "ConfigError: layer 9 does not exist"),
        (calls("attend", 0, *(x[:2] for x in q), **options), "ShapeError: the batch must be the s"),
        (calls("attend", 0, *(x[0] for x in q), **options), "ShapeError: be [batch, num_"),
        (calls("attend", 0, *several, [1, 1, 1], **options), "ConfigError: q_lens is"),
        (calls("attend", 0, *q, in_step="no", **options), "ConfigError: in_step is 'no'"),
        *((calls("attend", 0, *q, **options | others), text) for others, text in BAD_OPTIONS),
    ]
    if len(q) > 1:
        soft = AttentionVariant(soft_cap=30.0)
        found += [
            (calls("attend", 0, q[0]), "ConfigError: q_rope is of type NoneType"),
            (calls("attend", 0, *q), "ConfigError: sm_scale is None: give the model's"),
            (calls("attend", 0, *q, variant=soft, **options), "UnsupportedError: have none"),
        ]
    return table(*found)


def contiguous(**options: Any) -> KVCache:
    return KVCache(LAYERS, BATCH, HEADS, DIM, ROOM, sink_len=2, recent_len=5, **options)


def latents() -> LatentKVCache:
    return LatentKVCache(
        LAYERS, BATCH, ROOM, latent_dim=LATENT, rope_dim=ROPE, sink_len=2, recent_len=5
    )


def spread() -> ContextParallelCache:
    return ContextParallelCache(contiguous(), block_len=4)


def filled(cache: Any) -> Any:
    """The cache with 12, 4 and 9 tokens."""
    heads, dims = (1, (LATENT, ROPE)) if isinstance(cache, LatentKVCache) else (HEADS, (DIM, DIM))
    for layer in range(LAYERS):
        cache.append(layer, *(rows(12, heads=heads, dim=dim) for dim in dims), [12, 4, 9])
    return cache


# the paged caches: pages of 16 tokens, of which two sequences share some; one that is swapped out,
# pages of one that has ended, and one for which pages are reserved
PAGE, SLOTS, MOST = 16, 5, 100
Batch = PagedBatch | LatentPagedBatch
SIZES: dict[str, Any] = {"max_num_seqs": SLOTS, "max_seq_len": MOST, "page_size": PAGE}
SIZES |= {"sink_len": 3, "recent_len": 5}


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


KV: Any = KVCache(1, 1, 1, DIM, 8)
ODD: Any = "no"
NONE, OUT = "ConfigError: no sequence 'x'", "ConfigError: sequence 'out' is swapped out: swap it in"
NOT_ID = "ConfigError: cannot be the id of a new sequence"
INTEGERS = "ConfigError: tokens must be int"
NO_TEXT = "ConfigError: give a string, or None for no namespace"
NAMESPACES: list[Any] = [7, True, b"one", ("one",), 1.5, [], [*range(60)]]
PAGED: Table = table(
    (lambda b: b.cache.allocate("a"), "ConfigError: sequence 'a' exists: free it or use another"),
    (lambda b: b.cache.allocate("out"), NOT_ID),
    (lambda b: b.cache.allocate(["x"]), NOT_ID),
    (lambda b: b.cache.allocate(("x",)), "ConfigError: give a string or a whole number"),
    *((lambda b, t=t: b.cache.allocate("x", t), INTEGERS) for t in ([0.5], 5, "tokens")),
    (lambda b: b.cache.allocate("x", room=-1), "ConfigError: room -1 is not possible"),
    (lambda b: b.cache.allocate("x", room=MOST + 1), "ShapeError: room for 101 tokens"),
    (
        lambda b: b.cache.allocate("x", [*range(1000, 1040)], room=MOST),
        "OutOfPagesError: 'x' needs 5 more pages (1 pages of its prefix are there, 1 of these am",
    ),
    *((lambda b, t=t: b.cache.match_prefix(t), INTEGERS) for t in (["x"], [0.5, 1])),
    *((lambda b, n=n: b.cache.allocate("x", [1], namespace=n), NO_TEXT) for n in NAMESPACES),
    *((lambda b, n=n: b.cache.match_prefix([1], namespace=n), NO_TEXT) for n in NAMESPACES),
    (lambda b: b.cache.fork("x", "y"), NONE),
    (lambda b: b.cache.fork("a", "b"), "ConfigError: sequence 'b' exists"),
    (lambda b: b.cache.fork("a", "a"), "ConfigError: sequence 'a' exists"),
    (lambda b: b.cache.fork("out", "y"), OUT),
    (lambda b: b.cache.truncate("x", 0), NONE),
    (lambda b: b.cache.truncate("a", -1), "ShapeError: has 40 tokens: it cannot be truncated to"),
    (lambda b: b.cache.truncate("a", 41), "ShapeError: has 40 tokens: it cannot be truncated to"),
    *(
        (lambda b, n=n: b.cache.truncate("a", n), f"ConfigError: length {n!r} is not possible: use")
        for n in (0.5, 1.5, "1", None, True)
    ),
    (lambda b: b.cache.free("x"), NONE),
    (lambda b: b.cache.can_append(["x"]), NONE),
    (lambda b: b.cache.can_append(["a"], 61), "ShapeError: 'a' would grow to 101 tokens, max_seq_"),
    (lambda b: b.cache.can_append("a"), "ConfigError: ids is the text 'a': give a list of ids"),
    (lambda b: b.cache.can_append(None), "ConfigError: ids is None: give a list of ids"),
    (lambda b: b.cache.swap_out("x"), NONE),
    (lambda b: b.cache.swap_out("out"), OUT),
    (lambda b: b.cache.truncate("out", 3), OUT),
    (lambda b: b.cache.can_append(["out"]), OUT),
    (lambda b: b.cache.namespace("x"), NONE),
    (lambda b: b.cache.swap_in("a"), "ConfigError: sequence 'a' is not swapped out"),
    (lambda b: b.cache.length("x"), NONE),
    (lambda b: b.cache.dequantized("x", 0), NONE),
    (lambda b: b.cache.dequantized("a", 9), "ConfigError: layer 9 does not exist"),
    (lambda b: b.cache.dequantized("a", None), "ConfigError: layer None does not exist"),
    (lambda b: b.cache.dequantized("a", 0, torch.int32), "ConfigError: dtype torch.int32 is not"),
    (lambda b: b.cache.dequantized("out", 0), OUT),
    *(
        (lambda b, use=use: use(b.cache, ["a"]), "ConfigError: sequence ['a']")
        for use in (
            lambda cache, x: cache.length(x),
            lambda cache, x: cache.free(x),
            lambda cache, x: cache.truncate(x, 0),
            lambda cache, x: cache.fork(x, "d"),
            lambda cache, x: cache.swap_out(x),
            lambda cache, x: cache.swap_in(x),
            lambda cache, x: cache.dequantized(x, 0),
            lambda cache, x: cache.can_append([x]),
            lambda cache, x: save_sequences(cache, [x], "x.safetensors"),
        )
    ),
    (lambda b: b.extend(["a", "x"]).__enter__(), NONE),
    (lambda b: b.extend(["a", "out"]).__enter__(), OUT),
    (lambda b: b.extend(["a", "a"]).__enter__(), "ConfigError: ['a', 'a'] name one twice: name"),
    (lambda b: b.extend("ab").__enter__(), "ConfigError: ids is the text 'ab': give a list of ids"),
    (lambda b: b.extend(3).__enter__(), "ConfigError: ids is 3: give a list of ids"),
    (lambda b: b.extend(["a", "b"], [1, -1]).__enter__(), "ShapeError: give one >= 0 for each"),
    (lambda b: b.extend(["a"], -1).__enter__(), "ShapeError: give one >= 0 for each"),
    (lambda b: b.extend(["a", "b"], [1]).__enter__(), "ShapeError: counts [1] for 2 ids: give one"),
    *(
        (lambda b, use=use, n=n: use(b, n), "ConfigError: must be whole numbers")
        for n in ([0.5], None, 2.0, "x", ["x"], torch.tensor(1.5), True)
        for use in (
            lambda b, n: b.extend(["a"], n).__enter__(),
            lambda b, n: b.cache.can_append(["a"], n),
        )
    ),
    (lambda b: b.extend(list("abcd")).__enter__(), "ShapeError: 4 sequences and 4 tokens: the bat"),
    (lambda b: b.extend(["a", "b"], 31).__enter__(), "ShapeError: the batch has places for 3 and"),
    (lambda b: b.extend(["b"], 58).__enter__(), "ShapeError: 'b' would grow to 101 tokens"),
    (lambda b: b.extend(["a", "b"], 2, [1, 2, 3]).__enter__(), "ShapeError: 3 tokens for counts"),
    (lambda b: b.extend(["a"], 1, [0.5]).__enter__(), INTEGERS),
    (lambda b: b.extend(["a"], 1, ["x"]).__enter__(), INTEGERS),
    *(
        (use, "ConfigError: no step of this batch is open: append and attend inside `with batch.ex")
        for use in (lambda b: append(b, 3, 0), lambda b: attend(b), lambda b: step(b))
    ),
    (lambda b: save_sequences(b.cache, "a", "x.safetensors"), "ConfigError: the text 'a'"),
    (lambda b: save_sequences(KV, ["a"], "x.safetensors"), "ConfigError: save_cache saves a"),
    (lambda b: save_cache(b.cache, "x.safetensors"), "ConfigError: save_sequences saves those"),
    (lambda b: load_sequences(KV, "x.safetensors"), "ConfigError: load_cache reads a KVCache"),
    (lambda b: load_sequences(b.cache, "x", ids=ODD), "ConfigError: a dict of new ids by saved"),
    (lambda b: type(b)(KV, 1), "ConfigError: PagedKVCache"),
    (lambda b: type(b)(b.cache, 1, shared_prefix=ODD), "ConfigError: shared_prefix is 'no': use"),
    (lambda b: type(b)(b.cache, 0), "ConfigError: max_batch 0"),
    (lambda b: type(b)(b.cache, 1, 0), "ConfigError: max_tokens 0"),
)
NO_SLOT = "OutOfPagesError: 1 sequence slots are needed, but 0 of 5 are free"
PAGED_FULL: Table = table(
    (lambda b: b.cache.allocate("x"), NO_SLOT),
    (lambda b: b.cache.fork("a", "x"), NO_SLOT),
    (lambda b: b.cache.swap_in("out"), NO_SLOT),
    (
        lambda b: b.extend(["more 2", "more 1"], 30).__enter__(),
        "OutOfPagesError: 'more 2', 'more 1' need 4 more pages for 44 tokens, but 2 of 8 are free",
    ),
)


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


def append(batch: Batch, count: int = 5, layer: Any = 1, change: Any = None) -> None:
    k, v = new_tokens(batch, count)
    batch.append(layer, *((k, v) if change is None else change(k, v)))


def angles(num_tokens: int, rotary_dim: int) -> Rope:
    return Rope(*torch.zeros(2, num_tokens, rotary_dim // 2))


# in the block of a step of five tokens, which were appended to layer 0 and not to layer 1
IN_STEP: Table = table(
    (lambda b: append(b, layer=9), "ConfigError: layer 9 does not exist: the cache has layers 0"),
    (lambda b: append(b, layer="0"), "ConfigError: layer '0' does not exist"),
    (lambda b: append(b, layer=0), "ConfigError: layer 0 was appended to in this step: give all"),
    (lambda b: append(b, 4), "ShapeError: has 4 tokens, the step 5 and the batch places for 60"),
    (lambda b: append(b, 61), "ShapeError: has 61 tokens, the step 5"),
    *(
        (lambda b, change=change: append(b, change=change), text)
        for change, text in (
            (lambda k, v: (1, v), "ConfigError: is of type int: give a tensor"),
            (lambda k, v: ([1], v), "ConfigError: is of type list: give a tensor"),
            (lambda k, v: (k.numpy(), v), "ConfigError: is of type ndarray"),
            (lambda k, v: (k, None), "ConfigError: is of type NoneType: give a tensor"),
            (lambda k, v: (k[None], v[None]), "ShapeError: .transpose(1, 2).flatten(0, 1)"),
            (lambda k, v: (k[:, 0], v[:, 0]), "ShapeError: it must be [num_tokens"),
            (lambda k, v: (k[..., :16], v), "ShapeError: , 16]: rows of the cache have"),
            (lambda k, v: (k, v[..., :16]), "ShapeError: , 16]: rows of the cache have"),
            (lambda k, v: (k.repeat(1, 3, 1), v.repeat(1, 3, 1)), "ShapeError: KV heads, "),
            (lambda k, v: (k, v[:3]), "ShapeError: both must be [num_tokens, num_kv_heads"),
            (lambda k, v: (k, v.flatten(1)), "ShapeError: both must be [num_tokens"),
            (lambda k, v: (k.double(), v), "ConfigError: use float32, bfloat16 or float16"),
            (lambda k, v: (k, v.half()), "ConfigError: is torch.float16: use float32"),
            (lambda k, v: (torch.cat([k, k], -1)[..., ::2], v), "ShapeError: row must"),
            (lambda k, v: (k, v.to("meta")), "DeviceError: is on cpu, "),
        )
    ),
    (lambda b: attend(b, 1), "ConfigError: layer 1 was not appended to in this step: append its"),
    (lambda b: attend(b, 9), "ConfigError: layer 9 does not exist"),
    (lambda b: attend(b, rows=1), "ShapeError: has 1 rows, the step 2 sequences and the batch pl"),
    (lambda b: attend(b, rows=4), "ShapeError: has 4 rows, the step 2 sequences"),
    (lambda b: step(b, 9), "ConfigError: layer 9 does not exist"),
    (lambda b: step(b, 1, rows=1), "ShapeError: has 1 rows, the step 2 sequences"),
    (lambda b: step(b, 1, rows=4), "ShapeError: has 4 rows, the step 2 sequences"),
    (lambda b: step(b, 1, dtype=torch.float64), "ConfigError: torch.float64"),
    (lambda b: step(b, 1, dtype=torch.int32), "ConfigError: torch.int32"),
    *(
        (use, "ConfigError: a step is open, leave its block first: `with batch.extend(...)`")
        for use in (
            lambda b: b.extend(["a"]).__enter__(),
            lambda b: b.cache.allocate("x"),
            lambda b: b.cache.fork("a", "x"),
            lambda b: b.cache.truncate("a", 3),
            lambda b: b.cache.free("a"),
            lambda b: b.cache.swap_out("a"),
            lambda b: b.cache.swap_in("out"),
        )
    ),
    *(
        (partial(call, layer=layer, **options), text)
        for options, text in BAD_OPTIONS
        for call, layer in ((attend, 0), (step, 1))
    ),
)
SINKS = AttentionVariant(sink_logits=torch.ones(3))
IN_STEP_OF_HEADS: Table = table(
    (lambda b: attend(b, heads=3), "ShapeError: num_q_heads a multiple of num_kv_heads"),
    (lambda b: step(b, 1, heads=3), "ShapeError: num_q_heads a multiple of num_kv_heads"),
    (lambda b: b.attend(0, [1]), "ConfigError: q is of type list: give a tensor"),
    (lambda b: b.attend(0, torch.zeros(DIM)), "ShapeError: q is [64]: it must be [batch"),
    (lambda b: b.attend(0, torch.zeros(2, 4, 4, 1, DIM)), "ShapeError: or [batch, q_len, num_q_he"),
    (lambda b: step(b, 1, variant=SINKS), "ShapeError: sink_logits is [3]: it must be [4]"),
    (lambda b: step(b, 1, q_indptr=[0, 1]), "ConfigError: q_indptr is of type list: give a tensor"),
    (
        lambda b: step(b, 1, q_indptr=torch.zeros(1, dtype=torch.int32)),
        "ShapeError: q_indptr is [batch + 1] [1], the step has 2 sequences and the batch places f",
    ),
    *(
        (
            partial(step, layer=1, rows=5, q_indptr=torch.tensor(starts, dtype=torch.int32)),
            f"ShapeError: q_indptr {text}",
        )
        for starts, text in (
            ([0, 3, 9], "ends with 9, and q has 5 rows: it must end with no more"),
            ([0, 6, 5], "falls from 6 to 5 at sequence 1"),
            ([1, 3, 5], "begins with 1: it must begin with 0"),
        )
    ),
    *(
        (lambda b, rope=rope: b.append(1, *new_tokens(b, 5), rope=rope), text)
        for rope, text in (
            (angles(5, 8)[:2], "ConfigError: rope is of type tuple: give Rope"),
            (angles(4, 8), "ShapeError: rope.cos is [4, 4]"),
            (angles(5, 66), "ShapeError: rotary_dim at most the head_dim 64 of K"),
        )
    ),
)
NO_RAGGED = "UnsupportedError: latent rows have no ragged queries"
RAGGED: Any = {"sm_scale": 1.0, "q_indptr": torch.zeros(3, dtype=torch.int32)}
IN_STEP_OF_LATENTS: Table = table(
    *(
        (lambda b, change=change: b.attend(0, *change(*latent_queries()), sm_scale=1.0), text)
        for change, text in (
            (lambda q, rope: (q, rope[:, :3]), "ShapeError: q_rope [2, 3, 32]: they must be"),
            (lambda q, rope: (q[:0], rope[:0]), "ShapeError: q_latent has 0 rows, the step 2 seq"),
            (lambda q, rope: (q[0], rope[0]), "ShapeError: q_latent is [4, 256]: it must be"),
            (lambda q, rope: (q.half(), rope), "ConfigError: q_rope is torch.float32: use float16"),
        )
    ),
    (lambda b: b.attend(0, *latent_queries(), **RAGGED), NO_RAGGED),
    (lambda b: b.step(1, *latent_queries(), *new_tokens(b, 5), **RAGGED), NO_RAGGED),
)


def latent_queries() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 4, LATENT), torch.ones(2, 4, ROPE)


@contextmanager
def in_step(kind: type[Batch], reads: bool = False) -> Iterator[Batch]:
    batch = paged(kind)
    in_debug_mode = mock.patch.object(debug, "enabled", reads)
    with suppress(KeyboardInterrupt), in_debug_mode, batch.extend(["a", "b"], [2, 3]):
        append(batch, layer=0)
        yield batch
        raise KeyboardInterrupt  # the step is not to be completed


@contextmanager
def when_full(kind: type[Batch]) -> Iterator[Batch]:
    batch = paged(kind)
    full(batch)
    yield batch


HEADS_APPENDS = bad_appends(HEADS, DIM, DIM, must="new_tokens")
RANK_APPENDS = bad_appends(HEADS, DIM, DIM)
LATENT_APPENDS = bad_appends(1, LATENT, ROPE, "latent rope", "new_tokens")
QUERY = torch.ones(BATCH, Q_HEADS, DIM)
QUERIES = torch.ones(BATCH, 16, LATENT), torch.ones(BATCH, 16, ROPE)
MOVES = table(*REORDERS, *CROPS, *OTHERS)
RANK_MOVES = table(*REORDERS, *CROPS)
OF_HEADS = {"append": HEADS_APPENDS, "step": bad_steps(), "attend": attends(QUERY), "": MOVES}
OF_RANK = {"append": RANK_APPENDS, "step": bad_steps(rank=True), "": RANK_MOVES}
OF_LATENTS = {"append": LATENT_APPENDS, "step": bad_latent_steps(), "": MOVES}
OF_LATENTS["attend"] = attends(*QUERIES, sm_scale=1.0)


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


def writes(count: Any = 3, batch: Any = 2, **options: Any) -> Callable[[Reader], object]:
    return lambda of: of.model.generate(of.cache, torch.ones(batch, 256), count, **options)


def of_transformers(of: Reader) -> Any:
    return import_module("kvquant").QuantizedCache(of.model.model.config)


INT64, OUTSIDE = "give token ids as int64", "is not in the vocabulary"
NO_IDS: list[tuple[Any, str]] = [
    (torch.ones(2, 4), f"torch.float32: {INT64}"),
    (torch.ones(2, 4, dtype=torch.bool), INT64),
    (ids(2, 2) + 253, f"token 256 {OUTSIDE}"),
    (ids(2, 2) - 1, f"token -1 {OUTSIDE}"),
    ([[1, 2], [3, 4]], "tokens are list: give a tensor"),
]
OF_MODEL: Table = table(
    *(
        (reads(ids(2, 20), lens), "ConfigError: : use whole numbers")
        for lens in ([3.9, 7.2], torch.ones(2, dtype=torch.bool), [True, False])
    ),
    *((reads(ids(2, 20), n), "ShapeError: give [2] of 1 to 20") for n in ([0, 4], [21, 4], [3])),
    (reads(ids(2, 40)), "ShapeError: 49 tokens do not fit"),
    (reads(ids(2, 2), append=False), "ConfigError: tokens already ([9, 4] "),
    (reads(ids(2, 2), append=1), "ConfigError: append is 1: use True or False"),
    *((reads(ids(2, 2), chunk=chunk), "ConfigError: chunk ") for chunk in (0, 2.5, True)),
    *(
        (lambda of, use=use, wrong=wrong: use(of, wrong), f"ConfigError: {text}")
        for wrong, text in NO_IDS
        for use in (
            lambda of, wrong: reads(wrong)(of),
            lambda of, wrong: of.model.plain(wrong),
            lambda of, wrong: of.model.observe(wrong, print),
        )
    ),
    *(
        (reads(wrong), "ShapeError: give [2, 1 or more]")
        for wrong in (ids(3, 4), ids(2, 4)[..., None], ids(2, 0), ids(2, 3)[0])
    ),
    *(
        (lambda of, wrong=wrong: of.model.step(of.cache, wrong), text)
        for wrong, text in (
            (ids(2, 1), "ShapeError: give [2]"),
            (ids(1, 3)[0], "ShapeError: give [2]"),
            (torch.ones(2), f"ConfigError: {INT64}"),
            (ids(1, 2)[0] + 255, f"ConfigError: {OUTSIDE}"),
        )
    ),
    *((writes(n), "ConfigError: num_tokens ") for n in (0, -3, 2.5, True, "4")),
    (writes(25), "ShapeError: 33 tokens do not fit into a cache with max_seq"),
    *((writes(2, batch=n), f"ShapeError: logits are [{n}, 256]: give [2, vocab") for n in (1, 3)),
    (lambda of: of.model.generate(of.cache, [[0.0]], 2), "ConfigError: logits is of type list"),
    *(
        (writes(5, **{name: value}), f"ConfigError: {text}")
        for name, value, text in (
            ("eos_token_id", [2, 256], f"eos_token_id 256 {OUTSIDE}"),
            ("eos_token_id", -1, f"eos_token_id -1 {OUTSIDE}"),
            ("eos_token_id", "</s>", "eos_token_id is '</s>': use whole numbers"),
            ("eos_token_id", True, "eos_token_id is torch.bool: use whole numbers"),
            ("choose", [], "choose is of type list: give a function of a tensor"),
            ("choose", lambda x: x[:, 0], f"tokens are torch.float32: {INT64}"),
            ("choose", lambda x: x.argmax(-1) + 256, OUTSIDE),
        )
    ),
    *((lambda of, n=n: of.model.stepper("x", n), "ConfigError: of type str") for n in (2, 20)),
    (lambda of: of.model.encode("Nero"), "ConfigError: encode needs "),
    (lambda of: of.model.decode([1, 2]), "ConfigError: decode needs "),
    (
        lambda of: of.model.generate(of.model.new_cache(2, 32), torch.ones(2, 256), 3),
        "ConfigError: holds [0, 0] tokens",
    ),
    *(
        (lambda of, use=use: use(of.model, of_transformers(of)), f"ConfigError: {text}")
        for use, text in (
            (lambda model, it: model.prefill(it, ids(1, 3)), "type QuantizedCache: give a KVCache"),
            (lambda model, it: model.step(it, ids(1, 1)[0]), "or the kv of a QuantizedCache"),
        )
    ),
)
OF_TRANSFORMERS: Table = {
    "crop: no negative number": (lambda of: of.cache.crop(1), "ConfigError"),
    "reorder: no place": (lambda of: of.cache.reorder_cache(torch.tensor([0, 2])), "ShapeError"),
    "reorder: too few places": (lambda of: of.cache.reorder_cache(torch.tensor([0])), "ShapeError"),
    "select 2": (lambda of: of.cache.batch_select_indices(torch.tensor([2])), "ShapeError"),
    "select 0": (lambda of: of.cache.batch_select_indices(torch.tensor([False] * 2)), "ShapeError"),
    "repeat: no times": (lambda of: of.cache.batch_repeat_interleave(0), "ShapeError"),
    "its keys": (lambda of: of.cache.layers[0].keys, "UnsupportedModelError"),
    "another batch": (lambda of: of.model(ids(3, 9), **of.cache.argument), "ShapeError"),
    "generate: a text that ends before": (
        lambda of: of.model.generate(ids(2, 4), **of.cache.argument, max_new_tokens=2),
        "ConfigError",
    ),
}
KINDS: dict[str, tuple[Callable[[], Any], dict[str, Table]]] = {
    "KVCache": (lambda: filled(contiguous()), OF_HEADS),
    "empty KVCache": (contiguous, {"append": HEADS_APPENDS}),
    "KVCache with windows": (lambda: filled(contiguous(windows=[None, 6])), OF_HEADS),
    "LatentKVCache": (lambda: filled(latents()), OF_LATENTS),
    "ContextParallelCache": (lambda: filled(spread()), OF_RANK),
    "empty ContextParallelCache": (spread, OF_RANK),
    "PagedKVCache": (partial(paged, PagedBatch), {"": PAGED}),
    "PagedKVCache with windows": (partial(paged, PagedBatch, windows=[None, 20]), {"": PAGED}),
    "LatentPagedKVCache": (partial(paged, LatentPagedBatch), {"": PAGED}),
    "full PagedKVCache": (partial(when_full, PagedBatch), {"": PAGED_FULL}),
    **{
        f"step of a {kind.__name__}{', debug mode' * reads}": (
            partial(in_step, kind, reads),
            {"": IN_STEP, "of its rows": own},
        )
        for kind, own in ((PagedBatch, IN_STEP_OF_HEADS), (LatentPagedBatch, IN_STEP_OF_LATENTS))
        for reads in (False, True)
    },
    "CachedModel": (reader, {"": OF_MODEL}),
    "QuantizedCache": (quantized, {"": OF_TRANSFORMERS}),
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
    ("kind", "call", "name"),
    [
        pytest.param(kind, call, name, marks=[pytest.mark.extra("hf")] * (kind in OF_HF))
        for kind, (_, tables) in KINDS.items()
        for call, rows in tables.items()
        for name in rows
    ],
)
def test_a_refused_call_says_why_and_changes_nothing(kind: str, call: str, name: str) -> None:
    make, tables = KINDS[kind]
    made = make()
    with made if hasattr(made, "__enter__") else nullcontext(made) as held:
        before = snapshot(held, KNOWN)
        use, text = tables[call][name]
        with refused(text):
            use(held)
        assert not changes(before, snapshot(held, KNOWN))
