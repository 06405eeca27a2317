"""PrefixTree: which page holds which tokens after which others, trees of hash tables.

    root (1, 5) ─▶ (5, 7, 1, 9) ─▶ (3, 3, 8, 2)     page_size 4, roots of 2 tokens: the node of a
                        │       └▶ (3, 3, 8, 4)     page stands for all tokens up to its end; pages
                        └ pages {6, 11}             may have the same node

A root holds the first tokens of a sequence, which lie outside of the pages, in a namespace; trees
of two namespaces share no node. vLLM's prefix caching chains hashes of blocks
(https://docs.vllm.ai/en/latest/design/prefix_caching); this compares tokens, so that no collision
gives a wrong page.

A page follows the page before it where it was written, and only these chains are found: never pages
of two sequences that had the same tokens at the same time. Chains share their root's rows.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import ConfigError, shown

Tokens: TypeAlias = "tuple[int, ...]"
RootKey: TypeAlias = "tuple[str | None, Tokens]"


@dataclass(eq=False, slots=True)
class PrefixNode:
    """All tokens up to the end of a page: those of the page after those of the parent.

    Attributes:
        parent: the node of the page before; None for a root.
        tokens: the page_size tokens of the page, or those of the root.
        pages: the pages that hold them, the oldest first; a node has one at least, a root none.
        children: nodes of the pages that follow, by their tokens.
    """

    parent: PrefixNode | None
    tokens: Tokens
    pages: dict[int, None] = field(default_factory=dict)
    children: dict[Tokens, PrefixNode] = field(default_factory=dict)

    def tree(self) -> Iterator[PrefixNode]:
        stack = [self]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node


@dataclass(eq=False, slots=True)
class PrefixRoot(PrefixNode):
    """The first tokens of sequences of a namespace, with which their prefixes begin.

    Attributes:
        namespace: of the sequences.
        place: from 0 to num_roots - 1, where the cache keeps the rows of these tokens.
        uses: sequences under it; without any it may be replaced.
        is_kept: whether its rows are kept there; else no page is found.
    """

    namespace: str | None = None
    place: int = 0
    uses: int = 0
    is_kept: bool = False


class PrefixTree:
    """The prefixes that the pages of a pool hold.

    Attributes:
        roots: by namespace and tokens, the least recently used first; num_roots at most.
        node_of_page: [num_pages], the node of each page or None.
        before: [num_pages], the page before each page with a node; None for the first.
    """

    def __init__(self, num_pages: int, page_size: int, root_len: int, num_roots: int) -> None:
        self.page_size, self.root_len = page_size, root_len
        self.roots: OrderedDict[RootKey, PrefixRoot] = OrderedDict()
        self.node_of_page: list[PrefixNode | None] = [None] * num_pages
        self.before: list[int | None] = [None] * num_pages
        self._after: dict[int, set[int]] = {}  # the pages that follow one
        self._free_places = list(range(num_roots - 1, -1, -1))

    def root_key(self, namespace: str | None, tokens: Sequence[int]) -> RootKey:
        return namespace, tuple(tokens[: self.root_len])

    def known_way(self, namespace: str | None, tokens: Sequence[int]) -> list[PrefixNode]:
        """As `way`, but empty unless the rows of the root are kept."""
        root = self.roots.get(self.root_key(namespace, tokens))
        return [] if root is None or not root.is_kept else self.way(namespace, tokens)

    def chain(self, last: int) -> list[int]:
        chain, page = [last], self.before[last]
        while page is not None:
            chain.append(page)
            page = self.before[page]
        return chain[::-1]

    def way(self, namespace: str | None, tokens: Sequence[int]) -> list[PrefixNode]:
        """The nodes of pages that hold the tokens after the root, as far as there are any."""
        found: list[PrefixNode] = []
        node: PrefixNode | None = self.roots.get(self.root_key(namespace, tokens))
        for start in range(self.root_len, len(tokens) - self.page_size + 1, self.page_size):
            node = node and node.children.get(tuple(tokens[start : start + self.page_size]))
            if node is None:
                break
            found.append(node)
        return found

    def acquire(self, key: RootKey) -> PrefixRoot | None:
        """Use a known root until it is released as often."""
        found = self.roots.get(key)
        if found is not None:
            found.uses += 1
            self.roots.move_to_end(key)
        return found

    def add_root(self, key: RootKey) -> tuple[PrefixRoot | None, list[int]]:
        """Acquire a new root, in the place of one that nobody uses.

        Returns:
            The root, None if all are in use; and the pages that lost their nodes with the old root.
        """
        reclaimed: list[int] = []
        if not self._free_places:
            unused = next((old for old in self.roots.values() if not old.uses), None)
            if unused is None:
                return None, reclaimed
            del self.roots[unused.namespace, unused.tokens]
            reclaimed = self._forget(unused)
            self._free_places.append(unused.place)
        namespace, tokens = key
        place = self._free_places.pop()
        self.roots[key] = PrefixRoot(None, tokens, namespace=namespace, place=place, uses=1)
        return self.roots[key], reclaimed

    def add(
        self, page: int, before: int | None, parent: PrefixNode, tokens: Tokens
    ) -> PrefixNode | None:
        """Put a page under the node of its tokens, after a parent node and its page.

        Returns:
            The node; None if the page stays with another node or predecessor.
        """
        known = self.node_of_page[page]
        if known is not None:
            same = known.parent is parent and known.tokens == tokens
            return known if same and self.before[page] == before else None
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = PrefixNode(parent, tokens)
        node.pages[page] = None
        self.node_of_page[page], self.before[page] = node, before
        if before is not None:
            self._after.setdefault(before, set()).add(page)
        return node

    def node_of(self, page: int) -> PrefixNode:
        node = self.node_of_page[page]
        assert node is not None
        return node

    def is_spare(self, page: int) -> bool:
        """Whether another page follows the same pages, and leads on."""
        return len(self.node_of(page).pages) > 1 and page not in self._after

    def remove(self, page: int) -> list[int]:
        """Take a page out of the tree, if it is there; return those after it, now out, too."""
        reclaimed = [page]
        for last in reclaimed:  # which grows
            reclaimed += self._after.pop(last, ())
            node, self.node_of_page[last] = self.node_of_page[last], None
            before, self.before[last] = self.before[last], None
            if before in self._after:
                self._after[before].remove(last)
                if not self._after[before]:
                    del self._after[before]
            if node is not None:
                del node.pages[last]
                if not node.pages and node.parent is not None:
                    del node.parent.children[node.tokens]
        return reclaimed[1:]

    def follow(self, root: PrefixNode | None, pages: Iterable[int]) -> bool:
        for page in pages:
            node = self.node_of_page[page]
            if node is None or node.parent is not root:
                return False
            root = node
        return True

    def _forget(self, node: PrefixNode) -> list[int]:
        """Take all pages of a subtree out of the tree; return them."""
        reclaimed = [page for below in node.tree() for page in below.pages]
        for page in reclaimed:
            self.node_of_page[page] = self.before[page] = None
            self._after.pop(page, None)
        return reclaimed


def token_ids(tokens: Iterable[int]) -> list[int]:
    """Token ids as 64-bit Python integers, for comparison."""
    try:
        ids = list(map(operator.index, tokens))
    except TypeError as error:
        raise ConfigError(f"tokens must be integers: {error}") from error
    if ids and not -(2**63) <= min(ids) <= max(ids) < 2**63:
        least, most = shown(min(ids)), shown(max(ids))
        raise ConfigError(f"tokens from {least} to {most} must be integers of 64 bits")
    return ids


def whole_number(name: str, value: int) -> int:
    """A number as a Python integer; ConfigError unless it is a whole number of 64 bits."""
    try:
        if not isinstance(value, bool) and abs(number := operator.index(value)) < 2**63:
            return number
    except TypeError:
        pass
    raise ConfigError(f"{name} {shown(value)} is not possible: use a whole number")
