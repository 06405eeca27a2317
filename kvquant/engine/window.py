"""16-bit copies of a sequence's first page and last tokens, beside the rows in an engine's pages.

Each token has packed rows in its page. So prefixes, preempted sequences and forks find all tokens
there, and a sequence without a slot here attends to packed rows alone.

    tokens     0 ... page_size        ...        n - recent_len ... n
               ├─ first page ─┤├── packed rows ──┤├─── recent ────┤
    slot       [0, page_size)     the pages          a ring of ring_len rows

Engines name no requests when they describe a step, so the page of a sequence's last token names its
slot. A slot has a ticket, which its sequence leaves in each page that it writes. A sequence whose
last page has the ticket of a slot goes on in that slot. A ticket becomes invalid when another
sequence takes the slot. Sequences that share full pages have the same tokens up to the end of these
pages: one of them keeps the slot, and the others take new ones. A prompt takes the slot that was
used longest ago. The slot gets the 16-bit rows of older tokens from other slots that hold the same
tokens, or else from packed rows, once the step's rows are written.

All of this is computed on the device, without a wait, from tensors that stay where they are, for
CUDA graphs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..ops.append import append_rows
from ..ops.rows_at import dequantize_pages
from ..rows.format import RowFormat
from ..rows.quantize import EXACT_DTYPES, exact_codec
from ..rows.segment import Numbers, Segment
from ..rows.slots import Slots, Split

if TYPE_CHECKING:
    from .contract import PageLayout

log = logging.getLogger("kvquant")
NONE = -1
SHARE = 0.05  # of a device's memory that 16-bit rows may take


def slots_for(max_num_seqs: int, bytes_of_slot: int, device: torch.device) -> int:
    """How many sequences have 16-bit rows; bytes_of_slot: of all layers."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = max(min(max_num_seqs, int(SHARE * memory) // bytes_of_slot), 1)
    _tell_slots(found, max_num_seqs, found * bytes_of_slot)
    return found


@lru_cache
def _tell_slots(found: int, asked: int, size: int) -> None:
    """Log once how many sequences have 16-bit rows."""
    log.info(
        "kvquant: the first page and last tokens of %d of %d sequences are in 16 bit (%.0f MiB)",
        *(found, asked, size / (1 << 20)),
    )


class Seen(NamedTuple):
    """See WindowStep.seen."""

    tokens: slice
    positions: torch.Tensor
    has_slot: torch.Tensor


class Refill(NamedTuple):
    """The tokens before those of a step, of its prompts, that are in 16 bit; [tokens] int64 each.

    Attributes:
        packed: slots of their packed rows, in pages.
        source: 16-bit slots that have them before the step's rows are written; negative where only
            their packed rows have them.
        target: 16-bit slots where they have to be written; negative where they are, or where a
            newer token takes the place.
    """

    packed: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor


@dataclass
class WindowStep:
    """Where the sequences of a step have 16-bit rows.

    Attributes:
        block_table: [num_seqs, max_pages], int32: pages of the packed rows.
        packed_lens, exact_lens, starts, seq_slots: [num_seqs], int32: as of Segment.
        refill: of all prompts with a past; None if there are none.
        seen: by row of the block table, which tokens of refill are a prompt's, their positions, on
            the CPU, and whether its sequence has a slot.
    """

    block_table: torch.Tensor
    packed_lens: torch.Tensor
    exact_lens: torch.Tensor
    starts: torch.Tensor
    seq_slots: torch.Tensor
    refill: Refill | None
    seen: dict[int, Seen]


