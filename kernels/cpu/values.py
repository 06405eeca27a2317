"""Rows to vectors of floats, and those to the sums of attention: scores, and weighted values.

parameters of a row as floats ("widened"), one layout of two:
    groups of whole chunks      [scale 0, shift 0, scale 1, shift 1, ...]
    any other group size        per chunk of 16 elements [16 scales, 16 shifts]

A chunk's lanes are in the order in which its codes leave memory. Queries are put into the order of
K's, outputs back from the order of V's, once for all rows.
"""

import contextlib
import functools
import math

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kvquant.rows.format import RowFormat
from kvquant.rows.latent import AnyFormat, LatentFormat, parts_of

from . import simd
from .integers import MAX_SUMS, Keys, Values
from .simd import F32, I8, I16, I32, I64, LANES, f32x16, literal, operation

# where the low bits of each of 16 elements stand in a word
LOW_BITS = [2 * i for i in range(LANES)]
IN_ORDER = [*range(LANES)]
FROM_TWO_WORDS = [8 * (i % 2) + i // 2 for i in range(LANES)]  # elements of INT4, by turns
TILE = 128  # tokens: their K and V rows, scores and parameters stay in the L2 cache

# A run of a tile: rows at one stride. Five int64: its tokens, counted from the first of the tile,
# and the addresses that token 0 would have: of K, of V, and of K in the next tile.
RUN_FIRST, RUN_END, RUN_K, RUN_V, RUN_NEXT_K = range(5)
RUN_BYTES = 5 * 8


@functools.cache
def spec(fmt):
    """A format as a word that a kernel can hold as a constant: "int4-g4/128", "int4-g8/512+64"."""
    return f"{fmt}/" + "+".join(str(part.head_dim) for part in parts_of(fmt))


def parse_spec(word: str) -> AnyFormat:
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


def order_of(fmt):
    """The elements of a chunk that its lanes hold."""
    return fmt.pick(
        nibbles=FROM_TWO_WORDS,
        **dict.fromkeys(("quarters", "planes", "bytes", "elements"), IN_ORDER),
    )


def lanes_in_order(fmt):
    """The lanes that hold the elements of a chunk."""
    return [order_of(fmt).index(element) for element in range(LANES)]


def code_addresses(emit, fmt, codes, chunk):
    """Addresses of a chunk's codes and, of rows in planes, of their high bits, else None."""
    sizes = fmt.pick(nibbles=(8,), bytes=(16,), elements=(32,), quarters=(4,), planes=(4, 2))
    places = [emit.builder.add(codes, emit.times(chunk, size)) for size in sizes]
    return places[0], emit.at(places[1], fmt.head_dim // 4) if len(places) > 1 else None


class RowReader:
    """Writes the instructions that read rows of one format."""

    def __init__(self, emit, fmt):
        self.emit, self.fmt = emit, fmt
        self.chunks = fmt.head_dim // LANES
        # chunks that have a scale and a shift in common
        self.alike = fmt.group_size // LANES if fmt.group_size % LANES == 0 else 1
        # codes number the values of a table
        self.has_table = (
            simd.in_hardware("avx512f")
            and 0 < fmt.facts.levels < LANES
            and fmt.group_size % LANES == 0
        )

    def widen(self, row, params):
        """Write the parameters of a row, as floats, to an address."""
        emit, fmt = self.emit, self.fmt
        if fmt.is_exact:
            return
        if fmt.pick(scales=True, pairs=False):
            scales = emit.load(emit.at(row, fmt.code_bytes), F32, fmt.groups)
            zeros = emit.constant(0.0, F32, fmt.groups)
            pairs = [group + i * fmt.groups for group in range(fmt.groups) for i in (0, 1)]
            floats = emit.builder.shuffle_vector(scales, zeros, emit.each(pairs, I32))
        else:
            floats = emit.from_half(emit.load(row, I16, 2 * fmt.groups))
            if fmt.pick(integers=False, e4m3=True):  # see unpack
                factors = emit.each((256.0, 1.0) * fmt.groups, F32)
                floats = emit.builder.fmul(floats, factors)
        if fmt.group_size % LANES == 0:
            emit.store(params, floats)
            return
        for i in range(2 * self.chunks):
            chunk, is_shift = divmod(i, 2)
            elements = [chunk * LANES + element for element in order_of(fmt)]
            lanes = [2 * (e // fmt.group_size) + is_shift for e in elements]
            emit.store(emit.at(params, 4 * LANES * i), emit.pick_lanes(floats, lanes))

    def scaling(self, params, chunk):
        """A scale and a shift of a chunk, or a table of all values; None of 16-bit elements."""
        emit, fmt, b = self.emit, self.fmt, self.emit.builder
        if fmt.is_exact:
            return None
        if fmt.group_size % LANES == 0:
            at = b.add(params, emit.times(b.udiv(chunk, ir.Constant(I64, self.alike)), 8))
            scale, shift = emit.load_splat(at), emit.load_splat(emit.at(at, 4))
        else:
            at = b.add(params, emit.times(chunk, 8 * LANES))
            scale, shift = emit.load(at, F32), emit.load(emit.at(at, 4 * LANES), F32)
        if not self.has_table:
            return scale, shift
        codes = [lane % (int(fmt.facts.levels) + 1) for lane in range(LANES)]
        return emit.fma(emit.each(codes, F32), scale, shift)

    def values(self, row, chunk, scaling):
        """The 16 values of a chunk (its index an i64), in the order of its lanes."""
        codes = self.emit.at(row, self.fmt.code_offset)
        if self.has_table:
            return self.emit.look_up(scaling, self.codes_in_lanes(codes, chunk))
        numbers = self.unpack(codes, chunk)
        return numbers if scaling is None else self.emit.fma(numbers, *scaling)

    def codes_in_lanes(self, codes, chunk):
        """Integer codes of a chunk in the lowest bits of the lanes; what is above them is not."""
        split = self.fmt.pick(
            bytes=split_bytes, nibbles=split_nibbles, quarters=split_quarters, planes=split_planes
        )
        return split(self.emit, *code_addresses(self.emit, self.fmt, codes, chunk))

    def unpack(self, codes, chunk):
        """The codes or 16-bit elements of a chunk as floats, in the order of its lanes.

        E4M3: its 7 magnitude bits at the place of fp16's are the number times 2**-8; the widened
        scale has the factor 2**8.
        """
        emit, b, fmt = self.emit, self.emit.builder, self.fmt
        floats, numbers = ir.VectorType(F32, LANES), fmt.facts.numbers
        address, _ = code_addresses(emit, fmt, codes, chunk)
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
        greatest = fmt.pick(integers=int(fmt.facts.levels))
        lanes = self.codes_in_lanes(codes, chunk)
        return b.sitofp(b.and_(lanes, emit.constant(greatest, I32)), floats)


def split_bytes(emit, address, _high):
    return emit.builder.zext(emit.load(address, I8), ir.VectorType(I32, LANES))


def split_nibbles(emit, address, _high):
    """16 codes of INT4: lanes have their two words by turns, each shifted by its own distance."""
    b = emit.builder
    words = emit.splat(emit.load_scalar(address, I64), LANES // 2)
    words = b.bitcast(words, ir.VectorType(I32, LANES))
    return b.lshr(words, emit.each([4 * (element % 8) for element in FROM_TWO_WORDS], I32))


def split_quarters(emit, address, _high):
    """16 codes of INT2: each lane shifts their word by its own distance."""
    word = emit.splat(emit.load_scalar(address, I32))
    return emit.builder.lshr(word, emit.each(LOW_BITS, I32))


def split_planes(emit, address, high):
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
    return b.bitcast(pairs, ir.VectorType(I32, LANES))


def query_floats(k_spec, heads, in_integers):
    if in_integers:
        return integer_keys(None, k_spec, heads).room_bytes // 4
    return heads * parse_spec(k_spec).head_dim


def value_floats(v_spec, heads, in_integers, tile):
    """Floats that weigh_rows needs room for, for a tile of tokens."""
    if in_integers:
        return integer_values(None, v_spec, heads).room_bytes // 4
    return tile * widened_floats(parse_spec(v_spec))


def integer_keys(emit, k_spec, heads):
    return Keys(emit, parse_spec(k_spec), heads, tokens_per_block(heads))


def integer_values(emit, v_spec, heads):
    """Weighted sums by integers, of rows that integers.Values serves."""
    return Values(emit, parse_spec(v_spec), heads, tokens_per_block(heads), TILE)


@operation(types.void, literal, literal, literal, types.int64, types.float32, types.int64)
def prepare_queries(emit, format_spec, in_integers, heads, q, factor, prepared):
    """Write q [heads, head_dim] float32 times a factor as score_block wants it."""
    if in_integers:
        integer_keys(emit, format_spec, heads).prepare(q, factor, prepared)
        return
    parts = parts_of(parse_spec(format_spec)) * heads
    orders = [order_of(part) for part in parts for _ in range(part.head_dim // LANES)]
    factors = emit.splat(factor)
    for chunk, order in enumerate(orders):
        queries = emit.builder.fmul(emit.load(emit.at(q, 4 * LANES * chunk), F32), factors)
        emit.store(emit.at(prepared, 4 * LANES * chunk), emit.pick_lanes(queries, order))


@operation(types.void, literal, literal, literal, types.int64, types.float32, types.int64)
def store_output(emit, format_spec, in_integers, heads, acc, share, out):
    """The sums of a head times its share, in the order of the elements."""
    fmt = parse_spec(format_spec)
    chunks = [
        emit.builder.fmul(emit.load(emit.at(acc, 4 * at), F32), emit.splat(share))
        for at in range(0, fmt.head_dim, LANES)
    ]
    if in_integers:
        chunks = integer_values(emit, format_spec, heads).in_order(chunks)
    else:
        chunks = [emit.pick_lanes(chunk, lanes_in_order(fmt)) for chunk in chunks]
    for i, chunk in enumerate(chunks):
        emit.store(emit.at(out, 4 * LANES * i), chunk)


def tokens_per_block(heads: int) -> int:
    """Tokens whose scores fill a vector: a power of two with tokens * heads <= 16."""
    return 1 << int(math.log2(LANES // heads))


def chunks_per_pass(heads, chunks):
    """Chunks of V whose sums with all heads fit the registers: a divisor of chunks."""
    return max(
        c for c in range(1, chunks + 1) if chunks % c == 0 and (c == 1 or c * heads <= MAX_SUMS)
    )


def _scores(emit, fmt, heads, q, rows, row_params):
    """Scores of rows, lane token * heads + head."""
    b, tokens = emit.builder, len(rows)
    sums = [cgutils.alloca_once_value(b, emit.constant(0.0)) for _ in range(tokens * heads)]
    for part in parts_of(fmt):
        reader = RowReader(emit, part)
        for token in range(tokens):
            reader.widen(rows[token], row_params[token])
        with cgutils.for_range(b, ir.Constant(I64, reader.chunks // reader.alike)) as loop:
            first = emit.times(loop.index, reader.alike)
            scalings = [reader.scaling(at, first) for at in row_params]
            with cgutils.for_range(b, ir.Constant(I64, reader.alike)) as inner:
                chunk = b.add(first, inner.index)
                chunk_q = b.add(q, emit.times(chunk, 4 * LANES))
                keys = [reader.values(r, chunk, s) for r, s in zip(rows, scalings, strict=True)]
                for head in range(heads):
                    query = emit.load(emit.at(chunk_q, 4 * fmt.head_dim * head), F32)
                    for token in range(tokens):
                        total = sums[token * heads + head]
                        b.store(emit.fma(keys[token], query, b.load(total)), total)
        q = emit.at(q, 4 * part.head_dim)
        rows = [emit.at(row, part.row_bytes) for row in rows]
        row_params = [emit.at(row, 4 * widened_floats(part)) for row in row_params]
    return emit.sums([b.load(total) for total in sums] + [None] * (LANES - len(sums)))


@operation(f32x16, *[literal] * 4, *[types.int64] * 6)
def score_block(emit, format_spec, in_integers, heads, least, q, row, stride, count, params, runs):
    """Scores of the next tokens with all heads: lane token * heads + head; -inf beyond the
    tokens.

    A score that is not finite is NaN, and so is all of its head's result. q: of prepare_queries.
    count: tokens that exist; the last one's row stands for missing ones. params: widened. runs:
    each of `least` rows where the block has several.
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
    if in_integers:
        scores = integer_keys(emit, format_spec, heads).scores(rows, q)
    else:
        scores = _scores(emit, fmt, heads, q, rows, row_params)
    scores = emit.fma(scores, emit.constant(0.0), scores)
    limit = b.trunc(b.mul(count, ir.Constant(I64, heads)), I32)
    most = ir.Constant(I32, tokens * heads)
    limit = b.select(b.icmp_signed("<", limit, most), limit, most)
    within = b.icmp_signed("<", emit.each(range(LANES), I32), emit.splat(limit))
    return b.select(within, scores, emit.constant(-math.inf))


@operation(types.void, literal, literal, literal, literal, *[types.int64] * 8)
def weigh_rows(
    emit,
    v_spec,
    in_integers,
    k_bytes,
    heads,
    weights,
    runs,
    num_runs,
    v_stride,
    k_stride,
    room,
    decay,
    acc,
):
    """acc = acc * decay + weights · V over a tile's rows, while the next K rows are fetched.

    weights: of score_block, 16 floats a block. decay [heads] and acc [heads, head_dim] are float32.
    """
    b, i64 = emit.builder, functools.partial(ir.Constant, I64)

    @contextlib.contextmanager
    def each(step):
        """The code to write for each step tokens; the last row of a run stands for missing ones."""
        with cgutils.for_range(b, num_runs) as loop:
            run = b.add(runs, emit.times(loop.index, RUN_BYTES))
            first, end, v_row, next_k = (
                emit.load_scalar(emit.at(run, 8 * field), I64)
                for field in (RUN_FIRST, RUN_END, RUN_V, RUN_NEXT_K)
            )
            last = b.sub(end, i64(1))
            with cgutils.for_range_slice(b, first, end, i64(step)) as (token, _):
                tokens = [token]
                for i in range(1, step):
                    other = b.add(token, i64(i))
                    tokens.append(b.select(b.icmp_signed("<", other, end), other, last))
                yield (
                    token,
                    [b.add(v_row, b.mul(at, v_stride)) for at in tokens],
                    [b.add(next_k, b.mul(at, k_stride)) for at in tokens],
                )

    if in_integers:
        values = integer_values(emit, v_spec, heads)
        last_run = b.add(runs, emit.times(b.sub(num_runs, i64(1)), RUN_BYTES))
        count = emit.load_scalar(emit.at(last_run, 8 * RUN_END), I64)
        values.round_weights(weights, each, count, room)
        values.weigh(each, room, k_bytes, decay, acc)
    else:
        _weigh(emit, parse_spec(v_spec), k_bytes, heads, weights, each, room, decay, acc)


def _weigh(emit, fmt, k_bytes, heads, weights, each, params, decay, acc):
    """As weigh_rows, by float32 products."""
    b, reader = emit.builder, RowReader(emit, fmt)
    tokens = tokens_per_block(heads)
    width = chunks_per_pass(heads, reader.chunks)
    param_bytes = 4 * widened_floats(fmt)
    with each(1) as (token, (row,), _):
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
        with each(1) as (token, (row,), (next_k,)):
            emit.prefetch(next_k, k_bytes)
            row_params = b.add(params, emit.times(token, param_bytes))
            block = emit.times(b.udiv(token, ir.Constant(I64, tokens)), LANES)
            lane = emit.times(b.urem(token, ir.Constant(I64, tokens)), heads)
            at_weights = b.add(weights, emit.times(b.add(block, lane), 4))
            for c, chunk in enumerate(chunks):
                if c % reader.alike == 0 or width % reader.alike != 0 != reader.alike % width:
                    scaling = reader.scaling(row_params, chunk)
                values = reader.values(row, chunk, scaling)
                for head in range(heads):
                    total = sums[head * width + c]
                    weight = emit.load_splat(emit.at(at_weights, 4 * head))
                    b.store(emit.fma(values, weight, b.load(total)), total)
        for i, (place, total) in enumerate(zip(places, sums, strict=True)):
            factor = emit.load_splat(emit.at(decay, 4 * (i // width)))
            emit.store(place, emit.fma(emit.load(place, F32), factor, b.load(total)))
