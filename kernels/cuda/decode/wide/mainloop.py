"""Attention to one split of a segment for wide groups: by warpgroups with parts of their own.

    feeders     packed rows ──▶ K and V as fp16, in stages of 64 tokens              (rows.py)
    consumers   S = q·K, P = 2**(S - m), O += P V by wgmma: 64 columns each          (products.py)

             FULL             FREE
    feeders ──────▶ consumers ──────▶ feeders     barriers of a stage

A code is expanded once for 64 or 128 columns. Consumers take turns on tiles, or with more than 64
columns each has its own. All else is as in decode/mainloop.py. K rounded to fp16 moves the
log-sum-exp: the kernel serves callers who do not want it.

Source: FlashAttention-3 (https://arxiv.org/abs/2407.08608).
"""

from numba import cuda, float32, int32, uint32

from ...device.combine import make_write
from ...device.jit import device_function
from ...device.ptx import word_from_lane
from ..copies import make_find_rows
from ..positions import make_count
from .combine import make_combine_consumers
from .products import make_consume
from .rows import make_feed


def make_attend_wide(spec, path, keep, recall):
    """The function that attends to a segment's tokens; arguments as of mainloop.make_attend."""
    k, v = spec.rows(path)
    FEEDERS, SUMS, ALIKE = spec.feeders, v.fmt.head_dim // 2, k == v
    LANDINGS, LANDING, TILES = spec.landings_at, spec.landing_bytes, spec.tiles_at
    V_TILE = spec.tile_bytes[0]
    feed_k, feed_v = make_feed(spec, path, k), make_feed(spec, path, v)
    consume, count = make_consume(spec, path), make_count(spec)
    find_rows = make_find_rows(spec, path)
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
                feed_k(landings, stages, of_k, places, begin, end, group, half)
            elif has_v:
                stages = uint32(stages + uint32(V_TILE))
                feed_v(landings, stages, of_v, places, begin, end, group, half)
            else:
                feed_k(landings, stages, of_k, places, begin, end, group, half)
            for _ in range(3):  # of combine, for the consumers
                cuda.syncthreads()
        else:
            sums = cuda.local.array(SUMS, float32)
            references = cuda.local.array(2, float32)
            totals = cuda.local.array(2, float32)
            counts = count(common, segments, b)
            consumer = uint32(group - uint32(FEEDERS))
            state = (sums, references, totals)
            consume(shared, consumer, begin, end, rows, results, counts, state)
            _, target = recall(results)
            combine(shared, consumer, state, target)
        columns, target = recall(results)
        write_columns(shared, columns, target)

    return attend
