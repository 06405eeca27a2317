"""Merge: the warps of a block through shared memory, the blocks of a unit through partials.

A unit is a sequence and the columns of a block. A counter, which goes around to 0 again, finds the
last of its blocks, which merges them all. Log-sum-exps are base 2 until the end.
"""

import math

from numba import cuda, float32, int32, uint32, uint64

from ..device.combine import (
    LN2,
    NOTHING,
    make_add_copies,
    make_over_lanes,
)
from ..device.fragments import ZEROS, add_rows
from ..device.jit import device_function
from ..device.ptx import (
    add,
    atomic_inc_wrap,
    commit_copies,
    copy_16,
    exp2,
    fence,
    load_shared_f32,
    load_shared_f32x4,
    load_shared_u32,
    load_written_f32,
    log2,
    maximum,
    store_global_f32,
    store_global_f32x4,
    store_shared_f32,
    store_shared_u32,
    wait_copies,
    word_from_lane,
)
from .queries import make_row_of
from .spec import AHEAD
from .variant import LOWEST, make_add_sink

LOADED_PARTS = 64  # parts of a column whose log-sum-exps its lanes load together


def make_combine_warps(spec, put_output, write):
    """The function that merges each column's warps and writes a part, or the output."""
    COLUMNS, SHARERS, EIGHTS = spec.block_columns, spec.sharers, spec.eights
    RINGS, PAIRS = spec.warps // spec.sharers, 2 * spec.eights
    COLUMN = 4 * (spec.first.v_format.head_dim + 4)  # bytes of a column's output
    CAUSAL, row_of = spec.causal, make_row_of(spec)[1]
    SINKS, add_sink = "sink_logits" in spec.variant, make_add_sink(spec)
    SUMS, OUTPUTS = 4 * RINGS * COLUMNS, 8 * RINGS * COLUMNS
    write_columns = make_write_columns(spec, RINGS, write)

    @device_function
    def combine_warps(shared, sums, header_sums, references, columns, results):
        total, _, part_lse, _, lse, lie, row, common = results
        tid = uint32(cuda.threadIdx.x)
        lane = tid & uint32(31)
        warp = tid >> uint32(5)
        t = lane & uint32(3)
        ring = warp // uint32(SHARERS)
        first = (warp - ring * uint32(SHARERS)) * uint32(8 * EIGHTS) + uint32(2) * t
        cuda.syncthreads()
        if lane < uint32(4):  # row 0 of the header's sums: the sum of P
            for e in range(EIGHTS):
                at = shared + uint32(4) * (ring * uint32(COLUMNS) + first + uint32(8 * e))
                store_shared_f32(at, references[2 * e])
                store_shared_f32(at + uint32(4), references[2 * e + 1])
                store_shared_f32(at + uint32(SUMS), header_sums[4 * e])
                store_shared_f32(at + uint32(SUMS + 4), header_sums[4 * e + 1])
        cuda.syncthreads()
        factors = cuda.local.array(PAIRS, float32)
        for i in range(PAIRS):
            column = first + uint32(8 * (i // 2) + i % 2)
            top = references[i]
            for r in range(RINGS):
                at = shared + uint32(4 * r * COLUMNS) + uint32(4) * column
                top = maximum(top, load_shared_f32(at))
            weights = float32(0)
            for r in range(RINGS):
                at = shared + uint32(4 * r * COLUMNS) + uint32(4) * column
                weight = exp2(load_shared_f32(at) - top)
                weights += load_shared_f32(at + uint32(SUMS)) * weight
            factors[i] = exp2(references[i] - top) / weights
            sees = True
            if CAUSAL:
                sees = weights != float32(0)
                if not sees:
                    factors[i] = float32(0)
            if SINKS:
                whole, left = add_sink(top + log2(weights), column, lie, row, common)
                if total <= int32(1):
                    factors[i] *= left
            if ring == uint32(0) and lane < uint32(4):
                log_sum = top + log2(weights)
                if total > int32(1):
                    log_sum = log_sum if sees else float32(NOTHING)
                    store_global_f32(part_lse + uint64(4) * uint64(column), log_sum)
                elif lse != uint64(0) and column < columns:
                    address = lse + uint64(4) * uint64(row_of(column, lie))
                    if SINKS:
                        log_sum = whole
                    store_global_f32(address, log_sum * float32(LN2))
        outputs = shared + uint32(OUTPUTS)
        mine = ring * uint32(COLUMNS) + (first - uint32(2) * t)
        put_output(outputs + mine * uint32(COLUMN), sums, header_sums, factors, lane)
        cuda.syncthreads()
        write_columns(outputs, columns, results)

    return combine_warps


def make_write_columns(spec, copies, write):
    """The function by which all threads add weighed outputs of each column, and write them."""
    COLUMNS, THREADS, DIM = spec.block_columns, spec.threads, spec.first.v_format.head_dim
    FOURS, COLUMN = DIM // 4, 4 * (DIM + 4)  # bytes of a column's output
    row_of, add_copies = make_row_of(spec)[1], make_add_copies(copies, COLUMNS * COLUMN)

    @device_function
    def write_columns(outputs, columns, results):
        total, part_out, _, out, _, lie, _, _ = results
        item = uint32(cuda.threadIdx.x)
        while item < columns * uint32(FOURS):
            column = item // uint32(FOURS)
            four = item - column * uint32(FOURS)
            at = outputs + column * uint32(COLUMN) + four * uint32(16)
            values = add_copies(at)
            in_row = uint64(4) * uint64(four)
            if total > int32(1):
                place = uint64(column) * uint64(DIM) + in_row
                store_global_f32x4(part_out + uint64(4) * place, values)
            else:
                place = uint64(row_of(column, lie)) * uint64(DIM) + in_row
                write(out + uint64(2) * place, values)
            item = uint32(item + uint32(THREADS))

    return write_columns


def make_combine_splits(spec, write):
    """The function by which the last block of a unit merges the parts of all.

    The first segment has counts[0] parts, the first two counts[1], all counts[2]. A part's place in
    `partial` is its number and what `adds` has for its segment. A thread copies parts into slots of
    its own in shared memory, the first ones while the block computes weights.
    """
    THREE, THREADS, COLUMNS = spec.segments == 3, spec.threads, spec.block_columns
    DIM, FOURS = spec.first.v_format.head_dim, spec.first.v_format.head_dim // 4
    CAUSAL, row_of = spec.causal, make_row_of(spec)[1]
    SINKS, add_sink = "sink_logits" in spec.variant, make_add_sink(spec)
    # lanes that weigh the parts of a column, a power of two; perhaps some are left over
    LANES = 1 << (THREADS // COLUMNS).bit_length() - 1
    over_lanes = make_over_lanes(LANES)
    LOADED = max(1, LOADED_PARTS // LANES)
    ASKED, ASKED_AT, ASKED_BYTES = spec.asked, spec.asked_at, spec.asked_bytes
    wait_for_oldest = wait_copies[ASKED - 1]

    @device_function
    def place_of(number, counts, adds):
        added = adds[0]
        if THREE:
            if number >= counts[0]:
                added = adds[1]
            if number >= counts[1]:
                added = adds[2]
        return uint64(uint32(number + added))

    @device_function
    def ask(slot, item, part, total, parts, items):
        """Ask for the next parts of four elements, into the thread's own slots."""
        counts, adds, partial, _ = parts
        if item < items:
            column = uint32(item // uint32(FOURS))
            four = uint32(item - uint32(column * uint32(FOURS)))
            element = uint64(column) * uint64(DIM) + uint64(4) * uint64(four)
            for i in range(AHEAD):
                number = uint32(part + uint32(i))
                size = uint32(16) if number < total else uint32(0)  # zeros beyond the last part
                number = min(number, uint32(total - uint32(1)))
                here = place_of(number, counts, adds) * uint64(COLUMNS * DIM) + element
                place = uint32(slot + uint32(16 * THREADS * i))
                copy_16(place, partial + uint64(4) * here, size)
        commit_copies()

    @device_function
    def following(item, part, total):
        """The next item and part. An item is four elements of a column."""
        part = uint32(part + uint32(AHEAD))
        if part >= total:
            part = uint32(0)
            item = uint32(item + uint32(THREADS))
        return item, part

    @device_function
    def combine_splits(shared, counter, columns, parts, results):
        counts, adds, _, part_lses = parts
        out, lse, lie, row, common = results
        tid = uint32(cuda.threadIdx.x)
        total = counts[2]
        cuda.syncthreads()  # every thread has written its part
        if tid == uint32(0):
            fence()
            store_shared_u32(shared, atomic_inc_wrap(counter, total - uint32(1)))
        cuda.syncthreads()
        before = load_shared_u32(shared)
        cuda.syncthreads()
        if before != total - uint32(1):
            return
        fence()
        # a shuffle hides both from the compilers: they would compute addresses of the merge before
        # the attention, and keep these in registers meanwhile
        tid = word_from_lane(tid, tid & uint32(31))
        shared = word_from_lane(shared, tid & uint32(31))
        # the first copies run while the block computes the weights
        items = uint32(columns * uint32(FOURS))
        slots = uint32(uint32(shared + uint32(ASKED_AT)) + uint32(16) * tid)
        asked = tid
        asked_part = uint32(0)
        for i in range(ASKED):
            ask(uint32(slots + uint32(ASKED_BYTES * i)), asked, asked_part, total, parts, items)
            asked, asked_part = following(asked, asked_part, total)
        # weights of the parts, [total, COLUMNS] in shared memory, zeros up to a multiple of AHEAD
        column = tid // uint32(LANES)
        mine = tid % uint32(LANES)
        if tid >= uint32(LANES * COLUMNS):
            mine = uint32(1 << 31)  # beyond all parts
        padded = (total + uint32(AHEAD - 1)) // uint32(AHEAD) * uint32(AHEAD)
        top = float32(NOTHING)
        part = mine
        while part < total:
            lses = cuda.local.array(LOADED, float32)
            for i in range(LOADED):  # without branches, so that all loads are under way together
                number = min(uint32(part + uint32(LANES * i)), uint32(total - uint32(1)))
                here = place_of(number, counts, adds) * uint64(COLUMNS) + uint64(column)
                lses[i] = load_written_f32(part_lses + uint64(4) * here)
            for i in range(LOADED):
                number = uint32(part + uint32(LANES * i))
                if number < total:
                    value = lses[i] if column < columns else float32(0)
                    at = shared + uint32(4) * uint32(number * uint32(COLUMNS) + column)
                    store_shared_f32(at, value)
                    top = maximum(top, value)
            part = uint32(part + uint32(LANES * LOADED))
        top = over_lanes(top, maximum)
        weights = float32(0)
        part = mine
        while part < padded:
            at = shared + uint32(4) * (part * uint32(COLUMNS) + column)
            weight = float32(0)
            if part < total:
                weight = exp2(load_shared_f32(at) - top)
            store_shared_f32(at, weight)
            weights += weight
            part += uint32(LANES)
        weights = over_lanes(weights, add)
        if SINKS:
            whole, left = add_sink(top + log2(weights), column, lie, row, common)
        part = mine
        while part < total:
            at = shared + uint32(4) * (part * uint32(COLUMNS) + column)
            weight = load_shared_f32(at) / weights
            if SINKS:
                weight *= left
            store_shared_f32(at, weight)
            part += uint32(LANES)
        if mine == uint32(0) and column < columns and lse != uint64(0):
            address = lse + uint64(4) * uint64(row_of(column, lie))
            log_sum = (top + log2(weights)) * float32(LN2)
            if SINKS:
                log_sum = whole * float32(LN2)
            if CAUSAL and log_sum < float32(LOWEST):
                log_sum = float32(-math.inf)
            store_global_f32(address, log_sum)
        cuda.syncthreads()
        item = tid
        stage = uint32(0)
        while item < items:
            column = uint32(item // uint32(FOURS))
            four = uint32(item - uint32(column * uint32(FOURS)))
            values = ZEROS
            part = uint32(0)
            while part < total:
                wait_for_oldest()
                slot = uint32(slots + uint32(stage * uint32(ASKED_BYTES)))
                for i in range(AHEAD):
                    number = uint32(part + uint32(i))
                    at = shared + uint32(4) * uint32(number * uint32(COLUMNS) + column)
                    weight = load_shared_f32(at)
                    four_of_part = load_shared_f32x4(uint32(slot + uint32(16 * THREADS * i)))
                    values = add_rows(values, weight, weight, four_of_part)
                ask(slot, asked, asked_part, total, parts, items)
                asked, asked_part = following(asked, asked_part, total)
                stage = uint32(stage + uint32(1)) if stage != uint32(ASKED - 1) else uint32(0)
                part = uint32(part + uint32(AHEAD))
            place = uint64(row_of(column, lie)) * uint64(DIM) + uint64(4) * uint64(four)
            write(out + uint64(2) * place, values)
            item = uint32(item + uint32(THREADS))

    return combine_splits


def make_write_empty(spec, write):
    """Make the function that writes zeros, and -inf as lse, for a sequence without tokens."""
    FOURS, THREADS = spec.first.v_format.head_dim // 4, spec.threads
    CAUSAL, row_of = spec.causal, make_row_of(spec)[1]

    @device_function
    def write_empty(columns, out, lse, lie):
        item = uint32(cuda.threadIdx.x)
        if item < columns and lse != uint64(0):
            store_global_f32(lse + uint64(4) * uint64(row_of(item, lie)), float32(-math.inf))
        while item < columns * uint32(FOURS):
            place = uint64(item)
            if CAUSAL:
                column = item // uint32(FOURS)
                place = uint64(row_of(column, lie)) * uint64(FOURS)
                place += uint64(item - column * uint32(FOURS))
            write(out + uint64(8) * place, ZEROS)
            item += uint32(THREADS)

    return write_empty
