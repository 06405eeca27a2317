"""The formats of K and V where none are given: safe without a plan on every model that was tried.

Errors of K harm most (a few large channels take a group's codes): K has 8 bits in groups, V 4.
Without 16-bit tokens groups are smaller. Head dims 80, 96, 112 and 192 have fewer groups, because
CUDA kernels lack the others. There V has 8 bits, except at 192 with a window.
tests/benchmarks/results/defaults.json has the figures.
"""

from __future__ import annotations

from .format import HEAD_DIMS

DEFAULT = "default"  # the name of a cache of these formats, where commands take one
SINKS, RECENT = 4, 128  # of a window: what caches keep in 16 bit by default
# K and V with a window, and K and V without, by head_dim
_PAIRS: dict[int, tuple[str, str, str, str]] = {
    64: ("int8-g4", "int4-g4", "int8-g8", "int4-g4"),
    80: ("int8", "int8", "int8", "int8"),
    96: ("int8-g2", "int8", "int8-g2", "int8"),
    112: ("int8", "int8", "int8", "int8"),
    128: ("int8-g4", "int4-g4", "int8-g8", "int4-g4"),
    192: ("int8-g4", "int4-g2", "int8-g4", "int8"),
    256: ("int8-g4", "int4-g8", "int8-g8", "int4-g8"),
    512: ("int8-g4", "int4-g8", "int8-g8", "int4-g8"),
}
_NONE = ("int8",) * 4
assert tuple(_PAIRS) == HEAD_DIMS


def default_format(side: str, head_dim: int, sink_len: int = 0, recent_len: int = 0) -> str:
    """The format of K or V where none is given.

    Args:
        side: "k" or "v".
        head_dim: elements of a row; one that no format has gives "int8", which RowFormat.parse
            refuses.
        sink_len, recent_len: 16-bit tokens of the cache; fewer than 4 and 128 count as none.

    Example:
        >>> default_format("k", 128, sink_len=4, recent_len=128)
        'int8-g4'
        >>> default_format("k", 128)
        'int8-g8'
    """
    place = 0 if sink_len >= SINKS and recent_len >= RECENT else 2
    return _PAIRS.get(head_dim, _NONE)[place + "kv".index(side)]
