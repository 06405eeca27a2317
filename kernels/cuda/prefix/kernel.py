"""Attention of many queries to one sequence's packed rows, for prefixes that sequences share.

    grid    queries of a KV head, `rows` a block  x  KV heads  x  splits of the tokens
    block   walks over its tokens by tiles of 16 to 64; a warp has 16 or 32 queries

        tile i + 3   ──cp.async──▶ packed rows, 3 stages
        tile i + 2   its largest numbers
        tile i + 1   packed rows ──▶ fp16, 2 stages (expand.py), piece by piece between the MMAs
        tile i       fp16 ──ldmatrix──▶ MMAs (tile.py)

A row is expanded once for up to 256 queries. A tile's numbers are multiplied by a power of two that
brings the largest so far close to 2**14, queries by one of their own. combine.py merges the splits.

Sources: FlashAttention-2 (https://arxiv.org/abs/2307.08691), cascade inference (combine.py).
"""

from numba import cuda, float32, int32, uint32, uint64

from ..device.combine import LN2
from ..device.fragments import over_quad
from ..device.jit import device_function
from ..device.powers import inverse_of, power_of
from ..device.ptx import (
    add,
    any_lane,
    bits_float,
    commit_copies,
    float_bits,
    largest_word,
    load_global_u32,
    load_global_u64,
    load_shared_u32,
    load_shared_u32x2,
    log2,
    maximum,
    pack_f16,
    shared_address,
    store_global_f32,
    store_global_f32x2,
    store_shared_u32,
    store_shared_u32x2,
    wait_copies,
    word_from_lane,
)
from ..device.transform import make_widen
from .expand import (
    make_copy_tile,
    make_expand,
    make_find_pages,
    make_largest,
    power_below,
)
from .spec import ROWS, STAGES
from .tile import NOTHING, make_attend_tile, make_rescale

LOWEST = -1e30  # maximum of no tokens
MOST_QUERY, MOST_POWER = 13, 60  # queries are brought to 2**13; by a factor of 2**60 at most
wait_for_all, wait_for_two = wait_copies[0], wait_copies[STAGES - 2]


