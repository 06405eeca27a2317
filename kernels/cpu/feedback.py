"""Codes rounded with feedback on the CPU, bit for bit as kvquant/rows/quantize.py defines them.

work item = 16 rows; per row, and per element i in its order

    1  code_i from x_i less what it owes to the elements before it
    2  its error times column i of L is added to what the later elements owe, 16 at a time
"""

import functools

import numpy as np
import torch

from kvquant.rows.arguments import address

from .compile import compile_kernel
from .parallel import run
from .simd import (
    LANES,
    add,
    argument,
    load,
    load_float,
    splat,
    stack_floats,
    store,
    store_float,
    times,
)

ROWS_PER_ITEM = 16
X, PARAMS, COLUMNS, CODES, NUM_ROWS, TOKENS, HEADS = range(7)  # the arguments of the kernel


def round_with_feedback(
    x: torch.Tensor, params: torch.Tensor, feedback: torch.Tensor, levels: float
) -> torch.Tensor:
    """The codes of rows x, [batch, num_kv_heads, tokens, head_dim] float32; the same shape,
    float32.

    params: [..., groups, 2], float32: scale and shift. feedback: L, [num_kv_heads, head_dim,
    head_dim], float32. levels: the greatest code. Codes mean nothing where params are NaN.
    """
    columns = feedback.resolve_neg().mT.contiguous()
    x, params = x.resolve_neg().contiguous(), params.contiguous()
    codes = torch.empty_like(x)
    num_rows = x.numel() // x.shape[-1]
    pointers = [address(tensor) for tensor in (x, params, columns, codes)]
    arguments = np.array([*pointers, num_rows, x.shape[2], x.shape[1]], np.int64)
    kernel = make_feedback_kernel(x.shape[-1], params.shape[-2], int(levels))
    run(kernel, arguments, -(-num_rows // ROWS_PER_ITEM))
    return codes


@functools.cache
def make_feedback_kernel(head_dim, groups, levels):
    """Compile the kernel for a row and its groups; its address."""
    group_size, most = head_dim // groups, np.float32(levels)
    zero, one = np.float32(0), np.float32(1)

    def feedback_kernel(args, item):
        owed = stack_floats(head_dim)
        first = item * ROWS_PER_ITEM
        for index in range(first, min(first + ROWS_PER_ITEM, argument(args, NUM_ROWS))):
            head = index // argument(args, TOKENS) % argument(args, HEADS)
            columns = argument(args, COLUMNS) + 4 * head_dim * head_dim * head
            x = argument(args, X) + 4 * head_dim * index
            params = argument(args, PARAMS) + 8 * groups * index
            codes = argument(args, CODES) + 4 * head_dim * index
            for element in range(0, head_dim, LANES):
                store(owed + 4 * element, splat(zero))
            for i in range(head_dim):
                scale = load_float(params + 8 * (i // group_size))
                shift = load_float(params + 8 * (i // group_size) + 4)
                inverse = zero if scale == zero else one / scale
                wanted = (load_float(x + 4 * i) - load_float(owed + 4 * i) - shift) * inverse
                code = min(max(np.rint(wanted), zero), most)
                store_float(codes + 4 * i, code)
                error = splat(code * scale + shift - load_float(x + 4 * i))
                column = columns + 4 * head_dim * i
                for element in range(i // LANES * LANES, head_dim, LANES):
                    place = owed + 4 * element
                    store(place, add(load(place), times(load(column + 4 * element), error)))

    return compile_kernel(feedback_kernel)
