"""PagePool: which page holds what in a paged KV cache; host bookkeeping without tensors.

              append              last reference goes: in the tree -> cached, else -> free
    free ──────────────▶ referenced ──────────────▶ cached
     ▲                    │      ▲                   │  │
     └────────────────────┘      └───────────────────┘  └──▶ taken for other tokens when no page is
         truncate, free           allocate: same prefix      free: the least recently used first

A sequence is a table of pages and a length. Sequences share pages by reference counts, and a shared
last page is copied before it is written (PagedAttention, https://arxiv.org/abs/2309.06180). A full
page of known tokens enters the prefix tree once it is written (insert). The first root_len tokens
of a sequence lie outside the pages and count in no length here; prefixes begin with them
(prefix_tree.py).

Layers with a window have rows of some pages only (window_pages.py). A prefix is found as far as all
layers have the rows that the next token sees. Pages are released from the last to the first, so
that a cached page is never older than those that follow it. Of several pages of one node, those are
cached that others follow, or a single one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from ..errors import OutOfPagesError, shown
from .prefix_tree import PrefixNode, PrefixRoot, PrefixTree
from .window_pages import WindowPages, seen_by

SequenceId: TypeAlias = Hashable


class Prefix(NamedTuple):
    """What a new sequence begins with: its tokens in pages, and the place of their root, if any."""

    length: int
    root: int | None


class Arrival(NamedTuple):
    """A sequence of another pool: its tokens, those in pages, these pages, numbered from 0 without
    gaps, its known first tokens, its namespace, and its first pages no longer seen in each window.
    """

    length: int
    packed_len: int
    pages: Sequence[int]
    tokens: Sequence[int]
    namespace: str | None
    dropped: Sequence[int]


class Growth(NamedTuple):
    """What an append asks of the device, before the new tokens are written.

    Attributes:
        entries: (place of the sequence in the call, index in its table, page): every new entry;
            without a copy the page's contents are undefined.
        copies: (source, target) pages, at most one pair for a sequence: copy the source, which
            others still read, to the target in the table. No source is a target.
    """

    entries: list[tuple[int, int, int]]
    copies: list[tuple[int, int]]


@dataclass(eq=False, slots=True)
class _Sequence:
    """Pages of length tokens: `in_tree` and (by window) `dropped` first ones; `room` reserved."""

    pages: list[int]
    length: int
    in_tree: int
    root: PrefixRoot | None
    namespace: str | None
    dropped: list[int]
    room: int = 0


class PagePool:
    """Pages of a fixed size that sequences, known by their ids, share.

    A call takes time for the pages it touches and the sequences with reserved pages.
    OutOfPagesError changes nothing. PagedState checks all arguments.

    Args:
        num_pages: pages in the pool.
        page_size: tokens a page holds.
        root_len: first tokens of a sequence, outside of the pages.
        num_roots: roots whose pages can be found at a time; with one for each sequence all are.
        windows: those of the layers that do not see all tokens.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        root_len: int = 0,
        num_roots: int = 1,
        windows: Sequence[WindowPages] = (),
    ) -> None:
        self.num_pages, self.page_size, self.root_len = num_pages, page_size, root_len
        self.windows = list(windows)
        self._references = [0] * num_pages
        self._sources: list[int] = []  # of copies of this step, which windows still see
        self._tree_sizes = num_pages, page_size, root_len, num_roots
        self._tree = PrefixTree(*self._tree_sizes)
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._sequences: dict[SequenceId, _Sequence] = {}

    @property
    def num_free(self) -> int:
        """Pages that no sequence has: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def block_table(self, sequence_id: SequenceId) -> tuple[int, ...]:
        """The pages of a sequence in token order."""
        return tuple(self._sequences[sequence_id].pages)

    def dropped(self, sequence_id: SequenceId) -> list[int]:
        """How many of a sequence's first pages it no longer sees, in each window."""
        return list(self._sequences[sequence_id].dropped)

    def drop(self, sequence_id: SequenceId, counts: Sequence[int]) -> None:
        """Drop so many of a sequence's first pages, full ones, from each window."""
        sequence = self._sequences[sequence_id]
        for at, (window, count) in enumerate(zip(self.windows, counts, strict=True)):
            first = sequence.dropped[at]
            sequence.dropped[at] = max(first, count)
            for page in sequence.pages[first:count]:
                window.leave(page, is_found=self._is_found(page))

    def settle(self) -> None:
        """Note that append's copies are made, and leave their sources in all windows."""
        while self._sources:
            source = self._sources.pop()
            for window in self.windows:
                window.leave(source, is_found=self._is_found(source))

    def match_prefix(self, tokens: Sequence[int], namespace: str | None = None) -> int:
        """Tokens after the root in pages of the tree: a multiple of page_size."""
        return len(self._match(tokens, namespace)) * self.page_size

    def allocate(
        self,
        sequence_id: SequenceId,
        tokens: Sequence[int] = (),
        room: int = 0,
        namespace: str | None = None,
    ) -> Prefix:
        """Begin a sequence with the pages that hold a prefix of its tokens, if any.

        tokens are the first token ids, with those of the root; room counts the prefix, too. The
        sequence finds only pages of its namespace.
        """
        pages = self._match(tokens, namespace)
        length = len(pages) * self.page_size
        dropped = [window.first_seen(length) for window in self.windows]
        promised = -(-room // self.page_size)
        self._check_room(sequence_id, pages, dropped, max(promised - len(pages), 0))
        root = self._tree.acquire(self._tree.root_key(namespace, tokens)) if pages else None
        for page in pages:
            self._cached.pop(page, None)
            self._references[page] += 1
        for window, first in zip(self.windows, dropped, strict=True):
            window.see(pages[first:])
        sequence = _Sequence(pages, length, len(pages), root, namespace, dropped, promised)
        self._sequences[sequence_id] = sequence
        return Prefix(length, None if root is None else root.place)

    def append(self, sequence_ids: Sequence[SequenceId], counts: Sequence[int]) -> Growth:
        """Make room for counts[i] tokens at the end of each sequence, or of none."""
        self.settle()  # a step that could not be ended has left some
        sequences = [self._sequences[i] for i in sequence_ids]
        needed, ends = self._needed(sequences, counts)
        if needed:
            names = ", ".join(map(repr, sequence_ids))
            needs = f"sequences {names:.200} need {needed} more pages for {sum(counts)} tokens"
            self._check_free(needs, [needed] * (1 + len(self.windows)), self.num_left(ends))
        growth, size = Growth([], []), self.page_size
        for place, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            pages = sequence.pages
            if count and sequence.length % size:
                self._own_last_page(place, sequence, growth)
            sequence.length += count
            while len(pages) * size < sequence.length:
                growth.entries.append((place, len(pages), self._take()))
                pages.append(growth.entries[-1][2])
        return growth

    def can_append(self, sequence_ids: Sequence[SequenceId], counts: Sequence[int]) -> bool:
        """Whether append would find pages."""
        needed, ends = self._needed([self._sequences[i] for i in sequence_ids], counts)
        return not needed or needed <= min(self.num_left(ends))

    def insert(self, sequence_id: SequenceId, tokens: Sequence[int]) -> int | None:
        """Put the full pages of a sequence into the prefix tree, where others find them.

        Call it when the rows are written, or will be before anything reads a later sequence.

        tokens are the known first ones, with those of the root. The result is the place of a new
        root: keep its rows there, or call lose if that fails.
        """
        sequence = self._sequences[sequence_id]
        full = min(len(tokens) - self.root_len, sequence.length) // self.page_size
        if full > sequence.in_tree:
            self._insert_pages(sequence, tokens, full)
        root = sequence.root
        if root is None or root.is_kept:
            return None
        root.is_kept = True
        return root.place

    def lose(self, place: int) -> None:
        """Note that the place of a root keeps nothing: no page under it is found."""
        for root in self._tree.roots.values():
            if root.place == place:
                root.is_kept = False

    def fork(self, parent_id: SequenceId, child_id: SequenceId) -> None:
        """Begin a sequence with the tokens of another; they share all pages.

        It raises OutOfPagesError if that takes reserved frames: one that two sequences see is not
        free when the first leaves it.
        """
        parent = self._sequences[parent_id]
        if parent.room:
            seen = [set(parent.pages[first:]) for first in parent.dropped]
            needs = f"sequence {shown(child_id)} would share pages of {shown(parent_id)}"
            self._check_free(needs, [0] * (1 + len(seen)), self.num_left(shared=seen))
        for page in parent.pages:
            self._references[page] += 1
        for window, first in zip(self.windows, parent.dropped, strict=True):
            window.see(parent.pages[first:])
        if parent.root is not None:
            parent.root.uses += 1
        pages, dropped = list(parent.pages), list(parent.dropped)
        self._sequences[child_id] = replace(parent, pages=pages, dropped=dropped, room=0)

    def place(self, arrivals: Mapping[SequenceId, Arrival]) -> list[int]:
        """Begin sequences that share pages as they did in another pool.

        Returns:
            The page of this pool for each page of the other one.
        """
        numbers = {number for one in arrivals.values() for number in one.pages}
        in_sight = [
            seen_by(one.pages[one.dropped[at] :] for one in arrivals.values())
            for at in range(len(self.windows))
        ]
        needed = [len(numbers), *map(len, in_sight)]
        self._check_free(f"{len(numbers)} pages are needed", needed, self.num_left())
        self.settle()  # of a step that could not be ended
        pages = [self._take_page() for _ in numbers]
        for page in pages:
            self._references[page] = 0
        for window, seen in zip(self.windows, in_sight, strict=True):
            for number, count in seen.items():
                window.take(pages[number], count)
        for sequence_id, one in arrivals.items():
            own, dropped = [pages[number] for number in one.pages], list(one.dropped)
            for page in own:
                self._references[page] += 1
            placed = _Sequence(own, one.packed_len, 0, None, one.namespace, dropped)
            self._sequences[sequence_id] = placed
        return pages

    def rename(self, sequence_id: SequenceId, new_id: SequenceId) -> None:
        """Rename a sequence, and drop its reservation."""
        sequence = self._sequences[sequence_id]
        sequence.room = 0
        self._sequences[new_id] = sequence
        del self._sequences[sequence_id]

    def truncate(self, sequence_id: SequenceId, length: int) -> None:
        sequence = self._sequences[sequence_id]
        sequence.length = length
        sequence.in_tree = min(sequence.in_tree, length // self.page_size)
        self._release(sequence, -(-length // self.page_size))

    def free(self, sequence_id: SequenceId) -> None:
        """End a sequence; its pages in the tree stay cached."""
        self._release(self._sequences[sequence_id], 0)
        del self._sequences[sequence_id]

    def forget_all(self) -> None:
        """Let nobody find a page or a root; sequences keep their pages."""
        self._uncache(range(self.num_pages))
        self._tree = PrefixTree(*self._tree_sizes)
        for sequence in self._sequences.values():
            sequence.in_tree, sequence.root = 0, None

    def namespace(self, sequence_id: SequenceId) -> str | None:
        return self._sequences[sequence_id].namespace

    def num_left(
        self, ends: Mapping[int, int] | None = None, shared: Sequence[set[int]] = ()
    ) -> list[int]:
        """Pages, and frames of each window, that can be taken and are not reserved.

        A sequence that swaps one frame for another needs no more, unless another one sees it.

        ends are pages of sequences after a step, by their id(); the others keep their number.
        shared are pages that one more sequence is about to see, of each window.
        """
        left = [self.num_free, *(window.num_free for window in self.windows)]
        for sequence in [one for one in self._sequences.values() if one.room]:
            end = (ends or {}).get(id(sequence), len(sequence.pages))
            if (owed := sequence.room - end) > 0:
                left[0] -= owed
                for at, window in enumerate(self.windows):
                    pages, others = sequence.pages[sequence.dropped[at] :], shared[at : at + 1]
                    alone = window.num_alone(pages, *others) + end - len(sequence.pages)
                    left[1 + at] -= min(owed, max(window.held - alone, 0))
        return left

    def _check_room(
        self, sequence_id: SequenceId, pages: list[int], dropped: list[int], needed: int
    ) -> None:
        """Raise OutOfPagesError unless so many pages beside a prefix's are left in each window."""
        cached = sum(page in self._cached for page in pages)
        left = self.num_left(shared=[set(pages[first:]) for first in dropped])
        left[0] -= cached  # which can no longer be taken then
        for at, (window, first) in enumerate(zip(self.windows, dropped, strict=True), 1):
            left[at] -= window.num_kept(pages[first:])
        has = f"{len(pages)} pages of its prefix are there, {cached} of these among those free"
        needs = f"sequence {shown(sequence_id)} needs {needed} more pages ({has})"
        wanted = [needed, *(min(needed, window.held) for window in self.windows)]
        self._check_free(needs, wanted, left)

    def _check_free(self, needs: str, wanted: Sequence[int], left: Sequence[int]) -> None:
        """Raise OutOfPagesError unless enough pages and frames of windows are left."""
        short = [at for at, count in enumerate(wanted) if count > left[at]]
        if not short:
            return
        totals = [(self.num_pages, "")]
        totals += [
            (one.num_frames, f" in layers with a window of {one.window}") for one in self.windows
        ]
        has = " and ".join(
            f"{max(left[at], 0)} of {totals[at][0]} are free and not reserved{totals[at][1]}"
            for at in short
        )
        advice = "" if short == [0] else ", or append fewer tokens in one step"
        raise OutOfPagesError(f"{needs}, but {has}: free, truncate or swap out sequences{advice}")

    def _is_found(self, page: int) -> bool:
        return self._tree.node_of_page[page] is not None

    def _match(self, tokens: Sequence[int], namespace: str | None) -> list[int]:
        """The longest chain of pages with the tokens after the root that all windows can see."""
        way = self._tree.known_way(namespace, tokens)
        for count in range(len(way), 0, -1):
            for page in way[count - 1].pages:
                if self._sees(page, count):
                    return self._tree.chain(page)
        return []

    def _sees(self, last: int, count: int) -> bool:
        """Whether each window has what follows a chain of so many pages, by its last."""
        for window in self.windows:
            page: int | None = last
            for _ in range(count - window.first_seen(count * self.page_size)):
                assert page is not None
                if window.frames[page] < 0:
                    return False
                page = self._tree.before[page]
        return True

    def _is_spare(self, page: int) -> bool:
        """Whether another page after the same pages leads on and has rows where this one has."""
        twins = self._tree.node_of(page).pages
        return self._tree.is_spare(page) and (
            not self._has_rows(page) or any(self._has_rows(twin) for twin in twins if twin != page)
        )

    def _has_rows(self, page: int) -> bool:
        return all(window.frames[page] >= 0 for window in self.windows)

    def _needed(
        self, sequences: Iterable[_Sequence], counts: Iterable[int]
    ) -> tuple[int, dict[int, int]]:
        """Pages to take for new tokens and copies, and pages of each sequence then."""
        needed, size, writers, ends = 0, self.page_size, Counter[int](), dict[int, int]()
        for sequence, count in zip(sequences, counts, strict=True):
            ends[id(sequence)] = end = -(-(sequence.length + count) // size)
            needed += end - len(sequence.pages)
            if count and sequence.length % size and self._references[sequence.pages[-1]] > 1:
                writers[sequence.pages[-1]] += 1
        # when all who share a page write to it, the last of them keeps it
        needed += sum(min(n, self._references[page] - 1) for page, n in writers.items())
        return needed, ends

    def _own_last_page(self, place: int, sequence: _Sequence, growth: Growth) -> None:
        """Copy a sequence's last, partly full page if it is shared."""
        source = sequence.pages[-1]
        if self._references[source] == 1:
            self._take_out(source)  # it was cut in a full page, whose last tokens now change
            return
        target = self._take()
        growth.copies.append((source, target))
        self._references[source] -= 1
        self._sources += [source] * bool(self.windows)
        sequence.pages[-1] = target
        growth.entries.append((place, len(sequence.pages) - 1, target))

    def _take(self) -> int:
        """Take a page, with rows in all layers, for one sequence."""
        page = self._take_page()
        for window in self.windows:
            window.take(page)
        return page

    def _take_page(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._take_out(page)
        self._references[page] = 1
        return page

    def _release(self, sequence: _Sequence, keep: int) -> None:
        """Release all but a sequence's first pages, the last page first."""
        while len(sequence.pages) > keep:
            page = sequence.pages.pop()
            for window, first in zip(self.windows, sequence.dropped, strict=True):
                if len(sequence.pages) >= first:
                    window.leave(page, is_found=self._is_found(page))
            self._drop_reference(page)
            sequence.room -= self._references[page] > 0  # others have it
        sequence.dropped = [min(first, keep) for first in sequence.dropped]
        if not sequence.pages and sequence.root is not None:
            sequence.root.uses -= 1
            sequence.root = None

    def _drop_reference(self, page: int) -> None:
        """Remove one reference to a page; without references it is cached or free."""
        self._references[page] -= 1
        if self._references[page]:
            return
        if self._tree.node_of_page[page] is None or self._is_spare(page):
            self._take_out(page)
            self._free.append(page)
        else:
            self._cached[page] = None

    def _insert_pages(self, sequence: _Sequence, tokens: Sequence[int], full: int) -> None:
        """Put a sequence's first `full` pages into the tree, if there is a root for it."""
        size, first = self.page_size, self.root_len
        if sequence.root is None:
            key = self._tree.root_key(sequence.namespace, tokens)
            sequence.root = self._tree.acquire(key)
            if sequence.root is None:
                sequence.root, reclaimed = self._tree.add_root(key)
                self._uncache(reclaimed)
        if sequence.root is None:
            return
        node: PrefixNode | None = sequence.root
        before = sequence.pages[sequence.in_tree - 1] if sequence.in_tree else None
        if before is not None:
            node = self._tree.node_of(before)
        for at in range(sequence.in_tree, full):
            start, page = first + at * size, sequence.pages[at]
            assert node is not None
            node = self._tree.add(page, before, node, tuple(tokens[start : start + size]))
            if node is None:  # the page came from elsewhere with other tokens
                return
            for twin in [twin for twin in node.pages if twin in self._cached]:
                if self._is_spare(twin):
                    self._drop(twin)
            sequence.in_tree, before = at + 1, page

    def _drop(self, page: int) -> None:
        self._take_out(page)
        self._uncache([page])

    def _take_out(self, page: int) -> None:
        """Take a page out of the tree, and free the cached pages that become useless."""
        before = self._tree.before[page]
        self._forget_rows([page])
        self._uncache(self._tree.remove(page))
        while before is not None and before in self._cached and self._is_spare(before):
            page, before = before, self._tree.before[before]
            self._uncache([page, *self._tree.remove(page)])

    def _uncache(self, pages: Sequence[int]) -> None:
        """Free pages outside of the tree that no sequence refers to."""
        self._forget_rows(pages)
        for page in pages:
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def _forget_rows(self, pages: Sequence[int]) -> None:
        """Free the frames of pages outside of the tree that no sequence sees."""
        for window in self.windows:
            for page in pages:
                window.forget(page)
