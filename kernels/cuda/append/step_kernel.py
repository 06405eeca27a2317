"""The append kernel of a decode step: new K and V, and queries, times matrices first.

    grid    groups of 8 tokens  x  KV heads  x  K, V, query heads on a KV head
    block   8 warps, a head: new rows, or queries, times its matrix (device/products.py)

        rows (x - offset) ──▶ M ──▶ float32, shared memory ──▶ quantize ──▶ row at a slot
        queries           ──▶ M ──▶ 16 bit, global memory

A block has all columns of a matrix, so a row is whole where the first warps quantize it, as in
kernel.py. A launch may overlap the one that places the tokens (slots/kernel.py): it reads rows and
matrices before its wait, and slots after it.
"""

from dataclasses import replace

from numba import cuda, float32, int32, uint32, uint64

from ..device.codes import PACK
from ..device.jit import device_function
from ..device.products import make_products, part_floats, row_words
from ..device.ptx import (
    commit_copies,
    hand_over,
    load_global_f32,
    shared_address,
    store_global_u32x2,
    store_shared_f32x4,
    store_shared_u32x4,
    wait_copies,
)
from ..device.row_copies import make_ask, make_load_old
from ..device.row_layout import ELEMENTS, PRODUCT_ROWS, SIZES, UNIT
from ..device.transform import load_offsets, make_transform, swizzle
from .feedback_kernel import make_prepare
from .feedback_step import make_ask_tiles, make_round_rows
from .kernel import WORDS, make_append_side, make_find_places, make_load_slots, make_put_row
from .spec import Side, TileLayout

wait_for_rows, wait_for_first = wait_copies[2], wait_copies[1]


def make_step_kernel(spec):
    OVERLAPS, QUERIES, ALIKE = spec.overlaps, spec.query != "", spec.are_alike
    TOKENS = spec.tokens
    append_k = _make_side(spec, spec.kinds[0], spec.rotary_dim)
    append_v = append_k if ALIKE else _make_side(spec, spec.kinds[1], 0)
    transform_queries = _make_transform_queries(spec) if QUERIES else _no_queries

    # fmt: off
    def append_step(packed, exact, evicted, cos, sin, bad, num_tokens, num_heads,
                        heads_per_block, num_slots, page_size, page_factor, page_shift, num_exact,
                        exact_len, exact_factor, exact_shift, k, v, step):
        # fmt: on
        k_matrices, v_matrices = (step[0], step[2]), (step[1], step[3])
        q, q_out, q_matrix, q_token, q_head, q_matrix_stride, ratio = step[4:]
        first = uint32(uint32(cuda.blockIdx.x) * uint32(TOKENS))
        count = min(uint32(uint32(num_tokens) - first), uint32(TOKENS))
        kv_head, kind = int32(cuda.blockIdx.y), int32(cuda.blockIdx.z)
        shared = uint32(shared_address(cuda.shared.array(0, uint32)))
        if QUERIES and kind >= int32(2):
            head = int32(int32(kv_head * ratio) + int32(kind - int32(2)))
            source = q + uint64(first) * q_token + uint64(head) * q_head
            place = uint64(first) * uint64(int32(num_heads * ratio)) + uint64(head)
            matrix = q_matrix + uint64(kv_head) * q_matrix_stride
            target = (q_out, place, uint64(int32(num_heads * ratio)), count)
            transform_queries(source, q_token, count, matrix, shared, target)
            if OVERLAPS:
                hand_over()
            return
        pages = (num_slots, page_size, page_factor, page_shift)
        seq_slots = (num_exact, exact_len, exact_factor, exact_shift)
        call = (packed, exact, evicted, cos, sin, pages, seq_slots, first, count, kv_head)
        is_v = kind == int32(1)
        if is_v and bad != uint64(0):
            bad += uint64(4)
        if ALIKE:  # half the code
            append_k(v if is_v else k, v_matrices if is_v else k_matrices, call, shared, bad)
        elif is_v:
            append_v(v, v_matrices, call, shared, bad)
        else:
            append_k(k, k_matrices, call, shared, bad)

    return append_step


@device_function
def _no_queries(source, stride, count, matrix, shared, target):
    """In place of queries where there are none."""


def _make_side(spec, kind, rotary_dim):
    """Make the function that appends the rows of a block's tokens in a head, of K or of V."""
    side, has_matrix, has_feedback = kind
    if has_feedback:
        return _make_append_feedback(spec, side, has_matrix, rotary_dim)
    return _make_append_products(spec, side) if has_matrix else _make_append(spec, side, rotary_dim)


def _make_load_slots(spec):
    """The function that gives the slots of a token, and whether it is one of the block's."""
    load_slots = make_load_slots(spec)

    @device_function
    def load_slots_of(call, own):
        first, count = call[7], call[8]
        is_token = own < count
        token = uint32(first + own) if is_token else uint32(0)
        return token, is_token, load_slots(call[0], call[1], call[2], token)

    return load_slots_of


