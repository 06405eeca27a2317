"""AttentionVariant in the kernel: how the scores of a tile are changed, and the share of a sink.

A score, in powers of two, is changed in this order:

    score_offsets    + what belongs to the query
    soft_cap         cap * tanh(score / cap), where tanh(x) = 1 - 2 / (1 + e**2x): an error of 1e-7
                     of the cap, where `tanh.approx` has one of 5e-4
    alibi_slopes     + slope * (position of the key - position of the query)

What belongs to a column waits in the warp's shared memory; what belongs to a row is loaded before a
tile's products. ALiBi counts from the last token, of which a query is `lag` before.

A sink is a summand of the softmax without a value, counted where a unit is whole (combine.py): 1 /
(1 + 2**(sink - lse)) of the output is left.
"""

import math

from numba import cuda, float32, int32, uint32, uint64

from ..device.jit import device_function
from ..device.ptx import (
    bits_float,
    exp2,
    float_bits,
    load_global_f32,
    load_shared_u32x2,
    log2,
    maximum,
    reciprocal,
    store_shared_u32,
)
from .positions import make_position_of
from .queries import HEADS, make_row_of

LOG2_E = math.log2(math.e)
LOWEST = -1e30  # a log-sum-exp below is that of no tokens


def make_keep_changes(spec):
    """The function that leaves what changes a warp's scores, by column, in shared memory."""
    COLUMNS, OFFSET = spec.columns, spec.word_at("offset")
    SLOPE, LAG = spec.word_at("slope"), spec.word_at("lag")
    OFFSETS, SLOPES = (spec.places.get(name, 0) for name in ("score_offsets", "alibi_slopes"))
    lie_in_out, row_of = make_row_of(spec)

    @device_function
    def keep_nothing(results, rows, counts, first_column, used):
        """Scores are q·k times a factor."""

    @device_function
    def keep_changes(results, rows, counts, first_column, used):
        kept, common = results[0], results[1]
        row, state = load_shared_u32x2(kept + uint32(40))
        lane = uint32(uint32(cuda.threadIdx.x) & uint32(31))
        if lane < uint32(COLUMNS):
            at = kept + uint32(4) * lane
            column = uint32(first_column + lane)
            row = uint32(row + row_of(column, lie_in_out(common, state)))
            if OFFSET:
                offset = float32(0)  # that of padding may be NaN
                if column < used:
                    offset = load_global_f32(common[OFFSETS] + uint64(4) * uint64(row))
                store_shared_u32(at + uint32(OFFSET), float_bits(offset * float32(LOG2_E)))
            if SLOPE:
                head = uint32(row % uint32(common[HEADS]))
                slope = load_global_f32(common[SLOPES] + uint64(4) * uint64(head))
                slope *= float32(LOG2_E)
                query = int32(uint32(column + rows[3][2]) // rows[3][3])
                lag = slope * float32(int32(int32(counts[0] - query) - int32(1)))
                store_shared_u32(at + uint32(SLOPE), float_bits(slope))
                store_shared_u32(at + uint32(LAG), float_bits(lag))
        cuda.syncwarp()

    return keep_changes if OFFSET or SLOPE else keep_nothing


def make_change_scores(spec, path):
    """Make the function that changes the scores of a tile, and multiplies them by their factors."""
    EIGHTS, OFFSET = spec.eights, spec.word_at("offset")
    SLOPE, LAG = spec.word_at("slope"), spec.word_at("lag")
    CAP = spec.places.get("soft_cap", 0)
    position_of = make_position_of(path is spec.first)
    ROW, MATRIX = spec.rows(path)[0].token_steps

    @device_function
    def change_nothing(scores, factors, first, lane, kept, common, counts):
        """Factors are multiplied where scores are used."""

    @device_function
    def capped(score, cap, rate):
        return cap - float32(2) * cap * reciprocal(float32(1) + exp2(score * rate))

    @device_function
    def change_scores(scores, factors, first, lane, kept, common, counts):
        at = kept + uint32(8) * uint32(lane & uint32(3))
        for e in range(EIGHTS):
            for i in range(4):
                j = 8 * e + 2 * i
                scores[j] *= factors[2 * e]
                scores[j + 1] *= factors[2 * e + 1]
            if OFFSET:
                offset = load_shared_u32x2(at + uint32(OFFSET + 32 * e))
                for i in range(4):
                    j = 8 * e + 2 * i
                    scores[j] += bits_float(offset[0])
                    scores[j + 1] += bits_float(offset[1])
            if CAP:
                cap = common[CAP]
                rate = float32(2 * LOG2_E) * reciprocal(cap)
                for i in range(4):
                    j = 8 * e + 2 * i
                    scores[j] = capped(scores[j], cap, rate)
                    scores[j + 1] = capped(scores[j + 1], cap, rate)
            if SLOPE:
                slope = load_shared_u32x2(at + uint32(SLOPE + 32 * e))
                lag = load_shared_u32x2(at + uint32(LAG + 32 * e))
                last = int32(int32(counts[1] + counts[2]) - int32(1))
                for i in range(4):
                    j = 8 * e + 2 * i
                    row = int32(first + int32(uint32(ROW) * uint32(lane >> uint32(2))))
                    row = int32(row + int32(MATRIX * i))
                    distance = float32(int32(position_of(row, counts) - last))
                    scores[j] += bits_float(slope[0]) * distance + bits_float(lag[0])
                    scores[j + 1] += bits_float(slope[1]) * distance + bits_float(lag[1])

    return change_scores if spec.changes_scores else change_nothing


def make_add_sink(spec):
    """The function from a column's lse to that with the sink, and the output's share."""
    SINKS, row_of = spec.places.get("sink_logits", 0), make_row_of(spec)[1]

    @device_function
    def add_nothing(log_sum, column, lie, row, common):
        return log_sum, float32(1)

    @device_function
    def add_sink(log_sum, column, lie, row, common):
        head = uint32(uint32(row + row_of(column, lie)) % uint32(common[HEADS]))
        sink = load_global_f32(common[SINKS] + uint64(4) * uint64(head)) * float32(LOG2_E)
        more = sink - log_sum
        whole = maximum(sink, log_sum) + log2(float32(1) + exp2(-abs(more)))
        if log_sum < float32(LOWEST):
            whole = log_sum
        return whole, reciprocal(float32(1) + exp2(more))

    return add_sink if SINKS else add_nothing
