"""Compile the kernels of an engine's steps before its first request.

kvquant rehearses steps on the meta device and compiles the kernels that they would launch: see
kernels/cuda/runtime/warmup.py. An engine should call begin_warm_up while it loads its model.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any, Generic, TypeVar

import torch

from ..cache.warmup import new_queries, new_rows, present_in
from ..rows.slots import Split
from ..rows.variant import names_of
from .contract import LayerRows, NewTokens, PageLayout, Pages
from .step import FEW, append, attend, describe_step
from .window import Window, WindowRows

log = logging.getLogger("kvquant")
_begun: dict[Hashable, Thread] = {}  # those whose kernels are being compiled


Rows = TypeVar("Rows")


@dataclass(frozen=True)
class LayerCalls(ABC, Generic[Rows]):
    """The calls of a layer of an engine.

    Attributes:
        layer: its rows; other layers of the same kind launch the same kernels.
        num_q_heads: query heads on this rank.
        dtype: of the model.
        page_size: tokens of a page.
        max_model_len, max_num_seqs, max_num_tokens: tokens of a sequence, sequences and tokens
            of a step, at most.
        most_queries: queries of a decoding sequence, at most.
    """

    layer: Rows
    num_q_heads: int
    dtype: torch.dtype
    page_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_tokens: int
    most_queries: int = 1

    @property
    def kind(self) -> Hashable:
        """All that kernels depend on."""
        rest = tuple(value for name, value in vars(self).items() if name != "layer")
        return self._kind_of_rows(), rest

    @abstractmethod
    def _kind_of_rows(self) -> Hashable:
        """What kernels depend on of the layer's rows."""

    @abstractmethod
    def __call__(self) -> None:
        """Make all calls, on the meta device."""

    @property
    def _max_pages(self) -> int:
        return -(-self.max_model_len // self.page_size)

    def _decoding(self) -> Iterator[list[int]]:
        for batch in grown(1, self.max_num_seqs, 5 / 4):
            for count in range(1, self.most_queries + 1):
                if batch * count <= self.max_num_tokens:
                    yield [count] * batch
        if self.most_queries > 1 and self.max_num_seqs > 1:
            yield [1, self.most_queries]  # some have fewer

    def _new_tokens(self, counts: Sequence[int], past: int) -> NewTokens:
        """A step of so many new tokens of each sequence after `past` tokens."""
        table = torch.empty(len(counts), self._max_pages, dtype=torch.int32, device="meta")
        starts = torch.tensor([0, *counts], device="cpu").cumsum(0).int()
        lens = starts.diff() + past
        return NewTokens(table, lens.to("meta"), starts, lens, sum(counts), self.most_queries)


@dataclass(frozen=True)
class StepCalls(LayerCalls[LayerRows]):
    """The calls of a layer with keys and values.

    Attributes:
        is_apart: whether K and V have pages of their own, of PageLayout.row_bytes.
        recent_len: last tokens in 16 bit, beside the first page; 0 for none.
    """

    is_apart: bool = False
    recent_len: int = 0

    def _kind_of_rows(self) -> Hashable:
        layout, _, basis, variant, from_rows, *_ = self.layer
        return layout, present_in(basis), names_of(variant), from_rows

    def __call__(self) -> None:
        layer = self.layer.to("meta")
        if self.recent_len:
            layer = layer._replace(window=self._window(layer.layout))
        for counts, past in self._steps():
            self._step(layer, counts, past)

    def _window(self, layout: PageLayout) -> WindowRows:
        split = Split(self.page_size, self.recent_len, self.page_size, self.most_queries - 1)
        sizes = self.max_num_seqs, self._max_pages, self.max_num_seqs, self.max_num_tokens
        window = Window(split, *sizes, self._max_pages, "meta")
        return WindowRows.of(window, layout, self.dtype)

    def _steps(self) -> Iterator[tuple[list[int], int]]:
        """New tokens of the sequences of steps, and past tokens of each."""
        for counts in self._decoding():
            yield counts, 1
        for count in range(2, min(FEW, self.max_num_tokens) + 1):
            yield [count], self.most_queries + 1
        for count in grown(FEW + 1, self.max_num_tokens, 2):
            for past in (0, 1):
                yield [count], past

    def _step(self, layer: LayerRows, counts: Sequence[int], past: int) -> None:
        layout, tokens, pages = layer.layout, sum(counts), self._pages(layer.layout)
        k, v = new_rows((tokens, layout.num_kv_heads), layout.k_format, layout.v_format, self.dtype)
        q, out = (new_queries((tokens, self.num_q_heads), x) for x in (k, v))
        window = None if layer.window is None else layer.window.window
        step = describe_step(self._new_tokens(counts, past), window)
        append(layer, k, v, pages, torch.empty(tokens, dtype=torch.int64, device="meta"))
        attend(layer, step, q, k, v, pages, out)

    def _pages(self, layout: PageLayout) -> Pages:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.uint8, device="meta")

        shape = self._max_pages, layout.num_kv_heads, self.page_size
        if not self.is_apart:
            return empty(*shape, layout.token_bytes)
        k_bytes, v_bytes = layout.row_bytes(self.page_size)
        return empty(*shape, k_bytes), empty(*shape, v_bytes)


def runs_on(capability: Sequence[int]) -> bool:
    from ..kernels.cuda.runtime.launch import OLDEST

    return tuple(capability) >= OLDEST


def begin_warm_up(device: torch.device, calls: LayerCalls[Any]) -> None:
    """Begin to compile what layers on a device will probably need, and return at once.

    warm_up_layers waits for it, and raises what fails. The CPU needs nothing.
    """
    if device.type != "cuda" or calls.kind in _begun:
        return
    from ..kernels.cuda.runtime.warmup import warm_up

    def compile_quietly() -> None:
        with suppress(Exception):  # warm_up_layers raises it
            warm_up(device, [calls])

    thread = _begun[calls.kind] = Thread(target=compile_quietly, daemon=True)
    thread.start()


def warm_up_layers(device: torch.device, calls: Sequence[LayerCalls[Any]]) -> None:
    """Compile what layers on a device need, once for each kind of layer; nothing for the CPU.

    Raises:
        UnsupportedError: the cuda extra is not installed, or the GPU is too old.
    """
    if device.type != "cuda":
        return
    from ..kernels.cuda.runtime.compile import require_extra
    from ..kernels.cuda.runtime.warmup import warm_up

    require_extra()
    begun = time.perf_counter()
    for thread in _begun.values():
        thread.join()
    kinds = {one.kind: one for one in calls}
    warm_up(device, kinds.values(), frozenset(kinds))
    log.info("kvquant: waited %.1f s for kernels", time.perf_counter() - begun)


def grown(first: int, last: int, factor: float) -> Iterator[int]:
    """Numbers from first to last, each larger by the factor, and by 1 at least."""
    while first < last:
        yield first
        first = max(first + 1, int(first * factor))
    yield last
