"""Attention's products as sums of integers: VNNI multiplies and adds 32 pairs of int16 at a
time.

    K    q = step * q16                       a step, a power of two, for each head
    V    p * scale = step * w16               a step for each head, group and tile of tokens

    a vector of codes: 16 words of 32 bits; a field of a word is a pair of codes, one in either half

         K   a word of a row: two elements of one token      x   q16 of both elements
         V   halves of two rows: one element of two tokens   x   w16 of both tokens

Integer sums are exact: only q16 and w16 are rounded. Products with shifts are float32 sums of what
was not rounded. The middle of all codes is taken off first, so an offset of the values costs no
accuracy. bfloat16 queries are rounded where they are below 1/128 of their greatest element.
"""

import functools

from llvmlite import ir
from llvmlite.ir import VectorType
from numba.core import cgutils

from kvquant.rows.format import RowFormat
from kvquant.rows.latent import AnyFormat

from .simd import F32, I16, I32, I64, LANES

GREATEST = 32767.0  # of an int16
LEAST_STEP = 2.0**-100
VECTOR_BYTES = 64
UNIT_BYTES = 32  # of each of two rows of V: a vector of both
MAX_INTEGER_HEADS = 8  # query heads of a work item: at least two tokens a block
MAX_SUMS = 28  # sums (head, chunk) in registers; AVX-512 has 32


def _elements_of(fmt: RowFormat, nbytes: int) -> int:
    return nbytes * 8 // fmt.bits


def _may_serve(fmt: AnyFormat, heads: int, nbytes: int) -> bool:
    """Whether rows are vectors of such pieces, each in one group or of whole groups."""
    if heads > MAX_INTEGER_HEADS or not isinstance(fmt, RowFormat):
        return False
    is_integer = fmt.facts.is_integer
    if not fmt.pick(nibbles=True, quarters=True, planes=False, elements=False, bytes=is_integer):
        return False
    piece, group = _elements_of(fmt, nbytes), fmt.group_size
    return fmt.head_dim % piece == 0 and group % LANES == 0 and 0 in (group % piece, piece % group)


class Fields:
    """How a format's codes stand in 16-bit words."""

    def __init__(self, emit, fmt):
        self.emit, self.fmt = emit, fmt
        self.count = 16 // fmt.bits
        self.levels = int(fmt.facts.levels)
        self.middle = fmt.facts.levels / 2

    def of(self, words, which):
        """A field of each of 32 words: codes as int16."""
        b, shift = self.emit.builder, which * self.fmt.bits
        moved = b.lshr(words, self.emit.constant(shift, I16, 32)) if shift else words
        if which == self.count - 1:
            return moved
        return b.and_(moved, self.emit.constant(self.levels, I16, 32))

    def add_products(self, total, codes, factors):
        """total + the sum of each pair's products, 16 int32."""
        b = self.emit.builder
        sixteen, pairs = VectorType(I32, LANES), VectorType(I16, 2 * LANES)
        function = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(sixteen, [pairs, pairs]), "llvm.x86.avx512.pmaddw.d.512"
        )
        return b.add(total, b.call(function, [codes, b.bitcast(factors, pairs)]))

    def rounded(self, x):
        """The nearest integers of floats whose magnitude is below 2**22."""
        emit, b, count = self.emit, self.emit.builder, x.type.count
        ints = VectorType(I32, count)
        magic = emit.constant(1.5 * 2**23, F32, count)
        return b.sub(b.bitcast(b.fadd(x, magic), ints), b.bitcast(magic, ints))

    def paired(self, low, high):
        b, count = self.emit.builder, low.type.count
        low = b.and_(low, self.emit.constant(0xFFFF, I32, count))
        return b.or_(low, b.shl(high, self.emit.constant(16, I32, count)))

    def parameters(self, rows):
        """A function of lanes that number (row, group): their scales and their shifts."""
        emit, b, groups = self.emit, self.emit.builder, self.fmt.groups
        headers = joined(emit, [emit.load(row, I32, groups) for row in rows])
        count = 2 * headers.type.count
        floats = emit.from_half(b.bitcast(headers, VectorType(I16, count)))
        return lambda lanes: [emit.pick_lanes(floats, [2 * at + i for at in lanes]) for i in (0, 1)]


