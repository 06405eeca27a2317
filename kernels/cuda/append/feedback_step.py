"""A few rows rounded with feedback, as soon as they can be: all of L in shared memory.

    tiles    of 16 rows of L, up to its diagonal; tile t and tile T - 1 - t stand side by side,
             so that rows are alike long, an odd number of 16-byte units
    lanes    16 a row: lane k has what elements k, 16 + k, 32 + k ... owe for all errors so far

All lanes of a row compute the same errors, one after another, and nothing waits on their way:

    error j ──┬──▶ what each lane's elements owe ──▶ that of element j + 1 + LAG, to all lanes
              └──▶ + L e for the last LAG errors ──▶ error j + 1

What a quad of elements takes from shared memory is loaded a quad before. Sums have the order of
feedback_rounding.py: the same bits.
"""

from numba import cuda, float32, uint32, uint64

from ..device.jit import device_function, in_turn
from ..device.ptx import (
    add,
    copy_16,
    float_bits,
    load_shared_f32,
    load_shared_f32x4,
    load_shared_u32x4,
    multiply,
    shfl_of_16,
)
from ..device.quantize import piece_of
from ..device.row_layout import PRODUCT_ROWS, PRODUCT_WARPS, place_of_code, words_of_codes
from .feedback_rounding import (
    make_load_piece,
    make_put_codes,
    make_round_element,
    start_of_codes,
)
from .spec import SHARE, TILE

ROUNDERS = PRODUCT_ROWS * SHARE // 32  # warps
QUAD = 4  # elements whose weights come together
LAG = 2  # errors that come too late for a lane to pass on what an element owes for them


def make_ask_tiles(layout):
    """Make the function that starts the copies of all tiles of L, by all threads of a block."""
    return in_turn([_make_ask_tile(layout, tile) for tile in range(layout.tiles)])


