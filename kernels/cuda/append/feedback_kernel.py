"""The feedback kernel: new K and V, transformed and rounded with feedback, to their slots.

    grid    groups of tokens  x  heads  x  sides
    warp    32 / share tokens of a head, in two passes:

    1  as in the append kernel, `lanes` lanes a row
        elements ──cp.async──▶ buffer ──▶ RoPE, offset ──▶ 16-bit row at an exact slot
                                          the row to be packed   ──▶ scales and shifts, buffer
    2  `share` lanes a row: codes, tile by tile (feedback_rounding.py)

The reference is kvquant/ops/append.py and kvquant/rows/quantize.py, bit for bit.
"""

from numba import cuda, float32, uint32, uint64

from kvquant.rows.format import RowFormat

from ..device.jit import device_function
from ..device.ptx import (
    commit_copies,
    load_global_f32,
    shared_address,
    store_global_u32,
    store_global_u32x4,
    store_shared_f32x4,
    store_shared_u32,
    subtract,
    wait_copies,
)
from ..device.quantize import NAN_WORDS, make_measure, make_parameters, make_round, piece_of
from ..device.row_copies import (
    NANS,
    count_bad,
    make_ask,
    make_load_old,
    was_counted,
)
from ..device.row_layout import ELEMENTS, SIZES, UNIT
from ..device.transform import load_offsets, make_transform, make_widen
from .feedback_rounding import make_ask_tile, make_round_row
from .kernel import make_find_places, make_load_slots
from .spec import TILES, Side

wait_for_older = wait_copies[1]


def make_feedback_kernel(spec):
    sides = spec.sides
    ALIKE = sides[0] == sides[-1]
    append_k = _make_append_side(sides[0])
    append_v = append_k if ALIKE else _make_append_side(sides[-1])

    # fmt: off
    def append_with_feedback(packed, exact, evicted, cos, sin, bad, num_tokens, num_heads,
                             heads_per_block, num_slots, page_size, page_factor, page_shift,
                             num_exact, exact_len, exact_factor, exact_shift, k, v, feedback):
        # fmt: on
        pages = (num_slots, page_size, page_factor, page_shift)
        seq_slots = (num_exact, exact_len, exact_factor, exact_shift)
        is_v = cuda.blockIdx.z == 1
        if is_v and bad != uint64(0):
            bad += uint64(4)
        call = (packed, exact, evicted, cos, sin, bad, uint32(num_tokens), pages, seq_slots)
        of_k, of_v = feedback
        if ALIKE:  # half the code
            append_k(v if is_v else k, of_v if is_v else of_k, call)
        elif is_v:
            append_v(v, of_v, call)
        else:
            append_k(k, of_k, call)

    return append_with_feedback


