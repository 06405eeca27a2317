"""Lengths of a sequence, and the positions of its tokens.

The sinks of the second segment, its first rows, come before the first segment; then come its other
rows. A position counts the tokens of all segments from 0. So the tokens before a position are the
first rows of each segment:

    first: 5 rows, second: 4 rows, of which 2 are sinks        before position 4

    position     0 1   2 3 4 5 6   7 8                         first: 2 rows, second: 2 rows
                 sinks first       second

The queries of a piece (ragged.py) are the last ones of the sequence cut off after them. With a
window work begins at the first query's window.
"""

from numba import int32, uint32, uint64

from ..device.jit import device_function
from ..device.ptx import load_global_u32, load_global_u32x4
from .spec import FIELD, HALF

SEQ_LENS, CAPACITY, SPLITS, SINKS = (
    FIELD[name] for name in ("seq_lens", "capacity", "splits", "sinks")
)


@device_function
def length_of(segment, b):
    """Rows of a sequence, at most those that there is room for."""
    length = int32(0)
    if segment[SPLITS] > int32(0):
        length = int32(load_global_u32(segment[SEQ_LENS] + uint64(4) * uint64(b)))
    return int32(max(min(length, segment[CAPACITY]), int32(0)))


def make_piece_of(spec):
    """The function that loads a piece: sequence, first row of q, queries, those after it."""
    PIECES, RAGGED = spec.places.get("q_lens", 0), spec.ragged

    @device_function
    def whole(common, b):
        return uint32(b), uint32(0), uint32(0), uint32(0)

    @device_function
    def piece(common, b):
        return load_global_u32x4(common[PIECES] + uint64(16) * uint64(b))

    return piece if RAGGED else whole


def make_held(spec):
    """The function that loads the number of pieces, which pieces.py stores after them."""
    BATCH, PIECES = spec.places["batch"], spec.places.get("q_lens", 0)

    @device_function
    def held(common):
        batch = common[BATCH]
        return min(load_global_u32(common[PIECES] + uint64(16) * uint64(batch)), batch)

    return held


def make_count(spec):
    """The function that loads a sequence's queries and rows, with and without sinks."""
    TWO, CAUSAL, RAGGED = spec.segments > 1, spec.causal, spec.ragged
    piece_of = make_piece_of(spec)
    Q_LENS, Q_LEN = spec.places.get("q_lens", 0), spec.places.get("q_len", 0)

    @device_function
    def lengths_of(segments, sequence):
        first = length_of(segments[0], sequence)
        second = int32(0)
        recent = int32(0)
        if TWO:
            second = length_of(segments[1], sequence)
            recent = int32(max(int32(second - segments[1][SINKS]), int32(0)))
        return first, second, recent

    @device_function
    def count_nothing(common, segments, b):
        return uint64(0)

    @device_function
    def count(common, segments, b):
        number = common[Q_LEN]
        if common[Q_LENS] != uint64(0):
            number = int32(load_global_u32(common[Q_LENS] + uint64(4) * uint64(b)))
            number = int32(max(min(number, common[Q_LEN]), int32(0)))
        first, second, recent = lengths_of(segments, b)
        return number, first, second, recent

    @device_function
    def count_piece(common, segments, b):
        sequence, _, number, behind = piece_of(common, b)
        hidden = int32(behind)
        first, second, recent = lengths_of(segments, sequence)
        if TWO:
            less = int32(min(hidden, recent))
            second, recent = int32(second - less), int32(recent - less)
            hidden = int32(hidden - less)
        less = int32(min(hidden, first))
        first = int32(first - less)
        if TWO:
            second = int32(max(int32(second - int32(hidden - less)), recent))
        return int32(number), first, second, recent

    if RAGGED:
        return count_piece
    return count if CAUSAL else count_nothing


def make_rows_before(is_first):
    """The function to the rows of a segment before a position; from what `count` gives."""

    @device_function
    def in_first(position, counts):
        _, first, second, recent = counts
        return int32(max(min(int32(position - int32(second - recent)), first), int32(0)))

    @device_function
    def in_second(position, counts):
        _, first, second, recent = counts
        sinks = int32(second - recent)
        others = int32(max(min(int32(position - int32(sinks + first)), recent), int32(0)))
        return int32(int32(max(min(position, sinks), int32(0))) + others)

    return in_first if is_first else in_second


def make_position_of(is_first):
    """Make the function that gives the position of a row of a segment, the first or the second."""

    @device_function
    def in_first(row, counts):
        return int32(row + int32(counts[2] - counts[3]))

    @device_function
    def in_second(row, counts):
        is_sink = row < int32(counts[2] - counts[3])
        return row if is_sink else int32(row + counts[1])

    return in_first if is_first else in_second


def make_extent(spec, which):
    """Two functions of the rows of a segment that queries see: the first, how many."""
    WINDOW, WHICH, RAGGED = spec.places.get("window", 0), which, spec.ragged
    RUN = HALF if which else spec.first.run
    count, rows_before = make_count(spec), make_rows_before(which == 0)

    @device_function
    def row_0(common, segments, b):
        return int32(0)

    @device_function
    def all_rows(common, segments, b):
        return length_of(segments[WHICH], b)

    @device_function
    def rows_of_piece(common, segments, b):
        if WHICH == 2:  # there are two segments
            return int32(0)
        return count(common, segments, b)[WHICH + 1]

    every = rows_of_piece if RAGGED else all_rows

    @device_function
    def first_in_window(common, segments, b):
        counts = count(common, segments, b)
        number, first, second, _ = counts
        position = int32(int32(first + second) - int32(number + common[WINDOW]) + int32(1))
        return int32(rows_before(position, counts) & int32(-RUN))

    @device_function
    def rows_in_window(common, segments, b):
        before = first_in_window(common, segments, b)
        return int32(max(int32(every(common, segments, b) - before), int32(0)))

    return (first_in_window, rows_in_window) if WINDOW else (row_0, every)
