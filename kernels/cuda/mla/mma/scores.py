"""q·K of a tile: 16 columns x 8 tokens an MMA, by the warps of a team together.

    A  16 columns x 16 elements: the queries (queries.py)
    B  16 elements x 8 tokens: ldmatrix gives lane (g, t) word t of 16 bytes of row g, its codes are
       unpacked in registers (device/codes.py)
    D  columns g and g + 8, tokens 2t and 2t + 1

    warp w    its quarter of the latent elements, all tokens ──▶ partial scores in shared memory
              the eight tokens from 8w on: the partial scores of all warps added up, in their order;
              RoPE elements; shifts

Each group has sums of its own, multiplied by a token's scale in float32. Scales are kept for P V.
"""

from numba import cuda, float32, uint32

from ...device.codes import MMA, make_unpack
from ...device.fragments import ZEROS, add_rows, load_sums, scale_columns, store_sums
from ...device.jit import device_function, in_turn
from ...device.ptx import (
    bits_float,
    high_f16,
    load_matrix_x2,
    load_matrix_x4,
    load_shared_f32x4,
    load_shared_u32,
    load_shared_u32x4,
    low_f16,
    mma_f16,
    pack_f16,
    permute,
    store_shared_f32x4,
)
from ...device.row_layout import UNIT, mmas_of, operand_of
from .spec import FRAGMENT, SLICES

LOW_HALVES = 0x5410


