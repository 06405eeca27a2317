"""Combine the parts of each column of a call of MLA by their log-sum-exps, base 2.

    grid     columns of all sequences, a block each
    thread   four elements

The launch begins while the parts are attended to, and waits for them by itself (sm_90 and newer).
Source: Flash-Decoding (https://pytorch.org/blog/flash-decoding/).
"""

import math

from numba import cuda, float32, uint32, uint64

from ..decode.combine import LN2, NOTHING, make_write
from ..device.fragments import ZEROS, add_rows, load_sums, store_sums
from ..device.ptx import (
    exp2,
    load_shared_f32,
    load_written_f32,
    load_written_f32x4,
    log2,
    maximum,
    shared_address,
    shfl_xor,
    store_global_f32,
    store_shared_f32,
    wait_for_launch,
)

SEEN = -1e30  # the log-sum-exp of any token is above


def make_combine_kernel(spec):
    """Make the kernel, a Python function that numba compiles with `spec.signature()`."""
    DIM, OVERLAPS = spec.latent_dim, spec.overlaps
    AHEAD, LOADED = spec.ahead, 4 * spec.ahead
    write = make_write(spec.query)

    def combine(out, lse, part_out, part_lse, parts):
        if OVERLAPS:
            wait_for_launch()
        tid = uint32(cuda.threadIdx.x)
        row, rows = uint64(uint32(cuda.blockIdx.x)), uint64(uint32(cuda.gridDim.x))

        # Step 1: the weight of each part, by every warp, then in shared memory
        lane = uint32(tid & uint32(31))
        top = float32(NOTHING)
        part = lane
        while part < parts:
            place = row + rows * uint64(part)
            top = maximum(top, load_written_f32(part_lse + uint64(4) * place))
            part = uint32(part + uint32(32))
        for i in range(5):
            top = maximum(top, shfl_xor(top, uint32(1 << i)))
        total = float32(0)
        shared = shared_address(cuda.shared.array(0, uint32))
        part = lane
        while part < uint32(parts + uint32(AHEAD)):
            weight = float32(0)  # of parts that are not there
            if part < parts:
                place = row + rows * uint64(part)
                weight = exp2(load_written_f32(part_lse + uint64(4) * place) - top)
            total += weight
            if tid == lane:
                store_shared_f32(shared + uint32(4) * part, weight)
            part = uint32(part + uint32(32))
        for i in range(5):
            total += shfl_xor(total, uint32(1 << i))
        cuda.syncthreads()

        # Step 2: the sum of the parts, the loads of several on their way together
        values = ZEROS
        if top > float32(SEEN):
            start = uint32(0)
            while start < parts:
                loaded = cuda.local.array(LOADED, float32)
                for i in range(AHEAD):
                    part = min(uint32(start + uint32(i)), uint32(parts - uint32(1)))
                    place = row + rows * uint64(part)
                    at = part_out + uint64(4 * DIM) * place + uint64(16) * uint64(tid)
                    store_sums(loaded, 4 * i, load_written_f32x4(at))
                cuda.syncwarp()  # or ptxas would wait for the first ones sooner
                for i in range(AHEAD):
                    weight = load_shared_f32(shared + uint32(4) * uint32(start + uint32(i)))
                    values = add_rows(values, weight, weight, load_sums(loaded, 4 * i))
                start = uint32(start + uint32(AHEAD))
            share = float32(1) / total
            values = values[0] * share, values[1] * share, values[2] * share, values[3] * share
        write(out + uint64(2 * DIM) * row + uint64(8) * uint64(tid), values)
        if tid == uint32(0) and lse != uint64(0):
            log_sum = (top + log2(total)) * float32(LN2)
            if top < float32(SEEN):
                log_sum = float32(-math.inf)
            store_global_f32(lse + uint64(4) * row, log_sum)

    return combine
