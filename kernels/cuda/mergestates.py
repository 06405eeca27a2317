"""Merge attention over a shared prefix into attention over each sequence's own tokens, in place.

    grid    rows: query heads of the sequences that share the prefix, a warp each

        prefix_out, prefix_lse   [num_kv_heads, num_members, ratio]: one query of many heads
        out, lse                 [batch, num_heads]

The states of FlashInfer's cascade (https://flashinfer.ai/2024/02/02/cascade-inference.html).
"""

import math

from numba import cuda, float32, int32, uint32, uint64

from .device import device_function
from .ptx import (
    exp2,
    high_bf16,
    high_f16,
    load_global_f32,
    load_global_u32,
    load_written_f32,
    load_written_u32,
    log2,
    low_bf16,
    low_f16,
    maximum_or_nan,
    pack_bf16,
    pack_f16,
    store_global_f32,
    store_global_u32,
)
from .statespec import MERGE

TYPES = {"Q": uint64, "i": int32}
LOG2_E, LN2 = math.log2(math.e), math.log(2)
NOTHING = -math.inf


def signature(spec):
    """The numba types of the kernel's arguments."""
    return tuple(TYPES[code] for _, code in MERGE)


def make_merge_states_kernel(spec):
    """Make the kernel, a Python function that numba compiles with `signature(spec)`."""
    WARPS, PAIRS = spec.warps, spec.head_dim // 2
    BF16 = spec.query == "bf16"
    low, high, pack = (low_bf16, high_bf16, pack_bf16) if BF16 else (low_f16, high_f16, pack_f16)

    @device_function
    def weight_of(lse, top):
        return exp2((lse - top) * float32(LOG2_E))

    # fmt: off
    def merge_states(out, lse, prefix_out, prefix_lse, members, num_members, num_heads, ratio,
                     num_rows):
        # fmt: on
        tid = uint32(cuda.threadIdx.x)
        lane = tid & uint32(31)
        row = int32(int32(cuda.blockIdx.x) * int32(WARPS) + int32(tid >> uint32(5)))
        if row >= num_rows:
            return
        member = int32(row // num_heads)
        head = int32(row - member * num_heads)
        kv_head = int32(head // ratio)
        place = uint64(member)
        if members != uint64(0):
            chosen = int32(load_global_u32(members + uint64(8) * uint64(member)))
            if chosen < int32(0):
                return
            place = uint64(chosen)
        own = place * uint64(num_heads) + uint64(head)
        other = uint64(int32(kv_head * num_members + member)) * uint64(ratio)
        other += uint64(int32(head - kv_head * ratio))

        prefix = load_global_f32(prefix_lse + uint64(4) * other)
        rest = load_written_f32(lse + uint64(4) * own)
        if prefix == float32(NOTHING):
            return
        top = maximum_or_nan(prefix, rest)
        of_prefix, of_rest = weight_of(prefix, top), weight_of(rest, top)
        total = of_prefix + of_rest
        of_prefix /= total
        of_rest /= total
        for i in range(-(-PAIRS // 32)):
            pair = lane + uint32(32 * i)
            if 32 * i + 31 < PAIRS or pair < uint32(PAIRS):
                at = out + uint64(4) * (own * uint64(PAIRS) + uint64(pair))
                a = load_global_u32(prefix_out + uint64(4) * (other * uint64(PAIRS) + uint64(pair)))
                b = load_written_u32(at)
                first = low(a) * of_prefix + low(b) * of_rest
                second = high(a) * of_prefix + high(b) * of_rest
                store_global_u32(at, pack(second, first))
        cuda.syncwarp()  # every lane has read the lse
        if lane == uint32(0):
            store_global_f32(lse + uint64(4) * own, top + log2(total) * float32(LN2))

    return merge_states
