"""SwapSpace: sequences on their way to host memory and back, beside the current stream.

    copy_out    side stream: waits for the current one, gathers pages layer by layer, copies
                its pages and its sequence slot are free once `is_done`, which asks an event
    copy_in     side stream: waits for the current one, which may still read the pages' last owner
                the current stream waits for it (await_rows) before it touches the sequence

Pinned memory is kept for the next sequence by torch; the first ones wait for the system. On the CPU
copies are immediate.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..cache.copying import NotCopied
from ..cache.row_stacks import to_device
from ..errors import ConfigError, OutOfPagesError, shown
from .pool import Arrival, SequenceId
from .state import PagedState
from .storage import PagedRows, stacks_of


@dataclass(frozen=True, eq=False, slots=True)
class Swapped:
    """A sequence in host memory.

    Attributes:
        length, packed_len: its tokens, and how many are packed.
        tokens: its known first tokens.
        namespace: of the sequence.
        dropped: its first pages no longer seen, in each window.
        pages: of each group, for every stack the pages that it sees, [layers, pages, num_kv_heads,
            page_size, row_bytes].
        exact: for every stack its 16-bit rows, [layers, num_kv_heads, exact_len, row_bytes].
        done: the event that ends the copy; None if it is done.
    """

    length: int
    packed_len: int
    tokens: list[int]
    namespace: str | None
    dropped: list[int]
    pages: list[list[torch.Tensor]]
    exact: list[torch.Tensor]
    done: torch.cuda.Event | None

    def is_done(self) -> bool:
        return self.done is None or self.done.query()

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()


class SwapSpace(NotCopied):
    """Copies between a paged cache and host memory.

    swapped has the sequences that are swapped out, by their ids; swapping_out those, or freed ones,
    that are still in their pages.
    """

    def __init__(self, state: PagedState, rows: PagedRows) -> None:
        self._state, self._device = state, rows.device
        self._pages = [stacks_of(group.sides) for group in rows.groups]
        self._exact = stacks_of(rows.exact)
        self.swapped: dict[SequenceId, Swapped] = {}
        self.swapping_out: list[Swapped] = []
        self._side: torch.cuda.Stream | None = None
        self._arriving: dict[SequenceId, torch.cuda.Event | None] = {}

    def find(self, sequence_id: SequenceId) -> Swapped | None:
        try:
            return self.swapped.get(sequence_id)
        except TypeError:  # what cannot be hashed is no id
            return None

    def check_here(self, ids: Iterable[SequenceId]) -> None:
        """Raise ConfigError unless sequences live and are not swapped out."""
        for sequence_id in ids:
            if self.find(sequence_id) is not None:
                raise ConfigError(f"sequence {shown(sequence_id)} is swapped out: swap it in first")
            self._state.seq_slot(sequence_id)

    def reclaim(self) -> None:
        """Free the pages and slots of sequences whose copy is done."""
        for swapped in [swapped for swapped in self.swapping_out if swapped.is_done()]:
            self.swapping_out.remove(swapped)
            self._state.free(swapped)

    def finish(self) -> None:
        """Let the host wait for all copies, and free their pages and slots."""
        for swapped in self.swapping_out:
            swapped.wait()
        self.reclaim()

    def swap_out(self, sequence_id: SequenceId) -> None:
        """Begin to move a sequence; its pages and slot are free when the copy is done."""
        state, seq_slot = self._state, self._state.seq_slot(sequence_id)
        dropped, table = state.pool.dropped(sequence_id), state.pool.block_table(sequence_id)
        firsts = enumerate(state.dropped(sequence_id))
        tables = [state.places(group, table[first:]) for group, first in firsts]
        pages, exact, done = self.copy_out(tables, seq_slot)
        lens = int(state.lengths[seq_slot]), int(state.packed_lens[seq_slot])
        known = state.tokens(sequence_id), state.pool.namespace(sequence_id)
        swapped = Swapped(*lens, *known, dropped, pages, exact, done)
        state.rename(sequence_id, swapped)
        self.swapped[sequence_id] = swapped
        self.swapping_out.append(swapped)

    def swap_in(self, sequence_id: SequenceId) -> None:
        swapped = self.find(sequence_id)
        if swapped is None:
            raise ConfigError(
                f"sequence {shown(sequence_id)} is not swapped out: it cannot be brought"
            )
        if swapped in self.swapping_out:  # its rows are still where they were
            self.swapping_out.remove(swapped)
            self._state.rename(swapped, sequence_id)
        else:
            table = range(self._state.split.num_pages(swapped.packed_len))
            known = swapped.tokens, swapped.namespace, swapped.dropped
            arrival = Arrival(swapped.length, swapped.packed_len, table, *known)
            with self.hinting():
                pages = self._state.place({sequence_id: arrival})
            with self._state.or_free([sequence_id]):
                self.copy_in(sequence_id, swapped, pages, self._state.seq_slot(sequence_id))
        del self.swapped[sequence_id]

    @contextmanager
    def hinting(self) -> Iterator[None]:
        """Add to an error for lack of pages or slots that some will be free soon."""
        try:
            yield
        except OutOfPagesError as error:
            if not self.swapping_out:
                raise
            more = (
                f"or call finish_swaps(): {len(self.swapping_out)} sequences are being swapped out"
            )
            raise OutOfPagesError(f"{error}, {more}") from None

    def copy_out(
        self, tables: Sequence[Sequence[int]], seq_slot: int
    ) -> tuple[list[list[torch.Tensor]], list[torch.Tensor], torch.cuda.Event | None]:
        """Begin to copy a sequence's rows to the host; return pages, exact and done of Swapped."""
        pages, exact = [], []
        with self._beside():
            for stacks, table in zip(self._pages, tables, strict=True):
                index, hosts = to_device(table, self._device), []
                for stack in stacks:
                    hosts.append(self._host((stack.shape[0], len(table), *stack.shape[2:])))
                    for layer, host in zip(stack, hosts[-1], strict=True):
                        host.copy_(layer.index_select(0, index), non_blocking=True)
                pages.append(hosts)
            for stack in self._exact:
                exact.append(self._host(stack[:, seq_slot].shape))
                for layer, host in zip(stack, exact[-1], strict=True):
                    host.copy_(layer[seq_slot], non_blocking=True)
            done = self._event()
        return pages, exact, done

    def copy_in(
        self, sequence_id: SequenceId, swapped: Swapped, table: Sequence[int], seq_slot: int
    ) -> None:
        """Begin to copy a sequence back, to its own pages and sequence slot."""
        with self._beside():
            for group, first in enumerate(self._state.dropped(sequence_id)):
                index = to_device(self._state.places(group, table[first:]), self._device)
                for stack, rows in zip(self._pages[group], swapped.pages[group], strict=True):
                    for layer, host in zip(stack, rows, strict=True):
                        layer.index_copy_(0, index, host.to(self._device, non_blocking=True))
            for stack, rows in zip(self._exact, swapped.exact, strict=True):
                for layer, host in zip(stack, rows, strict=True):
                    layer[seq_slot].copy_(host, non_blocking=True)
            self._arriving[sequence_id] = self._event()

    def await_rows(self, ids: Iterable[SequenceId]) -> list[SequenceId]:
        """Let the current stream wait for the rows of sequences on their way; return these."""
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
        """Run on the side stream, after the work of the current one."""
        if self._device.type != "cuda":
            yield
            return
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)
            for stack in (*itertools.chain(*self._pages), *self._exact):
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
        return torch.empty(tuple(shape), dtype=torch.uint8, device="cpu", pin_memory=on_cuda)
