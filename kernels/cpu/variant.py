"""What a model changes in the scores of a tile, before its softmax: see kvquant/rows/variant.py.

    decode kernel    scores of a tile, log2 units ──▶ change kernel ──▶ maxima, weights, V
                     [block of tokens][token][head]     in place

One kernel serves all formats and fields. The decode kernel gets its address, 0 for plain attention.
Hidden tokens get -inf. Sinks are added to the result.
"""

import functools
import math

import numpy as np
import torch

from kvquant.rows.segment import first_positions, rows_before

from .compile import compile_kernel
from .simd import (
    LANES,
    add,
    argument,
    load,
    load_float,
    load_int32,
    soft_capped,
    stack_floats,
    store,
    store_float,
    store_int,
)

LOG2E = math.log2(math.e)
OF_HEADS = 3 * LANES  # floats: slopes, and the positions of queries, int64

# what a decode kernel says of a tile
(
    FIELDS,  # address of what is named below
    SCORES,  # address, as score_block leaves them
    FIRST,  # the segment's row of the first token
    COUNT,  # tokens
    SEQUENCE,
    HEAD,  # the first of HEADS query heads, of all queries and all KV heads
    OFFSET,  # the same among those of its KV head
    HEADS,
    TOKENS,  # of a block
) = range(9)
TILE_BYTES = 9 * 8

# what it hands on: of a variant and a segment; 0 for what is not in use
(
    SCORE_OFFSETS,  # [batch, query heads of all queries] float32, as CAP and SLOPES in log2
    CAP,  # [1] float32
    SLOPES,  # [query heads of all queries] float32
    WINDOW,
    TREE,  # [batch, q_len] int64, a bit for each of the last tokens that a query sees
    Q_LEN,
    FIRST_QUERY,  # [batch] int32, the position of the first query
    FIRST_SINK,  # [batch] int32, row i is token i + this if i < SINKS
    FIRST_OTHER,  # [batch] int32, else i + this
    SINKS,
    NUM_Q_HEADS,  # of all queries
    HEADS_PER_QUERY,  # on a KV head
) = range(12)


@functools.cache
def make_change_kernel():
    """Compile the kernel; its address. It takes the address of what is said of a tile."""

    def change_kernel(tile, _):
        fields, scores = argument(tile, FIELDS), argument(tile, SCORES)
        first, count = argument(tile, FIRST), argument(tile, COUNT)
        b, head = argument(tile, SEQUENCE), argument(tile, HEAD)
        heads, tokens = argument(tile, HEADS), argument(tile, TOKENS)
        blocks = (count + tokens - 1) // tokens
        offsets, cap = argument(fields, SCORE_OFFSETS), argument(fields, CAP)
        if offsets != 0:
            offsets += 4 * (b * argument(fields, NUM_Q_HEADS) + head)
            lanes = stack_floats(LANES)
            for lane in range(LANES):
                store_float(lanes + 4 * lane, load_float(offsets + 4 * (lane % heads)))
            for block in range(blocks):
                at = scores + 4 * LANES * block
                store(at, add(load(at), load(lanes)))
        if cap != 0:
            for block in range(blocks):
                at = scores + 4 * LANES * block
                store(at, soft_capped(load(at), load_float(cap)))

        slopes = argument(fields, SLOPES)
        window, tree = argument(fields, WINDOW), argument(fields, TREE)
        if slopes == 0 and window == 0 and tree == 0:
            return
        of_heads = stack_floats(OF_HEADS)
        positions = of_heads + 4 * LANES
        heads_per_query = argument(fields, HEADS_PER_QUERY)
        first_query = load_int32(argument(fields, FIRST_QUERY) + 4 * b)
        for h in range(heads):
            query = (argument(tile, OFFSET) + h) // heads_per_query
            slope = np.float32(0)
            if slopes != 0:
                slope = load_float(slopes + 4 * (head + h))
            store_float(of_heads + 4 * h, slope)
            store_int(positions + 8 * h, first_query + query)
        first_sink = load_int32(argument(fields, FIRST_SINK) + 4 * b)
        first_other = load_int32(argument(fields, FIRST_OTHER) + 4 * b)
        words = tree + 8 * b * argument(fields, Q_LEN)
        for token in range(count):
            row, at = first + token, scores + 4 * LANES * (token // tokens)
            position = row + (first_sink if row < argument(fields, SINKS) else first_other)
            for h in range(heads):
                place = at + 4 * (token % tokens * heads + h)
                query = argument(positions, h)
                slope = load_float(of_heads + 4 * h)
                score = load_float(place) + slope * np.float32(position - query)
                if window != 0 and position <= query - window:
                    score = np.float32(-np.inf)
                if tree != 0 and position >= first_query:
                    word = argument(words, query - first_query)
                    if (word >> (position - first_query)) & 1 == 0:
                        score = np.float32(-np.inf)
                store_float(place, score)

    return compile_kernel(change_kernel)


class Change:
    """A variant as kernels take it; firsts [segments, batch] int32: the first row that is seen."""

    def __init__(self, variant, segments, q_lens, batch, q_len, num_kv_heads, num_q_heads):
        lens = torch.stack([segment.seq_lens for segment in segments]).sum(0, dtype=torch.int32)
        counts = q_len if q_lens is None else q_lens.clamp(0, q_len)
        first_query = (lens - counts).int()
        shape = batch, q_len, num_kv_heads, num_q_heads // num_kv_heads
        offsets, slopes = variant.score_offsets, variant.alibi_slopes
        if offsets is not None:
            offsets = (offsets.view(shape).transpose(1, 2) * LOG2E).contiguous()
        if slopes is not None:
            slopes = (slopes * LOG2E).view(1, num_kv_heads, 1, -1)
            slopes = slopes.expand(1, num_kv_heads, q_len, -1).contiguous()
        cap = tree = None
        if variant.soft_cap is not None:
            cap = torch.tensor([variant.soft_cap * LOG2E], dtype=torch.float32, device="cpu")
        if variant.tree_mask is not None:
            bits = torch.arange(q_len, device="cpu")
            tree = (variant.tree_mask.long() << bits).sum(-1)
        self.firsts = torch.zeros(len(segments), batch, dtype=torch.int32, device="cpu")
        if variant.window is not None:
            first_seen = first_query.long() - (variant.window - 1)  # int32 may be too small for it
            self.firsts = rows_before(segments, first_seen[:, None])[..., 0].int().contiguous()
        positions = first_positions(segments).contiguous()
        self._kept = offsets, cap, slopes, tree, first_query, positions

        def place(tensor):
            return 0 if tensor is None else tensor.data_ptr()

        self._fields = [
            np.array(
                [
                    place(offsets),
                    place(cap),
                    place(slopes),
                    variant.window or 0,
                    place(tree),
                    q_len,
                    first_query.data_ptr(),
                    positions[0, i].data_ptr(),
                    positions[1, i].data_ptr(),
                    segment.sinks,
                    q_len * num_q_heads,
                    num_q_heads // num_kv_heads,
                ],
                np.int64,
            )
            for i, segment in enumerate(segments)
        ]

    def arguments(self, i):
        """FIRST_ROWS, CHANGE and CHANGE_FIELDS of a decode kernel for a segment."""
        return self.firsts[i].data_ptr(), make_change_kernel(), self._fields[i].ctypes.data
