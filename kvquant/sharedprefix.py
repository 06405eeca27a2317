"""Which sequences of a batch begin with the same pages, and whether reading these once pays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HEADS = 8  # query heads that a block of the CUDA kernel attends for
# rows of a KV head that a block need not attend to, so that the queries' copy, another launch and
# the merge pay: 30 microseconds of an H200's time against 15
WORTH = 1 << 20

Numbers = NDArray[np.integer]


class SharedPrefix(NamedTuple):
    """The first pages of some sequences, in common.

    Attributes:
        pages: the pages.
        members: [num_members], the sequences' places in the batch.
    """

    pages: Numbers
    members: Numbers


def find_prefix(tables: Numbers, packed_lens: Numbers, page_size: int) -> SharedPrefix | None:
    """Find the full pages that the most sequences begin with.

    Args:
        tables: [batch, max_pages], the pages of each sequence.
        packed_lens: [batch], tokens in them.
        page_size: tokens of a page.

    Returns:
        None if no two sequences share a page.
    """
    full = packed_lens // page_size
    begun = np.flatnonzero(full)
    if len(begun) < 2:
        return None
    first, counts = np.unique(tables[begun, 0], return_counts=True)
    members = begun[tables[begun, 0] == first[counts.argmax()]]
    if len(members) < 2:
        return None
    most = int(full[members].min())
    same = (tables[members, :most] == tables[members[0], :most]).all(0)
    count = most if same.all() else int(same.argmin())
    return SharedPrefix(tables[members[0], :count], members)


def pays(num_members: int, tokens: int, num_kv_heads: int, ratio: int) -> bool:
    """Whether reading a prefix once saves more than it costs.

    Its pages lie in the L2 cache for all but the first sequence, so that what is saved is work: a
    block has room for 8 query heads and, with fewer on a KV head, one that serves several sequences
    has more of them. With 8 on a KV head nothing is saved.

    Args:
        num_members: sequences that share it.
        tokens: of the prefix.
        num_kv_heads: KV heads.
        ratio: query heads on a KV head.
    """
    each = num_members * -(-ratio // HEADS)
    once = -(-num_members * ratio // HEADS)
    return (each - once) * tokens * num_kv_heads >= WORTH
