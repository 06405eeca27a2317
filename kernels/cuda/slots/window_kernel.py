"""Advance the 16-bit slots of an engine's decoding sequences: see kvquant/engine/window.py.

grid    one block; its threads take sequences in turn

All numbers of the window are int64 and contiguous. Tickets are counted by steps.
"""

from numba import cuda, int32, int64, uint32, uint64

from ..device.jit import device_function
from ..device.ptx import (
    atomic_min,
    load_written_u32,
    load_written_u64,
)
from .kernel import length_at, set_length, set_slot

NONE = -1
LARGEST = 0xFFFFFFFF  # a rank that every other one is below


@device_function
def number_at(numbers, place):
    return int64(load_written_u64(numbers + uint64(8) * uint64(place)))


def make_window_kernel(spec):
    THREADS = spec.threads

    # fmt: off
    def advance(block_table, seq_lens, starts, steps, page_tickets, page_steps, first_slots,
                tickets, first_pages, ends, used, found, best, exact, table, counts, table_bytes,
                batch, places, width, max_pages, max_tokens, num_slots, page_size, recent_len,
                ring_len, rollback_len):
        # fmt: on
        thread = int32(cuda.threadIdx.x)
        now = number_at(steps, int32(0)) + int64(1)

        # Step 1: note the pages that new tokens are written to
        for i in range(thread, batch, THREADS):
            row = block_table + uint64(table_bytes) * uint64(i)
            new = int32(number_at(starts, i + int32(1)) - number_at(starts, i))
            past = length_at(seq_lens, i) - new
            for j in range(new):
                page = length_at(row, (past + int32(j)) // page_size)
                if page >= int32(0):
                    set_slot(page_steps, page, now)
        cuda.syncthreads()

        # Step 2: find the slot that each sequence had, and who may keep it
        for i in range(thread, batch, THREADS):
            row = block_table + uint64(table_bytes) * uint64(i)
            new = int32(number_at(starts, i + int32(1)) - number_at(starts, i))
            past = length_at(seq_lens, i) - new
            slot, rank = int64(0), int64(NONE)
            if new > int32(0) and past > int32(0):
                last = length_at(row, (past - int32(1)) // page_size)
                ticket = number_at(page_tickets, last) if last >= int32(0) else int64(NONE)
                if ticket >= int64(0):
                    slot = ticket % int64(num_slots)
                    lag = number_at(ends, slot) - int64(past)
                    is_old = past % page_size > int32(0) or number_at(page_steps, last) < now
                    if (is_old and int64(0) <= lag <= int64(rollback_len)
                            and number_at(tickets, slot) == ticket):
                        rank = lag * int64(batch) + int64(i)
                        atomic_min(best + uint64(4) * uint64(slot), uint32(rank))
            set_slot(found, i, slot)
            set_slot(found, places + i, rank)
        cuda.syncthreads()

        # Step 3: the slots and places of sequences and tokens
        for i in range(thread, places, THREADS):
            packed = length = int32(0)
            slot, has = int64(0), False
            if i < batch:
                row = block_table + uint64(table_bytes) * uint64(i)
                start = int32(number_at(starts, i))
                new = int32(number_at(starts, i + int32(1))) - start
                length = length_at(seq_lens, i) if new > int32(0) else int32(0)
                past, first = length - new, length_at(row, int32(0))
                slot, rank = number_at(found, i), number_at(found, places + i)
                if rank >= int64(0):
                    has = load_written_u32(best + uint64(4) * uint64(slot)) == uint32(rank)
                ticket = int64(NONE)
                if has:
                    ticket = number_at(tickets, slot)
                    if rank >= int64(batch):  # the sequence has lost tokens since
                        ticket = now * int64(num_slots) + slot
                    set_slot(tickets, slot, ticket)
                    set_slot(first_pages, slot, first)
                    set_slot(ends, slot, length)
                    set_slot(used, slot, now)
                elif new > int32(0) and past == int32(0) and first >= int32(0):
                    set_slot(first_slots, first, int64(NONE))
                for j in range(new):
                    position = past + int32(j)
                    is_first = position < page_size
                    kept = position
                    if not is_first:
                        kept = page_size + (position - page_size) % ring_len
                    place = int64(NONE)
                    if has and (is_first or new - int32(j) <= ring_len):
                        place = slot * int64(page_size + ring_len) + int64(kept)
                    set_slot(exact, start + int32(j), place)
                    page = length_at(row, position // page_size)
                    if page >= int32(0):
                        set_slot(page_tickets, page, ticket)
                packed = max(length - page_size - recent_len, int32(0)) if has else length
            set_length(counts, i, packed)
            set_length(counts, places + i, length - packed)
            set_length(counts, int32(2) * places + i, packed % ring_len)
            set_length(counts, int32(3) * places + i, int32(slot) if has else int32(0))
            set_slot(found, i, int64(1) if has else int64(0))
        total = int32(number_at(starts, batch))
        for i in range(total + thread, max_tokens, THREADS):
            set_slot(exact, i, int64(NONE))
        cuda.syncthreads()

        # Step 4: tables of packed rows, without the first page of sequences that have a slot
        for i in range(thread // int32(32), batch, THREADS // 32):  # a warp a sequence
            skipped = int32(number_at(found, i))
            filled = (length_at(seq_lens, i) + page_size - int32(1)) // page_size
            to = table + uint64(4) * uint64(int64(i) * int64(max_pages))
            row = block_table + uint64(table_bytes) * uint64(i)
            for column in range(thread % int32(32), min(filled, width) - skipped, 32):
                set_length(to, column, length_at(row, int32(column) + skipped))
        for i in range(thread, num_slots, THREADS):
            set_length(best, i, LARGEST)
        if thread == int32(0):
            set_slot(steps, int32(0), now)

    return advance
