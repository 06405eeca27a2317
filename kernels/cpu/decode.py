"""Decode attention on the CPU: softmax(q·K) V of one token a sequence, read from packed rows.

    work item = one (sequence, block of query heads that share a KV head, split of the tokens)

        rows    ├─── tile of 128 tokens ───┤├─── tile ───┤ ...
        K       per block of a few tokens: the 16 sums (token, head) stay in registers while
                each chunk of 16 codes is unpacked, scaled and multiplied with every head; a tree
                of shuffles turns the sums into one vector of 16 scores
        scores  online softmax over the tile, in powers of 2
        V       per token each chunk is unpacked, scaled and added to the sums (head, chunk)

A code is unpacked once for all query heads that share it, in registers, and never stored. All sums
are float32. The splits of all segments are merged at the end by their log-sum-exp.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from kvquant.segments import Segment

from .merge import make_merge_kernel
from .parallel import compile_kernel, run, sources_hash
from .simd import (
    F32,
    I32,
    I64,
    LANES,
    add,
    argument,
    exp2_of_difference,
    f32x16,
    keyed_by,
    literal,
    load,
    load_float,
    load_int32,
    maximum,
    operation,
    prefetch,
    splat,
    stack_floats,
    store,
    store_float,
    times,
)
from .values import RowReader, parse_spec, spec, widened_floats

TILE = 128  # tokens: their K and V rows, scores and parameters stay in the L2 cache
SMALL_TILE = 32  # where every element has parameters of its own, on the stack
MAX_HEADS = LANES  # query heads of a work item: 16 sums, one token at a time
MAX_SUMS = 28  # sums (head, chunk) in registers; AVX-512 has 32
MIN_SPLIT = 512  # tokens that are worth a work item of their own
MAX_SPLIT = 1 << 16  # tokens that float32 sums take without losing digits
ITEMS_PER_THREAD = 4  # so that unequal items even out
MIN_PARALLEL = 1 << 13  # query heads * tokens that are worth waking other threads
LOG2E = math.log2(math.e)
LN2 = math.log(2)


def tokens_per_block(heads):
    """Tokens whose scores fill a vector: a power of two with tokens * heads <= 16."""
    return 1 << int(math.log2(LANES // heads))


def tile_tokens(v_format):
    """Tokens of a tile: a multiple of a block's; their widened V parameters must fit the stack."""
    return TILE if widened_floats(v_format) <= 2 * v_format.groups else SMALL_TILE


def chunks_per_pass(heads, chunks):
    """Chunks of V whose sums with all heads fit the registers: a divisor of chunks."""
    return max(
        c for c in range(1, chunks + 1) if chunks % c == 0 and (c == 1 or c * heads <= MAX_SUMS)
    )


@operation(
    f32x16, literal, literal, types.int64, types.int64, types.int64, types.int64, types.int64
)
def score_block(emit, format_spec, heads, q, row, stride, count, params):
    """Scores of the next tokens with all heads: lane token * heads + head; -inf beyond the tokens.

    q [heads, head_dim] float32; row: address of the first token's row; count: tokens that exist, at
    least 1 (the last one's row is read again in place of missing ones); params: widened ones of the
    block's rows.
    """
    b, fmt = emit.builder, parse_spec(format_spec)
    reader = RowReader(emit, fmt)
    tokens = tokens_per_block(heads)
    rows, row_params = [], []
    for token in range(tokens):
        last = b.sub(count, ir.Constant(I64, 1))
        inside = b.icmp_signed("<", ir.Constant(I64, token), count)
        index = b.select(inside, ir.Constant(I64, token), last)
        rows.append(b.add(row, b.mul(index, stride)))
        row_params.append(emit.at(params, 4 * token * widened_floats(fmt)))
        reader.widen(rows[-1], row_params[-1])
    sums = [cgutils.alloca_once_value(b, emit.constant(0.0)) for _ in range(tokens * heads)]
    with cgutils.for_range(b, ir.Constant(I64, reader.chunks)) as loop:
        chunk_q = b.add(q, emit.times(loop.index, 4 * LANES))
        keys = [reader.values(r, p, loop.index) for r, p in zip(rows, row_params, strict=True)]
        for head in range(heads):
            query = emit.load(emit.at(chunk_q, 4 * fmt.head_dim * head), F32)
            for token in range(tokens):
                total = sums[token * heads + head]
                b.store(emit.fma(keys[token], query, b.load(total)), total)
    scores = emit.sums([b.load(total) for total in sums] + [None] * (LANES - len(sums)))
    lanes = ir.Constant(ir.VectorType(I32, LANES), [ir.Constant(I32, i) for i in range(LANES)])
    limit = b.trunc(b.mul(count, ir.Constant(I64, heads)), I32)
    limit = b.select(
        b.icmp_signed("<", limit, ir.Constant(I32, tokens * heads)),
        limit,
        ir.Constant(I32, tokens * heads),
    )
    within = b.icmp_signed("<", lanes, emit.splat(limit))
    return b.select(within, scores, emit.constant(-math.inf))


