"""Decode attention on the CPU: softmax(q·K) V of a few tokens a sequence, read from packed rows.

    work item = one (sequence, block of query heads that share a KV head, split of the tokens)

        rows    ├─── tile of 128 tokens ───┤├─── tile ───┤ ...
        K       the sums of a block of tokens stay in registers while each chunk of 16 codes is
                unpacked, scaled and multiplied with every head
        scores  online softmax over the tile, in powers of 2
        V       each chunk is unpacked, scaled and added to the sums (head, chunk)

Sums are float32, with VNNI and 16-bit queries see integers.py. The splits of all segments are
merged at the end by their log-sum-exps.

Several queries are more query heads, each of which sees the first rows only. No score is masked: a
tile ends with the rows that all queries see, and each row beyond is a tile of its own.

A tile is read as runs of rows at one stride: a page, a part of one, or the whole tile. Tiles are
the same with and without pages, so results are equal bit for bit. Pages smaller than a block have
float32 products of V.
"""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numba
import numpy as np
import torch

from kvquant.rows.arguments import address
from kvquant.rows.bound import kind_of
from kvquant.rows.call import AttentionCall
from kvquant.rows.ragged import State, attend_to_pieces
from kvquant.rows.segment import RUN, FixedSegments, Segment, check_segment_values, visible_rows
from kvquant.rows.variant import add_sinks

from . import simd
from .combine import make_merge_kernel
from .compile import compile_kernel, compiled
from .integers import MAX_INTEGER_HEADS, Keys, Values
from .parallel import ALONE, run_items, team
from .simd import (
    LANES,
    add,
    argument,
    call_kernel,
    exp2_of_difference,
    load,
    load_float,
    load_int32,
    maximum,
    prefetch,
    splat,
    stack_floats,
    store,
    store_float,
    store_int,
    times,
)
from .values import (
    RUN_BYTES,
    RUN_END,
    RUN_FIRST,
    RUN_K,
    RUN_NEXT_K,
    RUN_V,
    TILE,
    parse_spec,
    prepare_queries,
    query_floats,
    score_block,
    spec,
    store_output,
    tokens_per_block,
    value_floats,
    weigh_rows,
    widened_floats,
)
from .variant import (
    COUNT,
    FIELDS,
    FIRST,
    HEAD,
    HEADS,
    OFFSET,
    SCORES,
    SEQUENCE,
    TILE_BYTES,
    TOKENS,
    Change,
)

SMALL_TILE = 32  # where every element has parameters of its own, on the stack
MAX_HEADS = LANES  # query heads of a work item: 16 sums, one token at a time
MIN_SPLIT = 512  # tokens that are worth a work item of their own
MAX_SPLIT = 1 << 16  # tokens that float32 sums take without losing digits
ITEMS_PER_THREAD = 4  # so that unequal items even out
MIN_PARALLEL = 1 << 13  # query heads * tokens that are worth waking other threads
MIN_PARALLEL_MERGE = 1 << 18  # floats of all splits
LOG2E = math.log2(math.e)
LN2 = math.log(2)
MOST_FACTOR = float(np.finfo(np.float32).max)
LOWEST = np.finfo(np.float32).min  # under all scores; from -inf a hidden one could not be taken
NO_PAGES = 62  # page_shift of a sequence that is one page: no token has a number of 2**62


def tile_tokens(v_format):
    """Tokens of a tile: a multiple of a block's; their widened V parameters must fit the stack."""
    return TILE if widened_floats(v_format) <= 2 * v_format.groups else SMALL_TILE


