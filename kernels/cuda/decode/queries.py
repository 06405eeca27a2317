"""Queries and columns: which query a column is, and which tokens it sees.

A sequence has one query, or several (`spec.causal`): those of its last tokens, each of which sees
the tokens up to its own. Columns of a KV head share its rows:

    q_len 3, 2 query heads a KV head; sequence b has q_lens[b] = 2 queries and n tokens

    column of the KV head    0   1     2   3     4   5
    query                    0   0     1   1     padding: out is 0, lse -inf
    query head               0   1     0   1
    sees the first           n - 1     n         tokens

Of each segment a column sees the rows from one up to another (positions.py); a tree mask says which
of the queries' own tokens. Only tiles with a row that is hidden from any column are masked. What
columns see waits in the warp's shared memory: in registers it would cost a block its place.

A piece of ragged queries has a row of q where it begins, and no padding. A column of padding has a
query of zeros, and so high a reference that every P is 0.
"""

from numba import cuda, float32, int32, uint32, uint64

from ..device.jit import device_function
from ..device.ptx import (
    load_global_u8,
    load_shared_u32x2,
    store_shared_u32,
    word_from_lane,
)
from .positions import make_piece_of, make_position_of, make_rows_before
from .spec import COMMON, QUERIES, TILE

NEVER, LOWEST = -3e38, -1e30  # score of a row that is not there; maximum of no rows
HIDDEN, PADDED = float("-inf"), 1e30  # score of a row that a query does not see; see above
PLACE = {name: place for place, (name, _) in enumerate((*COMMON, *QUERIES))}
Q, Q_LEN = PLACE["q"], PLACE["q_len"]
OF_BATCH, OF_HEAD = PLACE["q_stride_batch"], PLACE["q_stride_head"]
OF_QUERY, HEADS, RATIO = PLACE["q_stride_query"], PLACE["num_q_heads"], PLACE["ratio"]
HEAD_BLOCKS, SCALE = PLACE["head_blocks"], PLACE["score_scale"]
# of a unit's columns, in a word: how many, and in a higher half which block of its KV head's
COUNT_MASK, BLOCK_SHIFT = 0xFF, 16


