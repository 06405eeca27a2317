"""A row rounded with feedback: the second pass of the feedback kernel, see rows/quantize.py.

What a lane does for a tile of 16 elements, which lie with scales and shifts in the row's buffer:

    past      what each element owes: L_ij e_j of the errors e_j before the tile, j ascending;
              lanes that share a row share the elements
    within    the 16 elements one after another: each adds what it owes for those before it in
              the tile, is rounded, and leaves an error; lanes that share a row do the same
    store     codes to the row, errors to the buffer in place of the elements

    tiles of L  ──cp.async──▶ 2 stages, the block's; only their columns up to the diagonal

Every product and sum rounds by itself, in the order of quantize.py.
"""

from numba import cuda, float32, int32, uint16, uint32, uint64

from ..device.codes import planes_of
from ..device.jit import device_function, in_turn
from ..device.ptx import (
    add,
    add_clamped,
    commit_copies,
    copy_16,
    float_bits,
    high_f16,
    load_shared_f32x4,
    load_shared_u32,
    low_f16,
    multiply,
    multiply_add,
    multiply_clamped,
    shfl,
    store_global_u16,
    store_global_u32,
    store_shared_f32x4,
    subtract,
    wait_copies,
)
from ..device.quantize import MANTISSA, ROUNDER, ROUNDER_BITS, piece_of, reciprocal_of
from ..device.row_layout import place_of_code, words_of_codes
from .spec import TILE

wait_for_all = wait_copies[0]


def make_round_row(spec):
    """Make the function that rounds the row in a buffer, with the other lanes that share it."""
    FMT, STRIDE, STAGE_BYTES = spec.fmt, spec.stride, spec.stage_bytes
    TILES = FMT.head_dim // TILE
    PIECES, WORDS, SHARE = TILE // piece_of(FMT), words_of_codes(FMT), spec.share
    load_tile, put_tile = make_load_tile(FMT), make_put_tile(FMT)
    ask_tile, past, within = (
        make_ask_tile(spec),
        make_past(spec.share, STRIDE),
        in_turn([_make_within(FMT, i, STRIDE) for i in range(TILE)]),
    )

    @device_function
    def round_row(shared, buffer, feedback, thread, part, target, to_packed):
        reading, writing = uint32(shared), uint32(shared + uint32(STAGE_BYTES))
        for step in range(TILES):
            # Step 1: a tile has come; the other stage is free for the next
            tile = uint32(step)
            wait_for_all()
            cuda.syncthreads()
            following = uint32(tile + uint32(1))
            if following < uint32(TILES):
                ask_tile(writing, feedback, thread, following)

            # Step 2: the elements, their scales and shifts
            value = cuda.local.array(TILE, float32)
            scales = cuda.local.array(PIECES, float32)
            shifts = cuda.local.array(PIECES, float32)
            inverses = cuda.local.array(PIECES, float32)
            load_tile(buffer, tile, value, (scales, shifts, inverses))

            # Step 3: its codes
            owed = cuda.local.array(TILE, float32)
            error = cuda.local.array(TILE, float32)
            codes = cuda.local.array(WORDS, uint32)
            for w in range(WORDS):
                codes[w] = uint32(0)
            past(reading, buffer, part, tile, owed)
            diagonal = uint32(reading + uint32(uint32(4 * TILE) * tile))
            within(diagonal, value, (scales, shifts, inverses), owed, error, codes)

            # Step 4: to the row, and for the tiles to come
            if SHARE > 1:
                cuda.syncwarp()  # all lanes of the row have its elements
            if part == uint32(0):
                put_tile(buffer, tile, error, codes, target, to_packed)
            reading, writing = writing, reading

    return round_row


