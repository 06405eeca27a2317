"""Merge attention over a shared prefix into attention over each sequence's own tokens, in place.

    grid    rows: query heads of the sequences that share the prefix, a warp each

        prefix_out, prefix_lse   [splits, num_kv_heads, num_members * ratio], a split a lane
        out, lse                 [batch, num_heads]

The states of other ranks are merged likewise, as splits of one KV head in 16 bit. Source: cascade
inference (https://flashinfer.ai/2024/02/02/cascade-inference.html).
"""

import math

from numba import cuda, float32, int32, uint32, uint64

from ..device.combine import LN2, make_add_parts, make_over_lanes, make_write
from ..device.fragments import ZEROS
from ..device.jit import device_function
from ..device.ptx import (
    add,
    exp2,
    load_global_f32,
    load_global_f32x4,
    load_global_u32x2,
    load_global_u64,
    load_written_f32,
    load_written_u32,
    log2,
    maximum_or_nan,
    shfl,
    store_global_f32,
)
from ..device.transform import make_widen
from .tile import NOTHING

LOG2_E = math.log2(math.e)
LANES = 32
AHEAD = 4  # splits whose loads are on their way together; with 8 up to 14 % slower on an H200


def make_combine_kernel(spec):
    WARPS, QUADS, ROUNDED = spec.warps, spec.head_dim // 4, spec.rounded
    QUAD_BYTES = 8 if ROUNDED else 16
    widen, write = make_widen(spec.query), make_write(spec.query)
    over_lanes = make_over_lanes(LANES)

    @device_function
    def load_rounded(address):
        words = load_global_u32x2(address)
        w, x = widen(words[0])
        y, z = widen(words[1])
        return w, x, y, z

    load_quad = load_rounded if ROUNDED else load_global_f32x4

    @device_function
    def load(split, place):
        prefix_out, stride, splits, state = place
        # a load in a branch would be waited for before the next one
        there = min(split, uint32(splits - uint32(1)))
        w, x, y, z = load_quad(prefix_out + stride * uint64(there))
        present = shfl(state, split) != float32(NOTHING)  # else its out may be anything
        zero = float32(0)
        return (
            w if present else zero,
            x if present else zero,
            y if present else zero,
            z if present else zero,
        )

    @device_function
    def weigh(split, weight):
        return shfl(weight, split)

    add_parts = make_add_parts(AHEAD, load, weigh)

    # fmt: off
    def combine(out, lse, prefix_out, prefix_lse, members, out_stride, lse_stride, batch,
                num_heads, ratio, splits, num_rows):
        # fmt: on
        tid = uint32(cuda.threadIdx.x)
        lane = tid & uint32(31)
        row = int32(int32(cuda.blockIdx.x) * int32(WARPS) + int32(tid >> uint32(5)))
        if row >= num_rows:
            return
        member = int32(row // num_heads)
        place = uint64(member)
        if members != uint64(0):
            place = load_global_u64(members + uint64(8) * uint64(member))
            if place >= uint64(batch):
                return
        head = int32(row - int32(member * num_heads))
        own = place * uint64(num_heads) + uint64(head)
        kv_head = int32(head // ratio)
        before = int32(kv_head * int32(num_rows // num_heads) + int32(member - kv_head))
        other = uint64(int32(int32(before * ratio) + head))  # kv_head, member and head - of KV head

        # Step 1: the weight of each split, in its lane, and that of the own tokens
        state = float32(NOTHING)
        if int32(lane) < splits:
            state = load_global_f32(prefix_lse + lse_stride * uint64(lane) + uint64(4) * other)
        top = over_lanes(state, maximum_or_nan)
        if top == float32(NOTHING):
            return
        rest = load_written_f32(lse + uint64(4) * own)
        top = maximum_or_nan(top, rest)
        weight = exp2((state - top) * float32(LOG2_E))
        of_rest = exp2((rest - top) * float32(LOG2_E))
        total = over_lanes(weight, add) + of_rest

        # Step 2: the sum of the outs, the loads of several on their way together
        for i in range(-(-QUADS // 32)):
            quad = lane + uint32(32 * i)
            is_mine = 32 * i + 31 < QUADS or quad < uint32(QUADS)
            at = out + uint64(8) * (own * uint64(QUADS) + uint64(quad))
            values = ZEROS
            if is_mine:
                w, x = widen(load_written_u32(at))
                y, z = widen(load_written_u32(at + uint64(4)))
                values = w * of_rest, x * of_rest, y * of_rest, z * of_rest
            readable = min(quad, uint32(QUADS - 1))
            place = uint64(QUAD_BYTES) * (other * uint64(QUADS) + uint64(readable))
            mine = prefix_out + place
            found = (mine, out_stride, uint32(splits), state)
            values = add_parts(
                values, uint32(0), uint32(AHEAD), uint32(splits), found, weight
            )
            if is_mine:
                w, x, y, z = values
                write(at, (w / total, x / total, y / total, z / total))
        cuda.syncwarp()  # every lane has read the lse
        if lane == uint32(0):
            store_global_f32(lse + uint64(4) * own, top + log2(total) * float32(LN2))

    return combine
