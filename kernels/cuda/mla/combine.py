"""Combine the parts of each column of a call of MLA by their log-sum-exps, base 2.

    grid     columns of all sequences, a block each
    group    a thread for each four elements of a column. Groups take turns: each adds the next
             `ahead` parts. Then the first group adds the sums of all groups

The launch waits for the parts by itself (sm_90 and newer). Columns of sequences that do not share a
prefix begin after its parts, which may be NaN for them.
"""

import math

from numba import cuda, float32, int32, uint32, uint64

from ..device.combine import (
    LN2,
    NOTHING,
    make_add_copies,
    make_add_parts,
    make_over_lanes,
    make_write,
)
from ..device.fragments import ZEROS
from ..device.jit import device_function
from ..device.ptx import (
    add,
    exp2,
    load_global_u32,
    load_shared_f32,
    load_written_f32,
    load_written_f32x4,
    log2,
    maximum,
    shared_address,
    store_global_f32,
    store_shared_f32,
    store_shared_f32x4,
    wait_for_launch,
)
from .spec import MOST_AHEAD, MOST_PARTS

LANES = 32
SEEN = -1e30  # the log-sum-exp of any token is above


def make_combine_kernel(spec):
    DIM, OVERLAPS, SHARED = spec.latent_dim, spec.overlaps, spec.shared
    AHEAD, GROUPS, FOURS, THREADS = spec.ahead, spec.groups, spec.latent_dim // 4, spec.threads
    WEIGHTS, OUTPUTS = 4 * (MOST_PARTS + MOST_AHEAD), spec.outputs_at
    write, over_lanes = make_write(spec.query), make_over_lanes(LANES)
    add_groups = make_add_copies(GROUPS, 16 * FOURS)

    @device_function
    def load(part, place):
        part_out, row, rows, parts = place
        part = min(part, uint32(parts - uint32(1)))
        return load_written_f32x4(part_out + uint64(4 * DIM) * (row + rows * uint64(part)))

    @device_function
    def weigh(part, shared):
        return load_shared_f32(shared + uint32(4) * part)

    add_parts = make_add_parts(AHEAD, load, weigh)

    @device_function
    def sees_prefix(row, shares, q_lens, num_heads, q_len):
        query = uint32(row // num_heads)
        b = uint32(query // q_len)
        queries = int32(q_len)
        if q_lens != uint64(0):
            queries = int32(load_global_u32(q_lens + uint64(4) * uint64(b)))
        is_query = int32(query - uint32(b * q_len)) < queries
        return is_query and load_global_u32(shares + uint64(4) * uint64(b)) != uint32(0)

    # fmt: off
    def combine(out, lse, part_out, part_lse, shares, q_lens, parts, prefix_parts, num_heads,
                q_len):
        # fmt: on
        if OVERLAPS:
            wait_for_launch()
        tid = uint32(cuda.threadIdx.x)
        row, rows = uint64(uint32(cuda.blockIdx.x)), uint64(uint32(cuda.gridDim.x))
        if SHARED:
            if not sees_prefix(uint32(cuda.blockIdx.x), shares, q_lens, num_heads, q_len):
                before = rows * uint64(prefix_parts)
                part_out += uint64(4 * DIM) * before
                part_lse += uint64(4) * before
                parts = uint32(parts - prefix_parts)

        # Step 1: the log-sum-exp of each part, then its weight, in shared memory
        lane = tid & uint32(31)
        lses = shared_address(cuda.shared.array(0, uint32))
        weights = uint32(lses + uint32(WEIGHTS))
        part = tid
        while part < parts:
            value = load_written_f32(part_lse + uint64(4) * (row + rows * uint64(part)))
            store_shared_f32(lses + uint32(4) * part, value)
            part = uint32(part + uint32(THREADS))
        cuda.syncthreads()
        top = float32(NOTHING)
        part = lane
        while part < parts:
            top = maximum(top, load_shared_f32(lses + uint32(4) * part))
            part = uint32(part + uint32(32))
        top = over_lanes(top, maximum)
        total = float32(0)
        part = lane
        while part < uint32(parts + uint32(AHEAD)):
            weight = float32(0)  # of parts that are not there
            if part < parts:
                weight = exp2(load_shared_f32(lses + uint32(4) * part) - top)
            total += weight
            if tid == lane:
                store_shared_f32(weights + uint32(4) * part, weight)
            part = uint32(part + uint32(32))
        total = over_lanes(total, add)
        cuda.syncthreads()

        # Step 2: the sum of a group's parts, the loads of several on their way together
        group = uint32(tid // uint32(FOURS))
        four = uint32(tid - uint32(group * uint32(FOURS)))
        values = ZEROS
        if top > float32(SEEN):
            mine = part_out + uint64(16) * uint64(four)
            place = (mine, row, rows, parts)
            first = uint32(group * uint32(AHEAD))
            step = uint32(AHEAD * GROUPS)
            values = add_parts(values, first, step, parts, place, weights)
            share = float32(1) / total
            values = values[0] * share, values[1] * share, values[2] * share, values[3] * share

        # Step 3: the groups
        if GROUPS > 1:
            outputs = uint32(lses + uint32(OUTPUTS))
            store_shared_f32x4(outputs + uint32(16) * tid, values)
            cuda.syncthreads()
            if group != uint32(0):
                return
            values = add_groups(uint32(outputs + uint32(16) * tid))
        write(out + uint64(2 * DIM) * row + uint64(8) * uint64(four), values)
        if tid == uint32(0) and lse != uint64(0):
            log_sum = (top + log2(total)) * float32(LN2)
            if top < float32(SEEN):
                log_sum = float32(-math.inf)
            store_global_f32(lse + uint64(4) * row, log_sum)

    return combine
