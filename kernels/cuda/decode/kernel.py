"""Decode attention on CUDA: softmax(q·K) V of the last token or tokens, read from packed rows.

    unit    columns of a KV head of a sequence, as many as a block has: a column is a query head, of
            one query or of several (queries.py)
    part    tokens of a segment of a unit, attended to by a block (mainloop.py)
    block   one part, or where lengths differ several (schedule.py); the last block of a unit merges
            its parts (combine.py)

The device divides the work by lengths, so these may change between replays of a CUDA graph. Blocks
without tokens end at once. Parts of the first segment come first, because they are long.

What a part needs after its attention waits in shared memory (`keep`, `recall`): in registers it
would cost a block its place on the SM.

Sources: Flash-Decoding (https://pytorch.org/blog/flash-decoding/), INT4 decoding
(https://pytorch.org/blog/int4-decoding/).
"""

from numba import cuda, int32, uint32, uint64

from ..device.combine import make_write
from ..device.jit import device_function
from ..device.ptx import (
    begin_next_launch,
    load_shared_u32,
    load_shared_u32x4,
    shared_address,
    store_shared_u32x4,
    word_from_lane,
)
from .combine import make_combine_splits, make_write_empty
from .mainloop import make_attend
from .positions import make_extent, make_held
from .queries import COUNT_MASK, make_columns_of, make_row_of
from .schedule import (
    are_alike,
    following,
    make_balanced_part,
    make_even_part,
    make_is_spare,
    make_share,
    make_survey,
    rank_of,
)
from .wide.mainloop import make_attend_wide, make_rows_of_line

# of a part, in the word of its columns: whether it is the unit's first, whether it has tokens
BEGINS, HOLDS = 0x100, 0x200


@device_function
def attend_nothing(segments, segment, begin, end, reach, rows, results, shared):
    """In place of a second path where there is none."""


