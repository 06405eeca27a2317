"""Sequences over several ranks are attended as those of one cache (12 s)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from slow_cases import mark_slow

from kvquant import ContextParallelCache, KVCache
from kvquant.errors import ConfigError

SCRIPT = Path(__file__).parent.parent / "support" / "rank_of_many.py"


@pytest.mark.parametrize("world", mark_slow([1, 2, 3], [2]))
def test_ranks_attend_as_one_cache(world: int, tmp_path: Path) -> None:
    assert run_ranks(SCRIPT, world, tmp_path) == ["right\n"] * world


@pytest.mark.gpu(2)
def test_ranks_of_gpus_do_too(tmp_path: Path) -> None:
    assert run_ranks(SCRIPT, 2, tmp_path, device="cuda") == ["right\n"] * 2


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("block", [1, 7, 256])
def test_each_token_has_one_rank(block: int, world: int) -> None:
    tokens = torch.arange(4 * block * world + 3)
    for n in {0, 1, block, block * world, len(tokens)}:
        for rank in range(world):
            held = int(((tokens[:n] // block) % world == rank).sum())
            assert ContextParallelCache.tokens_of(n, rank, world, block) == held


def test_it_needs_ranks() -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        ContextParallelCache(KVCache(1, 1, 1, 64, 64))
