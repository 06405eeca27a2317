"""The tiles of a consumer: scores, softmax and P V of 64 columns x 64 tokens.

    sums    lane 4g + t of warp w: columns 16w + g and + 8, tokens or elements 8n + 2t and + 1

So P, packed to fp16, is operand A as it stands, and the softmax needs no barrier. It rescales when
a score exceeds the reference by 2**15.
"""

from operator import add

from numba import cuda, float32, int32, uint32

from ...device.fragments import make_scale_rows, over_quad
from ...device.jit import device_function, in_turn
from ...device.ptx import (
    any_lane,
    arrive,
    barrier,
    exp2,
    fence_shared,
    load_shared_f32,
    load_shared_u32,
    maximum,
    pack_f16,
)
from ...device.warpgroup import (
    EIGHT,
    descriptor_of,
    make_products,
    make_register_products,
    make_wait,
)
from ..queries import HIDDEN, LOWEST, PADDED, make_see
from ..values import HEADROOM
from .queries import make_load_queries
from .rows import in_tiles
from .spec import BLOCK, FREE, FULL, GROUP, MOST_STAGES, QUERIES, ROWS, TOKENS, WARP_COLUMNS

LAZY = 4  # powers of two that a score may exceed the reference by, and HEADROOM more
SCORES = TOKENS // 2  # of a lane
P_WORDS = SCORES // 2
EIGHTS = TOKENS // 8


