"""The table of a kernel's arguments, and what is derived from it. No GPU and no numba is needed."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvquant.kernels.cuda.append.launch import K, V
from kvquant.kernels.cuda.append.spec import APPEND
from kvquant.kernels.cuda.runtime.spec import Spec, Table, addresses_of, fields_of, layout_of

SIDE: Table = (("x", "P"), ("stride", "Q"), ("ring", "i"))
TABLE: Table = (("lens", "P"), ("out", "P"), ("count", "i"), ("k", SIDE), ("v", SIDE))


@dataclass(frozen=True)
class Example(Spec):
    """A kernel with a tuple for each side."""

    warps: int = 2

    arguments = TABLE


class Pair(NamedTuple):
    """A tuple of a class of its own."""

    x: int
    y: int


def test_fields_in_a_tuple_have_dotted_names() -> None:
    names = "lens out count k.x k.stride k.ring v.x v.stride v.ring".split()
    assert [name for name, _ in fields_of(TABLE)] == names
    assert addresses_of(TABLE) == ("lens", "out", "k.x", "v.x")


def test_every_field_is_naturally_aligned() -> None:
    assert layout_of(TABLE) == "@PPiPQiPQi"
    assert struct.calcsize(layout_of(TABLE)) == 3 * 8 + 3 * 8 + 2 * 8 + 4


def test_packed_constants_stand_where_their_names_do() -> None:
    constants = {"count": 3, "k.stride": 4, "k.ring": 5, "v.stride": 6, "v.ring": 7, "other": 8}
    pieces = Example().pack(constants)
    assert [piece for piece in pieces if isinstance(piece, int)] == [0, 1, 2, 3]
    layout, values = "@", list[int | bytes]()
    for piece in pieces:
        layout += "P" if isinstance(piece, int) else f"{len(piece)}s"
        values.append(10 + 10 * piece if isinstance(piece, int) else piece)
    data = struct.pack(layout, *values)
    assert struct.unpack(layout_of(TABLE), data) == (10, 20, 3, 30, 4, 5, 40, 6, 7)
    assert (Example().threads, Example().shared_bytes) == (64, 0)
    with pytest.raises(KeyError, match=r"v\.ring"):
        Example().pack({name: 0 for name in constants if name != "v.ring"})


def test_positions_of_append_come_from_its_table() -> None:
    assert (addresses_of(APPEND)[K], addresses_of(APPEND)[V]) == ("k.x", "v.x")
    assert addresses_of(APPEND)[:6] == ("packed", "exact", "evicted", "cos", "sin", "bad")


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
