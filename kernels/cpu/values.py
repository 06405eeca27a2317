"""Rows to vectors of floats, and those to the sums of attention: scores, and weighted values.

parameters of a row as floats ("widened"), one layout of two:
    groups of whole chunks      [scale 0, shift 0, scale 1, shift 1, ...]
    any other group size        per chunk of 16 elements [16 scales, 16 shifts]

A row is read 16 elements at a time, by RowReader; score_block and weigh_rows are what decode.py
calls, for a block of tokens and for a tile of them.
"""

import contextlib
import functools
import math

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kvquant.rows.format import RowFormat
from kvquant.rows.latent import LatentFormat, parts_of

from .simd import F32, I8, I16, I32, I64, LANES, f32x16, literal, operation

# where the low bits of each of 16 elements stand in a word
LOW_BITS = [2 * i for i in range(LANES)]
MAX_SUMS = 28  # sums (head, chunk) in registers; AVX-512 has 32

# A run of a tile: rows at one stride. Five int64: its tokens, counted from the first of the tile,
# and the addresses that token 0 would have: of K, of V, and of K in the next tile.
RUN_FIRST, RUN_END, RUN_K, RUN_V, RUN_NEXT_K = range(5)
RUN_BYTES = 5 * 8


def spec(fmt):
    """A format as a word that a kernel can hold as a constant: "int4-g4/128", "int4-g8/512+64"."""
    return f"{fmt}/" + "+".join(str(part.head_dim) for part in parts_of(fmt))


def parse_spec(word):
    """The format of a word."""
    name, dims = word.split("/")
    kind = LatentFormat if "+" in dims else RowFormat
    return kind.parse(name, *map(int, dims.split("+")))


def widened_floats(fmt):
    """Floats that the widened parameters of a row take."""
    return sum(
        2 * (part.groups if part.group_size % LANES == 0 else part.head_dim)
        for part in parts_of(fmt)
        if not part.is_exact
    )


