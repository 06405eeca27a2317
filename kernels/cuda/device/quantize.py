"""Rows from float32 to bytes, bit for bit as kvquant/rows/quantize.py defines them.

    lane        16 elements of a row; `part` counts the lanes of the row
    pieces      of a lane's elements: the longest whose elements share a group, whatever the lane
    1           least and greatest element of each piece, then of its group, by shuffles
    2           does the format hold the row? All lanes of the row vote; then ranges are clipped
    3           scale and shift of each piece, rounded outwards to fp16; the first lane of a group
                writes them
    4           codes, packed, to shared memory

No product is fused with a sum: PTX instructions say how to round (ptx.py).
"""

import math

import numpy as np
from numba import cuda, float32, uint16, uint32

from .codes import PACK, planes_of
from .jit import device_function
from .ptx import (
    add,
    ballot,
    bits_float,
    float_bits,
    half_down,
    half_nearest,
    half_up,
    low_f16,
    maximum_or_nan,
    minimum_or_nan,
    multiply,
    multiply_add,
    pack_e4m3,
    reciprocal,
    shfl_xor,
    store_shared_u32,
    store_shared_u32x2,
    store_shared_u32x4,
    subtract,
)
from .row_layout import (
    ELEMENTS,
    bits_apart,
    codes_per_word,
    prefix_of,
    strands_of,
    words_of_codes,
)

WORDS = ELEMENTS // 2  # of 16-bit elements of a lane
NAN_WORDS = {"bf16": 0x7FC07FC0, "fp16": 0x7E007E00}  # of two 16-bit numbers
NAN_FLOAT = 0x7FC00000
# FlashMLA's scales, as exponents of float32: 448 is 1.75 * 2**8, so that a mantissa up to
# 1.75 takes the power 8 below its own, and one above it the next. The least is 2**-13, 1e-4 rounded
# up.
MANTISSA, UNDER, LEAST = 23, 8, 127 - 13
TO_NEXT = (1 << MANTISSA) - 1 - (3 << MANTISSA - 2)
ROUNDER = 2.0**23  # what is added to it is rounded to an integer, in the low bits
ROUNDER_BITS = 0x4B000000
INF = math.inf


