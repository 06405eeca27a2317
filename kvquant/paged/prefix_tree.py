"""PageNames: which page holds which tokens after which others, trees of hash tables.

    head (1, 5) ─▶ (5, 7, 1, 9) ─▶ (3, 3, 8, 2)     page_size 4, heads of 2 tokens: the name of a
                        │       └▶ (3, 3, 8, 4)     page is the way to it, that is, all tokens up
                        └ pages {6, 11}             to its end; pages may have the same name

A head is the first tokens of a sequence, which do not stand in pages. This is vLLM's prefix caching
by chained hashes of blocks (https://docs.vllm.ai/en/latest/design/prefix_caching), but tokens are
compared, not their hashes, so that no collision can give a wrong page.

Each page follows the page that stood before it where it was written, and what is found is such a
chain: never pages of two sequences that had the same tokens at the same time. The rows of a head
are kept once for all chains that begin with it.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import ConfigError, InvariantError, shown

Tokens: TypeAlias = "tuple[int, ...]"


@dataclass(eq=False, slots=True)
class Name:
    """All tokens up to the end of a page: those of the page after those of the parent.

    Attributes:
        parent: the name of the page before; None for a head.
        tokens: the page_size tokens of the page, or those of the head.
        pages: the pages that hold them, the oldest name first; a name has one at least, a head
            none.
        children: names of the pages that follow, by their tokens.
    """

    parent: Name | None
    tokens: Tokens
    pages: dict[int, None] = field(default_factory=dict)
    children: dict[Tokens, Name] = field(default_factory=dict)

    def tree(self) -> Iterator[Name]:
        """This name and all that follow it."""
        stack = [self]
        while stack:
            name = stack.pop()
            stack += name.children.values()
            yield name


@dataclass(eq=False, slots=True)
class Origin:
    """Where the rows of a head came from: one for all sequences that have these very rows.

    Attributes:
        forgotten: whether they are not to be kept for others.
        root: where the first of them may have come from, if others were written after a fork.
    """

    forgotten: bool = False
    root: Origin | None = None

    def renewed(self) -> Origin:
        """That of rows of which the last ones are written anew."""
        return Origin(root=self.root or self)

    def shares(self, other: Origin) -> bool:
        """Whether rows of one may be those of another."""
        return (self.root or self) is (other.root or other)


@dataclass(eq=False, slots=True)
class Head(Name):
    """The first tokens of sequences, with which their pages' names begin.

    Attributes:
        place: from 0 to num_heads - 1, where what belongs to these tokens is kept.
        uses: sequences that stand under it; without any it may be given up.
        origin: of what is kept there; None if nothing is, then no page is found.
    """

    place: int = 0
    uses: int = 0
    origin: Origin | None = None


class PageNames:
    """The names of the pages of a pool.

    Args:
        num_pages: pages in the pool.
        page_size: tokens a page holds.
        head_len: tokens of a head.
        num_heads: heads that are known at a time.

    Attributes:
        heads: by their tokens, the least recently used first.
        of_page: [num_pages], the name of each page or None.
        before: [num_pages], of each page with a name the page that it follows; None for the first.
    """

    def __init__(self, num_pages: int, page_size: int, head_len: int, num_heads: int) -> None:
        self.page_size, self.head_len = page_size, head_len
        self.heads: OrderedDict[Tokens, Head] = OrderedDict()
        self.of_page: list[Name | None] = [None] * num_pages
        self.before: list[int | None] = [None] * num_pages
        self._after: dict[int, set[int]] = {}  # the pages that follow one
        self._free_places = list(range(num_heads - 1, -1, -1))

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The chain of pages that holds the most of the tokens after the head."""
        head = self.heads.get(tuple(tokens[: self.head_len]))
        if head is None or head.origin is None:
            return []
        chain: list[int] = []
        page = next((page for name in self.way(tokens)[-1:] for page in name.pages), None)
        while page is not None:
            chain.append(page)
            page = self.before[page]
        return chain[::-1]

    def way(self, tokens: Sequence[int]) -> list[Name]:
        """The names of pages that hold the tokens after the head, as many as there are."""
        found: list[Name] = []
        name: Name | None = self.heads.get(tuple(tokens[: self.head_len]))
        for start in range(self.head_len, len(tokens) - self.page_size + 1, self.page_size):
            name = name and name.children.get(tuple(tokens[start : start + self.page_size]))
            if name is None:
                break
            found.append(name)
        return found

    def cut(self, tokens: Sequence[int]) -> list[Name]:
        """The names of full pages of which the last tokens, too few for a page, are the first."""
        way = self.way(tokens)
        rest = tuple(tokens[self.head_len + len(way) * self.page_size :])
        last = way[-1] if way else self.heads.get(tuple(tokens[: self.head_len]))
        if last is None or not 0 < len(rest) < self.page_size:
            return []
        return [name for key, name in last.children.items() if key[: len(rest)] == rest]

    def hold(self, head: Tokens) -> Head | None:
        """Use a known head, until it is let go as often as it was held."""
        found = self.heads.get(head)
        if found is not None:
            found.uses += 1
            self.heads.move_to_end(head)
        return found

    def begin(self, head: Tokens) -> tuple[Head | None, list[int]]:
        """Hold a head that is not known yet, in the place of one that nobody uses.

        Returns:
            The head, None if all are in use; and the pages that have lost their names with the head
            that was given up.
        """
        reclaimed: list[int] = []
        if not self._free_places:
            unused = next((old for old in self.heads.values() if not old.uses), None)
            if unused is None:
                return None, reclaimed
            del self.heads[unused.tokens]
            reclaimed = self._forget(unused)
            self._free_places.append(unused.place)
        self.heads[head] = Head(None, head, place=self._free_places.pop(), uses=1)
        return self.heads[head], reclaimed

    def add(self, page: int, before: int | None, parent: Name, tokens: Tokens) -> Name | None:
        """Name a page by its tokens, the name before and the page that has it.

        Returns:
            The name; None if the page has another one or follows another page, and keeps to that.
        """
        known = self.of_page[page]
        if known is not None:
            same = known.parent is parent and known.tokens == tokens
            return known if same and self.before[page] == before else None
        name = parent.children.get(tokens)
        if name is None:
            name = parent.children[tokens] = Name(parent, tokens)
        name.pages[page] = None
        self.of_page[page], self.before[page] = name, before
        if before is not None:
            self._after.setdefault(before, set()).add(page)
        return name

    def named(self, page: int) -> Name:
        """The name of a page that has one."""
        name = self.of_page[page]
        assert name is not None
        return name

    def is_spare(self, page: int) -> bool:
        """Whether what leads to a page leads to another as well, and on from there."""
        return len(self.named(page).pages) > 1 and page not in self._after

    def remove(self, page: int) -> list[int]:
        """Take the name off a page, if it has one.

        Returns:
            Pages that followed it: no chain leads to them any more. They have lost their names too.
        """
        reclaimed = [page]
        for last in reclaimed:  # which grows
            reclaimed += self._after.pop(last, ())
            name, self.of_page[last] = self.of_page[last], None
            before, self.before[last] = self.before[last], None
            if before in self._after:
                self._after[before].remove(last)
                if not self._after[before]:
                    del self._after[before]
            if name is not None:
                del name.pages[last]
                if not name.pages and name.parent is not None:
                    del name.parent.children[name.tokens]
        return reclaimed[1:]

    def follow(self, head: Name | None, pages: Iterable[int]) -> bool:
        """Whether the names of the pages follow one another from the head."""
        for page in pages:
            name = self.of_page[page]
            if name is None or name.parent is not head:
                return False
            head = name
        return True

    def check(self) -> None:
        """Raise InvariantError if something contradicts something else."""
        names = [name for head in self.heads.values() for name in head.tree()]
        held = sorted((page, id(name)) for name in names for page in name.pages)
        named = [(page, id(name)) for page, name in enumerate(self.of_page) if name is not None]
        hold(held == named, "pages and names do not agree")
        for name in names:
            fits = all(c.parent is name and c.tokens == t for t, c in name.children.items())
            hold(fits and bool(name.pages) != isinstance(name, Head), "a name has no page")
        follow = [(before, page) for page, before in enumerate(self.before) if before is not None]
        after = [(before, page) for before, pages in self._after.items() for page in pages]
        hold(sorted(follow) == sorted(after), "pages do not know what follows them")
        for page, found in enumerate(self.of_page):
            before = self.before[page]
            parent = None if found is None or isinstance(found.parent, Head) else found.parent
            leads = None if before is None else self.of_page[before]
            hold(leads is parent, f"page {page} does not follow the page before it")
        places = [*self._free_places, *(head.place for head in self.heads.values())]
        hold(sorted(places) == list(range(len(places))), "two heads have one place")

    def _forget(self, name: Name) -> list[int]:
        """Take the names off all pages of a tree that was cut off, and list them."""
        reclaimed = [page for below in name.tree() for page in below.pages]
        for page in reclaimed:
            self.of_page[page] = self.before[page] = None
            self._after.pop(page, None)
        return reclaimed


def hold(condition: object, what: str) -> None:
    """Raise InvariantError, with the words for what is wrong, unless the condition holds."""
    if not condition:
        raise InvariantError(f"{what}: please report this")


def token_ids(tokens: Iterable[int]) -> list[int]:
    """Token ids as Python integers of 64 bits, by which alone they are compared."""
    try:
        ids = list(map(operator.index, tokens))
    except TypeError as error:
        raise ConfigError(f"tokens must be integers: {error}") from error
    if ids and not -(2**63) <= min(ids) <= max(ids) < 2**63:
        least, most = shown(min(ids)), shown(max(ids))
        raise ConfigError(f"tokens from {least} to {most} must be integers of 64 bits")
    return ids


def whole_number(name: str, value: int) -> int:
    """A number as a Python integer, whatever type it came as.

    Raises:
        ConfigError: it is no whole number, True is none, or one of more than 64 bits.
    """
    try:
        if not isinstance(value, bool) and abs(number := operator.index(value)) < 2**63:
            return number
    except TypeError:
        pass
    raise ConfigError(f"{name} {shown(value)} is not possible: use a whole number")
