"""What KVCache refuses: each a clear error, after which every byte is as before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from kvquant import KVCache, PagedKVCache, debug
from kvquant.cache import layer, memory
from kvquant.errors import ConfigError, DeviceError, NonFiniteError, ShapeError

BATCH, HEADS, DIM, MAX = 3, 2, 64, 40
ROWS = {"k_format": "int4-g4", "v_format": "int8"}


def make(**options: Any) -> KVCache:
    """A small cache: 2 layers, 3 sinks, 5 recent tokens, 32 packed ones."""
    options = {"sink_len": 3, "recent_len": 5, **ROWS, **options}
    return KVCache(options.pop("num_layers", 2), BATCH, HEADS, DIM, MAX, **options)


def tokens(count: int, *, batch: int = BATCH, dim: int = DIM) -> torch.Tensor:
    return torch.randn(batch, HEADS, count, dim)


def everything(cache: KVCache) -> list[torch.Tensor]:
    """Copies of all bytes of a cache."""
    tensors = [tensor for layer in cache.layers for tensor in layer.tensors().values()]
    return [tensor.clone() for tensor in [cache.start_positions, *tensors]]


def unchanged(cache: KVCache, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(everything(cache), before, strict=True))


BAD_APPENDS: list[tuple[Callable[[], tuple[Any, ...]], type[Exception], str]] = [
    (lambda: (tokens(35), tokens(35)), ShapeError, "sequence 0 would grow to 44 tokens"),
    (
        lambda: (tokens(33), tokens(33), [1, 33, 36]),
        ShapeError,
        "new_lens is [1, 33, 36]: give [batch] of 0 to 33",
    ),
    (
        lambda: (tokens(39), tokens(39), [1, 1, 39]),
        ShapeError,
        "sequence 2 would grow to 41 tokens, max_seq_len is 40: crop it, or make a larger cache",
    ),
    (
        lambda: (tokens(4)[0], tokens(4)),
        ShapeError,
        "k is [2, 4, 64]: it must be [3, 2, new_tokens, 64]",
    ),
    (lambda: (tokens(4, batch=2), tokens(4)), ShapeError, "k is [2, 2, 4, 64]"),
    (lambda: (tokens(4), tokens(4, dim=80)), ShapeError, "v is [3, 2, 4, 80]"),
    (
        lambda: (tokens(4).transpose(1, 2), tokens(4).transpose(1, 2)),
        ShapeError,
        "k is [3, 4, 2, 64]: it must be [3, 2, new_tokens, 64]",
    ),
    (lambda: (tokens(4), tokens(3)), ShapeError, "k has 4 new tokens, v 3"),
    (lambda: (tokens(4), tokens(4), [1, 1]), ShapeError, "new_lens is [1, 1]"),
    (lambda: (tokens(4), tokens(4), [1, -1, 1]), ShapeError, "new_lens is [1, -1, 1]"),
    (
        lambda: (tokens(4), tokens(4), [1.5, 1, 1]),
        ConfigError,
        "new_lens is torch.float32: use whole numbers",
    ),
    (
        lambda: (tokens(4).double(), tokens(4)),
        ConfigError,
        "k is torch.float64: use float32, bfloat16 or float16",
    ),
    (lambda: (tokens(4), tokens(4).int()), ConfigError, "v is torch.int32: use"),
    (
        lambda: (spoiled(tokens(4), torch.nan), tokens(4)),
        NonFiniteError,
        "k[1, 0, 2, 63] is nan: int4-g4 rows hold finite values up to 65504; look for NaN and Inf",
    ),
    (lambda: (tokens(4), spoiled(tokens(4), torch.nan)), NonFiniteError, "v[1, 0, 2, 63]"),
    (lambda: (tokens(4), spoiled(tokens(4), -torch.inf)), NonFiniteError, "is -inf"),
    (
        lambda: (spoiled(tokens(4), 7e4), tokens(4)),
        NonFiniteError,
        "int4-g4 rows hold finite values up to 65504; give the format 'bf16', for 16-bit rows as",
    ),
    (
        lambda: (spoiled(tokens(4).bfloat16(), 65536.0), tokens(4)),
        NonFiniteError,
        "k[1, 0, 2, 63] is 65536.0",
    ),
    (lambda: (spoiled(tokens(4), 65500.0), tokens(4)), NonFiniteError, "k[1, 0, 2, 63]"),
]


def spoiled(x: torch.Tensor, value: float) -> torch.Tensor:
    x[1, 0, 2, 63] = value
    x[2, 1, 3, 0] = value
    return x


@pytest.mark.parametrize(
    ("arguments", "error", "message"), BAD_APPENDS, ids=[case[-1] for case in BAD_APPENDS]
)
def test_an_append_that_fails_changes_nothing(
    arguments: Callable[[], tuple[Any, ...]], error: type[Exception], message: str
) -> None:
    cache = make()
    cache.append(0, tokens(9), tokens(9), [9, 4, 2])
    before = everything(cache)
    with pytest.raises(error) as caught:
        cache.append(0, *arguments())
    assert message in str(caught.value)
    assert unchanged(cache, before)
    cache.append(0, tokens(20), tokens(20))


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"num_splits": 0}, ConfigError, "num_splits 0 is not possible"),
        ({"backend": "tpu"}, ConfigError, "backend 'tpu' does not exist"),
        ({"backend": "cuda"}, DeviceError, "backend 'cuda' takes CUDA tensors, not cpu"),
        ({"return_lse": 1}, ConfigError, "return_lse"),
        ({"sm_scale": math.nan}, ConfigError, "sm_scale"),
    ],
)
def test_a_step_that_cannot_attend_appends_nothing(
    option: dict[str, Any], error: type[Exception], message: str
) -> None:
    cache = make()
    cache.append(0, tokens(9), tokens(9))
    before = everything(cache)
    q = torch.randn(cache.batch, 2 * cache.num_kv_heads, cache.head_dim)
    with pytest.raises(error) as caught:
        cache.step(0, q, tokens(1), tokens(1), **option)
    assert message in str(caught.value)
    assert unchanged(cache, before)


@pytest.mark.parametrize("index", [[0, 1, 3], [0, 1, -1], [0, 1], [[0, 1, 2]], 1], ids=str)
def test_places_that_do_not_exist_are_refused(index: Any) -> None:
    cache = make()
    cache.append(0, tokens(9), tokens(9))
    before = everything(cache)
    with pytest.raises(ShapeError, match="index"):
        cache.reorder(index)
    if index != [0, 1]:
        with pytest.raises(ShapeError, match="give places from 0 to 2"):
            cache.fork(index)
    assert unchanged(cache, before)


def test_tokens_on_another_device_are_refused() -> None:
    cache = make()
    before = everything(cache)
    with pytest.raises(DeviceError, match="v is on meta, the cache on cpu"):
        cache.append(0, tokens(1), tokens(1).to("meta"))
    assert unchanged(cache, before)


def test_attend_refuses_a_query_that_does_not_fit() -> None:
    cache = make()
    cache.append(0, tokens(1), tokens(1))
    for q in (torch.zeros(BATCH, 4, 1, DIM), torch.zeros(4, DIM), torch.zeros(2, 4, DIM)):
        with pytest.raises(ShapeError, match=r"q is|q \["):
            cache.attend(0, q)


NO_TOKENS: dict[str, Callable[[KVCache], object]] = {
    "appended to another layer": lambda cache: None,
    "a fork": lambda cache: cache.fork([0, 2]),
    "grown": lambda cache: cache.grow(2 * MAX),
    "reset": lambda cache: filled(cache).reset(),
    "cropped": lambda cache: filled(cache).crop(0),
    "no new tokens": lambda cache: cache.append(1, tokens(0), tokens(0)),
}


def filled(cache: KVCache) -> KVCache:
    cache.append(1, tokens(9), tokens(9))
    return cache


@pytest.mark.parametrize("how", NO_TOKENS)
@pytest.mark.parametrize("windows", [None, [None, 7]], ids=["whole", "window"])
def test_attention_to_a_layer_without_tokens_is_refused(how: str, windows: Any) -> None:
    cache = make(windows=windows)
    cache.append(0, tokens(4), tokens(4))
    made = NO_TOKENS[how](cache)
    cache = made if isinstance(made, KVCache) else cache
    for q in (torch.ones(cache.batch, 4, DIM), torch.ones(cache.batch, 2, 4, DIM)):
        with pytest.raises(ShapeError, match="layer 1 holds no tokens: append to it first"):
            cache.attend(1, q)
    cache.step(1, torch.ones(cache.batch, 4, DIM), *torch.ones(2, cache.batch, HEADS, 1, DIM))
    assert cache.attend(1, torch.ones(cache.batch, 4, DIM)).any()


def test_sequences_without_tokens_attend_beside_others() -> None:
    cache = make()
    for lens in ([0, 0, 0], [0, 3, 0]):  # the host does not look at tensors of counts on CUDA
        cache.append(0, tokens(3), tokens(3), lens)
        out = cache.attend(0, torch.ones(BATCH, 4, DIM))
        assert out.flatten(1).any(1).tolist() == [n > 0 for n in lens]


def test_what_is_recorded_may_attend_before_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is captured, or compiled, while the cache is empty."""
    cache, q = make(), torch.ones(BATCH, 4, DIM)
    with monkeypatch.context() as patch:
        patch.setattr(debug, "is_recorded", lambda tensor: True)
        assert not cache.attend(0, q).any()
    counter = CompileCounter()
    compiled = torch.compile(lambda q: cache.attend(0, q), fullgraph=True, backend=counter)
    assert not compiled(q).any()
    for _ in range(2):
        cache.append(0, tokens(3), tokens(3))
        assert torch.equal(compiled(q), cache.attend(0, q))
    assert counter.frame_count == 1


def test_more_than_the_memory_is_refused_before_any_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system would give it, and end the process when it is used."""
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 29)
    taken = []
    monkeypatch.setattr(layer, "zero_rows", lambda *of: taken.append(of))
    sizes: list[tuple[int, int, int, int, int]]
    sizes = [(4, 2, 2, 64, 1 << 22), (1, 1, 1, 64, 1 << 24), (9, 1 << 22, 1, 64, 0)]
    for shape in sizes:
        with pytest.raises(ConfigError, match=r"a cache of .* GiB, more than there is: use a sma"):
            KVCache(*shape)
    assert not taken


def test_numbers_that_no_memory_holds_are_refused_before_anything_is_listed() -> None:
    most = 2**31 - 1
    with pytest.raises(ConfigError, match=f"a cache of {most} layers takes .*: use fewer layers"):
        KVCache(most, 1, 1, 64, 0)
    with pytest.raises(ConfigError, match=f"a cache of {most} layers takes .*: use fewer layers"):
        PagedKVCache(most, 1, 64, 4)
    with pytest.raises(ConfigError, match=f"a cache of {BATCH * most} sequences takes"):
        make().repeat(most)
