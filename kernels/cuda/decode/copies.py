"""Rows from global memory into a warp's stages (unrolled loads), and their realignment.

A tile is 32 rows of K or of V, each as `windows` copies of 16 bytes (cp.async). Piece p of a tile
is window p % windows of row p // windows. Lane l of the ring's lanes asks for every 32nd piece (of
one warp) back to back.
"""

from numba import cuda, int32, uint32, uint64

from ..device.codes import HIGH_HALVES, LOW_HALVES, high_bits, nibbles_of
from ..device.fragments import load_sums
from ..device.jit import device_function, in_turn
from ..device.ptx import (
    copy_16,
    load_global_u32,
    load_shared_u32,
    load_shared_u32x2,
    load_shared_u32x4,
    store_shared_u32,
    store_shared_u32x4,
    word_from_lane,
)
from ..device.row_layout import UNIT
from .positions import make_piece_of
from .spec import FIELD, TILE

K_ROWS, V_ROWS, INDEX = FIELD["k_rows"], FIELD["v_rows"], FIELD["index"]
K_OUTER, K_HEAD, K_ROW = (FIELD[f"k_stride_{axis}"] for axis in ("outer", "head", "row"))
V_OUTER, V_HEAD, V_ROW = (FIELD[f"v_stride_{axis}"] for axis in ("outer", "head", "row"))
CAPACITY, PAGE_SHIFT, TABLE_STRIDE, SEQ_SLOTS, SINKS, RING_ROWS = (
    FIELD[name] for name in ("capacity", "page_shift", "table_stride", "seq_slots", "sinks", "ring")
)
UNROLLED = 16  # chunks of a row that a lane has in registers at a time


@device_function
def slot_in_ring(row, around):
    """The slot of a row where the sinks stay and the others go round, from `start` of the ring."""
    start, sinks, ring, capacity = around
    slot = int32(row)
    if slot >= sinks:
        slot = int32(slot + start)
        if slot >= capacity:
            slot = int32(slot - ring)
    return slot


def make_find_rows(spec, path):
    """The function to where K and V of a sequence's KV head lie, each as an address and the bytes
    to the next page and row; and to what finds a row's place: the index, log2 and mask of a page,
    the ring."""
    PAGED, RING, piece_of = path.place == "paged", path.place == "ring", make_piece_of(spec)

    @device_function
    def find_rows(common, segment, b, kv_head):
        index = segment[INDEX]
        sequence = piece_of(common, b)[0]
        start = int32(0)
        outer = uint64(sequence)
        if PAGED:
            index += uint64(4) * uint64(sequence) * uint64(segment[TABLE_STRIDE])
            outer = uint64(0)
        if RING and index != uint64(0):
            start = int32(load_global_u32(index + uint64(4) * uint64(sequence)))
        if RING and segment[SEQ_SLOTS] != uint64(0):
            outer = uint64(load_global_u32(segment[SEQ_SLOTS] + uint64(4) * uint64(sequence)))
        shift = segment[PAGE_SHIFT]
        mask = int32((int32(1) << shift) - int32(1))
        around = (start, segment[SINKS], segment[RING_ROWS], segment[CAPACITY])
        k_outer, k_row = segment[K_OUTER], segment[K_ROW]
        v_outer, v_row = segment[V_OUTER], segment[V_ROW]
        k_base = segment[K_ROWS] + outer * k_outer + uint64(kv_head) * segment[K_HEAD]
        v_base = segment[V_ROWS] + outer * v_outer + uint64(kv_head) * segment[V_HEAD]
        of_k, of_v = (k_base, k_outer, k_row), (v_base, v_outer, v_row)
        return of_k, of_v, (index, shift, mask, around)

    return find_rows


