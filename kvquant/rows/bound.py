"""Launches bound to tensors that stay: the first call of a kind checks, later ones only launch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from .. import debug

ALIGNMENT = 16  # bytes that kernels read at a time
MOST_KINDS = 16  # of calls whose launches an owner remembers


class Bound(dict[Hashable, Any]):
    """An owner's bound launches by the kind of the new tensors in a call; a copy begins empty."""

    def find(self, *new: Any, options: Hashable = None) -> Any:
        """What was kept for tensors of this kind; None in traces, graphs, or if values are read."""
        if not self or debug.enabled or torch.compiler.is_dynamo_compiling():
            return None
        kind = kind_of(*new)
        try:
            found = self.get(kind if options is None else (kind, options))
        except TypeError:  # an option is a list, which its check refuses
            return None
        if found is None or (new[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        return found

    def keep(self, kind: Hashable, launches: Any) -> None:
        """Remember launches for this kind of call, unless there are none, or the kind is None."""
        if launches is None or kind is None:
            return
        if len(self) >= MOST_KINDS:
            self.clear()
        self[kind] = launches

    def __reduce__(self) -> tuple[type[Bound], tuple[()]]:
        return Bound, ()


def kind_of(*new: Any) -> Hashable:
    """What a call depends on in its new tensors; None if they are no tensors."""
    try:
        kind: tuple[Hashable, ...] = ()
        for x in new:
            strides = x.is_contiguous() or x.stride()
            place = x.dtype, x.device, x.data_ptr() % ALIGNMENT, x.is_neg()
            kind += type(x), x.shape, strides, *place
        return kind
    except (AttributeError, TypeError, RuntimeError):  # of torch: their values lie nowhere
        return None
