"""WindowPages: which pages of a pool have rows in the layers of one window, and in which frames.

    take                 leave: can be found -> kept, else -> free
    free ──▶ seen ───────────────▶ kept ──▶ taken for another page when no frame is free:
     ▲         ▲                    │        the page that was left first
     │         └────────────────────┤
     └──────────────────────────────┘ see: same prefix; forget: found no longer

Layers that see all tokens have rows of every page, at its own number. Layers with a window have
fewer frames, each for one page's rows. A sequence that is past a page leaves it; the page stays in
the pool for the layers that see all.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence

import numpy as np


class WindowPages:
    """Frames of the layers of one window.

    Args:
        window: last tokens that the layers see.
        num_frames: pages that have rows at a time.
        num_pages: pages of the pool.
        page_size: tokens of a page.
        spare: tokens before the window that sequences keep in sight.

    Attributes:
        frames: [num_pages] int32, the frame of each page; -1 if its rows are gone.
        held: pages that a sequence sees at most, between steps or in a step of one token.
    """

    def __init__(
        self, window: int, num_frames: int, num_pages: int, page_size: int, spare: int
    ) -> None:
        self.window, self.num_frames, self.page_size = window, num_frames, page_size
        self.spare, self.held = spare, held_pages(window, page_size, spare)
        self.frames = np.full(num_pages, -1, np.int32)
        self._seen = [0] * num_pages  # by so many sequences
        self._num_shared = 0  # pages that several see
        self._free = list(range(num_frames - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # pages, the one left first comes first

    @property
    def num_free(self) -> int:
        """Frames that can be taken: free ones, and those kept only to be found again."""
        return len(self._free) + len(self._kept)

    def first_seen(self, length: int) -> int:
        """How many first pages a sequence with so many tokens in pages need not see."""
        return first_seen(length, self.window, self.page_size)

    def num_kept(self, pages: Iterable[int]) -> int:
        return sum(page in self._kept for page in pages)

    def num_alone(self, pages: Sequence[int], shared: Collection[int] = ()) -> int:
        """How many of a sequence's pages neither another one nor `shared` sees."""
        if not self._num_shared and not shared:
            return len(pages)
        return sum(self._seen[page] == 1 and page not in shared for page in pages)

    def take(self, page: int, seen: int = 1) -> None:
        """Give a page a frame that so many sequences see."""
        if self._free:
            frame = self._free.pop()
        else:
            lost, _ = self._kept.popitem(last=False)
            frame, self.frames[lost] = int(self.frames[lost]), -1
        self.frames[page], self._seen[page] = frame, seen
        self._num_shared += seen > 1

    def see(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._kept.pop(page, None)
            self._seen[page] += 1
            self._num_shared += self._seen[page] == 2

    def leave(self, page: int, *, is_found: bool) -> None:
        """Let one sequence less see a page; is_found says whether its tokens are in the tree."""
        self._seen[page] -= 1
        self._num_shared -= self._seen[page] == 1
        if not self._seen[page]:
            self._kept[page] = None
            if not is_found:
                self.forget(page)

    def forget(self, page: int) -> None:
        """Free the frame of a page that is no longer in the tree, unless a sequence sees it."""
        if page in self._kept:
            del self._kept[page]
            self._free.append(int(self.frames[page]))
            self.frames[page] = -1


def first_seen(length: int, window: int, page_size: int) -> int:
    """How many first pages a sequence with so many tokens in pages need not see.

    It sees the window after its full pages, so that others can begin with all of these.
    """
    return max(length // page_size * page_size - window, 0) // page_size


def held_pages(window: int, page_size: int, spare: int) -> int:
    """Pages that a sequence sees at most, of a window: see WindowPages.held."""
    return -(-(window + spare) // page_size) + 2


def seen_by(tables: Iterable[Sequence[int]]) -> Counter[int]:
    return Counter(page for table in tables for page in table)
