"""What KVCache refuses: each a clear error, after which every byte is as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from kvquant import KVCache, debug
from kvquant.cache import layer, memory
from kvquant.errors import ConfigError, ShapeError

BATCH, HEADS, DIM, MAX = 3, 2, 64, 40
ROWS = {"k_format": "int4-g4", "v_format": "int8"}


def make(**options: Any) -> KVCache:
    """A small cache: 2 layers, 3 sinks, 5 recent tokens, 32 packed ones."""
    options = {"sink_len": 3, "recent_len": 5, **ROWS, **options}
    return KVCache(options.pop("num_layers", 2), BATCH, HEADS, DIM, MAX, **options)


def tokens(count: int, *, batch: int = BATCH, dim: int = DIM) -> torch.Tensor:
    return torch.randn(batch, HEADS, count, dim)


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
