"""What KVCache and PagedKVCache ask of their arguments: sizes, formats, bases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from .. import rehearsal
from ..errors import ConfigError, DeviceError, NonFiniteError, ShapeError, UnsupportedError, shown
from ..ops.dispatch import kernels_for
from ..rows.arguments import (
    MAX_LENGTH,
    check_cuda_scale,
    check_device,
    check_flag,
    check_num_splits,
    check_readable,
    check_scale,
    check_size,
    is_whole,
)
from ..rows.basis import LayerBasis
from ..rows.defaults import default_format
from ..rows.format import RowFormat
from ..rows.kind import LATENT, KeyValue
from .memory import check_room

if TYPE_CHECKING:
    from ..io.plan import Plan

MANY_LAYERS = 1 << 16  # more than any model has
LAYER_BYTES = 8192  # of the host, about, for the objects of a layer

Devices = torch.device | str | Sequence[torch.device | str]
Formats = str | RowFormat | Sequence[str | RowFormat]
Counts: TypeAlias = "torch.Tensor | Sequence[int] | NDArray[np.integer[Any]]"
Format = TypeVar("Format")


def whole_numbers(name: str, values: int | Counts) -> torch.Tensor:
    """Whole numbers as int64 on the CPU; ConfigError for fractions and masks."""
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


def lens_to_keep(seq_lens: int | Counts, present: torch.Tensor) -> torch.Tensor:
    """[batch] of crop; ShapeError unless 0 to the present lengths. A number is for all."""
    if isinstance(seq_lens, int | Integral) and not isinstance(seq_lens, bool):
        wanted = present.clamp(max=min(max(int(seq_lens), -1), MAX_LENGTH))
    else:
        wanted = whole_numbers("seq_lens", seq_lens)
        if not wanted.ndim:
            wanted = wanted.expand(len(present))
    if wanted.shape != present.shape or bool((wanted < 0).any() or (wanted > present).any()):
        raise ShapeError(
            f"cannot crop sequences of {present.tolist()} tokens to {wanted.tolist()}: give "
            "lengths from 0 to the present ones"
        )
    return wanted


def check_bases(
    kind: KeyValue,
    bases: Sequence[LayerBasis] | None,
    num_kv_heads: int,
    k_formats: Sequence[RowFormat],
    v_formats: Sequence[RowFormat],
) -> Sequence[LayerBasis | None]:
    """One basis for each layer, or None for each.

    Raises:
        ConfigError, ShapeError: they do not fit.
        UnsupportedError: latent rows with feedback.
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
    if kind is LATENT:
        check_no_feedback(bases)
    return bases


def check_no_feedback(bases: Sequence[LayerBasis] | None) -> None:
    for i, basis in enumerate(bases or ()):
        if basis.k.feedback is not None or basis.v.feedback is not None:
            raise UnsupportedError(
                f"the basis of layer {i} rounds with feedback, and latent rows are rounded to the "
                "nearest code: leave feedback out"
            )


