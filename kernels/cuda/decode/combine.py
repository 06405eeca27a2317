"""Merge: the warps of a block through shared memory, the blocks of a unit through partials.

A unit is a sequence and up to 8 query heads of a KV head. The last of its blocks to finish merges
them all, so that no second launch is needed. It knows that it is the last by a counter, which goes
around to 0 again. Log-sum-exps are base 2 until the end.
"""

import math
from operator import add

from numba import cuda, float32, int32, uint32, uint64

from ..device.fragments import ZEROS, add_rows, load_sums, store_sums
from ..device.jit import device_function
from ..device.ptx import (
    atomic_inc_wrap,
    exp2,
    fence,
    load_shared_f32,
    load_shared_f32x4,
    load_shared_u32,
    load_written_f32,
    load_written_f32x4,
    log2,
    maximum,
    pack_bf16,
    pack_f16,
    shfl_xor,
    store_global_f32,
    store_global_f32x4,
    store_global_u32x2,
    store_shared_f32,
    store_shared_u32,
)
from .spec import AHEAD, HEADS

LN2 = math.log(2)
NOTHING = -3e38  # the lse of no tokens


def make_write(query):
    """Make the function that writes four elements of the output in its dtype."""
    pack = pack_bf16 if query == "bf16" else pack_f16

    @device_function
    def write(address, values):
        store_global_u32x2(address, pack(values[1], values[0]), pack(values[3], values[2]))

    return write


def make_combine_warps(head_dim, warps, put_output, write):
    """Make the function that merges the warps and writes a part, or the output if it is all."""
    WARPS, DIM, FOURS = warps, head_dim, head_dim // 4
    SUMS, OUTPUTS, HEAD = warps * HEADS * 4, warps * HEADS * 8, 4 * (head_dim + 4)
    WARP = HEADS * HEAD

    @device_function
    def combine_warps(shared, sums, header_sums, m0, m1, heads, results):
        total, part_out, part_lse, out, lse = results
        tid = uint32(cuda.threadIdx.x)
        lane = tid & uint32(31)
        warp = tid >> uint32(5)
        t = lane & uint32(3)
        cuda.syncthreads()
        if lane < uint32(4):  # row 0 of the header's sums: the sum of P
            at = shared + warp * uint32(HEADS * 4) + t * uint32(8)
            store_shared_f32(at, m0)
            store_shared_f32(at + uint32(4), m1)
            store_shared_f32(at + uint32(SUMS), header_sums[0])
            store_shared_f32(at + uint32(SUMS + 4), header_sums[1])
        cuda.syncthreads()
        top0 = m0
        top1 = m1
        for w in range(WARPS):
            at = shared + uint32(w * HEADS * 4) + t * uint32(8)
            top0 = maximum(top0, load_shared_f32(at))
            top1 = maximum(top1, load_shared_f32(at + uint32(4)))
        sum0 = float32(0)
        sum1 = float32(0)
        for w in range(WARPS):
            at = shared + uint32(w * HEADS * 4) + t * uint32(8)
            sum0 += load_shared_f32(at + uint32(SUMS)) * exp2(load_shared_f32(at) - top0)
            at += uint32(4)
            sum1 += load_shared_f32(at + uint32(SUMS)) * exp2(load_shared_f32(at) - top1)
        outputs = shared + uint32(OUTPUTS)
        put_output(
            outputs + warp * uint32(WARP),
            sums,
            header_sums,
            exp2(m0 - top0) / sum0,
            exp2(m1 - top1) / sum1,
            lane,
        )
        if warp == uint32(0) and lane < uint32(4):
            lse0 = top0 + log2(sum0)
            lse1 = top1 + log2(sum1)
            head = uint32(2) * t
            if total > int32(1):
                store_global_f32(part_lse + uint64(4) * uint64(head), lse0)
                store_global_f32(part_lse + uint64(4) * uint64(head) + uint64(4), lse1)
            elif lse != uint64(0):
                if head < heads:
                    store_global_f32(lse + uint64(4) * uint64(head), lse0 * float32(LN2))
                if head + uint32(1) < heads:
                    at_lse = lse + uint64(4) * uint64(head) + uint64(4)
                    store_global_f32(at_lse, lse1 * float32(LN2))
        cuda.syncthreads()
        item = tid
        while item < heads * uint32(FOURS):
            head = item // uint32(FOURS)
            four = item - head * uint32(FOURS)
            at = outputs + head * uint32(HEAD) + four * uint32(16)
            values = load_shared_f32x4(at)
            for w in range(1, WARPS):
                more = load_shared_f32x4(at + uint32(w * WARP))
                values = add_rows(values, float32(1), float32(1), more)
            place = uint64(head) * uint64(DIM) + uint64(4) * uint64(four)
            if total > int32(1):
                store_global_f32x4(part_out + uint64(4) * place, values)
            else:
                write(out + uint64(2) * place, values)
            item += uint32(32 * WARPS)

    return combine_warps