def make_quantize(fmt, lanes, converts_fp8, clips=False):
    """The function that writes 16 elements as the format has them, and says whether it holds the
    row; if not, bytes decode to NaN. `ratio`: the share of its range a group keeps."""
    if fmt.is_exact:
        return _make_quantize_exact(fmt, lanes)
    SIZE, HEAD_DIM = fmt.group_size, fmt.head_dim
    START = prefix_of(fmt) - fmt.header_bytes
    CODES, WORDS_OF_CODES = START + fmt.code_offset, words_of_codes(fmt)
    HEADER = START + fmt.pick(pairs=0, scales=fmt.code_bytes)
    PIECE = piece_of(fmt)
    PIECES = ELEMENTS // PIECE
    NAN, CLIPS = fmt.pick(pairs=NAN_WORDS["fp16"], scales=NAN_FLOAT), clips
    FULL, ACTIVE = lanes * ELEMENTS == HEAD_DIM, HEAD_DIM // ELEMENTS
    measure, parameters = make_measure(fmt, lanes, clips), make_parameters(fmt)
    pack, put_codes = _make_pack(fmt, converts_fp8), _make_put_codes(fmt)

    @device_function
    def quantize(x, ratio, part, row):
        lows = cuda.local.array(PIECES, float32)
        highs = cuda.local.array(PIECES, float32)
        holds = measure(x, ratio, part, lows, highs)
        active = FULL or part < uint32(ACTIVE)
        scaled = cuda.local.array(ELEMENTS, float32)
        for piece in range(PIECES):
            word, shift, inverse = parameters(lows[piece], highs[piece])
            first = uint32(uint32(ELEMENTS) * part + uint32(piece * PIECE))
            if active and first % uint32(SIZE) == uint32(0):
                place = uint32(HEADER) + uint32(4) * uint32(first // uint32(SIZE))
                store_shared_u32(row + place, word if holds else uint32(NAN))
            for i in range(PIECE):
                k = piece * PIECE + i
                value = x[k]
                if CLIPS:
                    value = minimum_or_nan(maximum_or_nan(value, lows[piece]), highs[piece])
                scaled[k] = multiply(subtract(value, shift), inverse)
        codes = cuda.local.array(4, uint32)
        pack(scaled, codes)
        for w in range(WORDS_OF_CODES):
            codes[w] = codes[w] if holds else uint32(0)
        put_codes(row + uint32(CODES), part, codes, active)
        return holds

    return quantize


def make_measure(fmt, lanes, clips):
    """The function to the range of each piece's groups, clipped or not, and whether it fits."""
    PIECE, LIMIT, CLIPS = piece_of(fmt), fmt.max_abs, clips
    PIECES = ELEMENTS // PIECE
    FULL, ACTIVE = lanes * ELEMENTS == fmt.head_dim, fmt.head_dim // ELEMENTS
    spread, all_hold = _make_spread(fmt, lanes), make_all_hold(lanes)

    @device_function
    def measure(x, ratio, part, lows, highs):
        for piece in range(PIECES):
            lows[piece] = highs[piece] = x[piece * PIECE]
        for i in range(ELEMENTS):
            lows[i // PIECE] = minimum_or_nan(lows[i // PIECE], x[i])
            highs[i // PIECE] = maximum_or_nan(highs[i // PIECE], x[i])
        spread(lows, highs, part)
        fits = True
        for piece in range(PIECES):
            fits = fits and lows[piece] >= float32(-LIMIT) and highs[piece] <= float32(LIMIT)
        if CLIPS:
            for piece in range(PIECES):
                low, high = lows[piece], highs[piece]
                middle = multiply(add(low, high), float32(0.5))
                half = multiply(multiply(subtract(high, low), float32(0.5)), ratio)
                least, most = subtract(middle, half), add(middle, half)
                lows[piece] = minimum_or_nan(maximum_or_nan(low, least), most)
                highs[piece] = minimum_or_nan(maximum_or_nan(high, least), most)
        return all_hold(fits or not (FULL or part < uint32(ACTIVE)))

    return measure


def piece_of(fmt):
    return math.gcd(fmt.group_size, ELEMENTS) if fmt.groups > 1 else ELEMENTS


def make_all_hold(lanes):
    """Make the function that says whether something holds in all lanes of a row."""
    MASK = (1 << lanes) - 1

    @device_function
    def all_hold(holds):
        against = ballot(uint32(0) if holds else uint32(1))
        first = uint32(uint32(cuda.threadIdx.x) & uint32(32 - lanes))
        return (against >> first) & uint32(MASK) == uint32(0)

    return all_hold


def make_round(fmt, lanes):
    """The function that rounds 16 elements to 8 words, NaN if the format does not hold the row."""
    LIMIT, NAN = fmt.max_abs, fmt.pick(**NAN_WORDS)
    FULL, ACTIVE = lanes * ELEMENTS == fmt.head_dim, fmt.head_dim // ELEMENTS
    pack, all_hold = fmt.pick(**PACK), make_all_hold(lanes)

    @device_function
    def round_to_16_bits(x, words, part):
        largest = float32(0.0)
        for i in range(ELEMENTS):
            largest = maximum_or_nan(largest, abs(x[i]))
        holds = all_hold(largest <= float32(LIMIT) or not (FULL or part < uint32(ACTIVE)))
        for i in range(WORDS):
            words[i] = pack(x[2 * i + 1], x[2 * i]) if holds else uint32(NAN)
        return holds

    return round_to_16_bits


@device_function
def put_words(words, part, row):
    """8 words of a lane to a row in shared memory."""
    place = row + uint32(32) * part
    store_shared_u32x4(place, (words[0], words[1], words[2], words[3]))
    store_shared_u32x4(place + uint32(16), (words[4], words[5], words[6], words[7]))


def _make_quantize_exact(fmt, lanes):
    round_to_16_bits = make_round(fmt, lanes)
    FULL, ACTIVE = lanes * ELEMENTS == fmt.head_dim, fmt.head_dim // ELEMENTS

    @device_function
    def quantize(x, ratio, part, row):
        words = cuda.local.array(WORDS, uint32)
        holds = round_to_16_bits(x, words, part)
        if FULL or part < uint32(ACTIVE):
            put_words(words, part, row)
        return holds

    return quantize


def _make_spread(fmt, lanes):
    """The function from the extrema of pieces to those of their groups: a butterfly where a group
    is a power of two of lanes, else one for each group among all lanes."""
    GROUPS, SIZE, PIECE = fmt.groups, fmt.group_size, piece_of(fmt)
    PIECES = ELEMENTS // PIECE
    FULL, ACTIVE = lanes * ELEMENTS == fmt.head_dim, fmt.head_dim // ELEMENTS
    SPAN = lanes if GROUPS == 1 else max(SIZE // ELEMENTS, 1)
    ALIGNED = GROUPS == 1 or (SIZE & (SIZE - 1) == 0)
    STEPS, ALL_STEPS = (SPAN - 1).bit_length(), (lanes - 1).bit_length()

    @device_function
    def over(low, high, steps):
        for step in range(steps):
            lane = uint32(1 << step)
            low = minimum_or_nan(low, shfl_xor(low, lane))
            high = maximum_or_nan(high, shfl_xor(high, lane))
        return low, high

    @device_function
    def spread_aligned(lows, highs, part):
        if not FULL and part >= uint32(ACTIVE):
            lows[0], highs[0] = float32(INF), float32(-INF)
        if SPAN > 1:
            lows[0], highs[0] = over(lows[0], highs[0], STEPS)

    @device_function
    def spread_any(lows, highs, part):
        all_lows = cuda.local.array(GROUPS, float32)
        all_highs = cuda.local.array(GROUPS, float32)
        for g in range(GROUPS):
            low, high = float32(INF), float32(-INF)
            for piece in range(PIECES):
                first = uint32(uint32(ELEMENTS) * part + uint32(piece * PIECE))
                is_of = first // uint32(SIZE) == uint32(g)
                low = minimum_or_nan(low, lows[piece] if is_of else low)
                high = maximum_or_nan(high, highs[piece] if is_of else high)
            all_lows[g], all_highs[g] = over(low, high, ALL_STEPS)
        for g in range(GROUPS):
            for piece in range(PIECES):
                first = uint32(uint32(ELEMENTS) * part + uint32(piece * PIECE))
                if first // uint32(SIZE) == uint32(g):
                    lows[piece], highs[piece] = all_lows[g], all_highs[g]

    return spread_aligned if ALIGNED else spread_any


def make_parameters(fmt):
    """The function from a group's extrema to scale and shift in a word, shift, 1 / scale."""
    if fmt.pick(scales=True, pairs=False):
        return power_of_two
    FP8, STEP = fmt.pick(e4m3=True, integers=False), float(np.float32(1 / fmt.facts.levels))

    @device_function
    def parameters(low, high):
        # + 0.0 turns -0.0 into 0.0
        if FP8:
            middle = add(multiply(low, float32(0.5)), multiply(high, float32(0.5)))
            rounded = low_f16(uint32(half_nearest(middle)))
            shift = add(rounded, float32(0.0))
            shift_bits = half_nearest(shift)
            reach = maximum_or_nan(subtract(high, shift), subtract(shift, low))
        else:
            shift_bits = half_down(add(low, float32(0.0)))
            shift = low_f16(uint32(shift_bits))
            reach = subtract(high, shift)
        scale_bits = half_up(add(multiply(reach, float32(STEP)), float32(0.0)))
        scale = low_f16(uint32(scale_bits))
        word = uint32(uint32(shift_bits) << uint32(16) | uint32(scale_bits))
        return word, shift, reciprocal_of(scale)

    return parameters


@device_function
def reciprocal_of(scale):
    """1 / scale, rounded to nearest; 0 for 0.

    An approximation within 2**-22 of it, and a Newton step, whose error of 2**-44 is less than the
    distance of 1 / scale, of 11 bits, to what would be rounded otherwise (2**-37).
    """
    inverse = reciprocal(scale)
    inverse = multiply_add(inverse, multiply_add(-scale, inverse, float32(1.0)), inverse)
    return float32(0.0) if scale == float32(0.0) else inverse


@device_function
def power_of_two(low, high):
    """As make_parameters gives them, where scales are powers of two: no division."""
    largest = float_bits(maximum_or_nan(high, -low))
    exponent = uint32(uint32(largest + uint32(TO_NEXT)) & uint32(0xFF << MANTISSA))
    scale = uint32(max(exponent, uint32(LEAST + UNDER << MANTISSA)) - uint32(UNDER << MANTISSA))
    return scale, float32(0.0), bits_float(uint32(uint32(254 << MANTISSA) - scale))


def _make_pack(fmt, converts_fp8):
    """The function from 16 scaled elements to the words of their codes, at most 4.

    Integers need no clamp: the scale is rounded up. Added to 2**23 they are rounded, ties to even,
    and stand in the low bits.
    """
    PER_WORD, APART, STRANDS = codes_per_word(fmt), bits_apart(fmt), strands_of(fmt)
    WORDS = words_of_codes(fmt)
    HIGH = sum(ROUNDER_BITS << APART * i for i in range(PER_WORD)) % 2**32
    to_e4m3 = pack_e4m3 if converts_fp8 else e4m3_pair

    @device_function
    def pack_integers(scaled, codes):
        for w in range(WORDS):
            word = uint32(0)
            for i in range(PER_WORD):
                k = STRANDS * (PER_WORD * (w // STRANDS) + PER_WORD - 1 - i) + w % STRANDS
                bits = float_bits(add(scaled[k], float32(ROUNDER)))
                word = uint32(uint32(word << uint32(APART)) + bits)
            codes[w] = uint32(word - uint32(HIGH))

    @device_function
    def pack_fp8(scaled, codes):
        for w in range(4):
            low = to_e4m3(scaled[4 * w + 1], scaled[4 * w])
            high = to_e4m3(scaled[4 * w + 3], scaled[4 * w + 2])
            codes[w] = uint32(uint32(high) << uint32(16) | uint32(low))

    return fmt.pick(e4m3=pack_fp8, integers=pack_integers)


def _make_put_codes(fmt):
    """Make the function that stores a lane's words of codes where the codes of its row stand."""
    HIGH = fmt.head_dim // 4  # where INT3 has its high bits

    @device_function
    def put_planes(codes, part, words, active):
        low, high = planes_of(words[0], words[1])
        other = shfl_xor(bits_float(uint32(high)), uint32(1))  # two lanes have a word of high bits
        if active:
            store_shared_u32(codes + uint32(4) * part, uint32(low))
            if part % uint32(2) == uint32(0):
                both = uint32(uint32(high) | uint32(float_bits(other) << uint32(16)))
                store_shared_u32(codes + uint32(HIGH) + uint32(2) * part, both)

    @device_function
    def put_one(codes, part, words, active):
        if active:
            store_shared_u32(codes + uint32(4) * part, words[0])

    @device_function
    def put_two(codes, part, words, active):
        if active:
            store_shared_u32x2(codes + uint32(8) * part, (words[0], words[1]))

    @device_function
    def put_four(codes, part, words, active):
        if active:
            four = (words[0], words[1], words[2], words[3])
            store_shared_u32x4(codes + uint32(16) * part, four)

    return fmt.pick(quarters=put_one, planes=put_planes, nibbles=put_two, bytes=put_four)


@device_function
def e4m3_pair(high, low):
    """Two floats to the nearest E4M3, for GPUs older than sm_89."""
    return uint16(uint32(e4m3(high) << uint32(8)) | e4m3(low))


@device_function
def e4m3(x):
    """The code of a float, at most 448, ties to even.

    From 2**-6 on the mantissa is rounded to 3 bits; below, adding 2**14 rounds to multiples of
    2**-9.
    """
    bits = float_bits(x)
    sign = uint32(uint32(bits >> uint32(24)) & uint32(0x80))
    size = min(uint32(bits & uint32(0x7FFFFFFF)), uint32(0x43E00000))
    odd = uint32(uint32(size >> uint32(20)) & uint32(1))
    rounded = uint32(uint32(size + uint32(0x7FFFF)) + odd)
    code = uint32(uint32(rounded >> uint32(20)) - uint32(120 << 3))
    if size < uint32(121 << 23):
        code = uint32(float_bits(add(bits_float(size), float32(2.0**14))) - uint32(0x46800000))
    return uint32(sign | code)
