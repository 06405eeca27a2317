"""Merge the splits of decode attention into one result, by their log-sum-exp."""

import functools
import math

import numpy as np

from .compile import compile_kernel
from .simd import LANES, add, argument, load, load_float, splat, store, store_float, times


@functools.cache
def make_merge_kernel():
    """Merge parts [splits, heads, dim] and lse [splits, heads] into out and lse; item = head."""

    def merge_kernel(args, item):
        num_splits, num_heads, dim = argument(args, 2), argument(args, 3), argument(args, 4)
        parts, lse = argument(args, 0) + 4 * dim * item, argument(args, 1) + 4 * item
        out = argument(args, 5) + 4 * dim * item
        top = np.float32(-np.inf)
        for split in range(num_splits):
            top = max(top, load_float(lse + 4 * num_heads * split))
        shift = top if top != -np.inf else np.float32(0)  # all empty: exp(-inf - 0) is 0
        total = np.float32(0)
        for split in range(num_splits):
            total += math.exp(load_float(lse + 4 * num_heads * split) - shift)
        for chunk in range(0, dim, LANES):
            store(out + 4 * chunk, splat(np.float32(0)))
        for split in range(num_splits):
            share = math.exp(load_float(lse + 4 * num_heads * split) - shift)
            weight = splat(share / total if total != 0 else np.float32(0))
            for chunk in range(0, dim, LANES):
                part = times(load(parts + 4 * (num_heads * dim * split + chunk)), weight)
                store(out + 4 * chunk, add(load(out + 4 * chunk), part))
        store_float(argument(args, 6) + 4 * item, shift + math.log(total))

    return compile_kernel(merge_kernel)
