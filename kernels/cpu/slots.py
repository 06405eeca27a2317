"""Slots of new tokens on the CPU, by kvquant/rows/slots.py, and whether slots are all different.

It finds that something is not possible; kvquant/ops/slots.py says what. place_tokens advances the
lengths of a layer, too: see kernels/cuda/slots/kernel.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numba
import numpy as np
import torch

from kvquant.rows.arguments import MAX_LENGTH, address
from kvquant.rows.slots import SlotsCall

from .compile import compile_kernel, compiled
from .parallel import run
from .simd import argument, load_int32, store_int, store_int32

# the arguments of the kernel that places tokens: addresses, as of kernels/cuda/slots/launch.py
(
    SEQ_LENS,
    PACKED_LENS,
    EXACT_LENS,
    STARTS,
    EXACT_FIRSTS,
    SEEN_LENS,
    SEEN_STARTS,
    FIRSTS,
    NEW_LENS,
    OVERFLOW,
    ROOM,
    SINK_LEN,
    PACKED_LEN,
    RECENT_LEN,
    RING_LEN,
    MAX_SEQ_LEN,
    WINDOW,
    NEW_TOKENS,
    BATCH,
) = range(19)
NONE = -1
NO_PAGES = np.empty((0, 0), np.int64)
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / the golden ratio: spreads what is regular


def find_slots(call: SlotsCall) -> Sequence[torch.Tensor] | None:
    """The tensors that slots.slots_of gives, in a tenth of the time; None if it is to raise."""
    seq_lens, packed_lens, new_lens, new_tokens, page_size, sink_len, recent_len = call[:7]
    block_table, seq_slots = call[7:]
    batch, new_tokens = len(seq_lens), int(new_tokens)
    lens = np.empty((4, batch), np.int64)
    lens[0], lens[1] = seq_lens.numpy(), packed_lens.numpy()
    lens[2] = new_tokens if new_lens is None else new_lens.numpy()
    lens[3] = np.arange(batch) if seq_slots is None else seq_slots.numpy()
    table = NO_PAGES if block_table is None else block_table.numpy().astype(np.int64, "C")
    sizes = new_tokens, int(page_size), int(sink_len), int(recent_len)  # of one type each
    slots = np.empty((3 if sink_len + recent_len else 1, batch * new_tokens), np.int64)
    if not _fill(lens, table, *sizes, slots):
        return None
    return torch.from_numpy(slots).unbind()


def are_possible(
    slots: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    num_packed: int,
    num_exact: int,
) -> bool:
    """Whether slots.check_slots has nothing to raise."""
    packed, exact, evicted = slots
    used = [packed] if exact is None or evicted is None else [packed, exact, evicted]
    numbers = np.empty((len(used), len(packed)), np.int64)
    for i, tensor in enumerate(used):
        numbers[i] = tensor.numpy()
    possible: bool = _are_possible(numbers, num_packed, num_exact)
    return possible


def place_tokens(
    lens: Sequence[torch.Tensor | None],
    sizes: Sequence[int],
    new_lens: torch.Tensor | None,
    new_tokens: int,
    overflow: torch.Tensor,
    room: torch.Tensor,
) -> None:
    """Write slots to room, and lengths in place; as kernels/cuda/slots/launch.py."""
    if new_lens is not None:
        new_lens = new_lens.long().contiguous()
    stay, numbers = bind_place(lens, sizes, new_tokens, room, new_lens)
    for place, tensor in (stay | {OVERFLOW: overflow}).items():
        numbers[place] = address(tensor)
    run(make_place_kernel(), np.array(numbers), numbers[BATCH], parallel=False)


def bind_place(
    lens: Sequence[torch.Tensor | None],
    sizes: Sequence[int],
    new_tokens: int,
    room: torch.Tensor,
    new_lens: torch.Tensor | None = None,
) -> tuple[dict[int, torch.Tensor], list[int]]:
    """What the kernel takes for a layer and a number of tokens: tensors by their places, and
    numbers; the address of overflow is missing."""
    batch, given = room.shape[1] // (new_tokens + 1), (*lens, new_lens, None, room)
    stay = {place: one for place, one in enumerate(given) if one is not None}
    return stay, [*[0] * len(given), *sizes, new_tokens, batch]


@functools.cache
def make_place_kernel():
    """The kernel; item: a sequence."""

    def place_kernel(args, b):
        seq_lens, packed_lens = argument(args, SEQ_LENS), argument(args, PACKED_LENS)
        sink_len, packed_len = argument(args, SINK_LEN), argument(args, PACKED_LEN)
        ring_len, window = argument(args, RING_LEN), argument(args, WINDOW)
        new_tokens, batch = argument(args, NEW_TOKENS), argument(args, BATCH)
        room, overflow, at = argument(args, ROOM), argument(args, OVERFLOW), 4 * b
        # Step 1: the lengths before, and after
        old, first, wanted = load_int32(seq_lens + at), load_int32(packed_lens + at), new_tokens
        if argument(args, NEW_LENS) != 0:
            wanted = min(max(argument(argument(args, NEW_LENS), b), 0), new_tokens)
        count = min(wanted, argument(args, MAX_SEQ_LEN) - old)
        after = old + count
        behind = after - sink_len  # tokens behind the sinks
        last = max(first, behind - argument(args, RECENT_LEN))
        page, ring = max(packed_len, 1), max(ring_len, 1)
        oldest = behind - packed_len if window != 0 else 0
        # Step 2: the slots
        num_places = batch * (new_tokens + 1)
        for offset in range(new_tokens):
            index = old + offset - sink_len  # among the tokens behind the sinks
            packed = exact = -1
            if offset < count:
                row = sink_len + index
                if index >= 0:
                    row = sink_len + index % ring
                    if packed_len != 0 and index >= oldest:  # no room for those before them
                        packed = b * page + index % page
                if index < 0 or index >= behind - ring_len:
                    exact = b * (sink_len + ring_len) + row
            place = room + 8 * (b * new_tokens + offset)
            store_int(place, packed)
            store_int(place + 8 * num_places, exact)
            store_int(place + 16 * num_places, -1)
        # Step 3: the lengths
        place = room + 8 * (num_places - batch + b)
        store_int(place, old)
        store_int(place + 8 * num_places, first)
        store_int32(seq_lens + at, after)
        store_int32(packed_lens + at, last)
        store_int32(argument(args, EXACT_LENS) + at, after - last)
        store_int32(argument(args, STARTS) + at, last % ring)
        kept = argument(args, EXACT_FIRSTS) + at
        store_int32(kept, max(load_int32(kept), behind - ring_len))
        if window != 0:
            firsts, seen = argument(args, FIRSTS) + at, max(after - window, 0)
            before = load_int32(firsts)
            store_int(place + 16 * num_places, before)
            store_int32(argument(args, SEEN_LENS) + at, max(last - seen, 0))
            store_int32(argument(args, SEEN_STARTS) + at, seen % page)
            store_int32(firsts, max(before, oldest))
        store_int32(overflow, load_int32(overflow) + wanted - count)

    return compile_kernel(place_kernel)


@compiled
def _fill(
    lens,  # [4, batch]: seq_lens, packed_lens, new_lens, sequence slots
    table,  # [batch, max_pages], or [0, 0]: no pages
    new_tokens,
    page_size,
    sink_len,
    recent_len,
    slots,  # [3, batch * new_tokens]: packed, exact, evicted; without 16-bit rows [1, ...]
):
    """Fill slots; False if something is not possible."""
    slots[:] = NONE
    paged, exact_len = table.shape[0] > 0, sink_len + recent_len
    room = page_size * table.shape[1] if paged else page_size
    for b in range(lens.shape[1]):
        old, first, new, seq_slot = lens[0, b], lens[1, b], lens[2, b], lens[3, b]
        most = max(old - sink_len, 0)
        if not 0 <= old <= MAX_LENGTH or not max(most - recent_len, 0) <= first <= most:
            return False
        if not 0 <= new <= new_tokens or not 0 <= seq_slot <= MAX_LENGTH:
            return False
        last = max(first, old + new - exact_len)
        if last > room:
            return False
        for page in range((last + page_size - 1) // page_size if paged else 0):
            if not 0 <= table[b, page] <= MAX_LENGTH:
                return False
        for i in range(new):
            token, index = b * new_tokens + i, old - sink_len + i
            if 0 <= index < last:
                slots[0, token] = _packed_slot(table, paged, b, index, page_size)
            if index < 0:
                slots[1, token] = seq_slot * exact_len + sink_len + index
            elif index >= last:
                slots[1, token] = seq_slot * exact_len + sink_len + index % recent_len
                leaver = first + (index - first) % recent_len
                if leaver < old - sink_len:
                    slots[2, token] = _packed_slot(table, paged, b, leaver, page_size)
    return True


@numba.njit(nogil=True)
def _packed_slot(table, paged, b, index, page_size):
    """The slot of a packed token of sequence b."""
    page = table[b, index // page_size] if paged else b
    return page * page_size + index % page_size


@compiled
def _are_possible(
    slots,  # [3, num_tokens]: packed, exact, evicted; without 16-bit rows [1, num_tokens]
    num_packed,
    num_exact,
):
    """Whether all exist and none is written twice, by a hash table of those that were seen."""
    bits = 2
    while 1 << bits < 2 * slots.shape[1]:
        bits += 1
    seen = np.full((2, 1 << bits), NONE)  # packed, exact
    for token in range(slots.shape[1]):
        packed = slots[0, token]
        if slots.shape[0] > 1:
            exact, evicted = slots[1, token], slots[2, token]
            if exact < 0 and evicted >= 0:
                return False
            if evicted >= 0:
                packed = evicted
            if exact >= 0 and (exact >= num_exact or _was_seen(seen[1], exact)):
                return False
        if packed >= num_packed or (packed >= 0 and _was_seen(seen[0], packed)):
            return False
    return True


@numba.njit(nogil=True)
def _was_seen(seen, slot):
    """Whether a slot is in the table; now it is."""
    last = len(seen) - 1
    place = np.int64(np.uint64(slot) * MULTIPLIER >> np.uint64(24)) & last
    while seen[place] != NONE:
        if seen[place] == slot:
            return True
        place = (place + 1) & last
    seen[place] = slot
    return False
