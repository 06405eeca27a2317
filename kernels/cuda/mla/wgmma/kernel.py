"""Decode attention of MLA for many heads, on Hopper: tiles of 64 columns x 64 tokens by wgmma.

    grid     64 columns  x  sequences  x  splits of the tokens

    rows     a warpgroup     packed rows ──▶ 16-bit numbers, in two stages         (rows.py)
    scores   a warpgroup     q·K of a tile, softmax, P ──▶ shared memory           (scores.py)
    values   2 warpgroups    P V of a tile, a half of the latent elements each     (values.py)

             FREE           FULL             READY           FREE
    values ────────▶ rows ────────▶ scores ─────────▶ values ────────▶ ...    barriers of a stage

Many heads are bound by products. Warpgroups work on three tiles at a time, with as many registers
as each part needs. Arguments, and what a block works on, are as in mma/kernel.py.

Sources: FlashAttention-3 (https://arxiv.org/abs/2407.08608), FlashMLA
(https://github.com/deepseek-ai/FlashMLA).
"""

from numba import cuda, int32, uint32, uint64

from ...device.combine import make_write
from ...device.ptx import (
    begin_next_launch,
    fence_shared,
    shared_address,
    word_from_lane,
)
from ...device.warpgroup import give_registers, take_registers
from ..work import (
    count,
    make_find_places,
    make_find_rows,
    make_find_tokens,
    make_write_nothing,
    seen_by,
    seen_by_all,
)
from .queries import make_load_queries
from .rows import make_put_rows
from .scores import make_score
from .spec import COLUMNS, TOKENS
from .values import make_add_values


def make_wide_kernel(spec):
    CAUSAL, OVERLAPPED = spec.causal, spec.overlapped
    find_tokens, find_rows = make_find_tokens(spec, TOKENS), make_find_rows(spec)
    find_places = make_find_places(spec)
    load_queries, put_rows = make_load_queries(spec), make_put_rows(spec)
    score, add_values = make_score(spec), make_add_values(spec)
    write_nothing = make_write_nothing(spec, make_write(spec.query))
    keep_for_rows, keep_for_scores = map(give_registers, spec.shares[:2])
    take_for_values = take_registers(spec.shares[2])

    # fmt: off
    def wide(q_latent, q_rope, out, lse, part_out, part_lse, rows, seq_lens, index, seq_slots,
             other_lens, q_lens, latent_stride_batch, latent_stride_query, latent_stride_head,
             rope_stride_batch, rope_stride_query, rope_stride_head, stride_outer, capacity, sinks,
             ring_len, page_shift, table_stride, other_capacity, is_second, second_sinks,
             first_part, parts, num_heads, q_len, score_scale):
        # fmt: on
        if OVERLAPPED:
            begin_next_launch()
        tid = uint32(cuda.threadIdx.x)
        lane = uint32(tid & uint32(31))
        # from a lane: ptxas has to see that a warp does not diverge
        group = word_from_lane(uint32(tid >> uint32(7)), uint32(0))
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
            return

        # Step 2: the queries
        shared = shared_address(cuda.shared.array(0, uint32))
        used = min(uint32(queries * num_heads), all_columns)
        load_queries(shared, (
            q_latent + uint64(b) * latent_stride_batch, latent_stride_query, latent_stride_head,
            q_rope + uint64(b) * rope_stride_batch, rope_stride_query, rope_stride_head,
            first_column, used, uint32(num_heads), score_scale,
        ))
        fence_shared()
        cuda.syncthreads()

        # Step 3: the tiles, by each warpgroup its part of the work
        if group == uint32(0):
            keep_for_rows()
            steps, of_ring = (stride_outer, table_stride), (sinks, ring_len, capacity)
            rows, index, around = find_rows(rows, index, seq_slots, b, steps, of_ring)
            page_mask = int32((int32(1) << page_shift) - int32(1))
            last = int32(end - int32(1))
            source = (rows, last, stride_outer, around, page_mask, index, page_shift)
            tiles = uint32(uint32(int32(end - begin) + int32(TOKENS - 1)) // uint32(TOKENS))
            put_rows(shared, begin, tiles, source)
        elif group == uint32(1):
            keep_for_scores()
            seen = cuda.local.array(2, int32)
            upto = end
            if CAUSAL:
                counted = count(
                    queries, length, b, other_lens, other_capacity, is_second, second_sinks
                )
                behind = uint32(first_column + uint32(COLUMNS))
                upto = seen_by_all(behind, used, counted, is_second, end)
            warp = uint32(uint32(tid >> uint32(5)) & uint32(3))
            for h in range(2):
                seen[h] = end
                if CAUSAL:
                    column = uint32(first_column + uint32(16) * warp + uint32(8 * h))
                    column = uint32(column + uint32(lane >> uint32(2)))
                    seen[h] = seen_by(column, (used, num_heads), counted, is_second, end)
            score(shared, begin, end, seen, upto, (whole, columns, places[1], places[3]))
        else:
            take_for_values()
            half = uint32(group - uint32(2))
            add_values(shared, begin, end, half, (whole, columns, places[0], places[2]))

    return wide
