"""Attention to one split of a segment for wide groups: by warpgroups with parts of their own.

    feeders     packed rows ──▶ K and V as fp16, in stages of 64 tokens              (rows.py)
    consumers   S = q·K, P = 2**(S - m), O += P V by wgmma: 64 columns each          (products.py)

             FULL             FREE
    feeders ──────▶ consumers ──────▶ feeders     barriers of a stage

A code is expanded once for 64 or 128 columns. Consumers take turns on tiles, or with more than 64
columns each has its own. Tiles of a second segment, of 16-bit rows, follow those of the first on
one line, which is divided as the rows of one segment are. All else is as in decode/mainloop.py. K
rounded to fp16 moves the log-sum-exp: the kernel serves callers who do not want it.

Source: FlashAttention-3 (https://arxiv.org/abs/2407.08608).
"""

from numba import cuda, float32, int32, uint32

from ...device.combine import make_write
from ...device.jit import device_function
from ...device.ptx import word_from_lane
from ..copies import make_find_rows
from ..positions import make_count, make_extent
from .combine import make_combine_consumers
from .products import make_consume
from .rows import in_tiles, make_feed, make_feed_exact


def make_rows_of_line(spec):
    """The function to the rows of both segments, of the first with those that its last tile
    lacks."""
    rows_one, rows_two = (make_extent(spec, which)[1] for which in range(2))

    @device_function
    def rows_of_line(common, segments, b):
        first = in_tiles(rows_one(common, segments, b))
        return int32(first + rows_two(common, segments, b))

    return rows_of_line


def make_feed_second(spec):
    """The function by which a feeder's warp goes on with the second segment."""
    path = spec.second

    @device_function
    def feed_nothing(common, segments, b, kv_head, stages, end_one, end, left, half, has_v):
        """There is none."""

    if path is None:
        return feed_nothing
    find_rows, ALIKE = make_find_rows(spec, path), path.k_format == path.v_format
    ALIKE = ALIKE and spec.first.k_format == spec.first.v_format
    feed_k = make_feed_exact(spec, path.k_format, spec.first.k_format)
    feed_v = make_feed_exact(spec, path.v_format, spec.first.v_format)

    @device_function
    def feed_second(common, segments, b, kv_head, stages, end_one, end, left, half, has_v):
        tile, number, stage = left
        if tile < end:
            of_k, of_v, (_, _, _, around) = find_rows(common, segments[1], b, kv_head)
            start = in_tiles(end_one)
            first, end = int32(tile - start), int32(end - start)
            if has_v and not ALIKE:
                feed_v(stages, of_v, around, first, end, number, stage, half)
            else:
                of_rows = of_v if has_v else of_k
                feed_k(stages, of_rows, around, first, end, number, stage, half)

    return feed_second


def make_attend_wide(spec, path, keep, recall):
    """The function that attends to a segment's tokens; arguments as of mainloop.make_attend."""
    k, v = spec.rows(path)
    FEEDERS, SUMS, ALIKE = spec.feeders, v.fmt.head_dim // 2, k == v
    LANDINGS, LANDING, TILES = spec.landings_at, spec.landing_bytes, spec.tiles_at
    V_TILE = spec.tile_bytes[0]
    feed_k, feed_v = make_feed(spec, path, k), make_feed(spec, path, v)
    consume, count = make_consume(spec, path), make_count(spec)
    find_rows = make_find_rows(spec, path)
    JOINED, feed_second = spec.second is not None, make_feed_second(spec)
    rows_one = make_extent(spec, 0)[1]
    combine, write_columns = make_combine_consumers(spec, path, make_write(spec.query))

    @device_function
    def attend(segments, segment, begin, end, reach, rows, results, shared):
        common = results[1]
        b, kv_head = rows[0], rows[1]
        tid = uint32(cuda.threadIdx.x)
        warp = word_from_lane(uint32(tid >> uint32(5)), uint32(0))  # ptxas sees: it is uniform
        group = uint32(warp >> uint32(2))
        keep(results)
        end = int32(word_from_lane(uint32(end), uint32(0)))
        begin = int32(word_from_lane(uint32(begin), uint32(0)))
        if begin >= end:
            return
        end_one = end  # of the first segment
        if JOINED:
            end_one = int32(min(end, rows_one(common, segments, b)))
        if group < uint32(FEEDERS):
            of_k, of_v, places = find_rows(common, segment, b, kv_head)
            landings = uint32(shared + uint32(LANDINGS))
            landings = uint32(landings + uint32(LANDING) * warp)
            stages = uint32(shared + uint32(TILES))
            half = uint32(warp & uint32(1))
            has_v = uint32(warp & uint32(2)) != uint32(0)
            if ALIKE:
                if has_v:
                    of_k = of_v
                    stages = uint32(stages + uint32(V_TILE))
                left = feed_k(landings, stages, of_k, places, begin, end_one, group, half)
            elif has_v:
                stages = uint32(stages + uint32(V_TILE))
                left = feed_v(landings, stages, of_v, places, begin, end_one, group, half)
            else:
                left = feed_k(landings, stages, of_k, places, begin, end_one, group, half)
            feed_second(common, segments, b, kv_head, stages, end_one, end, left, half, has_v)
            for _ in range(3):  # of combine, for the consumers
                cuda.syncthreads()
        else:
            sums = cuda.local.array(SUMS, float32)
            references = cuda.local.array(2, float32)
            totals = cuda.local.array(2, float32)
            counts = count(common, segments, b)
            consumer = uint32(group - uint32(FEEDERS))
            state = (sums, references, totals)
            consume(shared, consumer, begin, end_one, end, rows, results, counts, state)
            _, target = recall(results)
            combine(shared, consumer, state, target)
        columns, target = recall(results)
        write_columns(shared, columns, target)

    return attend