@operation(
    types.void,
    literal,
    literal,
    types.int64,
    types.int64,
    types.int64,
    types.int64,
    types.int64,
    types.int64,
    types.int64,
    types.int64,
    types.int64,
    literal,
)
def weigh_rows(
    emit,
    format_spec,
    heads,
    weights,
    row,
    stride,
    count,
    params,
    decay,
    acc,
    next_row,
    next_stride,
    next_bytes,
):
    """acc = acc * decay + weights · V over the rows of a tile, while the next K rows are fetched.

    weights: as score_block leaves them, 16 floats a block; params: room for the widened parameters
    of the tile; decay [heads] and acc [heads, head_dim] float32.
    """
    b, fmt = emit.builder, parse_spec(format_spec)
    reader = RowReader(emit, fmt)
    tokens = tokens_per_block(heads)
    width = chunks_per_pass(heads, reader.chunks)
    row_floats = 4 * widened_floats(fmt)
    with cgutils.for_range(b, count) as loop:
        reader.widen(
            b.add(row, b.mul(loop.index, stride)), b.add(params, emit.times(loop.index, row_floats))
        )
    with cgutils.for_range(b, ir.Constant(I64, reader.chunks // width)) as part:
        first = emit.times(part.index, width)
        chunks = [b.add(first, ir.Constant(I64, c)) for c in range(width)]
        places = [
            b.add(emit.at(acc, 4 * fmt.head_dim * head), emit.times(chunk, 4 * LANES))
            for head in range(heads)
            for chunk in chunks
        ]
        # a sum of their own for the tile: added one by one to a long sum, tokens lose digits
        sums = [cgutils.alloca_once_value(b, emit.constant(0.0)) for _ in places]
        with cgutils.for_range(b, count) as loop:
            at = b.add(row, b.mul(loop.index, stride))
            emit.prefetch(b.add(next_row, b.mul(loop.index, next_stride)), next_bytes)
            row_params = b.add(params, emit.times(loop.index, row_floats))
            block = emit.times(b.udiv(loop.index, ir.Constant(I64, tokens)), LANES)
            lane = emit.times(b.urem(loop.index, ir.Constant(I64, tokens)), heads)
            at_weights = b.add(weights, emit.times(b.add(block, lane), 4))
            for c, chunk in enumerate(chunks):
                values = reader.values(at, row_params, chunk)
                for head in range(heads):
                    total = sums[head * width + c]
                    weight = emit.load_splat(emit.at(at_weights, 4 * head))
                    b.store(emit.fma(values, weight, b.load(total)), total)
        for i, (place, total) in enumerate(zip(places, sums, strict=True)):
            factor = emit.load_splat(emit.at(decay, 4 * (i // width)))
            emit.store(place, emit.fma(emit.load(place, F32), factor, b.load(total)))


@functools.cache
def make_decode_kernel(k_spec, v_spec, heads):
    """Compile the kernel for two formats and a number of heads that share the rows; its address.

    It takes the arguments named below, and the index of (sequence, block of heads, split).
    """
    k_dim, v_dim = parse_spec(k_spec).head_dim, parse_spec(v_spec).head_dim
    k_bytes, v_bytes = parse_spec(k_spec).row_bytes, parse_spec(v_spec).row_bytes
    tokens = tokens_per_block(heads)
    # scratch of a work item: places in floats
    tile = tile_tokens(parse_spec(v_spec))
    lanes_at = tile // tokens * LANES
    max_at = lanes_at + LANES
    decay_at = max_at + LANES
    acc_at = decay_at + LANES
    k_params_at = acc_at + heads * v_dim
    v_params_at = k_params_at + tokens * widened_floats(parse_spec(k_spec))
    scratch_floats = v_params_at + tile * widened_floats(parse_spec(v_spec))
    sources = sources_hash()

    def decode_kernel(args, item):
        keyed_by(sources)
        # Step 1: the work item
        num_splits, num_q_heads = argument(args, NUM_SPLITS), argument(args, NUM_Q_HEADS)
        split = item % num_splits
        b = item // num_splits // (num_q_heads // heads)
        head = item // num_splits % (num_q_heads // heads) * heads
        kv_head = head // argument(args, Q_HEADS_PER_KV_HEAD)
        seq_len = load_int32(argument(args, SEQ_LENS) + 4 * b)
        size = (seq_len + num_splits - 1) // num_splits
        first, last = min(split * size, seq_len), min((split + 1) * size, seq_len)
        q = argument(args, Q) + 4 * k_dim * (b * num_q_heads + head)
        state = (split * argument(args, BATCH) + b) * num_q_heads + head
        out, lse = argument(args, OUT) + 4 * v_dim * state, argument(args, LSE) + 4 * state
        k_stride, v_stride = argument(args, K_STRIDE), argument(args, V_STRIDE)
        k_row = argument(args, K_ROWS) + b * argument(args, K_STRIDE_BATCH)
        k_row += kv_head * argument(args, K_STRIDE_HEAD)
        v_row = argument(args, V_ROWS) + b * argument(args, V_STRIDE_BATCH)
        v_row += kv_head * argument(args, V_STRIDE_HEAD)
        capacity = argument(args, CAPACITY)
        if argument(args, STARTS) != 0:
            start = load_int32(argument(args, STARTS) + 4 * b)
            first, last = first + start, last + start

        scores = stack_floats(scratch_floats)
        lanes, maxima = scores + 4 * lanes_at, scores + 4 * max_at
        decay, acc = scores + 4 * decay_at, scores + 4 * acc_at
        k_params, v_params = scores + 4 * k_params_at, scores + 4 * v_params_at
        store(maxima, splat(np.float32(-np.inf)))
        for place in range(0, heads * v_dim, LANES):
            store(acc + 4 * place, splat(np.float32(0)))
        row_sum = splat(np.float32(0))
        while first < last:
            index = first - capacity if first >= capacity else first
            count = min(tile, last - first, capacity - index)
            blocks = (count + tokens - 1) // tokens
            # Step 2: scores of the tile, and the greatest of each lane
            top = splat(np.float32(-np.inf))
            for block in range(blocks):
                token = block * tokens
                row = k_row + (index + token) * k_stride
                score = score_block(k_spec, heads, q, row, k_stride, count - token, k_params)
                store(scores + 4 * LANES * block, score)
                top = maximum(top, score)
                for t in range(tokens):  # V prefetch: its rows come while K is computed with
                    prefetch(v_row + (index + token + t) * v_stride, v_bytes)
            # Step 3: the new maximum of each head, and what the old sums are worth under it
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
            # Step 4: weights and their sum
            top = load(maxima)
            row_sum = times(row_sum, load(decay))
            for block in range(blocks):
                weight = exp2_of_difference(load(scores + 4 * LANES * block), top)
                store(scores + 4 * LANES * block, weight)
                row_sum = add(row_sum, weight)
            # Step 5: weighted sum of the V rows
            row, next_row = v_row + index * v_stride, k_row + (index + count) * k_stride
            weigh_rows(
                v_spec,
                heads,
                scores,
                row,
                v_stride,
                count,
                v_params,
                decay,
                acc,
                next_row,
                k_stride,
                k_bytes,
            )
            first += count
        # Step 6: normalize; without tokens zeros and -inf
        store(lanes, row_sum)
        for h in range(heads):
            total = np.float32(0)
            for token in range(tokens):
                total += load_float(lanes + 4 * (token * heads + h))
            store_float(lse + 4 * h, load_float(maxima + 4 * h) * LN2 + math.log(total))
            share = splat(1 / total if total != 0 else np.float32(0))
            for chunk in range(0, v_dim, LANES):
                offset = 4 * (h * v_dim + chunk)
                store(out + offset, times(load(acc + offset), share))

    return compile_kernel(decode_kernel)


# what a decode kernel is given
(
    Q,  # [batch, num_q_heads, k_dim] float32, times sm_scale * log2(e)
    K_ROWS,
    V_ROWS,
    K_STRIDE_BATCH,  # strides in bytes: from a sequence, a KV head, a token to the next
    K_STRIDE_HEAD,
    K_STRIDE,
    V_STRIDE_BATCH,
    V_STRIDE_HEAD,
    V_STRIDE,
    SEQ_LENS,  # [batch] int32
    STARTS,  # [batch] int32, or 0
    CAPACITY,
    BATCH,
    NUM_Q_HEADS,
    Q_HEADS_PER_KV_HEAD,
    NUM_SPLITS,
    OUT,  # [num_splits, batch, num_q_heads, v_dim] float32
    LSE,  # [num_splits, batch, num_q_heads] float32, base e
) = range(18)


def attend(
    q: torch.Tensor, segments: Sequence[Segment], sm_scale: float, num_splits: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to all segments and merge; see attention.attend_segments, which checks the input."""
    batch, num_q_heads, _ = q.shape
    v_dim = segments[0].v_format.head_dim
    ratio = num_q_heads // segments[0].k_rows.shape[1]
    heads = max(h for h in range(1, MAX_HEADS + 1) if ratio % h == 0)
    scaled = (q.float() * (sm_scale * LOG2E)).contiguous()
    work = [(s, n) for s in segments if q.numel() and (n := int(s.seq_lens.max()))]
    splits = [
        min(num_splits, n) if num_splits else plan_splits(batch * num_q_heads // heads, n)
        for _, n in work
    ]
    out = scaled.new_empty(max(sum(splits), 1), batch, num_q_heads, v_dim)
    lse = scaled.new_empty(max(sum(splits), 1), batch, num_q_heads)
    if not work:
        return out[0].zero_(), lse[0].fill_(-math.inf)

    done = 0
    for (segment, longest), count in zip(work, splits, strict=True):
        kernel = make_decode_kernel(spec(segment.k_format), spec(segment.v_format), heads)
        seq_lens = segment.seq_lens.contiguous()
        starts = None if segment.starts is None else segment.starts.contiguous()
        arguments = np.array(
            [
                scaled.data_ptr(),
                segment.k_rows.data_ptr(),
                segment.v_rows.data_ptr(),
                *segment.k_rows.stride()[:3],
                *segment.v_rows.stride()[:3],
                seq_lens.data_ptr(),
                0 if starts is None else starts.data_ptr(),
                segment.capacity,
                batch,
                num_q_heads,
                ratio,
                count,
                out[done].data_ptr(),
                lse[done].data_ptr(),
            ]
        )
        items = count * batch * num_q_heads // heads
        run(kernel, arguments, items, parallel=batch * num_q_heads * longest >= MIN_PARALLEL)
        done += count
    if done == 1:
        return out[0], lse[0]
    arguments = np.array([out.data_ptr(), lse.data_ptr(), done, batch * num_q_heads, v_dim])
    run(
        make_merge_kernel(),
        arguments,
        batch * num_q_heads,
        parallel=done * out[0].numel() > 1 << 18,
    )
    return out[0], lse[0]


def plan_splits(items, tokens):
    """Parts to cut a sequence into, so that all threads have work and none waits for long."""
    wanted = -(-ITEMS_PER_THREAD * torch.get_num_threads() // items)
    return max(1, min(wanted, tokens // MIN_SPLIT), -(-tokens // MAX_SPLIT))
