"""q·K of a tile: the query as B fragments, and the scores of 16 tokens x 8 columns.

    A  16 tokens x 16 codes: ldmatrix gives lane (g, t) word t of a chunk of row g; the order of
       the elements inside an MMA is free as long as the query has the same
    B  16 elements x 8 columns: lane (g, t) holds its elements of the query head of column g
    D  the scores: tokens g and g + 8, columns 2t and 2t + 1

Of direct rows (device/row_layout.py) lanes load these words themselves. There row g of the tile's
matrix i, of four, is token 4g + i.

Each group has sums of its own, multiplied by its scale in float32. Shifts take one more MMA: A is
the header, B holds 0 and the query's sum over the group, as a high and a low fp16 part. The query
is scaled by a power of two to 2**14 <= max |q| < 2**15, and scores are scaled back.
"""

from operator import add

from numba import cuda, float32, uint32, uint64

from ..device.codes import HALVES, MMA, PACK, make_load_word, make_pair_factor, make_unpack
from ..device.fragments import (
    ZEROS,
    add_rows,
    load_pair,
    load_sums,
    make_matrix_of,
    over_quad,
    store_sums,
)
from ..device.jit import device_function, in_turn
from ..device.powers import norm_of
from ..device.ptx import (
    high_bf16,
    high_f16,
    load_global_u32,
    load_global_u32x2,
    load_global_u32x4,
    load_matrix_x2,
    load_matrix_x4,
    load_shared_u32,
    load_shared_u32x2,
    load_shared_u32x4,
    low_bf16,
    low_f16,
    maximum,
    mma_f16,
    pack_f16,
    shfl,
    store_shared_u32x2,
    word_from_lane,
)
from ..device.row_layout import factor_of, operand_of
from .queries import make_query_row
from .spec import MMA_COLUMNS, QueryWords

CHUNKS_UNROLLED = 8
WORDS_UNROLLED = 32
MMAS_UNROLLED = 32  # of 8 columns: a longer loop stays one, and puts fragments into local memory


def make_load_query(staged, spec):
    """Make the function that loads the queries of a warp: fragments, and factors of the scores."""
    return in_turn([_make_load_eight(staged, spec, e) for e in range(spec.eights)])


