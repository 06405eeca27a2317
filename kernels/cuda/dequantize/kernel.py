"""The dequantize kernel: rows at slots to elements, by kvquant/rows/quantize.py.

    grid    groups of tokens  x  groups of heads
    block   4 warps; a warp has 32 / lanes tokens, `lanes` lanes each, and walks over the heads

        rows ──cp.async──▶ ring ──▶ code * scale + shift ──▶ out ──▶ elements
                        (4 stages)    float32, rounded once    (shared memory)

A token without a slot has no row: its copies bring zeros, which stand for zeros in every format.
"""

from numba import cuda, float32, int32, uint16, uint32, uint64

from ..device.codes import PACK, make_load_codes
from ..device.jit import device_function
from ..device.ptx import (
    bits_float,
    commit_copies,
    float_bits,
    high_f16,
    load_global_u64,
    load_shared_u32,
    low_f16,
    multiply_add,
    pack_f16,
    shared_address,
    store_shared_u32x4,
    subtract,
    unpack_e4m3,
    wait_copies,
)
from ..device.quantize import ROUNDER, ROUNDER_BITS, piece_of
from ..device.row_copies import make_ask, make_store, page_and_offset
from ..device.row_layout import (
    ELEMENTS,
    SIZES,
    STAGES,
    UNIT,
    bits_apart,
    codes_per_word,
    prefix_of,
    staged_bytes,
    strands_of,
    unit_of,
)
from ..device.transform import EIGHT, make_load, swizzle

wait_for_oldest = wait_copies[STAGES - 2]


