"""What a block works on: its tokens, their rows, what a column sees of them, where results go; for
few heads (mma/) and for many (wgmma/). A split without tokens says so."""

import math

from numba import cuda, float32, int32, uint32, uint64

from ..decode.positions import make_rows_before
from ..device.combine import LN2, NOTHING
from ..device.fragments import ZEROS
from ..device.jit import device_function
from ..device.ptx import (
    load_global_u32,
    store_global_f32,
    store_global_f32x4,
    word_from_lane,
)


@device_function
def load_length(lens, b, most):
    """A count of a sequence, kept to what there is room for."""
    length = int32(load_global_u32(lens + uint64(4) * uint64(b)))
    return int32(max(min(length, most), int32(0)))


def make_find_tokens(spec, step):
    """The function to a sequence's rows and queries, and to the rows of a split, of whole steps."""
    CAUSAL, STEP = spec.causal, step

    @device_function
    def find_tokens(seq_lens, capacity, q_lens, q_len, b, split):
        splits = uint32(cuda.gridDim.z)
        length = load_length(seq_lens, b, capacity)
        queries = q_len
        if CAUSAL and q_lens != uint64(0):
            queries = load_length(q_lens, b, q_len)
        steps = uint32(uint32(length + int32(STEP - 1)) // uint32(STEP))
        per_split = uint32(uint32(steps + splits - uint32(1)) // splits)
        begin = int32(uint32(split * per_split) * uint32(STEP))
        end = int32(min(int32(begin + int32(per_split * uint32(STEP))), length))
        return length, queries, begin, int32(word_from_lane(uint32(end), uint32(0)))

    return find_tokens


def make_find_rows(spec):
    """The function to a sequence's rows, its part of the index, and what slot_in_ring takes."""
    PLACE = spec.place

    @device_function
    def find_rows(rows, index, seq_slots, b, steps, ring):
        stride_outer, table_stride = steps
        sinks, ring_len, capacity = ring
        around = (int32(0), sinks, ring_len, capacity)
        if PLACE == "paged":
            index += uint64(4) * uint64(b) * uint64(table_stride)
        elif PLACE == "slots":
            seq_slot = load_global_u32(seq_slots + uint64(4) * uint64(b))
            rows += uint64(seq_slot) * stride_outer
        else:
            rows += uint64(b) * stride_outer
        if PLACE == "ring" or (PLACE == "slots" and index != uint64(0)):
            start = int32(load_global_u32(index + uint64(4) * uint64(b)))
            around = (start, sinks, ring_len, capacity)
        return rows, index, around

    return find_rows


rows_before_in_first, rows_before_in_second = make_rows_before(True), make_rows_before(False)


@device_function
def rows_before(position, counts, is_second):
    if is_second:
        return rows_before_in_second(position, counts)
    return rows_before_in_first(position, counts)


@device_function
def count(queries, length, b, other_lens, other_capacity, is_second, second_sinks):
    """Queries, rows of both segments (decode/positions.py), and tokens before the first query."""
    counts = (queries, length, int32(0), int32(0))
    if other_lens != uint64(0):
        other = load_length(other_lens, b, other_capacity)
        first = other if is_second else length
        second = length if is_second else other
        counts = queries, first, second, int32(max(int32(second - second_sinks), int32(0)))
    return counts, int32(int32(counts[1] + counts[2]) - queries)


@device_function
def seen_by(column, columns, counted, is_second, end):
    """Rows before `end` that a column of a query sees; columns: in use, of a query."""
    used, num_heads = columns
    counts, before = counted
    query = int32(column // uint32(num_heads))
    seen = int32(0)
    if column < used:
        after = int32(int32(before + query) + int32(1))
        seen = int32(min(rows_before(after, counts, is_second), end))
    return seen


@device_function
def seen_by_all(behind, used, counted, is_second, end):
    """Rows before `end` that all columns of a block see, the last of which is before `behind`."""
    counts, before = counted
    upto = int32(min(rows_before(int32(before + int32(1)), counts, is_second), end))
    if behind > used:
        upto = int32(0)
    return upto


def make_find_places(spec):
    """Make the function from results to their places for a block: of its first column."""
    DIM = spec.latent.head_dim

    @device_function
    def find_places(results, b, first_column, all_columns, part):
        out, lse, part_out, part_lse = results
        row = uint64(b) * uint64(all_columns) + uint64(first_column)
        out += uint64(2 * DIM) * row
        if lse != uint64(0):
            lse += uint64(4) * row
        all_rows = uint64(uint32(cuda.gridDim.y)) * uint64(all_columns)
        place = row + all_rows * uint64(part)
        return out, lse, part_out + uint64(4 * DIM) * place, part_lse + uint64(4) * place

    return find_places


@device_function
def write_lse(whole, column, log_sum, sees, lse, part_lse):
    """Write the log-sum-exp of a column, given to base 2: of a part, or of all."""
    if not whole:
        log_sum = log_sum if sees else float32(NOTHING)
        store_global_f32(part_lse + uint64(4) * uint64(column), log_sum)
    elif lse != uint64(0):
        log_sum = log_sum * float32(LN2) if sees else float32(-math.inf)
        store_global_f32(lse + uint64(4) * uint64(column), log_sum)


def make_write_nothing(spec, write):
    """Make the function that says that there are no tokens: of a part, or of all."""
    FOURS, THREADS = spec.latent.head_dim // 4, spec.threads

    @device_function
    def write_nothing(whole, columns, places):
        out, lse, part_out, part_lse = places
        item = uint32(cuda.threadIdx.x)
        if item < columns:
            write_lse(whole, item, float32(0), False, lse, part_lse)
        while item < columns * uint32(FOURS):
            if whole:
                write(out + uint64(8) * uint64(item), ZEROS)
            else:
                store_global_f32x4(part_out + uint64(16) * uint64(item), ZEROS)
            item = uint32(item + uint32(THREADS))

    return write_nothing
