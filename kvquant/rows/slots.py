"""Slots: where the rows of new tokens go.

    packed slot = page * page_size + place in the page     (a contiguous cache: page = sequence)
    exact slot  = sequence slot * exact_len + row          (the 16-bit rows: sinks, then a ring)

A token goes to the sinks, into the ring, or, if as many or more follow in the same call, straight
into the packed rows. A token written into the ring takes the row of one that leaves it (if that was
not packed before), which is quantized from its 16-bit values:

    evicted    exact row now at the token's exact slot  ->  packed slot
    exact      the new token, in 16 bit                 ->  exact slot

A negative slot is none. Everything is computed where the lengths are, without waiting for a GPU.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from .. import debug
from ..arguments import check_flag, check_readable, check_size
from ..errors import ConfigError, ShapeError


class Slots(NamedTuple):
    """Where each new token goes; [num_tokens] int64 each, contiguous, negative: nowhere.

    Attributes:
        packed: slot of the token in the packed rows; ignored where it has an exact slot.
        exact: slot of the token in the 16-bit rows; None where there are none of these.
        leaving: packed slot of the row that stands at the token's exact slot before the call.
    """

    packed: torch.Tensor
    exact: torch.Tensor | None = None
    evicted: torch.Tensor | None = None


def packed_lens_after(
    seq_lens: torch.Tensor, packed_lens: torch.Tensor, sink_len: int, recent_len: int
) -> torch.Tensor:
    """Packed tokens once sequences have grown: what is behind the sinks and left the window.

    Args:
        seq_lens: [batch], tokens after the append.
        packed_lens: [batch], packed tokens before it.
        sink_len, recent_len: first and last tokens kept in 16 bit.

    Returns:
        [batch], the dtype of packed_lens.
    """
    return torch.maximum(packed_lens, seq_lens - (sink_len + recent_len)).to(packed_lens.dtype)


def slots_of(
    seq_lens: torch.Tensor,
    packed_lens: torch.Tensor,
    new_lens: torch.Tensor | None,
    new_tokens: int,
    page_size: int,
    *,
    sink_len: int = 0,
    recent_len: int = 0,
    block_table: torch.Tensor | None = None,
    seq_slots: torch.Tensor | None = None,
    ring: bool = False,
) -> Slots:
    """Find the slots of new tokens given as [batch, new_tokens], flattened.

    K and V of the batch form [batch, num_kv_heads, new_tokens, head_dim] are put into the order of
    the slots by k.transpose(1, 2).flatten(0, 1).

    Args:
        seq_lens: [batch], int32 or int64, tokens of each sequence before the append.
        packed_lens: [batch], how many of them are packed (see packed_lens_after).
        new_lens: [batch], how many of the new_tokens, the first ones, belong to each sequence; the
            others get no slots. None: all.
        new_tokens: new tokens per sequence.
        page_size: rows in a page; without pages the rows that a sequence has room for.
        sink_len: first tokens of each sequence, in rows 0 to sink_len of its 16-bit rows.
        recent_len: last tokens of each sequence, in a ring of as many rows behind them.
        block_table: [batch, max_pages], int32: the pages of each sequence. None: page b alone.
        seq_slots: [batch]: the sequence slot of each sequence among the 16-bit rows. None: sequence
            slot b.
        ring: whether packed rows, without pages, go round: a token takes the place of the one
            page_size tokens before it.

    Returns:
        Slots of batch * new_tokens tokens, on the device of seq_lens; only packed ones if sink_len
        and recent_len are 0.

    Raises:
        ShapeError: the tensors are not of the same sequences, or a length, page or sequence slot
            cannot be (their values are looked at on the CPU, and in debug mode).
        ConfigError: a size or a dtype that is not possible.
    """
    _check_tensors(seq_lens, packed_lens, new_lens, block_table, seq_slots)
    check_flag("ring", ring)
    if not torch.compiler.is_compiling():
        sizes = {"new_tokens": new_tokens, "sink_len": sink_len, "recent_len": recent_len}
        for name, size in sizes.items():
            check_size(name, size)
        check_size("page_size", page_size, at_least=1)
        if _are_on_cpu(seq_lens, packed_lens, new_lens, block_table, seq_slots):
            try:
                found = _cpu().find_slots(
                    seq_lens,
                    packed_lens,
                    new_lens,
                    new_tokens,
                    page_size,
                    sink_len,
                    recent_len,
                    block_table,
                    seq_slots,
                    ring,
                )
            except RuntimeError:  # of torch; looked at only now: it takes time
                lens = {"seq_lens": seq_lens, "packed_lens": packed_lens, "new_lens": new_lens}
                given = {**lens, "block_table": block_table, "seq_slots": seq_slots}
                check_readable(**{name: x for name, x in given.items() if x is not None})
                raise
            if found is not None:  # else it is told below what is not possible
                return Slots(*found)
    if debug.may_read(seq_lens):
        _check_lens(seq_lens, packed_lens, new_lens, new_tokens, sink_len, recent_len)
    offsets = torch.arange(new_tokens, device=seq_lens.device)
    old_lens, first = seq_lens.long()[:, None], packed_lens.long()[:, None]
    new_lens = torch.full_like(seq_lens, new_tokens) if new_lens is None else new_lens
    is_new = offsets < new_lens[:, None]
    seq_lens_after = old_lens + is_new.sum(1, keepdim=True)
    last = packed_lens_after(seq_lens_after, first, sink_len, recent_len)
    if debug.may_read(seq_lens):
        if not ring:
            _check_room(last[:, 0], page_size, block_table)
        _check_places(last[:, 0], page_size, block_table, seq_slots)

    index = old_lens + offsets - sink_len  # among the tokens behind the sinks
    is_packed = is_new & (index >= 0) & (index < last)
    oldest = last - page_size if ring else torch.zeros_like(last)  # no room for those before it
    packed = _packed_slots(index, is_packed & (index >= oldest), page_size, block_table)
    exact_len = sink_len + recent_len
    if not exact_len:
        return Slots(packed.flatten())
    is_exact = is_new & ~is_packed
    seq_slot = (
        torch.arange(len(seq_lens), device=seq_lens.device)
        if seq_slots is None
        else seq_slots.long()
    )
    row = torch.where(index < 0, index, index % max(recent_len, 1)) + sink_len
    exact = torch.where(is_exact, seq_slot[:, None] * exact_len + row, -1)
    leaver = first + (index - first) % max(recent_len, 1)  # that may stand in the same row
    leaves = is_exact & (index >= 0) & (leaver < old_lens - sink_len) & (leaver >= oldest)
    evicted = _packed_slots(leaver, leaves, page_size, block_table)
    return Slots(packed.flatten(), exact.flatten(), evicted.flatten())


def check_slots(slots: Slots, num_packed: int, num_exact: int) -> None:
    """Raise unless every slot exists and none is written twice; values are read.

    Args:
        slots: of [num_tokens].
        num_packed: packed rows that there are.
        num_exact: 16-bit rows that there are.

    Raises:
        ShapeError: which token has what instead.
    """
    packed, exact, evicted = slots
    if _are_on_cpu(*slots) and _cpu().are_possible(slots, num_packed, num_exact):
        return
    if exact is not None and evicted is not None:
        _check_targets("slots.exact", exact, num_exact)
        packed = packed.masked_fill(exact >= 0, -1)
        unpaired = (evicted >= 0) & (exact < 0)
        if bool(unpaired.any()):
            token = int(unpaired.nonzero()[0])
            raise ShapeError(
                f"slots.evicted[{token}] is {int(evicted[token])}, but slots.exact[{token}] is "
                f"{int(exact[token])}: give the exact slot of the row that leaves"
            )
    _check_targets("slots.packed", packed, num_packed)
    if evicted is not None:
        _check_targets("slots.evicted", evicted, num_packed)
        _check_targets("slots.packed and slots.evicted", torch.cat([packed, evicted]), num_packed)


def check_existing(name: str, slots: torch.Tensor, count: int) -> None:
    """Raise unless slots are less than count; values are read; error as of check_slots."""
    if slots.numel() and int(slots.max()) >= count:
        token = int((slots >= count).nonzero()[0])
        raise ShapeError(
            f"{name}[{token}] is {int(slots[token])}: there are slots 0 to {count - 1}, and "
            "negative ones for none"
        )


def _are_on_cpu(*tensors: torch.Tensor | None) -> bool:
    return all(tensor is None or tensor.is_cpu for tensor in tensors)


@functools.cache
def _cpu() -> ModuleType:
    from ..kernels.cpu import slots

    return slots


def _packed_slots(
    index: torch.Tensor, chosen: torch.Tensor, page_size: int, block_table: torch.Tensor | None
) -> torch.Tensor:
    """Packed slots of the tokens index [batch, new_tokens] behind the sinks; -1 if not chosen."""
    if block_table is None:
        page = torch.arange(len(index), device=index.device)[:, None]
        return torch.where(chosen, page * page_size + index % page_size, -1)
    index = torch.where(chosen, index, 0)
    page = block_table.long().gather(1, index // page_size)
    return torch.where(chosen, page * page_size + index % page_size, -1)


def _check_tensors(
    seq_lens: torch.Tensor,
    packed_lens: torch.Tensor,
    new_lens: torch.Tensor | None,
    block_table: torch.Tensor | None,
    seq_slots: torch.Tensor | None,
) -> None:
    """Raise unless all are whole numbers of the same sequences."""
    batch = seq_lens.shape if isinstance(seq_lens, torch.Tensor) else torch.Size()
    for name, tensor, ndim in (
        ("seq_lens", seq_lens, 1),
        ("packed_lens", packed_lens, 1),
        ("new_lens", new_lens, 1),
        ("block_table", block_table, 2),
        ("seq_slots", seq_slots, 1),
    ):
        if tensor is None and name in ("new_lens", "block_table", "seq_slots"):
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.int32, torch.int64):
            is_ = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ConfigError(f"{name} is {is_}: use a tensor, torch.int32 or torch.int64")
        if tensor.ndim != ndim or tensor.shape[:1] != batch:
            must = "[batch]" if ndim == 1 else "[batch, max_pages]"
            raise ShapeError(
                f"{name} is {list(tensor.shape)}, seq_lens {list(batch)}: it must be {must}"
            )


def _check_lens(
    seq_lens: torch.Tensor,
    packed_lens: torch.Tensor,
    new_lens: torch.Tensor | None,
    new_tokens: int,
    sink_len: int,
    recent_len: int,
) -> None:
    """Raise unless the sequences can have these lengths; values are read."""
    lens, packed = seq_lens.cpu().numpy(), packed_lens.cpu().numpy()  # small: torch takes longer
    most = (lens - sink_len).clip(0)
    least = (most - recent_len).clip(0)
    bad = (lens < 0) | (packed < least) | (packed > most)
    if bad.any():
        sequence = int(bad.argmax())
        raise ShapeError(
            f"sequence {sequence} has {lens[sequence]} tokens, "
            f"{packed[sequence]} of them packed: with {sink_len} sinks and "
            f"{recent_len} recent tokens it must be {least[sequence]} to "
            f"{most[sequence]} (see packed_lens_after)"
        )
    if new_lens is not None and bool(((new_lens < 0) | (new_lens > new_tokens)).any()):
        raise ShapeError(f"new_lens is {new_lens.tolist()}: give [batch] of 0 to {new_tokens}")


def _check_places(
    packed_lens: torch.Tensor,
    page_size: int,
    block_table: torch.Tensor | None,
    seq_slots: torch.Tensor | None,
) -> None:
    """Raise unless pages in use and sequence slots are such; values are read."""
    if block_table is not None:
        at = torch.arange(block_table.shape[1], device=block_table.device) * page_size
        if bool(((block_table < 0) & (at < packed_lens[:, None])).any()):
            raise ShapeError(
                "block_table has a page below 0 where there are tokens: pages are >= 0"
            )
    if seq_slots is not None and bool((seq_slots < 0).any()):
        raise ShapeError(f"seq_slots is {seq_slots.tolist()}: sequence slots are 0 and more")


def _check_room(
    packed_lens: torch.Tensor, page_size: int, block_table: torch.Tensor | None
) -> None:
    room = page_size * (1 if block_table is None else block_table.shape[1])
    over = packed_lens > room
    if bool(over.any()):
        sequence = int(over.nonzero()[0])
        raise ShapeError(
            f"sequence {sequence} would have {int(packed_lens[sequence])} packed tokens: there is "
            f"room for {room}. Give it more pages, or crop it"
        )


def _check_targets(name: str, slots: torch.Tensor, count: int) -> None:
    """slots: less than count, and no two alike but the negative ones."""
    check_existing(name, slots, count)
    numbers = slots.cpu().numpy()
    used = np.sort(numbers[numbers >= 0])
    twice = used[1:] == used[:-1]
    if twice.any():
        slot = used[1:][twice][0]
        tokens = np.flatnonzero(numbers == slot)
        raise ShapeError(
            f"slot {slot} is given twice in {name} (places {tokens[0]} and {tokens[1]}): one call "
            "writes a row once"
        )
