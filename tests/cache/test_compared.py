"""A KVCache whose K rows of few bits change what queries read warns of it, once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from kvquant import KVCache
from kvquant.rows.probe import REFUSED, WARNED

LONG = 260  # tokens, more than sinks and ring hold
LOSS = "change what attention reads"


def keys(tokens: int, offset: float) -> torch.Tensor:
    """[2, 2, tokens, 64] with one channel that all keys have."""
    found = torch.randn(2, 2, tokens, 64)
    found[..., 5] += offset
    return found


def read(cache: KVCache, tokens: int, offset: float, *, way: str = "step") -> None:
    """Append tokens but one, and attend with one more, in every layer."""
    for layer in range(cache.num_layers):
        cache.append(layer, keys(tokens - 1, offset), torch.randn(2, 2, tokens - 1, 64))
        k, v, q = keys(1, offset), torch.randn(2, 2, 1, 64), torch.randn(2, 4, 64)
        if way == "step":
            cache.step(layer, q, k, v)
        else:
            cache.append(layer, k, v)
            cache.attend(layer, q[:, None], in_step=True)


def make(**options: Any) -> KVCache:
    return KVCache(2, 2, 2, 64, 512, **({"k_format": "int4", "v_format": "int4"} | options))


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    caplog.clear()
    return found


@pytest.mark.parametrize("way", ["step", "attend"])
def test_ruinous_rows_are_warned_of_once(way: str, caplog: pytest.LogCaptureFixture) -> None:
    cache = make()
    read(cache, LONG, 300.0, way=way)
    (line,) = told(caplog)
    assert LOSS in line and "K rows of int4 " in line and f"from {REFUSED:g} on" in line
    read(cache, 2, 300.0, way=way)
    cache.fork()
    assert not told(caplog) and cache.compared is None


def test_rows_that_keep_the_weights_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    cache = make(k_format="int4-g8")
    read(cache, LONG, 0.0)
    assert cache.compared is None and not told(caplog)


def test_nothing_is_compared_where_nothing_is_known(caplog: pytest.LogCaptureFixture) -> None:
    short = make()
    read(short, 100, 300.0)
    assert short.compared == {}, "its rows are still in 16 bit"
    for options in ({"k_format": "int8"}, {"recent_len": 0}):
        cache = make(**options)
        read(cache, LONG, 300.0)
        assert cache.compared is None
    assert not told(caplog)


def test_the_comparison_is_of_layers_that_have_attended() -> None:
    cache = make()
    cache.append(0, keys(LONG, 300.0), torch.randn(2, 2, LONG, 64))
    cache.attend(0, torch.randn(2, 4, 64))
    assert cache.compared is not None and list(cache.compared) == [0]
    assert float(cache.compared[0]) > WARNED


@pytest.mark.parametrize("padding", [0.0, 1e3, float("nan")])
def test_padding_is_not_compared(padding: float, caplog: pytest.LogCaptureFixture) -> None:
    """Of ragged queries the last row may be padding: the next plain step is compared."""
    cache = make(k_format="int4-g8")
    for layer in range(2):
        cache.append(layer, keys(LONG, 0.0), torch.randn(2, 2, LONG, 64))
        q = torch.randn(2, 3, 4, 64)
        q[1, 1:] = padding
        cache.attend(layer, q, torch.tensor([3, 1], dtype=torch.int32))
    assert cache.compared == {} and not told(caplog)
    read(cache, 2, 0.0)
    assert cache.compared is None and not told(caplog)


@pytest.mark.parametrize("lens", [[LONG, 5, 5, 5], [0, 0, 0, 0, LONG, LONG], [5] * 6 + [LONG]])
def test_short_sequences_do_not_count(lens: list[int]) -> None:
    """The figure is that of the long sequences alone, wherever they stand."""
    cache = KVCache(2, len(lens), 2, 64, 512, k_format="int4", v_format="int4")
    alone = KVCache(2, 1, 2, 64, 512, k_format="int4", v_format="int4")
    k = torch.randn(1, 2, LONG, 64)
    k[..., 5] += 300
    q = torch.randn(1, 4, 64)
    every = k.expand(len(lens), -1, -1, -1)
    cache.append(0, every, every, lens)
    alone.append(0, k, k)
    cache.attend(0, q.expand(len(lens), -1, -1))
    alone.attend(0, q)
    assert cache.compared is not None and alone.compared is not None
    torch.testing.assert_close(cache.compared[0], alone.compared[0], rtol=1e-3, atol=0.0)


def test_a_batch_of_short_sequences_waits() -> None:
    """Where a bound of the lengths alone is over the recent tokens nothing is compared yet."""
    cache = make()
    for _ in range(3):  # 100 places each, of which 5 are of tokens
        cache.append(0, keys(100, 300.0), torch.randn(2, 2, 100, 64), [5, 5])
    cache.layers[0].longest = 300
    cache.attend(0, torch.randn(2, 4, 64))
    assert cache.compared == {} and cache.layers[0].longest == 15
