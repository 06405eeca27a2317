"""The queries of 64 columns as a tile of blocks in shared memory, by all threads of a block. fp16
ones are scaled as in decode/scores.py; elements have the order of codes (rows.py)."""

from numba import cuda, float32, uint32, uint64

from ...device.codes import HALVES, make_in_order
from ...device.combine import make_over_lanes
from ...device.fragments import load_sums, store_sums
from ...device.jit import device_function
from ...device.powers import norm_of
from ...device.ptx import (
    load_global_u32x4,
    maximum,
    store_shared_f32,
    store_shared_u32x4,
)
from ...device.row_layout import operand_of
from ...device.warpgroup import BLOCK, LINE
from .spec import BLOCKS, SHARES

LANES = 8  # of a column
WORDS = 4 * BLOCKS  # of a thread


def make_load_queries(spec):
    """The function that loads a block's queries, and leaves the factors of scores."""
    low, high = HALVES[spec.query]
    AS_IT_IS = operand_of(spec.latent) == "bf16"
    in_order, rope_in_order = map(make_in_order, spec.orders)
    over_lanes = make_over_lanes(LANES)

    @device_function
    def scaled(four, norm):
        one = low(four[0]) * norm, high(four[0]) * norm, low(four[1]) * norm, high(four[1]) * norm
        two = low(four[2]) * norm, high(four[2]) * norm, low(four[3]) * norm, high(four[3]) * norm
        return one + two

    @device_function
    def load_queries(shared, queries):
        latent_base, latent_query, latent_head, rope_base, rope_query, rope_head = queries[:6]
        first_column, used, heads, score_scale = queries[6:]
        tid = uint32(cuda.threadIdx.x)
        place, part = uint32(tid >> uint32(3)), uint32(tid & uint32(7))
        column = uint32(first_column + place)
        words = cuda.local.array(WORDS, uint32)
        for i in range(WORDS):
            words[i] = uint32(0)
        if column < used:
            query = uint32(column // heads)
            head = uint64(uint32(column - uint32(query * heads)))
            at = latent_base + uint64(query) * latent_query + head * latent_head
            at += uint64(uint32(16) * part)
            for b in range(BLOCKS - 1):
                store_sums(words, 4 * b, load_global_u32x4(at + uint64(128 * b)))
            at = rope_base + uint64(query) * rope_query + head * rope_head
            store_sums(words, WORDS - 4, load_global_u32x4(at + uint64(uint32(16) * part)))
        factor, norm = score_scale, float32(1)
        if not AS_IT_IS:
            most = float32(0)
            for i in range(WORDS):
                most = maximum(most, maximum(abs(low(words[i])), abs(high(words[i]))))
            norm, back = norm_of(over_lanes(most, maximum))
            factor = score_scale * back
        at = shared + uint32(LINE) * place + uint32(16) * uint32(part ^ (place & uint32(7)))
        for b in range(BLOCKS):
            four = load_sums(words, 4 * b)
            if not AS_IT_IS:
                eight = scaled(four, norm)
                if b == BLOCKS - 1:
                    four = rope_in_order(eight)
                else:
                    four = in_order(eight)
            store_shared_u32x4(at + uint32(BLOCK * b), four)
        if part == uint32(0):
            store_shared_f32(shared + uint32(SHARES) + uint32(4) * place, factor)

    return load_queries
