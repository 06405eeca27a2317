"""What KVCache and PagedKVCache ask of their arguments: sizes, formats, bases."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from .. import debug
from ..arguments import address, check_readable, check_size, is_whole
from ..errors import ConfigError, DeviceError, NonFiniteError, ShapeError, shown
from ..ops.transform import encode_rows
from ..rows.basis import LayerBasis
from ..rows.format import RowFormat
from ..rows.quantize import EXACT_DTYPES, FLOAT_DTYPES
from .memory import check_room
from .row_stacks import to_device

if TYPE_CHECKING:
    from .layer import LayerCache

MANY_LAYERS = 1 << 16  # more than any model has
LAYER_BYTES = 8192  # of the host, about, for the objects of a layer

Formats = str | RowFormat | Sequence[str | RowFormat]
Counts: TypeAlias = "torch.Tensor | Sequence[int] | NDArray[np.integer[Any]]"
DEFAULT_FORMAT = "int4-g4"


def whole_numbers(name: str, values: int | Counts) -> torch.Tensor:
    """int64 on the CPU; fractions and masks are refused, not cast.

    Raises:
        ConfigError: they are no whole numbers.
    """
    if isinstance(values, torch.Tensor) and not values.is_meta:
        check_readable(**{name: values})
        numbers = values.cpu()
    else:
        try:
            numbers = torch.as_tensor(values, device="cpu")
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigError(f"{name} is {shown(values)}: use whole numbers") from error
        if isinstance(values, Sequence) and bool in map(type, values):
            raise ConfigError(f"{name} is {shown(values)}: use whole numbers")
        if not numbers.numel():  # torch takes an empty list for fractions
            numbers = numbers.long()
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
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
    if not isinstance(bases, Sequence) or not all(isinstance(b, LayerBasis) for b in bases):
        raise ConfigError(f"bases is {shown(bases)}: give a LayerBasis for each layer, or None")
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


def check_plan_options(plan: object, options: Collection[str]) -> None:
    """Raise ConfigError unless a plan is one, and options of a cache none that it decides."""
    from ..io.plan import CachePlan

    if not isinstance(plan, CachePlan):
        raise ConfigError(
            f"plan is of type {type(plan).__name__}: give a CachePlan, of a file "
            "CachePlan.load(path)"
        )
    decided = "num_layers", "num_kv_heads", "head_dim", "k_format", "v_format", "bases"
    given = [name for name in decided if name in options]
    if given:
        raise ConfigError(
            f"{', '.join(given)} with a plan: a plan says sizes, formats and bases, use "
            "plan.with_formats for other formats"
        )


def check_layer(layer: int, num_layers: int) -> None:
    """Raise ConfigError unless there is this layer."""
    if not (type(layer) is int or is_whole(layer)) or not 0 <= layer < num_layers:
        raise ConfigError(
            f"layer {shown(layer)} does not exist: the cache has layers 0 to {num_layers - 1}"
        )


def take_counts(*counters: torch.Tensor) -> list[int]:
    """Read counters, in one wait for the GPU, and set them back if anything was counted."""
    counts: list[int] = torch.cat(counters).tolist()
    if any(counts):
        for counter in counters:
            counter.zero_()
    return counts


def check_bad_rows(rows: Sequence[int], advice: str) -> None:
    """Raise NonFiniteError if rows, of K and of V, were counted that decode to NaN."""
    k_rows, v_rows = rows
    if k_rows or v_rows:
        raise NonFiniteError(
            f"{k_rows} rows of K and {v_rows} of V came with NaN, Inf or a value that their "
            f"formats cannot hold, and decode to NaN: {advice}"
        )


def check_windows(windows: Sequence[int | None] | None, num_layers: int) -> Sequence[int | None]:
    """One window for each layer, or None for each.

    Raises:
        ConfigError: there are more or fewer windows than layers, or one is no length.
    """
    if windows is None:
        return [None] * num_layers
    if not isinstance(windows, Sequence) or isinstance(windows, str):
        raise ConfigError(f"windows is {shown(windows)}: give a list, of each layer tokens or None")
    if len(windows) != num_layers:
        raise ConfigError(f"{len(windows)} windows for {num_layers} layers")
    return [None if w is None else check_size("a window", w, at_least=1) for w in windows]


def per_layer(name: str, formats: Formats, num_layers: int, head_dim: int) -> list[RowFormat]:
    """One format for each layer.

    Raises:
        ConfigError: a format does not exist, there are more or fewer than layers, or more layers
            than there is memory for.
    """
    if num_layers > MANY_LAYERS:  # what lists one thing for each would end the process
        nbytes, what = num_layers * LAYER_BYTES, f"a cache of {num_layers} layers"
        check_room(nbytes, torch.device("cpu"), what, "use fewer layers")
    if isinstance(formats, RowFormat):
        return [formats] * num_layers
    if isinstance(formats, str) or not isinstance(formats, Sequence):  # parse refuses the latter
        return [RowFormat.parse(formats, head_dim)] * num_layers
    if len(formats) != num_layers:
        raise ConfigError(f"{name} lists {len(formats)} formats for {num_layers} layers")
    return [f if isinstance(f, RowFormat) else RowFormat.parse(f, head_dim) for f in formats]


def row_formats(name: str, formats: Formats, head_dims: Sequence[int]) -> list[RowFormat]:
    """One format for each layer, of its head_dim.

    Raises:
        ConfigError: a format does not exist or is of another head_dim, or there are more or fewer
            than layers.
    """
    if isinstance(formats, (str, RowFormat)) or not isinstance(formats, Sequence):
        formats = [formats] * len(head_dims)
    listed: Sequence[str | RowFormat] = formats
    if len(listed) != len(head_dims):
        raise ConfigError(f"{name} lists {len(listed)} formats for {len(head_dims)} layers")
    return [RowFormat.parse(f, head_dim) for f, head_dim in zip(listed, head_dims, strict=True)]


def check_append(
    at: LayerCache,
    k: torch.Tensor,
    v: torch.Tensor,
    new_lens: Counts | None,
) -> torch.Tensor | None:
    """Raise unless tokens, which are tensors, can be appended to a layer, see KVCache.append.

    Returns:
        [batch], on the device of the layer: tokens to add to each sequence; all when None.
    """
    batch, num_kv_heads = at.k_packed.shape[:2]
    for name, x, fmt in (("k", k, at.k_format), ("v", v, at.v_format)):
        shape = x.shape
        if len(shape) != 4 or shape[:2] != (batch, num_kv_heads) or shape[3] != fmt.head_dim:
            _refuse_shape(name, list(shape), (batch, num_kv_heads, fmt.head_dim))
        if x.dtype not in FLOAT_DTYPES:
            raise ConfigError(f"{name} is {x.dtype}: use float32, bfloat16 or float16")
        if x.device != at.seq_lens.device:
            raise DeviceError(f"{name} is on {x.device}, the cache on {at.seq_lens.device}")
    new_tokens = k.shape[2]
    if v.shape[2] != new_tokens:
        raise ShapeError(f"k has {new_tokens} new tokens, v {v.shape[2]}")
    counts = None if new_lens is None else _counts(at, new_lens, new_tokens)
    if debug.is_recorded(k):
        return counts
    reads = debug.may_read(k)
    if reads or at.longest is None or at.longest + new_tokens > at.max_seq_len:
        _check_room(at, new_tokens if counts is None else counts.cpu().clamp(0, new_tokens))
    if reads:
        _check_values(at, k, v, counts)
    return counts


def _refuse_shape(name: str, shape: list[int], must: tuple[int, int, int]) -> NoReturn:
    """Raise, with what to do where axes are in another order, or one is missing."""
    batch, heads, dim = must
    how = ""
    if len(shape) == 4 and (shape[0], shape[2], shape[3]) == must:
        how = f", the heads before the tokens: give {name}.transpose(1, 2)"
    elif shape == [batch, heads, dim]:
        how = f": give {name}.unsqueeze(2)"
    raise ShapeError(f"{name} is {shape}: it must be [{batch}, {heads}, new_tokens, {dim}]{how}")


def _counts(at: LayerCache, new_lens: Counts, new_tokens: int) -> torch.Tensor:
    """new_lens on the device of a layer; what lies there already is not read.

    On CUDA it is kept to 0 to new_tokens where it is read, by kvquant.ops.slots.place_tokens.
    """
    batch, device = at.seq_lens.shape[0], at.seq_lens.device
    if isinstance(new_lens, torch.Tensor) and new_lens.device == device:
        if not debug.may_read(new_lens):
            if new_lens.dtype not in (torch.int32, torch.int64):
                raise ConfigError(f"new_lens is {new_lens.dtype}: use int32 or int64")
            if new_lens.shape != (batch,):
                raise ShapeError(f"new_lens is {list(new_lens.shape)}: give [{batch}]")
            return new_lens if new_lens.is_cuda else new_lens.clamp(0, new_tokens)
    elif debug.is_recorded(at.seq_lens):
        raise ConfigError(
            "new_lens lies on the host, where a graph cannot read it: give a tensor on "
            f"{device}, as the cache"
        )
    counts = whole_numbers("new_lens", new_lens)
    if counts.shape != (batch,) or bool(((counts < 0) | (counts > new_tokens)).any()):
        raise ShapeError(f"new_lens is {counts.tolist()}: give [batch] of 0 to {new_tokens}")
    return to_device(counts.tolist(), device)


def _check_room(at: LayerCache, counts: int | torch.Tensor) -> None:
    """Raise if a sequence would outgrow the layer; lengths are read, and the longest remembered."""
    old_lens = at.seq_lens.cpu().long()  # int32 ends where max_seq_len may
    if at.longest is not None:
        at.longest = int(old_lens.max())
    lens = old_lens + counts
    if bool((lens > at.max_seq_len).any()):
        sequence = int((lens > at.max_seq_len).nonzero()[0])
        raise ShapeError(
            f"sequence {sequence} would grow to {int(lens[sequence])} tokens, max_seq_len is "
            f"{at.max_seq_len}: crop it, or make a larger cache"
        )


def _check_values(
    at: LayerCache, k: torch.Tensor, v: torch.Tensor, new_lens: torch.Tensor | None
) -> None:
    """Raise if one of the tokens to append holds what one of its formats cannot."""
    bases = at.basis or (None, None)
    sides = ("k", k, at.k_format, at.k_exact), ("v", v, at.v_format, at.v_exact)
    for (name, x, *formats), basis in zip(sides, bases, strict=True):
        address(x, name)
        limit = min(fmt.max_abs for fmt in formats)
        _check_limit(x, name, limit, formats, new_lens)
        if basis is not None:
            x = encode_rows(x, basis)
            _check_limit(x, name, limit, formats, new_lens)
        if at.sink_len + at.recent_len:  # rounding may lead over a limit
            exact = EXACT_DTYPES[at.k_exact.codec]
            if x.dtype != exact:
                _check_limit(x.to(exact), name, limit, formats, new_lens)


def _check_limit(
    x: torch.Tensor,
    name: str,
    limit: float,
    formats: Sequence[RowFormat],
    new_lens: torch.Tensor | None,
) -> None:
    if not x.numel():
        return
    lowest, highest = x.aminmax()
    if -limit <= lowest.item() and highest.item() <= limit:
        return
    bad = ~(x.float().abs() <= limit)
    if new_lens is not None:
        is_new = torch.arange(x.shape[2], device=x.device) < new_lens[:, None]
        bad &= is_new[:, None, :, None]
    if bool(bad.any()):
        index = bad.nonzero()[0].tolist()
        raise NonFiniteError(
            f"{name}{index} is {x[tuple(index)].item()}: {formats[0]} and {formats[1]} rows hold "
            f"finite values up to {limit:g}; nothing was appended"
        )
