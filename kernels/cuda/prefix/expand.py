"""Packed rows as fp16 numbers in shared memory, for kernels whose warps share a tile.

    global ──cp.async──▶ packed rows ──▶ times a power of two ──▶ fp16, an odd number of units apart
                         (a stage)       the tile's, see kernel.py

An integer code becomes fp16 as the low bits of 1024, from which 1024 is taken. One multiply-add,
rounded once, makes the number. Pairs are put in order.
"""

from numba import cuda, float32, int32, uint32, uint64

from ..device.codes import (
    HALVES,
    HIGH_HALVES,
    LOW_HALVES,
    make_bit_of,
    make_load_codes,
    make_unpack,
)
from ..device.jit import device_function
from ..device.powers import power_of
from ..device.ptx import (
    float_bits,
    high_f16,
    load_global_u32,
    load_shared_u32,
    load_shared_u32x4,
    low_f16,
    maximum,
    multiply_add_f16,
    pack_f16,
    permute,
    store_shared_u32x4,
    word_from_lane,
)
from ..device.row_copies import COPIES
from ..device.row_layout import (
    codes_per_word,
    factor_of,
    operand_of,
    prefix_of,
    staged_bytes,
    strands_of,
    unit_of,
)

PIECE = 16  # elements that a thread expands at a time
TOKENS = 64  # of a tile, at most
MAGIC = 0x64006400  # 1024, twice
TIMES, TAKE = 0x3C003C00, 0xE400E400  # 1 and -1024, twice
HALF = 0x04000400  # what makes halves of them
MOST = 14  # numbers of a tile are below 2**14
TINIEST = 2.0**-24


