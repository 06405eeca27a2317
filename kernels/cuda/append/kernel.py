"""The append kernel: new K and V, transformed and quantized, to their slots, in one launch.

    grid    groups of tokens  x  groups of heads  x  K, V
    block   4 warps; a warp has 32 / lanes tokens, `lanes` lanes each, and walks over the heads
    token   its slots are loaded and taken apart once; per head

        elements ──cp.async──▶ ring ──▶ float32 in registers ──▶ quantize ──▶ out ──▶ row at a slot
                            (4 stages)  RoPE, offset                    (shared memory)

A token with an exact slot is written there, and the row that leaves is quantized. Otherwise the
token is rounded to 16 bit and quantized. So at most one row a token is quantized. A row that leaves
as NaN was counted when it came. The reference is kvquant/ops/append.py, bit for bit.
"""

from numba import cuda, float32, int32, uint32, uint64

from kvquant.rows.format import RowFormat

from ..device.jit import device_function
from ..device.ptx import (
    any_lane,
    commit_copies,
    hand_over,
    load_global_f32,
    load_written_u64,
    shared_address,
    wait_copies,
)
from ..device.quantize import make_quantize, make_round, put_words
from ..device.row_copies import (
    NANS,
    count_bad,
    make_ask,
    make_load_old,
    make_store,
    page_and_offset,
    was_counted,
)
from ..device.row_layout import ELEMENTS, SIZES, STAGES, UNIT, prefix_of, staged_bytes, unit_of
from ..device.transform import make_transform, make_widen

WORDS = ELEMENTS // 2  # of 16-bit elements of a lane
wait_for_oldest = wait_copies[STAGES - 2]


