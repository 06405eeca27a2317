"""Quantize and dequantize rows on the CPU, bit for bit as kvquant/rows/quantize.py defines it.

work item = 256 rows; per row

    1  elements to float32, 16 at a time; is each within what the format can hold?
    2  least and greatest element of each group -> scale and shift, rounded outwards to fp16
    3  16 elements at a time: (x - shift) * (1 / scale), rounded, clamped, packed
"""

import functools

import numpy as np
import torch
from llvmlite import ir
from numba import types

from kvquant.rows.arguments import address
from kvquant.rows.latent import AnyFormat, LatentFormat
from kvquant.rows.quantize import LEAST_DS_SCALE

from .compile import compile_kernel
from .parallel import run
from .simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    argument,
    f32x16,
    literal,
    load,
    load_float,
    load_splat,
    maximum,
    minimum,
    operation,
    splat,
    stack_floats,
    store,
    store_float,
)
from .values import (
    LOW_BITS,
    RowReader,
    code_addresses,
    lanes_in_order,
    parse_spec,
    spec,
    widened_floats,
)

ROWS_PER_ITEM = 256
INPUTS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# where the high bits of each of 16 elements stand in a word: kvquant/rows/format.py
HIGH_BITS = [4 * (i % 8 // 2) + 2 * (i // 8) + i % 2 for i in range(LANES)]
X, ROWS, NUM_ROWS, BAD = range(4)  # the arguments of both kernels


def quantize(x: torch.Tensor, fmt: AnyFormat) -> tuple[torch.Tensor, bool]:
    """Rows of x, and whether the format can hold every element; see quantize_rows."""
    if isinstance(fmt, LatentFormat):
        latent, rope = map(quantize, x.split([fmt.latent_dim, fmt.rope_dim], dim=-1), fmt.parts)
        return torch.cat([latent[0], rope[0]], dim=-1), latent[1] and rope[1]
    x = x.resolve_neg().contiguous()
    rows = torch.empty((*x.shape[:-1], fmt.row_bytes), dtype=torch.uint8, device="cpu")
    num_rows = x.numel() // fmt.head_dim
    if not num_rows:
        return rows, True
    bad = np.zeros(1, np.uint16)
    kernel = make_quantize_kernel(spec(fmt), INPUTS[x.dtype])
    arguments = np.array([address(x), address(rows), num_rows, bad.ctypes.data], np.int64)
    run(kernel, arguments, -(-num_rows // ROWS_PER_ITEM))
    return rows, not bad[0].item()


def dequantize(rows: torch.Tensor, fmt: AnyFormat) -> torch.Tensor:
    if isinstance(fmt, LatentFormat):
        parts = rows.split([part.row_bytes for part in fmt.parts], dim=-1)
        return torch.cat(list(map(dequantize, parts, fmt.parts)), dim=-1)
    rows = rows.contiguous()
    x = torch.empty((*rows.shape[:-1], fmt.head_dim), dtype=torch.float32, device="cpu")
    num_rows = rows.numel() // fmt.row_bytes
    if not num_rows:
        return x
    arguments = np.array([address(x), address(rows), num_rows, 0], np.int64)
    run(make_dequantize_kernel(spec(fmt)), arguments, -(-num_rows // ROWS_PER_ITEM))
    return x


@operation(f32x16, literal, types.int64)
def load_elements(emit, dtype, address):
    if dtype == "float32":
        return emit.load(address, F32)
    if dtype == "float16":
        return emit.from_half(emit.load(address, I16))
    wide = emit.builder.zext(emit.load(address, I16), ir.VectorType(I32, LANES))
    shifted = emit.builder.shl(wide, emit.constant(16, I32))
    return emit.builder.bitcast(shifted, ir.VectorType(F32, LANES))


@operation(types.boolean, f32x16, types.float32)
def all_within(emit, x, limit):
    """Whether |x| <= limit in every lane; a NaN is not."""
    within = emit.builder.fcmp_ordered("<=", emit.call("llvm.fabs", x), emit.splat(limit))
    mask = emit.builder.bitcast(within, ir.IntType(LANES))
    return emit.builder.icmp_unsigned("==", mask, ir.Constant(mask.type, 2**LANES - 1))


@operation(types.float32, f32x16)
def least(emit, x):
    return emit.reduce("fmin", x)


@operation(types.float32, f32x16)
def greatest(emit, x):
    return emit.reduce("fmax", x)


@operation(types.void, types.int64, types.uint16)
def store_half(emit, address, bits):
    """fp16 bits to a byte address."""
    emit.store(address, bits)


@operation(types.void, literal, f32x16, f32x16, f32x16, types.int64, types.int64)
def pack(emit, format_spec, x, shift, inverse, row, chunk):
    """The codes of the 16 elements of a chunk, or the 16-bit elements, to their place in a row."""
    b, fmt = emit.builder, parse_spec(format_spec)
    ints, numbers = ir.VectorType(I32, LANES), fmt.facts.numbers
    address, high = code_addresses(emit, fmt, emit.at(row, fmt.code_offset), chunk)
    if numbers == "fp16":
        emit.store(address, emit.to_half(x))
        return
    if numbers == "bf16":
        bits = b.bitcast(x, ints)
        odd = b.and_(b.lshr(bits, emit.constant(16, I32)), emit.constant(1, I32))
        rounded = b.add(b.add(bits, emit.constant(0x7FFF, I32)), odd)
        half = b.lshr(rounded, emit.constant(16, I32))
        emit.store(address, b.trunc(half, ir.VectorType(I16, LANES)))
        return
    scaled, levels = b.fmul(b.fsub(x, shift), inverse), fmt.facts.levels
    if numbers == "e4m3":
        emit.store(address, to_e4m3(emit, _clamp(emit, scaled, -levels, levels)))
        return
    rounded = _clamp(emit, emit.call("llvm.rint", scaled), 0.0, fmt.pick(integers=levels))
    codes = b.fptosi(rounded, ints)
    fmt.pick(bytes=pack_bytes, nibbles=pack_nibbles, quarters=pack_quarters, planes=pack_planes)(
        emit, codes, address, high
    )


def pack_bytes(emit, codes, address, _high):
    emit.store(address, emit.builder.trunc(codes, ir.VectorType(I8, LANES)))


def pack_nibbles(emit, codes, address, _high):
    """Store 16 codes of INT4: a quadword holds an even and an odd one."""
    b = emit.builder
    pairs = b.bitcast(codes, ir.VectorType(I64, LANES // 2))
    pairs = b.or_(pairs, b.lshr(pairs, emit.constant(28, I64, LANES // 2)))
    emit.store(address, b.trunc(pairs, ir.VectorType(I8, LANES // 2)))


def pack_quarters(emit, codes, address, _high):
    emit.store(address, emit.reduce("or", emit.builder.shl(codes, emit.each(LOW_BITS, I32))))


def pack_planes(emit, codes, address, high):
    """Store 16 codes of INT3: the low bits to one address, the high ones to another."""
    b = emit.builder
    pack_quarters(emit, b.and_(codes, emit.constant(3, I32)), address, None)
    bits = b.shl(b.lshr(codes, emit.constant(2, I32)), emit.each(HIGH_BITS, I32))
    emit.store(high, b.trunc(emit.reduce("or", bits), I16))


def _clamp(emit, x, low, high):
    x = emit.call("llvm.maxnum", x, emit.constant(low))
    return emit.call("llvm.minnum", x, emit.constant(high))


def to_e4m3(emit, x):
    """16 floats of at most 448 in magnitude, rounded to the nearest E4M3, ties to even.

    From 2**-6 on the mantissa is rounded to 3 bits; below, adding 2**14 rounds to multiples of
    2**-9.
    """
    b = emit.builder
    ints = ir.VectorType(I32, LANES)
    bits = b.bitcast(x, ints)
    sign = b.and_(b.lshr(bits, emit.constant(24, I32)), emit.constant(0x80, I32))
    magnitude = b.and_(bits, emit.constant(0x7FFFFFFF, I32))
    odd = b.and_(b.lshr(magnitude, emit.constant(20, I32)), emit.constant(1, I32))
    rounded = b.add(b.add(magnitude, emit.constant(0x7FFFF, I32)), odd)
    normal = b.sub(b.lshr(rounded, emit.constant(20, I32)), emit.constant((127 - 7) << 3, I32))
    magic = emit.constant(2.0**14)
    moved = b.fadd(b.bitcast(magnitude, x.type), magic)
    small = b.sub(b.bitcast(moved, ints), b.bitcast(magic, ints))
    is_small = b.icmp_signed("<", magnitude, emit.constant((127 - 6) << 23, I32))
    return b.trunc(b.or_(b.select(is_small, small, normal), sign), ir.VectorType(I8, LANES))


@operation(types.void, literal, types.int64, types.int64, types.int64)
def unpack_row(emit, format_spec, row, params, x):
    """The values of a row to an address; params: room for its widened parameters."""
    reader, fmt = RowReader(emit, parse_spec(format_spec)), parse_spec(format_spec)
    reader.widen(row, params)
    for place in range(reader.chunks):
        chunk = ir.Constant(I64, place)
        values = reader.values(row, chunk, reader.scaling(params, chunk))
        emit.store(emit.at(x, 4 * LANES * place), emit.pick_lanes(values, lanes_in_order(fmt)))


@operation(types.void, literal, types.int64, types.int64, types.int64, types.int64, types.int64)
def choose_parameters(emit, format_spec, least, greatest, row, shifts, inverses):
    """Scales and shifts of a row's groups, from the extrema, by kvquant/rows/quantize.py.

    Writes the header to row, and shifts and inverses of scales to 16 floats each.
    """
    b, fmt = emit.builder, parse_spec(format_spec)
    mn, mx = emit.load(least, F32), emit.load(greatest, F32)
    levels = fmt.facts.levels
    if fmt.pick(scales=True, pairs=False):
        scale = b.fdiv(emit.call("llvm.maxnum", mx, b.fneg(mn)), emit.constant(levels))
        scale = emit.call("llvm.maxnum", scale, emit.constant(float(np.float32(LEAST_DS_SCALE))))
        scale = _power_up(emit, scale)
        emit.store(emit.at(row, fmt.code_bytes), emit.pick_lanes(scale, range(fmt.groups)))
        emit.store(shifts, emit.constant(0.0))
        emit.store(inverses, b.fdiv(emit.constant(1.0), scale))
        return
    is_centered = fmt.pick(integers=False, e4m3=True)
    if is_centered:
        half = emit.constant(0.5)
        shift_bits = emit.to_half(b.fadd(b.fmul(mn, half), b.fmul(mx, half)))
    else:
        shift_bits = _half_down(emit, mn)
    shift_bits, shift = _without_negative_zero(emit, shift_bits)
    reach = b.fsub(mx, shift)
    if is_centered:
        reach = emit.call("llvm.maxnum", reach, b.fsub(shift, mn))
    step = emit.constant(float(np.float32(1 / levels)))
    scale_bits, scale = _without_negative_zero(emit, _half_up(emit, b.fmul(reach, step)))
    is_zero = b.fcmp_ordered("==", scale, emit.constant(0.0))
    inverse = b.select(is_zero, emit.constant(0.0), b.fdiv(emit.constant(1.0), scale))
    lanes = [group + LANES * i for group in range(fmt.groups) for i in (0, 1)]
    emit.store(row, b.shuffle_vector(scale_bits, shift_bits, emit.each(lanes, I32)))
    emit.store(shifts, shift)
    emit.store(inverses, inverse)


def _half_down(emit, x):
    """The bits of the greatest fp16 that is not over x."""
    b, bits = emit.builder, emit.to_half(x)
    magnitude = b.and_(bits, emit.constant(0x7FFF, I16))
    one, zero = emit.constant(1, I16), emit.constant(0, I16)
    is_negative = b.icmp_signed("<", bits, zero)
    below = b.select(is_negative, b.add(bits, one), b.sub(bits, one))
    below = b.select(b.icmp_signed("==", magnitude, zero), emit.constant(0x8001, I16), below)
    return b.select(b.fcmp_ordered(">", emit.from_half(bits), x), below, bits)


def _half_up(emit, x):
    """The bits of the least fp16 that is not under x, for x >= 0."""
    b, bits = emit.builder, emit.to_half(x)
    is_under = b.fcmp_ordered("<", emit.from_half(bits), x)
    return b.select(is_under, b.add(bits, emit.constant(1, I16)), bits)


def _power_up(emit, x):
    """The least power of two that is not under x, for normal floats."""
    b = emit.builder
    bits = b.add(b.bitcast(x, ir.VectorType(I32, LANES)), emit.constant(0x7FFFFF, I32))
    return b.bitcast(b.and_(bits, emit.constant(0x7F800000, I32)), x.type)


def _without_negative_zero(emit, bits):
    """fp16 bits with 0.0 in place of -0.0, and their floats."""
    value = emit.builder.fadd(emit.from_half(bits), emit.constant(0.0))
    return emit.to_half(value), value


@functools.cache
def make_quantize_kernel(format_spec, dtype):
    """Compile the kernel for a format and the dtype of x; its address."""
    fmt = parse_spec(format_spec)
    head_dim, group_size, groups = fmt.head_dim, fmt.group_size, fmt.groups
    row_bytes = fmt.row_bytes
    element_bytes = 4 if dtype == "float32" else 2
    max_abs = fmt.max_abs
    is_exact = fmt.is_exact
    # what is NaN in a row that cannot be held: all of it, or its parameters; of float32 ones the
    # upper halves
    nan = np.uint16(fmt.pick(bf16=0x7FC0, fp16=0x7E00, pairs=0x7E00, scales=0x7FC0))
    nan_at, nan_end, nan_step = fmt.pick(
        none=(0, row_bytes, 2),
        pairs=(0, fmt.header_bytes, 2),
        scales=(fmt.code_bytes + 2, row_bytes, 4),
    )
    whole_chunks = group_size % LANES == 0

    def quantize_kernel(args, item):
        values, lows, highs = stack_floats(head_dim), stack_floats(LANES), stack_floats(LANES)
        shifts, inverses = stack_floats(LANES), stack_floats(LANES)
        lane_shifts, lane_inverses = stack_floats(LANES), stack_floats(LANES)
        for place in (values, lows, highs, shifts, inverses):
            store(place, splat(np.float32(0)))  # lanes beyond the groups count too
        first = item * ROWS_PER_ITEM
        for index in range(first, min(first + ROWS_PER_ITEM, argument(args, NUM_ROWS))):
            x = argument(args, X) + element_bytes * head_dim * index
            row = argument(args, ROWS) + row_bytes * index
            # Step 1: to float32
            holdable = True
            for element in range(0, head_dim, LANES):
                chunk = load_elements(dtype, x + element_bytes * element)
                holdable = holdable and all_within(chunk, max_abs)
                store(values + 4 * element, chunk)
            if not holdable:
                store_half(argument(args, BAD), np.uint16(1))
                for byte in range(0, row_bytes, 2):
                    store_half(row + byte, np.uint16(0))
                for byte in range(nan_at, nan_end, nan_step):
                    store_half(row + byte, nan)
                continue
            # Step 2: parameters
            if not is_exact:
                for group in range(groups):
                    start = group * group_size
                    if whole_chunks:
                        low = high = load(values + 4 * start)
                        for element in range(start + LANES, start + group_size, LANES):
                            chunk = load(values + 4 * element)
                            low, high = minimum(low, chunk), maximum(high, chunk)
                        mn, mx = least(low), greatest(high)
                    else:
                        mn = mx = load_float(values + 4 * start)
                        for element in range(start + 1, start + group_size):
                            value = load_float(values + 4 * element)
                            mn, mx = min(mn, value), max(mx, value)
                    store_float(lows + 4 * group, mn)
                    store_float(highs + 4 * group, mx)
                choose_parameters(format_spec, lows, highs, row, shifts, inverses)
            # Step 3: codes
            for number in range(head_dim // LANES):
                element = number * LANES
                if whole_chunks:
                    group = element // group_size
                    shift = load_splat(shifts + 4 * group)
                    inverse = load_splat(inverses + 4 * group)
                else:
                    for lane in range(LANES):
                        group = (element + lane) // group_size
                        store_float(lane_shifts + 4 * lane, load_float(shifts + 4 * group))
                        store_float(lane_inverses + 4 * lane, load_float(inverses + 4 * group))
                    shift, inverse = load(lane_shifts), load(lane_inverses)
                pack(format_spec, load(values + 4 * element), shift, inverse, row, number)

    return compile_kernel(quantize_kernel)


@functools.cache
def make_dequantize_kernel(format_spec):
    fmt = parse_spec(format_spec)
    head_dim, row_bytes, params_floats = fmt.head_dim, fmt.row_bytes, widened_floats(fmt)

    def dequantize_kernel(args, item):
        params = stack_floats(params_floats)
        first = item * ROWS_PER_ITEM
        for index in range(first, min(first + ROWS_PER_ITEM, argument(args, NUM_ROWS))):
            row = argument(args, ROWS) + row_bytes * index
            x = argument(args, X) + 4 * head_dim * index
            unpack_row(format_spec, row, params, x)

    return compile_kernel(dequantize_kernel)
