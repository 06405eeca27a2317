"""Offset and rotation of rows on the CPU, with the bits of kvquant/rows/basis.py.

work item = 64 rows; per row

    1  x - offset, and the butterflies inside each 16 elements
    2  the butterflies of stride 16, 32, ... up to half a block
    3  times 1 / sqrt(block)
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from llvmlite import ir

from kvquant.rows.arguments import address

from .compile import compile_kernel
from .parallel import run
from .rows import INPUTS, load_elements
from .simd import (
    I32,
    LANES,
    add,
    argument,
    f32x16,
    load,
    operation,
    splat,
    stack_floats,
    store,
    times,
)

ROWS_PER_ITEM = 64
# the arguments of the kernel: addresses, sizes, strides of x in bytes
X, STRIDE_BATCH, STRIDE_HEAD, STRIDE, OFFSET, OUT, NUM_ROWS, HEADS, TOKENS = range(9)


def transform(x: torch.Tensor, offset: torch.Tensor | None, rotates: bool) -> torch.Tensor:
    """Subtract an offset from rows x, if any, and rotate them if asked; float32, contiguous.

    x: [batch, num_kv_heads, tokens, head_dim], float32, bfloat16 or float16, of any strides;
    head_dim a multiple of 16. offset: [num_kv_heads, head_dim], float32.
    """
    x = x.detach().resolve_neg()
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, tokens, head_dim = x.shape
    out = torch.empty(x.shape, dtype=torch.float32, device="cpu")
    strides = [stride * x.itemsize for stride in x.stride()[:3]]
    offset = None if offset is None else offset.detach().resolve_neg().contiguous()
    place = 0 if offset is None else address(offset)
    sizes = batch * heads * tokens, heads, tokens
    arguments = np.array([address(x), *strides, place, address(out), *sizes], np.int64)
    items = -(-sizes[0] // ROWS_PER_ITEM)
    kernel = make_transform_kernel(head_dim, INPUTS[x.dtype], offset is not None, rotates)
    run(kernel, arguments, items, parallel=items > 4)
    return out


@operation(f32x16, f32x16, f32x16)
def minus(emit, a, b):
    return emit.builder.fsub(a, b)


@operation(f32x16, f32x16)
def rotate_lanes(emit, x):
    """The butterflies of stride 1, 2, 4 and 8."""
    b = emit.builder
    for stride in (1, 2, 4, 8):
        lower = b.shuffle_vector(x, x, _lanes(lane & ~stride for lane in range(LANES)))
        upper = b.shuffle_vector(x, x, _lanes(lane | stride for lane in range(LANES)))
        chosen = _lanes(lane + (LANES if lane & stride else 0) for lane in range(LANES))
        x = b.shuffle_vector(b.fadd(lower, upper), b.fsub(lower, upper), chosen)
    return x


def _lanes(lanes):
    return ir.Constant(ir.VectorType(I32, LANES), [ir.Constant(I32, lane) for lane in lanes])


@functools.cache
def make_transform_kernel(head_dim, dtype, has_offset, rotates):
    block = head_dim & -head_dim
    doublings = (block // LANES).bit_length() - 1
    factor = np.float32(1 / math.sqrt(block))
    element_bytes = 4 if dtype == "float32" else 2

    def transform_kernel(args, item):
        values = stack_floats(head_dim)
        heads, tokens = argument(args, HEADS), argument(args, TOKENS)
        first = item * ROWS_PER_ITEM
        for index in range(first, min(first + ROWS_PER_ITEM, argument(args, NUM_ROWS))):
            head, sequence = index // tokens % heads, index // (tokens * heads)
            x = argument(args, X) + index % tokens * argument(args, STRIDE)
            x += head * argument(args, STRIDE_HEAD) + sequence * argument(args, STRIDE_BATCH)
            offset = argument(args, OFFSET) + 4 * head_dim * head
            out = argument(args, OUT) + 4 * head_dim * index
            # Step 1: 16 elements at a time
            for element in range(0, head_dim, LANES):
                chunk = load_elements(dtype, x + element_bytes * element)
                if has_offset:
                    chunk = minus(chunk, load(offset + 4 * element))
                if rotates:
                    store(values + 4 * element, rotate_lanes(chunk))
                else:
                    store(out + 4 * element, chunk)
            if not rotates:
                continue
            # Step 2: pairs of 16 elements
            for doubling in range(doublings):
                stride = LANES << doubling
                for start in range(0, head_dim, 2 * stride):
                    for element in range(start, start + stride, LANES):
                        low = values + 4 * element
                        high = low + 4 * stride
                        lower, upper = load(low), load(high)
                        store(low, add(lower, upper))
                        store(high, minus(lower, upper))
            # Step 3: orthonormal
            for element in range(0, head_dim, LANES):
                store(out + 4 * element, times(load(values + 4 * element), splat(factor)))

    return compile_kernel(transform_kernel)