def planned_options(kind: KeyValue, plan: Plan, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a cache of these rows by a plan (see as_plan), with those given.

    Raises:
        ConfigError: a plan of other rows, or an option that the plan decides.
    """
    from ..io.plan import as_plan

    found, is_latent = as_plan(plan), kind is LATENT
    kept = "keys and values of heads", "latent rows"
    whole = "" if is_latent else "Latent"
    if found.is_latent != is_latent:
        raise ConfigError(
            f"the plan is of {kept[not is_latent]}, and this cache has {kept[is_latent]}: use "
            f"{whole}KVCache.from_plan or {whole}PagedKVCache.from_plan, or CachedModel.new_cache "
            "of its model"
        )
    sizes = found.num_kv_heads, found.head_dim, found.k_formats, found.v_formats
    decided = {"num_layers": found.num_layers, **kind.options(*sizes)}
    given = [name for name in (*decided, "bases") if name in options]
    if given:
        raise ConfigError(
            f"{', '.join(given)} with a plan: a plan says sizes, formats and bases, use "
            "plan.with_formats for other formats"
        )
    if is_latent and "windows" in options:
        raise ConfigError("latent rows have no windows: leave windows out")
    return {**decided, "bases": found.layers, **options}  # which are computed now


def check_holds(device: torch.device) -> None:
    """Raise DeviceError if a cache lies on the meta device, unless its calls are rehearsed."""
    if device.type == "meta" and rehearsal.current() is None:
        raise DeviceError(
            "a cache on device 'meta' holds no tokens and tells its nbytes alone: make it on the "
            "CPU or on CUDA"
        )


def check_layer(layer: int, num_layers: int) -> None:
    if not (type(layer) is int or is_whole(layer)) or not 0 <= layer < num_layers:
        raise ConfigError(
            f"layer {shown(layer)} does not exist: the cache has layers 0 to {num_layers - 1}"
        )


def check_options(
    q: torch.Tensor,
    sm_scale: float | None,
    return_lse: bool,
    num_splits: int | None,
    backend: str | None,
) -> None:
    """Raise as decode_attention does, before a step appends anything."""
    if sm_scale is not None:
        check_scale(sm_scale)
    check_flag("return_lse", return_lse)
    check_num_splits(num_splits)
    if kernels_for(q, backend) == "cuda":
        if q.dtype == torch.float32:
            raise ConfigError("q is torch.float32: on CUDA use bfloat16 or float16")
        if sm_scale is not None:
            check_cuda_scale(sm_scale)


def check_bad_rows(rows: Sequence[int], advice: str) -> None:
    """Raise NonFiniteError if rows, counted for K and V, became NaN."""
    k_rows, v_rows = rows
    if k_rows or v_rows:
        raise NonFiniteError(
            f"{k_rows} rows of K and {v_rows} of V came with NaN, Inf or a value that their "
            f"formats cannot hold, and decode to NaN: {advice}; to go on, run the model in "
            "bfloat16, and give the format 'bf16' where values go beyond the others' 65,504"
        )


def check_windows(windows: Sequence[int | None] | None, num_layers: int) -> Sequence[int | None]:
    """One window for each layer, or None for each; ConfigError for another number, or no length."""
    if windows is None:
        return [None] * num_layers
    if not isinstance(windows, Sequence) or isinstance(windows, str):
        raise ConfigError(f"windows is {shown(windows)}: give a list, of each layer tokens or None")
    if len(windows) != num_layers:
        raise ConfigError(
            f"windows has a length of {len(windows)} for {num_layers} layers: "
            "give one entry for each layer, tokens or None"
        )
    return [None if w is None else check_size("a window", w, at_least=1) for w in windows]


def devices_of(
    device: Devices, num_layers: int | None = None, *, or_meta: bool = False
) -> list[torch.device]:
    """One device for each layer; without num_layers, the devices named.

    It raises ConfigError for another number than layers, no device, or "meta" beside another one;
    DeviceError without kernels or without the device.
    """
    if isinstance(device, str) or not isinstance(device, Sequence):
        return [check_device(device, or_meta=or_meta)] * (num_layers or 1)
    if num_layers is not None and len(device) != num_layers:
        raise ConfigError(
            f"device lists {len(device)} devices for {num_layers} layers: give one for each layer, "
            "or one device for all"
        )
    found = [check_device(one, or_meta=or_meta) for one in device]
    if len({one.type == "meta" for one in found}) > 1:
        raise ConfigError("device lists 'meta' beside others: a cache lies there as a whole")
    return found


def per_layer(
    name: str, formats: object, num_layers: int, parse: Callable[..., Format]
) -> list[Format]:
    """One format for each layer, of one for all layers or a list of one for each.

    It raises ConfigError for no format, another number than layers, or too little memory for them.
    """
    if num_layers > MANY_LAYERS:  # before there are lists of them
        nbytes, what = num_layers * LAYER_BYTES, f"a cache of {num_layers} layers"
        check_room(nbytes, torch.device("cpu"), what, "use fewer layers")
    if isinstance(formats, str) or not isinstance(formats, Sequence):
        return [parse(formats)] * num_layers
    if len(formats) != num_layers:
        raise ConfigError(
            f"{name} lists {len(formats)} formats for {num_layers} layers: give one for each, or "
            "one for all"
        )
    return [parse(one) for one in formats]


def formats_of(
    kind: KeyValue,
    k_format: Formats | None,
    v_format: Formats | None,
    num_layers: int,
    head_dim: int,
    sink_len: int,
    recent_len: int,
) -> tuple[list[RowFormat], list[RowFormat]]:
    """The formats of K and of V of each layer, defaults for None; raises as per_layer."""

    def parse(fmt: str | RowFormat) -> RowFormat:  # which may have a head_dim of its own
        return fmt if isinstance(fmt, RowFormat) else RowFormat.parse(fmt, head_dim)

    k, v = (
        per_layer(
            f"{side}_format",
            default_format(side, head_dim, sink_len, recent_len) if given is None else given,
            num_layers,
            parse,
        )
        for side, given in (("k", k_format), ("v", v_format))
    )
    kind.check_formats([*k, *v])
    return k, v


def row_formats(
    name: str, formats: Formats | None, head_dims: Sequence[int], window: tuple[int, int]
) -> list[RowFormat]:
    """One format for each layer, of its head_dim; the default for each when None.

    window is sink_len and recent_len of the cache. It raises ConfigError as per_layer, and for
    another head_dim.
    """
    if formats is None:
        formats = [default_format(name[0], head_dim, *window) for head_dim in head_dims]
    listed = per_layer(name, formats, len(head_dims), lambda fmt: fmt)
    return [RowFormat.parse(f, head_dim) for f, head_dim in zip(listed, head_dims, strict=True)]
