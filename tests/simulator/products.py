"""The stand-in for wgmma: products of a warpgroup, by the meaning of its descriptors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from memory import SHARED_BASE, Fault
from simulator import block

LANES, WARPS = 128, 4  # of a warpgroup
DEPTH, ROWS = 16, 64  # K and M of an instruction
Array = npt.NDArray[Any]


def stand_in(
    codec: str,
    columns: int,
    steps: Sequence[tuple[int, int, int]],
    transposed: bool,
    begin: bool,
    of_registers: bool = False,
) -> Callable[[Any, Any, Any], None]:
    """The function that does what device/warpgroup.py says; arguments as of make_products, or if
    of_registers of make_register_products."""

    def combine(given: list[Any]) -> list[None]:
        now = block()
        _, a, b = given[0]
        same = all(y == b and (of_registers or x == a) for _, x, y in given)
        assert same, "descriptors differ"
        matrices = [("b", int(b), {step[2] for step in steps}, (columns, transposed))]
        if not of_registers:
            matrices.append(("a", int(a), {step[1] for step in steps}, (ROWS, False)))
        loads = {
            (matrix, at): _load(now.shared, descriptor + at // 16, codec, *shape)
            for matrix, descriptor, places, shape in matrices
            for at in places
        }
        if of_registers:
            words = np.array([one for _, one, _ in given], np.uint32)
            loads |= {("a", at): _of_lanes(words[:, at : at + 4], codec) for _, at, _ in steps}
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
    return _numbers(shared.load_halves(range(first, first + WARPS), starts, words), codec)


def _of_lanes(words: Array, codec: str) -> Array:
    """The matrix [ROWS, DEPTH] of which each lane has four words, as of an MMA."""
    # [warp, g, t, half of k, half of m, column] -> [m, k]
    halves = words.view(np.uint16).reshape(4, 8, 4, 2, 2, 2).transpose(0, 4, 1, 3, 2, 5)
    return _numbers(np.ascontiguousarray(halves).reshape(ROWS, DEPTH), codec)


def _numbers(halves: Array, codec: str) -> Array:
    """Words of 16 bits as float64."""
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
