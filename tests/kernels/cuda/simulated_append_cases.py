"""Run append and dequantize kernels in numba's simulator: cases from stdin, one JSON a line.

A process of its own, because numba reads NUMBA_ENABLE_CUDASIM once, when it is imported. The
kernels are launched by their own launchers, so that what these pack is tested, too.
"""

from __future__ import annotations

import json
import struct
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
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
from fake_cuda import CPU, arguments_of
from in_simulator import typed
from made_up_codec import INT5

from kvquant.kernels.cuda.affine import launch as transforming
from kvquant.kernels.cuda.affine.launch import AffineSpec
from kvquant.kernels.cuda.append import launch as appending
from kvquant.kernels.cuda.append.spec import AppendSpec, FeedbackSide, FeedbackSpec, StepSpec
from kvquant.kernels.cuda.dequantize import launch as dequantizing
from kvquant.kernels.cuda.dequantize.launch import DequantizeSpec
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime import tensors
from kvquant.kernels.cuda.runtime.spec import Spec
from kvquant.kernels.cuda.simulator import simulator
from kvquant.rows.basis import Queries, transform_rows
from kvquant.rows.codec import CODECS

memory: list[tuple[int, int]] = []  # of the tensors of a call
alive: list[torch.Tensor] = []  # these, so that no others get their memory
backwards = False


class Launcher:
    """Runs a kernel in the simulator, in place of driver.Launcher."""

    def __init__(self, spec: Spec, grid: Sequence[int], layout: str, **_: Any) -> None:
        self.spec, self.grid, self.layout = spec, grid, layout

    def __call__(self, stream: int, values: Sequence[Any]) -> None:
        given = arguments_of(self.spec, struct.pack(self.layout, *values))
        if isinstance(self.spec, AffineSpec):  # where it writes, in a tensor of the launcher's
            size = 4 * given["num_rows"] * given["num_heads"] * self.spec.head_dim
            memory.append((given["y"], size))
        if isinstance(self.spec, StepSpec) and self.spec.query:
            heads = given["num_heads"] * given["step.ratio"]
            size = 2 * given["num_tokens"] * heads * self.spec.k.fmt.head_dim
            memory.append((given["step.q_out"], size))
        simulator.launch(
            self.spec.build(),
            self.grid,
            self.spec.threads,
            self.spec.shared_bytes,
            typed(self.spec, list(given.values())),
            memory,
            backwards=backwards,
        )


def note(values: Iterable[Any]) -> None:
    """Note where tensors lie."""
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            memory.append((storage.data_ptr(), storage.nbytes()))
            alive.append(value)
        elif isinstance(value, tuple):
            note(value)


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


def run_append(case: Case) -> None:
    """Compare bytes with those of the meaning."""
    call = make_call(case)
    wanted = expected(call)
    note(call.values())
    if case.queries:
        queries = make_queries(case)
        note(queries)
        check_queries(launch_append(**call, queries=queries), queries)
    elif case.matrix or case.feedback:
        launch_append(**call)
    else:
        launch_append(**call)
    problem = differences(results(call), wanted)
    assert not problem, problem


def run_dequantize(case: Case) -> None:
    """Compare values with those of the meaning."""
    pages, fmt, slots = make_pages(case)
    dtype = DTYPES[case.source]
    wanted = expected_values(pages, fmt, slots, dtype)
    out = torch.full_like(wanted, 7.0)
    note((pages, slots, out))
    dequantizing.dequantize(pages, fmt, slots, out)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)


def noted(make: Any) -> Any:
    """The same function, whose result kernels may read."""

    def make_and_note(*args: Any) -> torch.Tensor:
        made: torch.Tensor = make(*args)
        note([made])
        return made

    return make_and_note


@contextmanager
def simulated(converts_fp8: bool, shares: bool, is_step: bool) -> Iterator[None]:
    """Let the launchers launch in the simulator, one warp a block: each takes its time.

    shares: whether several lanes round a row with feedback.
    is_step: whether few tokens are multiplied and rounded in one launch.
    """

    def one_warp(make: Any) -> Any:
        return lambda *args: replace(make(*args), warps=1)

    def alone(side: FeedbackSide) -> FeedbackSide:
        return replace(side, warps=1)

    capability = (9, 0) if converts_fp8 else (8, 6)
    changes: dict[str, Any] = {
        "Launcher": Launcher,
        "kernel_of": lambda spec, index: spec,
        "current_device": lambda: CPU,
        "current_stream": lambda index: 0,
        "_gpus": {CPU: runtime.GPU("one SM", capability, 1, 0, 0)},
        "_launches": {},
    }
    of_append: dict[str, Any] = {
        "AppendSpec": one_warp(AppendSpec),
        "make_feedback_spec": lambda sides: FeedbackSpec(tuple(map(alone, sides))),
        "ROWS_PER_SM": 64 if shares else 0,
        "BLOCKS_PER_SM": 12 if is_step else 0,
        "WITH_FEEDBACK": 100 if is_step else 0,
        "transform_rows": noted(transform_rows),
    }
    of_affine: Any = {"AffineSpec": lambda *args: replace(AffineSpec(*args), warps=4)}
    with (
        mock.patch.multiple(runtime, **changes),
        mock.patch.multiple(tensors, aligned_copy=noted(tensors.aligned_copy)),
        mock.patch.multiple(appending, **of_append),
        mock.patch.multiple(transforming, **of_affine),
        mock.patch.multiple(dequantizing, DequantizeSpec=one_warp(DequantizeSpec)),
    ):
        yield


def main() -> None:
    """Answer every line of stdin."""
    global backwards
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    CODECS[INT5.name] = INT5
    for line in sys.stdin:
        task = json.loads(line)
        result = {"name": task["name"], "problem": ""}
        try:
            run = run_dequantize if task["name"].startswith("dequantize") else run_append
            for backwards in (False, True):  # noqa: B007  # the Launcher's
                memory.clear()
                alive.clear()
                name = task["name"]
                is_step = not name.startswith("feedback,") and "prompt" not in name
                with simulated("before sm_89" not in name, "a lane a row" not in name, is_step):
                    run(Case(**task["case"]))
        except BaseException:
            result["problem"] = traceback.format_exc()
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
