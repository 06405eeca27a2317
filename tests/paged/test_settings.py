"""The caller's settings of torch change nothing in a paged cache; see test_settings.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from invariants import check_invariants
from paged_cases import DIM, HEADS, LAYERS, SINKS, make
from torch_settings import SETTINGS, settings

from kvquant.errors import NonFiniteError
from kvquant.io.inspect import describe
from kvquant.io.sequences import load_sequences, save_sequences
from kvquant.paged.batch import PagedBatch
from kvquant.paged.cache import PagedKVCache
from kvquant.rows.basis import Basis, LayerBasis
from kvquant.rows.rotation import Rope

CPU = torch.device("cpu")


def draw(*shape: int, seed: int) -> torch.Tensor:
    """Numbers that no setting changes."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=CPU)


def bases() -> list[LayerBasis]:
    matrix = torch.eye(DIM, dtype=torch.float32, device=CPU) + 0.1 * draw(HEADS, DIM, DIM, seed=1)
    offset = draw(HEADS, DIM, seed=2)
    return [LayerBasis(Basis(offset, "hadamard"), Basis(offset, "matrix", matrix))] * LAYERS


def play(folder: Path, in_bases: bool) -> list[torch.Tensor]:
    """All that a paged cache does; what comes of it."""
    found: list[torch.Tensor] = []

    def new() -> PagedKVCache:
        return make(num_pages=30, max_num_seqs=6, device="cpu", bases=bases() if in_bases else None)

    cache = new()
    batch = PagedBatch(cache, 4, 120, shared_prefix=True)

    def step(at: PagedBatch, ids: list[str], count: int, seed: int, bad: bool = False) -> None:
        tokens = [token for _ in ids for token in range(seed, seed + count)]
        with at.extend(ids, count, tokens):
            for layer in range(LAYERS):
                k, v = draw(2, len(tokens), HEADS, DIM, seed=seed + layer).requires_grad_()
                if bad:
                    k = k.detach().clone()
                    k[2, 0, 3] = float("nan")
                angles = draw(len(tokens), DIM // 2, seed=3)
                rope = Rope(angles.cos(), angles.sin()) if seed % 2 else None
                at.append(layer, k, v.bfloat16().to(k.dtype), rope=rope)
                q = draw(4, 4, DIM, seed=layer).requires_grad_()
                found.extend(at.attend(layer, q, return_lse=True))
                found.extend(at.cache.dequantized(ids[0], layer, torch.float16))

    cache.allocate("a", range(60))
    step(batch, ["a"], 60, 0)
    present = cache.allocate("b", range(60))
    assert present > SINKS
    step(batch, ["b"], 60 - present, present)
    cache.fork("a", "c")
    step(batch, ["a", "b", "c"], 3, 7)
    cache.truncate("c", 40)
    cache.swap_out("a")
    step(batch, ["c", "b"], 1, 8)
    cache.swap_in("a")
    path = save_sequences(cache, ["a", "b", "c"], folder / "saved.safetensors")
    assert describe(path)["pages"] > 0
    other = PagedBatch(new(), 4, 120)
    load_sequences(other.cache, path)
    step(other, ["a", "b"], 5, 9)
    cache.allocate("bad")
    step(batch, ["bad"], 30, 11, bad=True)
    with pytest.raises(NonFiniteError, match="rows of K"):
        cache.check()
    cache.fork("bad", "too")
    cache.free("bad")
    for at in (cache, other.cache):
        check_invariants(at)
    return [*found, cache.bad_rows]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[torch.Tensor]]:
    """What comes without any setting."""
    return [play(tmp_path_factory.mktemp("plain"), in_bases) for in_bases in (False, True)]


@pytest.mark.parametrize("name", SETTINGS)
def test_results_are_those_without_the_setting(
    name: str, plain: list[list[torch.Tensor]], tmp_path: Path
) -> None:
    for in_bases, expected in zip((False, True), plain, strict=True):
        with SETTINGS[name]():
            before = settings()
            found = play(tmp_path, in_bases)
            assert settings() == before
        for ours, theirs in zip(found, expected, strict=True):
            assert not ours.requires_grad and ours.device == CPU
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
