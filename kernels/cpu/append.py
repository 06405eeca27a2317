"""Write the rows of new tokens on the CPU: append_rows, token by token.

A work item is about 256 tokens of K or of V. Of each token and head

    packed row  <- the 16-bit row that leaves, or the new row, rounded to 16 bit if there are such
    16-bit row  <- the new row

The kernel that quantizes a row (rows.py) is an argument, so this kernel serves all formats.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types

from kvquant.rows.arguments import address
from kvquant.rows.basis import Encoding
from kvquant.rows.call import AppendCall, AppendSide
from kvquant.rows.format import ROW_DIMS, RowFormat

from .compile import compile_kernel, compiled
from .parallel import ALONE, run_items, team
from .rows import INPUTS, make_quantize_kernel
from .simd import (
    I16,
    I64,
    argument,
    call_kernel,
    load_int32,
    operation,
    stack_floats,
    store_int,
    store_int32,
)
from .slots import BATCH, OVERFLOW, make_place_kernel
from .values import spec

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
# where these begin, and behind them the arguments of the kernel that places tokens
SIDE_K, SIDE_V, PLACE, SIDE_BYTES = 8, 8 + 16, 8 + 2 * 16, 16 * 8
ROW_FLOATS = max(ROW_DIMS) // 2  # of a 16-bit row
NANS = {"bf16": 0x7F81, "fp16": 0x7C01}
Placing = tuple[dict[int, torch.Tensor], list[int]]  # of slots.bind_place


class Append:
    """The write of a call, bound to its rows and slots; see bind_append."""

    def __init__(self, call: AppendCall, place: Placing | None = None) -> None:
        num_tokens, num_heads, _ = call.k.x.shape
        tokens = -(-ROWS_PER_ITEM // max(num_heads, 1))
        items = -(-num_tokens // tokens) if num_heads else 0
        self._found = np.zeros((2, items), np.int64)
        placed, placing = place or ({}, [])
        places = [num_tokens, num_heads, tokens, items, 0, 0, 0, self._found.ctypes.data]
        sides = [_arguments(side, call.exact_format) for side in call[:2]]
        self._arguments = np.array([*places, *sides[0], *sides[1], *placing], np.int64)
        stay = dict(enumerate(call.slots, PACKED)) | {PLACE + at: x for at, x in placed.items()}
        for at, side in zip((SIDE_K, SIDE_V), call[:2], strict=True):
            stay |= {at + ROWS: side.rows, at + EXACT_ROWS: side.exact_rows}
        self._stay = {at: one for at, one in stay.items() if one is not None}
        self._tensors, self._addresses = [*self._stay.values()], list[int]()
        self._kernels = make_append_kernel(), make_place_kernel() if placing else 0
        self._is_small = items < 2

    def at(self, addresses: Sequence[int], overflow: int = 0, *, checks: bool = False) -> bool:
        """Find the slots, if a launch that does is bound as well, and write rows.

        Args:
            addresses: of bad, which may be 0, and of K and V.
            overflow: as bind_place takes it.
            checks: do nothing and return False where a row cannot be held, or where several
                threads write: rows are tried by one.
        """
        if checks and not self._is_small:
            return False
        found = [*map(torch.Tensor.data_ptr, self._tensors)]
        if found != self._addresses:  # torch moves a tensor that another process gets
            for place, tensor in self._stay.items():
                self._arguments[place] = address(tensor)
            self._addresses = found
        _, start, work = (1, ALONE, 0) if self._is_small else team()
        given = *self._kernels, *addresses, overflow, checks, start, work
        return bool(_append(self._arguments, self._found, *given))


def append(call: AppendCall) -> None:
    """Write tokens to their slots, which all exist and are all different; see append_rows.

    Neither K nor V is transformed. bad counts no row that left as NaN.
    """
    k, v = call.k.x.resolve_neg(), call.v.x.resolve_neg()
    bad = 0 if call.bad is None else call.bad.data_ptr()
    Append(call._replace(k=call.k._replace(x=k), v=call.v._replace(x=v))).at(
        (bad, address(k), address(v))
    )


def bind_append(call: AppendCall, place: Placing | None = None) -> Append | None:
    """An append bound to all but new rows, and with `place` to what finds their slots.

    None if k or v is copied first, or transformed.
    """
    plain = Encoding()
    if call.rope is not None or any(x.is_neg() or e != plain for x, *_, e in call[:2]):
        return None
    return Append(call, place)


@compiled
def _append(arguments, found, kernel, place, bad, k, v, overflow, checks, start, work):
    """Write rows; see Append.at."""
    arguments[SIDE_K + X], arguments[SIDE_V + X] = k, v
    address = np.int64(arguments.ctypes.data)
    if checks and not _can_be_held(address):
        return False
    if place != 0:
        arguments[PLACE + OVERFLOW] = overflow
        for b in range(arguments[PLACE + BATCH]):
            call_kernel(place, address + 8 * PLACE, np.int64(b))
    run_items(kernel, address, np.int64(found.size), start, work)
    if bad != 0:  # the rows that were written as NaN
        for side in range(2):
            store_int32(bad + 4 * side, load_int32(bad + 4 * side) + found[side].sum())
    return True


@numba.njit(nogil=True)
def _can_be_held(args):
    """Whether every row can be held in 16 bit, where there are such rows, and packed."""
    rounded, packed = stack_floats(ROW_FLOATS), stack_floats(ROW_FLOATS)  # as long at most
    for i in range(2 * argument(args, NUM_TOKENS) * argument(args, NUM_HEADS)):
        side, row = args + 8 * SIDE_K + SIDE_BYTES * (i % 2), i // 2
        token, head = row // argument(args, NUM_HEADS), row % argument(args, NUM_HEADS)
        x = argument(side, X) + token * argument(side, X_STRIDE)
        x += head * argument(side, X_STRIDE_HEAD)
        if argument(side, ROUND) != 0:
            if quantize_row(argument(side, ROUND), x, rounded) != 0:
                return False
            x = rounded
        if quantize_row(argument(side, PACK), x, packed) != 0:
            return False
    return True


def _arguments(side: AppendSide, exact_format: str) -> list[int]:
    x, rows, fmt, exact_rows, _ = side
    stride, stride_head, _ = x.stride()
    page, head, row, _ = rows.stride()
    place = [0, stride * x.itemsize, stride_head * x.itemsize]
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
    def append_kernel(args, item):
        rounded = stack_floats(ROW_FLOATS)
        items, tokens = argument(args, ITEMS_PER_SIDE), argument(args, TOKENS_PER_ITEM)
        exact_slots, first = argument(args, EXACT), item % items * tokens
        side = args + 8 * SIDE_K + SIDE_BYTES * (item // items)
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
