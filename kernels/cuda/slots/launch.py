"""Place the new tokens of a layer on CUDA, in one launch; see kvquant/ops/slots.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..runtime.launch import OVERLAPS, Launch, cached_launch, gpu_of
from ..runtime.spec import Spec, Table

PLACE: Table = (
    ("seq_lens", "P"),  # [batch], int32, contiguous, as are all lengths; see kvquant/cache/layer.py
    ("packed_lens", "P"),
    ("exact_lens", "P"),
    ("starts", "P"),
    ("exact_firsts", "P"),
    ("seen_lens", "P"),  # with a window, as the next two
    ("seen_starts", "P"),
    ("firsts", "P"),
    ("new_lens", "P"),  # [batch], int32 or int64; 0: new_tokens for all
    ("overflow", "P"),  # [1], int32
    ("room", "P"),  # [3, batch * new_tokens + batch], int64
    ("new_lens_step", "Q"),  # bytes from one to the next
    ("new_lens_bytes", "i"),  # of one: 4 or 8
    ("new_tokens", "i"),
    ("sink_len", "i"),
    ("packed_len", "i"),
    ("recent_len", "i"),
    ("ring_len", "i"),
    ("max_seq_len", "i"),
    ("window", "i"),  # 0: none
    ("batch", "i"),
)


@dataclass(frozen=True)
class SlotSpec(Spec):
    """The kernel that places new tokens, a block a sequence; overlapped: as of DecodeSpec."""

    warps: int = 16
    overlapped: bool = False

    arguments = PLACE
    kernel = "slots.kernel.make_slots_kernel"


def place_tokens(
    lens: Sequence[torch.Tensor | None],
    sizes: tuple[int, int, int, int, int, int],
    new_lens: torch.Tensor | None,
    new_tokens: int,
    overflow: torch.Tensor,
    room: torch.Tensor,
) -> None:
    """Write slots, and lengths in place, on the current stream.

    lens, sizes: ops.slots.Lens and Sizes of a LayerCache. new_lens: [batch], int32 or int64, taken
    as 0 to new_tokens; None for all. overflow: [1], int32, counts tokens beyond max_seq_len. room:
    [3, batch * new_tokens + batch], int64, contiguous: slots.Slots, and after them seq_lens,
    packed_lens and, with a window, firsts as they were. Errors: as of cached_launch.
    """
    index, batch = room.get_device(), room.shape[1] // (new_tokens + 1)
    kind = (0, 0) if new_lens is None else (new_lens.stride(0), new_lens.element_size())
    launch = _find(index, batch, new_tokens, sizes, kind)
    if launch is not None:
        launch((*lens, new_lens, overflow, room))


def bind_place(
    lens: Sequence[torch.Tensor | None],
    sizes: tuple[int, int, int, int, int, int],
    new_tokens: int,
    room: torch.Tensor,
) -> Launch | None:
    """Bind place_tokens to a layer and a number of tokens; it takes overflow's address."""
    batch, index = room.shape[1] // (new_tokens + 1), room.get_device()
    launch = _find(index, batch, new_tokens, sizes, (0, 0))
    return launch and launch.bind((*lens, None, None, room), {"overflow"})


def _find(
    index: int,
    batch: int,
    new_tokens: int,
    sizes: tuple[int, int, int, int, int, int],
    kind: tuple[int, int],
) -> Launch | None:
    key = SlotSpec, index, batch, new_tokens, sizes, kind
    return cached_launch(key, None, _prepare, index, batch, new_tokens, sizes, kind)


def _prepare(
    index: int,
    batch: int,
    new_tokens: int,
    sizes: tuple[int, int, int, int, int, int],
    kind: tuple[int, int],
) -> Launch:
    step, size = kind
    names = "sink_len", "packed_len", "recent_len", "ring_len", "max_seq_len", "window"
    constants = dict(zip(names, sizes, strict=True))
    constants |= {"new_lens_step": step * size, "new_lens_bytes": size}
    constants |= {"new_tokens": new_tokens, "batch": batch}
    spec = SlotSpec(overlapped=gpu_of(index).capability >= OVERLAPS)
    return Launch(spec, index, (batch, 1, 1), constants)
