"""A few rows times a matrix [head_dim, head_dim] in float32, by all warps of a block.

    warp w     its part of M, rows w PART to (w + 1) PART - 1, four columns a lane, in registers:
               asked for at once, so that nothing waits for memory twice
    rows       float32 [groups, head_dim, ROWS]: an element of all rows of a group, which all lanes
               read at once
    sums       float32 [WARPS, ROWS, COLUMNS]: of each warp's part of each row of a group; then warp
               r adds up those of row r

    (x - offset) M    each sum is 0 + the parts in their order, a part its elements in theirs by
                      fused multiply-adds: the bits of kernels/cuda/affine, which has more rows

Where head_dim is no multiple of COLUMNS, lanes after the last column repeat it.
"""

from numba import cuda, float32, uint32, uint64

from .jit import device_function, in_turn
from .ptx import (
    high_bf16,
    high_f16,
    load_global_f32,
    load_global_u32,
    load_shared_f32x4,
    load_written_f32x4,
    low_bf16,
    low_f16,
    multiply_add,
    store_shared_f32,
    store_shared_f32x4,
)
from .row_layout import PRODUCT_COLUMNS as COLUMNS
from .row_layout import PRODUCT_ROWS as ROWS
from .row_layout import PRODUCT_WARPS as WARPS

FOUR = 4  # columns of a lane


def make_products(head_dim, source, groups, put):
    """Make the function that multiplies rows of 16-bit elements by a matrix, groups of ROWS.

    Its arguments: address and bytes from one row to the next of x, how many rows there are (the
    others are as the last one), the matrix of the head, the head's offset or 0, a block's shared
    memory (row_layout.product_bytes), and what `put` is given.

    Args:
        put: called for each row with it, a column, a multiple of 4, the four elements from there
            on, whether they are any, and that argument.
    """
    GROUPS, GROUP = groups, 4 * ROWS * head_dim  # bytes of a group
    PASSES = -(-head_dim // COLUMNS)
    WORDS, PART = head_dim // 2, head_dim // WARPS
    PARTS, SUMS = FOUR * PART, FOUR * ROWS  # floats of a lane
    STEPS = -(-WORDS // 32)  # words of a thread, where ROWS threads have the same word of each row
    low, high = (low_bf16, high_bf16) if source == "bf16" else (low_f16, high_f16)
    load_part = in_turn([_make_load(head_dim, i) for i in range(PART)])
    add_part = in_turn([_make_add(i) for i in range(PART)])

    @device_function
    def load_group(x, offset, rows):
        tid = uint32(cuda.threadIdx.x)
        member, first = uint32(tid % uint32(ROWS)), uint32(tid // uint32(ROWS))
        for i in range(STEPS):
            word = uint32(first + uint32(32 * i))
            if 32 * i + 31 < WORDS or word < uint32(WORDS):
                bits = load_global_u32(x + uint64(4) * uint64(word))
                one, two = low(bits), high(bits)
                if offset != uint64(0):
                    place = offset + uint64(8) * uint64(word)
                    one -= load_global_f32(place)
                    two -= load_global_f32(place + uint64(4))
                to = uint32(rows + uint32(8 * ROWS) * word) + uint32(4) * member
                store_shared_f32(to, one)
                store_shared_f32(to + uint32(4 * ROWS), two)

    @device_function
    def load_rows(x, stride, count, offset, rows):
        member = uint32(uint32(cuda.threadIdx.x) % uint32(ROWS))
        for group in range(GROUPS):
            row = min(uint32(member + uint32(ROWS * group)), uint32(count - uint32(1)))
            load_group(x + uint64(row) * stride, offset, rows + uint32(GROUP * group))

    @device_function
    def products(x, stride, count, matrix, offset, shared, target):
        tid = uint32(cuda.threadIdx.x)
        lane, warp = uint32(tid & uint32(31)), uint32(tid >> uint32(5))
        sums = uint32(shared + uint32(GROUPS * GROUP))
        own = uint32(sums + uint32(4 * ROWS * COLUMNS) * warp + uint32(4 * FOUR) * lane)
        at_sums = uint32(sums + uint32(4 * COLUMNS) * warp + uint32(4 * FOUR) * lane)
        matrix += uint64(4 * PART * head_dim) * uint64(warp)
        for step in range(PASSES):
            # Step 1: this warp's part of M, and all rows
            column = uint32(uint32(COLUMNS * step) + uint32(FOUR) * lane)
            is_any = column < uint32(head_dim)
            column = column if is_any else uint32(head_dim - FOUR)
            part = cuda.local.array(PARTS, float32)
            load_part(matrix + uint64(4) * uint64(column), part)
            if step == 0:
                load_rows(x, stride, count, offset, shared)
            for group in range(GROUPS):
                # Step 2: its part of the product, of all rows of a group
                cuda.syncthreads()
                found = cuda.local.array(SUMS, float32)
                for i in range(SUMS):
                    found[i] = float32(0)
                rows = uint32(shared + uint32(GROUP) * uint32(group))
                add_part(rows + uint32(4 * ROWS * PART) * warp, part, found)
                for row in range(ROWS):
                    at = 4 * row
                    four = (found[at], found[at + 1], found[at + 2], found[at + 3])
                    store_shared_f32x4(own + uint32(4 * COLUMNS * row), four)
                cuda.syncthreads()

                # Step 3: the sum of all parts of this warp's row
                total = (float32(0), float32(0), float32(0), float32(0))
                for w in range(WARPS):
                    more = load_shared_f32x4(at_sums + uint32(4 * ROWS * COLUMNS * w))
                    total = (
                        total[0] + more[0],
                        total[1] + more[1],
                        total[2] + more[2],
                        total[3] + more[3],
                    )
                put(uint32(warp + uint32(ROWS) * uint32(group)), column, total, is_any, target)

    return products


def _make_load(head_dim, i):
    """Make the function that loads a lane's four columns of row i of a warp's part of M."""

    @device_function
    def load(at, part):
        four = load_written_f32x4(at + uint64(4 * head_dim * i))
        for k in range(FOUR):
            part[FOUR * i + k] = four[k]

    return load


def _make_add(i):
    """Make the function that adds their products with that element of all rows."""

    @device_function
    def add(rows, part, found):
        for half in range(ROWS // 4):
            four = load_shared_f32x4(rows + uint32(4 * ROWS * i + 16 * half))
            for k in range(4):
                for c in range(FOUR):
                    n = FOUR * (4 * half + k) + c
                    found[n] = multiply_add(four[k], part[FOUR * i + c], found[n])

    return add
