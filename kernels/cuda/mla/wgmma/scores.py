"""Scores and P of the tiles of a block, by a warpgroup of their own: 64 columns x 64 tokens.

    sums    lane 4g + t of warp w: columns 16w + g and + 8, tokens 8n + 2t and + 1

A score is divided by its row's power (rows.py), and P, too, in the exponent. The reference is that
of these quotients; totals are of P times the power. It changes lazily, for each warp by itself. P
takes the place of the RoPE elements of its tile.
"""

from operator import add

from numba import cuda, float32, int32, uint32

from ...decode.values import HEADROOM
from ...device.codes import PACK
from ...device.fragments import over_quad
from ...device.jit import device_function
from ...device.powers import inverse_of
from ...device.ptx import (
    any_lane,
    arrive,
    barrier,
    exp2,
    fence_shared,
    load_shared_f32,
    load_shared_f32x4,
    log2,
    maximum,
    store_shared_f32,
    store_shared_u32,
)
from ...device.warpgroup import BLOCK, LINE, descriptor_of, make_products
from ..mma.softmax import LAZY, LOWEST, NEVER
from ..work import write_lse
from .spec import (
    BLOCKS,
    COLUMNS,
    END,
    FACTORS,
    FIRST_NOTES,
    FIRST_STAGE,
    FLAGS,
    FULL,
    GROUP,
    NOTES,
    OWN,
    POWERS,
    READY,
    SHARES,
    STAGE,
    TOKENS,
)

SUMS = COLUMNS * TOKENS // GROUP
EIGHTS = TOKENS // 8
STEPS = tuple((0, BLOCK * b + 32 * k, BLOCK * b + 32 * k) for b in range(BLOCKS) for k in range(4))
P_AT = BLOCK * (BLOCKS - 1)


def make_score(spec):
    """Make the function that works on all tiles of a block, and leaves the share of each column."""
    HAS_POWERS, ROOM = not spec.latent.is_exact, {"bf16": 0, "fp16": HEADROOM}[spec.codec]
    pack = PACK[spec.codec]
    products = make_products(spec.codec, TOKENS, STEPS, begin=True)

    @device_function
    def scale_scores(sums, notes, factors, t):
        """From products to scores in powers of two, less the exponents of the rows."""
        for n in range(EIGHTS):
            if HAS_POWERS and n == EIGHTS // 2:
                cuda.syncwarp()  # or ptxas would load all of them first, and lack registers
            one, two, less, more = float32(1), float32(1), float32(0), float32(0)
            if HAS_POWERS:
                pair = load_shared_f32x4(notes + uint32(POWERS + 64 * n) + uint32(16) * t)
                one, less, two, more = pair
            for h in range(2):
                at = 4 * n + 2 * h
                sums[at] = sums[at] * (factors[h] * one) - less
                sums[at + 1] = sums[at + 1] * (factors[h] * two) - more

    @device_function
    def mask(sums, first, seen, t):
        for n in range(EIGHTS):
            for i in range(4):
                token = int32(first + int32(8 * n + i % 2) + int32(uint32(2) * t))
                if token >= seen[i // 2]:
                    sums[4 * n + i] = float32(NEVER)

    @device_function
    def settle(sums, notes, references, totals, lane, warp):
        """Let the references grow where P would be too large."""
        tops = cuda.local.array(2, float32)
        grown = False
        for h in range(2):
            top = float32(NEVER)
            for n in range(EIGHTS):
                at = 4 * n + 2 * h
                top = maximum(top, maximum(sums[at], sums[at + 1]))
            tops[h] = top
            grown = grown or top - references[h] > float32(ROOM + LAZY)
        grew = any_lane(uint32(1) if grown else uint32(0))
        if lane == uint32(0):
            store_shared_u32(notes + uint32(FLAGS) + uint32(4) * warp, grew)
        if grew != uint32(0):
            at = notes + uint32(FACTORS) + uint32(64) * warp + uint32(4) * uint32(lane >> uint32(2))
            for h in range(2):
                top = over_quad(tops[h], maximum)
                new = maximum(top - float32(ROOM), references[h])
                factor = exp2(references[h] - new)
                references[h] = new
                totals[h] *= factor
                if lane & uint32(3) == uint32(0):
                    store_shared_f32(at + uint32(32 * h), factor)

    @device_function
    def put(sums, notes, at, references, totals, t):
        for n in range(EIGHTS):
            one, two = float32(1), float32(1)
            if HAS_POWERS:
                if n == EIGHTS // 2:
                    cuda.syncwarp()
                place = notes + uint32(POWERS + 64 * n) + uint32(16) * t
                one = inverse_of(load_shared_f32(place))
                two = inverse_of(load_shared_f32(place + uint32(8)))
            for h in range(2):
                x = exp2(sums[4 * n + 2 * h] - references[h])
                y = exp2(sums[4 * n + 2 * h + 1] - references[h])
                if HAS_POWERS:
                    totals[h] += x * one + y * two
                else:
                    totals[h] += x + y
                place = uint32(at + uint32(8 * LINE * h)) ^ uint32(16 * n)
                store_shared_u32(place, pack(y, x))

    @device_function
    def score(shared, first, end, seen, upto, of_columns):
        whole, columns, lse, part_lse = of_columns
        thread = uint32(cuda.threadIdx.x) % uint32(GROUP)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        column = uint32(uint32(16) * warp + g)
        mine = shared + uint32(SHARES) + uint32(4) * column
        factors = cuda.local.array(2, float32)
        references = cuda.local.array(2, float32)
        totals = cuda.local.array(2, float32)
        for h in range(2):
            factors[h] = load_shared_f32(mine + uint32(32 * h))
            references[h], totals[h] = float32(LOWEST), float32(0)
        sums = cuda.local.array(SUMS, float32)
        queries = descriptor_of(shared)
        at_p = uint32(P_AT) + uint32(LINE) * column + uint32(16) * g + uint32(4) * t
        stage = uint32(0)
        while first < end:
            barrier(uint32(FULL) + stage, uint32(2 * GROUP))
            rows = uint32(shared + uint32(FIRST_STAGE) + uint32(STAGE) * stage)
            notes = uint32(shared + uint32(FIRST_NOTES) + uint32(NOTES) * stage)
            products(sums, queries, descriptor_of(rows))
            scale_scores(sums, notes, factors, t)
            if int32(first + int32(TOKENS)) > upto:
                mask(sums, first, seen, t)
            settle(sums, notes, references, totals, lane, warp)
            barrier(uint32(OWN), uint32(GROUP))
            put(sums, notes, uint32(rows + at_p), references, totals, t)
            fence_shared()
            arrive(uint32(READY) + stage, uint32(3 * GROUP))
            first = int32(first + int32(TOKENS))
            stage = uint32(stage ^ uint32(1))

        for h in range(2):
            weights = over_quad(totals[h], add)
            sees = weights != float32(0)
            here = uint32(column + uint32(8 * h))
            if t == uint32(0):
                share = float32(1) / weights if sees else float32(0)
                store_shared_f32(mine + uint32(32 * h), share)
                if here < columns:
                    log_sum = references[h] + log2(weights)
                    write_lse(whole, here, log_sum, sees, lse, part_lse)
        arrive(uint32(END), uint32(3 * GROUP))

    return score
