"""The stand-in for wgmma: products of a warpgroup, by the meaning of its descriptors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .memory import SHARED_BASE, Fault
from .simulator import block

LANES, WARPS = 128, 4  # of a warpgroup
DEPTH, ROWS = 16, 64  # K and M of an instruction
Array = npt.NDArray[Any]


def stand_in(
    codec: str, columns: int, steps: Sequence[tuple[int, int, int]], transposed: bool, begin: bool
) -> Callable[[Any, Any, Any], None]:
    """The function that does what device/warpgroup.py says; arguments as of make_products."""

    def combine(given: list[Any]) -> list[None]:
        now = block()
        _, a, b = given[0]
        assert all((x, y) == (a, b) for _, x, y in given), "descriptors differ"
        loads = {
            (matrix, at): _load(now.shared, descriptor + at // 16, codec, *shape)
            for matrix, descriptor, places, shape in (
                ("a", int(a), {step[1] for step in steps}, (ROWS, False)),
                ("b", int(b), {step[2] for step in steps}, (columns, transposed)),
            )
            for at in places
        }
        written = np.zeros(1 + max(step[0] for step in steps), bool)
        for first, of_a, of_b in steps:
            product = loads["a", of_a] @ loads["b", of_b].T
            # [warp, half, g, n, t, column] -> a lane's sums
            of_lanes = product.reshape(4, 2, 8, columns // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5)
            of_lanes = of_lanes.reshape(LANES, columns // 2)
            here = slice(first, first + columns // 2)
            for (sums, _, _), more in zip(given, of_lanes, strict=True):
                before = 0 if begin and not written[first] else sums[here].astype(np.float64)
                sums[here] = (before + more).astype(np.float32)
            written[first] = True
        return [None] * LANES

    def products(sums: Any, a: Any, b: Any) -> None:
        block().meet_group(f"wgmma of {len(steps)} steps", (sums, a, b), combine)

    return products


def _load(shared: Any, descriptor: int, codec: str, rows: int, transposed: bool) -> Array:
    """The numbers of a matrix [rows, DEPTH] that a descriptor tells, float64."""
    first = block().current.warp // WARPS * WARPS
    starts, words = _places(descriptor, rows, transposed, len(shared.bytes))
    halves: Array = shared.load_halves(range(first, first + WARPS), starts, words)
    if codec == "bf16":
        halves = (halves.astype(np.uint32) << 16).view(np.float32)
    else:
        assert codec == "fp16", codec
        halves = halves.view(np.float16)
    return halves.astype(np.float64)


@functools.lru_cache(1024)
def _places(
    descriptor: int, rows: int, transposed: bool, size: int
) -> tuple[Array, frozenset[int]]:
    """Where the numbers of a matrix lie in shared memory of this size, and in which words of it."""
    start, block_bytes, eight_bytes = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    assert descriptor >> 62 == 1, "only tiles that are swizzled over 128 bytes are simulated"
    row, k = np.mgrid[:rows, :DEPTH]
    if transposed:  # rows of the matrix stand side by side
        places = row // 64 * block_bytes + k // 8 * eight_bytes + k % 8 * 128 + row % 64 * 2
    else:
        places = row // 8 * eight_bytes + row % 8 * 128 + k * 2
    places = places + start
    places ^= (places >> 7 & 7) << 4
    places -= SHARED_BASE
    if places.min() < 0 or places.max() + 2 > size:
        raise Fault(f"shared addresses to {places.max()}: there are {size} bytes")
    return places, frozenset(np.unique(places // 4).tolist())
