"""Merge parts of attention by their log-sum-exps: what all kernels that do so are made of.

A part is an output, and its log-sum-exp to base 2. Where parts lie decides which kernel merges:

    block     what its warps or teams have, in shared memory           add_copies
    decode    the parts of a unit: its last block, without a launch    over_lanes
    MLA       the parts of a column: a launch, a block each            over_lanes, add_parts
    prefix    the parts of a row and the output of its sequence's      over_lanes, add_parts
              own tokens, base e, in place: a launch, a warp each

Source: Flash-Decoding (https://pytorch.org/blog/flash-decoding/).
"""

import math

from numba import cuda, float32, uint32

from .codes import PACK
from .fragments import add_rows, load_sums, store_sums
from .jit import device_function
from .ptx import (
    load_shared_f32x4,
    shfl_xor,
    store_global_u32x2,
)

LN2 = math.log(2)
NOTHING = -3e38  # the log-sum-exp of no tokens


def make_write(query):
    """Make the function that writes four elements of the output in its dtype."""
    pack = PACK[query]

    @device_function
    def write(address, values):
        store_global_u32x2(address, pack(values[1], values[0]), pack(values[3], values[2]))

    return write


def make_over_lanes(lanes):
    """Make the function that combines a value over this many lanes, a power of two, in all."""
    STEPS = lanes.bit_length() - 1

    @device_function
    def over_lanes(value, combine):
        for i in range(STEPS):
            value = combine(value, shfl_xor(value, uint32(1 << i)))
        return value

    return over_lanes


def make_add_parts(ahead, load, weigh):
    """The function by which a lane adds weighed parts to four elements of an output: `ahead` of
    them, whose loads are on their way together, from `first` on, then from `first` + `step`.

    load: a part's number and `place` to its elements, up to `ahead` - 1 beyond the last part.
    weigh: such a number and `weights` to the weight, 0 beyond the last part.
    """
    LOADED = 4 * ahead

    @device_function
    def add_parts(values, first, step, parts, place, weights):
        while first < parts:
            loaded = cuda.local.array(LOADED, float32)
            for i in range(ahead):
                store_sums(loaded, 4 * i, load(uint32(first + uint32(i)), place))
            cuda.syncwarp()  # or ptxas would wait for the first ones sooner
            for i in range(ahead):
                weight = weigh(uint32(first + uint32(i)), weights)
                values = add_rows(values, weight, weight, load_sums(loaded, 4 * i))
            first = uint32(first + step)
        return values

    return add_parts


def make_add_copies(copies, step):
    """The function that adds weighed copies of four elements, `step` bytes apart."""

    @device_function
    def add_copies(address):
        values = load_shared_f32x4(address)
        for i in range(1, copies):
            more = load_shared_f32x4(uint32(address + uint32(step * i)))
            values = add_rows(values, float32(1), float32(1), more)
        return values

    return add_copies
