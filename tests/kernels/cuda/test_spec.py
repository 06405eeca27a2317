"""Functions of kernels that close over the same are one. No GPU is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from kvquant.kernels.cuda.runtime.spec import Spec, Table


@dataclass(frozen=True)
class Example(Spec):
    """A kernel without arguments."""

    warps: int = 2

    arguments: ClassVar[Table] = ()


class Pair(NamedTuple):
    """A tuple of a class of its own."""

    x: int
    y: int


@pytest.mark.extra("cuda")
def test_functions_that_close_over_the_same_are_one_and_are_typed_once() -> None:
    from kvquant.kernels.cuda.device import jit

    device_function: Any = jit.device_function

    def make(value: object) -> Any:
        def function(x: Any) -> Any:
            return x if value else value

        return device_function(function)

    def run(arguments: str, **names: object) -> Any:
        names["__name__"] = __name__
        exec(f"def function({arguments}):\n    return x + y\n", names)
        return device_function(names["function"])

    for value in (1, True, 1.0, -0.0, "x", None, (1, (2.0,)), make(0)):
        assert make(value) is make(value)
    values = 0, False, 0.0, -0.0, (0,), (False,), ((0.0,),), ((-0.0,),), make(0), make(1)
    assert len({id(make(value)) for value in values}) == len(values)
    # of these, values that are equal may differ, or change
    for value in ([], Example(), np.float32(1), complex(0, 0), frozenset([1]), Pair(1, 2)):
        assert make(value) is not make(value), value
    assert run("x, *, y=z", z=1) is not run("x, *, y=z", z=2)
    assert run("x", y=1) is not run("x", y=2), "globals of two modules of one name"
