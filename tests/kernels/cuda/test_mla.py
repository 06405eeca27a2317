"""The MLA decode kernel: in numba's simulator, as machine code, and on a GPU (-m gpu)."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from in_simulator import SIMULATED, in_simulator, typed
from mla_cases import LIMITS, MlaCase, make_mla

from kvquant.kernels.cuda.mla.spec import MlaSpec
from kvquant.kernels.cuda.runtime.compile import compile_spec

if SIMULATED:
    from kvquant.kernels.cuda.simulator import simulator


def simulate(case: MlaCase, splits: int = 1, *, backwards: bool = False, **shape: Any) -> None:
    """Compare with float64; shape: teams, stages and blocks of the spec."""
    spec = replace(case.spec, **{"teams": 1, "stages": 3} | shape)
    batch, q_len, heads, dim = case.q_latent.shape
    blocks = -(-q_len * heads // spec.block_columns)
    out = torch.full_like(case.q_latent, torch.nan)
    lse = torch.full(out.shape[:-1], torch.nan)
    units = batch * blocks
    partial = torch.full((units * splits * spec.block_columns * (dim + 1),), torch.nan)
    counters = torch.zeros(units, dtype=torch.int32)
    tensors = [case.q_latent, case.q_rope, out, lse, partial, counters, case.rows, case.seq_lens]
    values = [x.data_ptr() for x in tensors]
    for x in (case.q_lens, case.table):
        values.append(0 if x is None else x.data_ptr())
        tensors += [] if x is None else [x]
    for q in (case.q_latent, case.q_rope):
        values += [2 * step for step in q.stride()[:3]]
    table_stride = 0 if case.table is None else case.table.stride(0)
    values += [case.rows.stride(0), case.capacity, case.page_shift, table_stride, heads, q_len]
    values.append(case.sm_scale * math.log2(math.e))
    simulator.launch(
        spec.build(),
        (blocks, batch, splits),
        spec.threads,
        spec.shared_bytes,
        typed(spec, values),
        [(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in tensors],
        backwards=backwards,
    )
    assert not counters.any()
    empty = case.lse == -math.inf
    assert not out[empty].any() and bool((lse[empty] == -math.inf).all())
    error = float((out.double() - case.out).norm() / case.out.norm())
    lse_error = float((lse.double() - case.lse)[~empty].abs().max()) if (~empty).any() else 0.0
    print(f"{case.name:40} {error:.2e} {lse_error:.2e}")
    assert error < LIMITS[out.dtype]
    assert lse_error < 2e-3


@in_simulator
def test_int4_rows_of_368_bytes() -> None:
    simulate(make_mla("int4-g8+fp8-g4", 16, (33, 0, 70, 1)))
