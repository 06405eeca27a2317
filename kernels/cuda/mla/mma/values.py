"""P V of a tile: 16 columns x a warp's quarter of the latent elements, from the rows that gave
K.

    A  16 columns x 16 tokens: P, which the team's warps put into shared memory as fragments
    B  16 tokens x 8 elements: ldmatrix transposes, lane (g, t) gets unit g (16 bits: 4 codes of
       INT4, 2 bytes or an element) of 16 bytes, of tokens 2t and 2t + 1
    D  columns g and g + 8, the elements of units 2t and 2t + 1

Scales, shifts and headroom are as in decode/values.py. FlashMLA's float32 scales may have any size:
each warp multiplies those of its group by a power of two, so that they are fp16 below 2**TOP.
Scales down to 2**-19 of the largest so far keep all digits.
"""

from numba import cuda, float32, int32, uint32

from ...device.codes import MMA, make_unpack
from ...device.fragments import load_sums, make_scale_rows, over_quad, store_sums
from ...device.jit import device_function, in_turn
from ...device.powers import inverse_of, power_of
from ...device.ptx import (
    any_lane,
    bits_float,
    float_bits,
    load_matrix_x4_t,
    load_shared_u32,
    load_shared_u32x4,
    maximum,
    maximum_f16,
    mma_f16,
    multiply_f16,
    pack_f16,
    reaches_f16,
    shfl,
    store_shared_f32,
    store_shared_f32x2,
)
from ...device.row_layout import UNIT, factor_of, mmas_of, operand_of
from .spec import FRAGMENT, SLICES, TILE

PAIRS = TILE // 16  # MMAs along a tile
HEADERS = 2 * PAIRS  # words of a header's fragments
# of FlashMLA's scales: they stay below 2**TOP, and a new power leaves room for larger ones; P has
# the rest of fp16's range. The power before the first tile, which any scale outgrows
TOP, SPARE, FIRST_POWER = 8, 2, 2.0**100
ABOVE_TOP = 0x5C005C00  # 2**TOP, twice in fp16


def sums_of(spec):
    return spec.latent.head_dim // SLICES // 2


