"""Attention of a block's queries to one tile, while the next tile is made fp16; see kernel.py.

    S = q K^T     16 queries x 8 tokens an MMA       online softmax, rescaled lazily (mainloop.py)
    O += P V      16 queries x 8 elements            P stays in registers

Parts of `span` tokens let scores fit the registers; between MMAs stand pieces of the next tile.
"""

import math

from numba import cuda, float32, int32, uint32

from ..device.fragments import load_pair, load_sums, over_quad, store_sums
from ..device.jit import device_function, in_turn
from ..device.ptx import (
    any_lane,
    exp2,
    load_matrix_x4,
    load_matrix_x4_t,
    maximum,
    mma_f16,
    pack_f16,
)
from .expand import make_expand
from .spec import ROWS

LAZY = 4  # powers of two that a score may exceed the maximum by
NOTHING = -math.inf  # score of a row that is not there


def make_attend_tile(spec):
    """The function that adds a tile to the sums of a warp's queries.

    Arguments: places (queries, keys, values, the next tile's rows and where they go; first token,
    end, t), powers (what undoes that of K, and those of the next tile); by query of a lane the
    factor of its scores, maximum, total; sums.
    """
    K, V, TOKENS, THREADS = spec.k_format, spec.v_format, spec.tokens, spec.threads
    BLOCKS, K_STRIDE, V_STRIDE = spec.blocks, spec.stride(K), spec.stride(V)
    V_STAGE, V_TILE = spec.k_bytes, TOKENS * K_STRIDE
    SPAN, PARTS = spec.span, TOKENS // spec.span
    HALVES, SCORES = 2 * BLOCKS, BLOCKS * SPAN // 2
    WORDS, KEYS = SCORES // 2, SPAN // 4
    STEPS, V_STEPS, PAIRS = K.head_dim // 16, -(-V.head_dim // 32), SPAN // 16
    BLOCK_SUMS = V.head_dim // 2
    expand_k, K_PIECES = make_expand(K, K_STRIDE, TOKENS, THREADS)
    expand_v, V_PIECES = make_expand(V, V_STRIDE, TOKENS, THREADS)
    rescale = make_rescale(spec)

    def make_scores_step(step, part):
        """16 elements of q K^T of a part of a tile, and pieces of the K of the next to fp16."""
        turn, turns = part * STEPS + step, PARTS * STEPS
        pieces = [i for i in range(K_PIECES) if i * turns // K_PIECES == turn]
        FIRST, COUNT = pieces[0] if pieces else 0, len(pieces)

        @device_function
        def add(scores, queries, keys, stage, target, power):
            k = cuda.local.array(KEYS, uint32)
            for pair in range(PAIRS):
                at = keys + uint32(K_STRIDE * (SPAN * part + 16 * pair) + 32 * step)
                store_sums(k, 4 * pair, load_matrix_x4(at))
            for b in range(BLOCKS):
                q = load_matrix_x4(queries + uint32(ROWS * K_STRIDE * b + 32 * step))
                for i in range(2 * PAIRS):
                    at = 4 * (b * 2 * PAIRS + i)
                    store_sums(scores, at, mma_f16(q, load_pair(k, 2 * i), load_sums(scores, at)))
            for i in range(COUNT):
                expand_k(stage, target, power, FIRST + i)

        return add

    def make_values_step(step, part):
        """32 elements of P V of a part of a tile, and pieces of the V of the next to fp16."""
        turn, turns = part * V_STEPS + step, PARTS * V_STEPS
        pieces = [i for i in range(V_PIECES) if i * turns // V_PIECES == turn]
        FIRST, COUNT = pieces[0] if pieces else 0, len(pieces)
        START, END = 2 * step, min(2 * step + 2, V.head_dim // 16)

        @device_function
        def add(sums, p, values, stage, target, power):
            for pair in range(PAIRS):
                for c in range(START, END):
                    at = values + uint32(V_STRIDE * (SPAN * part + 16 * pair) + 32 * c)
                    v = load_matrix_x4_t(at)
                    for b in range(BLOCKS):
                        a = load_sums(p, 4 * (b * PAIRS + pair))
                        at = BLOCK_SUMS * b + 8 * c
                        first = mma_f16(a, (v[0], v[1]), load_sums(sums, at))
                        second = mma_f16(a, (v[2], v[3]), load_sums(sums, at + 4))
                        store_sums(sums, at, first)
                        store_sums(sums, at + 4, second)
            for i in range(COUNT):
                expand_v(stage, target, power, FIRST + i)

        return add

    @device_function
    def largest_score(scores, b, half):
        most = float32(NOTHING)
        for i in range(2 * PAIRS):
            at = 4 * (b * 2 * PAIRS + i) + 2 * half
            most = maximum(most, maximum(scores[at], scores[at + 1]))
        return most

    def make_attend_part(part):
        add_scores = in_turn([make_scores_step(i, part) for i in range(STEPS)])
        add_values = in_turn([make_values_step(i, part) for i in range(V_STEPS)])

        @device_function
        def attend_part(places, powers, back, maxima, totals, sums):
            queries, keys, values, stage, target, first, end, t = places
            unscale, next_k, next_v = powers
            scores = cuda.local.array(SCORES, float32)
            for i in range(SCORES):
                scores[i] = float32(0)
            add_scores(scores, queries, keys, stage, target, next_k)
            first = int32(first + int32(SPAN * part))
            if int32(first + int32(SPAN)) > end:
                for i in range(SCORES):
                    column = int32(8 * (i // 4 % (2 * PAIRS)) + i % 2)
                    if int32(first + column) + int32(uint32(2) * t) >= end:
                        scores[i] = float32(NOTHING)

            # the maximum, of a lane's scores first
            largest = cuda.local.array(HALVES, float32)
            above = uint32(0)
            for i in range(HALVES):
                largest[i] = largest_score(scores, i // 2, i % 2) * (back[i] * unscale)
                if largest[i] > maxima[i] + float32(LAZY):
                    above = uint32(1)
            if any_lane(above) != uint32(0):
                for i in range(HALVES):
                    most = maximum(maxima[i], over_quad(largest[i], maximum))
                    largest[i] = exp2(maxima[i] - most)
                    maxima[i] = most
                    totals[i] *= largest[i]
                for b in range(BLOCKS):
                    rescale(sums, largest[2 * b], largest[2 * b + 1], b)

            # the probabilities, as they stand in A fragments
            p = cuda.local.array(WORDS, uint32)
            for b in range(BLOCKS):
                low, high = back[2 * b] * unscale, back[2 * b + 1] * unscale
                for i in range(2 * PAIRS):
                    at = 4 * (b * 2 * PAIRS + i)
                    w = exp2(scores[at] * low - maxima[2 * b])
                    x = exp2(scores[at + 1] * low - maxima[2 * b])
                    y = exp2(scores[at + 2] * high - maxima[2 * b + 1])
                    z = exp2(scores[at + 3] * high - maxima[2 * b + 1])
                    totals[2 * b] += w + x
                    totals[2 * b + 1] += y + z
                    p[at // 2], p[at // 2 + 1] = pack_f16(x, w), pack_f16(z, y)
            v_stage, v_target = stage + uint32(V_STAGE), target + uint32(V_TILE)
            add_values(sums, p, values, v_stage, v_target, next_v)

        return attend_part

    return in_turn([make_attend_part(i) for i in range(PARTS)])


def make_rescale(spec):
    """Make the function that multiplies the sums of a warp's b-th 16 queries."""
    BLOCK_SUMS = spec.v_format.head_dim // 2

    @device_function
    def rescale(sums, low, high, b):
        for at in range(BLOCK_SUMS * b, BLOCK_SUMS * (b + 1), 4):
            first = load_sums(sums, at)
            store_sums(sums, at, (first[0] * low, first[1] * low, first[2] * high, first[3] * high))

    return rescale