def make_combine_splits(head_dim, warps, three, write):
    """Make the function by which the last block of a unit merges the parts of all.

    Parts are numbered through the segments, which have counts[0], the first two counts[1], all
    counts[2]. A part's place in `partial` is its number and what `adds` has for its segment.
    """
    THREE = three
    DIM, FOURS, THREADS = head_dim, head_dim // 4, 32 * warps
    LANES = THREADS // HEADS  # lanes that weigh the parts of a head
    LOADED = 4 * AHEAD

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
    def combine_splits(shared, counter, heads, counts, adds, partial, part_lses, out, lse):
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
        # weights of the parts, [total, HEADS] in shared memory, zeros up to a multiple of AHEAD
        head = tid // uint32(LANES)
        mine = tid % uint32(LANES)
        padded = (total + uint32(AHEAD - 1)) // uint32(AHEAD) * uint32(AHEAD)
        top = float32(NOTHING)
        part = mine
        while part < total:
            place = part * uint32(HEADS) + head
            value = float32(0)
            if head < heads:
                here = place_of(part, counts, adds) * uint64(HEADS) + uint64(head)
                value = load_written_f32(part_lses + uint64(4) * here)
            store_shared_f32(shared + uint32(4) * place, value)
            top = maximum(top, value)
            part += uint32(LANES)
        step = uint32(1)
        while step < uint32(LANES):
            top = maximum(top, shfl_xor(top, step))
            step += step
        weights = float32(0)
        part = mine
        while part < padded:
            at = shared + uint32(4) * (part * uint32(HEADS) + head)
            weight = float32(0)
            if part < total:
                weight = exp2(load_shared_f32(at) - top)
            store_shared_f32(at, weight)
            weights += weight
            part += uint32(LANES)
        step = uint32(1)
        while step < uint32(LANES):
            weights = add(weights, shfl_xor(weights, step))
            step += step
        part = mine
        while part < total:
            at = shared + uint32(4) * (part * uint32(HEADS) + head)
            store_shared_f32(at, load_shared_f32(at) / weights)
            part += uint32(LANES)
        if mine == uint32(0) and head < heads and lse != uint64(0):
            store_global_f32(lse + uint64(4) * uint64(head), (top + log2(weights)) * float32(LN2))
        cuda.syncthreads()
        item = tid
        while item < heads * uint32(FOURS):
            head = item // uint32(FOURS)
            four = item - head * uint32(FOURS)
            place = uint64(head) * uint64(DIM) + uint64(4) * uint64(four)
            values = ZEROS
            first = uint32(0)
            while first < total:
                loaded = cuda.local.array(LOADED, float32)
                for i in range(AHEAD):
                    part = min(uint32(first + uint32(i)), uint32(total - uint32(1)))
                    here = place_of(part, counts, adds) * uint64(HEADS * DIM) + place
                    at = partial + uint64(4) * here
                    store_sums(loaded, 4 * i, load_written_f32x4(at))
                for i in range(AHEAD):
                    at = shared + uint32(4) * ((first + uint32(i)) * uint32(HEADS) + head)
                    weight = load_shared_f32(at)
                    values = add_rows(values, weight, weight, load_sums(loaded, 4 * i))
                first = uint32(first + uint32(AHEAD))
            write(out + uint64(2) * place, values)
            item = uint32(item + uint32(THREADS))

    return combine_splits


def make_write_empty(head_dim, warps, write):
    """Make the function that writes zeros, and -inf as lse, for a sequence without tokens."""
    FOURS, THREADS = head_dim // 4, 32 * warps

    @device_function
    def write_empty(heads, out, lse):
        item = uint32(cuda.threadIdx.x)
        if item < heads and lse != uint64(0):
            store_global_f32(lse + uint64(4) * uint64(item), float32(-math.inf))
        while item < heads * uint32(FOURS):
            write(out + uint64(8) * uint64(item), ZEROS)
            item += uint32(THREADS)

    return write_empty
