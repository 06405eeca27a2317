"""Rehearsals: calls on the meta device, without memory, which note the kernels they would launch.

A call goes its usual way up to the launch, for a GPU that need not be here: so the call itself says
what it will need. See kvquant/cache/warmup.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch


class Rehearsal(NamedTuple):
    """The running rehearsal.

    Attributes:
        gpu: kernels.cuda.runtime.launch.GPU, for which kernels are chosen.
        kernels: their specs, in order.
    """

    gpu: Any
    kernels: dict[Any, None]


_current: ContextVar[Rehearsal | None] = ContextVar("rehearsal", default=None)


@contextmanager
def rehearse(gpu: Any) -> Iterator[Rehearsal]:
    """Rehearse calls of this thread on the meta device for a GPU."""
    rehearsal = Rehearsal(gpu, {})
    token = _current.set(rehearsal)
    try:
        yield rehearsal
    finally:
        _current.reset(token)


def current() -> Rehearsal | None:
    """This thread's rehearsal, if any."""
    return _current.get()


def is_rehearsed(tensor: torch.Tensor) -> bool:
    """Whether what is done with a tensor is rehearsed."""
    return tensor.is_meta and _current.get() is not None