def make_columns_of(spec):
    """The function to a unit's columns, the first one's row of out, a word for make_row_of."""
    COLUMNS, RAGGED, piece_of = spec.block_columns, spec.ragged, make_piece_of(spec)

    @device_function
    def blocks_of(column, head_blocks):
        kv_head = int32(column)
        if head_blocks > int32(1):
            kv_head = int32(column // uint32(head_blocks))
        return kv_head, int32(int32(column) - kv_head * head_blocks)

    @device_function
    def heads_of_unit(common, segments, b, column):
        ratio, stride = common[RATIO], common[OF_HEAD]
        kv_head, block = blocks_of(column, common[HEAD_BLOCKS])
        first = int32(block * int32(COLUMNS))
        query_head = int32(kv_head * ratio + first)
        heads = uint32(min(int32(COLUMNS), int32(ratio - first)))
        query = common[Q] + uint64(b) * common[OF_BATCH] + uint64(query_head) * stride
        row = uint32(uint32(b * uint32(common[HEADS])) + uint32(query_head))
        return (int32(b), kv_head, query, stride, heads, common[SCALE]), row, heads

    @device_function
    def columns_of_unit(common, segments, b, column):
        ratio, q_len = common[RATIO], common[Q_LEN]
        kv_head, block = blocks_of(column, common[HEAD_BLOCKS])
        first = int32(block * int32(COLUMNS))
        query_head = int32(kv_head * ratio)
        if RAGGED:
            _, start, number, _ = piece_of(common, b)
            count = uint32(max(min(int32(COLUMNS), int32(ratio * int32(number)) - first), int32(0)))
            query = common[Q] + uint64(start) * common[OF_QUERY]
        else:
            start = uint32(b * uint32(q_len))
            count = uint32(min(int32(COLUMNS), int32(ratio * q_len) - first))
            query = common[Q] + uint64(b) * common[OF_BATCH]
        query += uint64(query_head) * common[OF_HEAD]
        lie = (common[OF_HEAD], common[OF_QUERY], uint32(first), uint32(ratio))
        rows = (int32(b), kv_head, query, lie, count, common[SCALE])
        row = uint32(uint32(start * uint32(common[HEADS])) + uint32(query_head))
        return rows, row, uint32(count | uint32(uint32(block) << uint32(BLOCK_SHIFT)))

    return columns_of_unit if spec.causal else heads_of_unit


def make_row_of(spec):
    """Two functions: how a unit's columns lie in out, and a column's row counted from the first."""
    COLUMNS = spec.block_columns

    @device_function
    def heads_lie(common, word):
        return uint32(0)

    @device_function
    def head_row(column, lie):
        return column

    @device_function
    def columns_lie(common, word):
        ratio = uint32(common[RATIO])
        first = uint32(uint32(word >> uint32(BLOCK_SHIFT)) * uint32(COLUMNS))
        return first, ratio, uint32(uint32(common[HEADS]) - ratio)

    @device_function
    def column_row(column, lie):
        first, ratio, others = lie
        column = uint32(column + first)
        return uint32(column + uint32(uint32(column // ratio) * others))

    return (columns_lie, column_row) if spec.causal else (heads_lie, head_row)


def make_query_row(causal):
    """Make the function that gives the address of a column's query."""

    @device_function
    def of_head(query, stride, column):
        return query + uint64(column) * stride

    @device_function
    def of_query(query, lie, column):
        stride_head, stride_query, first, ratio = lie
        column = uint32(column + first)
        number = uint32(column // ratio)
        head = uint32(column - uint32(number * ratio))
        return query + uint64(number) * stride_query + uint64(head) * stride_head

    return of_query if causal else of_head


def make_see(spec, path, word="seen"):
    """The function to how many columns have queries, and between which rows of a segment all of
    them see; it leaves each column's rows in shared memory, as such a word."""
    COLUMNS, SEEN, UNSEEN = spec.columns, spec.word_at(word), spec.word_at("unseen")
    BRANCH, WINDOW = spec.word_at("branch"), spec.places.get("window", 0)
    rows_before = make_rows_before(path is spec.first)

    @device_function
    def see_all(common, rows, counts, end, kept, first_column):
        return rows[4], (int32(0), end)

    @device_function
    def see(common, rows, counts, end, kept, first_column):
        number, tokens = counts[0], int32(counts[1] + counts[2])
        first, ratio = rows[3][2], rows[3][3]
        lane = uint32(uint32(cuda.threadIdx.x) & uint32(31))
        used = int32(max(int32(number * int32(ratio)) - int32(first), int32(0)))
        query = int32(uint32(uint32(first + first_column) + lane) // ratio)
        before = int32(tokens - number)  # the tokens before those of the queries
        behind = int32(int32(before + query) + int32(1))
        if lane < uint32(COLUMNS):
            at = kept + uint32(4) * lane
            last = behind
            if BRANCH and behind > int32(0):  # a query before the first token sees none
                last = tokens
            store_shared_u32(at + uint32(SEEN), uint32(min(rows_before(last, counts), end)))
            if UNSEEN:
                begin = rows_before(int32(behind - common[WINDOW]), counts)
                store_shared_u32(at + uint32(UNSEEN), uint32(begin))
            if BRANCH:
                q_len = common[Q_LEN]
                row = int32(rows[0] * q_len) + int32(min(query, int32(q_len - int32(1))))
                store_shared_u32(at + uint32(BRANCH), uint32(int32(row) * q_len))
        cuda.syncwarp()
        upto = int32(min(rows_before(before if BRANCH else int32(before + int32(1)), counts), end))
        upto = int32(word_from_lane(uint32(upto), uint32(0)))  # ptxas sees: it is uniform
        begin = int32(0)
        if UNSEEN:
            begin = rows_before(int32(tokens - common[WINDOW]), counts)
        return min(uint32(used), rows[4]), (begin, upto)

    return see if spec.causal else see_all


def make_references(spec):
    """Make the function that says what the scores of a lane's columns count from at first."""
    PAIRS = 2 * spec.eights

    @device_function
    def lowest(references, first_column, used, lane):
        for i in range(PAIRS):
            references[i] = float32(LOWEST)

    @device_function
    def lowest_unless_padded(references, first_column, used, lane):
        mine = uint32(first_column + uint32(2) * uint32(lane & uint32(3)))
        for i in range(PAIRS):
            is_used = uint32(mine + uint32(8 * (i // 2) + i % 2)) < used
            references[i] = float32(LOWEST) if is_used else float32(PADDED)

    return lowest_unless_padded if spec.causal else lowest


def make_mask(spec, path):
    """Make the function that lets the scores of rows that a column does not see not count."""
    EIGHTS, SEEN, UNSEEN = spec.eights, spec.word_at("seen"), spec.word_at("unseen")
    BRANCH, TREE = spec.word_at("branch"), spec.places.get("tree_mask", 0)
    position_of = make_position_of(path is spec.first)
    ROW, MATRIX = spec.rows(path)[0].token_steps

    @device_function
    def mask_end(scores, first, end, lane, kept, common, counts):
        left = int32(end - first - int32(uint32(ROW) * uint32(lane >> uint32(2))))
        for i in range(4):  # row g of each matrix
            if left <= int32(MATRIX * i):
                for e in range(EIGHTS):
                    scores[8 * e + 2 * i] = float32(NEVER)
                    scores[8 * e + 2 * i + 1] = float32(NEVER)

    @device_function
    def mask_columns(scores, first, end, lane, kept, common, counts):
        mine = int32(first + int32(uint32(ROW) * uint32(lane >> uint32(2))))
        at = kept + uint32(8) * uint32(lane & uint32(3))
        for e in range(EIGHTS):
            seen = load_shared_u32x2(at + uint32(SEEN + 32 * e))
            left = int32(int32(seen[0]) - mine)
            other = int32(int32(seen[1]) - mine)
            for i in range(4):
                if left <= int32(MATRIX * i):
                    scores[8 * e + 2 * i] = float32(HIDDEN)
                if other <= int32(MATRIX * i):
                    scores[8 * e + 2 * i + 1] = float32(HIDDEN)
            if UNSEEN:
                unseen = load_shared_u32x2(at + uint32(UNSEEN + 32 * e))
                left = int32(int32(unseen[0]) - mine)
                other = int32(int32(unseen[1]) - mine)
                for i in range(4):
                    if left > int32(MATRIX * i):
                        scores[8 * e + 2 * i] = float32(HIDDEN)
                    if other > int32(MATRIX * i):
                        scores[8 * e + 2 * i + 1] = float32(HIDDEN)
        if BRANCH:
            mask_tree(scores, mine, at, common, counts)

    @device_function
    def mask_tree(scores, mine, at, common, counts):
        number = counts[0]
        before = int32(int32(counts[1] + counts[2]) - number)
        for e in range(EIGHTS):
            branch = load_shared_u32x2(at + uint32(BRANCH + 32 * e))
            for i in range(4):
                token = int32(position_of(int32(mine + int32(MATRIX * i)), counts) - before)
                place = uint64(max(min(token, int32(number - int32(1))), int32(0)))
                place += common[TREE]
                first = load_global_u8(place + uint64(branch[0]))
                second = load_global_u8(place + uint64(branch[1]))
                if token >= int32(0):
                    if first == uint32(0):
                        scores[8 * e + 2 * i] = float32(HIDDEN)
                    if second == uint32(0):
                        scores[8 * e + 2 * i + 1] = float32(HIDDEN)

    mask = mask_columns if spec.causal else mask_end

    @device_function
    def mask_beyond(scores, first, end, lane, kept, common, counts, sight):
        begin, upto = sight
        hides = int32(first + int32(TILE)) > upto
        if UNSEEN:
            hides = hides or first < begin
        if hides:
            mask(scores, first, end, lane, kept, common, counts)

    return mask_beyond
