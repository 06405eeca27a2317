"""Place the new tokens of a layer on CUDA, in one launch; see kvquant/ops/slots.py."""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence

import torch

from ..runtime.driver import Launcher
from ..runtime.launch import Tensors, current_stream, kernel_of, launch_on, settle
from .spec import PLACE, SlotSpec

ADDRESSES = 10
CONSTANTS = struct.Struct("=" + "".join(code for _, code in PLACE[ADDRESSES:]))
_settled: dict[Hashable, PlaceLaunch] = {}


def place_tokens(
    lens: Sequence[torch.Tensor | None],
    sizes: tuple[int, int, int, int, int],
    new_lens: torch.Tensor | None,
    new_tokens: int,
    overflow: torch.Tensor,
    room: torch.Tensor,
) -> None:
    """Write slots, and lengths in place, on the current stream.

    Args:
        lens: seq_lens, packed_lens, exact_lens, starts, seen_lens, seen_starts and firsts of
            LayerCache, [batch] int32, contiguous; the last three None without a window.
        sizes: its sink_len, packed_len, recent_len, max_seq_len and window, 0 for none.
        new_lens: [batch], int32 or int64, taken as 0 to new_tokens; new_tokens for all when None.
        new_tokens: new tokens per sequence, 1 or more.
        lost: [1], int32: tokens beyond max_seq_len, which get no slots, are added to it.
        room: [3, batch * new_tokens + batch], int64, contiguous: slots.Slots of the tokens, and
            behind them seq_lens, packed_lens and, with a window, firsts as they were.

    Raises:
        UnsupportedError: the GPU is too old.
        DeviceError: CUDA refuses the launch.
    """
    index, batch = room.get_device(), room.shape[1] // (new_tokens + 1)
    kind = (0, 0) if new_lens is None else (new_lens.stride(0), new_lens.element_size())
    key = index, batch, new_tokens, sizes, kind
    launch = _settled.get(key)
    if launch is None:
        launch = settle(_settled, key, PlaceLaunch, room, batch, new_tokens, sizes, kind)
    launch_on(index, launch, (*lens, new_lens, overflow, room))


class PlaceLaunch:
    """A settled call: everything but addresses."""

    def __init__(
        self,
        room: torch.Tensor,
        batch: int,
        new_tokens: int,
        sizes: tuple[int, int, int, int, int],
        kind: tuple[int, int],
    ) -> None:
        step, size = kind
        self._constants = CONSTANTS.pack(step * size, size, new_tokens, *sizes, batch)
        self._index = room.get_device()
        layout = f"={ADDRESSES}Q{CONSTANTS.size}s"
        self._launch = Launcher(kernel_of(SlotSpec(), room), (batch, 1, 1), layout)

    def __call__(self, tensors: Tensors) -> None:
        """Launch on the current stream of the current device, which is that of the tensors."""
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._launch(current_stream(self._index), (*addresses, self._constants))
