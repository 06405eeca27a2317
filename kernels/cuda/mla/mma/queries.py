"""The queries as A fragments: 16 columns x 16 elements; a column is a head of a query.

    column         0   1   2   3         2 heads, q_len 2: all heads of a query together
    query, head    0,0 0,1 1,0 1,1

    latent    a warp's quarter of the elements: in registers, or where a team has 32 columns in
              shared memory
    RoPE      all of them in shared memory, and the sums of the query over each group, as a high
              and a low fp16 part: what shifts are multiplied by (decode/scores.py)

Elements have the order of the codes (device/codes.py), fp16 ones the scale of decode/scores.py.
"""

from operator import add

from numba import cuda, float32, uint32, uint64

from ...device.codes import HALVES, PACK
from ...device.fragments import over_quad, store_sums
from ...device.jit import device_function
from ...device.powers import norm_of
from ...device.ptx import (
    barrier,
    high_f16,
    load_global_u32,
    load_global_u32x2,
    load_global_u32x4,
    load_shared_f32,
    maximum,
    pack_f16,
    store_shared_f32,
    store_shared_u32x4,
)
from ...device.row_layout import UNIT, factor_of, operand_of
from .spec import FRAGMENT, SLICES


class Part:
    """Device functions of a lane's elements of a column: its share of `dims` elements of a part.

    load        from global memory to `words` words of a local array
    largest     of them
    group_sum   their sum over a group of the dims
    pair        the two words of a fragment of the step-th MMA
    """

    def __init__(self, fmt, query, dims):
        IS_INT4, IS_EXACT = fmt.pick(nibbles=True, bytes=False, elements=False), fmt.is_exact
        SPAN = 8 * UNIT // fmt.bits  # elements of 16 bytes of a row
        CHUNKS, STEP = dims // SPAN, SPAN // 4
        WORDS = dims // 8
        self.words = WORDS
        PER_GROUP = max(1, WORDS * fmt.group_size // dims)
        pack, (low, high) = PACK[operand_of(fmt)], HALVES[query]

        @device_function
        def load(raw, first, address, t):
            address += uint64(uint32(2 * STEP) * t)
            for c in range(CHUNKS):
                at = address + uint64(2 * SPAN * c)
                if IS_INT4:
                    store_sums(raw, first + 4 * c, load_global_u32x4(at))
                elif IS_EXACT:
                    raw[first + c] = load_global_u32(at)
                else:
                    pair = load_global_u32x2(at)
                    raw[first + 2 * c], raw[first + 2 * c + 1] = pair[0], pair[1]

        @device_function
        def largest(raw, first):
            most = float32(0)
            for i in range(WORDS):
                word = raw[first + i]
                most = maximum(most, maximum(abs(low(word)), abs(high(word))))
            return over_quad(most, maximum)

        @device_function
        def group_sum(raw, first, group):
            total = float32(0)
            for i in range(PER_GROUP):
                word = raw[first + PER_GROUP * group + i]
                total += low(word) + high(word)
            return over_quad(total, add)

        @device_function
        def pair(raw, first, step, norm):
            if IS_EXACT:
                one, two = raw[first + 2 * step], raw[first + 2 * step + 1]
                return (
                    pack(high(one) * norm, low(one) * norm),
                    pack(high(two) * norm, low(two) * norm),
                )
            if (
                IS_INT4
            ):  # elements 2m and 2m + 4 of eight; 2m + 1 and 2m + 5, whose codes are 16fold
                at = first + 4 * (step // 2) + step % 2
                one, two = raw[at], raw[at + 2]
                odd = norm * float32(0.0625)
            else:
                one, two = raw[first + 2 * step], raw[first + 2 * step + 1]
                odd = norm
            return pack(low(two) * norm, low(one) * norm), pack(high(two) * odd, high(one) * odd)

        self.load, self.largest, self.group_sum, self.pair = load, largest, group_sum, pair


def make_load_queries(spec):
    """The function that loads a block's queries: fragments of a warp's latents in registers, and
    factors of the scores of both parts, of columns g and g + 8 of each block."""
    LATENT, ROPE, BLOCKS = spec.latent, spec.rope, spec.blocks
    DIMS = LATENT.head_dim // SLICES
    latent, rope = Part(LATENT, spec.query, DIMS), Part(ROPE, spec.query, ROPE.head_dim)
    load_latent, largest_latent, sum_latent, pair_latent = (
        latent.load,
        latent.largest,
        latent.group_sum,
        latent.pair,
    )
    load_rope, largest_rope, sum_rope, pair_rope = (
        rope.load,
        rope.largest,
        rope.group_sum,
        rope.pair,
    )
    COLUMNS, HALVES = spec.block_columns, 2 * BLOCKS
    WORDS, ROPE_WORDS = latent.words, rope.words
    RAW, ROPE_RAW = HALVES * WORDS, HALVES * ROPE_WORDS
    STEPS, ROPE_STEPS = spec.latent_steps, spec.rope_steps
    SHARED = BLOCKS > 1
    AT_ROPE = FRAGMENT * BLOCKS * (STEPS * SLICES if SHARED else 0)
    AT_SHIFTS = AT_ROPE + FRAGMENT * BLOCKS * ROPE_STEPS
    GROUPS = LATENT.groups if spec.has_shifts else 0
    OWN = GROUPS // SLICES
    ROPE_GROUPS = 0 if ROPE.is_exact else ROPE.groups
    # bf16 has float32's range
    NORMAL, ROPE_NORMAL = operand_of(LATENT) != "bf16", operand_of(ROPE) != "bf16"
    FACTOR, ROPE_FACTOR = factor_of(LATENT), factor_of(ROPE)
    MAXIMA, SUMS = 0, 4 * SLICES * COLUMNS

    @device_function
    def put_shifts(at, big, small):
        """Sums of the query over groups t and t + 4 of columns g and g + 8, in two parts."""
        for part in range(2):
            words = cuda.local.array(4, uint32)
            for i in range(4):
                words[i] = pack_f16(big[i] if part == 0 else small[i], float32(0))
            store_shared_u32x4(
                at + uint32(FRAGMENT * BLOCKS * part), (words[0], words[1], words[2], words[3])
            )

    @device_function
    def split_sums(sums, big, small):
        for i in range(4):
            big[i] = high_f16(pack_f16(sums[i], float32(0)))
            small[i] = sums[i] - big[i]

    @device_function
    def load_queries(fragments, factors, rope_factors, queries, places, lane, warp):
        latent_base, latent_query, latent_head, rope_base, rope_query, rope_head = queries[:6]
        first_column, used, heads, score_scale = queries[6:]
        shared, exchange, team = places
        g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        own = uint32(warp % uint32(SLICES))
        mine = uint32(shared + uint32(16) * lane)

        # Step 1: the elements, their largest, the sums over groups
        raw = cuda.local.array(RAW, uint32)
        rope_raw = cuda.local.array(ROPE_RAW, uint32)
        for i in range(RAW):
            raw[i] = uint32(0)
        for i in range(ROPE_RAW):
            rope_raw[i] = uint32(0)
        for h in range(HALVES):
            column = uint32(first_column + uint32(8 * h) + g)
            if column < used:
                query = uint32(column // heads)
                head = uint64(uint32(column - uint32(query * heads)))
                at = latent_base + uint64(query) * latent_query + head * latent_head
                load_latent(raw, WORDS * h, at + uint64(uint32(2 * DIMS) * own), t)
                at = rope_base + uint64(query) * rope_query + head * rope_head
                load_rope(rope_raw, ROPE_WORDS * h, at, t)
        for h in range(HALVES):
            at = uint32(exchange + uint32(4) * (uint32(8 * h) + g))
            if NORMAL:
                largest = largest_latent(raw, WORDS * h)
                if t == uint32(0):
                    store_shared_f32(at + uint32(MAXIMA) + uint32(4 * COLUMNS) * own, largest)
            for i in range(OWN):
                total = sum_latent(raw, WORDS * h, i)
                if t == uint32(0):
                    group = uint32(uint32(OWN) * own + uint32(i))
                    store_shared_f32(at + uint32(SUMS) + uint32(4 * COLUMNS) * group, total)
        barrier(uint32(team + uint32(1)), uint32(32 * SLICES))

        # Step 2: fragments
        norms = cuda.local.array(HALVES, float32)
        rope_norms = cuda.local.array(HALVES, float32)
        for h in range(HALVES):
            norms[h] = float32(1)
            factors[h] = score_scale * float32(FACTOR)
            if NORMAL:
                largest = float32(0)
                for s in range(SLICES):
                    at = exchange + uint32(MAXIMA + 4 * COLUMNS * s + 32 * h) + uint32(4) * g
                    largest = maximum(largest, load_shared_f32(at))
                norms[h], back = norm_of(largest)
                factors[h] *= back
            rope_norms[h] = float32(1)
            rope_factors[h] = score_scale * float32(ROPE_FACTOR)
            if ROPE_NORMAL:
                rope_norms[h], back = norm_of(largest_rope(rope_raw, ROPE_WORDS * h))
                rope_factors[h] *= back
        for b in range(BLOCKS):
            for s in range(STEPS):
                one, two = pair_latent(raw, WORDS * 2 * b, s, norms[2 * b])
                three, four = pair_latent(raw, WORDS * (2 * b + 1), s, norms[2 * b + 1])
                if SHARED:
                    if team == uint32(0):
                        at = mine + uint32(FRAGMENT * BLOCKS * STEPS) * own
                        store_shared_u32x4(
                            at + uint32(FRAGMENT * (s * BLOCKS + b)), (one, three, two, four)
                        )
                else:
                    store_sums(fragments, 4 * s, (one, three, two, four))
            if warp == uint32(0):
                for s in range(ROPE_STEPS):
                    one, two = pair_rope(rope_raw, ROPE_WORDS * 2 * b, s, rope_norms[2 * b])
                    three, four = pair_rope(
                        rope_raw, ROPE_WORDS * (2 * b + 1), s, rope_norms[2 * b + 1]
                    )
                    at = mine + uint32(AT_ROPE + FRAGMENT * (s * BLOCKS + b))
                    store_shared_u32x4(at, (one, three, two, four))
                sums = cuda.local.array(4, float32)
                big = cuda.local.array(4, float32)
                small = cuda.local.array(4, float32)
                if GROUPS:
                    for i in range(4):  # groups t, t, t + 4, t + 4; columns g, g + 8, g, g + 8
                        sums[i] = float32(0)
                        if 4 * (i // 2) < GROUPS:
                            at = exchange + uint32(SUMS + 4 * (16 * b + 8 * (i % 2)))
                            at += uint32(4 * COLUMNS) * (t + uint32(4 * (i // 2))) + uint32(4) * g
                            norm = norms[2 * b + i % 2] * float32(1 / FACTOR)
                            sums[i] = load_shared_f32(at) * norm
                    split_sums(sums, big, small)
                    put_shifts(mine + uint32(AT_SHIFTS + FRAGMENT * b), big, small)
                if ROPE_GROUPS:
                    for i in range(4):
                        sums[i] = float32(0)
                    for group in range(ROPE_GROUPS):
                        for i in range(2):
                            total = sum_rope(rope_raw, ROPE_WORDS * (2 * b + i), group)
                            if t == uint32(group % 4):
                                norm = rope_norms[2 * b + i] * float32(1 / ROPE_FACTOR)
                                sums[2 * (group // 4) + i] = total * norm
                    split_sums(sums, big, small)
                    at = AT_SHIFTS + FRAGMENT * (2 * BLOCKS + b)
                    put_shifts(mine + uint32(at), big, small)
        cuda.syncthreads()

    return load_queries
