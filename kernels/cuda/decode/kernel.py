"""Decode attention on CUDA: softmax(q·K) V of one token a sequence, read from packed rows.

    grid    units: 8 query heads of a KV head  x  sequences  x  parts: the splits of every segment
    block   one part: it attends to its tokens (mainloop.py), and the last block of a unit merges
            its parts (combine.py)

The tokens of a segment are split by its length on the device, into whole tiles for every warp, so
that lengths may change between the replays of a CUDA graph. Parts without tokens end at once. Parts
are the slowest axis: long ones, of the first segment, spread evenly over the GPU before short ones.

Splits merged by log-sum-exp: Flash-Decoding (https://pytorch.org/blog/flash-decoding/). Fused INT4
rows: https://pytorch.org/blog/int4-decoding/. What is ours: codes that are multiplied as fp16
subnormals, the probabilities that stay in registers, groups apart in float32.
"""

from numba import cuda, int32, uint32, uint64

from ..device.jit import device_function
from ..device.ptx import begin_next_launch, load_global_u32, shared_address
from .combine import make_combine_splits, make_write, make_write_empty
from .mainloop import make_attend
from .spec import FIELD, HEADS, TILE

SEQ_LENS, CAPACITY, SPLITS = FIELD["seq_lens"], FIELD["capacity"], FIELD["splits"]


@device_function
def length_of(segment, b):
    """Rows of a sequence, at most those that there is room for."""
    length = int32(0)
    if segment[SPLITS] > int32(0):
        length = int32(load_global_u32(segment[SEQ_LENS] + uint64(4) * uint64(b)))
    return int32(max(min(length, segment[CAPACITY]), int32(0)))


@device_function
def attend_nothing(segment, begin, end, rows, results, shared):
    """In place of a second path where there is none."""


def make_decode_kernel(spec):
    """Make the kernel, a Python function that numba compiles with `spec.signature()`."""
    WARPS, DIM, THREE = spec.warps, spec.first.v_format.head_dim, spec.segments == 3
    FIRST_STEP, OVERLAPPED = TILE * WARPS, spec.overlapped
    SECOND_STEP = TILE * spec.warps_of(spec.second or spec.first)
    write = make_write(spec.query)
    combine_splits = make_combine_splits(DIM, WARPS, write)
    write_empty = make_write_empty(DIM, WARPS, write)
    attend_first = make_attend(spec, spec.first)
    attend_second = make_attend(spec, spec.second) if spec.second else attend_nothing

    @device_function
    def share_out(segment, b, step):
        """Rows of a sequence, tokens of a split, and splits that hold any."""
        length = length_of(segment, b)
        splits = max(segment[SPLITS], int32(1))
        tokens = int32((length + splits - int32(1)) // splits)
        tokens = int32(max(int32((tokens + step - int32(1)) // step), int32(1)) * step)
        return length, tokens, int32((length + tokens - int32(1)) // tokens)

    @device_function
    def decode(common, one, two, three):
        q, out, lse, partial, counters, q_stride_batch, q_stride_head = common[:7]
        num_q_heads, ratio, head_blocks, score_scale = common[7:]
        shared = shared_address(cuda.shared.array(0, uint32))
        if OVERLAPPED:
            begin_next_launch()

        # Step 1: the unit, and where its results go
        b, column = int32(cuda.blockIdx.y), int32(cuda.blockIdx.x)
        kv_head = int32(column // head_blocks)
        first_head = int32((column - kv_head * head_blocks) * int32(HEADS))
        heads = uint32(min(int32(HEADS), int32(ratio - first_head)))
        head = int32(kv_head * ratio + first_head)
        query = q + uint64(b) * q_stride_batch + uint64(head) * q_stride_head
        place = uint64(b) * uint64(num_q_heads) + uint64(head)
        out += uint64(2 * DIM) * place
        if lse != uint64(0):
            lse += uint64(4) * place

        # Step 2: the part. Those that hold tokens have positions; the others have nothing to do
        split = int32(cuda.blockIdx.z)
        position = split
        length, tokens, active = share_out(one, b, int32(FIRST_STEP))
        total = active
        is_first = split < one[SPLITS]
        segment = two
        if THREE:
            second = share_out(two, b, int32(SECOND_STEP))
            third = share_out(three, b, int32(SECOND_STEP))
            total = int32(total + second[2] + third[2])
            if not is_first:
                split = int32(split - one[SPLITS])
                position = int32(active + split)
                length, tokens, active = second
                if split >= two[SPLITS]:
                    split = int32(split - two[SPLITS])
                    position = int32(position - two[SPLITS] + active)
                    length, tokens, active = third
                    segment = three
        if total == int32(0) and cuda.blockIdx.z == 0:
            write_empty(heads, out, lse)
        if split >= active:
            return

        # Step 3: attention to the part
        begin = int32(split * tokens)
        end = int32(min(int32(begin + tokens), length))
        unit = uint64(b) * uint64(cuda.gridDim.x) + uint64(column)
        units = uint64(cuda.gridDim.y) * uint64(cuda.gridDim.x)
        parts = uint64(cuda.gridDim.z) * uint64(HEADS)  # of 8 heads each
        unit_out = partial + uint64(4 * DIM) * parts * unit
        unit_lse = partial + uint64(4) * parts * (uint64(DIM) * units + unit)
        part_out = unit_out + uint64(4 * DIM * HEADS) * uint64(position)
        part_lse = unit_lse + uint64(4 * HEADS) * uint64(position)
        rows = (b, kv_head, query, q_stride_head, heads, score_scale)
        results = (total, part_out, part_lse, out, lse)
        if is_first:
            attend_first(one, begin, end, rows, results, shared)
        elif THREE:
            attend_second(segment, begin, end, rows, results, shared)

        # Step 4: the parts, merged by the last block
        if total > int32(1):
            counter = counters + uint64(4) * unit
            combine_splits(shared, counter, heads, total, unit_out, unit_lse, out, lse)

    # fmt: off
    def decode_one(q, out, lse, partial, counters, q_stride_batch, q_stride_head, num_q_heads,
                   ratio, head_blocks, score_scale, one):
        common = (q, out, lse, partial, counters, q_stride_batch, q_stride_head, num_q_heads,
                  ratio, head_blocks, score_scale)
        decode(common, one, one, one)

    def decode_three(q, out, lse, partial, counters, q_stride_batch, q_stride_head, num_q_heads,
                     ratio, head_blocks, score_scale, one, two, three):
        common = (q, out, lse, partial, counters, q_stride_batch, q_stride_head, num_q_heads,
                  ratio, head_blocks, score_scale)
        decode(common, one, two, three)
    # fmt: on

    return decode_three if THREE else decode_one
