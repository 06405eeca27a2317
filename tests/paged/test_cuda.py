"""PagedKVCache on a GPU: the bytes of the CPU, and one CUDA graph for steps of any sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from invariants import check_invariants
from paged_cases import (
    DIM,
    HEADS,
    LAYERS,
    captured,
    changing_steps,
    extend,
    new_rows,
    poison,
    rows_of,
    same,
    values,
)
from relative_l2 import relative_l2
from row_kinds import KINDS

from kvquant.paged import state
from kvquant.paged.batch import PagedBatch

pytestmark = pytest.mark.gpu


FORMATS: dict[str, dict[str, Any]] = {
    "heads": {},
    "heads, few bits": {"k_format": "int3", "v_format": "int2"},
    "latents": {"fmt": ["int8-g4", "int4-g8"]},
}


def both(kind: str = "heads", **options: Any) -> list[Any]:
    """The same batch on the CPU and on the GPU."""
    options = {"num_pages": 30, **FORMATS[kind], **options}
    of_rows = KINDS[kind.partition(",")[0]]
    return [of_rows.batch(of_rows.make(device=at, **options), 4, 100) for at in ("cpu", "cuda")]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("lengths", [(3, 5), (0, 0), (3, 0), (0, 5)], ids=str)
def test_bytes_are_those_of_the_cpu(lengths: tuple[int, int], kind: str) -> None:
    batches = both(kind, sink_len=lengths[0], recent_len=lengths[1])

    def extend_both(ids: Sequence[str], count: int, tokens: Sequence[int] | None = None) -> None:
        rows = rows_of(batches[0].cache, count * len(ids))
        for batch in batches:
            extend(batch, ids, count, tokens, [x.to(batch.cache.device) for x in rows])

    for batch in batches:
        batch.cache.allocate("a", range(40))
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 99, (100,), generator=draw).tolist()
    for count in (40, 1, 1, 7, 1):
        extend_both(["a"], count, tokens[:count])
    for batch in batches:
        cache = batch.cache
        cache.fork("a", "b")
        cache.truncate("b", 30)
        assert cache.allocate("c", tokens[:40]) > 0
        cache.swap_out("a")
    for _ in range(20):
        extend_both(["b", "c"], 1)
    for batch in batches:
        batch.cache.swap_in("a")
    for name in ("a", "b", "c"):
        ours, theirs = (values(batch.cache, name) for batch in batches)
        assert same([x.cpu() for x in theirs], ours)
    check_invariants(batches[1].cache)


@pytest.mark.parametrize("windows", [None, [20, None]], ids=str)
def test_one_graph_serves_steps_of_other_sequences_lengths_and_pages(
    windows: list[int | None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "SPARE", 0)  # so that short sequences are past pages
    on_cpu, prefill = both(windows=windows)
    cache = prefill.cache
    batch = PagedBatch(cache, 4)
    k, v = (torch.empty(4, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.empty(4, 4, DIM, device="cuda", dtype=torch.bfloat16)
    for x in (k, v, q):
        x.fill_(torch.nan)  # no place is in use while the graph is captured
    graph, outs = captured(batch, k, v, q)
    for name, count in (("a", 20), ("b", 3), ("c", 0), ("d", 61)):
        rows = new_rows(count)
        for at in (on_cpu, prefill):
            at.cache.allocate(name)
            extend(at, [name], count, rows=rows.to(at.cache.device))
    for ids in changing_steps([on_cpu.cache, cache], 36):
        poison(cache)
        for x in (k, v, q):
            x.copy_(torch.randn(x.shape))
        with batch.extend(ids):
            graph.replay()
        with on_cpu.extend(ids):
            for layer in range(LAYERS):
                on_cpu.append(layer, k[: len(ids)].cpu(), v[: len(ids)].cpu())
                expected = on_cpu.attend(layer, q[: len(ids)].cpu().float())
                assert isinstance(expected, torch.Tensor)
                assert relative_l2(outs[layer][: len(ids)].cpu(), expected) < 6e-3
                assert not outs[layer][len(ids) :].any()
    for name in cache.ids:
        ours, theirs = values(on_cpu.cache, name), values(cache, name)
        assert same([x.cpu() for x in theirs], ours)
    assert cache.bad_rows.tolist() == [0, 0]
    check_invariants(cache)


def test_the_host_may_run_ahead() -> None:
    """Staged copies are not overwritten while the GPU is behind."""
    _, batch = both()
    for name in "abcd":
        batch.cache.allocate(name)
    rows = new_rows(4, "cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    for step in range(60):
        busy @ busy
        extend(batch, list("abcd")[step % 3 :], 1, rows=rows[:, step % 3 :])
    lengths = {name: batch.cache.length(name) for name in "abcd"}
    assert lengths == {"a": 20, "b": 40, "c": 60, "d": 60}
    for at, name in enumerate("abcd"):
        for layer in range(LAYERS):
            k, _ = batch.cache.dequantized(name, layer)
            error = (k.transpose(0, 1) - rows[0, at].float()).abs().max()
            assert float(error) < 0.5
    check_invariants(batch.cache)
