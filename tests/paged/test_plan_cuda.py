"""PagedKVCache from a plan on a GPU: rows as on the CPU, and one CUDA graph for all steps."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import captured
from invariants import check_invariants
from paged_cases import DIM, HEADS, changing_steps, extend, new_rows, same, values
from paged_plans import PLAN_LAYERS, PLANS, make_paged, step_of
from relative_l2 import relative_l2

from kvquant.paged.batch import PagedBatch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("name", ["hadamard", "matrix clip feedback"])
def test_one_graph_serves_all_steps(name: str, shared: bool) -> None:
    caches = [make_paged(PLANS[name], device="cuda", num_pages=30) for _ in range(2)]
    eager, prefill = (PagedBatch(cache, 4, 100) for cache in caches)
    batch = PagedBatch(caches[1], 4, shared_prefix=shared)
    k, v = (torch.empty(4, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.empty(4, 4, DIM, device="cuda", dtype=torch.bfloat16)
    for x in (k, v, q):
        x.fill_(torch.nan)  # no place is in use while the graph is captured
    with batch.extend([]):
        graph, found = captured(lambda: step_of(batch, k, v, q))
    for sequence, count in (("a", 40), ("c", 0), ("d", 61)):
        rows = new_rows(count, "cuda")
        for at in (eager, prefill):
            at.cache.allocate(sequence)
            extend(at, [sequence], count, rows=rows)
    for cache in caches:
        cache.fork("a", "b")
    for ids in changing_steps(caches, 30):
        for x in (k, v, q):
            x.copy_(torch.randn(x.shape))
        with batch.extend(ids):
            graph.replay()
        with eager.extend(ids):
            expected = step_of(eager, k, v, q)
        for ours, theirs in zip(found, expected, strict=True):
            assert relative_l2(ours[: len(ids)], theirs[: len(ids)]) < (2e-2 if shared else 1e-3)
        for out, lse in zip(found[::2], found[1::2], strict=True):
            assert not out[len(ids) :].any() and bool((lse[len(ids) :] == -torch.inf).all())
        check_attention(eager, ids, q, expected)
    for one in caches[0].ids:
        assert same(values(caches[1], one), values(caches[0], one))
    assert caches[1].bad_rows.tolist() == [0, 0]
    check_invariants(caches[1])


def check_attention(
    batch: PagedBatch, ids: list[str], q: torch.Tensor, found: list[torch.Tensor]
) -> None:
    """What step_of has found is attention over the dequantized rows, but for 16-bit rounding."""
    for layer in range(PLAN_LAYERS):
        for at, sequence in enumerate(ids):
            k, v = (x.repeat_interleave(2, 0) for x in batch.cache.dequantized(sequence, layer))
            scores = DIM**-0.5 * (k @ q[at, :, :, None].float())[..., 0]
            out = (scores.softmax(-1)[..., None] * v).sum(1)
            assert relative_l2(found[2 * layer][at].float(), out) < 3e-2
            assert relative_l2(found[2 * layer + 1][at], scores.logsumexp(-1)) < 3e-2