class Window:
    """The slots of sequences; those of one kind of layers share it."""

    def __init__(
        self,
        split: Split,
        num_slots: int,
        num_pages: int,
        max_num_seqs: int,
        max_num_tokens: int,
        max_pages: int,
        device: torch.device | str,
    ) -> None:
        def full(*shape: int, dtype: torch.dtype = torch.int64, fill: int = NONE) -> torch.Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        self.split, self.num_slots, self.device = split, num_slots, torch.device(device)
        self.step: WindowStep | None = None
        self._now = 0
        # the last entries are written for sequences without a slot or a first page, and not read
        self._ticket_of_page, self._slot_of_first = full(num_pages), full(num_pages + 1)
        self._written = full(num_pages)  # the last step that wrote to a page
        self._ticket, self._first = full(num_slots + 1, fill=-2), full(num_slots + 1)
        self._end, self._used = full(num_slots + 1, fill=0), full(num_slots + 1, fill=0)
        self._exact, self._nowhere = full(max_num_tokens), full(max_num_tokens)
        self._table = full(max_num_seqs, max_pages, dtype=torch.int32, fill=0)
        self._counts = full(4, max_num_seqs, dtype=torch.int32, fill=0)
        self._range = torch.arange(max(max_num_tokens, max_num_seqs), device=device)

    def begin(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        counts: Numbers | Sequence[int],
        pasts: dict[int, int],
    ) -> WindowStep:
        """Find or take the slots of a step's sequences, before its rows are written.

        Args:
            block_table: [num_seqs, max_pages], int32.
            seq_lens: [num_seqs], int32, with the new tokens.
            counts: new tokens of each sequence.
            pasts: of sequences that read a prompt, the tokens before, 0 or more.
        """
        split, size, slots = self.split, self.split.page_size, self.num_slots
        new_lens = np.asarray(counts)
        batch, tokens = len(new_lens), int(new_lens.sum())
        owner, back, new, asks = self._of_tokens(new_lens, pasts)
        table, lens = block_table[:batch].long(), seq_lens[:batch].long()
        places = self._range[:batch]
        past = lens - new
        first = table[:, 0]
        self._now += 1
        position = lens[owner] - 1 - back
        pages = table[owner, position // size]
        self._written[pages] = self._now
        # a page of a prompt's past has it whole, so the ticket is of the last one's writer
        last = table.gather(1, (past - 1).clamp(min=0)[:, None] // size)[:, 0]
        ticket = self._ticket_of_page[last.clamp(min=0)]
        slot = known = ticket.clamp(min=0) % slots
        end = self._end[slot]
        lag = end - past
        # an engine may share pages that another sequence fills in this step: what was noted of them
        # is of their tokens before
        is_old = (past % size > 0) | (self._written[last.clamp(min=0)] < self._now)
        is_known = (past > 0) & (ticket >= 0) & (self._ticket[slot] == ticket) & (lag >= 0) & is_old
        goes_on = is_known & (new > 0) & (lag <= split.rollback_len)
        # of several with one ticket the one that is nearest to the slot's end keeps the slot
        rank = torch.where(goes_on, lag * batch + places, 1 << 40)
        best = torch.full_like(self._used, 1 << 40).scatter_reduce_(0, slot, rank, "amin")
        goes_on &= best[slot] == rank

        used = self._used.scatter(0, torch.where(goes_on, slot, slots), self._now)[:slots]
        oldest, wanted = used.argsort(), asks & ~goes_on & (new > 0)
        turn = wanted.cumsum(0) - 1
        takes = wanted & (turn < slots - goes_on.sum())
        slot = torch.where(takes, oldest[turn.clamp(0, slots - 1)], slot)
        has = goes_on | takes
        ticket = torch.where(goes_on & (lag == 0), ticket, self._now * slots + slot)

        holder = self._slot_of_first[first.clamp(min=0)]
        holds = (holder >= 0) & (self._first[holder] == first) & (self._end[holder] >= size)
        holds &= self._written[first.clamp(min=0)] < self._now
        sources = torch.where(holds, holder, NONE), torch.where(is_known, known, NONE), end
        found = self._refill(table, lens, pasts, slot, has, takes, *sources)

        at = torch.where(has, slot, slots)
        for state, values in (
            (self._ticket, ticket),
            (self._first, first),
            (self._end, lens),
            (self._used, torch.full_like(lens, self._now)),
        ):
            state[at] = values
        # written now, or copied
        is_holder = (new > 0) & ((past == 0) | (takes & holds))
        at = torch.where(is_holder & (first >= 0), first, len(self._slot_of_first) - 1)
        self._slot_of_first[at] = torch.where(has, slot, NONE)

        owned, of_slot = has[owner], slot[owner]
        is_kept = owned & ((position < size) | (back < split.ring_len))
        self._exact[:tokens] = torch.where(
            is_kept, of_slot * split.exact_len + split.exact_row(position - size), NONE
        )
        self._exact[tokens:] = NONE
        self._ticket_of_page[pages] = torch.where(owned, ticket[owner], NONE)

        packed = torch.where(has, (lens - size - split.recent_len).clamp(min=0), lens)
        given = packed, lens - packed, split.ring_row(packed), torch.where(has, slot, 0)
        self._counts[:, :batch] = torch.stack(given)
        self._counts[:, batch:] = 0
        packed_lens, exact_lens, starts, seq_slots = self._counts[:, :batch]
        shifted = self._table[:batch, : table.shape[1]]
        shifted[:] = block_table[:batch]
        shifted[:, :-1] = torch.where(has[:, None], block_table[:batch, 1:], shifted[:, :-1])
        self.step = WindowStep(
            self._table[:batch, : table.shape[1]],
            packed_lens,
            exact_lens,
            starts,
            seq_slots,
            *found,
        )
        return self.step

    def exact_slots(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """16-bit slots of the step's tokens, padding among them, and as many of none."""
        return self._exact[:tokens], self._nowhere[:tokens]

    def _of_tokens(
        self, counts: Numbers, pasts: dict[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sequence of each token, and tokens after it; new tokens, and who may take a slot."""
        owner = np.repeat(np.arange(len(counts)), counts)
        back = counts.cumsum()[owner] - 1 - np.arange(len(owner))
        asks = np.zeros_like(counts)
        asks[list(pasts)] = 1
        numbers = np.concatenate([owner, back, counts, asks])
        moved = torch.from_numpy(numbers).to(self.device, torch.int64, non_blocking=True)
        of_tokens, batch = len(owner), len(counts)
        *others, may_take = moved.split([of_tokens, of_tokens, batch, batch])
        return others[0], others[1], others[2], may_take > 0

    def _refill(
        self,
        table: torch.Tensor,
        lens: torch.Tensor,
        pasts: dict[int, int],
        slot: torch.Tensor,
        has: torch.Tensor,
        takes: torch.Tensor,
        holder: torch.Tensor,
        known: torch.Tensor,
        end: torch.Tensor,
    ) -> tuple[Refill | None, dict[int, Seen]]:
        """What prompts with a past need: see WindowStep.

        Args:
            table: [num_seqs, max_pages], int64.
            lens: with the new tokens.
            pasts: as of begin.
            slot, has, takes: of each sequence, whether it has one, and whether it has just come.
            holder: a slot with the sequence's first page, or negative.
            known: a slot whose tokens are the sequence's up to its past, or negative.
            end: tokens of that slot.
        """
        split, size, exact_len = self.split, self.split.page_size, self.split.exact_len
        seen: dict[int, Seen] = {}
        parts, before = [], 0
        for place, past in pasts.items():
            if not past:
                continue
            on_cpu = torch.cat(
                [
                    torch.arange(min(size, past), device="cpu"),
                    torch.arange(max(size, past - split.recent_len), max(size, past), device="cpu"),
                ]
            )
            position = on_cpu.to(self.device, non_blocking=True)
            row = split.exact_row(position - size)
            own = slot[place] * exact_len + row
            in_ring = position >= (end[place] - split.ring_len).clamp(min=size)
            other = torch.where(
                in_ring, known[place], torch.where(position < size, holder[place], NONE)
            )
            kept = torch.where(other >= 0, other * exact_len + row, NONE)
            source = torch.where(takes[place], kept, torch.where(has[place], own, NONE))
            stays = (position < size) | (position >= lens[place] - split.ring_len)
            packed = table[place, position // size] * size + position % size
            parts.append((packed, source, torch.where(takes[place] & stays, own, NONE)))
            seen[place] = Seen(slice(before, before + len(on_cpu)), on_cpu, has[place])
            before += len(on_cpu)
        refill = Refill(*map(torch.cat, zip(*parts, strict=True))) if parts else None
        return refill, seen


@dataclass(eq=False)
class WindowRows:
    """The 16-bit rows of a layer.

    Attributes:
        window: its slots.
        k_rows, v_rows: [num_slots, num_kv_heads, exact_len, row bytes], uint8.
        k_format, v_format: their formats, "bf16" or "fp16".
        seen: K and V of the tokens of the step's refill, in 16 bit, as they are stored.
    """

    window: Window
    k_rows: torch.Tensor
    v_rows: torch.Tensor
    k_format: RowFormat
    v_format: RowFormat
    seen: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        window: Window,
        layout: PageLayout,
        dtype: torch.dtype,
        room: Sequence[torch.Tensor] | None = None,
    ) -> WindowRows:
        """The rows of a layer.

        room: for K and V, each [num_slots, num_kv_heads, bytes or more], uint8; None for new ones.
        """
        formats = [RowFormat.parse(exact_codec(dtype), fmt.head_dim) for fmt in layout[:2]]
        tokens, shape = window.split.exact_len, (window.num_slots, layout.num_kv_heads)
        rows = []
        for fmt, given in zip(formats, room or (None, None), strict=True):
            size = tokens * fmt.row_bytes
            if given is None or given.shape[-1] < size:
                given = torch.zeros(*shape, size, dtype=torch.uint8, device=window.device)
            rows.append(given[..., :size].unflatten(-1, (tokens, fmt.row_bytes)))
        return cls(window, *rows, *formats)

    @property
    def dtype(self) -> torch.dtype:
        return EXACT_DTYPES[self.k_format.codec]

    def read(self) -> None:
        """Read what slots have of prompts, before rows of the step take their places."""
        refill = None if self.window.step is None else self.window.step.refill
        self.seen = []
        if refill is not None:
            for rows, fmt in ((self.k_rows, self.k_format), (self.v_rows, self.v_format)):
                self.seen.append(dequantize_pages(rows, fmt, refill.source, self.dtype))

    def refill(
        self, k_pages: torch.Tensor, v_pages: torch.Tensor, formats: tuple[RowFormat, RowFormat]
    ) -> None:
        """Give slots the tokens of prompts that they lack, after the step's rows are written: a
        page may be another sequence's of the step."""
        if self.window.step is None or self.window.step.refill is None:
            return
        packed, source, target = self.window.step.refill
        for side, (pages, fmt) in enumerate(zip((k_pages, v_pages), formats, strict=True)):
            decoded = dequantize_pages(pages, fmt, packed, self.dtype)
            self.seen[side] = torch.where((source >= 0)[:, None, None], self.seen[side], decoded)
        nowhere = torch.full_like(target, NONE)
        slots = Slots(nowhere, target, nowhere)
        k, v = self.seen
        append_rows(k, v, k_pages, v_pages, slots, *formats, **self.options)

    def slots(self, packed: torch.Tensor) -> Slots:
        """Where new tokens go, beside their packed slots."""
        exact, nowhere = self.window.exact_slots(len(packed))
        return Slots(packed, exact, nowhere)

    @property
    def options(self) -> dict[str, Any]:
        """Of append_rows."""
        name = self.k_format.codec
        return {"exact_k": self.k_rows, "exact_v": self.v_rows, "exact_format": name}

    def segments(self, packed: Segment, sequences: slice) -> list[Segment]:
        """The segments of sequences, in 16 bit where they have it; packed: of all their tokens."""
        step = self.window.step
        assert step is not None
        lens, exact_lens, starts, seq_slots = (
            x[sequences] for x in (step.packed_lens, step.exact_lens, step.starts, step.seq_slots)
        )
        packed = packed._replace(seq_lens=lens, block_table=step.block_table[sequences])
        exact = Segment(
            self.k_rows,
            self.v_rows,
            exact_lens,
            self.k_format,
            self.v_format,
            starts=starts,
            sinks=self.window.split.sink_len,
            seq_slots=seq_slots,
        )
        return [packed, exact]