def make_accumulate(spec):
    """Make the function that adds P V of a tile to the sums, and to those of the header."""
    V, BLOCKS, STRIDE = spec.latent, spec.blocks, spec.stride
    IS_EXACT, MMAS = V.is_exact, mmas_of(V)
    CODES, SLICE, GROUPS = V.code_offset, V.code_bytes // SLICES, max(V.groups // SLICES, 1)
    CHUNKS, SUMS = SLICE // UNIT, sums_of(spec)
    UNITS = V.header_bytes // UNIT if spec.has_shifts else 0
    PER_GROUP, WORDS = CHUNKS // GROUPS, 4 * BLOCKS
    PER_CHUNK = SUMS // CHUNKS
    mma, unpack = MMA[operand_of(V)], make_unpack(V)

    def make_step(pair, first_chunk):
        """16 tokens, 2 chunks; the scales change where a group begins."""

        @device_function
        def add(sums, p, scaled, scales, values):
            codes = load_matrix_x4_t(values + uint32(16 * STRIDE * pair + UNIT * first_chunk))
            for c in range(2):
                chunk = first_chunk + c
                x, y = codes[2 * c], codes[2 * c + 1]
                if IS_EXACT:
                    for b in range(BLOCKS):
                        at = SUMS * b + PER_CHUNK * chunk
                        a = load_sums(p, 4 * b)
                        store_sums(sums, at, mma(a, (x, y), load_sums(sums, at)))
                else:
                    if chunk % PER_GROUP == 0:
                        group = chunk // PER_GROUP
                        low = scales[GROUPS * (2 * pair) + group]
                        high = scales[GROUPS * (2 * pair + 1) + group]
                        for b in range(BLOCKS):
                            scaled[4 * b] = multiply_f16(p[4 * b], low)
                            scaled[4 * b + 1] = multiply_f16(p[4 * b + 1], low)
                            scaled[4 * b + 2] = multiply_f16(p[4 * b + 2], high)
                            scaled[4 * b + 3] = multiply_f16(p[4 * b + 3], high)
                    for m in range(MMAS):
                        x0, x1 = unpack(x, m)
                        y0, y1 = unpack(y, m)
                        for b in range(BLOCKS):
                            at = SUMS * b + PER_CHUNK * chunk + 8 * m
                            a = load_sums(scaled, 4 * b)
                            store_sums(sums, at, mma_f16(a, (x0, y0), load_sums(sums, at)))
                            at += 4
                            store_sums(sums, at, mma_f16(a, (x1, y1), load_sums(sums, at)))

        return add

    steps = [in_turn([make_step(pair, c) for c in range(0, CHUNKS, 2)]) for pair in range(PAIRS)]

    def make_pair(pair):
        add_values = steps[pair]

        @device_function
        def add_pair(sums, header_sums, headers, scales, values, probabilities):
            p = cuda.local.array(WORDS, uint32)
            scaled = cuda.local.array(WORDS, uint32)
            for b in range(BLOCKS):
                at = probabilities + uint32(FRAGMENT * (BLOCKS * pair + b))
                store_sums(p, 4 * b, load_shared_u32x4(at))
                if UNITS:
                    header = headers[2 * pair], headers[2 * pair + 1]
                    shifted = mma_f16(load_sums(p, 4 * b), header, load_sums(header_sums, 4 * b))
                    store_sums(header_sums, 4 * b, shifted)
            add_values(sums, p, scaled, scales, values)

        return add_pair

    add_pairs = in_turn([make_pair(pair) for pair in range(PAIRS)])

    @device_function
    def accumulate(sums, header_sums, scales, rows, probabilities, lane, own):
        headers = cuda.local.array(HEADERS, uint32)
        if UNITS:
            unit = uint32(own * uint32(UNITS) // uint32(SLICES))
            at = rows + lane * uint32(STRIDE) + uint32(UNIT) * unit
            store_sums(headers, 0, load_matrix_x4_t(at))
        values = rows + uint32(lane & uint32(15)) * uint32(STRIDE) + uint32(CODES)
        values += uint32(UNIT) * uint32(lane >> uint32(4)) + uint32(SLICE) * own
        mine = probabilities + uint32(16) * lane
        add_pairs(sums, header_sums, headers, scales, values, mine)

    return accumulate


def make_fit_scales(spec):
    """The function that keeps scales of FlashMLA's rows below 2**TOP, sums corrected."""
    STRIDE, HEADER, EIGHTS = spec.stride, spec.header_at, TILE // 8
    ROWS, SUMS = TILE // 4, sums_of(spec) * spec.blocks  # of a lane

    @device_function
    def refit(scales, power, sums, headers):
        of_rows = cuda.local.array(ROWS, float32)
        largest = float32(0)
        for n in range(EIGHTS):
            for i in range(2):
                at = headers + uint32(STRIDE * (8 * n + i))
                scale = bits_float(load_shared_u32(at))
                of_rows[2 * n + i] = scale
                largest = maximum(largest, abs(scale))
        largest = over_quad(largest, maximum)
        exponent = int32(float_bits(largest) >> uint32(23)) - int32(126)  # largest < 2**exponent
        new = power_of(int32(int32(TOP - SPARE) - exponent))
        for n in range(EIGHTS):
            scales[n] = pack_f16(of_rows[2 * n + 1] * new, of_rows[2 * n] * new)
        factor = new * inverse_of(power)
        for i in range(SUMS):
            sums[i] *= factor
        return new

    @device_function
    def fit_scales(scales, power, sums, rows, lane, own):
        most = uint32(0)
        for n in range(EIGHTS):
            most = maximum_f16(most, scales[n] & uint32(0x7FFF7FFF))
        if any_lane(reaches_f16(most, uint32(ABOVE_TOP))) != uint32(0):
            headers = rows + uint32(2 * STRIDE) * uint32(lane & uint32(3)) + uint32(HEADER)
            power = refit(scales, power, sums, headers + uint32(4) * own)
        return power

    return fit_scales


def make_put_output(spec):
    """The function that writes a warp's output, times column factors, to shared memory."""
    V, BLOCKS, SUMS = spec.latent, spec.blocks, sums_of(spec)
    IS_EXACT, FACTOR = V.is_exact, factor_of(V)
    ODD = V.pick(nibbles=FACTOR / 16, bytes=FACTOR, elements=FACTOR)
    GROUPS, OWN = max(V.groups // SLICES, 1), V.head_dim // SLICES
    COLUMN = 4 * (V.head_dim + 4)
    STEP = 16 // V.bits  # elements of a unit of 16 bits
    CHUNKS = OWN // (8 * STEP)
    PER_GROUP, PER_CHUNK, SHIFTS = CHUNKS // GROUPS, SUMS // CHUNKS, spec.has_shifts

    def make_block(b):
        @device_function
        def put_block(target, sums, header_sums, factors, lane, own):
            g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
            for half in range(2):
                factor = factors[2 * b + half]
                at = target + uint32(COLUMN) * (uint32(16 * b + 8 * half) + g)
                at += uint32(4 * OWN) * own + uint32(8 * STEP) * t
                shift = float32(0)
                for c in range(CHUNKS):
                    if SHIFTS and c % PER_GROUP == 0:
                        # the sums of scale and shift of group t of the header's unit
                        group = uint32(own * uint32(GROUPS) + uint32(c // PER_GROUP))
                        of_group = uint32(uint32(lane & uint32(28)) | uint32(group & uint32(3)))
                        shift = shfl(header_sums[4 * b + 2 * half + 1], of_group)
                    for e in range(PER_CHUNK // 4):
                        i = SUMS * b + PER_CHUNK * c + 4 * e + 2 * half
                        scale = float32(ODD if e % 2 else FACTOR)
                        one = (sums[i] * scale + shift) * factor
                        two = (sums[i + 1] * scale + shift) * factor
                        here = at + uint32(32 * STEP * c + 4 * e)
                        if IS_EXACT:
                            store_shared_f32x2(here, one, two)
                        else:
                            store_shared_f32(here, one)
                            store_shared_f32(here + uint32(4 * STEP), two)

        return put_block

    return in_turn([make_block(b) for b in range(BLOCKS)])


def make_rescale(spec):
    """Make the function that multiplies the sums of columns g and g + 8 of each block."""
    BLOCKS, SUMS = spec.blocks, sums_of(spec)

    def make_block(b):
        scale_rows = make_scale_rows(SUMS * b, SUMS * (b + 1))
        scale_header = make_scale_rows(4 * b, 4 * b + 4)

        @device_function
        def rescale_block(sums, header_sums, factors):
            low, high = factors[2 * b], factors[2 * b + 1]
            scale_rows(sums, low, high)
            scale_header(header_sums, low, high)

        return rescale_block

    return in_turn([make_block(b) for b in range(BLOCKS)])