def make_load_tile(fmt):
    """The function that loads a tile's elements, and scale, shift, 1 / scale of each piece."""
    PIECE, load_piece = piece_of(fmt), make_load_piece(fmt)
    PIECES = TILE // PIECE

    @device_function
    def load_tile(buffer, tile, value, group):
        own = uint32(buffer + uint32(uint32(4 * TILE) * tile))
        for i in range(TILE // 4):
            four = load_shared_f32x4(own + uint32(16 * i))
            for r in range(4):
                value[4 * i + r] = four[r]
        for piece in range(PIECES):
            load_piece(buffer, uint32(uint32(TILE) * tile + uint32(piece * PIECE)), piece, group)

    return load_tile


def make_load_piece(fmt):
    """The function that loads scale, shift, 1 / scale of an element to a place of three arrays; the
    scale for codes / 2**bits."""
    AFTER, SIZE, CODES = 4 * fmt.head_dim, fmt.group_size, fmt.facts.levels + 1

    @device_function
    def load_piece(buffer, element, place, group):
        scales, shifts, inverses = group
        word = load_shared_u32(buffer + uint32(AFTER) + uint32(4) * uint32(element // uint32(SIZE)))
        scale = multiply(low_f16(word), float32(CODES))
        scales[place], shifts[place], inverses[place] = scale, high_f16(word), reciprocal_of(scale)

    return load_piece


def make_put_tile(fmt):
    """The function that puts codes to the row, and errors in place of a tile's elements."""
    put_codes = make_put_codes(fmt)

    @device_function
    def put_tile(buffer, tile, error, codes, target, to_packed):
        own = uint32(buffer + uint32(uint32(4 * TILE) * tile))
        for i in range(TILE // 4):
            four = (error[4 * i], error[4 * i + 1], error[4 * i + 2], error[4 * i + 3])
            store_shared_f32x4(own + uint32(16 * i), four)
        if to_packed:
            put_codes(tile, codes, target)

    return put_tile


def make_put_codes(fmt):
    """The function that puts a tile's codes to the row."""
    HEADER, WORDS = fmt.header_bytes, words_of_codes(fmt)
    PLANES = fmt.pick(quarters=False, planes=True, nibbles=False, bytes=False)
    HIGH = HEADER + fmt.head_dim // 4  # where INT3 has its high bits

    @device_function
    def put_codes(tile, codes, target):
        if PLANES:
            low, high = planes_of(codes[0], codes[1])
            place = uint32(uint32(HEADER) + uint32(4) * tile)
            store_global_u32(target + uint64(place), uint32(low))
            place = uint32(uint32(HIGH) + uint32(2) * tile)
            store_global_u16(target + uint64(place), uint16(high))
        else:
            for w in range(WORDS):
                place = uint32(uint32(HEADER) + uint32(4 * WORDS) * tile + uint32(4 * w))
                store_global_u32(target + uint64(place), codes[w])

    return put_codes


def make_ask_tile(spec):
    """Make the function that starts the copies of a tile of L, up to its diagonal."""
    HEAD_DIM, STRIDE = spec.fmt.head_dim, spec.stride
    SPAN = 32 * spec.warps // TILE  # threads of a row
    STEPS = -(-HEAD_DIM // (4 * SPAN))

    @device_function
    def ask_tile(stage, feedback, thread, tile):
        row, first = uint32(thread // uint32(SPAN)), uint32(thread % uint32(SPAN))
        units = uint32(uint32(TILE // 4) * uint32(tile + uint32(1)))
        line = uint32(uint32(uint32(TILE) * tile) + row)
        source = feedback + uint64(uint32(4 * HEAD_DIM) * line)
        target = uint32(stage + uint32(STRIDE) * row)
        for step in range(STEPS):
            unit = uint32(first + uint32(step * SPAN))
            if unit < units:
                place = uint32(uint32(16) * unit)
                copy_16(target + place, source + uint64(place), uint32(16))
        commit_copies()

    return ask_tile


def make_past(share, stride):
    """The function to what a tile's elements owe to those before; `share` lanes have a row, each
    every share-th element from `part` on."""
    SHARE, STRIDE = share, stride
    OWN = TILE // SHARE

    @device_function
    def add_four(weights, errors, mine):
        e = load_shared_f32x4(errors)
        for k in range(OWN):
            weight = load_shared_f32x4(weights + uint32(k * SHARE * STRIDE))
            for r in range(4):
                mine[k] = add(mine[k], multiply(weight[r], e[r]))

    @device_function
    def past(stage, errors, part, tile, owed):
        mine = cuda.local.array(OWN, float32)
        for k in range(OWN):
            mine[k] = float32(0.0)
        stage = uint32(stage + uint32(STRIDE) * part)
        for before in range(int32(tile)):
            place = uint32(uint32(4 * TILE) * uint32(before))
            weights, es = uint32(stage + place), uint32(errors + place)
            add_four(weights, es, mine)  # LLVM would leave a loop
            add_four(weights + uint32(16), es + uint32(16), mine)
            add_four(weights + uint32(32), es + uint32(32), mine)
            add_four(weights + uint32(48), es + uint32(48), mine)
        first = uint32(uint32(cuda.threadIdx.x) & uint32(32 - SHARE))
        for i in range(TILE):
            owed[i] = mine[i // SHARE]
            if SHARE > 1:
                owed[i] = shfl(mine[i // SHARE], uint32(first + uint32(i % SHARE)))

    return past


def _make_within(fmt, i, stride):
    """Make the function that rounds the i-th element of a tile, after those before."""
    LAST, PLACE, (WORD, BIT) = i // 4 * 4, i // piece_of(fmt), place_of_code(fmt, i)
    round_element = make_round_element(fmt)

    @device_function
    def within(diagonal, value, group, owed, error, codes):
        scales, shifts, inverses = group
        due = owed[i]
        for j in range(0, LAST, 4):
            weight = load_shared_f32x4(diagonal + uint32(i * stride + 4 * j))
            for r in range(4):
                due = add(due, multiply(weight[r], error[j + r]))
        if i > LAST:
            weight = load_shared_f32x4(diagonal + uint32(i * stride + 4 * LAST))
            for r in range(i - LAST):
                due = add(due, multiply(weight[r], error[LAST + r]))
        code, error[i] = round_element(value[i], due, scales[PLACE], shifts[PLACE], inverses[PLACE])
        codes[WORD] |= uint32(code << uint32(BIT))

    return within


def make_round_element(fmt):
    """The function to an element's code and its error.

    Numbers are codes / 2**bits, so that instructions clamp them to 0 to 1: below before they are
    rounded, above when they are and 1 more is at most 2**bits.
    """
    LEVELS = fmt.pick(integers=int(fmt.facts.levels))
    ONE, BITS = 1 / (LEVELS + 1), ROUNDER_BITS - (LEVELS.bit_length() << MANTISSA)
    ROUNDS = ROUNDER * ONE

    @device_function
    def round_element(value, due, scale, shift, inverse):
        wanted = multiply_clamped(subtract(subtract(value, due), shift), inverse)
        more = add_clamped(add(wanted, float32(ROUNDS)), float32(ONE - ROUNDS))
        code = subtract(more, float32(ONE))
        error = subtract(multiply_add(code, scale, shift), value)  # the product is exact
        return uint32(float_bits(add(code, float32(ROUNDS))) - uint32(BITS)), error

    return round_element
