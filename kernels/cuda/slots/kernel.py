"""Place the new tokens of a layer: the slot of each, and the lengths after them, in place.

grid    a sequence each; its threads take tokens in turn

    room    packed   of every token   | seq_lens before
            exact                     | packed_lens before
            evicted                   | firsts before
"""

from numba import cuda, int32, int64, uint32, uint64

from ..device.jit import device_function
from ..device.ptx import (
    atomic_add,
    begin_next_launch,
    load_global_u64,
    load_written_u32,
    store_global_u32,
    store_global_u32x2,
)


@device_function
def length_at(lens, sequence):
    """lens[sequence] of int32, which this kernel may write later."""
    return int32(load_written_u32(lens + uint64(4) * uint64(sequence)))


@device_function
def set_length(lens, sequence, length):
    store_global_u32(lens + uint64(4) * uint64(sequence), uint32(length))


@device_function
def set_slot(slots, place, slot):
    bits = uint64(slot)
    low, high = uint32(bits & uint64(0xFFFFFFFF)), uint32(bits >> uint64(32))
    store_global_u32x2(slots + uint64(8) * uint64(place), low, high)


@device_function
def row_of(sequence, count, row):
    """The slot of a row where each sequence has so many."""
    return int64(sequence) * int64(count) + int64(row)


def make_slots_kernel(spec):
    THREADS, OVERLAPPED = spec.threads, spec.overlapped

    # fmt: off
    def place_tokens(seq_lens, packed_lens, exact_lens, starts, exact_firsts, seen_lens,
                     seen_starts, firsts, new_lens, overflow, room, new_lens_step, new_lens_bytes,
                     new_tokens, sink_len, packed_len, recent_len, ring_len, max_seq_len, window,
                     batch):
        # fmt: on
        thread, sequence = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        if OVERLAPPED:
            begin_next_launch()

        # Step 1: the lengths before, and after
        old = length_at(seq_lens, sequence)
        first = length_at(packed_lens, sequence)
        wanted = new_tokens
        if new_lens != uint64(0):
            at = new_lens + new_lens_step * uint64(sequence)
            if new_lens_bytes == int32(8):
                given = int64(load_global_u64(at))
            else:
                given = int64(int32(load_written_u32(at)))
            wanted = int32(min(max(given, int64(0)), int64(new_tokens)))
        count = min(wanted, int32(max_seq_len - old))
        after = int32(old + count)
        behind = int32(after - sink_len)  # tokens after the sinks
        last = max(first, int32(behind - recent_len))
        page, ring = max(packed_len, int32(1)), max(ring_len, int32(1))
        oldest = int32(behind - packed_len) if window != int32(0) else int32(0)

        # Step 2: the slots
        num_places = int64(batch) * int64(new_tokens) + int64(batch)
        exact = room + uint64(8) * uint64(num_places)
        evicted = exact + uint64(8) * uint64(num_places)
        exact_len = int32(sink_len + ring_len)
        for offset in range(thread, new_tokens, THREADS):
            offset = int32(offset)
            index = int32(old + offset - sink_len)  # among the tokens after the sinks
            packed_slot = exact_slot = int64(-1)
            if offset < count:
                if index < int32(0):
                    exact_slot = row_of(sequence, exact_len, index + sink_len)
                else:
                    # no room for those before them
                    if packed_len != int32(0) and index >= oldest:
                        packed_slot = row_of(sequence, page, index % page)
                    if index >= int32(behind - ring_len):
                        exact_slot = row_of(sequence, exact_len, sink_len + index % ring)
            place = row_of(sequence, new_tokens, offset)
            set_slot(room, place, packed_slot)
            set_slot(exact, place, exact_slot)
            set_slot(evicted, place, int64(-1))

        # Step 3: the lengths
        cuda.syncthreads()
        if thread != int32(0):
            return
        place = num_places - int64(batch) + int64(sequence)
        set_slot(room, place, int64(old))
        set_slot(exact, place, int64(first))
        set_length(seq_lens, sequence, after)
        set_length(packed_lens, sequence, last)
        set_length(exact_lens, sequence, after - last)
        set_length(starts, sequence, last % ring)
        kept = max(length_at(exact_firsts, sequence), int32(behind - ring_len))
        set_length(exact_firsts, sequence, kept)
        if window != int32(0):
            before = length_at(firsts, sequence)
            set_slot(evicted, place, int64(before))
            seen = max(int32(after - window), int32(0))
            set_length(seen_lens, sequence, max(int32(last - seen), int32(0)))
            set_length(seen_starts, sequence, seen % page)
            set_length(firsts, sequence, max(before, oldest))
        if wanted > count:
            atomic_add(overflow, uint32(wanted - count))

    return place_tokens
