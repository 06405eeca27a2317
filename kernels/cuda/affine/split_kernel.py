"""Transform rows: y = x M + offset per KV head, by tensor cores; zeros where a sequence is empty.

    block   64 columns of M, one KV head, some rows: batch x query heads on it
    warp    8 columns, in registers, loaded once, times 16 rows at a time (device/split_products.py)

Nothing passes through shared memory and no warp waits for another. Where the launch overlaps the
one that gives the rows, M comes and is split while that one ends.
"""

from numba import cuda, float32, int32, uint32, uint64

from ..device.jit import device_function
from ..device.ptx import (
    load_global_f32,
    load_written_u32,
    pack_bf16,
    pack_f16,
    store_global_u32,
    wait_for_launch,
)
from ..device.row_layout import SPLIT_COLUMNS, SPLIT_ROWS
from ..device.split_products import make_load_columns, make_multiply, part_words


def make_split_kernel(spec):
    """Make the kernel, a Python function that numba compiles with `spec.signature()`."""
    DIM, OVERLAPS, PART = spec.head_dim, spec.overlaps, part_words(spec.head_dim)
    load_columns, multiply = make_load_columns(DIM), make_multiply(DIM, spec.source)
    COLUMNS, pack = spec.warps * SPLIT_COLUMNS, pack_bf16 if spec.source == "bf16" else pack_f16

    @device_function
    def put(y, low, high, length, is_mine):
        if length == uint32(0):  # what is there, NaN even, is not seen
            low = high = float32(0)
        if is_mine:
            store_global_u32(y, pack(high, low))

    # fmt: off
    def split(x, y, matrix, offset, seq_lens, x_stride_batch, x_stride_head, matrix_stride,
              lens_stride, num_heads, ratio, ratio_factor, ratio_shift, num_rows, rows_of_block):
        # fmt: on
        tid = uint32(cuda.threadIdx.x)
        lane, warp = tid & uint32(31), tid >> uint32(5)
        g, t = lane >> uint32(2), lane & uint32(3)
        kv_head = int32(cuda.blockIdx.y)
        first_column = uint32(uint32(cuda.blockIdx.x) * uint32(COLUMNS))
        first_column = uint32(first_column + uint32(SPLIT_COLUMNS) * warp)
        if first_column >= uint32(DIM):
            return

        # Step 1: this warp's columns of M
        part = cuda.local.array(PART, uint32)
        load_columns(matrix + uint64(kv_head) * matrix_stride, first_column, part)
        column = uint32(first_column + uint32(2) * t)
        added, more = float32(0), float32(0)
        if offset != uint64(0):
            at = offset + uint64(4) * uint64(uint32(kv_head * int32(DIM)) + column)
            added, more = load_global_f32(at), load_global_f32(at + uint64(4))
        if OVERLAPS:
            wait_for_launch()

        first = int32(int32(cuda.blockIdx.z) * rows_of_block)
        last = min(int32(first + rows_of_block), num_rows)
        for start in range(first, last, SPLIT_ROWS):
            # Step 2: where a lane's two rows are
            one = int32(int32(start) + int32(g))
            two = int32(one + int32(8))
            row = int32(min(one, int32(last - 1)))
            batch = int32(uint64(row) * uint64(ratio_factor) >> uint64(ratio_shift))
            head = int32(int32(kv_head * ratio) + int32(row - int32(batch * ratio)))
            row = int32(min(two, int32(last - 1)))
            other_batch = int32(uint64(row) * uint64(ratio_factor) >> uint64(ratio_shift))
            other_head = int32(int32(kv_head * ratio) + int32(row - int32(other_batch * ratio)))
            length = other_length = uint32(1)
            if seq_lens != uint64(0):
                length = load_written_u32(seq_lens + uint64(batch) * lens_stride)
                other_length = load_written_u32(seq_lens + uint64(other_batch) * lens_stride)

            # Step 3: the product, and the offset
            from_one = x + uint64(batch) * x_stride_batch + uint64(head) * x_stride_head
            from_two = x + uint64(other_batch) * x_stride_batch
            from_two += uint64(other_head) * x_stride_head
            sums = multiply(from_one, from_two, part)
            place = uint64(batch) * uint64(num_heads) + uint64(head)
            at_y = y + uint64(2) * (place * uint64(DIM) + uint64(column))
            put(at_y, sums[0] + added, sums[1] + more, length, one < last)
            place = uint64(other_batch) * uint64(num_heads) + uint64(other_head)
            at_y = y + uint64(2) * (place * uint64(DIM) + uint64(column))
            put(at_y, sums[2] + added, sums[3] + more, other_length, two < last)

    return split
