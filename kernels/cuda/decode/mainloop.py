"""Attention to one split of a segment: the loop over tiles, by the warps of a block.

    ring   STAGES tiles of K and V in shared memory, a warp's own: no barrier in the loop. With more
           than 16 columns several warps share it and meet once a tile, twice in the last
    warp   8 or 16 columns, one or two eights: a code is unpacked once for both
    lane   4g + t: rows g and g + 8 or columns 2t and 2t + 1 of an MMA (fragments.py)

    copies.py        scores.py              here                values.py           combine.py
    rows -> stages   S = q·K                P = 2**(S - m)      O += P V            warps

*Unrolled loads* (copies.py), *V prefetch* (a stage holds K and V), *padded shared memory* and
*direct rows* (device/row_layout.py). *Lazy rescale*: the softmax rescales only when a score exceeds
the maximum by more than 2**4, or a scale of V outgrows the headroom (values.py). All sums are
float32.
"""

from numba import cuda, float32, int32, uint32

from ..device.codes import PACK
from ..device.combine import make_write
from ..device.fragments import load_sums, over_quad, over_rows, scale_columns, store_sums
from ..device.jit import device_function, in_turn
from ..device.ptx import (
    any_lane,
    barrier,
    commit_copies,
    exp2,
    high_bf16,
    high_f16,
    low_bf16,
    low_f16,
    maximum,
    reaches_f16,
    transpose_matrix,
    wait_copies,
    word_from_lane,
)
from ..device.row_layout import operand_of
from .accumulators import make_add_promoted, make_promote
from .combine import make_combine_warps
from .copies import make_clear_row, make_copy, make_find_rows, make_locate, make_realign
from .positions import make_count
from .queries import make_mask, make_references, make_see
from .scores import make_keep_query, make_load_query, make_scores
from .spec import PROMOTION_INTERVAL, TILE, QueryWords
from .values import (
    HEADROOM,
    headroom_of,
    make_accumulate,
    make_largest_scales,
    make_load_header,
    make_put_output,
)
from .variant import make_change_scores, make_keep_changes

LAZY = 4  # powers of two that a score may exceed the maximum by


