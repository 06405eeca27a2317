"""Turn rows, y = x M + offset per KV head, float32 inside; zeros where a sequence has no tokens. Or
encode them, the way back: y = (x - offset) M, float32.

    block   32 or 64 columns of M, one KV head, some rows: batch x query heads on it
    warp    its part of M in registers, loaded once, times its part of `warps` rows from shared
            memory; then the sum of all parts of one row

Loads of M, rows and offset are under way together, and the next rows during a product. If the
launch overlaps the one that gives the rows, M comes meanwhile. How many columns a lane has does not
change the order of the sums.
"""

from numba import cuda, float32, int32, uint32, uint64

from ..device.codes import HALVES, PACK
from ..device.jit import device_function, in_turn
from ..device.ptx import (
    hand_over,
    load_global_f32,
    load_shared_f32,
    load_shared_f32x4,
    load_written_f32,
    load_written_u32,
    multiply_add,
    shared_address,
    shfl_xor,
    store_global_f32,
    store_global_u32,
    store_shared_f32,
    wait_for_launch,
)
from .launch import COLUMNS

UNROLLED = 16  # elements of M: longer loops stay loops, and M in memory


def make_affine_kernel(spec):
    DIM, WARPS = spec.head_dim, spec.warps
    PRODUCT, ENCODES, WIDTH, OVERLAPS = spec.product, spec.encodes, spec.width, spec.overlaps
    WORDS, PART, ELEMENT = DIM // 2, DIM // WARPS, 4 * WARPS  # the last: bytes of it in all rows
    AHEAD = PRODUCT and WIDTH > 1  # such blocks go on with more rows; others do seldom
    PARTS, SUMS = PART * WIDTH, WARPS * WIDTH  # floats of a lane
    LOADS = -(-WORDS // 32)  # words of a lane, where warps lanes have the same word of each row
    starts = range(0, PART, UNROLLED // WIDTH)
    load_part = in_turn([make_load_part(spec, i) for i in starts])
    add_products = in_turn([make_products(spec, i) for i in starts])
    inside = make_inside(spec)
    pack, (low, high) = PACK[spec.source], HALVES[spec.source]

    @device_function
    def place_of(start, last, kv_head, ratio, ratio_factor, ratio_shift):
        """The sequence and the query head of the row that a thread loads of those from `start`."""
        member = int32(uint32(cuda.threadIdx.x) & uint32(WARPS - 1))
        row = int32(min(int32(start + member), int32(last - 1)))
        batch = int32(uint64(row) * uint64(ratio_factor) >> uint64(ratio_shift))
        return batch, int32(int32(kv_head * ratio) + int32(row - int32(batch * ratio)))

    @device_function
    def load_row(at, coming):
        first = uint32(uint32(cuda.threadIdx.x) // uint32(WARPS))
        for i in range(LOADS):
            word = min(uint32(first + uint32(32 * i)), uint32(WORDS - 1))
            coming[i] = load_written_u32(at + uint64(4) * uint64(word))

    # fmt: off
    def affine(x, y, matrix, offset, seq_lens, x_stride_batch, x_stride_head, matrix_stride,
             lens_stride, waits, num_heads, ratio, ratio_factor, ratio_shift, num_rows,
             rows_of_block):
        # fmt: on
        tid = uint32(cuda.threadIdx.x)
        lane, warp = tid & uint32(31), tid >> uint32(5)
        kv_head = int32(cuda.blockIdx.y)
        own = uint32(uint32(cuda.blockIdx.x) * uint32(COLUMNS * WIDTH)) + lane
        rows = shared_address(cuda.shared.array(0, uint32))
        sums = rows + uint32(DIM * ELEMENT)

        if OVERLAPS and waits:
            wait_for_launch()
        # Step 1: this warp's part of M, of a lane's columns
        part = cuda.local.array(PARTS, float32)
        if PRODUCT:
            at = matrix + uint64(kv_head) * matrix_stride + uint64(4 * PART * DIM) * uint64(warp)
            load_part(at, own, part)
        added = cuda.local.array(WIDTH, float32)
        offsets = offset + uint64(4 * DIM) * uint64(kv_head)
        for w in range(WIDTH):
            added[w] = float32(0)
            if not ENCODES and offset != uint64(0):
                added[w] = load_written_f32(offsets + uint64(4) * uint64(inside(own, w)))

        if OVERLAPS:
            hand_over()
        first = int32(int32(cuda.blockIdx.z) * rows_of_block)
        last = min(int32(first + rows_of_block), num_rows)
        coming = cuda.local.array(LOADS, uint32)
        if AHEAD:
            row = place_of(first, last, kv_head, ratio, ratio_factor, ratio_shift)
            load_row(x + uint64(row[0]) * x_stride_batch + uint64(row[1]) * x_stride_head, coming)
        for start in range(first, last, WARPS):
            # Step 2: the row whose sum this warp finds
            mine = int32(min(int32(int32(start) + int32(warp)), int32(last - 1)))
            batch = int32(uint64(mine) * uint64(ratio_factor) >> uint64(ratio_shift))
            head = int32(int32(kv_head * ratio) + int32(mine - int32(batch * ratio)))
            length = uint32(1)
            if seq_lens != uint64(0):
                # ptxas moves a load of .nc after the product, where it is waited for
                length = load_written_u32(seq_lens + uint64(batch) * lens_stride)

            if PRODUCT:
                # Step 3: all rows to shared memory; the next are asked for
                if not AHEAD:
                    row = place_of(int32(start), last, kv_head, ratio, ratio_factor, ratio_shift)
                    at = x + uint64(row[0]) * x_stride_batch + uint64(row[1]) * x_stride_head
                    load_row(at, coming)
                member = tid & uint32(WARPS - 1)
                for i in range(LOADS):
                    word = uint32(tid // uint32(WARPS)) + uint32(32 * i)
                    if 32 * i + 31 < WORDS or word < uint32(WORDS):
                        one, two = low(coming[i]), high(coming[i])
                        if ENCODES and offset != uint64(0):  # launches that encode do not overlap
                            one -= load_global_f32(offsets + uint64(8) * uint64(word))
                            two -= load_global_f32(offsets + uint64(8) * uint64(word) + uint64(4))
                        to = rows + uint32(2 * ELEMENT) * word + uint32(4) * member
                        store_shared_f32(to, one)
                        store_shared_f32(to + uint32(ELEMENT), two)
                following = int32(int32(start) + int32(WARPS))
                if AHEAD and following < last:
                    row = place_of(following, last, kv_head, ratio, ratio_factor, ratio_shift)
                    at = x + uint64(row[0]) * x_stride_batch + uint64(row[1]) * x_stride_head
                    load_row(at, coming)
                cuda.syncthreads()

                # Step 4: this warp's part of the product, of all rows
                found = cuda.local.array(SUMS, float32)
                for j in range(SUMS):
                    found[j] = float32(0)
                add_products(rows + uint32(PART * ELEMENT) * warp, part, found)
                to = sums + uint32(128 * SUMS) * warp + uint32(4) * lane
                for j in range(SUMS):
                    store_shared_f32(to + uint32(128 * j), found[j])
                cuda.syncthreads()

            place = uint64(batch) * uint64(num_heads) + uint64(head)
            for w in range(WIDTH):
                column = uint32(own + uint32(COLUMNS * w))
                total = added[w]
                if PRODUCT:
                    # Step 5: the sum of all parts of this warp's row
                    at_sum = sums + uint32(128) * uint32(uint32(WIDTH) * warp + uint32(w))
                    for j in range(WARPS):
                        at_part = at_sum + uint32(128 * SUMS * j) + uint32(4) * lane
                        total += load_shared_f32(at_part)
                else:
                    at = x + uint64(batch) * x_stride_batch + uint64(head) * x_stride_head
                    word = uint64(inside(own, w) >> uint32(1))
                    bits = load_written_u32(at + uint64(4) * word)
                    total += high(bits) if lane & uint32(1) else low(bits)

                if length == uint32(0):  # what is there, NaN even, is not seen
                    total = float32(0)
                is_mine = int32(int32(start) + int32(warp)) < last and column < uint32(DIM)
                if ENCODES:
                    if is_mine:
                        at_y = y + uint64(4) * (place * uint64(DIM) + uint64(column))
                        store_global_f32(at_y, total)
                else:
                    upper = shfl_xor(total, uint32(1))
                    if is_mine and lane & uint32(1) == uint32(0):
                        at_y = place * uint64(WORDS) + uint64(column >> uint32(1))
                        store_global_u32(y + uint64(4) * at_y, pack(upper, total))

    return affine


def make_inside(spec):
    """Make the function that gives a lane's w-th column; lanes after the last one read it, too."""
    LAST = spec.head_dim - 1

    @device_function
    def inside(own, w):
        return min(uint32(own + uint32(COLUMNS * w)), uint32(LAST))

    return inside


def make_load_part(spec, first):
    """Make the function that loads some elements of a lane's columns of a warp's part of M."""
    DIM, WIDTH = spec.head_dim, spec.width
    FIRST, LAST = WIDTH * first, WIDTH * min(first + UNROLLED // WIDTH, DIM // spec.warps)
    inside = make_inside(spec)

    @device_function
    def load_part(at, own, part):
        for i in range(FIRST, LAST):
            place = uint64(4 * DIM * (i // WIDTH)) + uint64(4) * uint64(inside(own, i % WIDTH))
            part[i] = load_written_f32(at + place)  # of .nc ptxas would move after a wait

    return load_part


def make_products(spec, first):
    """Make the function that adds their products with those elements of all rows."""
    WARPS, WIDTH = spec.warps, spec.width
    FIRST, LAST = first, min(first + UNROLLED // WIDTH, spec.head_dim // WARPS)

    @device_function
    def add_products(rows, part, found):
        for i in range(FIRST, LAST):
            for j in range(WARPS // 4):
                four = load_shared_f32x4(rows + uint32(4 * WARPS * i + 16 * j))
                for k in range(4 * WIDTH):
                    n = 4 * WIDTH * j + k
                    element = part[WIDTH * i + k % WIDTH]
                    found[n] = multiply_add(four[k // WIDTH], element, found[n])

    return add_products
