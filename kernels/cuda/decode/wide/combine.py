"""The consumers of a block that took turns on the same columns, merged through shared memory."""

from numba import cuda, float32, int32, uint32, uint64

from ...device.combine import NOTHING
from ...device.jit import device_function, in_turn
from ...device.ptx import (
    exp2,
    load_shared_f32,
    log2,
    maximum,
    store_global_f32,
    store_shared_f32,
    store_shared_f32x2,
)
from ..combine import make_write_columns
from .spec import ROWS, WARP_COLUMNS, halves_of, order_of

UNROLLED = 8  # eights of elements


def make_combine_consumers(spec, path, write):
    """Two functions: consumers leave outputs in shared memory, all threads write them."""
    COLUMNS, RINGS, PARTIES = spec.block_columns, spec.rings_of(path), spec.parties
    FMT, CAUSAL = spec.first.v_format, spec.causal
    COLUMN = 4 * (FMT.head_dim + 4)
    TOTALS, OUTPUTS = 4 * RINGS * COLUMNS, 8 * RINGS * COLUMNS
    write_columns = make_write_columns(spec, RINGS, write)
    put_output = _make_put_output(FMT, COLUMN)

    @device_function
    def combine(shared, consumer, state, results):
        sums, references, totals = state
        total, _, part_lse, _, _, _, _, _ = results
        tid = uint32(cuda.threadIdx.x)
        lane = uint32(tid & uint32(31))
        warp = uint32(uint32(tid >> uint32(5)) & uint32(3))
        g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        ring = uint32(consumer // uint32(PARTIES))
        party = uint32(consumer - ring * uint32(PARTIES))
        first = uint32(uint32(ROWS) * party + uint32(WARP_COLUMNS) * warp)
        first = uint32(first + g)
        mine = uint32(uint32(COLUMNS) * ring + first)
        cuda.syncthreads()
        if t == uint32(0):
            for h in range(2):
                at = uint32(uint32(shared + uint32(32 * h)) + uint32(4) * mine)
                store_shared_f32(at, references[h])
                store_shared_f32(uint32(at + uint32(TOTALS)), totals[h])
        cuda.syncthreads()
        shares = cuda.local.array(2, float32)
        for h in range(2):
            column = uint32(first + uint32(8 * h))
            at = uint32(shared + uint32(4) * column)
            top = references[h]
            for r in range(RINGS):
                top = maximum(top, load_shared_f32(uint32(at + uint32(4 * r * COLUMNS))))
            weights = float32(0)
            for r in range(RINGS):
                here = uint32(at + uint32(4 * r * COLUMNS))
                weight = exp2(load_shared_f32(here) - top)
                weights += load_shared_f32(uint32(here + uint32(TOTALS))) * weight
            sees = True
            if CAUSAL:
                sees = weights != float32(0)
            # twice: V was halved (rows.py)
            twice = float32(2) * exp2(references[h] - top)
            shares[h] = twice / weights if sees else float32(0)
            # of a part: the lse of a unit is not wanted (launch.describe)
            if total > int32(1) and ring == uint32(0) and t == uint32(0):
                log_sum = top + log2(weights) if sees else float32(NOTHING)
                store_global_f32(part_lse + uint64(4) * uint64(column), log_sum)
        outputs = uint32(shared + uint32(OUTPUTS))
        put_output(uint32(outputs + uint32(COLUMN) * mine), sums, shares, t)
        cuda.syncthreads()

    @device_function
    def write_outputs(shared, columns, results):
        write_columns(uint32(shared + uint32(OUTPUTS)), columns, results)

    return combine, write_outputs


def _make_put_output(fmt, column_bytes):
    """Make the function that stores the output of a lane's columns, in order."""
    starts = range(0, fmt.head_dim // 8, UNROLLED)
    return in_turn([_make_put_eight(fmt, column_bytes, i) for s in starts for i in _some(s)])


def _some(start):
    return range(start, start + UNROLLED)


def _make_put_eight(fmt, column_bytes, eight):
    ORDER, COLUMN = order_of(fmt), column_bytes
    FIRST, SECOND = halves_of(fmt, eight)
    IN_PAIRS, IN_BYTES = ORDER == "pairs", ORDER == "bytes"

    @device_function
    def put_eight(at, sums, shares, t):
        for h in range(2):
            one = sums[4 * eight + 2 * h] * shares[h]
            two = sums[4 * eight + 2 * h + 1] * shares[h]
            here = uint32(at + uint32(8 * COLUMN * h + 4 * FIRST))
            if IN_PAIRS:
                here = uint32(here + uint32(4) * t)
                store_shared_f32(here, one)
                store_shared_f32(uint32(here + uint32(4 * (SECOND - FIRST))), two)
            elif IN_BYTES:
                here = uint32(here + uint32(4) * uint32(t & uint32(1)))
                here = uint32(here + uint32(16) * uint32(t >> uint32(1)))
                store_shared_f32(here, one)
                store_shared_f32(uint32(here + uint32(8)), two)
            else:
                store_shared_f32x2(uint32(here + uint32(8) * t), one, two)

    return put_eight
