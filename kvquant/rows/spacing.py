"""How many rows to allocate for a sequence, so that many sequences are read at full speed.

The rows of KV heads lie one after another. Reads slow down where heads begin within an L2 line (4
to 28 % on an H200), or a multiple of many KiB apart, in the same memory channel (22 % on an H100).
tests/benchmarks/bench_spacing.py measures both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

LINE = 128  # bytes of the L2 cache that are brought at a time
APART = 1 << 13  # bytes; where distances are a multiple of it, few memories may have all begins


def spaced_len(length: int, row_bytes: Iterable[int]) -> int:
    """The rows to allocate for a sequence: those it needs, and a few dozen more at most.

    Args:
        row_bytes: of each kind of row that has this length. Whole lines (most 16-bit rows) need
            no more.

    Example:
        >>> from kvquant.rows.spacing import spaced_len
        >>> spaced_len(8188, [80, 80]), spaced_len(8192, [80, 80]), spaced_len(8192, [256, 256])
        (8200, 8200, 8192)
    """
    parts = [each for each in row_bytes if each % LINE]
    step = math.lcm(*(LINE // math.gcd(LINE, each) for each in parts))
    spaced = -(-length // step) * step
    while spaced and any(spaced * each % APART == 0 for each in parts):
        spaced += step
    return spaced
