"""Base classes that refuse copies, which would share memory."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from ..errors import UnsupportedError


class NoShallowCopy:
    """Base of caches that copy.deepcopy copies. copy.copy raises: both would write one memory."""

    def __copy__(self) -> NoReturn:
        raise UnsupportedError(
            f"copy.copy of a {type(self).__name__} would share its rows, which one of both would "
            "overwrite: use copy.deepcopy"
        )


class NotCopied:
    """Base of parts of a paged cache: copies and pickles, which separate views, raise."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UnsupportedError(
            f"a {type(self).__name__} cannot be copied or pickled, its tensors share memory: "
            "save_sequences and load_sequences take sequences to another cache, in this process or "
            "another, and PagedKVCache.fork copies one within its cache"
        )
