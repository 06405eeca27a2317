"""Softmax of a tile by the warps of a team, each of its eight tokens.

P counts from a reference that all warps have. A tile takes two barriers, partial scores ──▶ P. If a
score or scale outgrows the reference, a flag says so, and P is written again.

    exchange    partial scores   [blocks, eights of tokens, warps, lanes]  4 floats
                P                [pairs of eights, blocks, lanes]          a fragment
                maxima           [warps, columns]                          float32
                largest scales   [warps]                                   float32
                flags            [warps]
"""

from numba import cuda, float32, int32, uint32

from ...decode.values import HEADROOM, headroom_of
from ...device.codes import PACK
from ...device.fragments import over_quad, over_rows
from ...device.jit import device_function
from ...device.ptx import (
    any_lane,
    barrier,
    exp2,
    high_f16,
    load_shared_f32,
    load_shared_f32x4,
    load_shared_u32x4,
    low_f16,
    maximum,
    maximum_f16,
    reaches_f16,
    store_shared_f32,
    store_shared_u32,
    store_shared_u32x2,
)
from ...device.row_layout import operand_of
from .spec import FRAGMENT, SLICES, TILE
from .values import TOP, make_rescale

LAZY = 4  # powers of two that a score may exceed the maximum by
NEVER, LOWEST = -3e38, -1e30  # score of a token that is not seen; reference of no tokens


@device_function
def meet(team):
    barrier(uint32(team + uint32(1)), uint32(32 * SLICES))


def make_mask(spec):
    """Make the function that lets tokens that a column does not see not count."""
    SCORES = 4 * spec.blocks

    @device_function
    def mask(scores, first, seen, upto, lane, own):
        if int32(first + int32(TILE)) > upto:
            token = int32(first + int32(uint32(8) * own) + int32(uint32(2) * (lane & uint32(3))))
            for i in range(SCORES):
                if int32(token + int32(i % 2)) >= seen[i // 2]:
                    scores[i] = float32(NEVER)

    return mask


def make_softmax(spec):
    """Two functions: P of a warp's eight tokens and the flag; one reference for all."""
    V, BLOCKS, COLUMNS = spec.latent, spec.blocks, spec.block_columns
    HALVES = 2 * BLOCKS
    HAS_LIMITS = spec.has_shifts  # P heeds the largest scale, so that P times scale fits fp16
    SCALES = V.groups if HAS_LIMITS else 1
    AT_P = spec.p_at
    AT_MAXIMA = AT_P + BLOCKS * SLICES // 2 * FRAGMENT
    AT_SCALES = AT_MAXIMA + 4 * SLICES * COLUMNS
    AT_FLAGS = AT_SCALES + 16
    pack = PACK[operand_of(V)]
    rescale = make_rescale(spec)

    @device_function
    def largest_scale(scales):
        most = scales[0]
        for i in range(1, SCALES):
            most = maximum_f16(most, scales[i])
        return most

    @device_function
    def put(exchange, scores, references, added, lane, own):
        at = exchange + uint32(AT_P) + uint32(16) * lane + uint32(8) * uint32(own & uint32(1))
        at += uint32(FRAGMENT * BLOCKS) * uint32(own >> uint32(1))
        for b in range(BLOCKS):
            i, h = 4 * b, 2 * b
            w, x = exp2(scores[i] - references[h]), exp2(scores[i + 1] - references[h])
            y, z = exp2(scores[i + 2] - references[h + 1]), exp2(scores[i + 3] - references[h + 1])
            added[h], added[h + 1] = w + x, y + z
            store_shared_u32x2(at + uint32(FRAGMENT * b), (pack(x, w), pack(z, y)))

    @device_function
    def write(exchange, scores, scales, references, added, limits, lane, own):
        room, limit = limits
        grown = False
        for i in range(HALVES):
            most = maximum(scores[2 * i], scores[2 * i + 1])
            grown = grown or most - references[i] > room + float32(LAZY)
        if HAS_LIMITS:
            grown = grown or reaches_f16(largest_scale(scales), limit) != uint32(0)
        grew = any_lane(uint32(1) if grown else uint32(0))
        if lane == uint32(0):
            store_shared_u32(exchange + uint32(AT_FLAGS) + uint32(4) * own, grew)
        put(exchange, scores, references, added, lane, own)

    @device_function
    def settle(exchange, scores, scales, states, added, limits, sums, header_sums, at):
        lane, own, team = at
        references, totals = states
        room, limit = limits
        flags = load_shared_u32x4(exchange + uint32(AT_FLAGS))
        if flags[0] | flags[1] | flags[2] | flags[3]:
            g = uint32(lane >> uint32(2))
            mine = exchange + uint32(AT_MAXIMA) + uint32(4) * g
            for i in range(HALVES):
                most = maximum(scores[2 * i], scores[2 * i + 1])
                most = over_quad(most, maximum)
                if lane & uint32(3) == uint32(0):
                    store_shared_f32(mine + uint32(4 * COLUMNS) * own + uint32(32 * i), most)
            if HAS_LIMITS:
                pair = largest_scale(scales)
                most = maximum(low_f16(pair), high_f16(pair))
                most = over_rows(over_quad(most, maximum), maximum)
                if lane == uint32(0):
                    store_shared_f32(exchange + uint32(AT_SCALES) + uint32(4) * own, most)
            meet(team)
            old = room
            if HAS_LIMITS:
                four = load_shared_f32x4(exchange + uint32(AT_SCALES))
                most = maximum(maximum(four[0], four[1]), maximum(four[2], four[3]))
                room, limit = headroom_of(maximum(most, float32(0.5) * low_f16(limit)))
            factors = cuda.local.array(HALVES, float32)
            for i in range(HALVES):
                most = float32(NEVER)
                for s in range(SLICES):
                    at_maximum = mine + uint32(4 * COLUMNS * s + 32 * i)
                    most = maximum(most, load_shared_f32(at_maximum))
                new = maximum(most - room, references[i] - (room - old))
                factors[i] = exp2(references[i] - new)
                references[i] = new
                totals[i] *= factors[i]
            rescale(sums, header_sums, factors)
            put(exchange, scores, references, added, lane, own)
            meet(team)
        for i in range(HALVES):
            totals[i] += added[i]
        return room, limit

    return write, settle


def first_limits(spec):
    """P's headroom before the first tile: none is needed for bf16, which has float32's range."""
    if operand_of(spec.latent) == "bf16":
        return 0
    return HEADROOM - TOP if spec.behind else HEADROOM
