"""P V of a tile, and the output of a warp.

    A  16 elements x 16 tokens: ldmatrix transposes, lane (g, t) gets unit g (16 bits: 8 codes of
       INT2, 4 nibbles, 2 bytes or an element) of a chunk, of tokens 2t and 2t + 1
    B  16 tokens x 8 columns: P, turned from the scores' fragment by movmatrix, in registers
    D  the output: elements of unit g, columns 2t and 2t + 1

Of direct rows lane (g, t) loads word g of two chunks, of tokens 8t + i and 8t + 4 + i, which are
rows 2t and 2t + 1 of matrix i. The low halves are unit 2g of the chunks, the high ones unit 2g + 1.
INT3 makes two words of it, of even and odd elements, for four chunks.

Scales are multiplied into P. The transposed header holds a scale or a shift in each unit: one more
MMA gives the sums of the shifts, and with unit 0 replaced by ones the sum of P as it was rounded. P
counts from a reference below the maximum by `headroom` powers of two, as many as the largest scale
so far allows in fp16.
"""

from numba import cuda, float32, int32, uint32

from ..device.codes import MMA, halves_of, make_load_word, make_pair_factor, make_unpack
from ..device.fragments import load_pair, load_sums, make_matrix_of, store_sums
from ..device.jit import device_function, in_turn
from ..device.ptx import (
    bits_float,
    float_bits,
    load_matrix_x2_t,
    load_matrix_x4_t,
    load_shared_u32,
    lost_f16,
    maximum_f16,
    mma_f16,
    multiply_f16,
    pack_f16,
    shfl,
    store_shared_f32,
    store_shared_f32x2,
    word_from_lane,
)
from ..device.row_layout import factor_of, operand_of
from .spec import MMA_COLUMNS

ONE = {"bf16": 0x3F803F80, "fp16": 0x3C003C00}  # 1, twice
UNROLLED = 16  # chunks of codes: a longer loop stays one, and puts the sums into local memory
HEADROOM = 11  # powers of two that P may exceed 2**4 by; P and P * scale stay below 2**15


def make_load_header(staged):
    """Make the function from 16 rows to their headers as A fragments; zeros for 16-bit rows."""
    ROW, UNITS = staged.stride, staged.header_units

    @device_function
    def load_words(rows, lane):
        at = rows + (lane & uint32(3)) * uint32(8 * ROW)
        a, b = load_shared_u32(at), load_shared_u32(at + uint32(4 * ROW))
        x, y = load_shared_u32(at + uint32(ROW)), load_shared_u32(at + uint32(5 * ROW))
        odd = lane & uint32(4)  # units: those of shifts
        return halves_of(a, b, odd), halves_of(a, b, 0), halves_of(x, y, odd), halves_of(x, y, 0)

    @device_function
    def load_header(rows, lane):
        at = rows + (lane & uint32(15)) * uint32(ROW)
        if UNITS == 2:
            h = load_matrix_x4_t(at + (lane >> uint32(4)) * uint32(16))
            return h[0], h[2], h[1], h[3]
        if UNITS == 1:
            d = load_matrix_x2_t(at)
            return d[0], uint32(0), d[1], uint32(0)
        return uint32(0), uint32(0), uint32(0), uint32(0)

    return load_words if staged.direct else load_header


def make_largest_scales(staged):
    """The function from two headers to a lane's largest scales; zeros in odd units."""
    UNITS = staged.header_units

    @device_function
    def largest_scales(header, other, g):
        both = maximum_f16(maximum_f16(header[0], header[2]), maximum_f16(other[0], other[2]))
        if UNITS == 2:
            both = maximum_f16(both, maximum_f16(header[1], header[3]))
            both = maximum_f16(both, maximum_f16(other[1], other[3]))
        return both if g % uint32(2) == uint32(0) else uint32(0)

    return largest_scales


@device_function
def headroom_of(scale):
    """The powers of two that P may use, and twice the power at which scales change that."""
    exponent = int32(float_bits(scale) >> uint32(23)) - int32(126)  # scale < 2**exponent
    exponent = int32(min(max(exponent, int32(-24)), int32(16)))  # of fp16's numbers
    room = float32(max(min(int32(HEADROOM) - exponent, int32(HEADROOM)), int32(HEADROOM - 16)))
    power = bits_float(uint32(exponent + int32(127)) << uint32(23))
    return room, pack_f16(power, power)