def make_load_chunks(chunks):
    """Make the function that loads so many units of 16 bytes of eight rows, an even number."""

    @device_function
    def load_chunks(words, first, at):
        for x in range(chunks // 4):
            store_sums(words, first + 4 * x, load_matrix_x4(at + uint32(64 * x)))
        if chunks % 4:
            pair = load_matrix_x2(at + uint32(64 * (chunks // 4)))
            words[first + chunks - 2], words[first + chunks - 1] = pair[0], pair[1]

    return load_chunks


def make_fragment_of(fmt):
    """Make the function that gives the B fragment of the step-th MMA along a row."""
    IS_EXACT, MMAS = fmt.is_exact, mmas_of(fmt)
    unpack = make_unpack(fmt)

    @device_function
    def fragment_of(words, first, step):
        if IS_EXACT:
            return words[first + 2 * step], words[first + 2 * step + 1]
        return unpack(words[first + step // MMAS], step % MMAS)

    return fragment_of


def make_partial_scores(spec):
    """Make the function that writes a warp's partial scores of a tile to shared memory."""
    LATENT, BLOCKS, STRIDE = spec.latent, spec.blocks, spec.stride
    CODES, HEADER, SLICE = LATENT.code_offset, spec.header_at, LATENT.code_bytes // SLICES
    CHUNKS, STEPS, IS_EXACT = SLICE // UNIT, spec.latent_steps, LATENT.is_exact
    GROUPS = 1 if IS_EXACT else LATENT.groups // SLICES
    PER_GROUP, SHARED, BEHIND = STEPS // GROUPS, BLOCKS > 1, spec.behind
    TOGETHER = spec.eights
    WORDS, SUMS = TOGETHER * CHUNKS, 4 * TOGETHER * BLOCKS
    load_chunks, fragment_of = make_load_chunks(CHUNKS), make_fragment_of(LATENT)
    mma = MMA[operand_of(LATENT)]

    @device_function
    def query_of(fragments, queries, step, b):
        if SHARED:
            return load_shared_u32x4(queries + uint32(FRAGMENT * (step * BLOCKS + b)))
        return load_sums(fragments, 4 * step)

    def make_eights(first_eight):
        @device_function
        def scores_of_eights(partials, scales, rows, headers, fragments, queries, power):
            words = cuda.local.array(WORDS, uint32)
            for n in range(TOGETHER):
                load_chunks(words, CHUNKS * n, rows + uint32(8 * STRIDE * (first_eight + n)))
            totals = cuda.local.array(SUMS, float32)
            for group in range(GROUPS):
                sums = cuda.local.array(SUMS, float32)
                for i in range(SUMS):
                    sums[i] = float32(0)
                for s in range(PER_GROUP):
                    step = PER_GROUP * group + s
                    for b in range(BLOCKS):
                        q = query_of(fragments, queries, step, b)
                        for n in range(TOGETHER):
                            k = fragment_of(words, CHUNKS * n, step)
                            at = 4 * (TOGETHER * b + n)
                            store_sums(sums, at, mma(q, k, load_sums(sums, at)))
                for n in range(TOGETHER):
                    at_scale = GROUPS * (first_eight + n) + group
                    if not IS_EXACT:
                        at = headers + uint32(8 * STRIDE * (first_eight + n) + 4 * group)
                        one, two = load_shared_u32(at), load_shared_u32(at + uint32(STRIDE))
                        if BEHIND:
                            low, high = bits_float(one), bits_float(two)
                            scales[at_scale] = pack_f16(high * power, low * power)
                        else:
                            scales[at_scale] = permute(one, two, uint32(LOW_HALVES))
                            low, high = low_f16(scales[at_scale]), high_f16(scales[at_scale])
                    for b in range(BLOCKS):
                        at = 4 * (TOGETHER * b + n)
                        found = load_sums(sums, at)
                        if not IS_EXACT:
                            found = scale_columns(found, low, high)
                            if group:
                                before = load_sums(totals, at)
                                found = add_rows(before, float32(1), float32(1), found)
                        store_sums(totals, at, found)
            for n in range(TOGETHER):
                for b in range(BLOCKS):
                    at = FRAGMENT * SLICES * (SLICES * b + first_eight + n)
                    store_shared_f32x4(
                        partials + uint32(at), load_sums(totals, 4 * (TOGETHER * b + n))
                    )

        return scores_of_eights

    all_eights = in_turn([make_eights(first) for first in range(0, SLICES, TOGETHER)])

    @device_function
    def partial_scores(partials, scales, rows, fragments, queries, power, lane, own):
        g_of_matrix, unit = uint32(lane & uint32(7)), uint32(lane >> uint32(3))
        at = rows + g_of_matrix * uint32(STRIDE) + uint32(UNIT) * unit
        at += uint32(CODES) + uint32(SLICE) * own
        headers = rows + uint32(2 * STRIDE) * uint32(lane & uint32(3)) + uint32(HEADER)
        headers += uint32(4 * GROUPS) * own
        mine = partials + uint32(FRAGMENT) * own + uint32(16) * lane
        of_slice = queries + uint32(FRAGMENT * BLOCKS * STEPS) * own + uint32(16) * lane
        all_eights(mine, scales, at, headers, fragments, of_slice, power)

    return partial_scores


def make_own_scores(spec):
    """The function that begins the scores of a warp's eight tokens: RoPE, shifts."""
    LATENT, ROPE, BLOCKS, STRIDE = spec.latent, spec.rope, spec.blocks, spec.stride
    START, HEADER = LATENT.row_bytes, ROPE.header_bytes
    CHUNKS, STEPS, IS_EXACT = ROPE.code_bytes // UNIT, spec.rope_steps, ROPE.is_exact
    GROUPS = 1 if IS_EXACT else ROPE.groups
    PER_GROUP = STEPS // GROUPS
    AT_ROPE = FRAGMENT * BLOCKS * (spec.latent_steps * SLICES if BLOCKS > 1 else 0)
    AT_SHIFTS = AT_ROPE + FRAGMENT * BLOCKS * STEPS
    LATENT_UNITS = LATENT.header_bytes // UNIT if spec.has_shifts else 0
    ROPE_UNITS = HEADER // UNIT
    load_chunks, fragment_of = make_load_chunks(CHUNKS), make_fragment_of(ROPE)
    mma = MMA[operand_of(ROPE)]

    @device_function
    def load_header(at, units):
        """The headers of eight rows as a B fragment: pairs of scale and shift."""
        pair = load_matrix_x2(at)
        return pair[0], pair[1] if units == 2 else uint32(0)

    @device_function
    def add_shifts(sums, header, queries):
        big = load_shared_u32x4(queries)
        small = load_shared_u32x4(queries + uint32(FRAGMENT * BLOCKS))
        return mma_f16(small, header, mma_f16(big, header, sums))

    @device_function
    def own_scores(scores, rows, queries, factors, rope_factors, lane, own):
        g_of_matrix, unit = uint32(lane & uint32(7)), uint32(lane >> uint32(3))
        rows = uint32(rows + uint32(8 * STRIDE) * own)
        matrix = rows + g_of_matrix * uint32(STRIDE)
        pairs = matrix + uint32(UNIT) * uint32(unit & uint32(1))
        queries = uint32(queries + uint32(16) * lane)
        words = cuda.local.array(CHUNKS, uint32)
        load_chunks(words, 0, matrix + uint32(START + HEADER) + uint32(UNIT) * unit)
        header = (uint32(0), uint32(0))
        if LATENT_UNITS:
            header = load_header(pairs, LATENT_UNITS)
        rope_header = (uint32(0), uint32(0))
        if ROPE_UNITS:
            # one unit: the second matrix is not used, but must lie in the row
            rope_header = load_header(pairs + uint32(START), ROPE_UNITS)
            headers = rows + uint32(2 * STRIDE) * uint32(lane & uint32(3)) + uint32(START)
        for b in range(BLOCKS):
            latent = ZEROS
            if LATENT_UNITS:
                latent = add_shifts(latent, header, queries + uint32(AT_SHIFTS + FRAGMENT * b))
            rope = ZEROS
            if ROPE_UNITS:
                at = queries + uint32(AT_SHIFTS + FRAGMENT * (2 * BLOCKS + b))
                rope = add_shifts(rope, rope_header, at)
            for group in range(GROUPS):
                sums = ZEROS
                for i in range(PER_GROUP):
                    step = PER_GROUP * group + i
                    at = queries + uint32(AT_ROPE + FRAGMENT * (step * BLOCKS + b))
                    sums = mma(load_shared_u32x4(at), fragment_of(words, 0, step), sums)
                if not IS_EXACT:
                    at = headers + uint32(4 * group)
                    low = low_f16(load_shared_u32(at))
                    high = low_f16(load_shared_u32(at + uint32(STRIDE)))
                    sums = scale_columns(sums, low, high)
                rope = add_rows(rope, float32(1), float32(1), sums)
            for i in range(4):
                h = 2 * b + i // 2
                scores[4 * b + i] = latent[i] * factors[h] + rope[i] * rope_factors[h]

    return own_scores


def make_add_partials(spec):
    """Make the function that adds the partial scores of all warps."""
    BLOCKS = spec.blocks

    @device_function
    def add_partials(scores, partials, factors, lane, own):
        partials = uint32(partials + uint32(FRAGMENT * SLICES) * own + uint32(16) * lane)
        for b in range(BLOCKS):
            total = load_shared_f32x4(partials + uint32(FRAGMENT * SLICES * SLICES * b))
            for s in range(1, SLICES):
                more = load_shared_f32x4(partials + uint32(FRAGMENT * (SLICES * SLICES * b + s)))
                total = add_rows(total, float32(1), float32(1), more)
            for i in range(4):
                scores[4 * b + i] += total[i] * factors[2 * b + i // 2]

    return add_partials