def make_decode_kernel(spec):
    DIM, THREE = spec.first.v_format.head_dim, spec.segments == 3
    SEGMENTS, COLUMNS = spec.segments, spec.block_columns
    OVERLAPPED, KEPT, RINGS_AT = spec.overlapped, spec.kept, spec.rings_at
    RAGGED, held_of, BATCH = spec.ragged, make_held(spec), spec.places["batch"]
    write = make_write(spec.query)
    columns_of_unit = make_columns_of(spec)
    lie_in_out, _ = make_row_of(spec)
    combine_splits = make_combine_splits(spec, write)
    write_empty = make_write_empty(spec, write)
    firsts, rows_of = zip(*(make_extent(spec, which) for which in range(3)), strict=True)
    if SEGMENTS == 2:  # both are one line of tiles (wide/mainloop.py)
        rows_of = (make_rows_of_line(spec), *rows_of[1:])
    survey, find, steps_of, cost_of = make_survey(spec, rows_of)
    share_of, is_spare = make_share(spec), make_is_spare(spec, rows_of)
    even_part = make_even_part(spec, firsts, rows_of)
    balanced_part = make_balanced_part(spec, firsts, rows_of, steps_of, cost_of)

    @device_function
    def keep(results):
        """Leave in a warp's shared memory what it needs after its attention: registers are dear."""
        kept, _, unit, line, part, counts, adds = results
        if uint32(cuda.threadIdx.x) & uint32(31) == uint32(0):
            store_shared_u32x4(kept, unit)
            store_shared_u32x4(kept + uint32(16), line)
            store_shared_u32x4(kept + uint32(32), part)
            if THREE:
                store_shared_u32x4(kept + uint32(48), (counts[0], counts[1], adds[1], adds[2]))
        cuda.syncwarp()

    @device_function
    def places_of(common, row):
        """Where the output and lse of a unit's first column go."""
        out, lse = common[1], common[2]
        if lse != uint64(0):
            lse += uint64(4) * uint64(row)
        return out + uint64(2 * DIM) * uint64(row), lse

    @device_function
    def recall(results):
        """Of a part: its columns and how they lie; the unit's parts; where the results go."""
        kept, common = results[0], results[1]
        partial, places = common[3], common[13]
        place = load_shared_u32(kept + uint32(12))
        total, _, row, state = load_shared_u32x4(kept + uint32(32))
        part_lse = partial + uint64(4 * COLUMNS) * (uint64(DIM) * uint64(places) + uint64(place))
        part_out = partial + uint64(4 * COLUMNS * DIM) * uint64(place)
        out, lse = places_of(common, row)
        many = uint32(state & uint32(COUNT_MASK))
        lie = lie_in_out(common, state)
        return many, (int32(total), part_out, part_lse, out, lse, lie, row, common)

    @device_function
    def numbering_of(kept, total, first):
        if THREE:
            of_one, of_two, second, third = load_shared_u32x4(kept + uint32(48))
            return (of_one, of_two, total), (first, second, third)
        return (total, total, total), (first, first, first)

    make = make_attend_wide if spec.is_wide else make_attend
    attend_first = make(spec, spec.first, keep, recall)
    attend_second = make_attend(spec, spec.second, keep, recall) if THREE else attend_nothing

    @device_function
    def batch_of(common):
        """Sequences, or pieces that were made: loaded again after a part, see above."""
        return held_of(common) if RAGGED else common[BATCH]

    @device_function
    def decode(common, one, two, three):
        partial, counters = common[3:5]
        columns, parts, places, workers, most_parts = common[11:16]
        shared = shared_address(cuda.shared.array(0, uint32))
        if OVERLAPPED:
            begin_next_launch()
        batch = batch_of(common)  # of pieces: the grid has room for more than pieces.py has made
        # from a lane: ptxas has to see that a warp does not diverge
        warp = word_from_lane(uint32(uint32(cuda.threadIdx.x) >> uint32(5)), uint32(0))
        kept = uint32(shared + warp * uint32(KEPT))
        rings = shared + uint32(RINGS_AT)
        segments = (one, two, three)
        column, b = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
        split = uint32(cuda.blockIdx.z)

        # Step 1: the block's work: a part, or a share of the line (schedule.py)
        block = uint32(0)
        share = uint32(0)
        place = uint32(0)
        start = uint32(0)
        stop = uint32(1)
        if workers != uint32(0):
            block = uint32(uint32(uint32(split * common[BATCH]) + b) * columns + column)
            # a block that is no worker has nothing to do if its even part is empty
            if block >= workers and is_spare(common, segments, b, split, batch):
                return
            cost, largest, mine = survey(common, segments, batch)
            # the plan's even parts fit only where the grid's pieces are all there: if there are
            # fewer, their mean over the grid is small, and the blocks share out the work
            if not are_alike(cost, largest, common[BATCH]):
                share = share_of(cost, largest, columns, workers, most_parts)
                stop = uint32(cost * columns)
        if share != uint32(0):
            if block >= workers:
                return
            place = uint32(block * share)
            stop = min(uint32(place + share), stop)
            if place >= stop:
                return
            b, start = find(common, segments, batch, columns, place, mine)
            cost = cost_of(steps_of(common, segments, b))
            column = uint32(uint32(place - start) // cost)
            start = uint32(start + uint32(column * cost))
        elif split >= parts:
            return
        if RAGGED:
            if b >= batch:
                return

        while place < stop:
            # Step 2: the part
            unit_end = uint32(1)
            if share != uint32(0):
                is_first = place == start
                before = uint32(uint32(rank_of(b, batch_of(common)) * columns) + column)
                which, begin, end, counts, adds, place, unit_end = balanced_part(
                    common, segments, b, before, start, place, stop, share
                )
                reach = end
                place_of_part = uint32(uint32(block + uint32(before * uint32(SEGMENTS))) + which)
            else:
                is_first = split == uint32(0)
                place = stop
                which, begin, end, reach, number, total = even_part(
                    common, segments, b, int32(split)
                )
                counts = (total, total, total)
                base = uint32(uint32(uint32(b * columns) + column) * parts)
                adds = (base, base, base)
                place_of_part = uint32(base + number)

            # Step 3: attention to it
            rows, row, state = columns_of_unit(common, segments, b, column)
            if is_first:
                state = uint32(state | uint32(BEGINS))
            if begin < end:
                state = uint32(state | uint32(HOLDS))
            unit = (b, column, unit_end, place_of_part)
            line = (start, place, stop, share)
            results = (kept, common, unit, line, (counts[2], adds[0], row, state), counts, adds)
            if which == uint32(0):
                attend_first(segments, one, begin, end, reach, rows, results, rings)
            elif THREE:
                segment = two if which == uint32(1) else three
                attend_second(segments, segment, begin, end, reach, rows, results, rings)

            # Step 4: the parts of the unit, merged by the last block
            b, column, unit_end, _ = load_shared_u32x4(kept)
            total, add_first, row, state = load_shared_u32x4(kept + uint32(32))
            if total != uint32(1):
                out, lse = places_of(common, row)
                many = uint32(state & uint32(COUNT_MASK))
                lie = lie_in_out(common, state)
                if total == uint32(0):
                    if state & uint32(BEGINS):
                        write_empty(many, out, lse, lie)
                elif state & uint32(HOLDS):
                    counts, adds = numbering_of(kept, total, add_first)
                    counter = counters + uint64(4) * uint64(uint32(uint32(b * columns) + column))
                    part_lses = partial + uint64(4 * DIM * COLUMNS) * uint64(places)
                    parts_of = (counts, adds, partial, part_lses)
                    of_unit = (out, lse, lie, row, common)
                    combine_splits(rings, counter, many, parts_of, of_unit)

            # Step 5: what follows on the line
            start, place, stop, share = load_shared_u32x4(kept + uint32(16))
            if place < stop:
                if place >= unit_end:
                    start = unit_end
                    column = uint32(column + uint32(1))
                    if column == columns:
                        column = uint32(0)
                        b = following(b, batch_of(common))
                cuda.syncthreads()  # the next part takes the same shared memory

    def decode_one(common, one):
        decode(common, one, one, one)

    def decode_two(common, one, two):
        decode(common, one, two, two)

    def decode_three(common, one, two, three):
        decode(common, one, two, three)

    return (decode_one, decode_two, decode_three)[SEGMENTS - 1]
