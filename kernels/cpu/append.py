"""Write the rows of new tokens on the CPU: append_rows, token by token.

A work item is about 256 tokens of K or of V. Of each token and head

    packed row  <- the 16-bit row that leaves, or the new row, rounded to 16 bit if there are such
    16-bit row  <- the new row

The kernel that quantizes a row (rows.py) is an argument, so this kernel serves all formats.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from llvmlite import ir
from numba import types

from kvquant.rows.arguments import address
from kvquant.rows.format import ROW_DIMS, RowFormat

from .compile import compile_kernel
from .parallel import run
from .rows import INPUTS, make_quantize_kernel
from .simd import I16, I64, argument, load_int32, operation, stack_floats
from .values import spec, store_int

ROWS_PER_ITEM = 256
EXACT_INPUTS = {"bf16": "bfloat16", "fp16": "float16"}

# the arguments of the kernel: int64
(
    NUM_TOKENS,
    NUM_HEADS,
    TOKENS_PER_ITEM,
    ITEMS_PER_SIDE,
    PACKED,  # slots [num_tokens] int64
    EXACT,  # or 0
    LEAVING,
    BAD,  # [items] int64: rows that were written as NaN
) = range(8)
# those of K, and behind them those of V; strides in bytes
(
    X,  # [num_tokens, num_kv_heads, head_dim]
    X_STRIDE,
    X_STRIDE_HEAD,
    ROWS,  # [num_pages, num_kv_heads, page_size, row_bytes]
    ROWS_STRIDE_PAGE,
    ROWS_STRIDE_HEAD,
    ROWS_STRIDE,
    PAGE_SIZE,
    EXACT_ROWS,
    EXACT_STRIDE_PAGE,
    EXACT_STRIDE_HEAD,
    EXACT_STRIDE,
    EXACT_LEN,
    PACK,  # the quantizer to packed rows, of x or, if there is one to 16-bit rows, of these
    ROUND,  # the quantizer of x to 16-bit rows, or 0
    NAN,  # the least magnitude, as bits, of a NaN among the 16-bit rows
) = range(16)
SIDES, SIDE_BYTES = 8, 16 * 8
NANS = {"bf16": 0x7F81, "fp16": 0x7C01}

# K or V of a call: x, packed rows, their format, 16-bit rows
Side: TypeAlias = tuple[torch.Tensor, torch.Tensor, RowFormat, torch.Tensor | None]


def append(
    k: Side, v: Side, slots: Sequence[torch.Tensor | None], exact_format: str
) -> tuple[int, int]:
    """Write tokens to their slots, which all exist and are all different.

    k and v are as in append.append_rows; packed, exact and evicted as in slots.Slots. Returns how
    many rows of K and of V were written as NaN, without those that left as NaN.
    """
    num_tokens, num_heads, _ = k[0].shape
    if not num_tokens * num_heads:
        return 0, 0
    tokens = -(-ROWS_PER_ITEM // num_heads)
    items = -(-num_tokens // tokens)
    bad = np.zeros(2 * items, np.int64)
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in slots]
    arguments = np.array(
        [
            *(num_tokens, num_heads, tokens, items, *pointers, bad.ctypes.data),
            *_arguments(k, exact_format),
            *_arguments(v, exact_format),
        ],
        np.int64,
    )
    run(make_append_kernel(), arguments, 2 * items, parallel=items > 1)
    return int(bad[:items].sum()), int(bad[items:].sum())


def _arguments(side: Side, exact_format: str) -> list[int]:
    x, rows, fmt, exact_rows = side
    stride, stride_head, _ = x.stride()
    page, head, row, _ = rows.stride()
    place = [address(x), stride * x.itemsize, stride_head * x.itemsize]
    place += [rows.data_ptr(), page, head, row, max(rows.shape[2], 1)]
    if exact_rows is None:
        return [*place, 0, 0, 0, 0, 1, _quantizer(fmt, INPUTS[x.dtype]), 0, 0]
    exact = RowFormat.parse(exact_format, fmt.head_dim)
    page, head, row, _ = exact_rows.stride()
    place += [exact_rows.data_ptr(), page, head, row, max(exact_rows.shape[2], 1)]
    place += [_quantizer(fmt, EXACT_INPUTS[exact_format]), _quantizer(exact, INPUTS[x.dtype])]
    return [*place, NANS[exact_format]]


@functools.cache
def _quantizer(fmt: RowFormat, dtype: str) -> int:
    address: int = make_quantize_kernel(spec(fmt), dtype)
    return address


@operation(types.int64, types.int64, types.int64, types.int64)
def quantize_row(emit, quantizer, x, row):
    """Quantize one row from an address to an address; 1 if it could not be held, else 0."""
    b = emit.builder
    with b.goto_entry_block():
        arguments, bad = b.alloca(ir.ArrayType(I64, 4)), b.alloca(I16)
    b.store(ir.Constant(I16, 0), bad)
    arguments, bad = b.ptrtoint(arguments, I64), b.ptrtoint(bad, I64)
    for i, value in enumerate((x, row, ir.Constant(I64, 1), bad)):  # as rows.py numbers them
        emit.store(emit.at(arguments, 8 * i), value)
    kind = ir.FunctionType(ir.VoidType(), [I64, I64])
    kernel = b.inttoptr(quantizer, kind.as_pointer())
    b.call(kernel, [arguments, ir.Constant(I64, 0)])
    return b.zext(emit.load_scalar(bad, I16), I64)


@functools.cache
def make_append_kernel():
    row_floats = max(ROW_DIMS) // 2

    def append_kernel(args, item):
        rounded = stack_floats(row_floats)
        items, tokens = argument(args, ITEMS_PER_SIDE), argument(args, TOKENS_PER_ITEM)
        exact_slots, first = argument(args, EXACT), item % items * tokens
        side = args + 8 * SIDES + SIDE_BYTES * (item // items)
        pack, to_exact = argument(side, PACK), argument(side, ROUND)
        page_size, exact_len = argument(side, PAGE_SIZE), argument(side, EXACT_LEN)
        bad = 0
        for token in range(first, min(first + tokens, argument(args, NUM_TOKENS))):
            # Step 1: where its rows are
            target, exact, row, kept = argument(argument(args, PACKED), token), -1, 0, 0
            leaving = -1
            if exact_slots != 0:
                exact = argument(exact_slots, token)
            if exact >= 0:
                leaving = argument(argument(args, LEAVING), token)
                if leaving >= 0:
                    target = leaving
                kept = argument(side, EXACT_ROWS)
                kept += exact // exact_len * argument(side, EXACT_STRIDE_PAGE)
                kept += exact % exact_len * argument(side, EXACT_STRIDE)
            if target >= 0:
                row = argument(side, ROWS)
                row += target // page_size * argument(side, ROWS_STRIDE_PAGE)
                row += target % page_size * argument(side, ROWS_STRIDE)
            x = argument(side, X) + token * argument(side, X_STRIDE)
            for _ in range(argument(args, NUM_HEADS)):
                # Step 2: the packed row of one that leaves
                if leaving >= 0:
                    if load_int32(kept) & 0x7FFF >= argument(side, NAN):
                        bad -= 1  # it was counted when it came
                    bad += quantize_row(pack, kept, row)
                # Step 3: the 16-bit row
                source, is_bad = x, 0
                if exact >= 0:
                    source = kept
                    is_bad = quantize_row(to_exact, x, kept)
                elif target >= 0 and to_exact != 0:
                    source = rounded
                    quantize_row(to_exact, x, rounded)
                # Step 4: the packed row; what 16 bit cannot hold it cannot, and counts once
                if target >= 0 and leaving < 0:
                    is_bad = quantize_row(pack, source, row)
                bad += is_bad
                x += argument(side, X_STRIDE_HEAD)
                row += argument(side, ROWS_STRIDE_HEAD)
                kept += argument(side, EXACT_STRIDE_HEAD)
        store_int(argument(args, BAD) + 8 * item, bad)

    return compile_kernel(append_kernel)
