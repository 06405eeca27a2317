"""The whole state of an object, to be compared with what it is after a call."""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

# of no state of their own, or of one that calls do not change
_OPAQUE = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    functools.partial,
    torch.dtype,
    torch.device,
    torch.nn.Module,
    torch.Stream,
    torch.Event,
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def snapshot(value: object, known: Iterable[str] = ()) -> dict[str, object]:
    """What an object is, and all that it reaches: a leaf for each path.

    Tensors and arrays count by their bytes, shape, dtype and place in memory; other objects by
    their class and attributes. Functions and models are only the same or others.

    Args:
        value: such as a cache.
        known: names of attributes to leave out.
    """
    return dict(_leaves(value, "", {}, frozenset(known)))


def changes(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """The paths at which two snapshots differ."""
    nothing = object()
    paths = dict.fromkeys([*before, *after])
    return [path for path in paths if before.get(path, nothing) != after.get(path, nothing)]


def _leaves(
    value: Any, path: str, seen: dict[int, tuple[str, object]], known: frozenset[str]
) -> Iterator[tuple[str, object]]:
    if isinstance(value, _PLAIN):
        yield path, repr(value)
        return
    if id(value) in seen:
        yield path, f"as {seen[id(value)][0]}"
        return
    seen[id(value)] = path, value  # kept, or another object could get its id
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        where = value.data_ptr(), value.stride()
        yield path, (value.dtype, value.shape, value.device, where, content.numpy().tobytes())
        yield from _attributes(value, path, seen, known)
    elif isinstance(value, np.ndarray):
        yield path, (value.dtype, value.shape, value.ctypes.data, value.tobytes())
    elif isinstance(value, weakref.ref):
        yield path, id(value())
    elif isinstance(value, _OPAQUE):
        yield path, id(value)
    elif isinstance(value, torch.Generator):
        yield path, value.get_state().numpy().tobytes()
    elif isinstance(value, types.MethodType):
        yield path, id(value.__func__)
        yield from _leaves(value.__self__, f"{path}.__self__", seen, known)
    else:
        yield path, type(value)
        yield from _parts(value, path, seen, known)
        yield from _attributes(value, path, seen, known)


def _parts(
    value: Any, path: str, seen: dict[int, tuple[str, object]], known: frozenset[str]
) -> Iterator[tuple[str, object]]:
    """Of what contains others."""
    each: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        each = value.items()
        yield f"{path} keys", [repr(key) for key in value]
    elif isinstance(value, list | tuple | deque):
        yield f"{path} length", len(value)
        each = enumerate(value)
    elif isinstance(value, set | frozenset):
        yield f"{path} members", sorted(map(repr, value))
    for key, part in each:
        yield from _leaves(part, f"{path}[{key!r}]", seen, known)


def _attributes(
    value: Any, path: str, seen: dict[int, tuple[str, object]], known: frozenset[str]
) -> Iterator[tuple[str, object]]:
    slots = [name for kind in type(value).__mro__ for name in kind.__dict__.get("__slots__", ())]
    for name in [*slots, *getattr(value, "__dict__", ())]:
        if name not in known and not name.startswith("__") and hasattr(value, name):
            yield from _leaves(getattr(value, name), f"{path}.{name}", seen, known)
