"""Steps of latent rows that share a prefix: its pages are read once, with the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_cases import captured
from latent_pages import DIMS, LAYERS, SCALE, make
from paged_cases import begin
from relative_l2 import relative_l2

from kvquant import LatentPagedBatch, LatentPagedKVCache
from kvquant.kernels.cuda.mla.spec import MlaCombineSpec
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime.warmup import kernels_of
from kvquant.paged.warmup import BatchCalls, likely_batches

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LIMITS = {"cpu": 1e-5, "cuda": 4e-3}  # of relative errors: queries and results of 32 and 16 bit


def sequences(batch: LatentPagedBatch) -> None:
    """Three of a common prompt, forked at 70 tokens, and one of its own."""
    begin(batch, "a", 70)
    batch.cache.fork("a", "b")
    batch.cache.fork("a", "c")
    begin(batch, "z", 20)


@pytest.mark.extra("cuda")
@pytest.mark.parametrize("shared", [False, None, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernels_of_fewer_sequences_are_told(arch: str, shared: bool | None) -> None:
    """A batch of few is cut into more parts, which another kernel combines."""
    cache = LatentPagedKVCache(1, 64, max_num_seqs=48, max_seq_len=16384)
    batch, given = LatentPagedBatch(cache, 48, 512), (LatentPagedBatch, cache, torch.bfloat16, 512)
    told, needed = (
        {*kernels_of([BatchCalls(*given, batches, shared_prefix=shared)], runtime.GPUS[arch])}
        for batches in (likely_batches(batch, 3), tuple(range(1, 49)))
    )
    assert needed == told
    assert len(told) > len({spec for spec in told if not isinstance(spec, MlaCombineSpec)}) + 1


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["int4-g8+int8-g4", "fp8", "bf16"])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_gpu_shares_a_prefix_of_thousands_of_tokens(heads: int, fmt: str) -> None:
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
def test_a_graph_that_shares_serves_any_steps() -> None:
    cache = make("cuda", num_pages=40)
    prefill = LatentPagedBatch(cache, 4, 70)
    plain = LatentPagedBatch(cache, 4, 8, shared_prefix=False)
    batch = LatentPagedBatch(cache, 4, 8, shared_prefix=True)
    sequences(prefill)
    given = [torch.full((4, 2, 6, n), torch.nan).bfloat16().cuda() for n in DIMS.values()]
    given += [torch.full((8, 1, n), torch.nan).bfloat16().cuda() for n in DIMS.values()]

    def layers() -> list[torch.Tensor]:
        pairs = given[0], given[1], given[2], given[3]
        return [batch.step(layer, *pairs, sm_scale=SCALE) for layer in range(LAYERS)]

    with batch.extend([]):
        graph, outs = captured(layers)
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