def _make_reader(staged):
    """Three functions: where a lane reads in 16 rows, its words of codes from chunk c on then, and
    of direct rows' words those of a chunk, for an MMA's first 8 tokens and for the others."""
    ROW, PREFIX, STRANDS = staged.stride, staged.prefix, staged.strands

    @device_function
    def load_matrices(matrix, c):
        return load_matrix_x4_t(matrix + uint32(PREFIX + 16 * c))

    if not staged.direct:
        return make_matrix_of(ROW), load_matrices, None
    load_word = make_load_word(staged.fmt)

    @device_function
    def rows_of(rows, lane):
        codes = rows + (lane & uint32(3)) * uint32(8 * ROW) + uint32(PREFIX)
        return uint32(codes), uint32(lane >> uint32(2))

    @device_function
    def load_words(place, c):
        codes, g = place
        part = uint32(g + uint32(4 * c // STRANDS))
        a, b = load_word(codes, part), load_word(uint32(codes + uint32(4 * ROW)), part)
        codes = uint32(codes + uint32(ROW))
        return a + b + load_word(codes, part) + load_word(uint32(codes + uint32(4 * ROW)), part)

    @device_function
    def of_words(words, c):
        i, high = c % STRANDS, c // STRANDS % 2
        first = halves_of(words[i], words[STRANDS + i], high)
        return first, halves_of(words[2 * STRANDS + i], words[3 * STRANDS + i], high)

    return rows_of, load_words, of_words


def make_accumulate(staged, query, eights):
    """The function that adds P V of 16 tokens to the sums, and to those of the header.

    For an fp16 output, what rounding takes from P * scale gets MMAs of its own: where codes times
    scale and shifts nearly cancel it would be seen.
    """
    PRECISE = query == "fp16"
    EIGHTS, SUMS, PAIRS = eights, staged.sums, 2 * eights
    CHUNKS, SPAN, DIRECT = staged.chunks, staged.span, staged.direct
    GROUP, PARTS, MMAS = staged.group_span, staged.parts, staged.mmas
    IS_EXACT, FIRST_WORD = staged.fmt.is_exact, staged.header_word(0)
    STEP, STRANDS = SPAN // 8, staged.strands  # STEP: elements in a unit
    ONES, mma = ONE[operand_of(staged.fmt)], MMA[operand_of(staged.fmt)]
    unpack, PERIOD = make_unpack(staged.fmt), 2 * STRANDS if DIRECT else 2
    place_of, load_codes, words_of = _make_reader(staged)

    def make_piece(start, stop):
        @device_function
        def add_chunks(sums, scaled, rest, place, header, p, lane):
            g = lane >> uint32(2)
            for c in range(start, stop):
                if c % PERIOD == 0:
                    codes = load_codes(place, c)
                for part in range(PARTS):
                    if PARTS > 1 or c * SPAN % GROUP == 0:
                        unit = 2 * (FIRST_WORD + c * SPAN // GROUP + part)
                        source = uint32(4 * (unit % 8)) + (lane & uint32(3))
                        low = header[0] if unit < 8 and not DIRECT else header[1]
                        high = header[2] if unit < 8 and not DIRECT else header[3]
                        if not DIRECT:  # there each lane has the scales of its tokens
                            low, high = word_from_lane(low, source), word_from_lane(high, source)
                        for i in range(0, PAIRS, 2):
                            scaled[i] = multiply_f16(p[i], low)
                            scaled[i + 1] = multiply_f16(p[i + 1], high)
                            if PRECISE:
                                rest[i] = lost_f16(p[i], low, scaled[i])
                                rest[i + 1] = lost_f16(p[i + 1], high, scaled[i + 1])
                    if DIRECT:
                        x, y = words_of(codes, c)
                    else:
                        x = codes[0] if c % 2 == 0 else codes[2]
                        y = codes[1] if c % 2 == 0 else codes[3]
                    if PARTS > 1 and g * uint32(STEP) // uint32(GROUP) != uint32(part):
                        x = uint32(0)
                        y = uint32(0)
                    for m in range(MMAS):
                        x0, x1 = unpack(x, m, c % STRANDS)
                        y0, y1 = unpack(y, m, c % STRANDS)
                        a = (x0, x1, y0, y1)
                        for e in range(EIGHTS):
                            i = e * SUMS + (c * MMAS + m) * 4
                            added = mma_f16(a, load_pair(scaled, 2 * e), load_sums(sums, i))
                            if PRECISE:
                                added = mma_f16(a, load_pair(rest, 2 * e), added)
                            store_sums(sums, i, added)

        return add_chunks

    add_all = in_turn([make_piece(*piece) for piece in _pieces(CHUNKS)])

    @device_function
    def accumulate(sums, header_sums, rows, header, p, lane):
        g = lane >> uint32(2)
        place = place_of(rows, lane)
        first, second = header[0], header[2]
        if g == uint32(0):
            first = uint32(ONES)
            second = uint32(ONES)
        for e in range(EIGHTS):
            shifted = mma(
                (first, header[1], second, header[3]),
                load_pair(p, 2 * e),
                load_sums(header_sums, 4 * e),
            )
            store_sums(header_sums, 4 * e, shifted)
        if IS_EXACT:
            for c in range(CHUNKS // 2):
                w = load_codes(place, 2 * c)
                for e in range(EIGHTS):
                    i = e * SUMS + 4 * c
                    a = mma((w[0], w[2], w[1], w[3]), load_pair(p, 2 * e), load_sums(sums, i))
                    store_sums(sums, i, a)
            return
        scaled = cuda.local.array(PAIRS, uint32)
        rest = cuda.local.array(PAIRS, uint32)
        add_all(sums, scaled, rest, place, header, p, lane)

    return accumulate


def make_put_output(staged, eights):
    """Make the function that writes a warp's output, times a factor a column, to shared memory."""
    pieces = _pieces(staged.chunks)
    return in_turn([_make_put_eight(staged, e, *piece) for e in range(eights) for piece in pieces])


def _pieces(chunks):
    """(first chunk, one after the last) of loops that are short enough to be unrolled."""
    return [(i, min(i + UNROLLED, chunks)) for i in range(0, chunks, UNROLLED)]


def _make_put_eight(staged, e, start, stop):
    """Make the function that writes chunks of the output of the e-th eight of a warp's columns."""
    COLUMN, FIRST, HEADER, REFERENCE = MMA_COLUMNS * e, e * staged.sums, 4 * e, 2 * e
    DIM, SPAN = staged.fmt.head_dim, staged.span
    FMT, PARTS, MMAS, FACTOR = staged.fmt, staged.parts, staged.mmas, factor_of(staged.fmt)
    GROUP, IS_EXACT, STRANDS = staged.group_span, FMT.is_exact, staged.strands
    FIRST_WORD, HEAD = staged.header_word(0), 4 * (staged.fmt.head_dim + 4)  # bytes of a column
    STEP, pair_factor = SPAN // 8, make_pair_factor(FMT)
    UNITS = 2 if staged.direct else 1  # one after another that a lane has, in as many chunks

    @device_function
    def put_eight(target, sums, header_sums, factors, lane):
        first, second = factors[REFERENCE], factors[REFERENCE + 1]
        g = lane >> uint32(2)
        t = lane & uint32(3)
        here = target + uint32(COLUMN * HEAD) + t * uint32(2 * HEAD)
        if IS_EXACT:
            for c in range(start // 2, stop // 2):
                at = here + uint32(64 * c) + uint32(4) * g
                store_shared_f32(at, sums[FIRST + 4 * c] * first)
                store_shared_f32(at + uint32(HEAD), sums[FIRST + 4 * c + 1] * second)
                store_shared_f32(at + uint32(32), sums[FIRST + 4 * c + 2] * first)
                store_shared_f32(at + uint32(32 + HEAD), sums[FIRST + 4 * c + 3] * second)
            return
        for c in range(start, stop):
            shift0 = float32(0)
            shift1 = float32(0)
            for part in range(PARTS):
                unit = 2 * (FIRST_WORD + c * SPAN // GROUP + part) + 1
                source = uint32(4 * (unit % 8)) + t
                if unit < 8:
                    a = shfl(header_sums[HEADER], source)
                    b = shfl(header_sums[HEADER + 1], source)
                else:
                    a = shfl(header_sums[HEADER + 2], source)
                    b = shfl(header_sums[HEADER + 3], source)
                if PARTS == 1 or g * uint32(STEP) // uint32(GROUP) == uint32(part):
                    shift0 = a
                    shift1 = b
            for m in range(MMAS):
                i = FIRST + (c * MMAS + m) * 4
                f = float32(FACTOR) / float32(pair_factor(2 * m, c % STRANDS))
                f_odd = float32(FACTOR) / float32(pair_factor(2 * m + 1, c % STRANDS))
                one = c // STRANDS
                d = UNITS * SPAN * (one // UNITS) + STEP * (one % UNITS) + 2 * m
                d = uint32(STRANDS * d + c % STRANDS) + uint32(STRANDS * STEP * UNITS) * g
                if d < uint32(DIM):
                    at = here + uint32(4) * d
                    x0 = (sums[i] * f + shift0) * first
                    x1 = (sums[i + 2] * f_odd + shift0) * first
                    y0 = (sums[i + 1] * f + shift1) * second
                    y1 = (sums[i + 3] * f_odd + shift1) * second
                    if STRANDS == 1:
                        store_shared_f32x2(at, x0, x1)
                        store_shared_f32x2(at + uint32(HEAD), y0, y1)
                    else:
                        store_shared_f32(at, x0)
                        store_shared_f32(at + uint32(4 * STRANDS), x1)
                        store_shared_f32(at + uint32(HEAD), y0)
                        store_shared_f32(at + uint32(HEAD + 4 * STRANDS), y1)

    return put_eight
