"""Steps of latent rows that share a prefix: its pages are read once, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_cuda import CPU, FakeDriver, install_for_caches, loaded_specs
from latent_pages import DIMS, LAYERS, SCALE, begin, extend, make, new_rows, queries
from latent_plans import random_basis
from torch._dynamo.testing import CompileCounterWithBackend

from kvquant import LatentPagedBatch, LatentPagedKVCache
from kvquant.kernels.cuda.mla.spec import MlaCombineSpec
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime.warmup import kernels_of
from kvquant.ops import mla
from kvquant.ops.mla import attend_latents
from kvquant.paged import shared_prefix as sharedprefix
from kvquant.paged.shared_prefix import pays_of_latents
from kvquant.paged.warmup import BatchCalls, likely_batches
from kvquant.rows.call import LatentCall

Measure = Callable[[torch.Tensor, torch.Tensor], float]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LIMITS = {"cpu": 1e-5, "cuda": 4e-3}  # of relative errors: queries and results of 32 and 16 bit


def sequences(batch: LatentPagedBatch) -> None:
    """Three of a common prompt, forked at 70 tokens, and one of its own."""
    begin(batch, "a", 70)
    batch.cache.fork("a", "b")
    batch.cache.fork("a", "c")
    begin(batch, "z", 20)


def test_it_pays_with_few_heads_and_many_sequences() -> None:
    assert pays_of_latents(64, 64, 8192, 16) and pays_of_latents(64, 60, 8192, 16)
    assert not pays_of_latents(64, 64, 1024, 16) and not pays_of_latents(64, 20, 8192, 16)
    assert not pays_of_latents(2, 2, 8192, 16)
    assert not pays_of_latents(64, 64, 1 << 20, 128), "as many products"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_basis", [False, True])
@pytest.mark.parametrize("lengths", [(0, 0), (3, 5)], ids=str)
def test_results_are_those_without_it(
    relative_l2: Measure, lengths: tuple[int, int], in_basis: bool, device: str
) -> None:
    """Of one query and of several, of unequal numbers; rows and places not in use are NaN."""
    full = (70 - sum(lengths)) // 16 * 16  # tokens in full pages when the others were forked
    bases = [random_basis()] * LAYERS if in_basis else None
    batches = []
    for shared in (True, False):
        torch.manual_seed(0)
        options: dict[str, Any] = {"sink_len": lengths[0], "recent_len": lengths[1]}
        cache = make(device, num_pages=40, bases=bases, **options)
        batch = LatentPagedBatch(cache, 5, 70, shared_prefix=shared)
        sequences(batch)
        batches.append(batch)
    for ids, counts in (
        (["c", "z", "a", "b"], [1, 1, 1, 1]),
        (["z"], [1]),
        (["b", "a"], [0, 0]),
        (["b", "z", "a"], [3, 2, 1]),
        ([], []),
    ):
        many = max(counts, default=1) > 1
        shape = (len(ids) + 1, max(counts), 6) if many else (len(ids) + 1, 6)
        pair, rows = queries(*shape, device=device), new_rows(sum(counts), device)
        for x in pair:  # padding
            x[len(ids) :] = torch.nan
            for place, count in enumerate(counts if many else []):
                x[place, count:] = torch.nan
        results = []
        for batch in batches:
            with batch.extend(ids, counts):
                for layer in range(LAYERS if sum(counts) else 0):
                    batch.append(layer, *rows)
                results.append(batch.attend(1, *pair, sm_scale=SCALE, return_lse=True))
        (ours, our_lse), (theirs, their_lse) = results
        empty = their_lse == -torch.inf
        assert torch.equal(our_lse == -torch.inf, empty) and not ours[empty].any()
        if ids:
            # queries in a basis are rounded to 16 bit again, alike for both
            assert relative_l2(ours, theirs) < LIMITS[device]
            torch.testing.assert_close(our_lse, their_lse, atol=1e-3, rtol=1e-4)
        wanted = full if sum(x in "abc" for x in ids) > 1 else 0
        assert int(batches[0]._staged.tensors["prefix_lens"]) == wanted


def test_it_is_used_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = LatentPagedBatch(make(num_pages=40), 4, 70)
    sequences(batch)
    pair = queries(3, 6)
    prefix_len, asked = batch._staged.tensors["prefix_lens"], []

    def noted(call: LatentCall, *stored: Any) -> Any:
        asked.append(call.prefix is not None)
        return attend_latents(call, *stored)

    monkeypatch.setattr("kvquant.paged.latent_batch.attend_latents", noted)
    monkeypatch.setattr(sharedprefix, "MANY", 1.0)
    monkeypatch.setattr(sharedprefix, "FIXED_LATENT", 0.0)
    monkeypatch.setattr(sharedprefix, "FEW", 1.0)
    for expected in (0, 48):  # at first it is not known how many query heads there are
        with batch.extend(["a", "b", "c"], 0):
            batch.attend(0, *pair, sm_scale=SCALE)
            assert prefix_len.tolist() == [expected]
    with batch.extend(["z"], 0):
        batch.attend(0, *pair, sm_scale=SCALE)
        assert not prefix_len.any()
    assert asked == [False, True, False]


@pytest.mark.parametrize("shared", [None, True, False])
def test_compiled_code_serves_all_steps(relative_l2: Measure, shared: bool | None) -> None:
    torch._dynamo.reset()
    batch = LatentPagedBatch(make(num_pages=40), 3, 70, shared_prefix=shared)
    plain = LatentPagedBatch(batch.cache, 3, 70, shared_prefix=False)
    sequences(batch)
    pair = queries(3, 2, 6)
    counter = CompileCounterWithBackend("aot_eager")

    def attend(*pair: torch.Tensor) -> torch.Tensor:
        return batch.attend(0, pair[0], pair[1], sm_scale=SCALE)

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for ids in (["a", "b", "c"], ["z"], ["c", "a"]):
        extend(batch, ids)
        with batch.extend(ids, 2):
            for layer in range(LAYERS):
                batch.append(layer, *new_rows(2 * len(ids)))
            found = compiled(*pair)
            expected = batch.attend(0, *pair, sm_scale=SCALE)
        assert relative_l2(found[: len(ids)], expected[: len(ids)]) < 1e-5
        assert bool(found[: len(ids)].any()) and not found[len(ids) :].any()
    assert counter.frame_count == 1
    with plain.extend(["a"], 0):
        plain.attend(0, *queries(1, 6), sm_scale=SCALE)


@pytest.mark.extra("cuda")
@pytest.mark.parametrize("heads", [16, 128])
def test_what_is_launched_was_told(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver: FakeDriver = install_for_caches(monkeypatch)
    monkeypatch.setattr(mla, "kernels_for", lambda *_: "cuda")
    cache = LatentPagedKVCache(2, 64, max_num_seqs=4, max_seq_len=2048)
    calls = BatchCalls(cache, torch.bfloat16, 512, (4,), kind=LatentPagedBatch, shared_prefix=True)
    told = kernels_of([calls], runtime.gpu_of(CPU))
    assert not driver.launched
    batch = LatentPagedBatch(cache, 4, 512, shared_prefix=True)
    cache.allocate(0)
    for ids, count in (([0], 512), (range(4), 1)):
        total = count * len(ids)
        latent, rope = (torch.zeros(total, 1, n, dtype=torch.bfloat16) for n in (512, 64))
        with batch.extend(list(ids), count):
            for layer in range(2):
                if count > 1:
                    batch.append(layer, latent, rope)
                    continue
                q = [torch.zeros(4, heads, n, dtype=torch.bfloat16) for n in (512, 64)]
                batch.step(layer, q[0], q[1], latent, rope, sm_scale=SCALE)
        for child in range(1, 4):
            if child not in cache.ids:
                cache.fork(0, child)
    launched = {*loaded_specs()}
    assert launched <= {*told}
    assert any(isinstance(spec, MlaCombineSpec) and spec.shared for spec in launched)


@pytest.mark.extra("cuda")
@pytest.mark.parametrize("shared", [False, None, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernels_of_fewer_sequences_are_told(arch: str, shared: bool | None) -> None:
    """A batch of few is cut into more parts, which another kernel combines."""
    cache = LatentPagedKVCache(1, 64, max_num_seqs=48, max_seq_len=16384)
    batch = LatentPagedBatch(cache, 48, 512)
    told, needed = (
        {
            *kernels_of(
                [
                    BatchCalls(
                        cache,
                        torch.bfloat16,
                        512,
                        batches,
                        kind=LatentPagedBatch,
                        shared_prefix=shared,
                    )
                ],
                runtime.GPUS[arch],
            )
        }
        for batches in (likely_batches(batch, 3), tuple(range(1, 49)))
    )
    assert needed == told
    assert len(told) > len({spec for spec in told if not isinstance(spec, MlaCombineSpec)}) + 1


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["int4-g8+int8-g4", "fp8", "bf16"])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_gpu_shares_a_prefix_of_thousands_of_tokens(
    relative_l2: Measure, heads: int, fmt: str
) -> None:
    """Of the sizes that models have: the kernel for many heads attends to the prefix."""
    dims = {"latent_dim": 512, "rope_dim": 64}
    options: dict[str, Any] = {"page_size": 64, "num_pages": 200, "max_seq_len": 4096, **dims}
    cache = make("cuda", fmt=fmt, sink_len=4, recent_len=128, max_num_seqs=12, **options)
    batches = [LatentPagedBatch(cache, 12, 3000, shared_prefix=one) for one in (True, False)]

    def rows(count: int) -> list[torch.Tensor]:
        return [torch.randn(count, 1, dim).bfloat16().cuda() for dim in dims.values()]

    for name, count in ((0, 3000), ("z", 700)):
        cache.allocate(name)
        with batches[0].extend([name], count):
            for layer in range(LAYERS):
                batches[0].append(layer, *rows(count))
    for name in range(1, 11):
        cache.fork(0, name)
    ids = [*range(5), "z", *range(5, 11)]
    for q_len in (1, 3):
        new = rows(q_len * len(ids))
        with batches[0].extend(ids, q_len):
            for layer in range(LAYERS):
                batches[0].append(layer, *new)
        shape = (len(ids), heads) if q_len == 1 else (len(ids), q_len, heads)
        q = [torch.randn(*shape, dim).bfloat16().cuda() for dim in dims.values()]
        found = []
        for batch in batches:
            with batch.extend(ids, 0):
                if q_len > 1:  # as if the tokens were new in this step
                    batch.new_lens.fill_(q_len)
                found.append(batch.attend(1, q[0], q[1], sm_scale=SCALE, return_lse=True))
        assert int(batches[0]._staged.tensors["prefix_lens"]) >= 2816
        (ours, our_lse), (theirs, their_lse) = found
        assert bool(ours.any()) and relative_l2(ours, theirs) < 4e-3
        torch.testing.assert_close(our_lse, their_lse, atol=5e-3, rtol=1e-3)


@pytest.mark.gpu
def test_a_graph_that_shares_serves_any_steps(relative_l2: Measure) -> None:
    cache = make("cuda", num_pages=40)
    prefill = LatentPagedBatch(cache, 4, 70)
    plain = LatentPagedBatch(cache, 4, 8, shared_prefix=False)
    batch = LatentPagedBatch(cache, 4, 8, shared_prefix=True)
    sequences(prefill)
    given = [torch.full((4, 2, 6, n), torch.nan).bfloat16().cuda() for n in DIMS.values()]
    given += [torch.full((8, 1, n), torch.nan).bfloat16().cuda() for n in DIMS.values()]

    def layers(batch: LatentPagedBatch) -> list[torch.Tensor]:
        pairs = given[0], given[1], given[2], given[3]
        return [batch.step(layer, *pairs, sm_scale=SCALE) for layer in range(LAYERS)]

    with batch.extend([]):
        layers(batch)  # compiled
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = layers(batch)
    for ids, counts in ((["a", "b", "c", "z"], [2, 1, 2, 1]), (["z"], [2]), (["b", "a"], [1, 2])):
        for x in given:
            x.copy_(torch.randn(x.shape))
        given[0][len(ids) :], given[1][len(ids) :] = torch.nan, torch.nan
        with batch.extend(ids, counts):
            graph.replay()
        members = batch._staged.tensors["shares"].tolist()
        assert members == [int(len(ids) > 1 and name in "abc") for name in ids] + [0] * (
            4 - len(ids)
        )
        with plain.extend(ids, 0):
            plain.new_lens.copy_(batch.new_lens)
            for layer in range(LAYERS):
                wanted = plain.attend(layer, given[0], given[1], sm_scale=SCALE)
                assert relative_l2(outs[layer][: len(ids)], wanted[: len(ids)]) < 4e-3
                assert not outs[layer][len(ids) :].any()
