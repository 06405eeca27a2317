"""What the kernels that combine parts of attention share: reductions over lanes, weighted sums.

A part is attention to some of the tokens: an output, and its log-sum-exp, by which it is weighed.
There are three of these kernels and not one, because where parts lie decides what they are:

    decode    no launch: the last block of a unit merges all columns of it, whose weights lie in
              shared memory
    MLA       a launch: a block for each column, of up to 1,024 parts; weights in shared memory
    prefix    a launch: a warp for each row, of up to 32 parts, each weighed by a lane; the output
              of the sequence's own tokens is one more part, and is overwritten, or left as it is

Source: Flash-Decoding (https://pytorch.org/blog/flash-decoding/).
"""

from numba import cuda, float32, uint32

from .fragments import add_rows, load_sums, store_sums
from .jit import device_function
from .ptx import shfl_xor


def make_over_lanes(lanes):
    """Make the function that combines a value over this many lanes, a power of two, in all."""
    STEPS = lanes.bit_length() - 1

    @device_function
    def over_lanes(value, combine):
        for i in range(STEPS):
            value = combine(value, shfl_xor(value, uint32(1 << i)))
        return value

    return over_lanes


def make_add_parts(ahead, load, weigh, by_warps=False):
    """Make the function that adds parts to four elements of an output, each times its weight.

    Args:
        ahead: parts whose loads are on their way together.
        load: a device function of a part's number and `place`: its four elements. The number may be
            up to `ahead` - 1 beyond the last part.
        weigh: one of such a number and `weights`: the weight, 0 beyond the last part.
        by_warps: whether all lanes of a warp add parts together.
    """
    LOADED = 4 * ahead

    @device_function
    def add_parts(values, parts, place, weights):
        first = uint32(0)
        while first < parts:
            loaded = cuda.local.array(LOADED, float32)
            for i in range(ahead):
                store_sums(loaded, 4 * i, load(uint32(first + uint32(i)), place))
            if by_warps:
                cuda.syncwarp()  # or ptxas would wait for the first ones sooner
            for i in range(ahead):
                weight = weigh(uint32(first + uint32(i)), weights)
                values = add_rows(values, weight, weight, load_sums(loaded, 4 * i))
            first = uint32(first + uint32(ahead))
        return values

    return add_parts
