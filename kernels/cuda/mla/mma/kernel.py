"""Decode attention of MLA (multi-head latent attention) on CUDA: a row is read once, for K and
V.

    row     latent elements (512): K and V    RoPE elements (64): K only
            ├────────────┬────────────┬────────────┬────────────┤├──────┤
    warp    0            1            2            3              all

    grid    columns, 16 or 32 a block  x  sequences  x  splits of the tokens
    team    4 warps with a ring of tiles of 32 tokens; each warp has a quarter of the latent
            elements, as K and as V: 16 columns x 128 elements of out are 64 registers a lane

        tiles ahead  ──cp.async──▶ rows, as they are                         (copies.py)
        each warp    its quarter of q·K ──▶ partial scores, shared memory    (scores.py)
                     ─── the team meets ───
                     its eight tokens: sum of the quarters, P ──▶ shared     (softmax.py)
                     ─── the team meets ───
                     its quarter of P V                                      (values.py)

Codes are unpacked in registers, once for K and once for V: an MMA wants pairs of elements for the
one, of tokens for the other. Teams of a block are merged in shared memory, splits by a launch
(../combine.py). Tokens are split by the lengths on the device. A segment is a launch; of several
queries each sees the first rows (decode/positions.py).

Sources: DeepSeek-V2 (https://arxiv.org/abs/2405.04434); FlashMLA
(https://github.com/deepseek-ai/FlashMLA) and FlashInfer cut the output over warps, too.
"""

from operator import add

from numba import cuda, float32, int32, uint32, uint64

from ...device.combine import make_add_copies, make_write
from ...device.fragments import over_quad
from ...device.jit import device_function
from ...device.powers import inverse_of
from ...device.ptx import (
    begin_next_launch,
    commit_copies,
    exp2,
    load_shared_f32,
    log2,
    maximum,
    shared_address,
    store_global_f32x4,
    store_shared_f32,
    wait_copies,
    wait_for_launch,
    word_from_lane,
)
from ..work import (
    count,
    make_find_places,
    make_find_rows,
    make_find_tokens,
    make_write_nothing,
    seen_by,
    seen_by_all,
    write_lse,
)
from .copies import make_copy_tile, make_find_pages
from .queries import make_load_queries
from .scores import make_add_partials, make_own_scores, make_partial_scores
from .softmax import LOWEST, first_limits, make_mask, make_softmax, meet
from .spec import SLICES, TILE
from .values import FIRST_POWER, make_accumulate, make_fit_scales, make_put_output, sums_of


