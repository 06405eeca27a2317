"""PagePool: which page holds what in a paged KV cache; host bookkeeping without tensors.

              append              last reference goes: with a name -> cached, without -> free
    free ──────────────▶ referenced ──────────────▶ cached
     ▲                    │      ▲                   │  │
     └────────────────────┘      └───────────────────┘  └──▶ taken for other tokens when no page is
         truncate, free           allocate: same prefix      free: the least recently used first

A sequence is a table of pages and a length. Sequences share pages by reference counts, and a shared
last page is copied before it is written (PagedAttention, https://arxiv.org/abs/2309.06180). A full
page is named by its tokens and all tokens before it, if these are known (pagenames.py).

Pages are released from the last to the first, so that a cached page is never older than the cached
pages that follow it. Several referenced pages may have one name; a cached page has its own alone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from .errors import ConfigError, OutOfPagesError, ShapeError
from .pagenames import PageNames, hold, token_ids

SequenceId: TypeAlias = "int | str"


class Growth(NamedTuple):
    """What an append asks of the device, before the new tokens are written.

    Attributes:
        new_pages: pages that the table grew by, in its order; their contents are undefined.
        copies: (source, target) pages, at most one pair: copy the source, which others still read;
            the target, undefined so far, stands in its place in the table.
    """

    new_pages: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]


@dataclass(eq=False, slots=True)
class _Sequence:
    """Pages of length tokens; the first `named` pages have names, then `tail` tokens are known."""

    pages: list[int]
    length: int
    named: int
    tail: tuple[int, ...]


class PagePool:
    """Pages of a fixed size, shared by sequences that are known by their ids.

    A call costs time in proportion to the pages it touches. One that raises has changed nothing:
    OutOfPagesError if more pages are needed than can be taken, ConfigError if an id is unknown, in
    use or given twice or tokens are no integers, ShapeError if a count or a length does not fit.

    Args:
        num_pages: pages in the pool.
        page_size: tokens a page holds.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ConfigError(f"{name} {value} is too small: use 1 or more")
        self.num_pages, self.page_size = num_pages, page_size
        self._references = [0] * num_pages
        self._names = PageNames(num_pages, page_size)
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._sequences: dict[SequenceId, _Sequence] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be taken: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that no sequence refers to, kept for the prefix they hold."""
        return len(self._cached)

    def block_table(self, sequence_id: SequenceId) -> tuple[int, ...]:
        """The pages of a sequence in the order of its tokens."""
        return tuple(self._get(sequence_id).pages)

    def length(self, sequence_id: SequenceId) -> int:
        """Tokens of a sequence."""
        return self._get(sequence_id).length

    def match_prefix(self, tokens: Sequence[int]) -> int:
        """How many of the first tokens are in named pages: a multiple of page_size."""
        return len(self._names.match(token_ids(tokens))) * self.page_size

    def allocate(self, sequence_id: SequenceId, tokens: Sequence[int] = ()) -> int:
        """Begin a sequence with the pages that hold a prefix of its tokens, if there are any.

        Args:
            sequence_id: a new id.
            tokens: the token ids that the sequence will begin with. Leave out the last one if its
                output is wanted: a token that is present is not computed again.

        Returns:
            How many of the tokens are present, the length of the sequence; append the others.
        """
        self._check_new(sequence_id)
        pages = self._names.match(token_ids(tokens))
        for page in pages:
            if not self._references[page]:
                del self._cached[page]
            self._references[page] += 1
        present = len(pages) * self.page_size
        self._sequences[sequence_id] = _Sequence(pages, present, len(pages), ())
        return present

    def append(
        self, sequence_id: SequenceId, count: int, tokens: Sequence[int] | None = None
    ) -> Growth:
        """Make room for tokens at the end of a sequence.

        Pages that become full are named at once: carry out the copies and write the tokens before
        anything reads a sequence that is allocated or forked later.

        Args:
            sequence_id: the sequence.
            count: new tokens.
            tokens: their ids; None if they are not known, then no page is named from here on.

        Returns:
            The pages taken and the copies to make before the new tokens are written.
        """
        sequence = self._get(sequence_id)
        ids = None if tokens is None else token_ids(tokens)
        needed = self._needed([sequence], count)
        if ids is not None and len(ids) != count:
            raise ShapeError(f"{len(ids)} tokens for a count of {count}: give one id per token")
        if needed > self.num_free:
            needs = f"sequence {sequence_id!r} needs {needed} more pages for {count} tokens"
            has = f"{self.num_free} of {self.num_pages} can be taken"
            raise OutOfPagesError(f"{needs}, but {has}: free or truncate sequences")
        copies = self._own_last_page(sequence) if count and sequence.length % self.page_size else ()
        new_pages = tuple(self._take() for _ in range(needed - len(copies)))
        sequence.pages += new_pages
        known = sequence.named * self.page_size + len(sequence.tail)
        if ids is not None and known == sequence.length:
            self._name_full_pages(sequence, ids)
        sequence.length += count
        return Growth(new_pages, copies)

    def can_append(self, sequence_ids: Iterable[SequenceId], count: int) -> bool:
        """Whether count tokens fit to each of the sequences, one after the other."""
        ids = list(sequence_ids)
        if len(set(ids)) < len(ids):
            raise ConfigError(f"sequences {ids} name one twice: name each once")
        return self._needed([self._get(i) for i in ids], count) <= self.num_free

    def fork(self, parent_id: SequenceId, child_id: SequenceId) -> None:
        """Begin a sequence with the tokens of another; they share all pages."""
        parent = self._get(parent_id)
        self._check_new(child_id)
        for page in parent.pages:
            self._references[page] += 1
        self._sequences[child_id] = replace(parent, pages=list(parent.pages))

    def truncate(self, sequence_id: SequenceId, length: int) -> None:
        """Keep the first tokens of a sequence."""
        sequence = self._get(sequence_id)
        if not 0 <= length <= sequence.length:
            has = f"sequence {sequence_id!r} has {sequence.length} tokens"
            raise ShapeError(f"{has}: it cannot be truncated to {length}")
        named, rest = divmod(length, self.page_size)
        if named < sequence.named:
            name = self._names.named(sequence.pages[named])
            sequence.named, sequence.tail = named, name.tokens[:rest]
        elif named == sequence.named:
            sequence.tail = sequence.tail[:rest]
        sequence.length = length
        self._release(sequence, named + bool(rest))

    def free(self, sequence_id: SequenceId) -> None:
        """End a sequence; its named pages stay cached."""
        self._release(self._get(sequence_id), 0)
        del self._sequences[sequence_id]

    def check(self) -> None:
        """Look through all the bookkeeping, in time proportional to the pool.

        Raises:
            InvariantError: something contradicts something else; the message says what.
        """
        uses = Counter(page for sequence in self._sequences.values() for page in sequence.pages)
        places = sorted([*self._free, *self._cached, *uses])
        hold(places == list(range(self.num_pages)), "a page is lost or in two states")
        hold(self._references == [uses[page] for page in places], "references are not the uses")
        self._names.check()
        named = {page: name for page, name in enumerate(self._names.of_page) if name is not None}
        for page, name in named.items():
            cached = page in self._cached and len(name.pages) == 1
            hold(uses[page] or cached, f"page {page} has a name, but is free or a cached twin")
        hold(self._cached.keys() <= named.keys(), "a page is cached without a name")
        for sequence_id, sequence in self._sequences.items():
            pages, tail, size = sequence.pages, len(sequence.tail), self.page_size
            hold(len(pages) == -(-sequence.length // size), f"{sequence_id!r}: length or pages")
            hold(len(set(pages)) == len(pages), f"{sequence_id!r} has a page twice")
            known = sequence.named * size + tail
            hold(tail < size and known <= sequence.length, f"{sequence_id!r}: known tokens")
            hold(
                self._names.follow(pages[: sequence.named]), f"{sequence_id!r}: names not in order"
            )

    def _get(self, sequence_id: SequenceId) -> _Sequence:
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise ConfigError(f"no sequence {sequence_id!r}: allocate or fork it first") from None

    def _check_new(self, sequence_id: SequenceId) -> None:
        if sequence_id in self._sequences:
            raise ConfigError(f"sequence {sequence_id!r} exists: free it or use another id")

    def _needed(self, sequences: Iterable[_Sequence], count: int) -> int:
        """Pages to take for count more tokens of each: new ones and copies of shared last ones."""
        if count < 0:
            raise ShapeError(f"a count of {count} tokens is negative: use 0 or more")
        needed, writers = 0, Counter[int]()
        for sequence in sequences:
            needed += -(-(sequence.length + count) // self.page_size) - len(sequence.pages)
            if count and sequence.length % self.page_size:
                writers[sequence.pages[-1]] += 1
        # when all who share a page write to it, the last of them keeps it
        return needed + sum(min(n, self._references[page] - 1) for page, n in writers.items())

    def _own_last_page(self, sequence: _Sequence) -> tuple[tuple[int, int], ...]:
        """Let a sequence write to its last page, which is partly full; return the copies for it."""
        source = sequence.pages[-1]
        if self._references[source] == 1:
            self._unname(source)  # it was cut in a full page, whose last tokens now change
            return ()
        target = self._take()
        self._references[source] -= 1
        sequence.pages[-1] = target
        return ((source, target),)

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._unname(page)
        self._references[page] = 1
        return page

    def _release(self, sequence: _Sequence, keep: int) -> None:
        """Drop the references to all but the first pages of a sequence, the last page first."""
        while len(sequence.pages) > keep:
            page = sequence.pages.pop()
            self._references[page] -= 1
            if self._references[page]:
                continue
            name = self._names.of_page[page]
            if name is not None and len(name.pages) == 1:
                self._cached[page] = None
            else:
                self._unname(page)
                self._free.append(page)

    def _name_full_pages(self, sequence: _Sequence, tokens: tuple[int, ...]) -> None:
        """Name the pages that known tokens fill after those that have names."""
        tail, size = sequence.tail + tokens, self.page_size
        full = len(tail) // size * size
        for start in range(0, full, size):
            after = sequence.pages[sequence.named - 1] if sequence.named else None
            page = sequence.pages[sequence.named]
            same = self._names.add(page, after, tail[start : start + size])
            for twin in [other for other in same if other in self._cached]:
                self._unname(twin)
                self._uncache(twin)
            sequence.named += 1
        sequence.tail = tail[full:]

    def _unname(self, page: int) -> None:
        """Take the name off a page; cached pages that nothing leads to any more become free."""
        for lost in self._names.remove(page):  # who uses it also uses a page of the name before
            self._uncache(lost)

    def _uncache(self, page: int) -> None:
        del self._cached[page]
        self._free.append(page)