def _make_append_side(spec):
    """Make the function that appends the rows of a block's tokens in a head, of K or of V."""
    FMT, SHARE, ROWS, BLOCK_ROWS = spec.fmt, spec.share, spec.rows, spec.block_rows
    HEAD_DIM, STAGE_BYTES, WARP_BYTES = FMT.head_dim, spec.stage_bytes, spec.warp_bytes
    LANES, BUFFER, CLIP = spec.lanes, spec.buffer_bytes, spec.clip
    ACTIVE = HEAD_DIM // ELEMENTS
    HALF_DIM = spec.rotary_dim // 2
    STEPS, TOGETHER = ROWS * LANES // 32, 32 // LANES
    ask_row = make_ask(HEAD_DIM * SIZES[spec.source], LANES, UNIT, False)
    ask_tile, prepare, round_row = make_ask_tile(spec), make_prepare(spec), make_round_row(spec)
    load_slots, find_places = make_load_slots(spec), make_find_places(spec)

    @device_function
    def append_side(side, feedback, call):
        x, _, _, offset, clip, x_token, x_head = side[:7]
        packed, exact, evicted, cos, sin, bad, num_tokens, pages, seq_slots = call

        # Step 1: what is the head's
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        head = uint32(cuda.blockIdx.y)
        x += uint64(head) * x_head
        if offset != uint64(0):
            offset += uint64(4 * HEAD_DIM) * uint64(head)
        feedback += uint64(4 * HEAD_DIM * HEAD_DIM) * uint64(head)
        ratio = load_global_f32(clip + uint64(4) * uint64(head)) if CLIP else float32(1.0)
        shared = uint32(shared_address(cuda.shared.array(0, uint32)))
        buffers = uint32(shared + uint32(TILES * STAGE_BYTES)) + uint32(WARP_BYTES) * warp
        first = uint32(uint32(cuda.blockIdx.x) * uint32(BLOCK_ROWS) + uint32(warp * uint32(ROWS)))

        # Step 2: all rows are asked for, the first tile and the offset
        part, own = uint32(lane % uint32(LANES)), uint32(lane // uint32(LANES))
        for step in range(STEPS):
            row = uint32(uint32(step * TOGETHER) + own)
            token = uint32(first + row)
            is_token = token < uint32(num_tokens)
            source = x + (uint64(token) if is_token else uint64(0)) * x_token
            ask_row(buffers + uint32(BUFFER) * row, uint32(0), source, part, is_token)
        commit_copies()
        ask_tile(shared, feedback, thread, uint32(0))
        offsets = cuda.local.array(ELEMENTS, float32)
        load_offsets(offset, min(part, uint32(ACTIVE - 1)), offsets)

        # Step 3: they are made ready
        wait_for_older()
        cuda.syncwarp()
        for step in range(STEPS):
            row = uint32(uint32(step * TOGETHER) + own)
            token = uint32(first + row)
            is_token = token < uint32(num_tokens)
            token = token if is_token else uint32(0)
            slots = load_slots(packed, exact, evicted, token)
            wanted, target, exact_target = find_places(
                side, slots, pages, seq_slots, is_token, head
            )
            angles = uint64(4 * HALF_DIM) * uint64(token)
            prepare(
                (buffers + uint32(BUFFER) * row, part),
                (target, exact_target, *wanted),
                (offsets, cos + angles, sin + angles, ratio),
                bad,
            )
        cuda.syncwarp()

        # Step 4: the row of a lane is rounded
        part, row = uint32(lane % uint32(SHARE)), uint32(lane // uint32(SHARE))
        token = uint32(first + row)
        is_token = token < uint32(num_tokens)
        token = token if is_token else uint32(0)
        slots = load_slots(packed, exact, evicted, token)
        wanted, target, _ = find_places(side, slots, pages, seq_slots, is_token, head)
        round_row(shared, buffers + uint32(BUFFER) * row, feedback, thread, part, target, wanted[0])

    return append_side


def make_prepare(spec):
    """The function that transforms a row in its buffer, writes it in 16 bit to an exact slot, and
    leaves what is to be packed. Offsets are those of load_offsets, which comes before any wait."""
    FMT, LANES, EXACT = spec.fmt, spec.lanes, spec.exact != ""
    HEAD_DIM, SIZE, PIECE, NAN = FMT.head_dim, FMT.group_size, piece_of(FMT), NAN_WORDS["fp16"]
    ACTIVE, WORDS, PIECES = HEAD_DIM // ELEMENTS, ELEMENTS // 2, ELEMENTS // PIECE
    OLD_NAN = NANS[spec.exact or "bf16"]
    transform = make_transform(spec, Side(FMT), spec.rotary_dim, swizzled=False)
    measure, parameters = make_measure(FMT, LANES, spec.clip), make_parameters(FMT)
    round_to_16_bits = make_round(RowFormat(spec.exact or "bf16", 1, HEAD_DIM), LANES)
    load_old, widen = make_load_old(HEAD_DIM), make_widen(spec.exact or "bf16")

    @device_function
    def put_exact(words, part, exact_target, to_exact):
        if to_exact and part < uint32(ACTIVE):
            place = exact_target + uint64(uint32(32) * part)
            store_global_u32x4(place, (words[0], words[1], words[2], words[3]))
            store_global_u32x4(place + uint64(16), (words[4], words[5], words[6], words[7]))

    @device_function
    def prepare(row, targets, how, bad):
        buffer, part = row
        target, exact_target, to_packed, to_exact, leaves = targets
        offsets, cos, sin, ratio = how
        old = cuda.local.array(WORDS, uint32)
        if EXACT:
            load_old(old, exact_target, part, leaves)
        counts = to_packed
        if EXACT:  # a row that leaves as NaN was counted when it came
            counts = to_packed and not (leaves and was_counted(old, OLD_NAN))
        x = cuda.local.array(ELEMENTS, float32)
        transform(buffer, uint32(0), part, x, uint64(0), cos, sin)
        for i in range(ELEMENTS):
            x[i] = subtract(x[i], offsets[i])
        cuda.syncwarp()  # RoPE reads what other lanes overwrite
        if EXACT:
            words = cuda.local.array(WORDS, uint32)
            holds = round_to_16_bits(x, words, part)
            put_exact(words, part, exact_target, to_exact)
            # else its packed row is NaN, too, and counts
            count_bad(bad, part, to_exact and not holds and (leaves or not to_packed))
            for i in range(WORDS):
                word = old[i] if leaves else words[i]
                x[2 * i], x[2 * i + 1] = widen(word)
        lows = cuda.local.array(PIECES, float32)
        highs = cuda.local.array(PIECES, float32)
        holds = measure(x, ratio, part, lows, highs)
        count_bad(bad, part, counts and not holds)
        if part < uint32(ACTIVE):
            for i in range(ELEMENTS // 4):
                four = (x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3])
                store_shared_f32x4(buffer + uint32(64) * part + uint32(16 * i), four)
            for piece in range(PIECES):
                word, _, _ = parameters(lows[piece], highs[piece])
                word = word if holds else uint32(NAN)
                first = uint32(uint32(ELEMENTS) * part + uint32(piece * PIECE))
                if first % uint32(SIZE) == uint32(0):
                    place = uint32(4) * uint32(first // uint32(SIZE))
                    store_shared_u32(buffer + uint32(4 * HEAD_DIM) + place, word)
                    if to_packed:
                        store_global_u32(target + uint64(place), word)

    return prepare
