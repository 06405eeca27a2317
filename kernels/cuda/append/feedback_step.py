"""A few rows rounded with feedback, as soon as they can be: all of L in shared memory.

    tiles      of 16 rows of L, up to its diagonal; tile t and tile T - 1 - t stand side by side,
               so that rows are alike long, an odd number of 16-byte units
    rounders   half of the warps, two rows each: a tile's 16 elements one after another
    helpers    the other half: what the next tile owes to the tiles before this one

    helper      past of t + 1 to 0 .. t - 1 ──┐ barrier
    rounder     tile t ──▶ errors, codes ─────┴──▶ + past of t + 1 to t ──▶ tile t + 1

Sums have the order of feedback_rounding.py: the same bits.
"""

from numba import cuda, float32, uint32, uint64

from ..device.jit import device_function, in_turn
from ..device.ptx import (
    add,
    copy_16,
    load_shared_f32,
    load_shared_f32x4,
    load_shared_u32x4,
    multiply,
    shfl,
    store_shared_f32,
)
from ..device.quantize import piece_of
from ..device.row_layout import PRODUCT_ROWS, PRODUCT_WARPS, words_of_codes
from .feedback_rounding import make_load_tile, make_own_past, make_put_tile, make_within
from .spec import SHARE, TILE

ROUNDERS = PRODUCT_ROWS * SHARE // 32  # warps


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

    Arguments, in shared memory: tiles; buffers; partial sums, float32 [2, rows, 16]; of each row
    its address in two words, and whether it goes anywhere.
    """
    TILES, STRIDE, HALF, BUFFER = layout.tiles, layout.stride, layout.half, buffer_bytes
    PIECES, WORDS = TILE // piece_of(fmt), words_of_codes(fmt)
    PARTIALS, BLOCK = 4 * TILE * PRODUCT_ROWS, TILE * layout.stride
    load_tile, put_tile = make_load_tile(fmt), make_put_tile(fmt)
    own_past, within = make_own_past(SHARE, STRIDE), make_within(fmt, 0, STRIDE)

    @device_function
    def place_of(tile):
        beside = tile >= uint32(HALF)
        pair = uint32(uint32(TILES - 1) - tile) if beside else tile
        first = uint32(uint32(4 * TILE) * uint32(pair + uint32(1))) if beside else uint32(0)
        return uint32(uint32(BLOCK) * pair + first)

    @device_function
    def add_latest(weights, error, owed):
        """What a lane's element owes to the tile that was rounded last."""
        for i in range(TILE // 4):
            four = load_shared_f32x4(weights + uint32(16 * i))
            for r in range(4):
                owed = add(owed, multiply(four[r], error[4 * i + r]))
        return owed

    @device_function
    def round_rows(tiles, buffers, partials, places):
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        rounds = warp < uint32(ROUNDERS)
        part = uint32(lane % uint32(SHARE))
        row = uint32(uint32(2) * uint32(warp % uint32(ROUNDERS)) + uint32(lane // uint32(SHARE)))
        buffer = uint32(buffers + uint32(BUFFER) * row)
        own = uint32(partials + uint32(4 * TILE) * row + uint32(4) * part)
        where = load_shared_u32x4(places + uint32(16) * row)
        target = uint64(where[0]) | (uint64(where[1]) << uint64(32))
        writes = part == uint32(0)
        owed = cuda.local.array(TILE, float32)
        for i in range(TILE):
            owed[i] = float32(0.0)
        for step in range(TILES):
            tile = uint32(step)
            following = uint32(tile + uint32(1))
            at = uint32(tiles + place_of(following))
            partial = uint32(own + uint32(PARTIALS) * uint32(following & uint32(1)))
            error = cuda.local.array(TILE, float32)
            if rounds:
                # Step 1: the codes of a tile
                value = cuda.local.array(TILE, float32)
                scales = cuda.local.array(PIECES, float32)
                shifts = cuda.local.array(PIECES, float32)
                inverses = cuda.local.array(PIECES, float32)
                load_tile(buffer, tile, value, (scales, shifts, inverses))
                codes = cuda.local.array(WORDS, uint32)
                for w in range(WORDS):
                    codes[w] = uint32(0)
                diagonal = uint32(tiles + place_of(tile) + uint32(uint32(4 * TILE) * tile))
                within(diagonal, value, (scales, shifts, inverses), owed, error, codes)
                cuda.syncwarp()  # all lanes of the row have its elements
                if writes:
                    put_tile(buffer, tile, error, codes, target, where[2] != uint32(0))
            elif following < uint32(TILES):
                # Step 2: meanwhile what the next one owes to those before it
                mine = cuda.local.array(1, float32)
                own_past(at, buffer, part, tile, mine)
                store_shared_f32(partial, mine[0])
            cuda.syncthreads()

            # Step 3: and to it
            if rounds and following < uint32(TILES):
                weights = uint32(at + uint32(STRIDE) * part + uint32(uint32(4 * TILE) * tile))
                mine_now = add_latest(weights, error, load_shared_f32(partial))
                first = uint32(lane & uint32(32 - SHARE))
                for i in range(TILE):
                    owed[i] = shfl(mine_now, uint32(first + uint32(i)))

    return round_rows
