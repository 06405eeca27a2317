"""Decode attention on CUDA: softmax(q·K) V of one token a sequence, read from packed rows.

    unit    8 query heads of a KV head of a sequence
    part    tokens of a segment of a unit, attended to by a block (mainloop.py)
    block   one part, or where lengths differ several (schedule.py); the last block of a unit merges
            its parts (combine.py)

Work is cut by the lengths on the device, into whole tiles for every warp, so that lengths may change
between the replays of a CUDA graph. Parts without tokens end at once. Those of the first segment
come first: long parts spread evenly over the GPU before short ones.

Splits merged by log-sum-exp: Flash-Decoding (https://pytorch.org/blog/flash-decoding/). Fused INT4
rows: https://pytorch.org/blog/int4-decoding/. What is ours: codes that are multiplied as fp16
subnormals, the probabilities that stay in registers, groups apart in float32.
"""

from numba import cuda, int32, uint32, uint64

from ..device.jit import device_function
from ..device.ptx import (
    load_shared_u32x2,
    load_shared_u32x4,
    shared_address,
    store_shared_u32x4,
    word_from_lane,
)
from .combine import make_combine_splits, make_write, make_write_empty
from .mainloop import make_attend
from .schedule import (
    are_alike,
    following,
    make_balanced_part,
    make_even_part,
    make_share,
    make_survey,
    rank_of,
)
from .spec import HEADS, KEPT

# of a part, in a word: how many query heads, whether it is the unit's first, whether it has tokens
HEADS_MASK, BEGINS, HOLDS = 0xFF, 0x100, 0x200


@device_function
def attend_nothing(segment, begin, end, reach, rows, results, shared):
    """In place of a second path where there is none."""


