"""Slots of new tokens, found and checked; of a layer in one launch, with its lengths.

Under torch.compile only, torch.ops.kvquant.place_tokens writes the lengths of a layer, lost and
room, and reads nothing on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from .. import debug
from ..errors import ShapeError
from ..rehearsal import is_rehearsed
from ..rows.arguments import INTEGERS, MAX_LENGTH, check_readable, check_size, check_tensor
from ..rows.slots import Slots, SlotsCall, Split, reference_slots
from .dispatch import WRONG_TYPES, kernels_for, torch_op

if TYPE_CHECKING:
    from ..kernels.cuda.runtime.launch import Launch

PLACE_TOKENS = (
    "(Tensor(a!) seq_lens, Tensor(b!) packed_lens, Tensor(c!) exact_lens, Tensor(d!) starts, "
    "Tensor(e!) exact_firsts, Tensor(f!)? seen_lens, Tensor(g!)? seen_starts, "
    "Tensor(h!)? firsts, int[] sizes, Tensor? new_lens, SymInt new_tokens, Tensor(i!) lost, "
    "Tensor(j!) room) -> ()"
)


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
) -> Slots:
    """Find the slots of new tokens given as [batch, new_tokens], flattened.

    K and V of the batch form [batch, num_kv_heads, new_tokens, head_dim] are put into the order of
    the slots by k.transpose(1, 2).flatten(0, 1).

    Args:
        seq_lens: [batch], int32 or int64, tokens of each sequence before the append.
        packed_lens: [batch], how many of them are packed (see Split.packed_lens).
        new_lens: [batch], how many of new_tokens, the first ones, belong to each sequence; all
            when None.
        new_tokens: new tokens per sequence.
        page_size: rows in a page; without pages the rows that a sequence has room for.
        sink_len: first tokens of each sequence, in rows 0 to sink_len of its 16-bit rows.
        recent_len: last tokens of each sequence, in a ring of as many rows after them.
        block_table: [batch, max_pages], int32: the pages of each sequence. None: page b alone.
        seq_slots: [batch]: each sequence's slot among the 16-bit rows. None: sequence slot b.

    Returns:
        Slots of batch * new_tokens tokens, on the device of seq_lens; packed ones only without
        16-bit rows.

    Raises:
        ShapeError: the tensors are not of the same sequences, or a length, page or sequence
            slot is impossible (read on the CPU, and in debug mode).
        ConfigError: a size or a dtype that is not possible.

    Example:
        >>> import torch
        >>> from kvquant import slots_of
        >>> lens = torch.tensor([5, 9], dtype=torch.int32)  # of two sequences, all of it packed
        >>> slots_of(lens, lens, None, 2, 64).packed  # 2 new tokens each, room for 64
        tensor([ 5,  6, 73, 74])
    """
    sizes = new_tokens, page_size, sink_len, recent_len
    call = SlotsCall(seq_lens, packed_lens, new_lens, *sizes, block_table, seq_slots)
    _check_tensors(call)
    if not torch.compiler.is_compiling():
        for name in ("new_tokens", "sink_len", "recent_len"):
            check_size(name, getattr(call, name))
        check_size("page_size", page_size, at_least=1)
    try:
        return _find_slots(call)
    except WRONG_TYPES:
        check_readable(**{name: x for name, x in call.tensors.items() if x is not None})
        raise


def _find_slots(call: SlotsCall) -> Slots:
    if not torch.compiler.is_compiling() and _are_on_cpu(call.tensors.values()):
        found = _cpu().find_slots(call)
        if found is not None:  # else the checks below say what is not possible
            return Slots(*found)
    if debug.may_read(call.seq_lens):
        _check_lens(call)
        new = call.new_tokens if call.new_lens is None else call.new_lens
        tokens = Split(call.sink_len, call.recent_len, call.page_size)
        last = tokens.packed_lens(call.seq_lens.long() + new, call.packed_lens.long())
        _check_places(last, call)
    return reference_slots(call)


def check_slots(slots: Slots, num_packed: int, num_exact: int) -> None:
    """Raise ShapeError unless every slot exists and none is written twice; reads values."""
    packed, exact, evicted = slots
    if _are_on_cpu(slots) and _cpu().are_possible(slots, num_packed, num_exact):
        return
    if exact is not None and evicted is not None:
        _check_targets("slots.exact", exact, num_exact)
        packed = packed.masked_fill(evicted >= 0, -1)
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
    """Raise ShapeError unless slots are less than count; values are read."""
    if slots.numel() and int(slots.max()) >= count:
        token = int((slots >= count).nonzero()[0])
        raise ShapeError(
            f"{name}[{token}] is {int(slots[token])}: there are slots 0 to {count - 1}, and "
            "negative ones for none"
        )


def _are_on_cpu(tensors: Iterable[torch.Tensor | None]) -> bool:
    for tensor in tensors:
        if tensor is not None and not tensor.is_cpu:
            return False
    return True


@functools.cache
def _cpu() -> ModuleType:
    from ..kernels.cpu import slots

    return slots


def _check_tensors(call: SlotsCall) -> None:
    """Raise unless all tensors are whole numbers of the same sequences."""
    check_tensor("seq_lens", call.seq_lens, INTEGERS, ("batch",))
    batch = call.seq_lens.shape
    for name, tensor in call.tensors.items():
        ndim = 2 if name == "block_table" else 1
        if tensor is None and name in ("new_lens", "block_table", "seq_slots"):
            continue
        check_tensor(name, tensor, INTEGERS, (*batch, "max_pages")[:ndim])  # type: ignore[arg-type]


def _check_lens(call: SlotsCall) -> None:
    """Raise unless the sequences can have these lengths; reads values."""
    seq_lens, packed_lens, new_lens, new_tokens, _, sink_len, recent_len, *_ = call
    lens, packed = seq_lens.cpu().numpy(), packed_lens.cpu().numpy()  # small: torch takes longer
    bad = (lens < 0) | (lens > MAX_LENGTH)
    if bad.any():
        sequence = int(bad.argmax())
        raise ShapeError(
            f"sequence {sequence} has {lens[sequence]} tokens: lengths are 0 to {MAX_LENGTH}"
        )
    most = (lens - sink_len).clip(0)
    least = (most - recent_len).clip(0)
    bad = (packed < least) | (packed > most)
    if bad.any():
        sequence = int(bad.argmax())
        raise ShapeError(
            f"sequence {sequence} has {lens[sequence]} tokens, "
            f"{packed[sequence]} of them packed: with {sink_len} sinks and "
            f"{recent_len} recent tokens it must be {least[sequence]} to "
            f"{most[sequence]} (see Split.packed_lens)"
        )
    if new_lens is not None and bool(((new_lens < 0) | (new_lens > new_tokens)).any()):
        raise ShapeError(f"new_lens is {new_lens.tolist()}: give [batch] of 0 to {new_tokens}")


def _check_places(packed_lens: torch.Tensor, call: SlotsCall) -> None:
    """Raise unless packed tokens have room in pages that exist, as sequence slots; reads values."""
    page_size, block_table, seq_slots = call.page_size, call.block_table, call.seq_slots
    room = page_size * (1 if block_table is None else block_table.shape[1])
    over = packed_lens > room
    if bool(over.any()):
        sequence = int(over.nonzero()[0])
        raise ShapeError(
            f"sequence {sequence} would have {int(packed_lens[sequence])} packed tokens: there is "
            f"room for {room}. Give it more pages, or crop it"
        )
    if block_table is not None:
        at = torch.arange(block_table.shape[1], device=block_table.device) * page_size
        bad = (_is_no_place(block_table) & (at < packed_lens[:, None])).nonzero()
        if len(bad):
            sequence, entry = bad[0].tolist()
            raise ShapeError(
                f"block_table of sequence {sequence}, entry {entry}, is "
                f"{int(block_table[sequence, entry])}, where there are tokens: pages are 0 to "
                f"{MAX_LENGTH}"
            )
    if seq_slots is not None and bool(_is_no_place(seq_slots).any()):
        raise ShapeError(f"seq_slots is {seq_slots.tolist()}: sequence slots are 0 to {MAX_LENGTH}")


def _is_no_place(numbers: torch.Tensor) -> torch.Tensor:
    """Which numbers cannot be a page or a sequence slot: int64 must hold the slots."""
    return (numbers < 0) | (numbers > MAX_LENGTH)


def _check_targets(name: str, slots: torch.Tensor, count: int) -> None:
    """Raise unless slots are less than count and differ, but for negative ones."""
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


class Lens(NamedTuple):
    """The lengths of a layer, [batch] int32 each; see LayerCache. The last three with a window."""

    seq_lens: torch.Tensor
    packed_lens: torch.Tensor
    exact_lens: torch.Tensor
    starts: torch.Tensor
    exact_firsts: torch.Tensor
    seen_lens: torch.Tensor | None = None
    seen_starts: torch.Tensor | None = None
    firsts: torch.Tensor | None = None


class Sizes(NamedTuple):
    sink_len: int
    packed_len: int
    recent_len: int
    ring_len: int
    max_seq_len: int
    window: int  # 0: none


class Placed(NamedTuple):
    """Slots of new tokens, and `room`, int64: these slots and the lengths before the tokens."""

    slots: Slots
    room: torch.Tensor


def place_tokens(
    lens: Lens, sizes: Sizes, new_lens: torch.Tensor | None, new_tokens: int, overflow: torch.Tensor
) -> Placed:
    """Find the slots of new tokens, and advance the lengths in place.

    Args:
        new_lens: [batch], int32 or int64, clamped to 0 to new_tokens; all when None.
        overflow: [1], int32: adds the tokens beyond max_seq_len, which get no slots.

    It raises UnsupportedError without a kernel for the GPU, DeviceError if CUDA refuses.
    """
    batch, device = lens.seq_lens.shape[0], lens.seq_lens.device
    num_tokens = batch * new_tokens
    room = torch.empty(3, num_tokens + batch, dtype=torch.int64, device=device)
    if torch.compiler.is_compiling():
        place_tokens_op(*lens, sizes, new_lens, new_tokens, overflow, room)
    else:
        _launcher(room).place_tokens(lens, sizes, new_lens, new_tokens, overflow, room)
    packed, exact, evicted = room[:, :num_tokens].unbind()
    has_exact = sizes.sink_len + sizes.ring_len > 0
    slots = Slots(packed, exact, evicted) if has_exact else Slots(packed)
    return Placed(slots, room)


def bind_place(lens: Lens, sizes: Sizes, new_tokens: int, room: torch.Tensor) -> Launch | None:
    """place_tokens without new_lens, bound to a layer's tensors and room (see Placed).

    The launch takes the address of overflow. None on CUDA if there are no sequences.
    """
    bound: Launch | None = _launcher(room).bind_place(lens, sizes, new_tokens, room)
    return bound


def lens_before(room: torch.Tensor, batch: int) -> torch.Tensor:
    """[3, batch], int64: seq_lens, packed_lens and, with a window, firsts before tokens came."""
    return room[:, room.shape[1] - batch :]


def advance_window(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    state: Sequence[torch.Tensor],
    sizes: Mapping[str, int],
) -> bool:
    """Advance the slots of an engine's window (kvquant/engine/window.py) in one kernel, on CUDA.

    Returns:
        False where there is no kernel for it: nothing has changed.
    """
    if seq_lens.device.type != "cuda" and not is_rehearsed(seq_lens):
        return False
    from ..kernels.cuda.slots.window_launch import advance

    advance(block_table, seq_lens, starts, state, sizes)
    return True


def _launcher(room: torch.Tensor) -> ModuleType:
    return _cpu() if kernels_for(room, None) == "cpu" else _cuda()


@functools.cache
def _cuda() -> ModuleType:
    from ..kernels.cuda.slots import launch

    return launch


def _place(*args: Any) -> None:
    *lens, sizes, new_lens, new_tokens, overflow, room = args
    place = lens, Sizes(*sizes), new_lens, new_tokens, overflow, room
    _launcher(room).place_tokens(*place)


place_tokens_op = torch_op("place_tokens", PLACE_TOKENS, _place, lambda *args: None)
