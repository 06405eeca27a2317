"""Rows of a tile from global memory to blocks of fp16 numbers, by warpgroups of their own.

    warp    0: K of the first 32 tokens of a tile, 1: of the others, 2 and 3: V of these
    lane    a row: eight lanes, which store at the same time, have eight rows: no bank conflicts

        rows ──▶ landings of the warp ──▶ registers ──▶ stage of the block
          cp.async                1024 + code ──▶ code / 2 ──▶ scale * code / 2 + shift / 2

A code in the low bits of the half 1024 is 1024 + code. Taking 1024 off does not round, so a number
is rounded once, by its multiply-add. A number is half of what the row says, because an element may
be a little beyond 65504; the factors of scores and the merge make up for it. Below 2**-13 fp16 has
fewer digits.

Elements stay in the order of their words (spec.order_of), queries too; the output is put in order
when it is written. Rows after the last one are zeros.

16-bit rows of a second segment are few: a warp loads them to registers and halves them, in the
same order.
"""

from numba import cuda, float32, int32, uint32, uint64

from ...device.codes import masks_of
from ...device.fragments import load_sums, store_sums
from ...device.jit import device_function, in_turn
from ...device.ptx import (
    and_or,
    arrive,
    barrier,
    commit_copies,
    fence_shared,
    load_shared_u32x4,
    multiply_add_f16,
    multiply_f16,
    permute,
    store_shared_u32x4,
    unpack_four_e4m3,
    wait_copies,
    word_from_lane,
)
from ...device.row_layout import bits_apart, codes_per_word
from ...device.warpgroup import LINE
from ..copies import make_copy, make_locate, make_realign, slot_in_ring
from ..spec import TILE
from .queries import make_load_unit, make_put_unit
from .spec import BLOCK, FREE, FULL, GROUP, TOKENS, order_of

MAGIC, HALF = 0x64006400, 0x38003800  # 1024 and 1/2, twice
LOW_TWICE, HIGH_TWICE = 0x1010, 0x3232  # of the halves of a word, for permute


@device_function
def in_tiles(rows):
    """Rows, up to whole tiles."""
    return int32(int32(rows + int32(TOKENS - 1)) & int32(-TOKENS))


def make_feed(spec, path, staged):
    """Make the function by which a feeder's warp expands its half of K or of V of its tiles. It
    gives its next tile, the number of that, and its stage."""
    STAGES, FEEDERS, LANDINGS = spec.stages, spec.feeders, spec.landings
    THREADS = GROUP * (1 + spec.parties)
    STAGE, STEP = sum(spec.tile_bytes), TOKENS * spec.feeders
    LANDED, STRIDE = TILE * staged.landing, staged.stride
    REALIGNED, SCRATCH = staged.realigned, LANDINGS * TILE * staged.landing
    wait_for_oldest, wait_for_all = wait_copies[LANDINGS - 2], wait_copies[0]
    locate, copy = make_locate(path), make_copy(staged, path, 1)
    realign = make_realign(staged, path)
    load_row, expand = _make_load_row(staged), _make_expand(staged)
    masks_of_codes = _make_masks(staged.fmt)
    WORDS = 4 * (staged.header_units + staged.chunks)

    @device_function
    def feed(landings, stages, rows_of, places, begin, end, feeder, half):
        base, outer, row_stride = rows_of
        index, shift, mask, around = places
        lane = uint32(uint32(cuda.threadIdx.x) & uint32(31))
        tile = int32(begin + int32(feeder) * int32(TOKENS))
        behind = int32(int32(TILE) * int32(half))  # where the warp's half of a tile begins
        asked = tile
        where = locate(int32(asked + behind), end, index, shift)
        for s in range(LANDINGS - 1):
            following = locate(int32(asked + int32(STEP) + behind), end, index, shift)
            if asked < end:
                first = int32(asked + behind)
                upto = int32(max(first, end))
                place = uint32(landings + uint32(s * LANDED))
                copy(place, base, where, first, upto, outer, row_stride, around, mask)
            commit_copies()
            where = following
            asked = int32(asked + int32(STEP))
        row = uint32(uint32(TILE) * half + lane)
        at_row = uint32(uint32(LINE) * row) ^ uint32(uint32(16) * uint32(lane & uint32(7)))
        number = uint32(feeder)
        stage = uint32(feeder)
        current = uint32(0)
        ahead = uint32(LANDINGS - 1)
        words = cuda.local.array(WORDS, uint32)
        masks = masks_of_codes()
        while tile < end:
            wait_for_oldest()
            cuda.syncwarp()
            following = locate(int32(asked + int32(STEP) + behind), end, index, shift)
            if asked < end:
                first = int32(asked + behind)
                upto = int32(max(first, end))
                place = uint32(landings + ahead * uint32(LANDED))
                copy(place, base, where, first, upto, outer, row_stride, around, mask)
            commit_copies()
            where = following
            asked = int32(asked + int32(STEP))
            rows = uint32(landings + current * uint32(LANDED))
            if REALIGNED:
                scratch = uint32(landings + uint32(SCRATCH))
                first = int32(tile + behind)
                realign(rows, scratch, base, first, end, row_stride, around, mask)
                rows = scratch
                cuda.syncwarp()
            load_row(words, uint32(rows + uint32(STRIDE) * lane))
            if number >= uint32(STAGES):
                barrier(uint32(uint32(FREE) + stage), uint32(THREADS))
            expand(words, uint32(uint32(stages + uint32(STAGE) * stage) + at_row), masks)
            fence_shared()
            arrive(uint32(uint32(FULL) + stage), uint32(THREADS))
            tile = int32(tile + int32(STEP))
            number = uint32(number + uint32(FEEDERS))
            stage = uint32(stage + uint32(FEEDERS))
            if stage >= uint32(STAGES):
                stage = uint32(stage - uint32(STAGES))
            current = uint32(current + uint32(1)) if current != uint32(LANDINGS - 1) else uint32(0)
            ahead = uint32(ahead + uint32(1)) if ahead != uint32(LANDINGS - 1) else uint32(0)
        wait_for_all()
        return tile, number, stage

    return feed


