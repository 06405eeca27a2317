"""How many rows a sequence has in memory, so that those of many sequences are read at full speed.

The rows of a KV head of one sequence lie behind those of another, and a kernel reads many of them
at the same time. Two things cost time, where nothing else is wrong (64 KV heads and more, 8,192
tokens):

- They begin within a line of the L2 cache: 4 % for int4-g4 and int8-g4 rows, 13 % for int4-g8 and
  28 % for int4 on an H200.
- They are a multiple of many KiB apart, and the GPU spreads addresses over its memories so that all
  begin in the same one: 22 % for int4-g4 on an H100, which has five, with rows of 5 x 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

LINE = 128  # bytes of the L2 cache that are brought at a time
APART = 1 << 13  # bytes; where distances are a multiple of it, few memories may have all begins


def spaced_len(length: int, row_bytes: Iterable[int]) -> int:
    """The rows to allocate for a sequence: those it needs, and a few dozen more at most.

    Args:
        length: rows that it needs.
        row_bytes: of each kind of its rows, such as K and V, which have as many. Rows of whole
            lines, as most 16-bit rows are, need nothing.

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