def make_decode_kernel(spec):
    """Make the kernel, a Python function that numba compiles with `spec.signature()`."""
    WARPS, DIM, THREE = spec.warps, spec.first.v_format.head_dim, spec.segments == 3
    SEGMENTS, BALANCED = spec.segments, spec.balanced
    write = make_write(spec.query)
    combine_splits = make_combine_splits(DIM, WARPS, THREE, write)
    write_empty = make_write_empty(DIM, WARPS, write)
    survey, find, steps_of, cost_of = make_survey(spec)
    share_of, even_part = make_share(spec), make_even_part(spec)
    balanced_part = make_balanced_part(spec, steps_of, cost_of)

    @device_function
    def heads_of(column, head_blocks, ratio):
        """Of a unit: KV head, first query head, how many query heads."""
        kv_head = int32(column)
        if head_blocks > int32(1):
            kv_head = int32(column // uint32(head_blocks))
        first = int32((int32(column) - kv_head * head_blocks) * int32(HEADS))
        return kv_head, int32(kv_head * ratio + first), min(int32(HEADS), int32(ratio - first))

    @device_function
    def keep(results):
        """Leave in a warp's shared memory what it needs after its attention: registers are dear."""
        kept, _, part, unit, counts, adds = results
        if uint32(cuda.threadIdx.x) & uint32(31) == uint32(0):
            store_shared_u32x4(kept, part)
            store_shared_u32x4(kept + uint32(16), unit)
            if THREE:
                store_shared_u32x4(kept + uint32(32), (counts[0], counts[1], adds[1], adds[2]))
        cuda.syncwarp()

    @device_function
    def places_of(common, row):
        """Where a unit's output and lse go."""
        out, lse = common[1], common[2]
        if lse != uint64(0):
            lse += uint64(4) * uint64(row)
        return out + uint64(2 * DIM) * uint64(row), lse

    @device_function
    def recall(results):
        """Of a part: how many query heads; how many parts the unit has, where the part's and the
        unit's results go."""
        kept, common = results[0], results[1]
        partial, places = common[3], common[13]
        total, row, state, place = load_shared_u32x4(kept)
        part_lse = partial + uint64(4 * HEADS) * (uint64(DIM) * uint64(places) + uint64(place))
        part_out = partial + uint64(4 * HEADS * DIM) * uint64(place)
        out, lse = places_of(common, row)
        return uint32(state & uint32(HEADS_MASK)), (int32(total), part_out, part_lse, out, lse)

    attend_first = make_attend(spec, spec.first, keep, recall)
    attend_second = make_attend(spec, spec.second, keep, recall) if spec.second else attend_nothing

    @device_function
    def attend_to(part, b, column, memory, common, segments):
        """Attention to a part, and the parts of its unit merged by the last block."""
        which, begin, end, reach, counts, adds, place, is_first = part
        kept, shared = memory
        q, partial, counters, q_stride_batch, q_stride_head = common[0], *common[3:7]
        num_q_heads, ratio, head_blocks, _, columns, _, places = common[7:14]
        one, two, three = segments
        kv_head = int32(column)
        if head_blocks > int32(1):
            kv_head = int32(column // uint32(head_blocks))
        first = int32((int32(column) - kv_head * head_blocks) * int32(HEADS))
        head = int32(kv_head * ratio + first)
        heads = uint32(min(int32(HEADS), int32(ratio - first)))
        query = q + uint64(b) * q_stride_batch + uint64(head) * q_stride_head
        rows = (int32(b), kv_head, query, q_stride_head, heads, common[16])
        row = uint32(uint32(b * uint32(num_q_heads)) + uint32(head))
        state = heads
        if is_first:
            state = uint32(state | uint32(BEGINS))
        if begin < end:
            state = uint32(state | uint32(HOLDS))
        unit = uint32(uint32(b * columns) + column)
        to_keep = (counts[2], row, state, place), (unit, adds[0], uint32(0), uint32(0))
        results = (kept, common, to_keep[0], to_keep[1], counts, adds)
        if which == uint32(0):
            attend_first(one, begin, end, reach, rows, results, shared)
        elif THREE:
            segment = two if which == uint32(1) else three
            attend_second(segment, begin, end, reach, rows, results, shared)

        total, row, state, _ = load_shared_u32x4(kept)
        if total != uint32(1):
            out, lse = places_of(common, row)
            heads = uint32(state & uint32(HEADS_MASK))
            if total == uint32(0):
                if state & uint32(BEGINS):
                    write_empty(heads, out, lse)
            elif state & uint32(HOLDS):
                unit, add_first = load_shared_u32x2(kept + uint32(16))
                counts, adds = (total, total, total), (add_first, add_first, add_first)
                if THREE:
                    of_one, of_two, second, third = load_shared_u32x4(kept + uint32(32))
                    counts, adds = (of_one, of_two, total), (add_first, second, third)
                counter = counters + uint64(4) * uint64(unit)
                part_lses = partial + uint64(4 * DIM * HEADS) * uint64(places)
                combine_splits(shared, counter, heads, counts, adds, partial, part_lses, out, lse)

    @device_function
    def attend_share(costs, memory, common, segments):
        """A worker's share of the line, part by part."""
        total, largest, mine = costs
        batch, columns, _, _, workers, most_parts = common[10:16]
        kept = memory[0]
        share = share_of(total, largest, columns, workers, most_parts)
        block = uint32(uint32(cuda.blockIdx.z) * batch + uint32(cuda.blockIdx.y))
        block = uint32(uint32(block * columns) + uint32(cuda.blockIdx.x))
        place = uint32(block * share)
        stop = min(uint32(place + share), uint32(total * columns))
        if block >= workers or place >= stop:
            return
        b, start = find(segments, batch, columns, place, mine)
        cost = cost_of(steps_of(segments, b))
        column = uint32(uint32(place - start) // cost)
        start = uint32(start + uint32(column * cost))
        while place < stop:
            before = uint32(uint32(rank_of(b, batch) * columns) + column)
            which, begin, end, counts, adds, part_end, unit_end = balanced_part(
                segments, b, before, start, place, stop, share
            )
            place_of_part = uint32(uint32(block + uint32(before * uint32(SEGMENTS))) + which)
            if uint32(cuda.threadIdx.x) & uint32(31) == uint32(0):
                line = (start, part_end, stop, share)
                store_shared_u32x4(kept + uint32(48), line)
                store_shared_u32x4(kept + uint32(64), (b, column, unit_end, block))
            is_first = place == start
            part = which, begin, end, end, counts, adds, place_of_part, is_first
            attend_to(part, b, column, memory, common, segments)
            start, place, stop, share = load_shared_u32x4(kept + uint32(48))
            b, column, unit_end, block = load_shared_u32x4(kept + uint32(64))
            if place < stop:
                if place >= unit_end:
                    start = unit_end
                    column = uint32(column + uint32(1))
                    if column == columns:
                        column = uint32(0)
                        b = following(b, batch)
                cuda.syncthreads()  # the next part takes the same shared memory

    @device_function
    def decode(common, one, two, three):
        batch, columns, parts, _, workers = common[10:15]
        shared = shared_address(cuda.shared.array(0, uint32))
        warp = word_from_lane(uint32(uint32(cuda.threadIdx.x) >> uint32(5)), uint32(0))
        memory = (uint32(shared + warp * uint32(KEPT)), uint32(shared + uint32(WARPS * KEPT)))
        segments = (one, two, three)
        if BALANCED:
            costs = survey(segments, batch)
            if not are_alike(costs[0], costs[1], batch):
                attend_share(costs, memory, common, segments)
                return
        # on its own, so that ptxas sees that a warp never diverges, and takes uniform registers for
        # the loop: without them the GPU reads a tenth slower
        column, b = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
        split = uint32(cuda.blockIdx.z)
        which, begin, end, reach, number, total = even_part(segments, b, int32(split))
        base = uint32(uint32(uint32(b * columns) + column) * parts)
        counts, adds = (total, total, total), (base, base, base)
        place = uint32(base + number)
        part = which, begin, end, reach, counts, adds, place, split == uint32(0)
        attend_to(part, b, column, memory, common, segments)

    # fmt: off
    def decode_one(q, out, lse, partial, counters, q_stride_batch, q_stride_head, num_q_heads,
                   ratio, head_blocks, batch, columns, parts, places, workers, most_parts,
                   score_scale, one):
        common = (q, out, lse, partial, counters, q_stride_batch, q_stride_head, num_q_heads,
                  ratio, head_blocks, batch, columns, parts, places, workers, most_parts,
                  score_scale)
        decode(common, one, one, one)

    def decode_three(q, out, lse, partial, counters, q_stride_batch, q_stride_head, num_q_heads,
                     ratio, head_blocks, batch, columns, parts, places, workers, most_parts,
                     score_scale, one, two, three):
        common = (q, out, lse, partial, counters, q_stride_batch, q_stride_head, num_q_heads,
                  ratio, head_blocks, batch, columns, parts, places, workers, most_parts,
                  score_scale)
        decode(common, one, two, three)
    # fmt: on

    return decode_three if THREE else decode_one