def code_addresses(emit, fmt, codes, chunk):
    """Where the codes of a chunk begin, and of rows in planes their high bits, else None.

    codes: address of those of the row; chunk: its index, an i64.
    """
    sizes = fmt.pick(nibbles=(8,), bytes=(16,), elements=(32,), quarters=(4,), planes=(4, 2))
    places = [emit.builder.add(codes, emit.times(chunk, size)) for size in sizes]
    return places[0], emit.at(places[1], fmt.head_dim // 4) if len(places) > 1 else None


class RowReader:
    """Writes the instructions that read rows of one format."""

    def __init__(self, emit, fmt):
        self.emit, self.fmt = emit, fmt
        self.chunks = fmt.head_dim // LANES

    def widen(self, row, params):
        """Write the parameters of a row, as floats, to an address."""
        emit, fmt = self.emit, self.fmt
        if fmt.is_exact:
            return
        if fmt.pick(scales=True, pairs=False):
            scales = emit.load(emit.at(row, fmt.code_bytes), F32, fmt.groups)
            zeros = emit.constant(0.0, F32, fmt.groups)
            lanes = [
                ir.Constant(I32, group + i * fmt.groups)
                for group in range(fmt.groups)
                for i in (0, 1)
            ]
            pairs = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
            floats = emit.builder.shuffle_vector(scales, zeros, pairs)
        else:
            floats = emit.from_half(emit.load(row, I16, 2 * fmt.groups))
            if fmt.pick(integers=False, e4m3=True):  # see unpack
                factors = [ir.Constant(F32, factor) for factor in (256.0, 1.0) * fmt.groups]
                floats = emit.builder.fmul(floats, ir.Constant(floats.type, factors))
        if fmt.group_size % LANES == 0:
            emit.store(params, floats)
            return
        for i in range(2 * self.chunks):
            chunk, is_shift = divmod(i, 2)
            elements = range(chunk * LANES, (chunk + 1) * LANES)
            lanes = [ir.Constant(I32, 2 * (e // fmt.group_size) + is_shift) for e in elements]
            spread = ir.Constant(ir.VectorType(I32, LANES), lanes)
            emit.store(
                emit.at(params, 4 * LANES * i), emit.builder.shuffle_vector(floats, floats, spread)
            )

    def values(self, row, params, chunk):
        """The 16 values of a chunk (its index an i64), from a row and its widened parameters."""
        emit, fmt, b = self.emit, self.fmt, self.emit.builder
        numbers = self.unpack(emit.at(row, fmt.code_offset), chunk)
        if fmt.is_exact:
            return numbers
        if fmt.group_size % LANES == 0:
            group = b.udiv(chunk, ir.Constant(I64, fmt.group_size // LANES))
            at = b.add(params, emit.times(group, 8))
            scale, shift = emit.load_splat(at), emit.load_splat(emit.at(at, 4))
        else:
            at = b.add(params, emit.times(chunk, 8 * LANES))
            scale, shift = emit.load(at, F32), emit.load(emit.at(at, 4 * LANES), F32)
        return emit.fma(numbers, scale, shift)

    def unpack(self, codes, chunk):
        """The codes or 16-bit elements of a chunk as floats, in the order of the elements.

        codes: address of those of the row.

        E4M3: its 7 magnitude bits at the place of fp16's are the number times 2**-8; the widened
        scale has the factor 2**8. Sign-extended to 16 bits and shifted, the byte brings its sign
        along, at bits 15 and 14.
        """
        emit, b, fmt = self.emit, self.emit.builder, self.fmt
        floats, numbers = ir.VectorType(F32, LANES), fmt.facts.numbers
        address, high = code_addresses(emit, fmt, codes, chunk)
        if numbers == "fp16":
            return emit.from_half(emit.load(address, I16))
        if numbers == "bf16":
            wide = b.zext(emit.load(address, I16), ir.VectorType(I32, LANES))
            return b.bitcast(b.shl(wide, emit.constant(16, I32)), floats)
        if numbers == "e4m3":
            wide = b.sext(emit.load(address, I8), ir.VectorType(I16, LANES))
            half = b.and_(b.shl(wide, emit.constant(7, I16)), emit.constant(0xBF80, I16))
            magnitude = b.and_(wide, emit.constant(0x7F, I16))
            is_nan = b.icmp_unsigned("==", magnitude, emit.constant(0x7F, I16))
            floats = emit.from_half(b.select(is_nan, emit.constant(0x7E00, I16), half))
            # a float32 scale may have no room for the factor
            has_factor = fmt.pick(pairs=True, scales=False)
            return floats if has_factor else b.fmul(floats, emit.constant(256.0))
        unpack = fmt.pick(
            integers=fmt.pick(
                bytes=unpack_bytes,
                nibbles=unpack_nibbles,
                quarters=unpack_quarters,
                planes=unpack_planes,
            )
        )
        return b.sitofp(unpack(emit, address, high), floats)


def unpack_bytes(emit, address, _high):
    """16 codes of a byte each, as int32."""
    return emit.builder.zext(emit.load(address, I8), ir.VectorType(I32, LANES))


def unpack_nibbles(emit, address, _high):
    """16 codes of INT4. 8 bytes become 8 quadwords x: x | x << 28 has the low nibble, at bit 28,
    and the high nibble, at bit 32, apart; masked, the two halves of a quadword are two codes."""
    b = emit.builder
    wide = b.zext(emit.load(address, I8, LANES // 2), ir.VectorType(I64, LANES // 2))
    pairs = b.or_(wide, b.shl(wide, emit.constant(28, I64, LANES // 2)))
    pairs = b.and_(pairs, emit.constant(0x0000000F_0000000F, I64, LANES // 2))
    return b.bitcast(pairs, ir.VectorType(I32, LANES))


def unpack_quarters(emit, address, _high):
    """16 codes of INT2: each lane shifts their word by its own distance."""
    b, word = emit.builder, emit.splat(emit.load_scalar(address, I32))
    return b.and_(b.lshr(word, emit.each(LOW_BITS, I32)), emit.constant(3, I32))


def unpack_planes(emit, address, high):
    """16 codes of INT3. Low and high bits make a quadword, the nibbles of the even elements in its
    low half and those of the odd ones in its high half; shifted, its halves are two codes."""
    b = emit.builder

    def spread(word, *distances):
        moved = [b.shl(word, ir.Constant(I64, distance)) for distance in distances]
        return functools.reduce(b.or_, moved)

    low = spread(b.zext(emit.load_scalar(address, I32), I64), 0, 30)
    low = b.and_(low, ir.Constant(I64, 0x33333333_33333333))
    bits = spread(spread(b.zext(emit.load_scalar(high, I16), I64), 2, 16), 0, 31)
    bits = b.and_(bits, ir.Constant(I64, 0x44444444_44444444))
    nibbles = emit.splat(b.or_(low, bits), LANES // 2)
    pairs = b.lshr(nibbles, emit.each(range(0, 32, 4), I64))
    pairs = b.and_(pairs, emit.constant(0x00000007_00000007, I64, LANES // 2))
    return b.bitcast(pairs, ir.VectorType(I32, LANES))


def tokens_per_block(heads):
    """Tokens whose scores fill a vector: a power of two with tokens * heads <= 16."""
    return 1 << int(math.log2(LANES // heads))


def chunks_per_pass(heads, chunks):
    """Chunks of V whose sums with all heads fit the registers: a divisor of chunks."""
    return max(
        c for c in range(1, chunks + 1) if chunks % c == 0 and (c == 1 or c * heads <= MAX_SUMS)
    )


@operation(f32x16, literal, literal, literal, *[types.int64] * 6)
def score_block(emit, format_spec, heads, least, q, row, stride, count, params, runs):
    """Scores of the next tokens with all heads: lane token * heads + head; -inf beyond the tokens.

    A score that is not finite is NaN, and with it all of its head's result.

    q [heads, head_dim] float32; row: address of the first token's row; count: tokens that exist, at
    least 1 (the last one's row is read again in place of missing ones); params: widened ones of the
    block's rows; runs: the first of the block's, each of which has `least` rows where the block has
    several. A latent row is read part by part.
    """
    b, fmt = emit.builder, parse_spec(format_spec)
    tokens = tokens_per_block(heads)
    rows, row_params = [], []
    for token in range(tokens):
        last = b.sub(count, ir.Constant(I64, 1))
        inside = b.icmp_signed("<", ir.Constant(I64, token), count)
        index = b.select(inside, ir.Constant(I64, token), last)
        at = b.add(row, b.mul(index, stride))
        if least < tokens:  # from the first run to that of the row
            run = b.add(runs, emit.times(b.udiv(index, ir.Constant(I64, least)), RUN_BYTES))
            bases = [emit.load_scalar(emit.at(one, 8 * RUN_K), I64) for one in (run, runs)]
            at = b.add(at, b.sub(*bases))
        rows.append(at)
        row_params.append(emit.at(params, 4 * token * widened_floats(fmt)))
    sums = [cgutils.alloca_once_value(b, emit.constant(0.0)) for _ in range(tokens * heads)]
    for part in parts_of(fmt):
        reader = RowReader(emit, part)
        for token in range(tokens):
            reader.widen(rows[token], row_params[token])
        with cgutils.for_range(b, ir.Constant(I64, reader.chunks)) as loop:
            chunk_q = b.add(q, emit.times(loop.index, 4 * LANES))
            keys = [reader.values(r, p, loop.index) for r, p in zip(rows, row_params, strict=True)]
            for head in range(heads):
                query = emit.load(emit.at(chunk_q, 4 * fmt.head_dim * head), F32)
                for token in range(tokens):
                    total = sums[token * heads + head]
                    b.store(emit.fma(keys[token], query, b.load(total)), total)
        q = emit.at(q, 4 * part.head_dim)
        rows = [emit.at(row, part.row_bytes) for row in rows]
        row_params = [emit.at(row, 4 * widened_floats(part)) for row in row_params]
    scores = emit.sums([b.load(total) for total in sums] + [None] * (LANES - len(sums)))
    scores = emit.fma(scores, emit.constant(0.0), scores)
    lanes = ir.Constant(ir.VectorType(I32, LANES), [ir.Constant(I32, i) for i in range(LANES)])
    limit = b.trunc(b.mul(count, ir.Constant(I64, heads)), I32)
    limit = b.select(
        b.icmp_signed("<", limit, ir.Constant(I32, tokens * heads)),
        limit,
        ir.Constant(I32, tokens * heads),
    )
    within = b.icmp_signed("<", lanes, emit.splat(limit))
    return b.select(within, scores, emit.constant(-math.inf))


@operation(types.void, types.int64, types.int64)
def store_int(emit, address, value):
    """An int64 to a byte address."""
    emit.store(address, value)


@operation(types.void, literal, literal, literal, *[types.int64] * 8)
def weigh_rows(
    emit, v_spec, k_bytes, heads, weights, runs, num_runs, v_stride, k_stride, params, decay, acc
):
    """acc = acc * decay + weights · V over the rows of a tile, while the next K rows are fetched.

    weights: as score_block leaves them, 16 floats a block; runs: of the rows of the tile; params:
    room for their widened parameters; decay [heads] and acc [heads, head_dim] float32.
    """
    b, fmt = emit.builder, parse_spec(v_spec)
    reader = RowReader(emit, fmt)
    tokens = tokens_per_block(heads)
    width = chunks_per_pass(heads, reader.chunks)
    param_bytes = 4 * widened_floats(fmt)

    @contextlib.contextmanager
    def each_token():
        """The code to write, for each token of the tile: itself, the addresses of V and next K."""
        with cgutils.for_range(b, num_runs) as loop:
            run = b.add(runs, emit.times(loop.index, RUN_BYTES))
            first, end, v_row, next_k = (
                emit.load_scalar(emit.at(run, 8 * field), I64)
                for field in (RUN_FIRST, RUN_END, RUN_V, RUN_NEXT_K)
            )
            with cgutils.for_range(b, end, start=first) as inner:
                token = inner.index
                yield (
                    token,
                    b.add(v_row, b.mul(token, v_stride)),
                    b.add(next_k, b.mul(token, k_stride)),
                )

    with each_token() as (token, row, _):
        reader.widen(row, b.add(params, emit.times(token, param_bytes)))
    with cgutils.for_range(b, ir.Constant(I64, reader.chunks // width)) as part:
        first = emit.times(part.index, width)
        chunks = [b.add(first, ir.Constant(I64, c)) for c in range(width)]
        places = [
            b.add(emit.at(acc, 4 * fmt.head_dim * head), emit.times(chunk, 4 * LANES))
            for head in range(heads)
            for chunk in chunks
        ]
        # a sum of their own for the tile: added one by one to a long sum, tokens lose digits
        sums = [cgutils.alloca_once_value(b, emit.constant(0.0)) for _ in places]
        with each_token() as (token, row, next_k):
            emit.prefetch(next_k, k_bytes)
            row_params = b.add(params, emit.times(token, param_bytes))
            block = emit.times(b.udiv(token, ir.Constant(I64, tokens)), LANES)
            lane = emit.times(b.urem(token, ir.Constant(I64, tokens)), heads)
            at_weights = b.add(weights, emit.times(b.add(block, lane), 4))
            for c, chunk in enumerate(chunks):
                values = reader.values(row, row_params, chunk)
                for head in range(heads):
                    total = sums[head * width + c]
                    weight = emit.load_splat(emit.at(at_weights, 4 * head))
                    b.store(emit.fma(values, weight, b.load(total)), total)
        for i, (place, total) in enumerate(zip(places, sums, strict=True)):
            factor = emit.load_splat(emit.at(decay, 4 * (i // width)))
            emit.store(place, emit.fma(emit.load(place, F32), factor, b.load(total)))
