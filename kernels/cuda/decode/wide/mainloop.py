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

from numba import cuda, float32, int32, uint32, uint64

from ...device.combine import make_write
from ...device.jit import device_function
from ...device.ptx import load_global_u32, word_from_lane
from ..mainloop import (
    CAPACITY,
    INDEX,
    K_HEAD,
    K_OUTER,
    K_ROW,
    K_ROWS,
    PAGE_SHIFT,
    RING_ROWS,
    SEQ_SLOTS,
    SINKS,
    TABLE_STRIDE,
    V_HEAD,
    V_OUTER,
    V_ROW,
    V_ROWS,
)
from ..positions import make_count, make_piece_of
from .combine import make_combine_consumers
from .products import make_consume
from .rows import make_feed


def make_attend_wide(spec, path, keep, recall):
    """The function that attends to a segment's tokens; arguments as of mainloop.make_attend."""
    k, v = spec.rows(path)
    FEEDERS, SUMS, ALIKE = spec.feeders, v.fmt.head_dim // 2, k == v
    LANDINGS, LANDING, TILES = spec.landings_at, spec.landing_bytes, spec.tiles_at
    V_TILE = spec.tile_bytes[0]
    PAGED, RING = path.place == "paged", path.place == "ring"
    feed_k, feed_v = make_feed(spec, path, k), make_feed(spec, path, v)
    consume, count, piece_of = make_consume(spec, path), make_count(spec), make_piece_of(spec)
    combine, write_columns = make_combine_consumers(spec, path, make_write(spec.query))

    @device_function
    def attend(segments, segment, begin, end, reach, rows, results, shared):
        common = results[1]
        b, kv_head = rows[0], rows[1]
        tid = uint32(cuda.threadIdx.x)
        warp = word_from_lane(uint32(tid >> uint32(5)), uint32(0))  # tells ptxas it is uniform
        group = uint32(warp >> uint32(2))
        keep(results)
        end = int32(word_from_lane(uint32(end), uint32(0)))
        begin = int32(word_from_lane(uint32(begin), uint32(0)))
        if begin >= end:
            return
        if group < uint32(FEEDERS):
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
                place = segment[SEQ_SLOTS] + uint64(4) * uint64(sequence)
                outer = uint64(load_global_u32(place))
            shift = segment[PAGE_SHIFT]
            mask = int32((int32(1) << shift) - int32(1))
            around = (start, segment[SINKS], segment[RING_ROWS], segment[CAPACITY])
            landings = uint32(shared + uint32(LANDINGS))
            landings = uint32(landings + uint32(LANDING) * warp)
            stages = uint32(shared + uint32(TILES))
            half = uint32(warp & uint32(1))
            has_v = uint32(warp & uint32(2)) != uint32(0)
            k_base = segment[K_ROWS] + outer * segment[K_OUTER]
            k_base += uint64(kv_head) * segment[K_HEAD]
            v_base = segment[V_ROWS] + outer * segment[V_OUTER]
            v_base += uint64(kv_head) * segment[V_HEAD]
            of_k = (k_base, segment[K_OUTER], segment[K_ROW], index, shift, around, mask)
            of_v = (v_base, segment[V_OUTER], segment[V_ROW], index, shift, around, mask)
            if ALIKE:
                if has_v:
                    of_k = of_v
                    stages = uint32(stages + uint32(V_TILE))
                feed_k(landings, stages, of_k, begin, end, group, half)
            elif has_v:
                stages = uint32(stages + uint32(V_TILE))
                feed_v(landings, stages, of_v, begin, end, group, half)
            else:
                feed_k(landings, stages, of_k, begin, end, group, half)
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
            _, places = recall(results)
            combine(shared, consumer, state, places)
        columns, places = recall(results)
        write_columns(shared, columns, places)

    return attend