def make_dequantize_kernel(spec):
    FMT, LANES, ROWS, TOKENS = spec.fmt, spec.lanes, spec.rows, spec.tokens
    STAGE_BYTES, WARP_BYTES = spec.stage_bytes, spec.warp_bytes
    OUT, OUT_BYTES = STAGES * STAGE_BYTES, FMT.head_dim * SIZES[spec.target]
    IS_EXACT, ROW_BYTES, UNIT_BYTES = FMT.is_exact, FMT.row_bytes, unit_of(FMT)
    FULL, ACTIVE = LANES * ELEMENTS == FMT.head_dim, FMT.head_dim // ELEMENTS
    FIRST, STEP = prefix_of(FMT) - FMT.header_bytes, 0 if IS_EXACT else staged_bytes(FMT)
    ROW_UNITS, OUT_UNITS = ROW_BYTES // UNIT, OUT_BYTES // UNIT
    ask = make_ask(ROW_BYTES, LANES, UNIT_BYTES, IS_EXACT)
    store = make_store(OUT_BYTES, LANES, UNIT, True)
    values_of = make_values(spec)
    put = _make_put(spec.target)

    # fmt: off
    def dequantize(slots, rows, out, stride_page, stride_head, stride_row, num_tokens, num_heads,
                   heads_per_block, num_slots, page_size, page_factor, page_shift):
        # fmt: on
        # Step 1: the token of a lane, its row and its elements
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        part, row = uint32(lane % uint32(LANES)), uint32(lane // uint32(LANES))
        token = uint32(uint32(cuda.blockIdx.x) * uint32(TOKENS))
        token = uint32(token + uint32(warp * uint32(ROWS)) + row)
        is_token = token < uint32(num_tokens)
        slot = uint64(0xFFFFFFFFFFFFFFFF)
        if is_token:
            slot = load_global_u64(slots + uint64(8) * uint64(token))
        wanted = slot < uint64(num_slots)
        pages = (num_slots, page_size, page_factor, page_shift)
        page, place = page_and_offset(slot, wanted, pages)
        first = int32(int32(cuda.blockIdx.y) * heads_per_block)
        last = int32(min(int32(first + heads_per_block), num_heads))
        rows += uint64(page) * stride_page + uint64(place) * stride_row
        rows += uint64(first) * stride_head
        target = uint64(token) * uint64(num_heads) + uint64(first)
        out += uint64(OUT_BYTES) * target
        shared = uint32(shared_address(cuda.shared.array(0, uint32)) + warp * uint32(WARP_BYTES))
        first_unit = uint32(uint32(ROW_UNITS) * row) if IS_EXACT else uint32(0)
        at = uint32(FIRST) + uint32(STEP) * row
        active = FULL or part < uint32(ACTIVE)

        # Step 2: the first stages are asked for
        asked = int32(first)
        for stage in range(STAGES - 1):
            if asked < last:
                ask(shared + uint32(stage * STAGE_BYTES) + at, first_unit, rows, part, wanted)
            commit_copies()
            rows += stride_head
            asked = int32(asked + int32(1))
        reading, writing = uint32(0), uint32((STAGES - 1) * STAGE_BYTES)

        for _ in range(first, last):
            # Step 3: rows that have come; the stage before is free for those to come
            wait_for_oldest()
            cuda.syncwarp()
            if asked < last:
                ask(shared + writing + at, first_unit, rows, part, wanted)
            commit_copies()
            rows += stride_head
            asked = int32(asked + int32(1))

            # Step 4: to float32, then to elements
            x = cuda.local.array(ELEMENTS, float32)
            if active:
                values_of(shared + reading, row, part, x)
                put(shared + uint32(OUT), uint32(uint32(OUT_UNITS) * row), part, x)
            cuda.syncwarp()
            store(shared + uint32(OUT), uint32(uint32(OUT_UNITS) * row), out, part, is_token)
            out += uint64(OUT_BYTES)
            writing = reading
            reading = uint32(reading + uint32(STAGE_BYTES))
            if reading == uint32(STAGES * STAGE_BYTES):
                reading = uint32(0)

    return dequantize


def make_values(spec):
    """Make the function that gives a lane the 16 values of its part of a row in a stage."""
    FMT = spec.fmt
    SIZE, HEAD_DIM, STEP = FMT.group_size, FMT.head_dim, staged_bytes(FMT)
    HEADER, CODES = prefix_of(FMT) - FMT.header_bytes, prefix_of(FMT)
    PIECE = piece_of(FMT)
    PIECES = ELEMENTS // PIECE
    load, numbers_of = make_load(FMT.codec if FMT.is_exact else "bf16"), _make_numbers(spec)

    @device_function
    def exact_values(stage, row, part, x):
        first = uint32(uint32(HEAD_DIM) * row + uint32(ELEMENTS) * part)
        load(stage, first, x, 0)
        load(stage, uint32(first + uint32(EIGHT)), x, EIGHT)

    @device_function
    def values(stage, row, part, x):
        stage += uint32(STEP) * row
        numbers_of(stage + uint32(CODES), part, x)
        for piece in range(PIECES):
            first = uint32(uint32(ELEMENTS) * part + uint32(piece * PIECE))
            group = uint32(first // uint32(SIZE))
            word = load_shared_u32(stage + uint32(HEADER) + uint32(4) * group)
            scale, shift = low_f16(word), high_f16(word)
            for i in range(PIECE):
                k = piece * PIECE + i
                x[k] = multiply_add(x[k], scale, shift)  # the product is exact

    return exact_values if FMT.is_exact else values


def _make_numbers(spec):
    """Make the function from the words of 16 codes to floats."""
    fmt = spec.fmt
    if fmt.is_exact:
        return None
    PER_WORD, APART, STRANDS = codes_per_word(fmt), bits_apart(fmt), strands_of(fmt)
    MASK, load_codes = 2**fmt.bits - 1, make_load_codes(fmt)
    from_e4m3 = unpack_e4m3 if spec.converts_fp8 else e4m3_halves

    @device_function
    def integers(codes, part, x):
        words = load_codes(codes, part)
        for k in range(ELEMENTS):
            i, strand = k // STRANDS, k % STRANDS
            word = words[STRANDS * (i // PER_WORD) + strand]
            code = uint32(word >> uint32(i % PER_WORD * APART + strand)) & uint32(MASK)
            x[k] = subtract(bits_float(uint32(code | uint32(ROUNDER_BITS))), float32(ROUNDER))

    @device_function
    def fp8(codes, part, x):
        words = load_codes(codes, part)
        for i in range(ELEMENTS // 2):
            halves = from_e4m3(uint16(words[i // 2] >> uint32(16 * (i % 2))))
            x[2 * i], x[2 * i + 1] = low_f16(halves), high_f16(halves)

    return fmt.pick(e4m3=fp8, integers=integers)


@device_function
def e4m3_halves(codes):
    """Two E4M3 numbers as fp16, for GPUs older than sm_89."""
    low, high = e4m3_half(uint32(codes & uint16(0xFF))), e4m3_half(uint32(codes >> uint16(8)))
    return uint32(high << uint32(16) | low)


@device_function
def e4m3_half(code):
    """The bits of an E4M3 number in fp16, whose exponents are 8 more."""
    size = uint32(code & uint32(0x7F))
    bits = uint32(uint32(size << uint32(7)) | uint32(uint32(code & uint32(0x80)) << uint32(8)))
    scaled = low_f16(bits) * float32(256.0)
    return uint32(0x7E00) if size == uint32(0x7F) else uint32(pack_f16(float32(0.0), scaled))


def _make_put(target):
    """Make the function that puts 16 values of a lane to shared memory as elements, swizzled."""
    IS_FLOAT32 = target == "fp32"
    pack = None if IS_FLOAT32 else PACK[target]

    @device_function
    def put(out, first, part, x):
        if IS_FLOAT32:
            for i in range(4):
                place = swizzle(uint32(first + uint32(4) * part + uint32(i)))
                bits = (
                    float_bits(x[4 * i]),
                    float_bits(x[4 * i + 1]),
                    float_bits(x[4 * i + 2]),
                    float_bits(x[4 * i + 3]),
                )
                store_shared_u32x4(out + uint32(16) * place, bits)
        else:
            for i in range(2):
                place = swizzle(uint32(first + uint32(2) * part + uint32(i)))
                words = (
                    pack(x[8 * i + 1], x[8 * i]),
                    pack(x[8 * i + 3], x[8 * i + 2]),
                    pack(x[8 * i + 5], x[8 * i + 4]),
                    pack(x[8 * i + 7], x[8 * i + 6]),
                )
                store_shared_u32x4(out + uint32(16) * place, words)

    return put
