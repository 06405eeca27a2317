"""What refuses to be copied, because copies would share memory."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from ..errors import UnsupportedError


class NoShallowCopy:
    """Base of caches that copy.deepcopy copies, and copy.copy would not: both would write into one
    memory, and each would count only its own tokens."""

    def __copy__(self) -> NoReturn:
        raise UnsupportedError(
            f"copy.copy of a {type(self).__name__} would share its rows, which one of both would "
            "overwrite: use copy.deepcopy"
        )


class NotCopied:
    """Base of the parts of a paged cache, some of which are views of others.

    copy.copy, copy.deepcopy, pickle, torch.save and processes that are given one would part them,
    and each would go on with memory of its own.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UnsupportedError(
            f"a {type(self).__name__} cannot be copied or pickled, its tensors share memory: "
            "save_sequences and load_sequences take sequences to another cache, in this process or "
            "another, and PagedKVCache.fork copies one within its cache"
        )
