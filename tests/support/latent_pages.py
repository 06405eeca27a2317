"""What the tests of paged caches of latent rows share: a small cache, steps, and the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from variant_cases import by_hand

from kvquant import LatentPagedBatch, LatentPagedKVCache
from kvquant.io.plan import CachePlan
from kvquant.paged.cache import PagedKVCache
from kvquant.paged.pool import SequenceId

LAYERS, PAGE, SINKS, RECENT, SCALE = 2, 16, 3, 5, 80**-0.5
DIMS = {"latent_dim": 256, "rope_dim": 32}
FORMATS = {"cpu": "int8-g4+int8-g8", "cuda": "int8-g4"}  # groups of 4 elements have no kernel
NAN = 0xFF  # bytes of NaN
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-3}  # of the relative error of attention
Pair = tuple[torch.Tensor, torch.Tensor]


def make(device: str = "cpu", **options: Any) -> LatentPagedKVCache:
    """A small cache, all of whose rows are NaN: 2 layers, 12 pages of 16 tokens, 4 slots."""
    given = {"fmt": FORMATS[device], "max_num_seqs": 4, "max_seq_len": 100, "page_size": PAGE}
    given |= {"sink_len": SINKS, "recent_len": RECENT, "num_pages": 12, **DIMS, **options}
    cache = LatentPagedKVCache(LAYERS, device=device, **given)  # type: ignore[arg-type]
    poison(cache, range(len(cache.state.lengths)), range(cache.state.pool.num_pages))
    return cache


def from_plan(plan: CachePlan, device: str = "cpu") -> LatentPagedKVCache:
    """The same from a plan of latent rows."""
    sizes: Any = {"max_num_seqs": 4, "max_seq_len": 100, "page_size": PAGE}
    lens: Any = {"sink_len": SINKS, "recent_len": RECENT, "device": device}
    cache = LatentPagedKVCache.from_plan(plan, 12, **sizes, **lens)
    poison(cache, range(4), range(12))
    return cache


def poison(cache: PagedKVCache, seq_slots: Sequence[int], pages: Sequence[int]) -> None:
    """Let what no token is in be NaN."""
    for sides, units in ((cache.rows.exact, seq_slots), (cache.rows.pages, pages)):
        for stack in (stack for side in sides for stack in side.stacks):
            stack[:, list(units)] = NAN


def new_rows(count: int, device: str | torch.device = "cpu") -> Pair:
    """Latents and RoPE parts of new tokens, bfloat16."""
    latent, rope = (torch.randn(count, 1, dim).bfloat16().to(device) for dim in DIMS.values())
    return latent, rope


def queries(*shape: int, device: str | torch.device = "cpu") -> Pair:
    """Absorbed queries: float32 on the CPU, bfloat16 on CUDA."""
    dtype = torch.float32 if str(device) == "cpu" else torch.bfloat16
    q_latent, q_rope = (torch.randn(*shape, dim).to(device, dtype) for dim in DIMS.values())
    return q_latent, q_rope


def assert_attends(
    batch: LatentPagedBatch,
    layer: int,
    ids: Sequence[SequenceId],
    counts: Sequence[int],
    pair: Pair,
    limit: float | None = None,
) -> None:
    """Compare attention of a step with float64 over dequantized rows.

    Args:
        ids, counts: of the step.
        pair: queries of more places, [places, heads, dim] or [places, q_len, heads, dim].
        limit: as of compare.
    """
    out, lse = batch.attend(layer, *pair, sm_scale=SCALE, return_lse=True)
    compare(batch.cache, layer, ids, counts, pair, out, lse, limit)


def compare(
    cache: LatentPagedKVCache,
    layer: int,
    ids: Sequence[SequenceId],
    counts: Sequence[int],
    pair: Pair,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    limit: float | None = None,
) -> None:
    """The same of results; limit: of the relative error, that of LIMITS when None."""
    many, dim = pair[0].ndim == 4, out.shape[-1]
    both = torch.cat(pair, -1).cpu()
    both = both if many else both[:, None]
    wanted = torch.zeros(*both.shape[:-1], dim, dtype=torch.float64)
    wanted_lse = torch.full(both.shape[:-1], -math.inf, dtype=torch.float64)
    for place, (name, count) in enumerate(zip(ids, counts, strict=True)):
        keys = torch.cat(cache.dequantized(name, layer), -1)[None].cpu()
        of_one = both[place : place + 1], keys, keys[..., :dim], [keys.shape[2]]
        (wanted[place],), (wanted_lse[place],) = by_hand(
            *of_one, [count if many else 1], scale=SCALE
        )
    wanted, wanted_lse = wanted.view(out.shape), wanted_lse.view(out.shape[:-1])
    seen_by_none = wanted_lse.isinf()
    assert not out.cpu()[seen_by_none].any()
    error = (out.cpu().double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
    assert float(error) < (LIMITS[out.dtype] if limit is None else limit)
    if lse is not None:
        # queries that are rounded again change scores, too
        atol = 1e-3 if limit is None else max(1e-3, 4 * limit)
        torch.testing.assert_close(lse.cpu().double(), wanted_lse, atol=atol, rtol=1e-4)
