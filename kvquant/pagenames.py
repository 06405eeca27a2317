"""PageNames: which page holds which tokens after which others, a tree of hash tables.

    root ─▶ (5, 7, 1, 9) ─▶ (3, 3, 8, 2)        page_size 4: the name of a page is the way to it,
                 │       └▶ (3, 3, 8, 4)        that is, all tokens up to its end
                 └ pages {6, 11}                pages with the same tokens have the same name

This is vLLM's prefix caching by chained hashes of blocks
(https://docs.vllm.ai/en/latest/design/prefix_caching), but tokens are compared, not their hashes,
so that no collision can give a wrong page.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from .errors import ConfigError, InvariantError

Tokens: TypeAlias = "tuple[int, ...]"


@dataclass(eq=False, slots=True)
class Name:
    """All tokens up to the end of a page: those of the page after those of the parent.

    Attributes:
        parent: the name of the page before; None for the root, which stands for no tokens.
        tokens: the page_size tokens of the page.
        pages: the pages that hold them; a name has one at least.
        children: names of the pages that follow, by their tokens.
    """

    parent: Name | None
    tokens: Tokens
    pages: set[int] = field(default_factory=set)
    children: dict[Tokens, Name] = field(default_factory=dict)

    def tree(self) -> Iterator[Name]:
        """This name and all that follow it."""
        stack = [self]
        while stack:
            name = stack.pop()
            stack += name.children.values()
            yield name


class PageNames:
    """The names of the pages of a pool.

    Args:
        num_pages: pages in the pool.
        page_size: tokens a page holds.

    Attributes:
        root: the name of no tokens.
        of_page: [num_pages], the name of each page or None.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.root = Name(None, ())
        self.of_page: list[Name | None] = [None] * num_pages

    def match(self, tokens: Tokens) -> list[int]:
        """Pages that hold the first tokens, as many as there are."""
        pages: list[int] = []
        name = self.root
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            child = name.children.get(tokens[start : start + self.page_size])
            if child is None:
                break
            pages.append(next(iter(child.pages)))
            name = child
        return pages

    def add(self, page: int, after: int | None, tokens: Tokens) -> set[int]:
        """Name a page by its tokens and the named page before it.

        Returns:
            All pages of that name.
        """
        parent = self.root if after is None else self.named(after)
        name = parent.children.get(tokens)
        if name is None:
            name = parent.children[tokens] = Name(parent, tokens)
        name.pages.add(page)
        self.of_page[page] = name
        return name.pages

    def named(self, page: int) -> Name:
        """The name of a page that has one."""
        name = self.of_page[page]
        assert name is not None
        return name

    def remove(self, page: int) -> list[int]:
        """Take the name off a page, if it has one.

        Returns:
            Pages to which no name leads any more: those that followed the last page of this name.
            They have lost their names too.
        """
        name, self.of_page[page] = self.of_page[page], None
        if name is None:
            return []
        name.pages.remove(page)
        if name.pages:
            return []
        assert name.parent is not None
        del name.parent.children[name.tokens]
        lost = [page for below in name.tree() for page in below.pages]
        for page in lost:
            self.of_page[page] = None
        return lost

    def follow(self, pages: Sequence[int]) -> bool:
        """Whether the names of the pages follow one another from the root."""
        parent: Name | None = self.root
        for page in pages:
            name = self.of_page[page]
            if name is None or name.parent is not parent:
                return False
            parent = name
        return True

    def check(self) -> None:
        """Raise InvariantError if something contradicts something else."""
        held = [(page, name) for name in self.root.tree() for page in name.pages]
        named = [(page, name) for page, name in enumerate(self.of_page) if name is not None]
        held.sort(key=lambda pair: pair[0])
        hold(held == named, "pages and names do not agree")
        for name in self.root.tree():
            fits = all(c.parent is name and c.tokens == t for t, c in name.children.items())
            hold(fits and (name.pages or name is self.root), "a name has no page or no parent")


def hold(condition: object, what: str) -> None:
    """Raise InvariantError, with the words for what is wrong, unless the condition holds."""
    if not condition:
        raise InvariantError(f"{what}: please report this")


def token_ids(tokens: Sequence[int]) -> Tokens:
    """Token ids as Python integers, by which alone they are compared."""
    try:
        return tuple(map(operator.index, tokens))
    except TypeError as error:
        raise ConfigError(f"tokens must be integers: {error}") from error
