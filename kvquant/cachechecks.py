"""What KVCache and PagedKVCache ask of their arguments: sizes, formats, bases."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING

import torch

from .basis import LayerBasis
from .errors import ConfigError, DeviceError, ShapeError
from .layout import RowFormat
from .quant import FLOAT_DTYPES

if TYPE_CHECKING:
    from .layer import LayerCache

MAX_LENGTH = 2**31 - 1  # lengths are int32

Formats = str | RowFormat | Sequence[str | RowFormat]


def check_size(name: str, size: int, *, at_least: int = 0) -> int:
    """A size as an int, whatever whole number it came as.

    Raises:
        ConfigError: it is no whole number (True is none), or out of bounds.
    """
    whole = isinstance(size, Integral) and not isinstance(size, bool)
    if not whole or not at_least <= size <= MAX_LENGTH:
        raise ConfigError(
            f"{name} {size!r} is not possible: use a whole number from {at_least} to {MAX_LENGTH}"
        )
    return operator.index(size)


def whole_numbers(name: str, values: int | torch.Tensor | Sequence[int]) -> torch.Tensor:
    """int64 on the CPU; fractions and masks are refused, not cast."""
    numbers = torch.as_tensor(values).cpu()
    if numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise ConfigError(f"{name} is {numbers.dtype}: use whole numbers")
    return numbers.long()


def check_bases(
    bases: Sequence[LayerBasis] | None,
    num_kv_heads: int,
    k_formats: Sequence[RowFormat],
    v_formats: Sequence[RowFormat],
) -> Sequence[LayerBasis | None]:
    """One basis for each layer, or None for each.

    Raises:
        ConfigError: there are more or fewer bases than layers.
        ShapeError: a basis is of other heads or channels.
    """
    if bases is None:
        return [None] * len(k_formats)
    if len(bases) != len(k_formats):
        raise ConfigError(f"{len(bases)} bases for {len(k_formats)} layers")
    for i, (basis, *formats) in enumerate(zip(bases, k_formats, v_formats, strict=True)):
        for side, fmt in zip(basis, formats, strict=True):
            if side.offset.shape != (num_kv_heads, fmt.head_dim):
                raise ShapeError(
                    f"the basis of layer {i} is for {list(side.offset.shape)} heads and channels, "
                    f"the cache has {[num_kv_heads, fmt.head_dim]}"
                )
    return bases


def per_layer(name: str, formats: Formats, num_layers: int, head_dim: int) -> list[RowFormat]:
    """One format for each layer.

    Raises:
        ConfigError: a format does not exist, or there are more or fewer than layers.
    """
    if isinstance(formats, RowFormat):
        return [formats] * num_layers
    if isinstance(formats, str) or not isinstance(formats, Sequence):
        return [RowFormat.parse(formats, head_dim)] * num_layers
    if len(formats) != num_layers:
        raise ConfigError(f"{name} lists {len(formats)} formats for {num_layers} layers")
    return [f if isinstance(f, RowFormat) else RowFormat.parse(f, head_dim) for f in formats]


def check_append(
    at: LayerCache,
    max_seq_len: int,
    k: torch.Tensor,
    v: torch.Tensor,
    new_lens: torch.Tensor | Sequence[int] | None,
) -> torch.Tensor:
    """Raise unless tokens can be appended to a layer, see KVCache.append.

    Returns:
        [batch], int64, on the CPU: tokens to add to each sequence.
    """
    batch, num_kv_heads = at.k_packed.shape[:2]
    for name, x, fmt in (("k", k, at.k_format), ("v", v, at.v_format)):
        expected = [batch, num_kv_heads, "new_tokens", fmt.head_dim]
        if x.ndim != 4 or [*x.shape[:2], "new_tokens", x.shape[3]] != expected:
            raise ShapeError(f"{name} is {list(x.shape)}: it must be {expected}".replace("'", ""))
        if x.dtype not in FLOAT_DTYPES:
            raise ConfigError(f"{name} is {x.dtype}: use float32, bfloat16 or float16")
        if x.device != at.seq_lens.device:
            raise DeviceError(f"{name} is on {x.device}, the cache on {at.seq_lens.device}")
    new_tokens = k.shape[2]
    if v.shape[2] != new_tokens:
        raise ShapeError(f"k has {new_tokens} new tokens, v {v.shape[2]}")
    new_lens = [new_tokens] * batch if new_lens is None else new_lens
    counts = whole_numbers("new_lens", new_lens)
    if counts.shape != (batch,) or bool(((counts < 0) | (counts > new_tokens)).any()):
        raise ShapeError(f"new_lens is {counts.tolist()}: give [batch] of 0 to {new_tokens}")
    lens = at.seq_lens.cpu() + counts
    if bool((lens > max_seq_len).any()):
        sequence = int((lens > max_seq_len).nonzero()[0])
        raise ShapeError(
            f"sequence {sequence} would grow to {int(lens[sequence])} tokens, max_seq_len is "
            f"{max_seq_len}: crop it, or make a larger cache"
        )
    return counts