def make_consume(spec, path):
    """The function that works on all tiles of a consumer: sums, references, totals of P."""
    K_DIM, V_DIM = spec.first.k_format.head_dim, spec.first.v_format.head_dim
    RINGS, STAGES, PARTIES = spec.rings_of(path), spec.stages, spec.parties
    THREADS, CONSUMERS = GROUP * (1 + spec.parties), GROUP * spec.consumers
    K_BYTES, STAGE = spec.tile_bytes[0], sum(spec.tile_bytes)
    TILES, FACTORS, CAUSAL = spec.tiles_at, spec.factors_at, spec.causal
    SEEN, SUMS = spec.word_at("seen"), V_DIM // 2
    JOINED, SECOND = spec.second is not None, spec.word_at("seen in second")
    STEP, LATER = TOKENS * spec.rings_of(path), TOKENS * spec.stages
    FEEDING = GROUP * spec.feeders
    by_k = [(b, k) for b in range(K_DIM // 64) for k in range(4)]
    steps = tuple((0, BLOCK * b + 32 * k, BLOCK * b + 32 * k) for b, k in by_k)
    scores_of = make_products("fp16", TOKENS, steps, begin=True, waits=not spec.ahead)
    steps = tuple((0, 4 * k, 2 * EIGHT * k) for k in range(TOKENS // 16))
    add_values = make_register_products("fp16", V_DIM, steps, transposed=True)
    load_queries, see = make_load_queries(spec), make_see(spec, path)
    see_second = make_see(spec, spec.second, "seen in second")
    wait, AHEAD = make_wait(SCORES), spec.ahead
    assert max(RINGS, spec.feeders) <= STAGES <= MOST_STAGES  # a barrier for each stage
    assert not AHEAD or STAGES >= 2 * RINGS  # two stages of its own

    @device_function
    def mask(scores, first, seen, t):
        for h in range(2):
            left = int32(seen[h] - first - int32(uint32(2) * t))
            for n in range(EIGHTS):
                for i in range(2):
                    if left <= int32(8 * n + i):
                        scores[4 * n + 2 * h + i] = float32(HIDDEN)

    @device_function
    def look_at(seen, first, of_tile):
        """Up to which rows columns see a tile of either segment."""
        _, _, end_one, end, g, _, kept = of_tile
        is_second = first >= end_one
        for h in range(2):
            seen[h] = end if is_second else end_one
            if CAUSAL:
                at = kept + uint32(SECOND if is_second else SEEN) + uint32(32 * h)
                seen[h] = int32(load_shared_u32(uint32(at + uint32(4) * g)))
                if is_second:
                    seen[h] = int32(seen[h] + in_tiles(end_one))

    rescale = in_turn([make_scale_rows(at, at + 32) for at in range(0, SUMS, 32)])

    @device_function
    def settle(scores, sums, factors, references, totals):
        """Let the references grow where P would be too large."""
        tops = cuda.local.array(2, float32)
        grown = False
        for h in range(2):
            top = maximum(scores[2 * h], scores[2 * h + 1])
            for n in range(1, EIGHTS):
                top = maximum(top, maximum(scores[4 * n + 2 * h], scores[4 * n + 2 * h + 1]))
            tops[h] = top
            grown = grown or top * factors[h] - references[h] > float32(HEADROOM + LAZY)
        if any_lane(uint32(1) if grown else uint32(0)) != uint32(0):
            shrinks = cuda.local.array(2, float32)
            for h in range(2):
                top = over_quad(tops[h], maximum) * factors[h]
                new = maximum(top - float32(HEADROOM), references[h])
                shrinks[h] = exp2(references[h] - new)
                references[h] = new
                totals[h] *= shrinks[h]
            rescale(sums, shrinks[0], shrinks[1])

    @device_function
    def weigh(p, scores, factors, references, totals):
        for n in range(EIGHTS):
            for h in range(2):
                x = exp2(scores[4 * n + 2 * h] * factors[h] - references[h])
                y = exp2(scores[4 * n + 2 * h + 1] * factors[h] - references[h])
                totals[h] += x + y
                p[2 * n + h] = pack_f16(y, x)

    @device_function
    def tile_of(shared, stage):
        return uint32(uint32(shared + uint32(TILES)) + uint32(STAGE) * stage)

    @device_function
    def next_stage(stage):
        stage = uint32(stage + uint32(RINGS))
        return uint32(stage - uint32(STAGES)) if stage >= uint32(STAGES) else stage

    @device_function
    def ask(scores, shared, queries, stage):
        """The scores of a tile, once it is there."""
        barrier(uint32(uint32(FULL) + stage), uint32(THREADS))
        scores_of(scores, descriptor_of(queries), descriptor_of(tile_of(shared, stage)))

    @device_function
    def work(scores, p, state, factors, first, shared, stage, of_tile):
        sums, references, totals = state
        seen, upto, _, end, _, t, _ = of_tile
        if int32(first + int32(TOKENS)) > upto:
            if JOINED:
                look_at(seen, first, of_tile)
            mask(scores, first, seen, t)
        settle(scores, sums, factors, references, totals)
        weigh(p, scores, factors, references, totals)
        add_values(sums, p, descriptor_of(uint32(tile_of(shared, stage) + uint32(K_BYTES))))
        if int32(first + int32(LATER)) < end:  # else nobody waits for the stage
            arrive(uint32(uint32(FREE) + stage), uint32(THREADS))

    @device_function
    def consume(shared, consumer, begin, end_one, end, rows, results, counts, state):
        sums, references, totals = state
        tid = uint32(cuda.threadIdx.x)
        lane = uint32(tid & uint32(31))
        warp = uint32(uint32(tid >> uint32(5)) & uint32(3))
        g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        ring = uint32(consumer // uint32(PARTIES))
        party = uint32(consumer - ring * uint32(PARTIES))
        of_warp = uint32(uint32(ROWS) * party + uint32(WARP_COLUMNS) * warp)
        kept = results[0]
        used, sight = see(results[1], rows, counts, end_one, kept, of_warp)
        if JOINED:
            rest = int32(end - in_tiles(end_one))
            see_second(results[1], rows, counts, rest, kept, of_warp)
        thread = uint32(tid - uint32(FEEDING))
        load_queries(shared, rows[2], rows[3], used, rows[5], thread)
        fence_shared()
        barrier(uint32(QUERIES), uint32(CONSUMERS))
        factors = cuda.local.array(2, float32)
        seen = cuda.local.array(2, int32)
        for h in range(2):
            column = uint32(uint32(of_warp + g) + uint32(8 * h))
            place = uint32(shared + uint32(FACTORS))
            factors[h] = load_shared_f32(uint32(place + uint32(4) * column))
            references[h] = float32(LOWEST)
            seen[h] = end
            if CAUSAL:
                if column >= used:
                    references[h] = float32(PADDED)
                at = uint32(kept + uint32(SEEN + 32 * h))
                seen[h] = int32(load_shared_u32(uint32(at + uint32(4) * g)))
            totals[h] = float32(0)
        for i in range(SUMS):
            sums[i] = float32(0)
        queries = uint32(shared + uint32(K_BYTES) * party)
        scores = cuda.local.array(SCORES, float32)
        p = cuda.local.array(P_WORDS, uint32)
        first = int32(begin + int32(ring) * int32(TOKENS))
        stage = ring
        of_tile = (seen, sight[1], end_one, end, g, t, kept)
        if AHEAD:
            if first < end:
                others = cuda.local.array(SCORES, float32)
                ask(scores, shared, queries, stage)
                wait(scores)
                while True:
                    following = next_stage(stage)
                    if int32(first + int32(STEP)) >= end:
                        work(scores, p, state, factors, first, shared, stage, of_tile)
                        break
                    ask(others, shared, queries, following)
                    work(scores, p, state, factors, first, shared, stage, of_tile)
                    wait(others)
                    first = int32(first + int32(STEP))
                    stage = following
                    following = next_stage(stage)
                    if int32(first + int32(STEP)) >= end:
                        work(others, p, state, factors, first, shared, stage, of_tile)
                        break
                    ask(scores, shared, queries, following)
                    work(others, p, state, factors, first, shared, stage, of_tile)
                    wait(scores)
                    first = int32(first + int32(STEP))
                    stage = following
        while not AHEAD and first < end:
            ask(scores, shared, queries, stage)
            work(scores, p, state, factors, first, shared, stage, of_tile)
            first = int32(first + int32(STEP))
            stage = next_stage(stage)
        for h in range(2):
            totals[h] = over_quad(totals[h], add)

    return consume
