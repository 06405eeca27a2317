"""RowStacks: the rows of all layers in one tensor per format, so that one copy moves them all."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from ..errors import ConfigError
from ..rows.latent import AnyFormat
from .copying import NotCopied

_LARGE = 1 << 20  # bytes


class RowStacks(NotCopied):
    """Rows in units (pages or sequence slots) that are copied as a whole, in every layer at once.

    The argument formats has one for each layer; unit_len is the rows of a unit and a head.

    Attributes:
        stacks: for each different format [its layers, num_units, num_kv_heads, unit_len,
            row_bytes], uint8.
        layers: for every layer [num_units, num_kv_heads, unit_len, row_bytes], a view of a stack.
    """

    def __init__(
        self,
        formats: Sequence[AnyFormat],
        num_units: int,
        num_kv_heads: int,
        unit_len: int,
        device: torch.device,
    ) -> None:
        self.stacks: list[torch.Tensor] = []
        views: dict[int, torch.Tensor] = {}
        for fmt in dict.fromkeys(formats):
            layers = [layer for layer, other in enumerate(formats) if other == fmt]
            shape = (len(layers), num_units, num_kv_heads, unit_len, fmt.row_bytes)
            what = f"rows of {list(shape)} bytes"
            self.stacks.append(zero_rows(shape, device, what, "use fewer pages or sequence slots"))
            views |= zip(layers, self.stacks[-1], strict=True)
        self.layers = [views[layer] for layer in range(len(formats))]

    @staticmethod
    def bytes_of(
        formats: Sequence[AnyFormat], num_units: int, num_kv_heads: int, unit_len: int
    ) -> int:
        """Bytes of these rows."""
        return sum(fmt.row_bytes for fmt in formats) * num_units * num_kv_heads * unit_len

    def copy_units(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole units, (source, target) each; no source is a target."""
        for stack in self.stacks:
            for source, target in pairs:  # one by one: there may be no memory for more
                stack[:, target].copy_(stack[:, source])


def to_device(numbers: Sequence[object], device: torch.device) -> torch.Tensor:
    """Whole numbers as int64 on the device, without a wait of the host."""
    tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if device.type == "cuda" and numbers:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def zero_rows(shape: tuple[int, ...], device: torch.device, what: str, advice: str) -> torch.Tensor:
    """Zeros, uint8; without memory ConfigError "{what} take ... GiB, more than there is: {advice}".

    The CPU takes time and memory for pages on first touch only; torch would write all.
    """
    size = math.prod(shape)
    try:
        if device.type != "cpu" or size < _LARGE or not hasattr(mmap, "MAP_PRIVATE"):
            return torch.zeros(shape, dtype=torch.uint8, device=device)
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=torch.uint8).view(shape)
    except (MemoryError, OverflowError, OSError, RuntimeError) as error:
        words = str(error)  # torch has no type for lack of memory
        if isinstance(error, RuntimeError) and "memory" not in words and "overflow" not in words:
            raise
        gib = size / 2**30
        raise ConfigError(f"{what} take {gib:.1f} GiB, more than there is: {advice}") from error