def _make_load_eight(staged, spec, e):
    """Make the function that loads the queries of 8 columns, the e-th eight of a warp's."""
    query, words = spec.query, QueryWords(staged, spec.query)
    RAW, PARTS, FRAGMENTS, SHIFTS = words.raw, words.parts, words.fragments, words.shifts
    DIM, GROUPS, GROUP = staged.fmt.head_dim, staged.fmt.groups, staged.group_span
    CHUNKS, SPAN, STRANDS = staged.chunks, staged.span, staged.strands
    SHARED, MMAS = staged.parts, staged.mmas  # SHARED: groups in a chunk
    UNITS, FIRST_WORD = staged.header_units, staged.header_word(0)
    IN_BF16 = operand_of(staged.fmt) == "bf16"
    IS_EXACT, NORMAL = staged.fmt.is_exact, not IN_BF16  # bf16 has the range of float32
    # elements of a lane in a chunk, or in chunks among which they alternate, one after another
    STEP = STRANDS * SPAN // 4
    HALF = STEP // 2  # a pair is an element and the one so many after it
    UNSCALE, FACTOR = 1 / factor_of(staged.fmt), factor_of(staged.fmt)
    COLUMN, FIRST, FIRST_FACTOR = MMA_COLUMNS * e, e * FRAGMENTS, 2 * e
    SHIFTS += FIRST
    pack, (low, high) = PACK[operand_of(staged.fmt)], HALVES[query]
    query_row, pair_factor = make_query_row(spec.causal), make_pair_factor(staged.fmt)

    def make_pack(start, stop):
        """Make the function that packs the fragments of some chunks, and adds up their groups."""

        @device_function
        def pack_chunks(fragments, sums, raw, norm, t):
            for c in range(start, stop):
                for part in range(SHARED):
                    mine = SHARED == 1 or (uint32(STEP) * uint32(t)) // uint32(GROUP) == uint32(
                        part
                    )
                    total = float32(0)
                    for j in range(2 * MMAS):
                        element = HALF * (c // STRANDS) * 2 + STRANDS * j + c % STRANDS
                        first, second = raw[element // 2], raw[(element + HALF) // 2]
                        x = (low(first) if element % 2 == 0 else high(first)) * norm
                        y = (low(second) if element % 2 == 0 else high(second)) * norm
                        x = x if mine else float32(0)
                        y = y if mine else float32(0)
                        total += x + y
                        f = float32(1) / float32(pair_factor(j, c % STRANDS))
                        i = FIRST + (c * SHARED + part) * MMAS * 2 + j
                        fragments[i] = pack_f16(y * f, x * f)
                    group = c * SHARED + part if SHARED > 1 else c * SPAN // GROUP
                    sums[group] += total

        return pack_chunks

    pieces = range(0, CHUNKS, CHUNKS_UNROLLED)
    pack_all = in_turn([make_pack(i, min(i + CHUNKS_UNROLLED, CHUNKS)) for i in pieces])

    @device_function
    def load_eight(fragments, factors, queries, score_scale, lane):
        query, lie, first_column, heads = queries
        t = uint32(lane & uint32(3))
        column = uint32(first_column + uint32(COLUMN) + uint32(lane >> uint32(2)))
        row = query_row(query, lie, column)
        raw = cuda.local.array(RAW, uint32)
        for i in range(RAW):
            raw[i] = uint32(0)
        if column < heads:
            if IS_EXACT:
                for c in range(CHUNKS):
                    raw[c] = load_global_u32(row + uint64(16 * c) + uint64(4) * uint64(t))
            else:
                for b in range(CHUNKS // STRANDS):
                    d = uint32(STRANDS * SPAN * b) + uint32(STEP) * uint32(t)
                    if d < uint32(DIM):
                        at = row + uint64(2) * uint64(d)
                        if STEP == 4:
                            pair = load_global_u32x2(at)
                            raw[2 * b], raw[2 * b + 1] = pair[0], pair[1]
                        else:
                            for i in range(STEP // 8):
                                four = load_global_u32x4(at + uint64(16 * i))
                                store_sums(raw, HALF * b + 4 * i, four)
        norm = float32(1)
        back = float32(1)
        if NORMAL:
            largest = float32(0)
            for i in range(RAW):
                largest = maximum(largest, maximum(abs(low(raw[i])), abs(high(raw[i]))))
            norm, back = norm_of(over_quad(largest, maximum))
        if IS_EXACT:
            for c in range(CHUNKS):
                x = low(raw[c]) * norm
                y = high(raw[c]) * norm
                word = pack(y, x)
                i = FIRST + c // 2 * 2 * PARTS + c % 2
                fragments[i] = word
                if PARTS == 2:
                    fragments[i + 2] = pack(y - high_bf16(word), x - low_bf16(word))
        if not IS_EXACT:
            sums = cuda.local.array(GROUPS, float32)
            for i in range(GROUPS):
                sums[i] = float32(0)
            pack_all(fragments, sums, raw, norm, t)
            for unit in range(UNITS):
                of_word = float32(0)
                for group in range(GROUPS):
                    if group // 4 == unit:
                        total = over_quad(sums[group], add)
                        if t == (FIRST_WORD + group) % 4:
                            of_word = total * float32(UNSCALE)
                big = pack_f16(of_word, float32(0))
                fragments[SHIFTS + 2 * unit] = big
                fragments[SHIFTS + 2 * unit + 1] = pack_f16(of_word - high_f16(big), float32(0))
        # scores count before these factors, so that each takes one multiply-add in the exponent
        factor = score_scale * float32(FACTOR)
        factors[FIRST_FACTOR] = factor * shfl(back, uint32(8) * t)
        factors[FIRST_FACTOR + 1] = factor * shfl(back, uint32(8) * t + uint32(4))

    return load_eight


def make_keep_query(staged, spec):
    """The function that leaves a warp's fragments in registers, or for a ring in shared memory."""
    words = QueryWords(staged, spec.query)
    WORDS = words.fragments

    @device_function
    def leave(fragments, place, lane, of_ring):
        return fragments

    def make_store(start, stop):
        @device_function
        def store(fragments, at):
            for i in range(start, stop, 2):
                store_shared_u32x2(at + uint32(128 * i), load_pair(fragments, i))

        return store

    pieces = range(0, WORDS, WORDS_UNROLLED)
    store_all = in_turn([make_store(i, min(i + WORDS_UNROLLED, WORDS)) for i in pieces])

    @device_function
    def share(fragments, place, lane, of_ring):
        if of_ring == uint32(0):
            store_all(fragments, place + uint32(8) * lane)
        cuda.syncthreads()
        return place

    return share if words.in_shared else leave


def _make_query_reader(words):
    """Two functions: what a tile begins with, and two words of a lane's fragments then."""

    @device_function
    def in_registers(fragments, lane):
        return fragments

    @device_function
    def in_shared(place, lane):
        # from a lane, anew for each tile: LLVM would keep the address of each pair in a register
        return word_from_lane(place, uint32(0)) + uint32(8) * lane

    @device_function
    def pair_in_shared(place, i):
        return load_shared_u32x2(place + uint32(128 * i))

    return (in_shared, pair_in_shared) if words.in_shared else (in_registers, load_pair)


def _make_key_reader(staged):
    """Two functions: where a lane reads in a tile, and its words of the chunks c and c + 1 then, of
    rows g and g + 8 each."""
    ROW, HALF, PREFIX, STRANDS = staged.stride, staged.half, staged.prefix, staged.strands
    ROW_STEP = staged.token_steps[0] * ROW

    @device_function
    def load_matrices(matrix, c, h):
        return load_matrix_x4(matrix + uint32(PREFIX + 16 * c + HALF * h))

    if not staged.direct:
        return make_matrix_of(ROW), load_matrices
    load_word = make_load_word(staged.fmt)

    @device_function
    def row_of(rows, lane):
        row = rows + (lane >> uint32(2)) * uint32(ROW_STEP) + uint32(PREFIX)
        return uint32(row), uint32(lane & uint32(3))

    @device_function
    def two_words(codes, t, c):
        if STRANDS == 2:  # 32-bit sums cost the fewest instructions here, 64-bit ones below
            return load_word(uint32(codes), uint32(t + uint32(2 * c)))
        return load_word(codes + uint32(16 * c), t)[0], load_word(codes + uint32(16 * c + 16), t)[0]

    @device_function
    def load_words(place, c, h):
        codes, t = place
        low = two_words(codes + uint32(HALF * h), t, c)
        high = two_words(codes + uint32(HALF * h + ROW), t, c)
        return low[0], high[0], low[1], high[1]

    return row_of, load_words


def make_scores(staged, query, eights):
    """The function from a tile in shared memory to its scores, but for a factor. MMAs form chains,
    each with sums of its own, in turn: none need wait for the one before it."""
    words = QueryWords(staged, query)
    EIGHTS, FRAGMENTS, SHIFTS = eights, words.fragments, words.shifts
    ROW, CHUNKS, SPAN, HALF = staged.stride, staged.chunks, staged.span, staged.half
    GROUPS, PARTS, MMAS = staged.fmt.groups, staged.parts, staged.mmas
    STRANDS = staged.strands
    IS_EXACT, UNITS, QUERY_PARTS = staged.fmt.is_exact, staged.header_units, words.parts
    DIRECT, ROW_STEP = staged.direct, staged.token_steps[0] * ROW
    OTHER_ROW, WORD, SCALES = staged.token_steps[1] * ROW, 4 * staged.header_word(0), 4 * GROUPS
    # chain j takes the MMAs of chunk `c` (with `part` and `m`) of step s: see the loops
    CHAINS = GROUPS if GROUPS > 1 else min(2, CHUNKS // 2 if IS_EXACT else CHUNKS)
    PER_GROUP = max(staged.fmt.group_size // SPAN, 1)  # chunks, of rows with more groups
    if IS_EXACT:
        STEPS = -(-CHUNKS // 2 // CHAINS)
    else:
        STEPS = MMAS * (PER_GROUP if GROUPS > 1 else -(-CHUNKS // CHAINS))
    assert STRANDS in (1, CHAINS)  # so a chain has the chunks of a strand
    # chains, and halves of 16 rows, that are worked on together: more need too many registers
    SIDE_BY_SIDE = min(CHAINS, 2) if words.in_shared else CHAINS
    TOGETHER = 2 if SIDE_BY_SIDE * EIGHTS <= 4 else 1
    PAIRS = (CHUNKS + 1) // 2
    # chains of several groups start all over the row; those of one group go along it
    AT_ONCE = GROUPS > 1 and not words.in_shared
    UNROLLED = max(1, MMAS_UNROLLED // (SIDE_BY_SIDE * TOGETHER))
    SUMS, WORDS = 4 * CHAINS * EIGHTS * TOGETHER, 4 * PAIRS * TOGETHER
    unpack, (place_of, load_keys) = make_unpack(staged.fmt), _make_key_reader(staged)
    mma, (query_of, query_pair) = MMA[operand_of(staged.fmt)], _make_query_reader(words)

    @device_function
    def exact_products(sums, rows, lane, fragments):
        place = place_of(rows, lane)
        for s in range(STEPS):
            for j in range(CHAINS):
                c = j + CHAINS * s
                if 2 * c < CHUNKS:
                    for h in range(TOGETHER):
                        keys = load_keys(place, 2 * c, h)
                        for e in range(EIGHTS):
                            at = 4 * ((h * CHAINS + j) * EIGHTS + e)
                            for part in range(QUERY_PARTS):
                                i = e * FRAGMENTS + 2 * (c * QUERY_PARTS + part)
                                q = query_pair(fragments, i)
                                store_sums(sums, at, mma(keys, q, load_sums(sums, at)))

    def make_steps(chain, start):
        stop, last = min(start + UNROLLED, STEPS), min(chain + SIDE_BY_SIDE, CHAINS)

        @device_function
        def steps(sums, codes, place, fragments):
            for s in range(start, stop):
                m = s % MMAS
                for j in range(chain, last):
                    part = 0
                    if GROUPS == 1:
                        c = j + CHAINS * (s // MMAS)
                    elif PARTS == 1:
                        c = j * PER_GROUP + s // MMAS
                    else:
                        c = j // PARTS
                        part = j % PARTS
                    if c < CHUNKS:
                        for h in range(TOGETHER):
                            pair = 4 * (h * PAIRS + c // 2)
                            if not AT_ONCE and c % 2 == 0 and m == 0:
                                store_sums(codes, pair, load_keys(place, c, h))
                            x0, x1 = unpack(codes[pair + 2 * (c % 2)], m, j % STRANDS)
                            y0, y1 = unpack(codes[pair + 2 * (c % 2) + 1], m, j % STRANDS)
                            for e in range(EIGHTS):
                                at = 4 * ((h * CHAINS + j) * EIGHTS + e)
                                i = e * FRAGMENTS + ((c * PARTS + part) * MMAS + m) * 2
                                q = query_pair(fragments, i)
                                a = mma_f16((x0, y0, x1, y1), q, load_sums(sums, at))
                                store_sums(sums, at, a)

        return steps

    def make_code_products(chain):
        all_steps = in_turn([make_steps(chain, s) for s in range(0, STEPS, UNROLLED)])

        @device_function
        def code_products(sums, rows, lane, fragments):
            place = place_of(rows, lane)
            codes = cuda.local.array(WORDS, uint32)
            if AT_ONCE:
                for pair in range(PAIRS):
                    for h in range(TOGETHER):
                        store_sums(codes, 4 * (h * PAIRS + pair), load_keys(place, 2 * pair, h))
            all_steps(sums, codes, place, fragments)

        return code_products

    @device_function
    def load_headers(scales, rows, lane):
        if DIRECT:  # the query has zeros for the words that are no header
            return scales[0], scales[1], scales[0], scales[1]
        at = rows + (lane & uint32(15)) * uint32(ROW)
        if UNITS == 2:
            return load_matrix_x4(at + (lane >> uint32(4)) * uint32(16))
        d = load_matrix_x2(at)
        return d[0], d[1], d[0], d[1]

    @device_function
    def shift_products(h, fragments, e):
        i = e * FRAGMENTS + SHIFTS
        sums = mma_f16((h[0], h[1], h[0], h[1]), query_pair(fragments, i), ZEROS)
        if UNITS == 2:
            sums = mma_f16((h[2], h[3], h[2], h[3]), query_pair(fragments, i + 2), sums)
        return sums

    def make_load_scales(chain):
        first_unit, last_unit = chain // 4, -(-min(chain + SIDE_BY_SIDE, GROUPS) // 4)

        @device_function
        def load_scales(scales, rows, lane):
            mine = rows + (lane >> uint32(2)) * uint32(ROW_STEP)
            for half in range(2):  # rows g and g + 8
                at = mine + uint32(OTHER_ROW * half)
                if GROUPS >= 4:
                    for i in range(first_unit, last_unit):
                        store_sums(
                            scales, half * GROUPS + 4 * i, load_shared_u32x4(at + uint32(16 * i))
                        )
                else:
                    for i in range(GROUPS):
                        scales[half * GROUPS + i] = load_shared_u32(at + uint32(WORD + 4 * i))

        return load_scales

    def make_part(first, chain):
        """Of halves from `first` on, the chains from `chain` on, added to the scores so far."""
        last, starts = min(chain + SIDE_BY_SIDE, GROUPS), chain == 0
        products_of = exact_products if IS_EXACT else make_code_products(chain)
        load_scales = make_load_scales(chain)

        @device_function
        def part_of_scores(scores, rows, lane, fragments):
            here = rows + uint32(HALF * first)
            sums = cuda.local.array(SUMS, float32)
            for i in range(SUMS):
                sums[i] = float32(0)
            query = query_of(fragments, lane)
            products_of(sums, here, lane, query)
            for h in range(TOGETHER):
                if not IS_EXACT:
                    scales = cuda.local.array(SCALES, uint32)
                    half = here + uint32(HALF * h)
                    load_scales(scales, half, lane)
                    if starts:
                        headers = load_headers(scales, half, lane)
                for e in range(EIGHTS):
                    at = 4 * (h * CHAINS * EIGHTS + e)
                    target = 8 * e + 4 * (first + h)
                    if GROUPS == 1:
                        total = load_sums(sums, at)
                        for j in range(1, CHAINS):
                            more = load_sums(sums, at + 4 * j * EIGHTS)
                            total = add_rows(total, float32(1), float32(1), more)
                    if not IS_EXACT:
                        if starts:
                            shifted = shift_products(headers, query, e)
                        else:
                            shifted = load_sums(scores, target)
                        for j in range(chain, last):
                            products = load_sums(sums, at + 4 * j * EIGHTS)
                            if GROUPS == 1:
                                products = total
                            low, high = low_f16(scales[j]), low_f16(scales[GROUPS + j])
                            shifted = add_rows(shifted, low, high, products)
                        total = shifted
                    store_sums(scores, target, total)

        return part_of_scores

    chains = range(0, CHAINS, SIDE_BY_SIDE)
    return in_turn([make_part(first, j) for first in range(0, 2, TOGETHER) for j in chains])
