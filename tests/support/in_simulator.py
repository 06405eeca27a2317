"""Tests that run in numba's simulator, which needs a process of its own."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
if SIMULATED:
    import simulator
    import stand_ins_of_kernels  # noqa: F401  # before any kernel
    from numba import cuda

Array = npt.NDArray[Any]


TESTS: dict[str, Callable[[], None]] = {}  # file::test


def is_slow(test: Callable[[], None]) -> bool:
    return any(mark.name == "slow" for mark in getattr(test, "pytestmark", []))


@functools.cache
def run_in_simulator(slow: str | None) -> tuple[set[str], str]:
    """Run a slow test, file::test, or those of all files that are not slow, with the simulator on.

    A process takes three seconds to start. So conftest.py lets one worker have those of all files.

    Returns:
        The names of those that pass, file::test, and all that pytest says.
    """
    names = [slow] if slow else [name for name, test in TESTS.items() if not is_slow(test)]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "", *names]
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return set(re.findall(r"(\w+\.py::\w+) PASSED", done.stdout)), done.stdout + done.stderr


def in_simulator(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test there: numba reads NUMBA_ENABLE_CUDASIM once, when it is imported."""

    assert isinstance(test, FunctionType)
    name = f"{test.__code__.co_filename}::{test.__name__}"

    @functools.wraps(test)
    def delegated() -> None:
        passed, log = run_in_simulator(name if is_slow(delegated) else None)
        assert os.path.basename(name) in passed, log

    TESTS[name] = delegated
    return test if SIMULATED else delegated


def lanes(
    function: Callable[[int], Any],
    *,
    threads: int = 32,
    shared: int = 0,
    memory: Sequence[Array] = (),
    backwards: bool = False,
) -> list[Any]:
    """What a function gives in every thread of a block, which run together."""
    results: list[Any] = [None] * threads

    def kernel() -> None:
        lane = cuda.threadIdx.x
        results[lane] = function(lane)

    spans = [(array.ctypes.data, array.nbytes) for array in memory]
    simulator.launch(kernel, (1, 1, 1), threads, shared, (), spans, backwards=backwards)
    return results


def typed(spec: Any, values: Sequence[Any]) -> list[Any]:
    """Numbers as a kernel takes them: of its types, those of a tuple together."""
    numbers = iter(values)

    def one(kind: Any) -> Any:
        if hasattr(kind, "types"):
            return tuple(one(inner) for inner in kind.types)
        return kind(next(numbers))

    return [one(kind) for kind in spec.signature()]


def word(low: Any, high: Any) -> Any:
    """A register of two 16-bit numbers."""
    return np.array([low, high]).view(np.uint32)[0]
