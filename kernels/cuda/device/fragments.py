"""Fragments of a warp's matrices: small operations on the registers of an MMA.

lane = 4g + t      sums of D[16 x 8]:  row g    : columns 2t, 2t + 1   (sums 0 and 1)
                                       row g + 8: columns 2t, 2t + 1   (sums 2 and 3)
"""

import numpy as np
from numba import uint32

from .jit import device_function
from .ptx import shfl_xor

ZEROS = (np.float32(0), np.float32(0), np.float32(0), np.float32(0))


@device_function
def add_rows(sums, low, high, values):
    """sums + values times `low` in row g and `high` in row g + 8 of a fragment."""
    return (
        sums[0] + low * values[0],
        sums[1] + low * values[1],
        sums[2] + high * values[2],
        sums[3] + high * values[3],
    )


@device_function
def scale_columns(sums, first, second):
    """sums times `first` in column 2t and `second` in column 2t + 1 of a fragment."""
    return sums[0] * first, sums[1] * second, sums[2] * first, sums[3] * second


def make_scale_rows(first, stop):
    """The function that multiplies the sums from `first` to `stop`: those of row g by `low`, those
    of row g + 8 by `high`."""

    @device_function
    def scale_rows(sums, low, high):
        for at in range(first, stop, 4):
            sums[at] *= low
            sums[at + 1] *= low
            sums[at + 2] *= high
            sums[at + 3] *= high

    return scale_rows


def make_matrix_of(stride):
    """The function to where a lane reads for ldmatrix: 16 rows, two chunks side by side."""

    @device_function
    def matrix_of(rows, lane):
        return rows + (lane & uint32(15)) * uint32(stride) + (lane >> uint32(4)) * uint32(16)

    return matrix_of


@device_function
def over_rows(value, combine):
    """A value combined over the lanes of a column, in all of them."""
    value = combine(value, shfl_xor(value, uint32(4)))
    value = combine(value, shfl_xor(value, uint32(8)))
    return combine(value, shfl_xor(value, uint32(16)))


@device_function
def over_quad(value, combine):
    """A value combined over the four lanes of a row, in all of them."""
    value = combine(value, shfl_xor(value, uint32(1)))
    return combine(value, shfl_xor(value, uint32(2)))


@device_function
def load_sums(sums, first):
    """Four accumulators of a local array, as a fragment."""
    return sums[first], sums[first + 1], sums[first + 2], sums[first + 3]


@device_function
def store_sums(sums, first, fragment):
    sums[first] = fragment[0]
    sums[first + 1] = fragment[1]
    sums[first + 2] = fragment[2]
    sums[first + 3] = fragment[3]


@device_function
def load_pair(words, first):
    """Two words of a local array, as a B fragment."""
    return words[first], words[first + 1]
