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
tokens, or else from packed rows, once the step's rows are written. A fifth of the memory keeps the
FIRST tokens of more first pages, those that were filled last: their slots may be gone.

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

from ..errors import ShapeError
from ..ops.append import append_rows
from ..ops.rows_at import dequantize_pages
from ..ops.slots import advance_window
from ..rows.format import RowFormat
from ..rows.quantize import EXACT_DTYPES, exact_codec
from ..rows.segment import Numbers, Segment
from ..rows.slots import Slots, Split

if TYPE_CHECKING:
    from .contract import PageLayout

log = logging.getLogger("kvquant")
NONE = -1
SHARE = 0.05  # of a device's memory that 16-bit rows may take
FIRST = 16  # tokens of a first page that are kept without a slot, if the page has as many


def slots_for(max_num_seqs: int, bytes_of_slot: int, device: torch.device) -> int:
    """Slots of 16-bit rows, with a fifth that keeps first tokens; bytes_of_slot: of all layers."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = max(min(-(-max_num_seqs * 5 // 4), int(SHARE * memory) // bytes_of_slot), 1)
    _tell_slots(found - found // 5, max_num_seqs, found * bytes_of_slot)
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
    """Past tokens of the step's prompts that attention reads in 16 bit; [tokens], int64 each.

    Attributes:
        packed: slots of their packed rows, in pages.
        source: 16-bit slots that hold these tokens before the append. Negative where only packed
            rows hold the token.
        target: 16-bit slots to which WindowRows.refill copies the tokens. Negative if the sequence
            took no slot in this step, or if a newer token takes the row.
    """

    packed: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor


Stored = tuple[torch.Tensor, ...] | None
Found = tuple[Refill | None, dict[int, Seen], Stored]


@dataclass
class WindowStep:
    """Where the sequences of a step have 16-bit rows.

    Attributes:
        block_table: [num_seqs, max_pages], int32: pages of the packed rows.
        packed_lens, exact_lens, starts, seq_slots: [num_seqs], int32: as of Segment.
        refill: of all prompts with a past; None if there are none.
        stored: slots whose first tokens are kept, and the slots and rows that keep them; or None.
        seen: by a prompt's row of the block table: its tokens in refill, their positions (on the
            CPU), and whether the sequence has a slot.
    """

    block_table: torch.Tensor
    packed_lens: torch.Tensor
    exact_lens: torch.Tensor
    starts: torch.Tensor
    seq_slots: torch.Tensor
    refill: Refill | None
    seen: dict[int, Seen]
    stored: Stored


class Window:
    """Which sequence has which slot. All layers with one block table share a Window."""

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

        self.split, self.room, self.device = split, num_slots, torch.device(device)
        self.num_slots = num_slots = num_slots - num_slots // 5
        self.step: WindowStep | None = None
        # first tokens: which page an entry is of, since which step; entries of pages; the next one
        self.first_len = min(FIRST, split.page_size)
        self.num_firsts = max((self.room - num_slots) * split.exact_len // self.first_len - 1, 0)
        self._stored, self._stored_at = full(self.num_firsts + 1), full(self.num_firsts + 1)
        self._entry, self._turn = full(num_pages + 1), full(1, fill=0)
        # The last entry of tensors with one entry more takes what is written for sequences without
        # a slot or a first page. begin ignores its value.
        self._ticket_of_page, self._slot_of_first = full(num_pages), full(num_pages + 1)
        self._written = full(num_pages)  # the last step that wrote to a page
        self._ticket, self._first = full(num_slots + 1, fill=-2), full(num_slots + 1)
        self._end, self._used = full(num_slots + 1, fill=0), full(num_slots + 1, fill=0)
        self._exact, self._nowhere = full(max_num_tokens), full(max_num_tokens)
        self._table = full(max_num_seqs, max_pages, dtype=torch.int32, fill=0)
        self._counts = full(4, max_num_seqs, dtype=torch.int32, fill=0)
        self._range = torch.arange(max(max_num_tokens, max_num_seqs), device=device)
        self._now = full(1, fill=0)  # steps so far
        self._sizes = {name: size for name, size in split._asdict().items() if name != "sink_len"}
        self._sizes |= {"num_slots": num_slots, "ring_len": split.ring_len}
        scratch = full(2, max_num_seqs), full(num_slots, dtype=torch.int32)
        # in the order of the kernel's arguments (kernels/cuda/slots/window_launch.py)
        self._state = (
            *(self._now, self._ticket_of_page, self._written, self._slot_of_first, self._ticket),
            *(self._first, self._end, self._used, *scratch, self._exact, self._table, self._counts),
        )

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
        batch, width = len(counts), block_table.shape[1]
        starts = np.zeros(batch + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        self._check(batch, block_table, int(starts[-1]))
        given = block_table[:batch].int(), seq_lens.int(), self._sent(torch.from_numpy(starts))
        found: Found = None, {}, None
        # one kernel in place of some 120, but for steps that read a prompt
        if pasts or not advance_window(*given, self._state, self._sizes):
            found = self._advance(*given, int(starts[-1]), pasts)
        packed_lens, exact_lens, firsts, seq_slots = self._counts[:, :batch]
        self.step = WindowStep(
            self._table[:batch, :width], packed_lens, exact_lens, firsts, seq_slots, *found
        )
        return self.step

    def _check(self, batch: int, block_table: torch.Tensor, tokens: int) -> None:
        """Raise ShapeError unless a step has room: kernels do not look."""
        given = batch, block_table.shape[1], tokens
        room = *self._table.shape, len(self._exact)
        if any(one > most for one, most in zip(given, room, strict=True)):
            raise ShapeError(
                f"a step has {batch} sequences, {given[1]} pages and {tokens} tokens: tokens in 16 "
                f'bit have room for {room[0]}, {room[1]} and {room[2]}. Leave "recent_len" out'
            )
        if block_table.stride(1) != 1:
            raise ShapeError("block_table's pages of a sequence are apart: give a contiguous table")

    def _sent(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers on the device. The host does not wait: from pinned memory it need not."""
        if self.device.type == "cuda":
            numbers = numbers.pin_memory()
        return numbers.to(self.device, non_blocking=True)

    def _advance(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        starts: torch.Tensor,
        tokens: int,
        pasts: dict[int, int],
    ) -> Found:
        """Find the slots of sequences. starts: [batch + 1], int64, their first new tokens."""
        split, size, slots = self.split, self.split.page_size, self.num_slots
        now = self._now.add_(1)
        batch, width = len(starts) - 1, block_table.shape[1]
        places, new, ends = self._range[:batch], starts.diff(), starts[1:]
        table, lens = block_table.long(), seq_lens[:batch].long() * (new > 0)
        token = self._range[:tokens]
        owner = places.repeat_interleave(new, output_size=tokens)
        back = ends[owner] - 1 - token
        past = lens - new
        first = table[:, 0]
        position = lens[owner] - 1 - back
        pages = table[owner, position // size]
        self._written[pages] = now
        # the page of the last past token has the ticket of the sequence that last wrote to it
        last = table.gather(1, (past - 1).clamp(min=0)[:, None] // size)[:, 0]
        ticket = self._ticket_of_page[last.clamp(min=0)]
        slot = known = ticket.clamp(min=0) % slots
        end = self._end[slot]
        lag = end - past
        # Another sequence may fill a shared page in this step. What is noted of the page is of its
        # tokens before this step.
        is_old = (past % size > 0) | (self._written[last.clamp(min=0)] < now)
        is_known = (past > 0) & (ticket >= 0) & (self._ticket[slot] == ticket) & (lag >= 0) & is_old
        goes_on = is_known & (new > 0) & (lag <= split.rollback_len)
        # of several sequences with one ticket the one whose past ends nearest to the slot's end
        # keeps the slot
        rank = torch.where(goes_on, lag * batch + places, 1 << 40)
        best = torch.full_like(self._used, 1 << 40).scatter_reduce_(0, slot, rank, "amin")
        goes_on &= best[slot] == rank

        holder = self._slot_of_first[first.clamp(min=0)]
        has_first = (holder >= 0) & (self._first[holder] == first) & (self._end[holder] >= size)
        has_first &= self._written[first.clamp(min=0)] < now
        found: Found = None, {}, None
        has, takes = goes_on, torch.zeros_like(goes_on)
        if pasts:
            used = self._used.scatter(0, torch.where(goes_on, slot, slots), now.expand(batch))
            reads = torch.zeros(batch, dtype=torch.bool, device="cpu")
            reads[list(pasts)] = True
            reads = self._sent(reads)
            wanted = reads & ~goes_on & (new > 0)
            turn = wanted.cumsum(0) - 1
            takes = wanted & (turn < slots - goes_on.sum())
            oldest = used[:slots].argsort()
            slot = torch.where(takes, oldest[turn.clamp(0, slots - 1)], slot)
            has = goes_on | takes
            kept, stored = self._store(first, past, lens, slot, has & reads, [*pasts])
            sources = (
                torch.where(has_first, holder, NONE),
                torch.where(is_known, known, NONE),
                *(end, kept),
            )
            found = *self._refill(table, lens, pasts, slot, has, takes, *sources), stored
        ticket = torch.where(goes_on & (lag == 0), ticket, now * slots + slot)

        at = torch.where(has, slot, slots)
        for state, values in (
            (self._ticket, ticket),
            (self._first, first),
            (self._end, lens),
            (self._used, now.expand(batch)),
        ):
            state[at] = values
        # the slot gets the first page in this step: from new tokens, or from another slot
        is_holder = (new > 0) & ((past == 0) | (takes & has_first))
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
        shifted = torch.where(has[:, None], block_table.roll(-1, 1), block_table)
        self._table[:batch, :width] = shifted
        return found

    def _store(
        self,
        first: torch.Tensor,
        past: torch.Tensor,
        lens: torch.Tensor,
        slot: torch.Tensor,
        fills: torch.Tensor,
        prompts: list[int],
    ) -> tuple[torch.Tensor, Stored]:
        """The 16-bit slots that keep first tokens of sequences, or NONE; WindowStep.stored.

        fills: which sequences are among the prompts, and have slots.
        """
        if not self.num_firsts:
            return torch.full_like(first, NONE), None
        beyond, page = self.num_slots * self.split.exact_len, first.clamp(min=0)
        entry = self._entry[page]
        # nobody has written to the page since
        is_kept = (self._stored[entry] == first) & (self._stored_at[entry] == self._written[page])
        kept = torch.where((entry >= 0) & is_kept, beyond + entry * self.first_len, NONE)
        fills = fills & (past < self.split.page_size) & (lens >= self.split.page_size)
        rank = fills.cumsum(0)
        fills &= rank <= self.num_firsts
        entry = torch.where(fills, (self._turn + rank - 1) % self.num_firsts, self.num_firsts)
        self._turn += fills.sum()
        self._stored[entry], self._stored_at[entry] = first, self._now.expand(len(first))
        self._entry[torch.where(fills, first, len(self._entry) - 1)] = entry
        place = self._sent(torch.tensor(prompts, device="cpu"))
        token = torch.arange(self.first_len, device=self.device)
        rows = beyond + entry[place, None] * self.first_len + token
        exact_len = self.split.exact_len
        return kept, (slot[place], rows // exact_len, rows % exact_len)

    def slots(self, packed: torch.Tensor) -> Slots:
        """Where the step's tokens go, with padding, beside their packed slots."""
        return Slots(packed, self._exact[: len(packed)], self._nowhere[: len(packed)])

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
        first: torch.Tensor,
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
            first: 16-bit slots that keep the sequence's first tokens, or negative.
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
            position = self._sent(on_cpu)
            row = split.exact_row(position - size)
            own = slot[place] * exact_len + row
            in_ring = position >= (end[place] - split.ring_len).clamp(min=size)
            other = torch.where(
                in_ring, known[place], torch.where(position < size, holder[place], NONE)
            )
            is_first = (first[place] >= 0) & (position < self.first_len)
            kept = torch.where(is_first, first[place] + position, NONE)
            kept = torch.where(other >= 0, other * exact_len + row, kept)
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
        k_rows, v_rows: [room of window, num_kv_heads, exact_len, row bytes], uint8.
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
        tokens, shape = window.split.exact_len, (window.room, layout.num_kv_heads)
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
        """Copy the tokens at refill.source into `seen`, before the append overwrites them."""
        refill = None if self.window.step is None else self.window.step.refill
        self.seen = []
        if refill is not None:
            for rows, fmt in ((self.k_rows, self.k_format), (self.v_rows, self.v_format)):
                self.seen.append(dequantize_pages(rows, fmt, refill.source, self.dtype))

    def refill(
        self, k_pages: torch.Tensor, v_pages: torch.Tensor, formats: tuple[RowFormat, RowFormat]
    ) -> None:
        """Copy past tokens into their slots. Call this after the append: another sequence may write
        one of their pages in this step."""
        step = self.window.step
        if step is not None and step.refill is not None:
            packed, source, target = step.refill
            for side, (pages, fmt) in enumerate(zip((k_pages, v_pages), formats, strict=True)):
                own, decoded = self.seen[side], dequantize_pages(pages, fmt, packed, self.dtype)
                self.seen[side] = torch.where((source >= 0)[:, None, None], own, decoded)
            nowhere = torch.full_like(target, NONE)
            slots = Slots(nowhere, target, nowhere)
            k, v = self.seen
            append_rows(k, v, k_pages, v_pages, slots, *formats, **self.options)
        if step is not None and step.stored is not None:
            slot, to, row = step.stored
            for rows in (self.k_rows, self.v_rows):
                rows[to, :, row] = rows[slot, :, : self.window.first_len].transpose(1, 2)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of append_rows for 16-bit rows."""
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