def make_locate(path):
    """The function to the page of each half of a tile, of a lane's row, or to the first row
    twice."""
    PAGED, BY_ROW = path.place == "paged", path.by_row

    @device_function
    def locate(first, end, index, page_shift):
        if BY_ROW:
            row = int32(first + int32(uint32(cuda.threadIdx.x) & uint32(31)))
            page = uint32(0)
            if row < end:
                page = load_global_u32(index + uint64(4) * uint64(row >> page_shift))
            return page, page
        if PAGED:
            low = uint32(0)
            high = uint32(0)
            if first < end:
                low = load_global_u32(index + uint64(4) * uint64(first >> page_shift))
            if first + int32(16) < end:
                high = load_global_u32(
                    index + uint64(4) * uint64((first + int32(16)) >> page_shift)
                )
            return low, high
        return uint32(first), uint32(first)

    return locate


def make_copy(staged, path, sharers):
    """The function that asks for the rows of a tile.

    path: how they are found. sharers: warps that ask together.
    """
    if staged.dense and staged.landing == staged.fmt.row_bytes:
        return _make_copy_bytes(staged, path.place, sharers)
    DENSE, LANES = staged.dense, 32 * sharers
    WINDOWS, LANDING, REALIGNED = staged.windows, staged.landing, staged.realigned
    ROW_BYTES, RING, BY_ROW = staged.fmt.row_bytes, path.place == "ring", path.by_row
    PAGED = path.place == "paged" and not BY_ROW
    OFFSET = 0 if REALIGNED else staged.prefix - staged.fmt.header_bytes
    SPARE = -(-ROW_BYTES // 16) < WINDOWS
    STEPS = -(-TILE * WINDOWS // LANES)
    UNEVEN = TILE * WINDOWS % LANES != 0

    @device_function
    def copy_rows(target, base, where, first, end, outer, row_stride, around, page_mask):
        lane = uint32(uint32(cuda.threadIdx.x) % uint32(LANES))
        stride = uint64(ROW_BYTES) if DENSE else uint64(row_stride)
        rows = uint32(end - first)
        if PAGED:  # a page holds both halves, or each has a page of its own
            low = base + uint64(where[0]) * outer + uint64(first & page_mask) * stride
            second = (first + int32(16)) & page_mask
            high = base + uint64(where[1]) * outer + uint64(second) * stride - uint64(16) * stride
        else:
            low = base + uint64(where[0]) * stride
            high = low
        for i in range(STEPS):
            # piece lane + 32 i, its row and window; simpler where a row's windows divide 32
            row = uint32((lane + uint32(LANES) * uint32(i)) // uint32(WINDOWS))
            window = uint32(lane + uint32(LANES) * uint32(i) - row * uint32(WINDOWS))
            if LANES % WINDOWS == 0:
                row = uint32(lane // uint32(WINDOWS) + uint32(LANES // WINDOWS * i))
                window = uint32(lane % uint32(WINDOWS))
            source = high if PAGED and row >= uint32(16) else low
            slot = row
            if RING:
                slot = uint32(slot_in_ring(int32(first + int32(row)), around))
                source = base
            if BY_ROW:  # the lane of a row looked its page up
                slot = uint32(int32(first + int32(row)) & page_mask)
                source = base + uint64(word_from_lane(where[0], row)) * outer
            source += uint64(slot) * stride
            valid = row < rows
            if REALIGNED:
                if SPARE:  # where the row starts decides whether the last window has any of it
                    before = uint32(source) & uint32(15)
                    valid = valid and uint32(uint32(16) * window) < before + uint32(ROW_BYTES)
                source = source & ~uint64(15)
            source += uint64(uint32(16) * window)
            place = target + row * uint32(LANDING) + window * uint32(16) + uint32(OFFSET)
            if not UNEVEN or row < uint32(TILE):
                copy_16(place, source, uint32(16) if valid else uint32(0))

    return copy_rows


def _make_copy_bytes(staged, place, sharers):
    """Make the copy of rows that lie in shared memory as in global memory: one run of bytes."""
    ROW_BYTES, PAGED = staged.fmt.row_bytes, place == "paged"
    TILE_PIECES, HALF_PIECES = TILE * ROW_BYTES // 16, TILE * ROW_BYTES // 32
    LANES = 32 * sharers
    STEPS, BYTES = -(-TILE_PIECES // LANES), 16 * LANES

    @device_function
    def copy_bytes(target, base, where, first, end, outer, row_stride, around, page_mask):
        lane = uint32(uint32(cuda.threadIdx.x) % uint32(LANES))
        if PAGED:  # a page holds both halves, or each has a page of its own
            row = uint64(first & page_mask)
            second = uint64((first + int32(16)) & page_mask) - uint64(16)
            low = base + uint64(where[0]) * outer + row * uint64(ROW_BYTES)
            high = base + uint64(where[1]) * outer + second * uint64(ROW_BYTES)
        else:
            low = base + uint64(where[0]) * uint64(ROW_BYTES)
            high = low
        low += uint64(uint32(16) * lane)
        high += uint64(uint32(16) * lane)
        target += uint32(16) * lane
        # the last copy may bring bytes of the row after `end`, which are cleared later
        left = int32(min(end - first, int32(TILE)) * int32(ROW_BYTES) - int32(16) * int32(lane))
        for i in range(STEPS):
            source = low
            if PAGED and LANES * i + LANES > HALF_PIECES:
                if lane + uint32(LANES * i) >= uint32(HALF_PIECES):
                    source = high
            if LANES * i + LANES <= TILE_PIECES or lane + uint32(LANES * i) < uint32(TILE_PIECES):
                valid = uint32(16) if left > int32(BYTES * i) else uint32(0)
                copy_16(target + uint32(BYTES * i), source + uint64(BYTES * i), valid)

    return copy_bytes


def make_clear_row(staged):
    """Make the function that fills a row with zeros, or a direct one's header: no code is NaN."""
    UNITS = staged.stride // 16

    @device_function
    def clear_row(row):
        zeros = (uint32(0), uint32(0), uint32(0), uint32(0))
        for i in range(UNITS):
            store_shared_u32x4(row + uint32(16 * i), zeros)

    @device_function
    def clear_header(row):
        store_shared_u32(row, uint32(0))

    return clear_header if staged.direct else clear_row


def make_realign(staged, path):
    """Make the function that moves a landed tile to where ldmatrix can read it, a row a lane."""
    starts = range(0, staged.chunks, UNROLLED)
    pieces = [(i, min(i + UNROLLED, staged.chunks)) for i in starts]
    return in_turn([_make_realign_piece(staged, path, *piece) for piece in pieces])


def _make_realign_piece(staged, path, start, stop):
    """The function that moves chunks of codes, with the header; INT3's planes become nibbles."""
    WINDOWS, LANDING, STRIDE = staged.windows, staged.landing, staged.stride
    RING, DENSE, BY_ROW = path.place == "ring", staged.dense, path.by_row
    HEADER, WORDS = staged.fmt.header_bytes // 4, staged.fmt.row_bytes // 4
    BY_ONE, BY_TWO = staged.alignment < 8, staged.alignment < UNIT
    # the row's words that the piece needs; other rows have windows around them
    FIRST = HEADER + 4 * start if start else 0
    LAST = min(HEADER + 4 * stop, WORDS)
    if not DENSE:
        FIRST = FIRST // 4 * 4
    END_WINDOW = min(-(-(LAST + 3) // 4), WINDOWS)
    COUNT, LANDED = LAST - FIRST, 4 * END_WINDOW - FIRST
    LOADED = max(LANDED, HEADER + 4 * stop - FIRST)
    IS_LAST, clear_row = stop == staged.chunks, make_clear_row(staged)
    put_codes = _make_put_codes(staged, start, stop, FIRST)

    @device_function
    def realign(landed, target, base, first, end, row_stride, around, page_mask):
        lane = uint32(uint32(cuda.threadIdx.x) & uint32(31))
        landed += lane * uint32(LANDING)
        words = cuda.local.array(LOADED, uint32)
        if DENSE:  # an odd number of words or pairs: no bank conflicts
            at = landed + uint32(4 * FIRST)
            if BY_ONE:
                for i in range(COUNT):
                    words[i] = load_shared_u32(at + uint32(4 * i))
            else:
                for i in range(COUNT // 2):
                    pair = load_shared_u32x2(at + uint32(8 * i))
                    words[2 * i], words[2 * i + 1] = pair[0], pair[1]
        else:  # shift the words of the windows by the 0 to 3 that stand before the row
            slot = int32(first + int32(lane))
            if RING:
                slot = slot_in_ring(slot, around)
            if BY_ROW:
                slot = int32(slot & page_mask)
            before = uint32(base) + uint32(slot) * uint32(row_stride)
            for i in range(END_WINDOW - FIRST // 4):
                unit = load_shared_u32x4(landed + uint32(4 * FIRST + 16 * i))
                words[4 * i], words[4 * i + 1] = unit[0], unit[1]
                words[4 * i + 2], words[4 * i + 3] = unit[2], unit[3]
            if BY_TWO:
                two = (before & uint32(8)) != uint32(0)
                for i in range(LANDED - 2):
                    words[i] = words[i + 2] if two else words[i]
            if BY_ONE:
                one = (before & uint32(4)) != uint32(0)
                for i in range(LANDED - 3):
                    words[i] = words[i + 1] if one else words[i]
        for i in range(COUNT, LOADED):
            words[i] = uint32(0)
        to = target + lane * uint32(STRIDE)
        if start == 0:  # zeros in the pad: the header's unit is multiplied as a whole
            store_shared_u32x4(
                to,
                (
                    uint32(0),
                    uint32(0),
                    words[0] if HEADER == 2 else uint32(0),
                    words[HEADER - 1],
                ),
            )
        put_codes(to + uint32(16), words)
        if IS_LAST:
            if int32(first + int32(lane)) >= end:  # what lies after the last row may be NaN
                clear_row(to)

    return realign


def _make_put_codes(staged, start, stop, first):
    """Make the function that stores chunks of codes from the words of a row, from the first on."""
    HEADER = staged.fmt.header_bytes // 4

    @device_function
    def put_words(to, words):
        for i in range(start, stop):
            store_shared_u32x4(to + uint32(16 * i), load_sums(words, HEADER + 4 * i - first))

    if staged.strands == 1:
        return put_words
    assert (start, stop) == (0, staged.chunks)  # planes: a chunk has words of both
    return in_turn([_make_put_planes(staged.fmt, pair) for pair in range(stop // 2)])


def _make_put_planes(fmt, pair):
    """Make the function that stores 64 elements of INT3 as nibbles, in the pair-th two chunks."""
    LOWS, FIRST = fmt.header_bytes // 4, 4 * pair
    HIGHS, COUNT = LOWS + fmt.head_dim // 16, fmt.head_dim // 16

    @device_function
    def nibbles(words, i):
        """Of 16 elements, the even ones and the odd ones."""
        if i >= COUNT:
            return uint32(0), uint32(0)
        which = HIGH_HALVES if i % 2 else LOW_HALVES
        return nibbles_of(words[LOWS + i], high_bits(words[HIGHS + i // 2], uint32(which)))

    @device_function
    def put_planes(to, words):
        one, two = nibbles(words, FIRST), nibbles(words, FIRST + 1)
        three, four = nibbles(words, FIRST + 2), nibbles(words, FIRST + 3)
        at = to + uint32(32 * pair)
        store_shared_u32x4(at, (one[0], two[0], three[0], four[0]))
        store_shared_u32x4(at + uint32(16), (one[1], two[1], three[1], four[1]))

    return put_planes
