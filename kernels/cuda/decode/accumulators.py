"""Promotion of accumulators: what keeps long sequences accurate.

Tensor cores cut digits toward zero. Codes are not negative, so their sums lose a little with every
token, always in one direction. So after every PROMOTION_INTERVAL tiles a warp adds its sums,
rounded to nearest, to those in shared memory, and starts anew.
"""

from numba import float32, uint32

from ..device.fragments import ZEROS, add_rows, load_sums, scale_columns, store_sums
from ..device.jit import device_function, in_turn
from ..device.ptx import (
    exp2,
    load_shared_f32,
    load_shared_f32x4,
    store_shared_f32x2,
    store_shared_f32x4,
)

UNROLLED = 17  # fragments: a longer loop stays one, and puts the sums into local memory


def make_promote(sums_of_lane, eights):
    """The function that adds a warp's sums to the promoted ones, and clears them.

    Sums count from a reference, a power of two a column, that may have grown since.
    """
    pieces = _pieces(sums_of_lane // 4 + 1, eights)
    return in_turn([_make_promote_piece(sums_of_lane, *piece) for piece in pieces])


def _make_promote_piece(sums_of_lane, e, start, stop):
    """Make the function that promotes fragments of the e-th eight of a warp's columns."""
    FIRST, FOURS = e * sums_of_lane, sums_of_lane // 4
    PLACE, HEADER, COLUMN = (512 * (FOURS + 1) + 256) * e, 4 * e, 2 * e
    START, STOP, IS_LAST = start, stop, stop == FOURS + 1
    growth = _make_growth(e)

    @device_function
    def promote_piece(place, lane, sums, header_sums, any_before, now):
        at = place + uint32(PLACE) + lane * uint32(16)
        before = place + uint32(PLACE + 512 * (FOURS + 1)) + lane * uint32(8)
        e0 = float32(0)
        e1 = float32(0)
        if any_before:
            e0, e1 = growth(before, now)
        if IS_LAST:
            store_shared_f32x2(before, now[COLUMN], now[COLUMN + 1])
        for i in range(START, STOP):
            fresh = load_sums(header_sums, HEADER)
            if i < FOURS:
                fresh = load_sums(sums, FIRST + 4 * i)
            if any_before:
                kept = scale_columns(load_shared_f32x4(at + uint32(512 * i)), e0, e1)
                fresh = add_rows(fresh, float32(1), float32(1), kept)
            store_shared_f32x4(at + uint32(512 * i), fresh)
        for i in range(START, STOP):
            if i < FOURS:
                store_sums(sums, FIRST + 4 * i, ZEROS)
            else:
                store_sums(header_sums, HEADER, ZEROS)

    return promote_piece


def make_add_promoted(sums_of_lane, eights):
    """Make the function that adds the promoted sums to a warp's."""
    pieces = _pieces(sums_of_lane // 4 + 1, eights)
    return in_turn([_make_add_piece(sums_of_lane, *piece) for piece in pieces])


def _make_add_piece(sums_of_lane, e, start, stop):
    """Make the function that adds promoted fragments of the e-th eight of a warp's columns."""
    FIRST, FOURS = e * sums_of_lane, sums_of_lane // 4
    PLACE, HEADER = (512 * (FOURS + 1) + 256) * e, 4 * e
    START, STOP = start, stop
    growth = _make_growth(e)

    @device_function
    def add_piece(place, lane, sums, header_sums, now):
        at = place + uint32(PLACE) + lane * uint32(16)
        e0, e1 = growth(place + uint32(PLACE + 512 * (FOURS + 1)) + lane * uint32(8), now)
        for i in range(START, STOP):
            kept = scale_columns(load_shared_f32x4(at + uint32(512 * i)), e0, e1)
            if i < FOURS:
                total = add_rows(load_sums(sums, FIRST + 4 * i), float32(1), float32(1), kept)
                store_sums(sums, FIRST + 4 * i, total)
            else:
                total = add_rows(load_sums(header_sums, HEADER), float32(1), float32(1), kept)
                store_sums(header_sums, HEADER, total)

    return add_piece


def _pieces(fragments, eights):
    """(eight, first fragment, end) of loops short enough to be unrolled; the header comes last."""
    starts = range(0, fragments, UNROLLED)
    return [(e, i, min(i + UNROLLED, fragments)) for e in range(eights) for i in starts]


def _make_growth(e):
    """The function from references then and now to the factors of an eight's two columns."""
    COLUMN = 2 * e

    @device_function
    def growth(before, now):
        first = load_shared_f32(before)
        second = load_shared_f32(before + uint32(4))
        return exp2(first - now[COLUMN]), exp2(second - now[COLUMN + 1])

    return growth
