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
    make_call,
    make_pages,
    results,
)

from kvquant.kernels.cuda.affine import kernel as turn
from kvquant.kernels.cuda.affine import launch as turning
from kvquant.kernels.cuda.affine.spec import TURN, TurnSpec
from kvquant.kernels.cuda.append import calibrated_launch as fitting
from kvquant.kernels.cuda.append import feedback_kernel as feedback
from kvquant.kernels.cuda.append import feedback_launch as feeding
from kvquant.kernels.cuda.append import kernel as append
from kvquant.kernels.cuda.append import launch as launching
from kvquant.kernels.cuda.append.feedback_spec import FeedbackSide, FeedbackSpec
from kvquant.kernels.cuda.dequantize import kernel as dequantize
from kvquant.kernels.cuda.dequantize import launch as dequantizing
from kvquant.kernels.cuda.device.row_spec import AppendSpec, DequantizeSpec
from kvquant.kernels.cuda.runtime import launch as loaded
from kvquant.kernels.cuda.simulator import simulator
from kvquant.rows.transforms import transform_rows

CPU = -1  # get_device() of a CPU tensor
MAKERS: dict[Any, tuple[Any, Any]] = {
    AppendSpec: (append.make_append_kernel, append.signature),
    DequantizeSpec: (dequantize.make_dequantize_kernel, dequantize.signature),
    FeedbackSpec: (feedback.make_feedback_kernel, feedback.signature),
    TurnSpec: (turn.make_turn_kernel, turn.signature),
}
memory: list[tuple[int, int]] = []  # of the tensors of a call
alive: list[torch.Tensor] = []  # these, so that no others get their memory
backwards = False


class Launcher:
    """Runs a kernel in the simulator, in place of driver.Launcher."""

    def __init__(self, spec: Any, grid: Sequence[int], layout: str) -> None:
        self.spec, self.grid, self.layout = spec, grid, layout

    def __call__(self, stream: int, values: Sequence[Any]) -> None:
        data = struct.pack(self.layout, *values)
        if isinstance(self.spec, TurnSpec):
            note_encoded(self.spec, data)
        numbers = iter(struct.unpack(self.spec.arguments, data))
        make, signature = MAKERS[type(self.spec)]
        arguments = [
            tuple(one(next(numbers)) for one in kind.types)
            if hasattr(kind, "types")
            else kind(next(numbers))
            for kind in signature(self.spec)
        ]
        simulator.launch(
            make(self.spec),
            self.grid,
            self.spec.threads,
            self.spec.shared_bytes,
            arguments,
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


def note_encoded(spec: TurnSpec, data: bytes) -> None:
    """Note where the kernel writes, in a tensor of the launcher's."""
    names = [name for name, _ in TURN]
    given = dict(zip(names, struct.unpack(spec.arguments, data), strict=True))
    memory.append((given["y"], 4 * given["num_rows"] * given["num_heads"] * spec.head_dim))


def run_append(case: Case) -> None:
    """Compare bytes with those of the meaning."""
    call = make_call(case)
    wanted = expected(call)
    note(call.values())
    append = fitting.append_calibrated if case.matrix or case.feedback else launching.append
    append(**call)
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
def simulated(converts_fp8: bool, shares: bool) -> Iterator[None]:
    """Let the launchers launch in the simulator, one warp a block: each takes its time.

    shares: whether several lanes round a row with feedback.
    """

    def one_warp(make: Any) -> Any:
        return lambda *args: replace(make(*args), warps=1)

    def alone(side: FeedbackSide) -> FeedbackSide:
        return replace(side, warps=1)

    gpu = loaded.GPU("sm_90", converts_fp8, 1, 0, 0)
    changes: dict[str, Any] = {
        "Launcher": Launcher,
        "kernel_of": lambda spec, tensor: spec,
        "gpu_of": lambda tensor: gpu,
        "current_stream": lambda index: 0,
        "_settled": {},
    }
    on_cpu: Any = {"current_device": lambda: CPU}
    copies: Any = {"aligned_copy": noted(loaded.aligned_copy)}
    of_dequantize = {"DequantizeSpec": one_warp(DequantizeSpec)}
    of_feedback: Any = {"ROWS_PER_SM": 64 if shares else 0}
    of_turn = {"TurnSpec": lambda *args: replace(TurnSpec(*args), warps=4), **copies}
    of_feedback |= {"make_feedback_spec": lambda sides: FeedbackSpec(tuple(map(alone, sides)))}
    with (
        mock.patch.multiple(loaded, **on_cpu, **copies),
        mock.patch.multiple(fitting, transform_rows=noted(transform_rows)),
        mock.patch.multiple(launching, **changes, AppendSpec=one_warp(AppendSpec)),
        mock.patch.multiple(feeding, **changes, **of_feedback),
        mock.patch.multiple(turning, **changes, **of_turn),
        mock.patch.multiple(dequantizing, **changes, **of_dequantize),
    ):
        yield


def main() -> None:
    """Answer every line of stdin."""
    global backwards
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for line in sys.stdin:
        task = json.loads(line)
        result = {"name": task["name"], "problem": ""}
        try:
            run = run_dequantize if task["name"].startswith("dequantize") else run_append
            for backwards in (False, True):  # noqa: B007  # the Launcher's
                memory.clear()
                alive.clear()
                name = task["name"]
                with simulated("before sm_89" not in name, "a lane a row" not in name):
                    run(Case(**task["case"]))
        except BaseException:
            result["problem"] = traceback.format_exc()
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
