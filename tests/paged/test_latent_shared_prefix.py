"""Steps of latent rows that share a prefix: its pages are read once, with the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from latent_pages import LAYERS, SCALE, make
from relative_l2 import relative_l2

from kvquant import LatentPagedBatch, LatentPagedKVCache
from kvquant.kernels.cuda.mla.spec import MlaCombineSpec
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime.warmup import kernels_of
from kvquant.paged.warmup import BatchCalls, likely_batches


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
