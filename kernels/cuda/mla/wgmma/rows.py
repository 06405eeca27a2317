"""Rows of a tile from global memory to blocks of 16-bit numbers, by a warpgroup of their own.

    16-bit rows    cp.async, unit by unit to its place
    packed rows    the rows of the next tile wait in registers for a stage that is free; then

        code ──▶ low bits of an fp16, a subnormal: code * 2**-24 (device/codes.py); or E4M3 ──▶ fp16
             ──▶ times scale, plus shift: one multiply-add, rounded once

A row is multiplied by a power of two, so that its numbers stay below that of _top_of and none
overflows; scores and P undo it (scores.py).

    thread    warp w, lane 8j + r: a quarter j of row 8w + r of each half of the tile, so that eight
              lanes, which store at the same time, have eight rows: no bank conflicts

Behind the last token its row is repeated, with P 0. Codes stay in the order of their word, queries
too; the output is put in order at the end.
"""

from numba import cuda, float32, int32, uint32, uint64

from ...decode.copies import slot_in_ring
from ...device.codes import HALVES, make_unpack
from ...device.fragments import load_sums, store_sums
from ...device.jit import device_function
from ...device.powers import power_of
from ...device.ptx import (
    arrive,
    barrier,
    bits_float,
    commit_copies,
    copy_16,
    fence_shared,
    float_bits,
    high_f16,
    load_global_u32,
    load_global_u32x4,
    low_f16,
    maximum,
    multiply_add_f16,
    pack_f16,
    prefetch,
    shfl_xor,
    store_shared_f32x2,
    store_shared_u32x4,
    unpack_four_e4m3,
    wait_copies,
)
from ...device.row_layout import UNIT, factor_of, operand_of
from ...device.warpgroup import BLOCK, LINE
from .spec import (
    BLOCKS,
    FIRST_NOTES,
    FIRST_STAGE,
    FREE,
    FULL,
    GROUP,
    NOTES,
    POWERS,
    STAGE,
    STAGES,
    TOKENS,
)

PASSES, AT_ONCE = 2, 32  # of a tile, and rows of one
FAR = 2  # tiles ahead that rows are on their way from memory
LANES = 4  # of a row
TINIEST, LARGEST = 2.0**-60, 100  # of the largest number of a row; its exponent
# the exponent that numbers stay below, but for those of integer codes; see _top_of
MOST_TOP = 14


def make_put_rows(spec):
    """Make the function that puts all tiles of a block into the stages, one after another."""
    find, row_at = _make_find(spec), _make_row_at(spec)
    make = _make_copy_rows if spec.latent.is_exact else _make_expand_rows
    return make(spec, find, row_at)


def _make_find(spec):
    """Make the function that looks up the pages of a thread's rows of a tile."""
    PAGED = spec.place == "paged"

    @device_function
    def find(pages, first, source):
        last, index, shift = source[1], source[5], source[6]
        for p in range(PASSES):
            pages[p] = uint32(0)
            if PAGED:
                token = int32(min(int32(first + int32(AT_ONCE * p)), last))
                pages[p] = load_global_u32(index + uint64(4) * uint64(token >> shift))

    return find


def _make_row_at(spec):
    """Make the function to the address of a row."""
    PLACE, ROW = spec.place, spec.row_bytes

    @device_function
    def row_at(token, page, source):
        rows, _, stride_outer, around, page_mask = source[:5]
        if PLACE == "paged":
            rows += uint64(page) * stride_outer
            token = int32(token & page_mask)
        elif PLACE != "linear":
            token = slot_in_ring(token, around)
        return rows + uint64(uint32(token)) * uint64(ROW)

    return row_at