@functools.cache
def make_decode_kernel(k_spec, v_spec, heads, least=RUN, in_integers=False):
    """Compile the kernel for two formats and a number of heads that share the rows; its address.

    least: rows that lie at one stride at least: RUN, or those of a smaller page. in_integers:
    whether integers.py multiplies the rows that it serves.
    """
    k_format, v_format = parse_spec(k_spec), parse_spec(v_spec)
    k_dim, v_dim = k_format.head_dim, v_format.head_dim
    k_bytes, v_bytes = k_format.row_bytes, v_format.row_bytes
    tokens = tokens_per_block(heads)
    runs_of_block, in_run = max(tokens // least, 1), min(tokens, least)
    # scratch of a work item: places in floats
    k_in_integers = int(in_integers and Keys.serve(k_format, heads, tokens))
    v_in_integers = int(in_integers and tokens <= least and Values.serve(v_format, heads))
    tile = TILE if v_in_integers else tile_tokens(v_format)
    lanes_at = tile // tokens * LANES
    max_at = lanes_at + LANES
    decay_at = max_at + LANES
    acc_at = decay_at + LANES
    k_params_at = acc_at + heads * v_dim
    v_params_at = k_params_at + tokens * widened_floats(k_format)
    runs_at = v_params_at + value_floats(v_spec, heads, v_in_integers, tile)
    said_at = runs_at + (tile // least + 1) * RUN_BYTES // 4
    q_at = -(-(said_at + TILE_BYTES // 4) // LANES) * LANES
    scratch_floats = q_at + query_floats(k_spec, heads, k_in_integers)

    def decode_kernel(args, item):
        # Step 1: the work item
        num_splits, num_q_heads = argument(args, NUM_SPLITS), argument(args, NUM_Q_HEADS)
        split = item % num_splits
        ratio = argument(args, Q_HEADS_PER_KV_HEAD)
        blocks_of_heads = (ratio + heads - 1) // heads
        kv_head = item // num_splits // blocks_of_heads % (num_q_heads // ratio)
        b = item // num_splits // blocks_of_heads // (num_q_heads // ratio)
        # the last block begins earlier: heads that two of them have come out the same
        head = min(item // num_splits % blocks_of_heads * heads, ratio - heads) + kv_head * ratio
        seq_len = load_int32(argument(args, SEQ_LENS) + 4 * b)
        begin = 0
        if argument(args, FIRST_ROWS) != 0:
            begin = load_int32(argument(args, FIRST_ROWS) + 4 * b) // in_run * in_run
        size = (seq_len - begin + num_splits - 1) // num_splits
        size = (size + tokens - 1) // tokens * tokens  # so that a block lies in one page
        end = min(begin + (split + 1) * size, seq_len)
        begin = min(begin + split * size, seq_len)
        # rows that all queries see, and how many the query of any of these heads sees
        heads_per_query, offset = argument(args, HEADS_PER_QUERY), head - kv_head * ratio
        visible = argument(args, VISIBLE) + 4 * b * (ratio // heads_per_query)
        common, most = load_int32(visible), 0
        for h in range(heads):
            most = max(most, load_int32(visible + 4 * ((offset + h) // heads_per_query)))
        first, last = begin, max(min(end, most), begin)
        q = argument(args, Q) + 4 * k_dim * (b * num_q_heads + head)
        state = (split * argument(args, BATCH) + b) * num_q_heads + head
        out, lse = argument(args, OUT) + 4 * v_dim * state, argument(args, LSE) + 4 * state
        k_stride, v_stride = argument(args, K_STRIDE), argument(args, V_STRIDE)
        k_head = argument(args, K_ROWS) + kv_head * argument(args, K_STRIDE_HEAD)
        v_head = argument(args, V_ROWS) + kv_head * argument(args, V_STRIDE_HEAD)
        k_page_stride = argument(args, K_STRIDE_BATCH)
        v_page_stride = argument(args, V_STRIDE_BATCH)
        capacity, page_shift = argument(args, CAPACITY), argument(args, PAGE_SHIFT)
        table, entry = argument(args, BLOCK_TABLE), argument(args, BLOCK_TABLE_STRIDE)
        page, page_size, run_size = b, 1 << page_shift, 1 << page_shift
        if table != 0:
            table += b * argument(args, BLOCK_TABLE_STRIDE_BATCH)
            run_size = min(page_size, tile)  # then all tiles are cut alike
        if argument(args, SEQ_SLOTS) != 0:
            page = load_int32(argument(args, SEQ_SLOTS) + 4 * b)
        start, sinks = 0, argument(args, SINKS)
        if argument(args, STARTS) != 0:
            start = load_int32(argument(args, STARTS) + 4 * b)

        scores = stack_floats(scratch_floats)
        lanes, maxima = scores + 4 * lanes_at, scores + 4 * max_at
        decay, acc = scores + 4 * decay_at, scores + 4 * acc_at
        k_params, v_params = scores + 4 * k_params_at, scores + 4 * v_params_at
        runs, said = scores + 4 * runs_at, scores + 4 * said_at
        prepared = scores + 4 * q_at
        prepare_queries(k_spec, k_in_integers, heads, q, load_float(args + 8 * FACTOR), prepared)
        change = argument(args, CHANGE)
        store_int(said + 8 * FIELDS, argument(args, CHANGE_FIELDS))
        store_int(said + 8 * SCORES, scores)
        store_int(said + 8 * SEQUENCE, b)
        store_int(said + 8 * HEAD, head)
        store_int(said + 8 * OFFSET, offset)
        store_int(said + 8 * HEADS, heads)
        store_int(said + 8 * TOKENS, tokens)
        store(maxima, splat(LOWEST))
        for place in range(0, heads * v_dim, LANES):
            store(acc + 4 * place, splat(np.float32(0)))
        row_sum = splat(np.float32(0))
        while True:
            # Step 2: the results of heads that see no more rows; without rows zeros and -inf
            if first == begin or first >= min(common, last):
                store(lanes, row_sum)
                for h in range(heads):
                    seen = load_int32(visible + 4 * ((offset + h) // heads_per_query))
                    if max(min(seen, last), begin) != first:
                        continue
                    total = np.float32(0)
                    for token in range(tokens):
                        total += load_float(lanes + 4 * (token * heads + h))
                    store_float(lse + 4 * h, load_float(maxima + 4 * h) * LN2 + math.log(total))
                    share = 1 / total if total != 0 else np.float32(0)
                    sums, place = acc + 4 * h * v_dim, out + 4 * h * v_dim
                    store_output(v_spec, v_in_integers, heads, sums, share, place)
            if first >= last:
                break
            index, end = first, sinks
            if first >= sinks:  # in the ring behind them
                index, end = first + start, capacity
                if index >= capacity:
                    index -= capacity - sinks
            # cut by all queries, not by this block's: heads that two blocks have come out the same
            count = min(tile, last - first, end - index, max(common - first, 1))
            blocks = (count + tokens - 1) // tokens
            # Step 3: where the rows of the tile and the K rows of the next one lie
            begun = index & (run_size - 1)  # tokens of the first run that are before the tile
            num_runs = (begun + count + run_size - 1) // run_size
            for r in range(num_runs):
                token, at = max(r * run_size - begun, 0), runs + RUN_BYTES * r
                store_int(at + 8 * RUN_FIRST, token)
                store_int(at + 8 * RUN_END, min((r + 1) * run_size - begun, count))
                place = index + token
                if table != 0:
                    page = load_int32(table + (place >> page_shift) * entry)
                slot = (place & (page_size - 1)) - token
                store_int(at + 8 * RUN_K, k_head + page * k_page_stride + slot * k_stride)
                store_int(at + 8 * RUN_V, v_head + page * v_page_stride + slot * v_stride)
                place += tile
                if table != 0:  # past the end the last page in use stands for a missing one
                    page = load_int32(table + (min(place, last - 1) >> page_shift) * entry)
                slot = (place & (page_size - 1)) - token
                store_int(at + 8 * RUN_NEXT_K, k_head + page * k_page_stride + slot * k_stride)
            # Step 4: scores of the tile, and the greatest of each lane
            top = splat(np.float32(-np.inf))
            for r in range(0, num_runs, runs_of_block):
                at = runs + RUN_BYTES * r
                end, k_row, v_row = argument(at, RUN_END), argument(at, RUN_K), argument(at, RUN_V)
                if runs_of_block > 1:
                    end = min(argument(at, RUN_FIRST) + tokens, count)
                for token in range(argument(at, RUN_FIRST), end, tokens):
                    row = k_row + token * k_stride
                    score = score_block(
                        k_spec,
                        k_in_integers,
                        heads,
                        least,
                        prepared,
                        row,
                        k_stride,
                        end - token,
                        k_params,
                        at,
                    )
                    store(scores + 4 * LANES * (token // tokens), score)
                    top = maximum(top, score)
                    for t in range(tokens):  # V prefetch: its rows come while K is computed with
                        if runs_of_block > 1:
                            v_row = argument(at + RUN_BYTES * (t // least), RUN_V)
                        prefetch(v_row + (token + t) * v_stride, v_bytes)
            if change != 0:
                store_int(said + 8 * FIRST, first)
                store_int(said + 8 * COUNT, count)
                call_kernel(change, said, 0)
                top = splat(np.float32(-np.inf))
                for block in range(blocks):
                    top = maximum(top, load(scores + 4 * LANES * block))
            # Step 5: the new maximum of each head, and what the old sums are worth under it
            store(lanes, top)
            for h in range(heads):
                old_max = new_max = load_float(maxima + 4 * h)
                for token in range(tokens):
                    new_max = max(new_max, load_float(lanes + 4 * (token * heads + h)))
                store_float(decay + 4 * h, 2.0 ** (old_max - new_max))
                store_float(maxima + 4 * h, new_max)
            for lane in range(heads, LANES):
                store_float(decay + 4 * lane, load_float(decay + 4 * (lane % heads)))
                store_float(maxima + 4 * lane, load_float(maxima + 4 * (lane % heads)))
            # Step 6: weights and their sum
            top = load(maxima)
            row_sum = times(row_sum, load(decay))
            for block in range(blocks):
                weight = exp2_of_difference(load(scores + 4 * LANES * block), top)
                store(scores + 4 * LANES * block, weight)
                row_sum = add(row_sum, weight)
            # Step 7: weighted sum of the V rows
            weigh_rows(
                v_spec,
                v_in_integers,
                k_bytes,
                heads,
                scores,
                runs,
                num_runs,
                v_stride,
                k_stride,
                v_params,
                decay,
                acc,
            )
            first += count

    return compile_kernel(decode_kernel)


# what a decode kernel is given
(
    Q,  # [batch, num_q_heads, k_dim] float32
    FACTOR,  # on scores, a float32 in the first bytes: sm_scale * log2(e)
    K_ROWS,
    V_ROWS,
    K_STRIDE_BATCH,  # strides in bytes: from a sequence or page, a KV head, a token to the next
    K_STRIDE_HEAD,
    K_STRIDE,
    V_STRIDE_BATCH,
    V_STRIDE_HEAD,
    V_STRIDE,
    SEQ_LENS,  # [batch] int32
    VISIBLE,  # [batch, q_len] int32, rows that each query sees, the first ones
    STARTS,  # [batch] int32, or 0
    SINKS,  # rows before the ring
    SEQ_SLOTS,  # [batch] int32, or 0
    CAPACITY,
    BLOCK_TABLE,  # [batch, max_pages] int32, or 0
    BLOCK_TABLE_STRIDE_BATCH,  # in bytes
    BLOCK_TABLE_STRIDE,
    PAGE_SHIFT,  # log2 of the page size, or NO_PAGES
    BATCH,
    NUM_Q_HEADS,  # of all queries
    Q_HEADS_PER_KV_HEAD,  # of all queries, one query's after the other's
    HEADS_PER_QUERY,  # on a KV head
    NUM_SPLITS,
    OUT,  # [num_splits, batch, num_q_heads, v_dim] float32
    LSE,  # [num_splits, batch, num_q_heads] float32, base e
    FIRST_ROWS,  # [batch] int32, rows before these are seen by no query; or 0
    CHANGE,  # address of the kernel that changes scores, or 0; see variant.py
    CHANGE_FIELDS,
    ROWS_BATCH,  # sequences, sequence slots or pages of the rows
    KERNEL,  # its address, or 0 while there are no rows
    ITEMS,  # of the segment
) = range(33)
NUM_ARGUMENTS = ITEMS + 1


def attend(
    call: AttentionCall, check: Callable[[AttentionCall], AttentionCall] | None = None
) -> State:
    """Attend to all segments and merge; out and lse are float32.

    check: returns the call if it is possible, with formats and a scale; None if it is and has them.
    Called unless work of this kind is bound to the segments.
    """
    q, segments, sm_scale, num_splits, _, q_lens, variant, _, q_indptr, _ = call
    key: Hashable = None
    has_options = not (variant is None and q_lens is None and q_indptr is None)
    if q.ndim == 3 and type(segments) is FixedSegments and not has_options:
        kind = kind_of(q)
        if kind is not None and (sm_scale is None or type(sm_scale) is float):  # True were 1.0
            key = kind, sm_scale, num_splits
            kept: Work | None = segments.bound.get(key)
            found = None if kept is None else kept(q)
            if found is not None:
                return found
    fixed = segments
    if check is not None:
        call = check(call)
        q, segments, sm_scale, num_splits, _, q_lens, variant, *_ = call
    assert sm_scale is not None
    most = max(MAX_HEADS // max(q.shape[-2] // segments[0].k_rows.shape[1], 1), 1)
    if call.q_indptr is not None:
        address(q, "q")  # as below
        return attend_to_pieces(call, most, attend)
    if q.ndim == 3:
        if variant is None:
            work = Work(q, segments, sm_scale, num_splits)
            if isinstance(fixed, FixedSegments) and work.is_kept:
                fixed.bound.keep(key, work)
            return work.attend(q)
        if variant.score_offsets is not None:
            variant = variant._replace(score_offsets=variant.score_offsets[:, None])
        out, lse = attend(call._replace(q=q[:, None], q_lens=None, variant=variant))
        return out[:, 0], lse[:, 0]
    address(q, "q")  # a copy has values where q may have none
    batch, q_len, num_q_heads, head_dim = q.shape
    window = None if variant is None or variant.tree_mask is not None else variant.window
    if window is not None and q_len > max(most, window // 2):
        return _attend_ragged(call)  # else all queries read the rows from the first one's window on
    num_kv_heads = segments[0].k_rows.shape[1]
    by_kv_head = q.unflatten(2, (num_kv_heads, -1)).transpose(1, 2)
    shape = by_kv_head.shape[:-1]  # [batch, num_kv_heads, q_len, ratio]
    heads = by_kv_head.reshape(batch, q_len * num_q_heads, head_dim)
    visible = visible_rows(segments, q_lens, q_len)
    change = None
    if variant is not None and q.numel():
        change = Change(variant, segments, q_lens, batch, q_len, num_kv_heads, num_q_heads)
        if variant.tree_mask is not None:  # queries see beyond their row, and padding nothing
            lens = torch.stack([segment.seq_lens for segment in segments])
            visible = torch.where(visible.sum(0) > 0, lens[..., None], 0)
    work = Work(heads, segments, sm_scale, num_splits, visible.unbind(), change)
    out, lse = work.attend(heads)
    out, lse = (x.view(*shape, *x.shape[2:]).transpose(1, 2).flatten(2, 3) for x in (out, lse))
    if variant is not None and variant.sink_logits is not None:
        return add_sinks(out, lse, variant.sink_logits)
    return out, lse


def _attend_ragged(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """As attend, of padded queries; those of one sequence follow on those of another."""
    q, variant = call.q, call.variant
    batch, q_len = q.shape[:2]
    counts = call.q_lens
    counts = (
        torch.tensor([q_len] * batch, device="cpu") if counts is None else counts.clamp(0, q_len)
    )
    rows = torch.arange(q_len, device="cpu") < counts[:, None]
    if variant is not None and variant.score_offsets is not None:
        variant = variant._replace(score_offsets=variant.score_offsets[rows])
    q_indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    ragged = call._replace(q=q[rows], q_lens=None, variant=variant, q_indptr=q_indptr)
    out = q.new_zeros(*q.shape[:-1], call.segments[0].v_format.head_dim, dtype=torch.float32)
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=torch.float32)
    out[rows], lse[rows] = attend(ragged)
    return out, lse


class Work:
    """Attention of queries of one kind to segments whose tensors stay.

    The queries are [batch, num_kv_heads * q_len * ratio, head_dim], the heads of all of them.

    Args:
        visible: of each segment the rows that each query sees, [batch, q_len] int32; None for all.

    Attributes:
        is_kept: whether all its tensors are those of the segments, and none is a copy.
    """

    def __init__(
        self,
        q: torch.Tensor,
        segments: Sequence[Segment],
        sm_scale: float,
        num_splits: int | None,
        visible: Sequence[torch.Tensor] | None = None,
        change: Change | None = None,
    ) -> None:
        batch, num_q_heads, _ = q.shape
        v_dim = segments[0].v_format.head_dim
        ratio = num_q_heads // segments[0].k_rows.shape[1]
        # rounds less than 16-bit queries and outputs are rounded anyway
        in_integers = q.dtype != torch.float32 and simd.in_hardware("avx512vnni")
        heads = heads_of_block(ratio, MAX_INTEGER_HEADS if in_integers else MAX_HEADS)
        # work items of a split: blocks of query heads of all KV heads and sequences
        units = batch * num_q_heads // ratio * -(-ratio // heads) if ratio else 0
        self._shape, kernels = (batch, num_q_heads, v_dim), (make_any_kernel(), make_merge_kernel())
        self._facts = units, num_splits or 0, batch * num_q_heads, v_dim, *kernels
        factor = sm_scale * LOG2E
        if abs(factor) > MOST_FACTOR:  # float32 cannot hold it
            factor = math.copysign(math.inf, factor)
        factor_bits = np.array([factor, 0], np.float32).view(np.int64)
        self._makers: list[Callable[[], int]] = []
        self._arguments = np.zeros((len(segments), NUM_ARGUMENTS), np.int64)
        # not the tuple that keeps this work: it would hold itself
        self._segments, self._kept = [*segments], list[object]([change])
        self.is_kept = True
        for i, segment in enumerate(segments if units else ()):
            table, page_size = segment.block_table, segment.k_rows.shape[2]
            least = RUN if table is None else min(page_size, RUN)
            formats = spec(segment.k_format), spec(segment.v_format)
            self._makers.append(partial(make_decode_kernel, *formats, heads, least, in_integers))
            lens = seen = self._place(segment.seq_lens, "seq_lens")
            q_len = 1
            if visible is not None:
                seen, q_len = self._place(visible[i]), visible[i].numel() // batch
            pages = [0, 0, 0, NO_PAGES]
            if table is not None:
                strides = [4 * stride for stride in table.stride()]
                pages = [address(table, "block_table"), *strides, page_size.bit_length() - 1]
            self._arguments[i] = [
                0,
                *factor_bits,
                address(segment.k_rows, "k_rows"),
                address(segment.v_rows, "v_rows"),
                *segment.k_rows.stride()[:3],
                *segment.v_rows.stride()[:3],
                lens,
                seen,
                self._place(segment.starts),
                segment.sinks,
                self._place(segment.seq_slots),
                segment.capacity,
                *pages,
                batch,
                num_q_heads,
                ratio,
                ratio // q_len,
                *[0] * 3,
                *((0, 0, 0) if change is None else change.arguments(i)),
                *[segment.k_rows.shape[0], 0, 0],
            ]
        self._tensors = [x for one in self._segments for x in one if isinstance(x, torch.Tensor)]
        self._addresses = [one.data_ptr() for one in self._tensors]

    def _place(self, numbers: torch.Tensor | None, name: str = "lengths") -> int:
        if numbers is None:
            return 0
        if not numbers.is_contiguous():
            numbers, self.is_kept = numbers.contiguous(), False
        self._kept.append(numbers)
        return address(numbers, name)

    def attend(self, q: torch.Tensor) -> State:
        """Attend; ShapeError if a length or a page does not exist."""
        found = self(q)
        if found is None:
            check_segment_values(self._segments)
        assert found is not None
        return found

    def __call__(self, q: torch.Tensor) -> State | None:
        """Attend; None if a length, start, sequence slot or page does not exist, or if torch has
        moved a tensor, as it does with those that other processes get."""
        if self._addresses != [*map(torch.Tensor.data_ptr, self._tensors)]:
            return None
        if q.dtype != torch.float32 or not q.is_contiguous():
            q = q.detach().float().contiguous()
        out = torch.empty(self._shape, dtype=torch.float32, device="cpu")
        lse = torch.empty(self._shape[:2], dtype=torch.float32, device="cpu")
        given = self._arguments, self._facts, address(q, "q"), out.data_ptr(), lse.data_ptr()
        while (place := _attend(*given, *team())) > 0:  # a segment has rows for the first time
            self._arguments[place - 1, KERNEL] = self._makers[place - 1]()
        return None if place else (out, lse)


@compiled
def _attend(segments, facts, q, out, lse, threads, start, work):
    """Attend to all segments and merge; 0 when done.

    segments, facts: of Work. threads, start, work: of parallel.team. It returns -1 if a value of a
    segment is not possible, and the place + 1 of a segment whose kernel has to be made.
    """
    units, num_splits, num_heads, v_dim, _, _ = facts
    wanted = (ITEMS_PER_THREAD * threads + units - 1) // max(units, 1)  # so that all have work
    splits, most = 0, 0
    segments = segments.copy()  # another thread may attend to them as well
    for i in range(len(segments)):
        longest = _longest(segments[i])
        if longest < 0:
            return -1
        if longest > 0 and segments[i, KERNEL] == 0:
            return i + 1
        # so that none waits for long
        count = max(1, min(wanted, longest // MIN_SPLIT), (longest + MAX_SPLIT - 1) // MAX_SPLIT)
        count = min(num_splits if num_splits > 0 else count, longest)
        segments[i, Q], segments[i, NUM_SPLITS], segments[i, ITEMS] = q, count, units * count
        splits, most = splits + count, max(most, longest)
    parts = np.empty(splits * num_heads * (v_dim + 1), np.float32)
    start = ALONE if num_heads * most < MIN_PARALLEL else start
    _serve(segments, facts, parts, splits, out, lse, start, work)
    return 0


@numba.njit(nogil=True)
def _serve(segments, facts, parts, splits, out, lse, start, work):
    """Compute the parts of all splits and merge them; see _attend."""
    _, _, num_heads, v_dim, any_kernel, merge = facts
    place, items = np.int64(parts.ctypes.data), 0
    lses = place + 4 * splits * num_heads * v_dim
    merged = np.array([place, lses, splits, num_heads, v_dim, out, lse])
    for i in range(len(segments)):
        segments[i, OUT], segments[i, LSE] = place, lses
        place += 4 * num_heads * v_dim * segments[i, NUM_SPLITS]
        lses += 4 * num_heads * segments[i, NUM_SPLITS]
        items += segments[i, ITEMS]
    run_items(any_kernel, segments.ctypes.data, items, start, work)
    start = ALONE if parts.size < MIN_PARALLEL_MERGE else start
    run_items(merge, merged.ctypes.data, num_heads, start, work)
    merged[0] = 0  # it lives until here


@numba.njit(nogil=True)
def _longest(segment):
    """The most rows of a sequence that its queries see; -1 if a value is not possible."""
    capacity, page_shift, longest = segment[CAPACITY], segment[PAGE_SHIFT], 0
    last_start = max(capacity - segment[SINKS] - 1, 0)  # a ring without rows starts at 0
    starts, slots, rows = segment[STARTS], segment[SEQ_SLOTS], segment[ROWS_BATCH]
    for b in range(segment[BATCH]):
        length, first = load_int32(segment[SEQ_LENS] + 4 * b), 0
        start = load_int32(starts + 4 * b) if starts != 0 else 0
        if not (0 <= length <= capacity and 0 <= start <= last_start):
            return -1
        if slots != 0 and not 0 <= load_int32(slots + 4 * b) < rows:
            return -1
        if segment[BLOCK_TABLE] != 0:
            table = segment[BLOCK_TABLE] + b * segment[BLOCK_TABLE_STRIDE_BATCH]
            for entry in range((length + (1 << page_shift) - 1) >> page_shift):
                page = load_int32(table + entry * segment[BLOCK_TABLE_STRIDE])
                if not 0 <= page < rows:
                    return -1
        if segment[FIRST_ROWS] != 0:
            first = load_int32(segment[FIRST_ROWS] + 4 * b)
        longest = max(longest, length - first)
    return longest


@functools.cache
def make_any_kernel():
    """The kernel of all segments' work items, those of the first segment first."""

    def any_kernel(segment, item):
        while item >= argument(segment, ITEMS):
            item -= argument(segment, ITEMS)
            segment += 8 * NUM_ARGUMENTS
        call_kernel(argument(segment, KERNEL), segment, item)

    return compile_kernel(any_kernel)


def heads_of_block(ratio: int, most: int = MAX_HEADS) -> int:
    """Query heads of a work item, of the ratio that share a KV head."""
    blocks = max(-(-ratio // most), 1)
    return -(-ratio // blocks)
