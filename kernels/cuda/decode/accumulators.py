"""Promotion of accumulators: what keeps long sequences accurate.

Tensor cores cut the digits of a sum that do not fit, always toward zero. Codes are not negative, so
their sums grow with every token and lose a little each time, always in one direction; and of codes
times scale little is left when the shifts are added, if values have a mean near zero. Over 32,768
such tokens the error of the output was 6.8e-3. So after every PROMOTION_INTERVAL tiles a warp adds
its sums, rounded to nearest, to those that it keeps in shared memory, and starts anew. Every lane
reads and writes only its own.
"""

from numba import float32, uint32

from ..device.fragments import ZEROS, add_rows, load_sums, scale_columns, store_sums
from ..device.jit import device_function
from ..device.ptx import exp2, load_shared_f32x4, store_shared_f32x4


def make_promote(sums_of_lane):
    """Make the function that adds a warp's sums to the promoted ones, and clears them.

    Sums count from a reference, a power of two a head, that may have grown since.
    """
    FOURS = sums_of_lane // 4

    @device_function
    def promote(place, lane, sums, header_sums, any_before, before, now):
        e0 = exp2(before[0] - now[0])
        e1 = exp2(before[1] - now[1])
        at = place + lane * uint32(16)
        for i in range(FOURS + 1):
            fresh = header_sums if i == FOURS else load_sums(sums, 4 * i)
            if any_before:
                kept = scale_columns(load_shared_f32x4(at + uint32(512 * i)), e0, e1)
                fresh = add_rows(fresh, float32(1), float32(1), kept)
            store_shared_f32x4(at + uint32(512 * i), fresh)
        for i in range(FOURS):
            store_sums(sums, 4 * i, ZEROS)
        return ZEROS

    return promote


def make_add_promoted(sums_of_lane):
    """Make the function that adds the promoted sums to a warp's."""
    FOURS = sums_of_lane // 4

    @device_function
    def add_promoted(place, lane, sums, header_sums, before, now):
        e0 = exp2(before[0] - now[0])
        e1 = exp2(before[1] - now[1])
        at = place + lane * uint32(16)
        for i in range(FOURS):
            kept = scale_columns(load_shared_f32x4(at + uint32(512 * i)), e0, e1)
            total = add_rows(load_sums(sums, 4 * i), float32(1), float32(1), kept)
            store_sums(sums, 4 * i, total)
        kept = scale_columns(load_shared_f32x4(at + uint32(512 * FOURS)), e0, e1)
        return add_rows(header_sums, float32(1), float32(1), kept)

    return add_promoted
