"""Attention to one split of a segment: the loop over tiles, by the warps of a block.

    warp   a ring of STAGES tiles of K and V in shared memory, its own: no barrier in the loop
    lane   4g + t: rows g and g + 8 or columns 2t and 2t + 1 of an MMA (fragments.py)

    copies.py        scores.py              here                values.py           combine.py
    rows -> stages   S = q·K                P = 2**(S - m)      O += P V            warps

The three techniques: *unrolled loads* (copies.py: all copies of a tile are asked for back to back,
without registers), *V prefetch* (a stage holds K and V: V is on its way while K is computed with),
*padded shared memory* (device/row_layout.py: no bank conflicts). Softmax is online and rescales
only when a score exceeds the maximum by more than 2**4 (*lazy rescale*, as FlashAttention 4 does),
or a scale of V outgrows the headroom (values.py). All sums are float32.
"""

from numba import cuda, float32, int32, uint32, uint64

from ..device.fragments import ZEROS, load_sums, over_quad, over_rows, scale_columns, store_sums
from ..device.jit import device_function
from ..device.ptx import (
    any_lane,
    commit_copies,
    exp2,
    high_bf16,
    high_f16,
    load_global_u32,
    low_bf16,
    low_f16,
    maximum,
    pack_bf16,
    pack_f16,
    reaches_f16,
    shfl,
    transpose_matrix,
    wait_copies,
    word_from_lane,
)
from .accumulators import make_add_promoted, make_promote
from .combine import make_combine_warps, make_write
from .copies import make_clear_row, make_copy, make_locate, make_realign
from .scores import QueryWords, make_load_query, make_scores
from .spec import FIELD, PROMOTION_INTERVAL, TILE
from .values import (
    HEADROOM,
    headroom_of,
    make_accumulate,
    make_largest_scales,
    make_load_header,
    make_put_output,
)

LAZY = 4  # powers of two that a score may exceed the maximum by
NEVER, LOWEST = -3e38, -1e30  # score of a row that is not there; maximum of no rows
K_ROWS, V_ROWS, INDEX = FIELD["k_rows"], FIELD["v_rows"], FIELD["index"]
K_OUTER, K_HEAD, K_ROW = (FIELD[f"k_stride_{axis}"] for axis in ("outer", "head", "row"))
V_OUTER, V_HEAD, V_ROW = (FIELD[f"v_stride_{axis}"] for axis in ("outer", "head", "row"))
CAPACITY, PAGE_SHIFT, TABLE_STRIDE, SEQ_SLOTS, SINKS, RING_ROWS = (
    FIELD[name] for name in ("capacity", "page_shift", "table_stride", "seq_slots", "sinks", "ring")
)


