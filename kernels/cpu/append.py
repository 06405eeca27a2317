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
from .parallel import ALONE, Launch, run_items, team
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
SIDES, SIDE_BYTES = 8, 16 * 8
SIDE_K, SIDE_V = SIDES, SIDES + 16
PLACE = SIDES + 2 * 16  # and behind them those of the kernel that places tokens
NANS = {"bf16": 0x7F81, "fp16": 0x7C01}


class Append(Launch):
    """The write of a call, bound to its rows and slots; see bind_append."""

    def __init__(
        self, call: AppendCall, place: Launch | None = None, limits: Sequence[float] = (0, 0)
    ) -> None:
        x, sides = call.k.x, [_arguments(side, call.exact_format) for side in call[:2]]
        num_tokens, num_heads, _ = x.shape
        tokens = -(-ROWS_PER_ITEM // max(num_heads, 1))
        items = -(-num_tokens // tokens) if num_heads else 0
        self._found = np.zeros((2, items), np.int64)
        places = [0, 0, 0, self._found.ctypes.data]
        placing = [] if place is None else place.arguments
        numbers = [num_tokens, num_heads, tokens, items, *places, *sides[0], *sides[1], *placing]
        stay = dict(enumerate(call.slots, PACKED))
        for at, side in zip((SIDE_K, SIDE_V), call[:2], strict=True):
            stay |= {at + ROWS: side.rows, at + EXACT_ROWS: side.exact_rows}
        if place is not None:
            stay |= {PLACE + at: tensor for at, tensor in place.stay.items()}
        tensors = {at: one for at, one in stay.items() if one is not None}
        super().__init__(
            make_append_kernel(), np.array(numbers), 2 * items, (), tensors, is_small=items < 2
        )
        # the greatest magnitudes, as bits; before x is rounded to 16 bit
        most, bits = torch.finfo(x.dtype).max, f"int{8 * x.itemsize}"
        margins = torch.tensor([min(limit * (1 - 2**-7), most) for limit in limits], dtype=x.dtype)
        greatest = margins.view(getattr(torch, bits)).tolist()
        words = [side.x.shape[2] * x.itemsize // 4 for side in call[:2]]
        placed = 0 if place is None else make_place_kernel()
        facts = self._kernel, placed, x.itemsize, *greatest, *words
        self._facts = np.array(facts, np.int64)

    def at(self, addresses: Sequence[int], overflow: int = 0, *, checks: bool = False) -> bool:
        """Find the slots, if a launch that does is bound as well, and write rows.

        Args:
            addresses: of bad, which may be 0, and of K and V.
            overflow: as bind_place takes it.
            checks: do nothing and return False where a value may be beyond a limit.
        """
        self.look()
        crew = team() if self._is_parallel else (1, ALONE, 0)
        written: bool = _append(
            self.arguments, self._facts, self._found, *addresses, overflow, checks, *crew[1:]
        )
        return written


def append(call: AppendCall) -> None:
    """Write tokens to their slots, which all exist and are all different; see append_rows.

    Neither K nor V is transformed. bad counts no row that left as NaN.
    """
    k, v = call.k.x.resolve_neg(), call.v.x.resolve_neg()
    bad = 0 if call.bad is None else call.bad.data_ptr()
    Append(call._replace(k=call.k._replace(x=k), v=call.v._replace(x=v))).at(
        (bad, address(k), address(v))
    )


def bind_append(call: AppendCall, place: Launch | None, limits: Sequence[float]) -> Append | None:
    """An append bound to all but new rows, and to the launch that finds their slots, if any.

    limits: magnitudes that K and V may have, for `at`. None if k or v is copied first, or
    transformed.
    """
    plain = Encoding()
    if call.rope is not None or any(x.is_neg() or e != plain for x, *_, e in call[:2]):
        return None
    return Append(call, place, limits)


@compiled()
def _append(arguments, facts, found, bad, k, v, overflow, checks, start, work):
    """Write rows; see Append.at."""
    place, address = facts[1], np.int64(arguments.ctypes.data)
    arguments[SIDE_K + X], arguments[SIDE_V + X] = k, v
    if checks:
        for side in range(2):
            at = address + 8 * SIDE_K + SIDE_BYTES * side
            num_tokens, num_heads = arguments[NUM_TOKENS], arguments[NUM_HEADS]
            if not _are_within(at, num_tokens, num_heads, facts[2], facts[3 + side], facts[5 + side]):
                return False
    if place != 0:
        arguments[PLACE + OVERFLOW] = overflow
        for b in range(arguments[PLACE + BATCH]):
            call_kernel(place, address + 8 * PLACE, np.int64(b))
    run_items(facts[0], address, np.int64(found.size), start, work)
    if bad != 0:  # the rows that were written as NaN
        for side in range(2):
            store_int32(bad + 4 * side, load_int32(bad + 4 * side) + found[side].sum())
    return True


@numba.njit(nogil=True)
def _are_within(side, num_tokens, num_heads, itemsize, greatest, words):
    """Whether no magnitude in rows of so many 32-bit words is over the greatest, as bits."""
    for token in range(num_tokens):
        for head in range(num_heads):
            row = argument(side, X) + token * argument(side, X_STRIDE)
            row += head * argument(side, X_STRIDE_HEAD)
            for i in range(words):
                word = load_int32(row + 4 * i)
                if itemsize == 4 and word & 0x7FFFFFFF > greatest:
                    return False
                if itemsize == 2 and max(word & 0x7FFF, word >> 16 & 0x7FFF) > greatest:
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
