"""SwapSpace: rows of sequences on their way to host memory and back, beside the current stream.

    copy_out    side stream: waits for the current one, gathers pages layer by layer, copies
                its pages and its seat are free once `is_done`, which asks an event
    copy_in     side stream: waits for the current one, which may still read the pages' last owner
                the current stream waits for it (await_rows) before it touches the sequence

Pinned memory is kept for the next sequence by torch; the first ones wait until the system gives it.
On the CPU the copies are plain ones and done at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .errors import OutOfPagesError
from .rowstacks import RowStacks, to_device


@dataclass(frozen=True, eq=False, slots=True)
class Parked:
    """A sequence in host memory.

    Attributes:
        length, packed_len: its tokens, and how many of them are packed.
        tokens: its first tokens, as far as they are known.
        pages: for every stack its pages, [layers, pages, num_kv_heads, page_size, row_bytes].
        exact: for every stack its exact rows, [layers, num_kv_heads, exact_len, row_bytes].
        done: when the copy ends; None for now.
    """

    length: int
    packed_len: int
    tokens: list[int]
    pages: list[torch.Tensor]
    exact: list[torch.Tensor]
    done: torch.cuda.Event | None

    def is_done(self) -> bool:
        """Whether the rows have been copied."""
        return self.done is None or self.done.query()

    def wait(self) -> None:
        """Let the host wait until they have."""
        if self.done is not None:
            self.done.synchronize()


class SwapSpace:
    """Copies between the rows of a paged cache and host memory, and what lies there.

    Args:
        pages, exact: the stacks of PagedRows.
        device: where they lie.

    Attributes:
        parked: sequences that are swapped out, by their ids.
        leaving: of these, or of those freed since, the ones still in their pages.
    """

    def __init__(
        self, pages: Iterable[RowStacks], exact: Iterable[RowStacks], device: torch.device
    ) -> None:
        self._pages = [stack for side in pages for stack in side.stacks]
        self._exact = [stack for side in exact for stack in side.stacks]
        self._device = device
        self.parked: dict[Hashable, Parked] = {}
        self.leaving: list[Parked] = []
        self._side: torch.cuda.Stream | None = None
        self._arriving: dict[Hashable, torch.cuda.Event | None] = {}

    def find(self, sequence_id: Hashable) -> Parked | None:
        """A sequence that is swapped out."""
        try:
            return self.parked.get(sequence_id)
        except TypeError:  # what cannot be hashed is no id
            return None

    def take_gone(self) -> list[Parked]:
        """Those that were leaving and have left since the last call."""
        gone = [parked for parked in self.leaving if parked.is_done()]
        for parked in gone:
            self.leaving.remove(parked)
        return gone

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Let an error for lack of pages or seats say that some will be free soon."""
        try:
            yield
        except OutOfPagesError as error:
            if not self.leaving:
                raise
            more = f"or call finish_swaps(): {len(self.leaving)} sequences are leaving"
            raise OutOfPagesError(f"{error}, {more}") from None

    def copy_out(
        self, table: Sequence[int], seat: int, length: int, packed_len: int, tokens: list[int]
    ) -> Parked:
        """Begin to copy a sequence's pages and exact rows to the host."""
        pages, exact = [], []
        with self._beside():
            index = to_device(table, self._device)
            for stack in self._pages:
                shape = (stack.shape[0], len(table), *stack.shape[2:])
                pages.append(self._host(shape))
                for layer, host in zip(stack, pages[-1], strict=True):
                    host.copy_(layer.index_select(0, index), non_blocking=True)
            for stack in self._exact:
                exact.append(self._host(stack[:, seat].shape))
                for layer, host in zip(stack, exact[-1], strict=True):
                    host.copy_(layer[seat], non_blocking=True)
            done = self._event()
        return Parked(length, packed_len, tokens, pages, exact, done)

    def copy_in(
        self, sequence_id: Hashable, parked: Parked, table: Sequence[int], seat: int
    ) -> None:
        """Begin to copy a sequence back, to pages and a seat of its own."""
        with self._beside():
            index = to_device(table, self._device)
            for stack, rows in zip(self._pages, parked.pages, strict=True):
                for layer, host in zip(stack, rows, strict=True):
                    layer.index_copy_(0, index, host.to(self._device, non_blocking=True))
            for stack, rows in zip(self._exact, parked.exact, strict=True):
                for layer, host in zip(stack, rows, strict=True):
                    layer[seat].copy_(host, non_blocking=True)
            self._arriving[sequence_id] = self._event()

    def await_rows(self, ids: Iterable[Hashable]) -> list[Hashable]:
        """Let the current stream wait for the rows of those sequences that were on their way.

        Returns:
            These sequences.
        """
        if not self._arriving:
            return []
        arrived = [sequence_id for sequence_id in ids if sequence_id in self._arriving]
        for sequence_id in arrived:
            event = self._arriving.pop(sequence_id)
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
        return arrived

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Run on the side stream, after all that the current one was given."""
        if self._device.type != "cuda":
            yield
            return
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)
            for stack in (*self._pages, *self._exact):
                stack.record_stream(self._side)  # so that no memory is given away under a copy
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._side):
                yield
        except BaseException:  # what was begun ends before others have the pages
            torch.cuda.current_stream(self._device).wait_stream(self._side)
            raise

    def _event(self) -> torch.cuda.Event | None:
        return self._side.record_event() if self._side is not None else None

    def _host(self, shape: Sequence[int]) -> torch.Tensor:
        on_cuda = self._device.type == "cuda"
        return torch.empty(tuple(shape), dtype=torch.uint8, pin_memory=on_cuda)