def lanes_of_pages(run):
    """Lanes that look up the pages of a tile: one for each run of rows, or for two."""
    return min(TOKENS // run, 32)


def make_find_pages(paged, run):
    """The function from a tile to a lane's page; of single rows also 32 rows after."""
    LANES, TWO = lanes_of_pages(run), 32 * run < TOKENS

    @device_function
    def find_pages(table, first, end, shift):
        low, high = uint32(0), uint32(0)
        if paged:
            token = int32(first + int32(run) * int32(uint32(cuda.threadIdx.x) & uint32(LANES - 1)))
            if token < end:
                low = load_global_u32(table + uint64(4) * uint64(token >> shift))
            if TWO and token + int32(32) < end:
                high = load_global_u32(
                    table + uint64(4) * uint64(int32(token + int32(32)) >> shift)
                )
        return low, high

    return find_pages


def make_copy_tile(fmt, paged, run, tokens, threads):
    """Make the function that asks for the packed rows of a tile; zeros after `end`."""
    LANES, TWO = lanes_of_pages(run), 32 * run < tokens
    UNIT = unit_of(fmt)
    UNITS, FIRST, STEP = fmt.row_bytes // UNIT, prefix_of(fmt) - fmt.header_bytes, staged_bytes(fmt)
    ALL = tokens * UNITS
    copy = COPIES[UNIT]

    @device_function
    def copy_tile(target, base, strides, pages, first, end, mask):
        stride_page, stride_row = strides
        for i in range(-(-ALL // threads)):
            piece = uint32(uint32(cuda.threadIdx.x) + uint32(threads * i))
            row = uint32(piece // uint32(UNITS))
            unit = uint32(piece - uint32(row * uint32(UNITS)))
            token = int32(first + int32(row))
            source = base + uint64(uint32(UNIT) * unit)
            if paged:
                lane = uint32(row // uint32(run)) & uint32(LANES - 1)
                page = word_from_lane(pages[0], lane)
                if TWO:
                    high = word_from_lane(pages[1], lane)
                    page = high if row >= uint32(32) else page
                source += uint64(page) * stride_page
                source += uint64(uint32(uint32(token & mask) * uint32(stride_row)))
            else:
                source += uint64(uint32(token)) * stride_row
            place = target + row * uint32(STEP) + uint32(FIRST) + uint32(UNIT) * unit
            if threads * (i + 1) <= ALL or piece < uint32(ALL):
                copy(place, source, uint32(UNIT) if token < end else uint32(0))

    return copy_tile


def make_largest(fmt, tokens, threads):
    """Make the function to the largest number of a thread's share of a tile of packed rows."""
    if fmt.is_exact:
        return _make_largest_exact(fmt, tokens, threads)
    HEADER, STEP, GROUPS = prefix_of(fmt) - fmt.header_bytes, staged_bytes(fmt), fmt.groups
    ALL, LEVEL = tokens * GROUPS, fmt.facts.levels

    @device_function
    def largest(stage):
        most = float32(0)
        for i in range(-(-ALL // threads)):
            header = uint32(uint32(cuda.threadIdx.x) + uint32(threads * i))
            row = uint32(header % uint32(tokens))
            group = uint32(header // uint32(tokens))
            if threads * (i + 1) <= ALL or header < uint32(ALL):
                at = stage + row * uint32(STEP) + uint32(HEADER) + uint32(4) * group
                word = load_shared_u32(at)
                size = abs(low_f16(word)) * float32(LEVEL) + abs(high_f16(word))
                most = maximum(most, size)
        return most

    return largest


def _make_largest_exact(fmt, tokens, threads):
    STEP, PIECES = staged_bytes(fmt), fmt.head_dim // PIECE
    low, high = fmt.pick(**HALVES)
    ALL = tokens * PIECES

    @device_function
    def largest(stage):
        most = float32(0)
        for i in range(-(-ALL // threads)):
            number = uint32(uint32(cuda.threadIdx.x) + uint32(threads * i))
            row, piece = uint32(number % uint32(tokens)), uint32(number // uint32(tokens))
            if threads * (i + 1) <= ALL or number < uint32(ALL):
                at = stage + row * uint32(STEP) + uint32(2 * PIECE) * piece
                for half in range(2):
                    words = load_shared_u32x4(at + uint32(16 * half))
                    for j in range(4):
                        most = maximum(most, abs(low(words[j])))
                        most = maximum(most, abs(high(words[j])))
        return most

    return largest


@device_function
def power_below(most):
    """The power of two by which numbers up to `most` stay below 2**14."""
    exponent = int32(float_bits(maximum(most, float32(TINIEST))) >> uint32(23)) - int32(126)
    return power_of(int32(MOST) - exponent)


@device_function
def twice(x):
    return pack_f16(x, x)


def make_expand(fmt, stride, tokens, threads):
    """The function that writes a thread's i-th piece of 16 elements as fp16 numbers times a power
    of two, and how many pieces a thread has. stride: bytes between fp16 rows; tokens: of a tile."""
    STEP, CODES, PIECES = staged_bytes(fmt), prefix_of(fmt), fmt.head_dim // PIECE
    HEADER, GROUP = prefix_of(fmt) - fmt.header_bytes, fmt.group_size
    IS_FP8 = fmt.pick(e4m3=True, integers=False, elements=False)
    STRANDS = strands_of(fmt)
    PER_WORD = STRANDS * codes_per_word(fmt)  # of codes that are in one word, or alternate in two
    WORDS, FOURS = 0 if fmt.is_exact else PIECE // PER_WORD, PER_WORD // 4
    FACTOR, ALL = factor_of(fmt) if IS_FP8 else 1.0, tokens * PIECES
    low, high = HALVES[operand_of(fmt)]
    unpack, load_codes = make_unpack(fmt), None if fmt.is_exact else make_load_codes(fmt)
    bit_of = make_bit_of(fmt)

    @device_function
    def numbers_of(pair, j, strand, scale, shift):
        if not IS_FP8:
            halvings = uint32(HALF * bit_of(j, strand))
            times, take = uint32(TIMES) - halvings, uint32(TAKE) - halvings
            pair = multiply_add_f16(pair | uint32(MAGIC), times, take)
        return multiply_add_f16(pair, scale, shift)

    @device_function
    def expand_codes(row, piece, power, words):
        codes = load_codes(row + uint32(CODES), piece)
        scale, shift = uint32(0), uint32(0)
        for w in range(WORDS):
            if w == 0 or GROUP < PIECE:
                element = uint32(uint32(PIECE) * piece + uint32(PER_WORD * w))
                group = uint32(element // uint32(GROUP))
                header = load_shared_u32(row + uint32(HEADER) + uint32(4) * group)
                scale = twice(low_f16(header) * power * float32(FACTOR))
                shift = twice(high_f16(header) * power)
            for m in range(FOURS):
                # of codes 2m and 2m + PER_WORD / 2; 2m + 1 and 2m + 1 + PER_WORD / 2
                if STRANDS == 1:
                    j, other, strand = 2 * m, 2 * m + 1, 0
                    x, y = unpack(codes[w], m)
                else:
                    j, other, strand = m, m, 1  # of the even elements and of the odd ones
                    even, odd = unpack(codes[0], m // 2), unpack(codes[1], m // 2, 1)
                    x = even[0] if m % 2 == 0 else even[1]
                    y = odd[0] if m % 2 == 0 else odd[1]
                x = numbers_of(x, j, 0, scale, shift)
                y = numbers_of(y, other, strand, scale, shift)
                at = 2 * FOURS * w + m
                words[at] = permute(x, y, uint32(LOW_HALVES))
                words[at + FOURS] = permute(x, y, uint32(HIGH_HALVES))

    @device_function
    def expand_exact(row, piece, power, words):
        for half in range(2):
            four = load_shared_u32x4(row + uint32(2 * PIECE) * piece + uint32(16 * half))
            for j in range(4):
                words[4 * half + j] = pack_f16(high(four[j]) * power, low(four[j]) * power)

    of_piece = expand_exact if fmt.is_exact else expand_codes

    @device_function
    def expand(stage, target, power, i):
        # neighbours have rows that follow one another: no bank conflicts
        number = uint32(uint32(cuda.threadIdx.x) + uint32(threads * i))
        row, piece = uint32(number % uint32(tokens)), uint32(number // uint32(tokens))
        if threads * (i + 1) <= ALL or number < uint32(ALL):
            words = cuda.local.array(8, uint32)
            of_piece(stage + row * uint32(STEP), piece, power, words)
            to = target + row * uint32(stride) + uint32(2 * PIECE) * piece
            store_shared_u32x4(to, (words[0], words[1], words[2], words[3]))
            store_shared_u32x4(to + uint32(16), (words[4], words[5], words[6], words[7]))

    return expand, -(-ALL // threads)