def make_append_kernel(spec):
    LANES, ROWS, TOKENS, WARP_BYTES = spec.lanes, spec.rows, spec.tokens, spec.warp_bytes
    HALF_DIM, OVERLAPS, load_slots = spec.rotary_dim // 2, spec.overlaps, make_load_slots(spec)
    ALIKE = spec.k == spec.v and not spec.rotary_dim
    append_k = make_append_side(spec, spec.k, spec.rotary_dim)
    append_v = append_k if ALIKE else make_append_side(spec, spec.v, 0)

    # fmt: off
    def append(packed, exact, evicted, cos, sin, bad, num_tokens, num_heads, heads_per_block,
               num_slots, page_size, page_factor, page_shift, num_exact, exact_len, exact_factor,
               exact_shift, k, v):
        # fmt: on
        # Step 1: the token of a lane
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        part, row = uint32(lane % uint32(LANES)), uint32(lane // uint32(LANES))
        token = uint32(uint32(cuda.blockIdx.x) * uint32(TOKENS))
        token = uint32(token + uint32(warp * uint32(ROWS)) + row)
        is_token = token < uint32(num_tokens)
        token = token if is_token else uint32(0)

        # Step 2: its slots, which are on their way while the first elements are asked for
        if OVERLAPS:
            hand_over()
        slots = load_slots(packed, exact, evicted, token)
        pages = (num_slots, page_size, page_factor, page_shift)
        seq_slots = (num_exact, exact_len, exact_factor, exact_shift)

        # Step 3: its rows, head by head
        first = int32(int32(cuda.blockIdx.y) * heads_per_block)
        last = int32(min(int32(first + heads_per_block), num_heads))
        shared = uint32(shared_address(cuda.shared.array(0, uint32)) + warp * uint32(WARP_BYTES))
        if HALF_DIM:
            cos += uint64(4 * HALF_DIM) * uint64(token)
            sin += uint64(4 * HALF_DIM) * uint64(token)
        lanes = (part, row, shared)
        where = (token, is_token, slots, pages, seq_slots, first, last)
        is_v = cuda.blockIdx.z == 1
        if is_v and bad != uint64(0):
            bad += uint64(4)
        if ALIKE:  # half the code
            append_k(v if is_v else k, where, lanes, cos, sin, bad)
        elif is_v:
            append_v(v, where, lanes, cos, sin, bad)
        else:
            append_k(k, where, lanes, cos, sin, bad)

    return append


def make_append_side(spec, side, rotary_dim):
    """Make the function that appends the rows of a token in some heads, of K or of V."""
    FMT, LANES, EXACT = side.fmt, spec.lanes, spec.exact != ""
    HEAD_DIM, STAGE_BYTES = FMT.head_dim, spec.stage_bytes(side)
    ROW_UNITS, OUT = HEAD_DIM * SIZES[spec.source] // UNIT, STAGES * STAGE_BYTES
    OFFSET, CLIP = side.offset, side.clip
    ask = make_ask(HEAD_DIM * SIZES[spec.source], LANES, UNIT, True)
    transform, load_old = make_transform(spec, side, rotary_dim), make_load_old(HEAD_DIM)
    find_places, put_row = make_find_places(spec), make_put_row(spec, side)

    @device_function
    def append_side(side, where, lanes, cos, sin, bad):
        source, _, _, offset, clip = side[:5]
        x_token, x_head, _, head_stride, _, _, exact_head, _ = side[5:]
        token, is_token, slots, pages, seq_slots, first, last = where
        part, row, shared = lanes

        # Step 1: the first elements are asked for
        source += uint64(token) * x_token + uint64(first) * x_head
        first_unit = uint32(uint32(ROW_UNITS) * row)
        first_element = uint32(uint32(HEAD_DIM) * row)
        asked = int32(first)
        for stage in range(STAGES - 1):
            if asked < last:
                ask(shared + uint32(stage * STAGE_BYTES), first_unit, source, part, is_token)
            commit_copies()
            source += x_head
            asked = int32(asked + int32(1))

        # Step 2: where the rows go
        wanted, target, exact_target = find_places(side, slots, pages, seq_slots, is_token, first)
        offset += uint64(4 * HEAD_DIM) * uint64(first)
        clip += uint64(4) * uint64(first)
        reading, writing = uint32(0), uint32((STAGES - 1) * STAGE_BYTES)

        for _ in range(first, last):
            # Step 3: elements that have come; the stage before is free for those to come
            old = cuda.local.array(WORDS, uint32)
            if EXACT:
                load_old(old, exact_target, part, wanted[2])
            wait_for_oldest()
            cuda.syncwarp()
            if asked < last:
                ask(shared + writing, first_unit, source, part, is_token)
            commit_copies()
            source += x_head
            asked = int32(asked + int32(1))

            # Step 4: to float32, transformed
            x = cuda.local.array(ELEMENTS, float32)
            transform(shared + reading, first_element, part, x, offset, cos, sin)

            # Step 5: to bytes
            ratio = load_global_f32(clip) if CLIP else float32(1.0)
            out = (part, row, shared + uint32(OUT))
            put_row(x, ratio, old, out, wanted, (target, exact_target), bad)

            target += head_stride
            if EXACT:
                exact_target += exact_head
            if OFFSET:
                offset += uint64(4 * HEAD_DIM)
            if CLIP:
                clip += uint64(4)
            writing = reading
            reading = uint32(reading + uint32(STAGE_BYTES))
            if reading == uint32(STAGES * STAGE_BYTES):
                reading = uint32(0)

    return append_side


def make_load_slots(spec):
    """The function that loads the slots of a token: packed, exact, evicted."""
    EXACT = spec.exact != ""

    @device_function
    def load_slots(packed, exact, evicted, token):
        place = uint64(8) * uint64(token)
        packed_slot = load_written_u64(packed + place)
        exact_slot, evicted_slot = packed_slot, packed_slot
        if EXACT:
            exact_slot = load_written_u64(exact + place)
            evicted_slot = load_written_u64(evicted + place)
        return packed_slot, exact_slot, evicted_slot

    return load_slots


def make_find_places(spec):
    """The function to whether a token has a row to be packed, one in 16 bit, and one that leaves
    for it; and where they go in a head. Negative slots are larger than any."""
    EXACT = spec.exact != ""

    @device_function
    def find_places(side, slots, pages, seq_slots, is_token, head):
        rows, exact_rows = side[1], side[2]
        page_stride, head_stride, row_stride, seq_slot_stride, exact_head, exact_row = side[7:]
        packed_slot, exact_slot, evicted_slot = slots
        to_exact = EXACT and is_token and exact_slot < uint64(seq_slots[0])
        leaves = to_exact and evicted_slot < uint64(pages[0])
        if leaves:
            packed_slot = evicted_slot
        to_packed = is_token and packed_slot < uint64(pages[0])
        page, place = page_and_offset(packed_slot, to_packed, pages)
        target = rows + uint64(page) * page_stride + uint64(place) * row_stride
        target += uint64(head) * head_stride
        seq_slot, place = page_and_offset(exact_slot, to_exact, seq_slots)
        exact_target = exact_rows + uint64(seq_slot) * seq_slot_stride + uint64(place) * exact_row
        exact_target += uint64(head) * exact_head
        return (to_packed, to_exact, leaves), target, exact_target

    return find_places


def make_put_row(spec, side):
    """The function that writes a row that is in float32, and the one that leaves for it.

    Arguments: a lane's 16 elements, the clip ratio, the words of the 16-bit row there; the lane's
    part, the row, where the warp's rows stand; whether there is a row to pack, one in 16 bit, one
    that leaves, and where they go.
    """
    FMT, LANES, EXACT = side.fmt, spec.lanes, spec.exact != ""
    HEAD_DIM, OUT_BYTES = FMT.head_dim, staged_bytes(FMT)
    HEADER, EXACT_BYTES = prefix_of(FMT) - FMT.header_bytes, 2 * HEAD_DIM
    ACTIVE, NAN = HEAD_DIM // ELEMENTS, NANS[spec.exact or "bf16"]
    round_to_16_bits = make_round(RowFormat(spec.exact or "bf16", 1, HEAD_DIM), LANES)
    quantize = make_quantize(FMT, LANES, spec.converts_fp8, side.clip)
    store = make_store(FMT.row_bytes, LANES, unit_of(FMT), False)
    store_exact = make_store(EXACT_BYTES, LANES, UNIT, False)
    widen = make_widen(spec.exact or "bf16")

    @device_function
    def put_packed(x, ratio, lanes, to_packed, target, counts, bad):
        part, row, out = lanes
        out += uint32(OUT_BYTES) * row
        holds = quantize(x, ratio, part, out)
        cuda.syncwarp()
        store(out + uint32(HEADER), uint32(0), target, part, to_packed)
        count_bad(bad, part, to_packed and counts and not holds)

    @device_function
    def put_exact(x, ratio, old, lanes, wanted, targets, bad):
        """x to the exact slot, or rounded; then x is what has to be quantized."""
        to_packed, to_exact, leaves = wanted
        part, row, out = lanes
        words = cuda.local.array(WORDS, uint32)
        holds = round_to_16_bits(x, words, part)
        if any_lane(uint32(1) if to_exact else uint32(0)):
            out += uint32(EXACT_BYTES) * row
            if part < uint32(ACTIVE):
                put_words(words, part, out)
            cuda.syncwarp()
            store_exact(out, uint32(0), targets[1], part, to_exact)
            # else its packed row is NaN, too, and counts
            count_bad(bad, part, to_exact and not holds and (leaves or not to_packed))
            cuda.syncwarp()
        if any_lane(uint32(1) if to_packed else uint32(0)):
            for i in range(WORDS):
                word = old[i] if leaves else words[i]
                x[2 * i], x[2 * i + 1] = widen(word)
            counts = not (leaves and was_counted(old, NAN))
            put_packed(x, ratio, lanes, to_packed, targets[0], counts, bad)

    @device_function
    def put_row(x, ratio, old, lanes, wanted, targets, bad):
        if EXACT:
            put_exact(x, ratio, old, lanes, wanted, targets, bad)
        else:
            put_packed(x, ratio, lanes, wanted[0], targets[0], True, bad)

    return put_row
