"""A few rows times a matrix [head_dim, head_dim] in float32, by all warps of a block.

    warp w     its part of M, rows w PART to (w + 1) PART - 1, four columns a lane, in registers
    rows       float32 [groups, head_dim, ROWS]: an element of all rows, which lanes read at once
    sums       float32 [WARPS, ROWS, COLUMNS]: of each warp's part of each row of a group; then warp
               r adds up those of row r

    (x - offset) M    each sum is 0 + the parts in their order, a part its elements in theirs by
                      fused multiply-adds: the bits of kernels/cuda/affine, which has more rows

Where head_dim is no multiple of COLUMNS, lanes after the last column repeat it.
"""

from numba import cuda, float32, uint32, uint64

from .codes import HALVES
from .jit import device_function, in_turn
from .ptx import (
    load_global_f32,
    load_shared_f32x4,
    load_written_f32x4,
    load_written_u32,
    multiply_add,
    store_shared_f32,
    store_shared_f32x4,
)
from .row_layout import PRODUCT_COLUMNS as COLUMNS
from .row_layout import PRODUCT_ROWS as ROWS
from .row_layout import PRODUCT_WARPS as WARPS

FOUR = 4  # columns of a lane


def make_products(head_dim, source, groups, put):
    """The functions that multiply rows of 16-bit elements by a matrix, groups of ROWS.

    ask        starts the loads of x (address, bytes between rows, rows) and of the matrix, to local
               arrays of `row_words` and `part_floats`
    put_rows   puts these words, less the head's offset, into shared memory (product_bytes)
    multiply   multiplies, and calls `put`, whose last argument is its last

    `put` gets a row, a column, a multiple of 4, four elements, whether they are any, and that
    argument.
    """
    GROUPS, GROUP = groups, 4 * ROWS * head_dim  # bytes of a group
    PASSES = -(-head_dim // COLUMNS)
    WORDS, PART = head_dim // 2, head_dim // WARPS
    STEPS, SUMS = -(-WORDS // 32), FOUR * ROWS  # words of a row that a thread has; floats of a lane
    low, high = HALVES[source]
    load_part = in_turn([_make_load(head_dim, i) for i in range(PART)])
    add_part = in_turn([_make_add(i) for i in range(PART)])

    @device_function
    def load_columns(matrix, step, part):
        tid = uint32(cuda.threadIdx.x)
        lane, warp = uint32(tid & uint32(31)), uint32(tid >> uint32(5))
        column = uint32(uint32(COLUMNS) * uint32(step) + uint32(FOUR) * lane)
        column = min(column, uint32(head_dim - FOUR))
        matrix += uint64(4 * PART * head_dim) * uint64(warp)
        load_part(matrix + uint64(4) * uint64(column), part)

    @device_function
    def ask(x, stride, count, matrix, words, part):
        load_columns(matrix, 0, part)
        tid = uint32(cuda.threadIdx.x)
        member, first = uint32(tid % uint32(ROWS)), uint32(tid // uint32(ROWS))
        for group in range(GROUPS):
            row = min(uint32(member + uint32(ROWS * group)), uint32(count - uint32(1)))
            for i in range(STEPS):
                word = min(uint32(first + uint32(32 * i)), uint32(WORDS - 1))
                place = uint64(row) * stride + uint64(4) * uint64(word)
                words[STEPS * group + i] = load_written_u32(x + place)

    @device_function
    def put_rows(words, offset, rows):
        tid = uint32(cuda.threadIdx.x)
        member, first = uint32(tid % uint32(ROWS)), uint32(tid // uint32(ROWS))
        for i in range(STEPS):
            word = uint32(first + uint32(32 * i))
            if 32 * i + 31 < WORDS or word < uint32(WORDS):
                less, more = float32(0), float32(0)
                if offset != uint64(0):
                    place = offset + uint64(8) * uint64(word)
                    less, more = load_global_f32(place), load_global_f32(place + uint64(4))
                for group in range(GROUPS):
                    bits = words[STEPS * group + i]
                    one, two = low(bits), high(bits)
                    if offset != uint64(0):
                        one -= less
                        two -= more
                    to = uint32(rows + uint32(8 * ROWS) * word) + uint32(4) * member
                    to += uint32(GROUP * group)
                    store_shared_f32(to, one)
                    store_shared_f32(to + uint32(4 * ROWS), two)

    @device_function
    def multiply(part, matrix, shared, target):
        tid = uint32(cuda.threadIdx.x)
        lane, warp = uint32(tid & uint32(31)), uint32(tid >> uint32(5))
        sums = uint32(shared + uint32(GROUPS * GROUP))
        own = uint32(sums + uint32(4 * ROWS * COLUMNS) * warp + uint32(4 * FOUR) * lane)
        at_sums = uint32(sums + uint32(4 * COLUMNS) * warp + uint32(4 * FOUR) * lane)
        for step in range(PASSES):
            if step:
                load_columns(matrix, step, part)
            column = uint32(uint32(COLUMNS) * uint32(step) + uint32(FOUR) * lane)
            is_any = column < uint32(head_dim)
            for group in range(GROUPS):
                # Step 1: a warp's part of the product, of all rows of a group
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

                # Step 2: the sum of all parts of this warp's row
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

    return ask, put_rows, multiply


def row_words(head_dim, groups):
    return -(-head_dim // 64) * groups


def part_floats(head_dim):
    return FOUR * head_dim // WARPS


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
