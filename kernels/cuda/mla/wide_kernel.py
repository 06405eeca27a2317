"""Decode attention of MLA for many heads, on Hopper: tiles of 64 columns x 64 tokens by wgmma.

    grid     64 columns  x  sequences  x  splits of the tokens

    rows     a warpgroup     packed rows ──▶ 16-bit numbers, in two stages         (wide_rows.py)
    scores   a warpgroup     q·K of a tile, softmax, P ──▶ shared memory           (wide_scores.py)
    values   2 warpgroups    P V of a tile, a half of the latent elements each     (wide_values.py)

             FREE           FULL             READY           FREE
    values ────────▶ rows ────────▶ scores ─────────▶ values ────────▶ ...    barriers of a stage

Many heads are bound by products, not by bytes: 64 columns are the least that wgmma takes. While the
values work on a tile, the scores of the next one are under way, and rows of the one after that. A
warpgroup takes as many registers of the block as its part needs.

What a block works on is as in kernel.py, which has fewer columns in a block. So are its arguments.

Source: warpgroups with parts of their own are FlashAttention-3's (https://arxiv.org/abs/2407.08608),
the output cut into halves is FlashMLA's (https://github.com/deepseek-ai/FlashMLA).
"""

from numba import cuda, int32, uint32, uint64

from ..decode.combine import make_write
from ..device.ptx import (
    begin_next_launch,
    fence_shared,
    load_global_u32,
    shared_address,
    word_from_lane,
)
from ..device.warpgroup import give_registers, take_registers
from .kernel import count, load_length, make_write_nothing, rows_before
from .wide_queries import make_load_queries
from .wide_rows import make_put_rows
from .wide_scores import make_score
from .wide_spec import COLUMNS, TOKENS
from .wide_values import make_add_values


def make_wide_kernel(spec):
    """Make the kernel, a Python function that numba compiles with `spec.signature()`."""
    DIM, CAUSAL, PLACE, OVERLAPPED = spec.latent.head_dim, spec.causal, spec.place, spec.overlapped
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
        splits = uint32(cuda.gridDim.z)

        # Step 1: the tokens of this block
        length = load_length(seq_lens, b, capacity)
        queries = q_len
        if CAUSAL and q_lens != uint64(0):
            queries = load_length(q_lens, b, q_len)
        steps = uint32(uint32(length + int32(TOKENS - 1)) // uint32(TOKENS))
        per_split = uint32(uint32(steps + splits - uint32(1)) // splits)
        begin = int32(uint32(split * per_split) * uint32(TOKENS))
        end = int32(min(int32(begin + int32(per_split * uint32(TOKENS))), length))
        end = int32(word_from_lane(uint32(end), uint32(0)))
        first_column = uint32(uint32(block) * uint32(COLUMNS))
        all_columns = uint32(q_len * num_heads)
        columns = min(uint32(COLUMNS), uint32(all_columns - first_column))
        row = uint64(b) * uint64(all_columns) + uint64(first_column)
        out += uint64(2 * DIM) * row
        if lse != uint64(0):
            lse += uint64(4) * row
        all_rows = uint64(uint32(cuda.gridDim.y)) * uint64(all_columns)
        place = row + all_rows * uint64(uint32(uint32(first_part) + split))
        part_out += uint64(4 * DIM) * place
        part_lse += uint64(4) * place
        whole = parts == int32(1)
        if begin >= end:
            write_nothing(whole, columns, (out, lse, part_out, part_lse))
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
            around = (int32(0), sinks, ring_len, capacity)
            if PLACE == "paged":
                index += uint64(4) * uint64(b) * uint64(table_stride)
            elif PLACE == "slots":
                seq_slot = load_global_u32(seq_slots + uint64(4) * uint64(b))
                rows += uint64(seq_slot) * stride_outer
            else:
                rows += uint64(b) * stride_outer
            if PLACE == "ring" or (PLACE == "slots" and index != uint64(0)):
                start = int32(load_global_u32(index + uint64(4) * uint64(b)))
                around = (start, sinks, ring_len, capacity)
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
                counts = (queries, length, int32(0), int32(0))
                if other_lens != uint64(0):
                    other = load_length(other_lens, b, other_capacity)
                    counts = count(length, other, is_second, second_sinks, queries)
                before = int32(int32(counts[1] + counts[2]) - queries)
                upto = int32(min(rows_before(int32(before + int32(1)), counts, is_second), end))
                if uint32(first_column + uint32(COLUMNS)) > used:
                    upto = int32(0)
            warp = uint32(uint32(tid >> uint32(5)) & uint32(3))
            for h in range(2):
                seen[h] = end
                if CAUSAL:
                    column = uint32(first_column + uint32(16) * warp + uint32(8 * h))
                    column = uint32(column + uint32(lane >> uint32(2)))
                    query = int32(column // uint32(num_heads))
                    seen[h] = int32(0)
                    if column < used:
                        after = int32(int32(before + query) + int32(1))
                        seen[h] = int32(min(rows_before(after, counts, is_second), end))
            score(shared, begin, end, seen, upto, (whole, columns, lse, part_lse))
        else:
            take_for_values()
            half = uint32(group - uint32(2))
            add_values(shared, begin, end, half, (whole, columns, out, part_out))

    return wide