def _make_append(spec, side, rotary_dim):
    """Make the function that appends rows as they come."""
    LANES, ROWS, ROW_WARPS, WARP_BYTES = spec.lanes, spec.rows, spec.row_warps, spec.warp_bytes
    HALF_DIM, OVERLAPS = rotary_dim // 2, spec.overlaps
    load_slots, append_side = _make_load_slots(spec), make_append_side(spec, side, rotary_dim)

    @device_function
    def append(side, matrices, call, shared, bad):
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        if OVERLAPS:
            hand_over()
        if warp >= uint32(ROW_WARPS):
            return
        part, row = uint32(lane % uint32(LANES)), uint32(lane // uint32(LANES))
        token, is_token, slots = load_slots(call, uint32(warp * uint32(ROWS)) + row)
        cos, sin, pages, seq_slots = call[3], call[4], call[5], call[6]
        if HALF_DIM:
            cos += uint64(4 * HALF_DIM) * uint64(token)
            sin += uint64(4 * HALF_DIM) * uint64(token)
        where = (token, is_token, slots, pages, seq_slots, call[9], int32(call[9] + int32(1)))
        lanes = (part, row, uint32(shared + warp * uint32(WARP_BYTES)))
        append_side(side, where, lanes, cos, sin, bad)

    return append


def _make_append_products(spec, side):
    """Make the function that multiplies rows by their head's matrix and appends them."""
    DIM, LANES, ROWS, ROW_WARPS = side.fmt.head_dim, spec.lanes, spec.rows, spec.row_warps
    EXACT, OVERLAPS, OFFSET, CLIP = spec.exact != "", spec.overlaps, side.offset, side.clip
    RESULTS, OUT_BYTES = spec.results_at(side, False), spec.out_bytes(side)
    TOKENS, OUT = spec.tokens, RESULTS + 4 * spec.tokens * DIM
    NEW, PART = row_words(DIM, spec.groups), part_floats(DIM)
    ask, put_rows, multiply = make_products(DIM, spec.source, spec.groups, _put_in_shared(DIM))
    of_float32 = replace(spec, source="fp32")
    transform = make_transform(of_float32, Side(side.fmt), 0)
    load_slots, find_places = _make_load_slots(spec), make_find_places(spec)
    load_old, put_row = make_load_old(DIM), make_put_row(spec, side)

    @device_function
    def append(side, matrices, call, shared, bad):
        first, count, head = call[7], call[8], call[9]
        x_token, x_head = side[5], side[6]
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        part, row = uint32(lane % uint32(LANES)), uint32(lane // uint32(LANES))
        own = uint32(warp * uint32(ROWS)) + row

        # Step 1: rows and the matrix are asked for; then slots, and by them the rows that leave
        source = side[0] + uint64(first) * x_token + uint64(head) * x_head
        matrix = matrices[0] + uint64(4 * DIM * DIM) * uint64(head)
        offset = side[3] + uint64(4 * DIM) * uint64(head) if OFFSET else uint64(0)
        words, columns = cuda.local.array(NEW, uint32), cuda.local.array(PART, float32)
        ask(source, x_token, count, matrix, words, columns)
        if OVERLAPS:
            hand_over()
        _, is_token, slots = load_slots(call, own)
        put_rows(words, offset, shared)
        wanted, target, exact_target = find_places(side, slots, call[5], call[6], is_token, head)
        old = cuda.local.array(WORDS, uint32)
        if EXACT:
            load_old(old, exact_target, part, wanted[2])

        # Step 2: the product
        results = uint32(shared + uint32(RESULTS))
        multiply(columns, matrix, shared, results)
        cuda.syncthreads()
        if warp >= uint32(ROW_WARPS):
            return

        # Step 3: to bytes
        x = cuda.local.array(ELEMENTS, float32)
        start = uint32(uint32(DIM) * min(own, uint32(TOKENS - 1)))
        transform(results, start, part, x, uint64(0), uint64(0), uint64(0))
        ratio = float32(1.0)
        if CLIP:
            ratio = load_global_f32(side[4] + uint64(4) * uint64(head))
        lanes = (part, row, uint32(shared + uint32(OUT) + warp * uint32(OUT_BYTES)))
        put_row(x, ratio, old, lanes, wanted, (target, exact_target), bad)

    return append


def _make_append_feedback(spec, side, has_matrix, rotary_dim):
    """Make the function that appends rows with feedback, multiplied by a matrix before or not."""
    FMT, DIM, LANES, ROWS = side.fmt, side.fmt.head_dim, spec.lanes, spec.rows
    ROW_WARPS, OVERLAPS, MATRIX = spec.row_warps, spec.overlaps, has_matrix
    OFFSET, CLIP, HALF_DIM = side.offset, side.clip, rotary_dim // 2
    layout, as_prepared = TileLayout(DIM), spec.feedback_side(side, has_matrix)
    PRODUCT, BUFFERS = layout.nbytes, spec.results_at(side, True)
    BUFFER = as_prepared.buffer_bytes
    PLACES = BUFFERS + PRODUCT_ROWS * BUFFER
    NEW, PART = row_words(DIM, 1), part_floats(DIM)
    ask, put_rows, multiply = make_products(
        DIM, "bf16" if spec.source == "fp32" else spec.source, 1, _put_in_buffer(BUFFER)
    )
    ask_row = make_ask(DIM * SIZES[spec.source], LANES, UNIT, False)
    ask_tiles, round_rows = make_ask_tiles(layout), make_round_rows(layout, FMT, BUFFER)
    load_slots, find_places = _make_load_slots(spec), make_find_places(spec)
    prepare = make_prepare(as_prepared)

    @device_function
    def append(side, matrices, call, shared, bad):
        first, count, head = call[7], call[8], call[9]
        x_token, x_head = side[5], side[6]
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        part, row = uint32(lane % uint32(LANES)), uint32(lane // uint32(LANES))
        own = uint32(warp * uint32(ROWS)) + row
        has_rows = warp < uint32(ROW_WARPS)
        tiles, buffers = shared, uint32(shared + uint32(BUFFERS))
        buffer = uint32(buffers + uint32(BUFFER) * own)
        source = side[0] + uint64(first) * x_token + uint64(head) * x_head
        offset = side[3] + uint64(4 * DIM) * uint64(head) if OFFSET else uint64(0)

        # Step 1: rows and matrices are asked for, then slots, and rows multiplied
        words, columns = cuda.local.array(NEW, uint32), cuda.local.array(PART, float32)
        matrix = matrices[0] + uint64(4 * DIM * DIM) * uint64(head)
        if MATRIX:
            ask(source, x_token, count, matrix, words, columns)
        elif has_rows:
            is_row = own < count
            place = uint64(own) * x_token if is_row else uint64(0)
            ask_row(buffer, uint32(0), source + place, part, is_row)
        commit_copies()
        ask_tiles(tiles, matrices[1] + uint64(4 * DIM * DIM) * uint64(head), thread)
        # a product has subtracted the offset
        offsets = cuda.local.array(ELEMENTS, float32)
        own_part = min(part, uint32(DIM // ELEMENTS - 1))
        load_offsets(uint64(0) if MATRIX else offset, own_part, offsets)
        ratio = float32(1.0)
        if CLIP:
            ratio = load_global_f32(side[4] + uint64(4) * uint64(head))
        if OVERLAPS:
            hand_over()
        token, is_token, slots = load_slots(call, own)
        if MATRIX:
            product = uint32(shared + uint32(PRODUCT))
            put_rows(words, offset, product)
            multiply(columns, matrix, product, buffers)
            cuda.syncthreads()

        # Step 2: they are made ready, as in feedback_kernel.py
        if has_rows:
            wait_for_rows()
            cuda.syncwarp()
            wanted, target, exact_target = find_places(
                side, slots, call[5], call[6], is_token, head
            )
            angles = uint64(4 * HALF_DIM) * uint64(token)
            how = (offsets, call[3] + angles, call[4] + angles, ratio)
            prepare((buffer, part), (target, exact_target, *wanted), how, bad)
            if part == uint32(0):
                low, high = uint32(target & uint64(0xFFFFFFFF)), uint32(target >> uint64(32))
                is_written = uint32(1) if wanted[0] else uint32(0)
                place = uint32(shared + uint32(PLACES) + uint32(16) * own)
                store_shared_u32x4(place, (low, high, is_written, uint32(0)))

        # Step 3: and rounded
        wait_for_first()
        cuda.syncthreads()
        round_rows(tiles, buffers, uint32(shared + uint32(PLACES)))

    return append


def _put_in_buffer(buffer_bytes):
    """The function that puts elements of a product into a row's buffer."""

    @device_function
    def put(row, column, values, is_any, buffers):
        if is_any:
            place = uint32(buffers + uint32(buffer_bytes) * row)
            store_shared_f32x4(place + uint32(4) * column, values)

    return put


def _put_in_shared(head_dim):
    """The function that puts elements of a product where transform.py reads them as float32."""

    @device_function
    def put(row, column, values, is_any, results):
        if is_any:
            unit = uint32(uint32(uint32(head_dim) * row + column) >> uint32(2))
            store_shared_f32x4(results + uint32(UNIT) * swizzle(unit), values)

    return put


def _make_transform_queries(spec):
    """Make the function that multiplies queries by a matrix and writes them in 16 bit."""
    DIM, pack = spec.k.fmt.head_dim, PACK[spec.query]
    NEW, PART = row_words(DIM, spec.groups), part_floats(DIM)

    @device_function
    def put(row, column, values, is_any, target):
        q_out, first, stride, count = target
        if is_any and row < count:
            place = (first + uint64(row) * stride) * uint64(DIM) + uint64(column)
            words = (pack(values[1], values[0]), pack(values[3], values[2]))
            store_global_u32x2(q_out + uint64(2) * place, words[0], words[1])

    ask, put_rows, multiply = make_products(DIM, spec.query, spec.groups, put)

    @device_function
    def transform_queries(source, stride, count, matrix, shared, target):
        words, columns = cuda.local.array(NEW, uint32), cuda.local.array(PART, float32)
        ask(source, stride, count, matrix, words, columns)
        put_rows(words, uint64(0), shared)
        multiply(columns, matrix, shared, target)

    return transform_queries