def _make_copy_rows(spec, find, row_at):
    UNITS = spec.row_bytes // UNIT
    STEPS = UNITS // LANES
    wait_for_all = wait_copies[0]

    @device_function
    def put_rows(shared, first, tiles, source):
        thread = uint32(cuda.threadIdx.x) % uint32(GROUP)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        r, j = uint32(lane & uint32(7)), uint32(lane >> uint32(3))
        row = uint32(uint32(8) * warp + r)
        last = source[1]
        mine = int32(first + int32(row))
        pages = cuda.local.array(PASSES, uint32)
        find(pages, mine, source)
        stage, number = uint32(0), uint32(0)
        while number < tiles:
            if number >= uint32(STAGES):
                barrier(uint32(FREE) + stage, uint32(3 * GROUP))
            target = shared + uint32(FIRST_STAGE) + uint32(STAGE) * stage + uint32(LINE) * row
            for p in range(PASSES):
                token = int32(min(int32(mine + int32(AT_ONCE * p)), last))
                at = row_at(token, pages[p], source) + uint64(uint32(UNIT) * j)
                for i in range(STEPS):
                    unit = uint32(uint32(j + uint32(LANES * (i % 2))) ^ r)
                    to = target + uint32(LINE * AT_ONCE * p + BLOCK * (i // 2))
                    copy_16(to + uint32(UNIT) * unit, at + uint64(UNIT * LANES * i), uint32(UNIT))
            commit_copies()
            mine = int32(mine + int32(TOKENS))
            find(pages, mine, source)
            wait_for_all()
            fence_shared()
            arrive(uint32(FULL) + stage, uint32(2 * GROUP))
            stage = uint32(stage ^ uint32(1))
            number = uint32(number + uint32(1))

    return put_rows


def _make_expand_rows(spec, find, row_at):
    LATENT, ROPE, BEHIND = spec.latent, spec.rope, spec.behind
    CODES, HEADER = LATENT.code_offset, LATENT.code_bytes if BEHIND else 0
    UNITS = LATENT.code_bytes // UNIT // LANES  # of a lane: every fourth one of a row
    PER_GROUP = LATENT.code_bytes // UNIT // LATENT.groups  # units of a group
    # of a lane; two lanes side by side have another group than the two after them, or all the same
    HEADERS, APART = (UNITS, True) if PER_GROUP < LANES else (LATENT.groups, False)
    PER_HEADER = UNITS // HEADERS
    ROPE_EXACT, ROPE_AT = ROPE.is_exact, LATENT.row_bytes
    ROPE_CODES, ROPE_UNITS = ROPE_AT + ROPE.header_bytes, ROPE.code_bytes // UNIT // LANES
    ALL = 4 * (UNITS + ROPE_UNITS) + HEADERS + 1  # words of a row that a lane has
    FIRST_ROPE, FIRST_HEADER = 4 * UNITS, 4 * (UNITS + ROPE_UNITS)
    ROPE_HEADER = FIRST_HEADER + HEADERS  # of packed RoPE elements: 4 groups, one a lane
    AHEAD = PASSES if ALL <= 32 else 1  # passes whose rows wait in registers
    KEPT = ALL * AHEAD
    LEVEL, ROPE_LEVEL = LATENT.facts.levels, ROPE.facts.levels
    IS_INT4 = spec.orders[0] == "pairs"
    FACTOR = 1.0 if spec.orders[0] == "as they are" else factor_of(LATENT)
    ROPE_FACTOR = factor_of(ROPE)
    TOP = _top_of(ROPE)
    RAISED = 2.0 ** (TOP - _top_of(LATENT))  # latents have another limit
    low, high = HALVES[operand_of(ROPE)]
    prefetch_rows = _make_prefetch_rows(spec, row_at)
    put_unit, put_rope_unit = (
        _make_put_unit(*pair) for pair in zip(spec.parts, spec.orders, strict=True)
    )

    @device_function
    def load_header(words, first, row, j):
        at = row + uint64(HEADER)
        if APART:
            at += uint64(uint32(4) * uint32(j >> uint32(1)))
            for i in range(HEADERS):
                words[first + FIRST_HEADER + i] = load_global_u32(at + uint64(8 * i))
        else:
            for i in range(HEADERS // 4):
                four = load_global_u32x4(at + uint64(UNIT * i))
                store_sums(words, first + FIRST_HEADER + 4 * i, four)
        words[first + ROPE_HEADER] = uint32(0)
        if not ROPE_EXACT:
            at = row + uint64(ROPE_AT) + uint64(uint32(4) * j)
            words[first + ROPE_HEADER] = load_global_u32(at)

    @device_function
    def load_rope(words, first, row, j):
        at = row + uint64(ROPE_CODES) + uint64(uint32(UNIT) * j)
        for i in range(ROPE_UNITS):
            four = load_global_u32x4(at + uint64(UNIT * LANES * i))
            store_sums(words, first + FIRST_ROPE + 4 * i, four)

    @device_function
    def load_unit(words, first, row, j, i):
        at = row + uint64(CODES + UNIT * LANES * i) + uint64(uint32(UNIT) * j)
        store_sums(words, first + 4 * i, load_global_u32x4(at))

    @device_function
    def exponent_of(words, first):
        """The exponent of the power of two that a row is multiplied by, from its largest number."""
        most = float32(0)
        for i in range(HEADERS):
            header = words[first + FIRST_HEADER + i]
            if BEHIND:
                most = maximum(most, abs(bits_float(header)) * float32(LEVEL))
            else:
                size = abs(low_f16(header)) * float32(LEVEL) + abs(high_f16(header))
                most = maximum(most, size)
        most *= float32(RAISED)
        if ROPE_EXACT:
            for i in range(4 * ROPE_UNITS):
                word = words[first + FIRST_ROPE + i]
                most = maximum(most, maximum(abs(low(word)), abs(high(word))))
        else:
            header = words[first + ROPE_HEADER]
            size = abs(low_f16(header)) * float32(ROPE_LEVEL) + abs(high_f16(header))
            most = maximum(most, size)
        most = maximum(most, shfl_xor(most, uint32(8)))
        most = maximum(most, shfl_xor(most, uint32(16)))
        exponent = int32(float_bits(maximum(most, float32(TINIEST))) >> uint32(23))
        return int32(int32(TOP) - min(int32(exponent - int32(126)), int32(LARGEST)))

    @device_function
    def scales_of(header, power, factor):
        """Scale, a sixteenth of it and shift, each twice."""
        scale, shift = low_f16(header) * power * factor, high_f16(header) * power
        if BEHIND:
            scale, shift = bits_float(header) * power * factor, float32(0)
        odd = scale * float32(0.0625)
        return pack_f16(scale, scale), pack_f16(odd, odd), pack_f16(shift, shift)

    @device_function
    def put_rope(words, first, at, power):
        at = uint32(at + uint32(BLOCK * (BLOCKS - 1)))
        for i in range(ROPE_UNITS):
            four = load_sums(words, first + FIRST_ROPE + 4 * i)
            if ROPE_EXACT:
                packed = (
                    pack_f16(high(four[0]) * power, low(four[0]) * power),
                    pack_f16(high(four[1]) * power, low(four[1]) * power),
                    pack_f16(high(four[2]) * power, low(four[2]) * power),
                    pack_f16(high(four[3]) * power, low(four[3]) * power),
                )
                store_shared_u32x4(at ^ uint32(UNIT * LANES * i), packed)
            else:
                pair = scales_of(words[first + ROPE_HEADER], power, float32(ROPE_FACTOR))
                put_rope_unit(at, four, pair, 0)

    def make_put(p):
        """The function that puts a lane's units of a row into a stage, and asks for more."""
        first, REUSED = ALL * (p % AHEAD), p + AHEAD < PASSES

        @device_function
        def put(words, next_row, j, places):
            at_latent, at_rope, powers = places
            exponent = exponent_of(words, first)
            power = power_of(exponent)
            if j == uint32(0):
                inverse = power_of(int32(-exponent))
                store_shared_f32x2(powers + uint32(8 * AT_ONCE * p), inverse, float32(exponent))
            put_rope(words, first, uint32(at_rope + uint32(LINE * AT_ONCE * p)), power)
            if REUSED:
                load_rope(words, first, next_row, j)
            at = uint32(at_latent + uint32(LINE * AT_ONCE * p))
            for group in range(HEADERS):
                header = words[first + FIRST_HEADER + group]
                pair = scales_of(header, power, float32(FACTOR))
                for n in range(PER_HEADER):
                    i = PER_HEADER * group + n
                    put_unit(at, load_sums(words, first + 4 * i), pair, i)
                    if REUSED:
                        load_unit(words, first, next_row, j, i)
            if REUSED:
                load_header(words, first, next_row, j)

        return put

    put_first, put_second = [make_put(p) for p in range(PASSES)]

    @device_function
    def load(words, pages, mine, j, source):
        """Ask for the rows that wait in registers."""
        for p in range(AHEAD):
            token = int32(min(int32(mine + int32(AT_ONCE * p)), source[1]))
            row = row_at(token, pages[p], source)
            load_header(words, ALL * p, row, j)
            load_rope(words, ALL * p, row, j)
            for i in range(UNITS):
                load_unit(words, ALL * p, row, j, i)

    @device_function
    def lane_place(at, j):
        """Where a lane's first unit goes, from the begin of its row on."""
        if IS_INT4:
            block, unit = uint32(j >> uint32(1)), uint32(uint32(4) * uint32(j & uint32(1)))
            return uint32(at + uint32(BLOCK) * block) ^ uint32(UNIT) * unit
        return uint32(at) ^ uint32(2 * UNIT) * j

    @device_function
    def rope_place(j):
        return uint32(UNIT) * j if ROPE_EXACT else uint32(2 * UNIT) * j

    @device_function
    def put_rows(shared, first, tiles, source):
        thread = uint32(cuda.threadIdx.x) % uint32(GROUP)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        r, j = uint32(lane & uint32(7)), uint32(lane >> uint32(3))
        row = uint32(uint32(8) * warp + r)
        last = source[1]
        mine = int32(first + int32(row))
        pages = cuda.local.array(PASSES, uint32)
        far_pages = cuda.local.array(PASSES, uint32)
        words = cuda.local.array(KEPT, uint32)
        find(pages, mine, source)
        load(words, pages, mine, j, source)
        for ahead in range(1, FAR + 1):
            find(far_pages, int32(mine + int32(TOKENS * ahead)), source)
            prefetch_rows(far_pages, int32(mine + int32(TOKENS * ahead)), j, source)
        find(far_pages, int32(mine + int32(TOKENS * (FAR + 1))), source)
        stage, number = uint32(0), uint32(0)
        while number < tiles:
            other = int32(mine + int32(AT_ONCE))
            next_row = row_at(int32(min(other, last)), pages[PASSES - 1], source)
            find(pages, int32(mine + int32(TOKENS)), source)
            if number >= uint32(STAGES):
                barrier(uint32(FREE) + stage, uint32(3 * GROUP))
            at = shared + uint32(FIRST_STAGE) + uint32(STAGE) * stage
            at += uint32(LINE) * row + uint32(UNIT) * r
            powers = shared + uint32(FIRST_NOTES + POWERS) + uint32(NOTES) * stage
            places = (lane_place(at, j), uint32(at) ^ rope_place(j), powers + uint32(8) * row)
            put_first(words, next_row, j, places)
            cuda.syncwarp()  # or ptxas would work on both passes at a time, and lack registers
            put_second(words, next_row, j, places)
            fence_shared()
            arrive(uint32(FULL) + stage, uint32(2 * GROUP))
            mine = int32(mine + int32(TOKENS))
            prefetch_rows(far_pages, int32(mine + int32(TOKENS * FAR)), j, source)
            find(far_pages, int32(mine + int32(TOKENS * (FAR + 1))), source)
            load(words, pages, mine, j, source)
            stage = uint32(stage ^ uint32(1))
            number = uint32(number + uint32(1))

    return put_rows


def _make_prefetch_rows(spec, row_at):
    """The function that asks for rows of a tile FAR ahead in the L2 cache."""
    STEPS = -(-spec.row_bytes // (LINE * LANES))  # lines that a lane asks for
    LAST = spec.row_bytes - 1

    @device_function
    def prefetch_rows(pages, first, j, source):
        for p in range(PASSES):
            token = int32(min(int32(first + int32(AT_ONCE * p)), source[1]))
            row = row_at(token, pages[p], source)
            for i in range(STEPS):
                byte = min(uint32(uint32(LINE) * j + uint32(LINE * LANES * i)), uint32(LAST))
                prefetch(row + uint64(byte))

    return prefetch_rows


def _top_of(fmt):
    """The exponent that numbers stay below: of integers 2**24 * scale must be below 2**16."""
    of_integers = int(fmt.facts.levels).bit_length() - 9
    return fmt.pick(integers=of_integers, e4m3=MOST_TOP, bf16=MOST_TOP, fp16=MOST_TOP)


def _make_put_unit(fmt, order):
    """The function that stores a lane's i-th unit; `at`: the first, swizzled."""
    if fmt.is_exact:
        return None
    IS_INT4, AS_IT_IS, unpack = order == "pairs", order == "as they are", make_unpack(fmt)
    PER_UNIT = 4 if IS_INT4 else 2  # stores of eight numbers

    @device_function
    def pairs_of(four, w):
        if AS_IT_IS:
            one, two = unpack_four_e4m3(four[2 * w]), unpack_four_e4m3(four[2 * w + 1])
            return one[0], one[1], two[0], two[1]
        if IS_INT4:
            one, two = unpack(four[w], 0), unpack(four[w], 1)
        else:
            one, two = unpack(four[2 * w], 0), unpack(four[2 * w + 1], 0)
        return one[0], one[1], two[0], two[1]

    @device_function
    def put_unit(at, four, scales, i):
        scale, odd, shift = scales
        if not IS_INT4:
            odd = scale
        at = uint32(at + uint32(BLOCK * PER_UNIT // 2 * i))
        for w in range(PER_UNIT):
            pairs = pairs_of(four, w)
            store_shared_u32x4(
                at ^ uint32(UNIT * w),
                (
                    multiply_add_f16(pairs[0], scale, shift),
                    multiply_add_f16(pairs[1], odd, shift),
                    multiply_add_f16(pairs[2], scale, shift),
                    multiply_add_f16(pairs[3], odd, shift),
                ),
            )

    return put_unit
