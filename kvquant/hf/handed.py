"""How keys and values of a call reach attention, and whose call runs.

A QuantizedCache marks keys and values with a Handed for attention.py: transformers passes on
nothing but tensors. Two readers get no mark and ask `running` for the cache of the call: the
function that makes masks, and attention to keys that a model makes of latents.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ..cache.contiguous import KVCache
from .padding import Padding

OurCache: TypeAlias = Any  # a QuantizedCache: its file imports this one

ANOTHER = (
    "A cache belongs to one text, of which generate gets all ids, those in the cache and the new "
    "ones. Call cache.reset() before another text, or make another cache. A pipeline reads the "
    "texts of a list one after another into one cache: give it batch_size=len(texts), or one text "
    "with a cache of its own at a time"
)


@dataclass(eq=False)
class Handed:
    """Keys and values of a layer in one call of the model, on their way to attention.

    Attributes:
        to: the cache that they go to.
        kv: its KVCache.
        at: the place there.
        layer: of the model.
        padding: which columns hold no tokens, if any.
        appended: they are in the cache, so the next reader is another layer.
        seen: for a chunk: all keys and values of the first attention, and their number (_seen);
            empty if it read the chunk alone.
        mask: of the first attention, if any.
        reads_rows: append before attention, which then reads rows only.
        is_traced: this is part of a graph (compile/tracing.py).
    """

    to: OurCache
    kv: KVCache
    at: int
    layer: int
    padding: Padding | None
    is_traced: bool = False
    appended: bool = False
    reads_rows: bool = False
    seen: tuple[Any, ...] | None = None
    mask: torch.Tensor | None = None
    _latents: tuple[Callable[[], torch.Tensor | None], ...] = ()
    _traced: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def latents(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Latents and RoPE parts, if these are not keys and values; only while the call runs."""
        if self.is_traced or not self._latents:
            return self._traced
        latents, ropes = self._latents[0](), self._latents[1]()
        return None if latents is None or ropes is None else (latents, ropes)

    @latents.setter
    def latents(self, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
        if self.is_traced:  # a graph has no weak references; it ends with the call
            self._traced = rows
        else:
            self._latents = weakref.ref(rows[0]), weakref.ref(rows[1])


class Running:
    """The cache of the model's running call, for readers without a mark.

    Each thread has its own note. A graph of torch.compile cannot guard that, so a traced call (one
    at a time) keeps its note in the plain attribute `traced`; the reader removes it, because a
    graph keeps what it refers to.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self.traced: OurCache | None = None

    def note(self, cache: OurCache) -> None:
        if torch.compiler.is_compiling():
            self.traced = cache
        else:
            self._of_thread.cache = weakref.ref(cache)

    def forget(self) -> None:
        """Note that a call without a QuantizedCache runs."""
        self._of_thread.cache = None

    def take(self) -> OurCache | None:
        """The cache of the running call, if any; a graph can take it once."""
        if torch.compiler.is_compiling():
            cache, self.traced = self.traced, None
            return cache
        found = getattr(self._of_thread, "cache", None)
        return None if found is None else found()


running = Running()
