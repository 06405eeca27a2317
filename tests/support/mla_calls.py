"""Calls of the MLA decode kernels, in numba's simulator or as they come, compared with float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import loaded_specs
from in_simulator import SIMULATED
from mla_cases import LIMITS, MlaCase

from kvquant.kernels.cuda.mla import launch as launching
from kvquant.kernels.cuda.mla.mma.spec import MlaSpec
from kvquant.kernels.cuda.mla.spec import MlaCombineSpec
from kvquant.kernels.cuda.mla.wgmma.spec import WideMlaSpec
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime.launch import GPUS
from kvquant.rows.call import LatentCall

if SIMULATED:
    from simulated_launches import simulated

AIM = "int4-g8+fp8-g4"  # rows of 368 bytes
FORMATS = (
    f"{AIM} int4-g8+int8-g4 int4-g4+bf16 int8-g4+bf16 int8-g8+int8-g4 fp8-g4+fp16 fp8 bf16 fp16"
).split()
# sizes of FlashMLA's rows that others write, and what queries are then; latents that grow by much
RAW: tuple[dict[str, Any], ...] = (
    {"scale": 1.0},
    {"scale": 1e-4, "q_scale": 100.0},
    {"scale": 1e8, "q_scale": 1e-8},
    {"scale": 1e-15, "rope_scale": 1e-3},
    {"scale": 1e-3, "growth": 1e6, "q_scale": 1e-3},
    {"scale": 1e3, "growth": 1e-5, "q_scale": 1e-3},
)
WIDE = 1e-3, 5e-3  # tolerances of lse where K becomes fp16: 2**-12 of a score, for each element
SIMULATED_GPU = replace(GPUS["sm_86"], sm_count=1)
# lets the launcher take the kernel for many heads whatever the call
OF_MANY: dict[str, Any] = {
    "NARROW": dict.fromkeys(launching.NARROW, (0, 0)),
    "LEAST": 1,
    "WARPGROUPS": SIMULATED_GPU.capability,
}
needs_warpgroups = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != launching.WARPGROUPS,
    reason="the kernel for many heads needs a Hopper GPU",
)


def attend(case: MlaCase, **options: Any) -> Any:
    """What the launcher gives."""
    queries = case.q_latent, case.q_rope
    fields = {"return_lse": True, "q_lens": case.q_lens, **options}
    return launching.attend(LatentCall(*queries, case.segments, case.sm_scale, **fields))


def simulate(
    case: MlaCase,
    splits: int = 1,
    *,
    backwards: bool = False,
    tolerances: Sequence[float] = (),
    **shape: Any,
) -> None:
    """Compare with float64; tolerances: of compare; shape: teams, stages and blocks of the spec."""
    with in_shape(*vars(case).values(), backwards=backwards, **shape):
        out, lse = attend(case, num_splits=splits)
    compare(case, out, lse, *tolerances)


def simulate_wide(case: MlaCase, splits: int = 1, **options: Any) -> None:
    """The same by the kernel for many heads, whatever the number of columns."""
    with mock.patch.multiple(launching, **OF_MANY):
        simulate(case, splits, tolerances=WIDE, **options)


@contextmanager
def in_shape(*given: Any, backwards: bool = False, **shape: Any) -> Iterator[None]:
    """Let kernels of this shape be launched in the simulator; these tensors they may use."""

    def fit(spec: MlaSpec, *_: object) -> MlaSpec:
        return replace(spec, **{"teams": 1, "stages": 3, "blocks": 1} | shape)

    with (
        simulated(*given, gpu=SIMULATED_GPU, backwards=backwards),
        mock.patch.object(launching, "_fit", fit),
        mock.patch.object(launching, "_registers_of", lambda *_: 128),
    ):
        yield


def compare(
    case: MlaCase, out: torch.Tensor, lse: torch.Tensor, rtol: float = 1e-4, atol: float = 1e-3
) -> None:
    """Compare with float64; the tolerances of lse."""
    empty = case.lse == -math.inf
    assert not out[empty].any() and bool((lse[empty] == -math.inf).all())
    assert float((out.double() - case.out).norm() / case.out.norm()) < LIMITS[out.dtype]
    torch.testing.assert_close(lse.double(), case.lse, rtol=rtol, atol=atol)


def compare_by(
    limits: dict[str, Any], case: MlaCase, *tolerances: float, **options: Any
) -> set[type]:
    """Compare with float64 where the launcher chooses by these limits.

    Returns:
        The kernels that it took, by their specs.
    """
    # it remembers launches, and so its choice
    anew: dict[str, Any] = {"_launches": {}, "_kernels": {}}
    with mock.patch.dict(vars(launching), limits), mock.patch.multiple(runtime, **anew):
        compare(case, *attend(case, **options), *tolerances)
        return {type(spec) for spec in loaded_specs()} - {MlaCombineSpec}


def compare_many_heads(case: MlaCase, **options: Any) -> None:
    """Compare the kernel for many heads with float64, however few there are and however short
    contexts are."""
    limits = {"NARROW": OF_MANY["NARROW"], "LEAST": 1}
    assert compare_by(limits, case, *WIDE, **options) == {WideMlaSpec}
