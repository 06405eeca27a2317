"""Which sequences of a batch begin with the same pages, and whether reading these once pays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# what a token of a KV head takes of an H200, in picoseconds: the decode kernel for 8 query heads of
# a sequence, and the prefix kernel for a query, of which it takes 64 at least
# (kernels/cuda/prefix/launch.py)
HEADS, DECODE = 8, 31.0
QUERIES, PREFIX = 64, 2.1
FIXED = 15e6  # and what two more launches take
# a latent row by the kernels of MLA: for 16 columns of a sequence (heads times queries), and for 64
# where there are many, of INT4 and INT8 rows; and what one more launch, and more parts, take. To be
# measured (tests/benchmarks/bench_cascade.py --mla): they are from the table in kernels/FACTS.md
FEW, FEW_COLUMNS, MANY, MANY_COLUMNS, FIXED_LATENT = 200.0, 16, 300.0, 64, 15e6

Numbers = NDArray[np.integer]


class SharedPrefix(NamedTuple):
    """The first pages that some sequences share; members [num_members] are places in the batch."""

    pages: Numbers
    members: Numbers


def find_prefix(tables: Numbers, packed_lens: Numbers, page_size: int) -> SharedPrefix | None:
    """Find the full pages that sequences begin with in common, and that save the most reads.

    tables [batch, max_pages] are the pages of each sequence, packed_lens [batch] the tokens in
    them. The result is None if no two sequences share a page.
    """
    full = packed_lens // page_size
    found, saved, at, members = None, 0, 0, np.flatnonzero(full)
    while len(members) > 1:
        # go on with the page that the most have at this place, up to where they part
        pages, counts = np.unique(tables[members, at], return_counts=True)
        members = members[tables[members, at] == pages[counts.argmax()]]
        end = int(full[members].min())
        same = (tables[members, at:end] == tables[members[0], at:end]).all(0)
        at = end if same.all() else at + int(same.argmin())
        if (len(members) - 1) * at > saved:
            found = SharedPrefix(tables[members[0], :at], members)
            saved = (len(members) - 1) * at
        members = members[full[members] > at]
    return found


def pays(num_members: int, tokens: int, num_kv_heads: int, ratio: int) -> bool:
    """Whether one read of a prefix of `tokens` saves more time than it costs.

    The L2 cache holds its pages for all but the first of num_members, so one read saves the work of
    unpacking. Figures are those of an H200, guesses elsewhere. ratio is query heads on a KV head.
    """
    each = num_members * -(-ratio // HEADS) * DECODE
    once = max(num_members * ratio, QUERIES) * PREFIX
    return (each - once) * tokens * num_kv_heads > FIXED


def pays_of_latents(batch: int, num_members: int, tokens: int, columns: int) -> bool:
    """The same for latent rows, where all queries of the step are multiplied with the prefix.

    Products take the time of sequences with many columns (query heads of all queries), so one read
    saves nothing there.
    """
    few, many = FEW * -(-columns // FEW_COLUMNS), MANY * -(-columns // MANY_COLUMNS)
    once = MANY * -(-batch * columns // MANY_COLUMNS)
    return (num_members * min(few, many) - once) * tokens > FIXED_LATENT
