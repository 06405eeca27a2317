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
    commit_copies,
    copy_16,
    load_shared_f32,
    load_shared_f32x4,
    load_shared_u32x4,
    multiply,
    shfl_of_16,
    wait_copies,
    word_from_lane,
)
from ..device.quantize import piece_of
from ..device.row_layout import PRODUCT_ROWS, PRODUCT_WARPS, place_of_code, words_of_codes
from .feedback_rounding import make_load_piece, make_put_codes, make_round_element
from .spec import SHARE, TILE

wait_for_all = wait_copies[0]
ROUNDERS = PRODUCT_ROWS * SHARE // 32  # warps
QUAD = 4  # elements whose weights come together
FIRST = 2  # tiles of columns of L that rounding begins with
LAG = 2  # errors that come too late for a lane to pass on what an element owes for them


def make_ask_tiles(layout):
    """Make the function that starts the copies of all tiles of L, by all threads of a block: a
    group of the columns that come first, and one of the others."""
    end = layout.tiles
    first = [_make_ask(layout, tile, 0, min(FIRST, tile + 1)) for tile in range(end)]
    others = [_make_ask(layout, tile, FIRST, tile + 1) for tile in range(FIRST, end)]
    return in_turn([*first, _commit, *others, _commit])


@device_function
def _commit(shared, feedback, thread):
    commit_copies()