def make_prefix_kernel(spec):
    K, V, PAGED = spec.k_format, spec.v_format, spec.paged
    TOKENS, THREADS = spec.tokens, spec.threads
    WARPS, BLOCKS, BLOCK_ROWS = spec.warps, spec.blocks, spec.rows
    V_DIM, K_STRIDE, V_STRIDE = V.head_dim, spec.stride(K), spec.stride(V)
    STAGE, V_STAGE = spec.stage_bytes, spec.k_bytes
    TILES, TILE, V_TILE = STAGES * STAGE, spec.tile_bytes, TOKENS * K_STRIDE
    QUERIES = TILES + 2 * TILE
    FACTS = QUERIES + spec.query_bytes
    HALVES, SUMS = 2 * BLOCKS, BLOCKS * V_DIM // 2
    BLOCK_SUMS, PAIRS = V_DIM // 2, K.head_dim // 8
    LOADED = HALVES * PAIRS
    find_pages = make_find_pages(PAGED, spec.run)
    copy_k = make_copy_tile(K, PAGED, spec.run, TOKENS, THREADS)
    copy_v = make_copy_tile(V, PAGED, spec.run, TOKENS, THREADS)
    largest_k, largest_v = make_largest(K, TOKENS, THREADS), make_largest(V, TOKENS, THREADS)
    expand_k, K_PIECES = make_expand(K, K_STRIDE, TOKENS, THREADS)
    expand_v, V_PIECES = make_expand(V, V_STRIDE, TOKENS, THREADS)
    widen = make_widen(spec.query)
    attend_tile, rescale = make_attend_tile(spec), make_rescale(spec)

    @device_function
    def note_largest(facts, stage):
        """Leave the largest numbers of a warp's share of a tile for all."""
        tid = uint32(cuda.threadIdx.x)
        k = largest_word(float_bits(largest_k(stage)))
        v = largest_word(float_bits(largest_v(stage + uint32(V_STAGE))))
        if tid & uint32(31) == uint32(0):
            store_shared_u32x2(facts + uint32(8) * (tid >> uint32(5)), (k, v))

    @device_function
    def largest_of(facts):
        warp = uint32(uint32(cuda.threadIdx.x) % uint32(WARPS))
        k, v = load_shared_u32x2(facts + uint32(8) * warp)
        return bits_float(largest_word(k)), bits_float(largest_word(v))

    # fmt: off
    def attend_prefix(q, members, out, lse, k_rows, v_rows, seq_lens, table, q_stride_batch,
                      q_stride_head, k_stride_page, k_stride_head, k_stride_row, v_stride_page,
                      v_stride_head, v_stride_row, capacity, page_shift, num_members, batch,
                      ratio, score_scale):
        # fmt: on
        shared = shared_address(cuda.shared.array(0, uint32))
        tid = uint32(cuda.threadIdx.x)
        lane = uint32(tid & uint32(31))
        warp = word_from_lane(uint32(tid >> uint32(5)), uint32(0))
        g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        kv_head = int32(cuda.blockIdx.y)
        first_row = int32(int32(cuda.blockIdx.x) * int32(BLOCK_ROWS))
        num_rows = int32(num_members * ratio)
        facts = uint32(shared + uint32(FACTS))

        # Step 1: nothing to do without queries
        wanted = uint32(0)
        for i in range(-(-BLOCK_ROWS // THREADS)):
            row = int32(first_row + int32(tid) + int32(THREADS * i))
            if place_of(members, row, num_rows, batch, ratio) >= int32(0):
                wanted = uint32(1)
        wanted = any_lane(wanted)
        if lane == uint32(0):
            store_shared_u32(facts + uint32(4) * warp, wanted)
        cuda.syncthreads()
        wanted = uint32(0)
        for i in range(WARPS):
            wanted |= load_shared_u32(facts + uint32(4 * i))
        if wanted == uint32(0):
            return

        # Step 2: the tokens of the split
        length = int32(load_global_u32(seq_lens))
        length = int32(max(min(length, capacity), int32(0)))
        splits = int32(cuda.gridDim.z)
        tokens = int32((length + splits - int32(1)) // splits)
        tokens = int32((tokens + int32(TOKENS - 1)) // int32(TOKENS) * int32(TOKENS))
        begin = int32(int32(cuda.blockIdx.z) * tokens)
        end = int32(min(int32(begin + tokens), length))
        before = int32(int32(cuda.blockIdx.z) * int32(cuda.gridDim.y) + kv_head)
        before = uint64(before) * uint64(num_rows)  # states of other splits and KV heads
        out += uint64(4 * V_DIM) * before
        lse += uint64(4) * before
        back = cuda.local.array(HALVES, float32)
        warp_row = int32(first_row + int32(warp) * int32(ROWS * BLOCKS))
        if begin < end:
            # Step 3: ask for three tiles; then the queries
            k_base = k_rows + uint64(kv_head) * k_stride_head
            v_base = v_rows + uint64(kv_head) * v_stride_head
            k_strides, v_strides = (k_stride_page, k_stride_row), (v_stride_page, v_stride_row)
            mask = int32((int32(1) << page_shift) - int32(1))
            asked = int32(begin)
            pages = find_pages(table, asked, end, page_shift)
            stage = uint32(shared)
            for _ in range(STAGES):
                copy_k(stage, k_base, k_strides, pages, asked, end, mask)
                copy_v(stage + uint32(V_STAGE), v_base, v_strides, pages, asked, end, mask)
                commit_copies()
                asked = int32(asked + int32(TOKENS))
                pages = find_pages(table, asked, end, page_shift)
                stage = uint32(stage + uint32(STAGE))
            queries = uint32(shared + uint32(QUERIES) + warp * uint32(ROWS * BLOCKS * K_STRIDE))
            words = cuda.local.array(LOADED, uint32)
            for i in range(HALVES):
                row = int32(warp_row + int32(8 * i) + int32(g))
                place = place_of(members, row, num_rows, batch, ratio)
                at = q + uint64(int32(kv_head * ratio + int32(row % ratio))) * q_stride_head
                at += uint64(max(place, int32(0))) * q_stride_batch + uint64(uint32(4) * t)
                for j in range(PAIRS):
                    words[PAIRS * i + j] = uint32(0)
                    if place >= int32(0):
                        words[PAIRS * i + j] = load_global_u32(at + uint64(16 * j))
            for i in range(HALVES):
                most = float32(0)
                for j in range(PAIRS):
                    x, y = widen(words[PAIRS * i + j])
                    most = maximum(most, maximum(abs(x), abs(y)))
                power = query_power(over_quad(most, maximum))
                here = queries + (uint32(8 * i) + g) * uint32(K_STRIDE) + uint32(4) * t
                for j in range(PAIRS):
                    x, y = widen(words[PAIRS * i + j])
                    store_shared_u32(here + uint32(16 * j), pack_f16(y * power, x * power))
                back[i] = inverse_of(power) * score_scale
            sums = cuda.local.array(SUMS, float32)
            for i in range(SUMS):
                sums[i] = float32(0)
            maxima = cuda.local.array(HALVES, float32)
            totals = cuda.local.array(HALVES, float32)
            for i in range(HALVES):
                maxima[i] = float32(LOWEST)
                totals[i] = float32(0)
            queries += (lane & uint32(15)) * uint32(K_STRIDE) + uint32(16) * (lane >> uint32(4))
            keys = uint32(shared + uint32(TILES))
            values = keys + uint32(V_TILE) + (lane & uint32(15)) * uint32(V_STRIDE)
            values += uint32(16) * (lane >> uint32(4))
            keys += ((lane & uint32(7)) + uint32(8) * (lane >> uint32(4))) * uint32(K_STRIDE)
            keys += uint32(16) * (uint32(lane >> uint32(3)) & uint32(1))

            # Step 4: the first tile to fp16
            wait_for_two()
            cuda.syncthreads()
            note_largest(facts, shared)
            note_largest(facts + uint32(8 * WARPS), shared + uint32(STAGE))
            cuda.syncthreads()
            most_k, most_v = largest_of(facts)
            power_k, power_v = power_below(most_k), power_below(most_v)
            for i in range(K_PIECES):
                expand_k(shared, shared + uint32(TILES), power_k, i)
            for i in range(V_PIECES):
                expand_v(
                    shared + uint32(V_STAGE), shared + uint32(TILES + V_TILE), power_v, i
                )
            first, noted, tile = int32(begin), uint32(8 * WARPS), uint32(0)
            free, reading = uint32(shared), uint32(shared + uint32(STAGE))

            while first < end:
                # Step 5: the tile is there, and the rows of two more; ask for those after them
                wait_for_all()
                cuda.syncthreads()
                copy_k(free, k_base, k_strides, pages, asked, end, mask)
                copy_v(free + uint32(V_STAGE), v_base, v_strides, pages, asked, end, mask)
                commit_copies()
                asked = int32(asked + int32(TOKENS))
                pages = find_pages(table, asked, end, page_shift)
                stage = reading
                free = reading
                reading = uint32(reading + uint32(STAGE))
                if reading == shared + uint32(STAGES * STAGE):
                    reading = uint32(shared)
                k, v = largest_of(facts + noted)
                noted = uint32(8 * WARPS) - noted
                note_largest(facts + noted, reading)
                most_k, most_v = maximum(most_k, k), maximum(most_v, v)
                next_k, next_v = power_below(most_k), power_below(most_v)
                here = shared + uint32(TILES) + (uint32(TILE) - tile)

                # Step 6: attention, and the next tile to fp16
                attend_tile(
                    (queries, keys + tile, values + tile, stage, here, first, end, t),
                    (inverse_of(power_k), next_k, next_v),
                    back,
                    maxima,
                    totals,
                    sums,
                )
                if next_v != power_v:  # the sums are of values times this
                    for b in range(BLOCKS):
                        change = next_v * inverse_of(power_v)
                        rescale(sums, change, change, b)
                power_k, power_v = next_k, next_v
                tile = uint32(TILE) - tile
                first = int32(first + int32(TOKENS))

            # Step 7: the state of the split
            for i in range(HALVES):
                row = int32(warp_row + int32(8 * i) + int32(g))
                total = over_quad(totals[i], add)
                if row < num_rows:
                    if t == uint32(0):
                        state = maxima[i] + log2(total)
                        store_global_f32(lse + uint64(4) * uint64(row), state * float32(LN2))
                    factor = float32(1) / (total * power_v)
                    to = out + uint64(4 * V_DIM) * uint64(row) + uint64(uint32(8) * t)
                    for j in range(V_DIM // 8):
                        k = BLOCK_SUMS * (i // 2) + 4 * j + 2 * (i % 2)
                        store_global_f32x2(
                            to + uint64(32 * j), sums[k] * factor, sums[k + 1] * factor
                        )
        else:
            for i in range(HALVES):
                row = int32(warp_row + int32(8 * i) + int32(g))
                if t == uint32(0) and row < num_rows:
                    store_global_f32(lse + uint64(4) * uint64(row), float32(NOTHING))

    return attend_prefix


@device_function
def place_of(members, row, num_rows, batch, ratio):
    """The place in the batch of the sequence that a query is of; negative: nobody's."""
    place = int32(-1)
    if row < num_rows:
        place = int32(row // ratio)
        if members != uint64(0):
            member = load_global_u64(members + uint64(8) * uint64(place))
            place = int32(member) if member < uint64(batch) else int32(-1)
    return place


@device_function
def query_power(most):
    """The power of two that brings a query's largest number to 2**13."""
    exponent = int32(float_bits(most) >> uint32(23)) - int32(126)
    return power_of(int32(min(int32(MOST_QUERY) - exponent, int32(MOST_POWER))))
