"""Merge attention over a shared prefix into attention over each sequence's own tokens, in place.

    grid    rows: query heads of the sequences that share the prefix, a warp each

        prefix_out, prefix_lse   [splits, num_kv_heads, num_members * ratio], a split a lane
        out, lse                 [batch, num_heads]

The states of FlashInfer's cascade (https://flashinfer.ai/2024/02/02/cascade-inference.html).
"""

import math

from numba import cuda, float32, int32, uint32, uint64

from ..device.ptx import (
    exp2,
    high_bf16,
    high_f16,
    load_global_f32,
    load_global_f32x4,
    load_global_u64,
    load_written_f32,
    load_written_u32,
    log2,
    low_bf16,
    low_f16,
    maximum_or_nan,
    pack_bf16,
    pack_f16,
    shfl,
    shfl_xor,
    store_global_f32,
    store_global_u32x2,
)

LOG2_E, LN2 = math.log2(math.e), math.log(2)
NOTHING = -math.inf
AHEAD = 8  # splits


def make_combine_kernel(spec):
    """Make the kernel, a Python function that numba compiles with `spec.signature()`."""
    WARPS, QUADS, LOADED = spec.warps, spec.head_dim // 4, 4 * AHEAD
    BF16 = spec.query == "bf16"
    low, high, pack = (low_bf16, high_bf16, pack_bf16) if BF16 else (low_f16, high_f16, pack_f16)

    # fmt: off
    def combine(out, lse, prefix_out, prefix_lse, members, batch, num_heads, ratio,
                     splits, num_rows):
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
            at = uint64(lane) * uint64(num_rows) + other
            state = load_global_f32(prefix_lse + uint64(4) * at)
        top = state
        for i in range(5):
            top = maximum_or_nan(top, shfl_xor(top, uint32(1 << i)))
        if top == float32(NOTHING):
            return
        rest = load_written_f32(lse + uint64(4) * own)
        top = maximum_or_nan(top, rest)
        weight = exp2((state - top) * float32(LOG2_E))
        of_rest = exp2((rest - top) * float32(LOG2_E))
        total = weight
        for i in range(5):
            total += shfl_xor(total, uint32(1 << i))
        total += of_rest

        # Step 2: the sum of the outs, the loads of several on their way together
        for i in range(-(-QUADS // 32)):
            quad = lane + uint32(32 * i)
            if 32 * i + 31 < QUADS or quad < uint32(QUADS):
                at = out + uint64(8) * (own * uint64(QUADS) + uint64(quad))
                first, second = load_written_u32(at), load_written_u32(at + uint64(4))
                w, x = low(first) * of_rest, high(first) * of_rest
                y, z = low(second) * of_rest, high(second) * of_rest
            else:
                at = uint64(0)
                w = x = y = z = float32(0)
            from_split = other * uint64(QUADS) + uint64(quad)
            for start in range(0, splits, AHEAD):
                loaded = cuda.local.array(LOADED, float32)
                for j in range(AHEAD):
                    split = int32(start + j)
                    for k in range(4):
                        loaded[4 * j + k] = float32(0)
                    present = shfl(state, uint32(split)) != float32(NOTHING)
                    if present and at != uint64(0):
                        here = uint64(split) * uint64(num_rows) * uint64(QUADS) + from_split
                        four = load_global_f32x4(prefix_out + uint64(16) * here)
                        for k in range(4):
                            loaded[4 * j + k] = four[k]
                for j in range(AHEAD):
                    share = shfl(weight, uint32(int32(start + j)))
                    w += loaded[4 * j] * share
                    x += loaded[4 * j + 1] * share
                    y += loaded[4 * j + 2] * share
                    z += loaded[4 * j + 3] * share
            if at != uint64(0):
                words = pack(x / total, w / total), pack(z / total, y / total)
                store_global_u32x2(at, words[0], words[1])
        cuda.syncwarp()  # every lane has read the lse
        if lane == uint32(0):
            store_global_f32(lse + uint64(4) * own, top + log2(total) * float32(LN2))

    return combine
