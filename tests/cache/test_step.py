"""KVCache.step and PagedBatch.step: what append and attend give, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_caches import layer_basis

from kvquant import KVCache, LatentKVCache, PagedBatch, PagedKVCache
from kvquant.errors import ShapeError

BATCH, Q_HEADS, HEADS, DIM = 3, 4, 2, 64
KINDS = ("no plan", "none", "matrix")


def make_new(tokens: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values."""
    return torch.randn(BATCH, Q_HEADS, DIM), *torch.randn(2, BATCH, HEADS, tokens, DIM)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
def test_a_step_is_append_and_attend(kind: str, return_lse: Any) -> None:
    torch.manual_seed(0)
    bases = None if kind == "no plan" else [layer_basis(kind)]
    one = KVCache(1, BATCH, HEADS, DIM, 64, sink_len=2, recent_len=4, bases=bases)
    _, k, v = make_new(10)
    one.append(0, k, v)
    other = one.fork()
    for _ in range(6):
        q, k, v = make_new()
        found = one.step(0, q, k, v, sm_scale=0.2, return_lse=return_lse)
        other.append(0, k, v)
        wanted = other.attend(0, q, sm_scale=0.2, return_lse=return_lse)
        assert all(map(torch.equal, found, wanted))
        assert all(map(torch.equal, one._tensors(), other._tensors()))


def test_a_step_of_latents_is_append_and_attend() -> None:
    one = LatentKVCache(1, BATCH, 96, fmt="int8-g4", latent_dim=256, rope_dim=32, recent_len=16)
    one.append(0, torch.randn(BATCH, 1, 60, 256), torch.randn(BATCH, 1, 60, 32))
    other = one.fork()
    assert isinstance(other, LatentKVCache)
    for axes, count in (((4,), 1), ((3, 4), 3)):
        q = torch.randn(BATCH, *axes, 256), torch.randn(BATCH, *axes, 32)
        new = torch.randn(BATCH, 1, count, 256), torch.randn(BATCH, 1, count, 32)
        found = one.step(0, *q, *new, sm_scale=0.1)
        other.append(0, *new)
        assert torch.equal(found, other.attend(0, *q, sm_scale=0.1, in_step=True))
    assert all(map(torch.equal, one._tensors(), other._tensors()))


def test_rows_of_a_batch_in_another_order_are_told_what_to_do() -> None:
    batch = PagedBatch(PagedKVCache(1, HEADS, DIM, 16, page_size=16, max_seq_len=64), 4, 8)
    batch.cache.allocate("a")
    with (
        pytest.raises(ShapeError, match=r"have 1 KV heads, the cache 2. Give k\.transpose\(0, 1\)"),
        batch.extend(["a"]),
    ):
        batch.append(0, *torch.randn(2, HEADS, 1, DIM))