def make_feed_exact(spec, fmt, order):
    """The function by which it goes on with 16-bit rows, from row `first` of their segment up to
    `end`, in the order of rows of the format `order`."""
    STAGES, FEEDERS, UNITS = spec.stages, spec.feeders, fmt.head_dim // 8
    THREADS, AT_ONCE = GROUP * (1 + spec.parties), 32 // UNITS  # rows that a warp loads together
    STAGE, STEP, WORDS = sum(spec.tile_bytes), TOKENS * spec.feeders, 4 * UNITS
    load_unit, put_unit = make_load_unit(order), make_put_unit(order, fmt.codec)

    @device_function
    def feed_exact(stages, rows_of, around, first, end, number, stage, half):
        base, _, row_stride = rows_of
        lane = uint32(uint32(cuda.threadIdx.x) & uint32(31))
        unit = uint32(lane % uint32(UNITS))
        mine = uint32(uint32(TILE) * half + uint32(lane // uint32(UNITS)))
        block = uint32(uint32(BLOCK) * uint32(unit >> uint32(3)))
        while first < end:
            words = cuda.local.array(WORDS, uint32)
            for i in range(UNITS):  # after the last row that one again, which is masked
                row = min(int32(first + int32(uint32(mine + uint32(AT_ONCE * i)))), int32(end - 1))
                at = base + uint64(slot_in_ring(row, around)) * uint64(row_stride)
                store_sums(words, 4 * i, load_unit(at, unit))
            if number >= uint32(STAGES):
                barrier(uint32(uint32(FREE) + stage), uint32(THREADS))
            for i in range(UNITS):
                row = uint32(mine + uint32(AT_ONCE * i))
                at = uint32(uint32(stages + uint32(STAGE) * stage) + block)
                at = uint32(at + uint32(LINE) * row)
                at = uint32(at + uint32(uint32(16) * uint32((unit ^ row) & uint32(7))))
                put_unit(at, load_sums(words, 4 * i), float32(0.5))
            fence_shared()
            arrive(uint32(uint32(FULL) + stage), uint32(THREADS))
            first = int32(first + int32(STEP))
            number = uint32(number + uint32(FEEDERS))
            stage = uint32(stage + uint32(FEEDERS))
            if stage >= uint32(STAGES):
                stage = uint32(stage - uint32(STAGES))

    return feed_exact


def _make_load_row(staged):
    """The function that loads a row's header and codes, all before the first number is stored."""
    UNITS = staged.header_units + staged.chunks

    @device_function
    def load_row(words, row):
        for i in range(UNITS):
            store_sums(words, 4 * i, load_shared_u32x4(uint32(row + uint32(16 * i))))

    return load_row


def _make_masks(fmt):
    """The function that gives the masks of pairs, through a shuffle, so in registers."""
    MASKS = () if order_of(fmt) == "as they are" else masks_of(fmt)
    FIRST, SECOND, THIRD, FOURTH = (MASKS + 4 * (0,))[:4]
    COUNT = len(MASKS)

    @device_function
    def masks():
        one = two = three = four = uint32(0)
        if COUNT > 0:
            one = word_from_lane(uint32(FIRST), uint32(0))
        if COUNT > 1:
            two = word_from_lane(uint32(SECOND), uint32(0))
        if COUNT > 2:
            three = word_from_lane(uint32(THIRD), uint32(0))
            four = word_from_lane(uint32(FOURTH), uint32(0))
        return one, two, three, four

    return masks


def _make_expand(staged):
    """The function that stores a row as numbers; `at`: its first unit, with the swizzle in it."""
    units = range(staged.fmt.head_dim // 8)
    return in_turn([_make_put_unit(staged, unit) for unit in units])


def _make_put_unit(staged, unit):
    fmt = staged.fmt
    PER_WORD = codes_per_word(fmt)
    FIRST = 4 * staged.header_units + 8 * unit // PER_WORD
    HEADER = staged.header_word(8 * unit // fmt.group_size)
    PLACE, UNIT = BLOCK * (unit // 8), 16 * (unit % 8)
    pairs = _make_e4m3(FIRST) if order_of(fmt) == "as they are" else _make_pairs(fmt, FIRST, unit)

    @device_function
    def put_unit(words, at, masks):
        header = words[HEADER]
        scale = permute(header, header, uint32(LOW_TWICE))
        shift = multiply_f16(permute(header, header, uint32(HIGH_TWICE)), uint32(HALF))
        one, two, three, four = pairs(words, masks)
        place = uint32(uint32(at ^ uint32(UNIT)) + uint32(PLACE))
        store_shared_u32x4(
            place,
            (
                multiply_add_f16(one, scale, shift),
                multiply_add_f16(two, scale, shift),
                multiply_add_f16(three, scale, shift),
                multiply_add_f16(four, scale, shift),
            ),
        )

    return put_unit


def _make_e4m3(first):
    """Make the function from the words of a row to half the codes of a unit, as four pairs."""
    FIRST = first

    @device_function
    def pairs(words, masks):
        one, two = unpack_four_e4m3(words[FIRST]), unpack_four_e4m3(words[FIRST + 1])
        return (
            multiply_f16(one[0], uint32(HALF)),
            multiply_f16(one[1], uint32(HALF)),
            multiply_f16(two[0], uint32(HALF)),
            multiply_f16(two[1], uint32(HALF)),
        )

    return pairs


def _make_pairs(fmt, first, unit):
    PER_WORD, PER_BYTE = codes_per_word(fmt), 8 // bits_apart(fmt)
    # of each pair its word, and its number in that
    PAIRS = [divmod(4 * unit + i, PER_WORD // 2) for i in range(4)]
    one_of, two_of, three_of, four_of = (
        _make_number(first + word - PAIRS[0][0], j // PER_BYTE, j % PER_BYTE, 8 // PER_BYTE)
        for word, j in PAIRS
    )

    @device_function
    def pairs(words, masks):
        return (
            one_of(words, masks),
            two_of(words, masks),
            three_of(words, masks),
            four_of(words, masks),
        )

    return pairs


def _make_number(word, byte, place, apart):
    """The function to half a pair of codes: 1024 + code * 2**bit, over 2**(bit + 1), less
    1024's."""
    WORD, SHIFT, PLACE, BIT = word, 8 * byte, place, apart * place
    INVERSE, LESS = 0x00010001 * (14 - BIT << 10), 0x00010001 * (24 - BIT << 10 | 0x8000)

    @device_function
    def number(words, masks):
        pair = and_or(words[WORD] >> uint32(SHIFT), masks[PLACE], uint32(MAGIC))
        return multiply_add_f16(pair, uint32(INVERSE), uint32(LESS))

    return number