class Keys(Fields):
    """Scores of a block: a vector of codes is a piece of `together` rows.

    room: [blocks, fields, heads, words] q16 pairs; for each segment (a group, or a block of
    several) and head 16 int32 that sums begin with and 16 float32 factors of shifts; 16 steps.
    """

    def __init__(self, emit, fmt, heads, tokens):
        super().__init__(emit, fmt)
        self.heads, self.tokens = heads, tokens
        self.together = min(4, tokens)
        self.words = LANES // self.together
        self.block = _elements_of(fmt, VECTOR_BYTES // self.together)
        self.segment = max(self.block, fmt.group_size)
        self.segments = fmt.head_dim // self.segment
        self.begin_at = 2 * fmt.head_dim * heads
        self.shifts_at = self.begin_at + VECTOR_BYTES * self.segments * heads
        self.steps_at = self.shifts_at + VECTOR_BYTES * self.segments * heads
        self.room_bytes = self.steps_at + VECTOR_BYTES

    @classmethod
    def serve(cls, fmt: AnyFormat, heads: int, tokens: int) -> bool:
        """Whether there is code for rows of this format."""
        return _may_serve(fmt, heads, VECTOR_BYTES // min(4, tokens))

    def place_of_query(self, block, field, head):
        return ((block * self.count + field) * self.heads + head) * 4 * self.words

    def prepare(self, q, factor, room):
        """Round q [heads, head_dim] float32 and write the room; scores are times the factor."""
        emit, b, fmt = self.emit, self.emit.builder, self.fmt
        i64 = functools.partial(ir.Constant, I64)
        chunks = fmt.head_dim // LANES
        with cgutils.for_range(b, i64(self.heads)) as loop:
            head = loop.index
            own = b.add(q, emit.times(head, 4 * fmt.head_dim))
            greatest = emit.constant(LEAST_STEP * 2**14)
            for chunk in range(chunks):
                x = emit.call("llvm.fabs", emit.load(emit.at(own, 4 * LANES * chunk), F32))
                greatest = emit.call("llvm.maxnum", greatest, x)
            bits = b.bitcast(emit.reduce("fmax", greatest), I32)
            exponent = b.and_(bits, ir.Constant(I32, 0xFF << 23))
            step = b.bitcast(b.sub(exponent, ir.Constant(I32, 14 << 23)), F32)
            inverse = b.bitcast(b.sub(ir.Constant(I32, (254 + 14) << 23), exponent), F32)
            inverse = emit.splat(inverse, self.words)
            for token in range(self.tokens):
                place = b.add(room, b.add(emit.times(head, 4), i64(self.steps_at)))
                emit.store(emit.at(place, 4 * token * self.heads), b.fmul(step, factor))
            with cgutils.for_range(b, i64(self.segments)) as inner:
                self._prepare_segment(own, inner.index, head, inverse, room)

    def _prepare_segment(self, q, segment, head, inverse, room):
        emit, b, words = self.emit, self.emit.builder, self.words
        ints = emit.constant(0, I32, words)
        left = emit.constant(0.0, F32, words)
        size = self.segment // self.block
        for i in range(size):
            block = b.add(emit.times(segment, size), ir.Constant(I64, i))
            x = emit.load(b.add(q, emit.times(block, 4 * self.block)), F32, self.block)
            at = b.add(
                emit.times(block, self.place_of_query(1, 0, 0)),
                emit.times(head, self.place_of_query(0, 0, 1)),
            )
            for field in range(self.count):
                pair = []
                for half in range(2):
                    elements = [(2 * w + half) * self.count + field for w in range(words)]
                    exact = b.fmul(emit.pick_lanes(x, elements), inverse)
                    greatest = emit.constant(GREATEST, F32, words)
                    over = b.fcmp_ordered(">", exact, greatest)
                    pair.append(self.rounded(b.select(over, greatest, exact)))
                    ints = b.add(ints, pair[half])
                    left = b.fadd(left, b.fsub(exact, b.sitofp(pair[half], left.type)))
                place = b.add(room, emit.at(at, self.place_of_query(0, field, 0)))
                emit.store(place, self.paired(*pair))
        middle = emit.constant(self.middle, F32, words)
        spread = [lane % words for lane in range(LANES)]
        at = b.add(emit.times(segment, self.heads), head)
        at = b.add(room, emit.times(at, VECTOR_BYTES))
        begin = self.rounded(b.fmul(left, middle))
        emit.store(emit.at(at, self.begin_at), emit.pick_lanes(begin, spread))
        total = b.fadd(left, b.sitofp(ints, left.type))
        emit.store(emit.at(at, self.shifts_at), emit.pick_lanes(total, spread))

    def scores(self, rows, room):
        """Scores of the block's rows, lane token * heads + head."""
        emit, b, fmt, n = self.emit, self.emit.builder, self.fmt, self.together
        quads = [rows[at : at + n] for at in range(0, self.tokens, n)]
        items = [(quad, head) for quad in range(len(quads)) for head in range(self.heads)]
        totals = dict.fromkeys(items, emit.constant(0.0))
        size, nbytes = self.segment // self.block, VECTOR_BYTES // n
        groups = self.segment // fmt.group_size
        spread = [lane % self.words for lane in range(LANES)]
        lanes = [
            lane // self.words * fmt.groups + lane % self.words * groups // self.words
            for lane in range(LANES)
        ]
        parameters = [self.parameters(own) for own in quads]
        for segment in range(self.segments):
            tables = VECTOR_BYTES * segment * self.heads
            sums = {
                (quad, head): emit.load(
                    emit.at(room, self.begin_at + tables + VECTOR_BYTES * head), I32
                )
                for quad, head in items
            }
            for block in range(segment * size, (segment + 1) * size):
                codes = []
                for quad in quads:
                    parts = [
                        emit.load(emit.at(row, fmt.code_offset + nbytes * block), I32, self.words)
                        for row in quad
                    ]
                    codes.append(b.bitcast(joined(emit, parts), VectorType(I16, 2 * LANES)))
                for field in range(self.count):
                    numbers = [self.of(words, field) for words in codes]
                    for head in range(self.heads):
                        place = emit.at(room, self.place_of_query(block, field, head))
                        query = emit.pick_lanes(emit.load(place, I32, self.words), spread)
                        for quad in range(len(quads)):
                            key = quad, head
                            sums[key] = self.add_products(sums[key], numbers[quad], query)
            of_segment = [lane + segment * groups for lane in lanes]
            for quad in range(len(quads)):
                scale, shift = parameters[quad](of_segment)
                for head in range(self.heads):
                    at = emit.at(room, self.shifts_at + tables + VECTOR_BYTES * head)
                    total = emit.fma(emit.load(at, F32), shift, totals[quad, head])
                    floats = b.sitofp(sums[quad, head], total.type)
                    totals[quad, head] = emit.fma(floats, scale, total)
        found = self._summed([totals[item] for item in items])
        return b.fmul(found, emit.load(emit.at(room, self.steps_at), F32))

    def _summed(self, vectors):
        """The sums of each vector's words, of each of its tokens, as lanes (token, head)."""
        emit, b, words = self.emit, self.emit.builder, self.words

        def halved(x, y, first, second):
            pick = [self.emit.each(order, I32) for order in (first, second)]
            return b.fadd(*(b.shuffle_vector(x, y, order) for order in pick))

        even = [4 * (i // 4) + (0, 2, 16, 18)[i % 4] for i in range(LANES)]
        odd = [lane + 1 for lane in even]
        vectors = vectors + [emit.constant(0.0)] * (words - len(vectors))
        for _ in range(2):
            vectors = [
                halved(x, y, even, odd) for x, y in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        if words == 8:  # lanes (token, half, head % 4)
            low = [(i // 8) * 8 + i % 4 + (i // 4 % 2) * 16 for i in range(LANES)]
            vectors = [halved(*vectors, low, [lane + 4 for lane in low])]
        lanes = []
        for lane in range(LANES):
            token, head = divmod(lane, self.heads)
            quad, token = divmod(min(token, self.tokens - 1), self.together)
            lanes.append(token * words + quad * self.heads + head)
        return emit.pick_lanes(vectors[0], lanes)


def joined(emit, vectors):
    while len(vectors) > 1:
        count = 2 * vectors[0].type.count
        order = emit.each(range(count), I32)
        vectors = [
            emit.builder.shuffle_vector(x, y, order)
            for x, y in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


class Values(Fields):
    """Weighted sums of a tile: a vector of codes is a unit of two rows.

    room: [pairs, heads, groups] w16 pairs; [groups, blocks] 16 float32 weights; for each group 16
    float32 steps and 16 sums of shifts, lane i of the head i % heads.
    """

    def __init__(self, emit, fmt, heads, tokens, tile):
        super().__init__(emit, fmt)
        self.heads, self.tokens, self.tile = heads, tokens, tile
        self.unit = _elements_of(fmt, UNIT_BYTES)
        self.units = fmt.head_dim // self.unit
        # groups of a unit, which its lanes have by turns, and the word of each lane
        self.together = max(self.unit // fmt.group_size, 1)
        self.words = [
            lane % self.together * (LANES // self.together) + lane // self.together
            for lane in range(LANES)
        ]
        self.weights_at = 4 * fmt.groups * tile // 2 * heads
        self.steps_at = self.weights_at + VECTOR_BYTES * fmt.groups * (tile // tokens)
        self.shifts_at = self.steps_at + VECTOR_BYTES * fmt.groups
        self.room_bytes = self.shifts_at + VECTOR_BYTES * fmt.groups

    @classmethod
    def serve(cls, fmt: AnyFormat, heads: int) -> bool:
        """Whether there is code for rows of this format."""
        return _may_serve(fmt, heads, UNIT_BYTES)

    def by_head(self, combine, x):
        """Lanes (token, head) combined over the tokens; each lane has its head's."""
        used, distance = self.tokens * self.heads, self.heads
        while distance < used:
            moved = [(lane + distance) % used for lane in range(LANES)]
            x = combine(x, self.emit.pick_lanes(x, moved))
            distance *= 2
        return x

    def round_weights(self, weights, each, count, room):
        """Fill the room for a tile of count tokens; each: as weigh_rows has it."""
        emit, b, fmt = self.emit, self.emit.builder, self.fmt
        groups = range(fmt.groups)
        tables = VECTOR_BYTES * (self.tile // self.tokens)
        zero = emit.constant(0.0)
        greatest, scales, shifts = (
            [cgutils.alloca_once_value(b, zero) for _ in groups] for _ in range(3)
        )
        lanes = [min(lane // self.heads, self.tokens - 1) for lane in range(LANES)]

        with each(self.tokens) as (token, rows, _):
            at = emit.times(b.udiv(token, ir.Constant(I64, self.tokens)), VECTOR_BYTES)
            weight, place = emit.load(b.add(weights, at), F32), b.add(room, at)
            parameters = self.parameters(rows)
            for group in groups:
                scale, shift = parameters([at * fmt.groups + group for at in lanes])
                scaled = b.fmul(weight, scale)
                emit.store(emit.at(place, self.weights_at + tables * group), scaled)
                magnitude = emit.call("llvm.fabs", scaled)
                top = emit.call("llvm.maxnum", b.load(greatest[group]), magnitude)
                b.store(top, greatest[group])
                b.store(b.fadd(b.load(scales[group]), scaled), scales[group])
                b.store(emit.fma(weight, shift, b.load(shifts[group])), shifts[group])
        pairs = self.tokens // 2 * self.heads
        orders = [
            [2 * at - at % self.heads + odd * self.heads for at in range(pairs)] for odd in (0, 1)
        ]
        inverses, steps, rounded = [], [], []
        for group in groups:
            top = self.by_head(functools.partial(emit.call, "llvm.maxnum"), b.load(greatest[group]))
            top = emit.call("llvm.maxnum", top, emit.constant(LEAST_STEP))
            inverses.append(b.fdiv(emit.constant(GREATEST), top))
            steps.append(b.fmul(top, emit.constant(1 / GREATEST)))
            rounded.append(cgutils.alloca_once_value(b, emit.constant(0, I32)))
        last = b.udiv(b.sub(count, ir.Constant(I64, 1)), ir.Constant(I64, self.tokens))
        with cgutils.for_range(b, b.add(last, ir.Constant(I64, 1))) as loop:
            place = b.add(room, emit.times(loop.index, VECTOR_BYTES))
            words = []
            for group in groups:
                scaled = emit.load(emit.at(place, self.weights_at + tables * group), F32)
                whole = self.rounded(b.fmul(scaled, inverses[group]))
                b.store(b.add(b.load(rounded[group]), whole), rounded[group])
                words.append(self.paired(*(emit.pick_lanes(whole, order) for order in orders)))
            words = padded(emit, words, 1 << (pairs - 1).bit_length())
            stride = words.type.count // fmt.groups
            order = [group * stride + pair for pair in range(pairs) for group in groups]
            at = b.add(room, emit.times(loop.index, 4 * pairs * fmt.groups))
            emit.store(at, emit.pick_lanes(words, order))
        for group in groups:
            sums = b.sitofp(b.load(rounded[group]), steps[group].type)
            left = b.fsub(b.load(scales[group]), b.fmul(sums, steps[group]))
            shift = emit.fma(left, emit.constant(self.middle), b.load(shifts[group]))
            at = emit.at(room, VECTOR_BYTES * group)
            emit.store(emit.at(at, self.steps_at), steps[group])
            emit.store(emit.at(at, self.shifts_at), self.by_head(b.fadd, shift))

    def first_group(self, unit):
        """Of a unit, which may have several."""
        in_unit = self.emit.times(unit, self.unit)
        return self.emit.builder.udiv(in_unit, ir.Constant(I64, self.fmt.group_size))

    def of_head(self, table, head, unit):
        """What a table of the room, [groups] vectors, has for a head and for a unit's words."""
        emit, b = self.emit, self.emit.builder
        at = emit.at(b.add(table, emit.times(self.first_group(unit), VECTOR_BYTES)), 4 * head)
        found = emit.load_splat(at)
        for group in range(1, self.together):
            mask = [int(lane % self.together == group) for lane in range(LANES)]
            other = emit.load_splat(emit.at(at, VECTOR_BYTES * group))
            found = b.select(emit.each(mask, ir.IntType(1)), other, found)
        return found

    def weigh(self, each, room, k_bytes, decay, acc):
        """acc = acc * decay + w16 · V; each, k_bytes: as weigh_rows has them."""
        emit, b, heads = self.emit, self.emit.builder, self.heads
        most = max(MAX_SUMS // heads, 1)
        at_a_time = max(n for n in (1, 2, 4, 8) if n <= min(self.count, most))
        fit = [
            n for n in range(1, self.units + 1) if self.units % n == 0 and n * self.count <= most
        ]
        units = max(fit, default=1)
        for begin in range(0, self.count, at_a_time):
            with cgutils.for_range(b, ir.Constant(I64, self.units // units)) as loop:
                first = emit.times(loop.index, units)
                own = [b.add(first, ir.Constant(I64, unit)) for unit in range(units)]
                sums = {
                    (unit, head, field): cgutils.alloca_once_value(b, emit.constant(0, I32))
                    for unit in own
                    for head in range(heads)
                    for field in range(begin, begin + at_a_time)
                }
                with each(2) as (token, rows, next_k):
                    for row in next_k:
                        emit.prefetch(row, k_bytes)
                    pair = b.udiv(token, ir.Constant(I64, 2))
                    weights = b.add(room, emit.times(pair, 4 * heads * self.fmt.groups))
                    for unit in own:
                        words, factors = self._pair(rows, weights, unit)
                        for field in range(begin, begin + at_a_time):
                            numbers = self.of(words, field)
                            for head in range(heads):
                                total = sums[unit, head, field]
                                found = self.add_products(b.load(total), numbers, factors[head])
                                b.store(found, total)
                for (unit, head, field), total in sums.items():
                    step = self.of_head(emit.at(room, self.steps_at), head, unit)
                    shift = self.of_head(emit.at(room, self.shifts_at), head, unit)
                    chunk = b.add(emit.times(unit, self.count), ir.Constant(I64, field))
                    place = emit.at(acc, 4 * self.fmt.head_dim * head)
                    place = b.add(place, emit.times(chunk, VECTOR_BYTES))
                    factor = emit.load_splat(emit.at(decay, 4 * head))
                    before = emit.fma(emit.load(place, F32), factor, shift)
                    floats = b.sitofp(b.load(total), before.type)
                    emit.store(place, emit.fma(floats, step, before))

    def _pair(self, rows, weights, unit):
        """The words of a unit of two rows, and for each head the w16 pairs that multiply them."""
        emit, b = self.emit, self.emit.builder
        at = emit.times(unit, UNIT_BYTES)
        codes = [emit.load(emit.at(b.add(row, at), self.fmt.code_offset), I16) for row in rows]
        order = [half * LANES + word for word in self.words for half in (0, 1)]
        words = b.shuffle_vector(*codes, emit.each(order, I32))
        at = b.add(weights, emit.times(self.first_group(unit), 4))
        spread = [lane % self.together for lane in range(LANES)]
        pairs = [
            emit.load(emit.at(at, 4 * self.fmt.groups * head), I32, self.together)
            for head in range(self.heads)
        ]
        return words, [emit.pick_lanes(pair, spread) for pair in pairs]

    def in_order(self, chunks):
        """The chunks of a row of acc in the order of its elements."""
        emit, ordered = self.emit, []
        for unit in range(0, len(chunks), self.count):
            fields = joined(emit, chunks[unit : unit + self.count])
            for at in range(0, self.unit, LANES):
                elements = range(at, at + LANES)
                lanes = [
                    e % self.count * LANES + self.words.index(e // self.count) for e in elements
                ]
                ordered.append(emit.pick_lanes(fields, lanes))
        return ordered


def padded(emit, vectors, count):
    """One vector of all, each with unused lanes up to a count."""
    order = [min(lane, vectors[0].type.count - 1) for lane in range(count)]
    return joined(emit, [emit.pick_lanes(x, order) for x in vectors])