def _make_ask_tile(layout, tile):
    HEAD_DIM, STRIDE, PLACE = layout.head_dim, layout.stride, layout.place_of(tile)
    UNITS, SPAN = TILE // 4 * (tile + 1), 32 * PRODUCT_WARPS // TILE  # threads of a row
    STEPS = -(-UNITS // SPAN)

    @device_function
    def ask_tile(shared, feedback, thread):
        row, first = uint32(thread // uint32(SPAN)), uint32(thread % uint32(SPAN))
        line = uint32(uint32(TILE * tile) + row)
        source = feedback + uint64(uint32(4 * HEAD_DIM) * line)
        target = uint32(shared + uint32(PLACE) + uint32(STRIDE) * row)
        for step in range(STEPS):
            unit = uint32(first + uint32(step * SPAN))
            if unit < uint32(UNITS):
                place = uint32(uint32(16) * unit)
                copy_16(target + place, source + uint64(place), uint32(16))

    return ask_tile


def make_round_rows(layout, fmt, buffer_bytes):
    """The function that rounds the rows of a block, whose tiles of L have come.

    Arguments, in shared memory: tiles; buffers; of each row its address in two words, and whether
    it goes anywhere.
    """
    TILES, STRIDE, HALF, BUFFER = layout.tiles, layout.stride, layout.half, buffer_bytes
    BLOCK, WORDS, START = TILE * layout.stride, words_of_codes(fmt), start_of_codes(fmt)
    LOADED, BAND, WEIGHTS = 2 * QUAD, 2 * QUAD * LAG, 2 * QUAD * TILES  # of two quads
    FEW = TILES // 2  # tiles at the end, which have fewer to come
    load_first, load_piece = _make_load(STRIDE, TILES, TILES, -1), make_load_piece(fmt)
    round_first = _make_round_tile(fmt, STRIDE, TILES, TILES)
    round_last = _make_round_tile(fmt, STRIDE, TILES, FEW)
    put_codes = make_put_codes(fmt)

    @device_function
    def place_of(tile):
        beside = tile >= uint32(HALF)
        pair = uint32(uint32(TILES - 1) - tile) if beside else tile
        first = uint32(uint32(4 * TILE) * uint32(pair + uint32(1))) if beside else uint32(0)
        return uint32(uint32(BLOCK) * pair + first)

    @device_function
    def end_tile(part, tile, owed, codes, own_codes):
        for w in range(WORDS):  # a lane writes those of a tile
            own_codes[w] = codes[w] if part == tile else own_codes[w]
            codes[w] = uint32(START)
        for i in range(TILES - 1):
            owed[i] = owed[i + 1]
        owed[TILES - 1] = float32(0.0)

    @device_function
    def round_rows(tiles, buffers, places):
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        if warp >= uint32(ROUNDERS):
            return
        part = uint32(lane % uint32(SHARE))
        row = uint32(uint32(2) * warp + uint32(lane // uint32(SHARE)))
        buffer = uint32(buffers + uint32(BUFFER) * row)
        where = load_shared_u32x4(places + uint32(16) * row)
        target = uint64(where[0]) | (uint64(where[1]) << uint64(32))

        # Step 1: of this tile and of those after it, where a lane's row of L is, and what its
        # element owes; of elements, what a few of them owe, their errors, and what was loaded
        at = cuda.local.array(TILES, uint32)
        owed = cuda.local.array(TILES, float32)
        for i in range(TILES):
            at[i] = uint32(tiles + place_of(uint32(i)) + uint32(STRIDE) * part)
            owed[i] = float32(0.0)
        due = cuda.local.array(QUAD, float32)
        error = cuda.local.array(QUAD, float32)
        for i in range(QUAD):
            due[i] = error[i] = float32(0.0)
        codes = cuda.local.array(WORDS, uint32)
        for w in range(WORDS):
            codes[w] = uint32(START)
        own_codes = cuda.local.array(WORDS, uint32)
        value = cuda.local.array(LOADED, float32)
        band = cuda.local.array(BAND, float32)
        weights = cuda.local.array(WEIGHTS, float32)
        scales = cuda.local.array(2, float32)
        shifts = cuda.local.array(2, float32)
        inverses = cuda.local.array(2, float32)
        group = (scales, shifts, inverses)
        loaded = (value, band, weights)
        load_first((part, buffer, uint32(0)), at, loaded)
        load_piece(buffer, uint32(0), 1, group)

        # Step 2: tile by tile
        for step in range(TILES - FEW):
            tile = uint32(step)
            round_first((part, buffer, tile), at, loaded, group, (owed, due, error), codes)
            end_tile(part, tile, owed, codes, own_codes)
        for step in range(TILES - FEW, TILES):
            tile = uint32(step)
            round_last((part, buffer, tile), at, loaded, group, (owed, due, error), codes)
            end_tile(part, tile, owed, codes, own_codes)
        if part < uint32(TILES) and where[2] != uint32(0):
            put_codes(part, own_codes, target)

    return round_rows


def _make_round_tile(fmt, stride, tiles, window):
    """Make the function that rounds a tile, which has window - 1 tiles after it or fewer."""
    PIECE, LAST = piece_of(fmt), fmt.head_dim - 1
    load_piece, steps = make_load_piece(fmt), []

    def next_piece(first):
        @device_function
        def take(where, at, loaded, group, state, codes):
            scales, shifts, inverses = group
            scales[0], shifts[0], inverses[0] = scales[1], shifts[1], inverses[1]
            _, buffer, tile = where
            element = uint32(uint32(TILE) * tile + uint32(first + PIECE))
            load_piece(buffer, min(element, uint32(LAST)), 1, group)

        return take

    def next_quad(load):
        @device_function
        def take(where, at, loaded, group, state, codes):
            load(where, at, loaded)

        return take

    for i in range(TILE):
        if i % QUAD == 0:
            steps.append(next_quad(_make_load(stride, tiles, window, i // QUAD)))
        if i % PIECE == 0:
            steps.append(next_piece(i))
        steps.append(_make_round(fmt, tiles, window, i))
    return in_turn(steps)


def _make_load(stride, tiles, window, quad):
    """Make the function that loads what the quad after this one takes: elements, the weights of
    the last LAG errors, and those of a quad's errors for a lane's elements; -1: the first of all.
    """
    ENDS, TO = 4 * QUAD * (quad + 1) == 4 * TILE, (quad + 1) % 2
    FIRST = QUAD * (quad + 1) % TILE  # in its tile

    @device_function
    def load(where, at, loaded):
        part, buffer, tile = where
        value, band, weights = loaded
        if ENDS:
            for w in range(tiles - 1):  # the last one is not used again
                at[w] = uint32(at[w + 1] + uint32(4 * TILE))
        own = uint32(buffer + uint32(4 * TILE) * tile + uint32(4 * QUAD * (quad + 1)))
        four = load_shared_f32x4(own)
        for r in range(QUAD):
            value[QUAD * TO + r] = four[r]
        diagonal = uint32(at[0] - uint32(stride) * part)
        for i in range(QUAD):
            for n in range(LAG):
                column = FIRST + i - LAG + n
                weight = float32(0.0)
                if quad >= 0 or column >= 0:
                    place = uint32(stride * (FIRST + i) + 4 * column + 4 * LAG)
                    weight = load_shared_f32(uint32(diagonal - uint32(4 * LAG)) + place)
                band[LAG * (QUAD * TO + i) + n] = weight
        for w in range(window):
            four = load_shared_f32x4(at[w] + uint32(4 * FIRST))
            for r in range(QUAD):
                weights[QUAD * (tiles * TO + w) + r] = four[r]

    return load


def _make_round(fmt, tiles, window, i):
    """Make the function that rounds the i-th element of a tile."""
    NOW, PASSED, IN_QUAD = i // QUAD % 2, i + LAG + 1, i % QUAD
    WORD, BIT = place_of_code(fmt, i)
    round_element = make_round_element(fmt)

    @device_function
    def round_one(where, at, loaded, group, state, codes):
        value, band, weights = loaded
        scales, shifts, inverses = group
        owed, due, error = state
        mine = due[IN_QUAD]
        for n in range(LAG):
            weight = band[LAG * (QUAD * NOW + IN_QUAD) + n]
            mine = add(mine, multiply(weight, error[(i + QUAD - LAG + n) % QUAD]))
        code, new = round_element(
            value[QUAD * NOW + IN_QUAD], mine, scales[0], shifts[0], inverses[0]
        )
        error[IN_QUAD] = new
        codes[WORD] += uint32(float_bits(code) << uint32(BIT))
        for w in range(window):
            weight = weights[QUAD * (tiles * NOW + w) + IN_QUAD]
            owed[w] = add(owed[w], multiply(weight, new))
        due[PASSED % QUAD] = shfl_of_16(owed[PASSED // TILE], uint32(PASSED % TILE))

    return round_one