def make_attend(spec, path, keep, recall):
    """The function that attends to the tokens from `begin` to `end` of a segment of such a path.

    keep leaves in shared memory what is in `results`, recall finds there how many columns there are
    and where their output goes. The first tile is asked for up to `reach`, which is known before
    the length is.
    """
    k, v = spec.rows(path)
    RINGS, STAGES, SHARERS = spec.rings_of(path), spec.stages_of(path), spec.sharers
    RING_BYTES, STAGE_BYTES = spec.ring_bytes(path), spec.stage_bytes(path)
    COLUMNS, EIGHTS = spec.columns, spec.eights
    STEP, IDLE = TILE * RINGS, spec.warps > RINGS * SHARERS
    SCRATCH, SCRATCH_BYTES = spec.scratch_at(path), spec.scratch_bytes(path)
    K_TILE = TILE * k.landing
    K_REALIGNED, V_REALIGNED = k.realigned, v.realigned
    V_STRIDE, clear_row = v.stride, make_clear_row(v)
    V_BF16 = operand_of(v.fmt) == "bf16"
    FRAGMENTS = EIGHTS * QueryWords(k, spec.query).fragments
    SUMS, SCORES, PAIRS = EIGHTS * v.sums, 8 * EIGHTS, 2 * EIGHTS
    HEADERS = 4 * EIGHTS
    wait_for_oldest, wait_for_all = wait_copies[STAGES - 2], wait_copies[0]
    meet = _make_meet(SHARERS)
    find_rows, locate = make_find_rows(spec, path), make_locate(path)
    copy_k = make_copy(k, path, SHARERS)
    copy_v = make_copy(v, path, SHARERS)
    realign_k = make_realign(k, path)
    realign_v = make_realign(v, path)
    load_query, keep_query = make_load_query(k, spec), make_keep_query(k, spec)
    QUERIES, QUERY_BYTES = spec.queries_at, spec.query_bytes(path)
    count, see = make_count(spec), make_see(spec, path)
    start_references, mask_scores = make_references(spec), make_mask(spec, path)
    CHANGES = spec.changes_scores
    keep_changes = make_keep_changes(spec)
    change_scores = make_change_scores(spec, path)
    scores_of = make_scores(k, spec.query, EIGHTS)
    add_values = _make_add_values(spec, path)
    PROMOTES, PROMOTED = spec.promoted_bytes(path) > 0, spec.promoted_at(path)
    PROMOTED_BYTES = spec.promoted_bytes(path)
    promote, add_promoted = make_promote(v.sums, EIGHTS), make_add_promoted(v.sums, EIGHTS)
    write = make_write(spec.query)
    combine_warps = make_combine_warps(spec, make_put_output(v, EIGHTS), write)

    @device_function
    def attend(segments, segment, begin, end, reach, rows, results, shared):
        common = results[1]
        b, kv_head, first_query, queries_lie, _, score_scale = rows[:6]
        tid = uint32(cuda.threadIdx.x)
        lane = uint32(tid & uint32(31))
        warp = word_from_lane(uint32(tid >> uint32(5)), uint32(0))  # ptxas sees: it is uniform
        counts = count(common, segments, b)
        of_k, of_v, places = find_rows(common, segment, b, kv_head)
        k_base, k_outer, k_row = of_k
        v_base, v_outer, v_row = of_v
        index, shift, mask, around = places
        of_ring = uint32(warp // uint32(SHARERS))
        sharer = uint32(warp - of_ring * uint32(SHARERS))
        ring = word_from_lane(uint32(shared + of_ring * uint32(RING_BYTES)), uint32(0))
        scratch = uint32(ring + uint32(SCRATCH) + sharer * uint32(SCRATCH_BYTES))
        promoted = uint32(ring + uint32(PROMOTED) + sharer * uint32(PROMOTED_BYTES))
        begin = int32(word_from_lane(uint32(begin), uint32(0)))
        first = int32(begin + int32(of_ring) * int32(TILE))
        idle = IDLE and of_ring >= uint32(RINGS)
        if idle:
            first = int32(max(end, reach))

        # Step 1: fill the ring; the place of a tile is looked up one tile ahead
        asked = first
        where = locate(asked, end, index, shift)
        for s in range(STAGES - 1):
            limit = reach if s == 0 else end
            following = locate(int32(asked + int32(STEP)), end, index, shift)
            stage = uint32(ring + uint32(s * STAGE_BYTES))
            if asked < limit:
                copy_k(stage, k_base, where, asked, limit, k_outer, k_row, around, mask)
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

        # Step 2: the query, while the first tiles are on their way
        first_column = uint32(sharer * uint32(COLUMNS))
        used, sight = see(common, rows, counts, end, results[0], first_column)
        keep_changes(results, rows, counts, first_column, used)
        factors = cuda.local.array(PAIRS, float32)
        fragments = cuda.local.array(FRAGMENTS, uint32)
        queries = (first_query, queries_lie, first_column, used)
        load_query(fragments, factors, queries, score_scale, lane)
        at = uint32(shared + uint32(QUERIES) + sharer * uint32(QUERY_BYTES))
        query = keep_query(fragments, at, lane, of_ring)
        if CHANGES:  # changed scores count as they are
            ones = cuda.local.array(PAIRS, float32)
            for i in range(PAIRS):
                ones[i] = float32(1)
        sums = cuda.local.array(SUMS, float32)
        for i in range(SUMS):
            sums[i] = float32(0)
        header_sums = cuda.local.array(HEADERS, float32)
        for i in range(HEADERS):
            header_sums[i] = float32(0)
        references = cuda.local.array(PAIRS, float32)
        start_references(references, first_column, used, lane)
        # P's headroom, and what scales of V must reach to need another one
        scale = (float32(0 if V_BF16 else HEADROOM), uint32(0))
        tiles = int32(0)
        current = uint32(0)
        ahead = uint32(STAGES - 1)
        while first < end:
            # Step 3: ask for the tile that is STAGES - 1 ahead
            wait_for_oldest()
            meet(of_ring)
            following = locate(int32(asked + int32(STEP)), end, index, shift)
            if asked < end:
                stage = uint32(ring + ahead * uint32(STAGE_BYTES))
                copy_k(stage, k_base, where, asked, end, k_outer, k_row, around, mask)
                stage = uint32(stage + uint32(K_TILE))
                copy_v(stage, v_base, where, asked, end, v_outer, v_row, around, mask)
            commit_copies()
            where = following
            asked = int32(asked + int32(STEP))

            # Step 4: scores
            k_rows = ring + current * uint32(STAGE_BYTES)
            v_rows = k_rows + uint32(K_TILE)
            if K_REALIGNED:
                realign_k(k_rows, scratch, k_base, first, end, k_row, around, mask)
                k_rows = scratch
                cuda.syncwarp()
            if not V_REALIGNED and int32(first + int32(TILE)) > end:
                # the first tile was asked for without the length, and copies of direct rows bring
                # more bytes: what lies behind the last token may be NaN
                if sharer == uint32(0) and int32(first + int32(lane)) >= end:
                    clear_row(v_rows + lane * uint32(V_STRIDE))
                meet(of_ring)
            scores = cuda.local.array(SCORES, float32)
            scores_of(scores, k_rows, lane, query)
            change_scores(scores, factors, first, lane, results[0], common, counts)
            mask_scores(scores, first, end, lane, results[0], common, counts, sight)
            if V_REALIGNED:
                cuda.syncwarp()
                realign_v(v_rows, scratch, v_base, first, end, v_row, around, mask)
                v_rows = scratch
                cuda.syncwarp()

            # Steps 5 and 6: rescale, P V
            counted = (ones if CHANGES else factors, references)
            scale = add_values(scores, v_rows, lane, sums, header_sums, counted, scale)
            first = int32(first + int32(STEP))
            current = uint32(current + uint32(1)) if current != uint32(STAGES - 1) else uint32(0)
            ahead = uint32(ahead + uint32(1)) if ahead != uint32(STAGES - 1) else uint32(0)

            if PROMOTES:
                tiles = int32(tiles + int32(1))
                if tiles % int32(PROMOTION_INTERVAL) == int32(0):
                    any_before = tiles > int32(PROMOTION_INTERVAL)
                    promote(promoted, lane, sums, header_sums, any_before, references)

        # Step 7: the warps, merged
        if PROMOTES and tiles >= int32(PROMOTION_INTERVAL):
            add_promoted(promoted, lane, sums, header_sums, references)
        wait_for_all()  # a warp without tokens has asked for a tile, too
        columns, target = recall(results)
        combine_warps(shared, sums, header_sums, references, columns, target)

    return attend


def _make_meet(sharers):
    """Make the function at which the warps of a ring meet."""
    SHARERS = sharers

    @device_function
    def meet_lanes(ring):
        cuda.syncwarp()

    @device_function
    def meet_warps(ring):
        barrier(uint32(ring + uint32(1)), uint32(32 * SHARERS))

    return meet_lanes if sharers == 1 else meet_warps


def _make_add_values(spec, path):
    """The function that adds P V of a tile, from its scores; it rescales first if need be."""
    _, v = spec.rows(path)
    EIGHTS, PAIRS, V_HALF = spec.eights, 2 * spec.eights, v.half
    V_EXACT, V_BF16 = v.fmt.is_exact, operand_of(v.fmt) == "bf16"
    P_IN_TWO = V_BF16 and spec.query == "fp16"  # bf16 has fewer digits than out
    load_header, accumulate = make_load_header(v), make_accumulate(v, spec.query, EIGHTS)
    largest_scales = make_largest_scales(v)
    rescale = _make_rescale(v.sums, EIGHTS)
    pack = PACK[operand_of(v.fmt)]

    @device_function
    def add_values(scores, v_rows, lane, sums, header_sums, counted, scale):
        factors, references = counted
        room, limit = scale
        headers = (load_header(v_rows, lane), load_header(v_rows + uint32(V_HALF), lane))

        # Step 5: rescale
        grown = False
        highest = cuda.local.array(PAIRS, float32)
        for i in range(PAIRS):
            j = 8 * (i // 2) + i % 2
            upper = maximum(scores[j], scores[j + 2])
            highest[i] = maximum(upper, maximum(scores[j + 4], scores[j + 6]))
            grown = grown or highest[i] * factors[i] - references[i] > room + float32(LAZY)
        scales = uint32(0)
        if not V_EXACT:
            scales = largest_scales(headers[0], headers[1], uint32(lane >> uint32(2)))
            grown = grown or reaches_f16(scales, limit) != uint32(0)
        if any_lane(uint32(1) if grown else uint32(0)):
            old = room
            if not V_EXACT:
                most = maximum(low_f16(scales), high_f16(scales))
                most = over_rows(over_quad(most, maximum), maximum)
                room, limit = headroom_of(maximum(most, float32(0.5) * low_f16(limit)))
            rescale(sums, header_sums, counted, highest, room, old)

        # Step 6: P V
        for h in range(2):
            p = cuda.local.array(PAIRS, uint32)
            rest = cuda.local.array(PAIRS, uint32)
            for e in range(EIGHTS):
                i, j = 8 * e + 4 * h, 2 * e
                p0 = exp2(scores[i] * factors[j] - references[j])
                p1 = exp2(scores[i + 1] * factors[j + 1] - references[j + 1])
                p2 = exp2(scores[i + 2] * factors[j] - references[j])
                p3 = exp2(scores[i + 3] * factors[j + 1] - references[j + 1])
                upper, lower = pack(p1, p0), pack(p3, p2)
                p[j], p[j + 1] = transpose_matrix(upper), transpose_matrix(lower)
                if P_IN_TWO:
                    upper = pack(p1 - high_bf16(upper), p0 - low_bf16(upper))
                    lower = pack(p3 - high_bf16(lower), p2 - low_bf16(lower))
                    rest[j], rest[j + 1] = transpose_matrix(upper), transpose_matrix(lower)
            rows = v_rows + uint32(h * V_HALF)
            accumulate(sums, header_sums, rows, headers[h], p, lane)
            if P_IN_TWO:
                accumulate(sums, header_sums, rows, headers[h], rest, lane)
        return room, limit

    return add_values


def _make_rescale(sums_of_lane, eights):
    """Make the function that lets all columns count from their largest scores."""
    return in_turn([_make_rescale_eight(sums_of_lane, e) for e in range(eights)])


def _make_rescale_eight(sums_of_lane, e):
    """Make the function that rescales 8 columns, the e-th eight of a warp's."""
    FIRST, FOURS, COLUMN, HEADER = e * sums_of_lane, sums_of_lane // 4, 2 * e, 4 * e

    @device_function
    def rescale_eight(sums, header_sums, counted, highest, room, old):
        factors, references = counted
        more = room - old
        n0 = over_rows(highest[COLUMN], maximum) * factors[COLUMN] - room
        n1 = over_rows(highest[COLUMN + 1], maximum) * factors[COLUMN + 1] - room
        n0 = maximum(n0, references[COLUMN] - more)
        n1 = maximum(n1, references[COLUMN + 1] - more)
        e0 = exp2(references[COLUMN] - n0)
        e1 = exp2(references[COLUMN + 1] - n1)
        references[COLUMN] = n0
        references[COLUMN + 1] = n1
        for i in range(FOURS):
            at = FIRST + 4 * i
            store_sums(sums, at, scale_columns(load_sums(sums, at), e0, e1))
        store_sums(header_sums, HEADER, scale_columns(load_sums(header_sums, HEADER), e0, e1))

    return rescale_eight
