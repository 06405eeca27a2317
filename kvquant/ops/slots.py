"""Slots and lengths of a layer's new tokens in one launch on CUDA, where nothing is read.

    torch.ops.kvquant.place_tokens    writes the lengths of a layer, lost and room

As a custom op of torch it is called inside torch.compile only, which takes it with fullgraph=True:
what it writes is declared, and it returns nothing. The meaning, which other devices and debug mode
take, is slots_of and LayerCache.set_lens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import debug
from ..rows.slots import Slots
from .dispatch import torch_op

PLACE_TOKENS = (
    "(Tensor(a!) seq_lens, Tensor(b!) packed_lens, Tensor(c!) exact_lens, Tensor(d!) starts, "
    "Tensor(e!)? seen_lens, Tensor(f!)? seen_starts, Tensor(g!)? firsts, int[] sizes, "
    "Tensor? new_lens, SymInt new_tokens, Tensor(h!) lost, Tensor(i!) room) -> ()"
)


class Lens(NamedTuple):
    """The lengths of a layer, [batch] int32 each; see LayerCache. The last three with a window."""

    seq_lens: torch.Tensor
    packed_lens: torch.Tensor
    exact_lens: torch.Tensor
    starts: torch.Tensor
    seen_lens: torch.Tensor | None = None
    seen_starts: torch.Tensor | None = None
    firsts: torch.Tensor | None = None


class Sizes(NamedTuple):
    """How the tokens of a layer are split; see LayerCache."""

    sink_len: int
    packed_len: int
    recent_len: int
    max_seq_len: int
    window: int  # 0: none


class Placed(NamedTuple):
    """Where tokens go, and the lengths before them.

    Attributes:
        slots: of batch * new_tokens tokens.
        room: [3, batch * new_tokens + batch], int64: slots, and the lengths.
    """

    slots: Slots
    room: torch.Tensor

    @property
    def before(self) -> torch.Tensor:
        """[3, batch], int64: seq_lens, packed_lens and, with a window, firsts as they were."""
        return self.room[:, self.slots.packed.shape[0] :]


def takes_one_launch(lens: torch.Tensor, recorded: bool) -> bool:
    """Whether tokens are placed by place_tokens: the lengths are on CUDA and not to be read.

    Args:
        lens: of a layer.
        recorded: what debug.is_recorded says of them.
    """
    return lens.is_cuda and (recorded or not debug.enabled)


def place_tokens(
    lens: Lens,
    sizes: Sizes,
    new_lens: torch.Tensor | None,
    new_tokens: int,
    overflow: torch.Tensor,
) -> Placed:
    """Find the slots of new tokens, and set the lengths to those after them.

    Args:
        lens: set in place.
        sizes: of the layer.
        new_lens: [batch], int32 or int64, how many of the new_tokens belong to each sequence,
            taken as 0 to new_tokens; all when None.
        new_tokens: new tokens per sequence, 1 or more.
        lost: [1], int32: tokens beyond max_seq_len, which get no slots, are added to it.

    Raises:
        UnsupportedError: the GPU is too old, or what is installed cannot do it.
        DeviceError: CUDA refuses the launch.
    """
    batch, device = lens.seq_lens.shape[0], lens.seq_lens.device
    num_tokens = batch * new_tokens
    room = torch.empty(3, num_tokens + batch, dtype=torch.int64, device=device)
    if torch.compiler.is_compiling():
        place_tokens_op(*lens, sizes, new_lens, new_tokens, overflow, room)
    else:
        _launcher()(lens, sizes, new_lens, new_tokens, overflow, room)
    packed, exact, evicted = room[:, :num_tokens].unbind()
    has_exact = sizes.sink_len + sizes.recent_len > 0
    slots = Slots(packed, exact, evicted) if has_exact else Slots(packed)
    return Placed(slots, room)


@functools.cache
def _launcher() -> Callable[..., None]:
    from ..kernels.cuda.slots.launch import place_tokens

    return place_tokens


def _place(
    seq_lens: torch.Tensor,
    packed_lens: torch.Tensor,
    exact_lens: torch.Tensor,
    starts: torch.Tensor,
    seen_lens: torch.Tensor | None,
    seen_starts: torch.Tensor | None,
    firsts: torch.Tensor | None,
    sizes: list[int],
    new_lens: torch.Tensor | None,
    new_tokens: int,
    overflow: torch.Tensor,
    room: torch.Tensor,
) -> None:
    lens = Lens(seq_lens, packed_lens, exact_lens, starts, seen_lens, seen_starts, firsts)
    _launcher()(lens, Sizes(*sizes), new_lens, new_tokens, overflow, room)


place_tokens_op = torch_op("place_tokens", PLACE_TOKENS, _place, lambda *args: None)