def make_mla_kernel(spec):
    TEAMS, STAGES, BLOCKS, COLUMNS = spec.teams, spec.stages, spec.blocks, spec.block_columns
    CAUSAL, LOOKUPS = spec.causal, spec.lookups
    STEP, STAGE, TEAM = TILE * TEAMS, spec.stage_bytes, spec.team_bytes
    EXCHANGE, QUERIES, P = STAGES * STAGE, spec.query_bytes, spec.p_at
    HALVES, SCORES, SUMS = 2 * BLOCKS, 4 * BLOCKS, BLOCKS * sums_of(spec)
    FRAGMENTS = 4 * spec.latent_steps if BLOCKS == 1 else 4
    SCALES = 1 if spec.latent.is_exact else spec.latent.groups
    ROOM, OVERLAPPED, OVERLAPS = first_limits(spec), spec.overlapped, spec.overlaps
    wait_for_next = wait_copies[STAGES - 2]
    wait_for_all = wait_copies[0]
    find_pages, copy_tile = make_find_pages(spec), make_copy_tile(spec)
    load_queries = make_load_queries(spec)
    partial_scores, own_scores = make_partial_scores(spec), make_own_scores(spec)
    add_partials = make_add_partials(spec)
    mask = make_mask(spec)
    BEHIND, fit_scales = spec.behind, make_fit_scales(spec)
    write_p, settle = make_softmax(spec)
    accumulate = make_accumulate(spec)
    write = make_write(spec.query)
    combine_teams = _make_combine_teams(spec, write)
    write_nothing = make_write_nothing(spec, write)
    find_tokens, find_rows = make_find_tokens(spec, STEP), make_find_rows(spec)
    find_places = make_find_places(spec)

    # fmt: off
    def mla(q_latent, q_rope, out, lse, part_out, part_lse, rows, seq_lens, index, seq_slots,
            other_lens, q_lens, latent_stride_batch, latent_stride_query, latent_stride_head,
            rope_stride_batch, rope_stride_query, rope_stride_head, stride_outer, capacity, sinks,
            ring_len, page_shift, table_stride, other_capacity, is_second, second_sinks, first_part,
            parts, num_heads, q_len, score_scale):
        # fmt: on
        if OVERLAPPED:
            begin_next_launch()
        tid = uint32(cuda.threadIdx.x)
        lane = uint32(tid & uint32(31))
        # from a lane: ptxas has to see that a warp does not diverge
        warp = word_from_lane(uint32(tid >> uint32(5)), uint32(0))
        team, own = uint32(warp // uint32(SLICES)), uint32(warp % uint32(SLICES))
        thread = uint32(tid - uint32(32 * SLICES) * team)
        block, b, split = cuda.blockIdx.x, cuda.blockIdx.y, uint32(cuda.blockIdx.z)

        # Step 1: the tokens of this block
        length, queries, begin, end = find_tokens(seq_lens, capacity, q_lens, q_len, b, split)
        first_column = uint32(uint32(block) * uint32(COLUMNS))
        all_columns = uint32(q_len * num_heads)
        columns = min(uint32(COLUMNS), uint32(all_columns - first_column))
        results = (out, lse, part_out, part_lse)
        part = uint32(uint32(first_part) + split)
        places = find_places(results, b, first_column, all_columns, part)
        whole = parts == int32(1)
        if begin >= end:
            write_nothing(whole, columns, places)
            if OVERLAPS:
                wait_for_launch()
            return

        # Step 2: fill the ring; pages are looked up one tile ahead
        shared = shared_address(cuda.shared.array(0, uint32))
        ring = uint32(shared + uint32(QUERIES) + uint32(TEAM) * team)
        exchange = uint32(ring + uint32(EXCHANGE))
        page_mask = int32((int32(1) << page_shift) - int32(1))
        steps, of_ring = (stride_outer, table_stride), (sinks, ring_len, capacity)
        rows, index, around = find_rows(rows, index, seq_slots, b, steps, of_ring)
        first = int32(begin + int32(team) * int32(TILE))
        asked = first
        pages = cuda.local.array(LOOKUPS, uint32)
        find_pages(pages, index, asked, end, page_shift, thread)
        for s in range(STAGES - 1):
            if asked < end:
                stage = uint32(ring + uint32(STAGE * s))
                copy_tile(stage, rows, stride_outer, pages, asked, end, page_mask, around, thread)
            commit_copies()
            asked = int32(asked + int32(STEP))
            find_pages(pages, index, asked, end, page_shift, thread)

        # Step 3: the queries, while the first tiles are on their way
        fragments = cuda.local.array(FRAGMENTS, uint32)
        factors = cuda.local.array(HALVES, float32)
        rope_factors = cuda.local.array(HALVES, float32)
        used = min(uint32(queries * num_heads), all_columns)
        of_queries = (
            q_latent + uint64(b) * latent_stride_batch, latent_stride_query, latent_stride_head,
            q_rope + uint64(b) * rope_stride_batch, rope_stride_query, rope_stride_head,
            first_column, used, uint32(num_heads), score_scale,
        )
        here = (shared, exchange, team)
        load_queries(fragments, factors, rope_factors, of_queries, here, lane, warp)
        sums = cuda.local.array(SUMS, float32)
        for i in range(SUMS):
            sums[i] = float32(0)
        header_sums = cuda.local.array(SCORES, float32)
        for i in range(SCORES):
            header_sums[i] = float32(0)
        references = cuda.local.array(HALVES, float32)
        totals = cuda.local.array(HALVES, float32)
        seen = cuda.local.array(HALVES, int32)
        upto = end
        if CAUSAL:
            counted = count(
                queries, length, b, other_lens, other_capacity, is_second, second_sinks
            )
        for i in range(HALVES):
            references[i] = float32(LOWEST)
            totals[i] = float32(0)
            seen[i] = end
            if CAUSAL:
                column = uint32(first_column + uint32(8 * i) + uint32(lane >> uint32(2)))
                seen[i] = seen_by(column, (used, num_heads), counted, is_second, end)
        if CAUSAL:
            behind = uint32(first_column + uint32(COLUMNS))
            upto = seen_by_all(behind, used, counted, is_second, end)
        limits = (float32(ROOM), uint32(0))
        power = float32(FIRST_POWER if BEHIND else 1)
        wait_for_next()
        meet(team)

        stage = ring
        free = uint32(ring + uint32((STAGES - 1) * STAGE))
        while first < end:
            # Step 4: a quarter of the scores of 32 tokens; what else those of eight have
            scales = cuda.local.array(SCALES, uint32)
            partial_scores(exchange, scales, stage, fragments, shared, power, lane, own)
            if BEHIND:
                power = fit_scales(scales, power, sums, stage, lane, own)
            scores = cuda.local.array(SCORES, float32)
            own_scores(scores, stage, shared, factors, rope_factors, lane, own)
            meet(team)

            # Step 5: ask for the tile that is STAGES - 1 ahead, where the one before this was
            if asked < end:
                copy_tile(free, rows, stride_outer, pages, asked, end, page_mask, around, thread)
            commit_copies()
            asked = int32(asked + int32(STEP))
            find_pages(pages, index, asked, end, page_shift, thread)

            # Step 6: P of eight tokens
            added = cuda.local.array(HALVES, float32)
            add_partials(scores, exchange, factors, lane, own)
            mask(scores, first, seen, upto, lane, own)
            write_p(exchange, scores, scales, references, added, limits, lane, own)
            if STAGES > 2:
                wait_for_next()
            meet(team)
            states = (references, totals)
            at = (lane, own, team)
            limits = settle(
                exchange, scores, scales, states, added, limits, sums, header_sums, at
            )

            # Step 7: a quarter of P V
            accumulate(sums, header_sums, scales, stage, uint32(exchange + uint32(P)), lane, own)
            if STAGES == 2:
                wait_for_all()
                meet(team)
            first = int32(first + int32(STEP))
            free = stage
            stage = uint32(stage + uint32(STAGE))
            if stage == uint32(ring + uint32(STAGES * STAGE)):
                stage = ring
        wait_for_all()

        # Step 8: the teams, merged
        of_block = (whole, columns, inverse_of(power), lane, warp)
        combine_teams(shared, sums, header_sums, references, totals, of_block, places)
        if OVERLAPS:
            wait_for_launch()

    return mla


def _make_combine_teams(spec, write):
    """The function that merges a block's teams and writes a part, or the output."""
    TEAMS, BLOCKS, COLUMNS = spec.teams, spec.blocks, spec.block_columns
    HALVES, DIM, OUTPUT = 2 * BLOCKS, spec.latent.head_dim, spec.output_bytes
    BEHIND = spec.behind
    FOURS, COLUMN, THREADS = DIM // 4, 4 * (DIM + 4), spec.threads
    REFERENCES = TEAMS * OUTPUT
    TOTALS = REFERENCES + 4 * TEAMS * COLUMNS
    put_output, add_copies = make_put_output(spec), make_add_copies(TEAMS, OUTPUT)

    @device_function
    def combine_teams(shared, sums, header_sums, references, totals, of_block, places):
        whole, columns, inverse, lane, warp = of_block
        out, lse, part_out, part_lse = places
        team, own = uint32(warp // uint32(SLICES)), uint32(warp % uint32(SLICES))
        mine = uint32(shared + uint32(4) * uint32(lane >> uint32(2)))
        cuda.syncthreads()  # the rings are free
        for i in range(HALVES):
            total = over_quad(totals[i], add)
            at = mine + uint32(32 * i)
            if lane & uint32(3) == uint32(0):
                store_shared_f32(at + uint32(TOTALS) + uint32(4 * COLUMNS) * warp, total)
                if own == uint32(0):
                    to = at + uint32(REFERENCES) + uint32(4 * COLUMNS) * team
                    store_shared_f32(to, references[i])
        cuda.syncthreads()
        factors = cuda.local.array(HALVES, float32)
        for i in range(HALVES):
            at = mine + uint32(32 * i)
            top = references[i]
            for other in range(TEAMS):
                place = at + uint32(REFERENCES + 4 * COLUMNS * other)
                top = maximum(top, load_shared_f32(place))
            weights = float32(0)
            for other in range(TEAMS):
                reference = load_shared_f32(at + uint32(REFERENCES + 4 * COLUMNS * other))
                total = float32(0)
                for s in range(SLICES):
                    place = at + uint32(TOTALS + 4 * COLUMNS * (SLICES * other + s))
                    total += load_shared_f32(place)
                weights += total * exp2(reference - top)
            sees = weights != float32(0)
            factors[i] = exp2(references[i] - top) / weights if sees else float32(0)
            if BEHIND:
                factors[i] *= inverse
            column = uint32(uint32(8 * i) + uint32(lane >> uint32(2)))
            if warp == uint32(0) and lane & uint32(3) == uint32(0) and column < columns:
                write_lse(whole, column, top + log2(weights), sees, lse, part_lse)
        target = uint32(shared + uint32(OUTPUT) * team)
        put_output(target, sums, header_sums, factors, lane, own)
        cuda.syncthreads()
        item = uint32(cuda.threadIdx.x)
        while item < columns * uint32(FOURS):
            column = item // uint32(FOURS)
            four = item - column * uint32(FOURS)
            at = shared + column * uint32(COLUMN) + four * uint32(16)
            values = add_copies(at)
            place = uint64(item) * uint64(4)
            if not whole:
                store_global_f32x4(part_out + uint64(4) * place, values)
            else:
                write(out + uint64(2) * place, values)
            item = uint32(item + uint32(THREADS))

    return combine_teams