def make_attend(spec, path, keep, recall):
    """Make the function that attends to the tokens from `begin` to `end` of a segment.

    Args:
        spec, path: the kernel and the kind of segment.
        keep: leaves in shared memory what is in `results`: the attention takes all registers.
        recall: finds there how many query heads there are, and where their output goes.

    What it makes takes tuples of the kernel's, `rows` (where the sequence and the queries are) and
    `results`. The first tile of a warp is asked for up to `reach`, which is known before the length
    is: a load less to wait for.
    """
    k, v = spec.rows(path)
    WARPS, STAGES = spec.warps_of(path), spec.stages_of(path)
    WARP_BYTES, STAGE_BYTES = spec.warp_bytes(path), spec.stage_bytes(path)
    STEP, IDLE = TILE * WARPS, spec.warps > WARPS
    SCRATCH, K_TILE = STAGES * STAGE_BYTES, TILE * k.landing
    PAGED, RING = path.place == "paged", path.place == "ring"
    K_REALIGNED, V_REALIGNED = k.realigned, v.realigned
    V_STRIDE, V_HALF = v.stride, 16 * v.stride
    clear_row = make_clear_row(v)
    P_IN_TWO = v.fmt.codec == "bf16" and spec.query == "fp16"  # bf16 has fewer digits than out
    V_EXACT, V_BF16 = v.fmt.is_exact, v.fmt.codec == "bf16"
    PREFETCH_V, LAZILY = spec.without != "V prefetch", spec.without != "lazy rescale"
    FRAGMENTS, SHIFTS = QueryWords(k, spec.query).fragments, QueryWords(k, spec.query).shifts
    SUMS, FACTOR = v.sums, k.factor
    ROLLED = spec.without == "unrolled loads"
    wait_for_oldest, wait_for_values = wait_copies[STAGES - 2], wait_copies[1]
    wait_for_all = wait_copies[0]
    locate = make_locate(path.place)
    copy_k = make_copy(k, path.place, ROLLED)
    copy_v = make_copy(v, path.place, ROLLED)
    realign_k = make_realign(k, path.place)
    realign_v = make_realign(v, path.place)
    load_query, scores_of = make_load_query(k, spec.query), make_scores(k, spec.query)
    load_header, accumulate = make_load_header(v), make_accumulate(v, spec.query)
    largest_scales = make_largest_scales(v)
    PROMOTES, PROMOTED = spec.promoted_bytes(path) > 0, spec.promoted_at(path)
    promote, add_promoted = make_promote(SUMS), make_add_promoted(SUMS)
    write = make_write(spec.query)
    combine_warps = make_combine_warps(v.fmt.head_dim, spec.warps, make_put_output(v), write)
    pack = pack_bf16 if V_BF16 else pack_f16

    @device_function
    def attend(segment, begin, end, reach, rows, results, shared):
        b, kv_head, query, query_stride, heads, score_scale = rows
        tid = uint32(cuda.threadIdx.x)
        lane = uint32(tid & uint32(31))
        warp = word_from_lane(uint32(tid >> uint32(5)), uint32(0))  # tells ptxas it is uniform
        g = uint32(lane >> uint32(2))
        t = uint32(lane & uint32(3))
        index = segment[INDEX]
        start = int32(0)
        outer = uint64(b)
        if PAGED:
            index += uint64(4) * uint64(b) * uint64(segment[TABLE_STRIDE])
            outer = uint64(0)
        if RING and index != uint64(0):
            start = int32(load_global_u32(index + uint64(4) * uint64(b)))
        if RING and segment[SEQ_SLOTS] != uint64(0):
            outer = uint64(load_global_u32(segment[SEQ_SLOTS] + uint64(4) * uint64(b)))
        shift = segment[PAGE_SHIFT]
        mask = int32((int32(1) << shift) - int32(1))
        around = (start, segment[SINKS], segment[RING_ROWS], segment[CAPACITY])
        k_outer, k_row = segment[K_OUTER], segment[K_ROW]
        v_outer, v_row = segment[V_OUTER], segment[V_ROW]
        k_base = segment[K_ROWS] + outer * k_outer + uint64(kv_head) * segment[K_HEAD]
        v_base = segment[V_ROWS] + outer * v_outer + uint64(kv_head) * segment[V_HEAD]
        ring = word_from_lane(uint32(shared + warp * uint32(WARP_BYTES)), uint32(0))
        begin = int32(word_from_lane(uint32(begin), uint32(0)))
        first = int32(begin + int32(warp) * int32(TILE))
        if IDLE and warp >= uint32(WARPS):
            first = end

        # Step 1: fill the ring; the place of a tile is looked up one tile ahead
        asked = first
        where = locate(asked, end, index, shift)
        for s in range(STAGES - 1):
            limit = reach if s == 0 else end
            following = locate(int32(asked + int32(STEP)), end, index, shift)
            stage = uint32(ring + uint32(s * STAGE_BYTES))
            if asked < limit:
                copy_k(stage, k_base, where, asked, limit, k_outer, k_row, around, mask)
                if PREFETCH_V:
                    stage = uint32(stage + uint32(K_TILE))
                    copy_v(stage, v_base, where, asked, limit, v_outer, v_row, around, mask)
            commit_copies()
            where = following
            asked = int32(asked + int32(STEP))
        keep(results)
        end = int32(word_from_lane(uint32(end), uint32(0)))
        if begin >= end:
            wait_for_all()
            return
        if not V_REALIGNED and int32(first + int32(TILE)) > end:
            # the first tile was asked for without the length: what lies behind it may be NaN
            wait_for_oldest()
            cuda.syncwarp()
            if int32(first + int32(lane)) >= end:
                clear_row(ring + uint32(K_TILE) + lane * uint32(V_STRIDE))
            cuda.syncwarp()

        # Step 2: the query, while the first tiles are on their way
        fragments = cuda.local.array(FRAGMENTS, uint32)
        shifts = cuda.local.array(SHIFTS, uint32)
        row = query + uint64(g) * query_stride
        back = load_query(fragments, shifts, row, g < heads, t)
        # scores count before these factors, so that each takes one multiply-add in the exponent
        factor = score_scale * float32(FACTOR)
        factor0 = factor * shfl(back, uint32(8) * t)
        factor1 = factor * shfl(back, uint32(8) * t + uint32(4))
        lazy0 = float32(LAZY) / factor0
        lazy1 = float32(LAZY) / factor1
        sums = cuda.local.array(SUMS, float32)
        for i in range(SUMS):
            sums[i] = float32(0)
        header_sums = ZEROS
        m0 = float32(LOWEST)
        m1 = float32(LOWEST)
        room = float32(0 if V_BF16 else HEADROOM)
        largest = float32(0)  # scale of V so far
        limit = uint32(0)  # that scales must reach to need another headroom
        tiles = int32(0)
        before = (m0, m1)
        promoted = uint32(ring + uint32(PROMOTED))
        current = uint32(0)
        ahead = uint32(STAGES - 1)
        while first < end:
            # Step 3: ask for the tile that is STAGES - 1 ahead
            wait_for_oldest()
            cuda.syncwarp()
            if not PREFETCH_V:
                here = locate(first, end, index, shift)
                stage = uint32(ring + current * uint32(STAGE_BYTES) + uint32(K_TILE))
                copy_v(stage, v_base, here, first, end, v_outer, v_row, around, mask)
                commit_copies()
            following = locate(int32(asked + int32(STEP)), end, index, shift)
            if asked < end:
                stage = uint32(ring + ahead * uint32(STAGE_BYTES))
                copy_k(stage, k_base, where, asked, end, k_outer, k_row, around, mask)
                if PREFETCH_V:
                    stage = uint32(stage + uint32(K_TILE))
                    copy_v(stage, v_base, where, asked, end, v_outer, v_row, around, mask)
            commit_copies()
            where = following
            asked = int32(asked + int32(STEP))

            # Step 4: scores
            k_rows = ring + current * uint32(STAGE_BYTES)
            v_rows = k_rows + uint32(K_TILE)
            if K_REALIGNED:
                realign_k(k_rows, ring + uint32(SCRATCH), k_base, first, end, k_row, around)
                k_rows = ring + uint32(SCRATCH)
                cuda.syncwarp()
            scores = cuda.local.array(8, float32)
            scores_of(scores, k_rows, lane, fragments, shifts)
            if int32(first + int32(TILE)) > end:
                left = int32(end - first - int32(g))
                for i in range(4):  # rows g, g + 8, g + 16, g + 24
                    if left <= int32(8 * i):
                        scores[2 * i] = float32(NEVER)
                        scores[2 * i + 1] = float32(NEVER)
            if not PREFETCH_V:
                wait_for_values()
                cuda.syncwarp()
            if V_REALIGNED:
                cuda.syncwarp()
                realign_v(v_rows, ring + uint32(SCRATCH), v_base, first, end, v_row, around)
                v_rows = ring + uint32(SCRATCH)
                cuda.syncwarp()
            headers = (load_header(v_rows, lane), load_header(v_rows + uint32(V_HALF), lane))

            # Step 5: rescale, if a score or a scale has outgrown the reference (lazy rescale)
            n0 = maximum(maximum(scores[0], scores[2]), maximum(scores[4], scores[6]))
            n1 = maximum(maximum(scores[1], scores[3]), maximum(scores[5], scores[7]))
            grown = n0 > m0 + lazy0 or n1 > m1 + lazy1 or not LAZILY
            scales = uint32(0)
            if not V_EXACT:
                scales = largest_scales(headers[0], headers[1], g)
                grown = grown or reaches_f16(scales, limit) != uint32(0)
            if any_lane(uint32(1) if grown else uint32(0)):
                n0 = maximum(over_rows(n0, maximum), m0)
                n1 = maximum(over_rows(n1, maximum), m1)
                old = room
                if not V_EXACT:
                    scale = maximum(low_f16(scales), high_f16(scales))
                    scale = over_rows(over_quad(scale, maximum), maximum)
                    largest = maximum(largest, scale)
                    room, limit = headroom_of(largest)
                e0 = exp2((m0 - n0) * factor0 + (room - old))
                e1 = exp2((m1 - n1) * factor1 + (room - old))
                m0 = n0
                m1 = n1
                for i in range(SUMS // 4):
                    store_sums(sums, 4 * i, scale_columns(load_sums(sums, 4 * i), e0, e1))
                header_sums = scale_columns(header_sums, e0, e1)

            # Step 6: P V
            base0 = room - m0 * factor0
            base1 = room - m1 * factor1
            for h in range(2):
                p0 = exp2(scores[4 * h] * factor0 + base0)
                p1 = exp2(scores[4 * h + 1] * factor1 + base1)
                p2 = exp2(scores[4 * h + 2] * factor0 + base0)
                p3 = exp2(scores[4 * h + 3] * factor1 + base1)
                upper, lower = pack(p1, p0), pack(p3, p2)
                p = (transpose_matrix(upper), transpose_matrix(lower))
                rows = v_rows + uint32(h * V_HALF)
                header_sums = accumulate(sums, header_sums, rows, headers[h], p, lane)
                if P_IN_TWO:
                    upper = pack(p1 - high_bf16(upper), p0 - low_bf16(upper))
                    lower = pack(p3 - high_bf16(lower), p2 - low_bf16(lower))
                    p = (transpose_matrix(upper), transpose_matrix(lower))
                    header_sums = accumulate(sums, header_sums, rows, headers[h], p, lane)
            first = int32(first + int32(STEP))
            current = uint32(current + uint32(1)) if current != uint32(STAGES - 1) else uint32(0)
            ahead = uint32(ahead + uint32(1)) if ahead != uint32(STAGES - 1) else uint32(0)

            if PROMOTES:
                tiles = int32(tiles + int32(1))
                if tiles % int32(PROMOTION_INTERVAL) == int32(0):
                    now = (m0 * factor0 - room, m1 * factor1 - room)
                    any_before = tiles > int32(PROMOTION_INTERVAL)
                    header_sums = promote(
                        promoted, lane, sums, header_sums, any_before, before, now
                    )
                    before = now

        # Step 7: the warps, merged
        low, high = m0 * factor0 - room, m1 * factor1 - room
        if PROMOTES and tiles >= int32(PROMOTION_INTERVAL):
            header_sums = add_promoted(promoted, lane, sums, header_sums, before, (low, high))
        wait_for_all()  # a warp without tokens has asked for a tile, too
        heads, places = recall(results)
        combine_warps(shared, sums, header_sums, low, high, heads, places)

    return attend
