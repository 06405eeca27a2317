"""The queries of a block's columns, by its consumers: a tile of blocks in shared memory, scaled as
in scores.py, elements in the order of K's (rows.py)."""

from numba import cuda, float32, uint32, uint64

from ...device.codes import HALVES, make_in_order
from ...device.combine import make_over_lanes
from ...device.fragments import load_sums, store_sums
from ...device.jit import device_function
from ...device.powers import inverse_of, norm_of
from ...device.ptx import (
    load_global_u32x2,
    maximum,
    store_shared_f32,
    store_shared_u32x4,
)
from ...device.warpgroup import LINE
from ..queries import make_query_row
from .spec import BLOCK, GROUP, ROWS, order_of

LANES = 8  # of a column


def make_load_unit(fmt):
    """The function that loads the eight 16-bit elements of a row that stand in a unit of a tile of
    rows of `fmt` (spec.halves_of)."""
    QUARTERS = fmt.pick(quarters=True, planes=False, nibbles=False, bytes=False, elements=False)

    @device_function
    def load_unit(row, unit):
        first = uint32(unit * uint32(8))
        second = uint32(first + uint32(4))
        if QUARTERS:
            first = uint32(
                uint32(uint32(unit >> uint32(1)) * uint32(16))
                + uint32(uint32(unit & uint32(1)) * uint32(4))
            )
            second = uint32(first + uint32(8))
        one = load_global_u32x2(row + uint64(2) * uint64(first))
        return one + load_global_u32x2(row + uint64(2) * uint64(second))

    return load_unit


def make_put_unit(fmt, codec):
    """The function that stores a unit of such elements times a factor, in the order of `fmt`."""
    (low, high), in_order = HALVES[codec], make_in_order(order_of(fmt))

    @device_function
    def put_unit(at, unit, factor):
        a, b, c, d = unit
        one = low(a) * factor, high(a) * factor, low(b) * factor, high(b) * factor
        two = low(c) * factor, high(c) * factor, low(d) * factor, high(d) * factor
        store_shared_u32x4(at, in_order(one + two))

    return put_unit


def make_load_queries(spec):
    """The function that loads a block's queries, and leaves the factors of scores."""
    fmt = spec.first.k_format
    COLUMNS, AT_ONCE = spec.block_columns, GROUP * spec.consumers // LANES
    UNITS = fmt.head_dim // 8 // LANES  # of a lane
    WORDS = 4 * UNITS
    TILE_BYTES, FACTORS = spec.tile_bytes[0], spec.factors_at
    low, high = HALVES[spec.query]
    query_row, over_lanes = make_query_row(spec.causal), make_over_lanes(LANES)
    load_unit, put_unit = make_load_unit(fmt), make_put_unit(fmt, spec.query)
    PASSES = -(-COLUMNS // AT_ONCE)
    assert COLUMNS % AT_ONCE == 0

    @device_function
    def load_queries(shared, first_query, lie, used, score_scale, thread):
        part = uint32(thread & uint32(LANES - 1))
        column = uint32(thread // uint32(LANES))
        for _ in range(PASSES):
            words = cuda.local.array(WORDS, uint32)
            for i in range(WORDS):
                words[i] = uint32(0)
            if column < used:
                at = query_row(first_query, lie, column)
                for i in range(UNITS):
                    store_sums(words, 4 * i, load_unit(at, uint32(part + uint32(LANES * i))))
            most = float32(0)
            for i in range(WORDS):
                most = maximum(most, maximum(abs(low(words[i])), abs(high(words[i]))))
            norm, _ = norm_of(over_lanes(most, maximum))
            of_party = uint32(column // uint32(ROWS))
            row = uint32(column - of_party * uint32(ROWS))
            to = uint32(shared + of_party * uint32(TILE_BYTES))
            to = uint32(to + uint32(LINE) * row)
            to = uint32(to + uint32(16) * uint32(part ^ uint32(row & uint32(7))))
            for i in range(UNITS):
                put_unit(uint32(to + uint32(BLOCK * i)), load_sums(words, 4 * i), norm)
            if part == uint32(0):
                place = uint32(shared + uint32(FACTORS))
                place = uint32(place + uint32(4) * column)
                twice = float32(2) * inverse_of(norm)  # K was halved (rows.py)
                store_shared_f32(place, score_scale * twice)
            column = uint32(column + uint32(AT_ONCE))

    return load_queries
