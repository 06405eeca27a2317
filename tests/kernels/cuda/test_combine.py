"""The kernel that combines states: in numba's simulator, and as machine code. No GPU."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from in_simulator import SIMULATED, in_simulator

from kvquant.kernels.cuda.prefix import launch as launching
from kvquant.kernels.cuda.prefix.spec import CombineSpec
from kvquant.ops.merge import merge_states

if SIMULATED:
    from simulated_launches import simulated

pytestmark = pytest.mark.extra("cuda")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def run(spec: Any, batch: int, members: torch.Tensor | None, *, backwards: bool = False) -> None:
    """Compare out and lse with merge_states, which merges in float32, too."""
    torch.manual_seed(0)
    num_heads, kv_heads, ratio, splits = 6, 2, 3, 9
    count = batch if members is None else len(members)
    dtype = DTYPES[spec.query]
    out = torch.randn(batch, num_heads, spec.head_dim).to(dtype)
    shape = kv_heads, count, ratio, spec.head_dim
    # splits lie apart, as states of ranks do
    prefix_out = torch.full((splits, math.prod(shape) + 8), torch.nan)
    prefix_out = prefix_out.to(dtype if spec.rounded else torch.float32)
    prefix_out = prefix_out[:, : math.prod(shape)].unflatten(1, shape)
    prefix_out.copy_(torch.randn(prefix_out.shape))
    lse = 5 * torch.randn(batch, num_heads)
    prefix_lse = 5 * torch.randn(splits, kv_heads * count * ratio + 1)
    prefix_lse = prefix_lse[:, :-1].unflatten(1, shape[:-1])
    prefix_lse[:, 0, 0, 1] = prefix_lse[3, 1, 0, 2] = -torch.inf
    prefix_out[3, 1, 0, 2] = torch.nan  # of a split without tokens: it does not count
    lse[0, 4] = -torch.inf
    out[0, 4] = 0.0
    places = torch.arange(batch) if members is None else members
    used = places >= 0
    places = places[used]
    parts = [
        (x.transpose(0, 1).flatten(1, 2)[used], y.transpose(0, 1).flatten(1, 2)[used])
        for x, y in zip(prefix_out, prefix_lse, strict=True)
    ]
    merged = merge_states((out[places], lse[places]), *parts)
    expected = out.index_copy(0, places, merged[0]), lse.index_copy(0, places, merged[1])

    given = out, lse, prefix_out.flatten(2, 3), prefix_lse.flatten(2, 3), members
    with (
        simulated(*given, backwards=backwards),
        mock.patch.object(launching, "CombineSpec", lambda *_: spec),
    ):
        launching.combine(*given)
    rounding = {"bf16": 2**-8, "fp16": 2**-11}[spec.query]
    torch.testing.assert_close(out, expected[0], rtol=2.02 * rounding, atol=1e-6)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@in_simulator
def test_all_sequences_share_the_prefix() -> None:
    run(CombineSpec(64), 2, None)


@in_simulator
def test_some_sequences_share_the_prefix() -> None:
    run(CombineSpec(80, "fp16", warps=3), 4, torch.tensor([3, -1, 0]), backwards=True)


@in_simulator
def test_states_of_ranks_are_merged() -> None:
    run(CombineSpec(64, "bf16", rounded=True), 2, None)
