"""The bookkeeping of a paged cache, looked through: what contradicts something else raises.

Each function takes time proportional to what it looks through, and raises AssertionError with the
words for what is wrong.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvquant import PagedKVCache
from kvquant.errors import shown
from kvquant.paged.pool import PagePool
from kvquant.paged.prefix_tree import PrefixRoot, PrefixTree
from kvquant.paged.state import PagedState
from kvquant.paged.swap import Swapped
from kvquant.paged.window_pages import WindowPages, seen_by


def sure(condition: object, what: str) -> None:
    """Raise AssertionError, with the words for what is wrong, unless the condition holds."""
    if not condition:
        raise AssertionError(what)


def check_tree(tree: PrefixTree) -> None:
    """Nodes, pages and roots of a prefix tree agree."""
    nodes = [node for root in tree.roots.values() for node in root.tree()]
    held = sorted((page, id(node)) for node in nodes for page in node.pages)
    listed = [(page, id(node)) for page, node in enumerate(tree.node_of_page) if node is not None]
    sure(held == listed, "pages and nodes do not agree")
    for node in nodes:
        fits = all(c.parent is node and c.tokens == t for t, c in node.children.items())
        sure(fits and bool(node.pages) != isinstance(node, PrefixRoot), "a node has no page")
    follow = [(before, page) for page, before in enumerate(tree.before) if before is not None]
    after = [(before, page) for before, pages in tree._after.items() for page in pages]
    sure(sorted(follow) == sorted(after), "pages do not know what follows them")
    for page, found in enumerate(tree.node_of_page):
        before = tree.before[page]
        parent = None if found is None or isinstance(found.parent, PrefixRoot) else found.parent
        leads = None if before is None else tree.node_of_page[before]
        sure(leads is parent, f"page {page} does not follow the page before it")
    named = all((root.namespace, root.tokens) == key for key, root in tree.roots.items())
    sure(named, "a root stands under another key")
    places = [*tree._free_places, *(root.place for root in tree.roots.values())]
    sure(sorted(places) == list(range(len(places))), "two roots have one place")


def check_window(layers: WindowPages, seen: Counter[int], in_tree: set[int]) -> None:
    """Frames of layers with a window are those of pages that sequences see, or that are kept."""
    name = f"the window of {layers.window} tokens"
    for page, count in enumerate(layers._seen):
        sure(count == seen[page], f"{name}: {shown(page)} is not seen so often")
    shared = sum(count > 1 for count in layers._seen)
    sure(layers._num_shared == shared, f"{name}: pages that several see")
    held = {page for page, count in enumerate(layers._seen) if count}
    has_frame = set(np.flatnonzero(layers.frames >= 0).tolist())
    sure(held | layers._kept.keys() == has_frame, f"{name}: pages with frames")
    sure(not held & layers._kept.keys(), f"{name}: a page is seen, and could be taken")
    sure(layers._kept.keys() <= in_tree, f"{name}: a page is kept that nobody finds")
    frames = sorted([*layers._free, *(int(layers.frames[page]) for page in has_frame)])
    sure(frames == list(range(layers.num_frames)), f"{name}: a frame is lost, or has two")


def _in_sight(pool: PagePool) -> list[Counter[int]]:
    """By how many sequences each page is seen, in each window."""
    return [
        seen_by(sequence.pages[sequence.dropped[at] :] for sequence in pool._sequences.values())
        for at in range(len(pool.windows))
    ]


def check_pool(pool: PagePool) -> None:
    """Every page is in one state, and its uses are the sequences that have it."""
    uses = seen_by(sequence.pages for sequence in pool._sequences.values())
    places = sorted([*pool._free, *pool._cached, *uses])
    sure(places == list(range(pool.num_pages)), "a page is in no state or in two")
    sure(pool._references == [uses[page] for page in places], "references are not the uses")
    check_tree(pool._tree)
    in_tree = {p for p, node in enumerate(pool._tree.node_of_page) if node is not None}
    for page in in_tree:
        # a window takes frames away: then a cached page may be of no more use than its twin
        is_twin = not pool.windows and pool._is_spare(page)
        cached = page in pool._cached and not is_twin
        sure(uses[page] or cached, f"page {page} is in the tree, but free or a cached twin")
    sure(pool._cached.keys() <= in_tree, "a page is cached outside the tree")
    for window, seen in zip(pool.windows, _in_sight(pool), strict=True):
        check_window(window, seen + Counter(pool._sources), in_tree)
    sure(pool.num_left()[0] >= 0, "more pages are reserved than can be taken")
    roots = Counter(id(s.root) for s in pool._sequences.values() if s.root is not None)
    held = {id(root): root.uses for root in pool._tree.roots.values() if root.uses}
    sure(roots == held, "the uses of a root are not its sequences")
    for sequence_id, sequence in pool._sequences.items():
        pages, size = sequence.pages, pool.page_size
        sure(len(pages) == -(-sequence.length // size), f"{shown(sequence_id)}: length or pages")
        sure(len(set(pages)) == len(pages), f"{shown(sequence_id)} has a page twice")
        for window, first in zip(pool.windows, sequence.dropped, strict=True):
            fits = first <= window.first_seen(sequence.length)
            sure(fits, f"{shown(sequence_id)}: dropped pages")
        sure(
            sequence.in_tree * size <= sequence.length,
            f"{shown(sequence_id)}: too many pages in the tree",
        )
        root = sequence.root
        fits = root is None or root.namespace == sequence.namespace
        sure(fits, f"{shown(sequence_id)}: namespace")
        follow = pool._tree.follow(root, pages[: sequence.in_tree])
        sure(follow, f"{shown(sequence_id)}: pages not in order")


def check_state(state: PagedState) -> None:
    """Lengths, tables and slots of the sequences are what their pages say."""
    check_pool(state.pool)
    sure(set(state.pool._sequences) == set(state._seq_slots), "the pool has other sequences")
    seq_slots = sorted([*state._free_seq_slots, *state._seq_slots.values()])
    sure(
        seq_slots == list(range(len(state.lengths))),
        "a sequence slot is free and taken, or neither",
    )
    for sequence_id, seq_slot in state._seq_slots.items():
        if sequence_id in state.failed:
            continue
        length, packed = int(state.lengths[seq_slot]), int(state.packed_lens[seq_slot])
        most = max(length - state.split.sink_len, 0)
        fits = max(most - state.split.recent_len, 0) <= packed <= most
        sure(fits and length <= state.max_seq_len, f"{shown(sequence_id)}: packed tokens")
        sure(
            packed == state.pool._sequences[sequence_id].length,
            f"{shown(sequence_id)}: tokens in pages",
        )
        table = state.pool.block_table(sequence_id)
        sure((state.tables[seq_slot, : len(table)] == table).all(), f"{shown(sequence_id)}: table")
        sure(len(state._tokens[seq_slot]) <= length, f"{shown(sequence_id)}: known tokens")
        kept = packed - int(state.exact_firsts[seq_slot])
        fits = not state.rollback_len or 0 <= kept <= state.rollback_len
        sure(fits, f"{shown(sequence_id)}: 16-bit rows kept")


def check_invariants(cache: PagedKVCache) -> None:
    """All bookkeeping of a paged cache."""
    check_state(cache.state)
    swapping_out = [i for i in cache.state.ids if isinstance(i, Swapped)]
    sure(
        swapping_out == cache.swap_space.swapping_out,
        "sequences being swapped out are not those that hold pages",
    )
