"""Run append and dequantize kernels in numba's simulator: cases from stdin.

A process of its own, because numba reads NUMBA_ENABLE_CUDASIM once, when it is imported. The
kernels are launched by their own launchers, so that what these pack is tested, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from append_cases import (
    DTYPES,
    Case,
    differences,
    expected,
    expected_values,
    launch_append,
    make_call,
    make_pages,
    results,
)
from simulated_launches import Simulation, orders_of, simulated
from simulator_cases import answer

from kvquant.kernels.cuda.affine import launch as transforming
from kvquant.kernels.cuda.affine.launch import AffineSpec
from kvquant.kernels.cuda.append import launch as appending
from kvquant.kernels.cuda.append.spec import AppendSpec, FeedbackSide, FeedbackSpec
from kvquant.kernels.cuda.dequantize import launch as dequantizing
from kvquant.kernels.cuda.dequantize.launch import DequantizeSpec
from kvquant.kernels.cuda.runtime import tensors
from kvquant.kernels.cuda.runtime.launch import GPUS
from kvquant.rows.basis import Queries, transform_rows


def make_queries(case: Case) -> Queries:
    """Queries of every token, and a matrix for each KV head."""
    q = torch.randn(case.tokens, case.queries * case.heads, case.head_dim)
    matrix = torch.randn(case.heads, case.head_dim, case.head_dim)
    if case.layout == "fused":
        q = torch.cat([q, q.new_full((*q.shape[:2], 2), torch.nan)], 2)[..., : case.head_dim]
    return Queries(q.to(DTYPES[case.source]), matrix)


def check_queries(got: torch.Tensor | None, queries: Queries) -> None:
    """Compare queries times their matrix with float64: one rounding, and sums in float32."""
    x, matrix = (one.double() for one in queries)
    rows = x.unflatten(1, (len(matrix), -1))
    wanted, size = (
        torch.einsum("bhgd,hde->bhge", a, b).flatten(1, 2)
        for a, b in ((rows, matrix), (rows.abs(), matrix.abs()))
    )
    assert got is not None and got.dtype == queries.x.dtype and got.shape == x.shape
    rounding = 2**-8 if got.dtype == torch.bfloat16 else 2**-11
    limit = rounding * wanted.abs() + 45 * 2**-24 * size + 2**-25
    assert bool(((got.double() - wanted).abs() <= limit).all())


def run_append(case: Case, simulation: Simulation) -> None:
    """Compare bytes with those of the meaning."""
    call = make_call(case)
    wanted = expected(call)
    simulation.note(call)
    if case.queries:
        queries = make_queries(case)
        simulation.note(queries)
        check_queries(launch_append(**call, queries=queries), queries)
    else:
        launch_append(**call)
    problem = differences(results(call), wanted)
    assert not problem, problem


def run_dequantize(case: Case, simulation: Simulation) -> None:
    """Compare values with those of the meaning."""
    pages, fmt, slots = make_pages(case)
    dtype = DTYPES[case.source]
    wanted = expected_values(pages, fmt, slots, dtype)
    out = torch.full_like(wanted, 7.0)
    simulation.note(pages, slots, out)
    dequantizing.dequantize(pages, fmt, slots, out)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)


@contextmanager
def one_warp_blocks(
    converts_fp8: bool, shares: bool, blocks_of_step: int, backwards: bool
) -> Iterator[Simulation]:
    """Let the launchers launch in the simulator, one warp a block: each takes its time.

    shares: whether several lanes round a row with feedback.
    blocks_of_step: the most by which tokens are multiplied and rounded in one launch; 0: more
        launches do.
    """

    def one_warp(make: Any) -> Any:
        return lambda *args: replace(make(*args), warps=1)

    def alone(side: FeedbackSide) -> FeedbackSide:
        return replace(side, warps=1)

    gpu = replace(GPUS["sm_90" if converts_fp8 else "sm_86"], sm_count=1)
    of_append: dict[str, Any] = {
        "AppendSpec": one_warp(AppendSpec),
        "make_feedback_spec": lambda sides: FeedbackSpec(tuple(map(alone, sides))),
        "ROWS_PER_SM": 64 if shares else 0,
        "BLOCKS_PER_SM": blocks_of_step,
        "WITH_FEEDBACK": 100 if blocks_of_step else 0,
    }
    of_affine: Any = {"AffineSpec": lambda *args: replace(AffineSpec(*args), warps=4)}
    with (
        simulated(gpu=gpu, backwards=backwards) as simulation,
        mock.patch.multiple(tensors, aligned_copy=simulation.noted(tensors.aligned_copy)),
        mock.patch.multiple(appending, transform_rows=simulation.noted(transform_rows)),
        mock.patch.multiple(appending, **of_append),
        mock.patch.multiple(transforming, **of_affine),
        mock.patch.multiple(dequantizing, DequantizeSpec=one_warp(DequantizeSpec)),
    ):
        yield simulation


def run_case(name: str, options: dict[str, Any]) -> dict[str, float]:
    """Compare with the meaning; a name says how the kernels run."""
    run = run_dequantize if name.startswith("dequantize") else run_append
    is_step = not name.startswith("feedback,") and "prompt" not in name
    how = (
        "before sm_89" not in name,
        "a lane a row" not in name,
        (3 if "few blocks" in name else 12) * is_step,
    )
    case = Case(**options)
    for backwards in orders_of(name, both=case.exact != ""):  # rows leave their slots
        with one_warp_blocks(*how, backwards) as simulation:
            run(case, simulation)
    return {}


if __name__ == "__main__":
    answer(run_case)