def _make_ask(layout, tile, begin, end):
    """Make the function that starts the copies of some tiles of columns of a tile of rows."""
    HEAD_DIM, STRIDE, SPAN = layout.head_dim, layout.stride, 32 * PRODUCT_WARPS // TILE
    BEGIN, END = TILE // 4 * begin, TILE // 4 * end  # units of 16 bytes, of SPAN threads a row
    PLACE, STEPS = layout.place_of(tile), -(-(END - BEGIN) // SPAN)

    @device_function
    def ask(shared, feedback, thread):
        row, first = uint32(thread // uint32(SPAN)), uint32(thread % uint32(SPAN))
        source = feedback + uint64(4 * HEAD_DIM) * uint64(uint32(TILE * tile) + row)
        target = uint32(shared + uint32(PLACE) + uint32(STRIDE) * row)
        for step in range(STEPS):
            unit = uint32(first + uint32(BEGIN + step * SPAN))
            if unit < uint32(END):
                copy_16(target + uint32(16) * unit, source + uint64(16) * uint64(unit), uint32(16))

    return ask


def make_round_rows(layout, fmt, buffer_bytes):
    """The function that rounds the rows of a block, whose first columns of L have come.

    Arguments, in shared memory: tiles; buffers; of each row its address in two words, and whether
    it goes anywhere.
    """
    TILES, STRIDE, BUFFER, WORDS = layout.tiles, layout.stride, buffer_bytes, words_of_codes(fmt)
    PLACES = tuple(map(layout.place_of, range(TILES)))
    LOADED, BAND, WEIGHTS = 2 * QUAD, 2 * QUAD * LAG, 2 * QUAD * TILES  # of two quads
    FEW = TILES // 2  # tiles at the end, which have fewer to come
    load_first, load_piece = _make_load(layout, TILES, -1), make_load_piece(fmt)
    round_first, round_last = (
        in_turn([_make_round(fmt, layout, window, i) for i in range(TILE)])
        for window in (TILES, FEW)
    )
    put_codes = make_put_codes(fmt)

    @device_function
    def end_tile(part, tile, owed, codes, own_codes):
        for w in range(WORDS):  # a lane writes those of a tile
            own_codes[w] = codes[w] if part == tile else own_codes[w]
            codes[w] = uint32(0)
        for i in range(TILES - 1):
            owed[i] = owed[i + 1]
        owed[TILES - 1] = float32(0.0)

    @device_function
    def round_rows(tiles, buffers, places):
        thread = uint32(cuda.threadIdx.x)
        lane = uint32(thread & uint32(31))
        # from a lane: ptxas has to see that a warp does not diverge
        warp = word_from_lane(uint32(thread >> uint32(5)), uint32(0))
        if warp >= uint32(ROUNDERS):
            wait_for_all()
            cuda.syncthreads()
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
            at[i] = uint32(tiles + uint32(PLACES[i]) + uint32(STRIDE) * part)
            owed[i] = float32(0.0)
        due = cuda.local.array(QUAD, float32)
        error = cuda.local.array(QUAD, float32)
        for i in range(QUAD):
            due[i] = error[i] = float32(0.0)
        codes = cuda.local.array(WORDS, uint32)
        for w in range(WORDS):
            codes[w] = uint32(0)
        own_codes = cuda.local.array(WORDS, uint32)
        value = cuda.local.array(LOADED, float32)
        band = cuda.local.array(BAND, float32)
        weights = cuda.local.array(WEIGHTS, float32)
        scales = cuda.local.array(2, float32)
        shifts = cuda.local.array(2, float32)
        inverses = cuda.local.array(2, float32)
        state = (at, value, band, weights, scales, shifts, inverses, owed, due, error, codes)
        load_first((part, buffer, uint32(0)), state)
        load_piece(buffer, uint32(0), 1, (scales, shifts, inverses))

        # Step 2: tile by tile
        for tile in range(TILES - FEW):
            round_first((part, buffer, uint32(tile)), state)
            end_tile(part, uint32(tile), owed, codes, own_codes)
            if tile == 0:  # the other columns have come
                wait_for_all()
                cuda.syncthreads()
        for tile in range(TILES - FEW, TILES):
            round_last((part, buffer, uint32(tile)), state)
            end_tile(part, uint32(tile), owed, codes, own_codes)
        if part < uint32(TILES) and where[2] != uint32(0):
            put_codes(part, own_codes, target)

    return round_rows


def _make_load(layout, window, quad):
    """Make the function that loads what the quad after this one takes: elements, the weights of
    the last LAG errors, and those of a quad's errors for a lane's elements; -1: the first of all.
    """
    ENDS, TO = 4 * QUAD * (quad + 1) == 4 * TILE, (quad + 1) % 2
    FIRST, STRIDE, TILES = QUAD * (quad + 1) % TILE, layout.stride, layout.tiles

    @device_function
    def load(where, state):
        (part, buffer, tile), (at, value, band, weights) = where, state[:4]
        if ENDS:
            for w in range(TILES - 1):  # the last one is not used again
                at[w] = uint32(at[w + 1] + uint32(4 * TILE))
        four = load_shared_f32x4(buffer + uint32(4 * TILE) * tile + uint32(4 * QUAD * (quad + 1)))
        for r in range(QUAD):
            value[QUAD * TO + r] = four[r]
        diagonal = uint32(at[0] - uint32(4 * LAG) - uint32(STRIDE) * part)
        for i in range(QUAD):
            for n in range(LAG):
                column = FIRST + i - LAG + n
                weight = float32(0.0)
                if quad >= 0 or column >= 0:
                    place = uint32(STRIDE * (FIRST + i) + 4 * (column + LAG))
                    weight = load_shared_f32(diagonal + place)
                band[LAG * (QUAD * TO + i) + n] = weight
        for w in range(window):
            four = load_shared_f32x4(at[w] + uint32(4 * FIRST))
            for r in range(QUAD):
                weights[QUAD * (TILES * TO + w) + r] = four[r]

    return load


def _make_round(fmt, layout, window, i):
    """Make the function that rounds the i-th element of a tile, which has window - 1 tiles after it
    or fewer."""
    NOW, IN_QUAD, PASSED, TILES = i // QUAD % 2, i % QUAD, i + LAG + 1, layout.tiles
    PIECE, LAST, (WORD, BIT) = piece_of(fmt), fmt.head_dim - 1, place_of_code(fmt, i)
    load_quad, load_piece = _make_load(layout, window, i // QUAD), make_load_piece(fmt)
    round_element = make_round_element(fmt)

    @device_function
    def round_one(where, state):
        _, value, band, weights, scales, shifts, inverses, owed, due, error, codes = state
        if IN_QUAD == 0:
            load_quad(where, state)
        if i % PIECE == 0:
            scales[0], shifts[0], inverses[0] = scales[1], shifts[1], inverses[1]
            element = uint32(uint32(TILE) * where[2] + uint32(i + PIECE))
            load_piece(where[1], min(element, uint32(LAST)), 1, (scales, shifts, inverses))
        mine = due[IN_QUAD]
        for n in range(LAG):
            weight = band[LAG * (QUAD * NOW + IN_QUAD) + n]
            mine = add(mine, multiply(weight, error[(i + QUAD - LAG + n) % QUAD]))
        x = value[QUAD * NOW + IN_QUAD]
        code, new = round_element(x, mine, scales[0], shifts[0], inverses[0])
        error[IN_QUAD] = new
        codes[WORD] |= uint32(code << uint32(BIT))
        for w in range(window):
            weight = weights[QUAD * (TILES * NOW + w) + IN_QUAD]
            owed[w] = add(owed[w], multiply(weight, new))
        due[PASSED % QUAD] = shfl_of_16(owed[PASSED // TILE], uint32(PASSED % TILE))

    return round_one
