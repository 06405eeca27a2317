"""Whether the arguments of an append fit one another; the values in the tensors are not read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .. import debug
from ..arguments import address, check_flag, check_kind, check_readable, check_tensors
from ..errors import ConfigError, DeviceError, ShapeError, shown
from ..rows.basis import Basis
from ..rows.format import EXACT_CODECS, RowFormat
from ..rows.quantize import FLOAT_DTYPES, check_rows
from ..rows.slots import Slots
from ..rows.transforms import Rope, RowTransform

# where rows lay that were found to be apart: addresses, shapes, strides
_apart: set[tuple[object, ...]] = set()
_MOST_APART = 1024


class Append(NamedTuple):
    """The arguments of append.append_rows, formats in place of their names."""

    k: torch.Tensor
    v: torch.Tensor
    k_rows: torch.Tensor
    v_rows: torch.Tensor
    slots: Slots
    k_format: RowFormat
    v_format: RowFormat
    exact_k: torch.Tensor | None
    exact_v: torch.Tensor | None
    exact_format: str
    k_transform: RowTransform | None
    v_transform: RowTransform | None
    rope: Rope | None
    bad: torch.Tensor | None


def check_append(call: Append) -> None:
    """Raise unless tokens can be appended.

    Raises:
        ShapeError: the tensors do not fit one another or the formats.
        ConfigError: a dtype or a format does not exist, or what goes together is not complete.
        DeviceError: the tensors lie on different devices.
    """
    k, v, k_format, v_format = call.k, call.v, call.k_format, call.v_format
    num_tokens, num_kv_heads = check_new(k, v)
    _check_pages("k_rows", call.k_rows, k_format)
    _check_pages("v_rows", call.v_rows, v_format)
    _check_storage(("k_rows", "v_rows"), call.k_rows, call.v_rows, num_kv_heads)
    _check_exact(call, num_kv_heads)
    for name, slots in zip(Slots._fields, call.slots, strict=True):
        if slots is not None:
            _check_tensor(f"slots.{name}", slots, torch.int64, (num_tokens,))
    for name, transform, fmt in (
        ("k_transform", call.k_transform, k_format),
        ("v_transform", call.v_transform, v_format),
    ):
        if transform is not None:
            _check_transform(name, transform, num_kv_heads, fmt.head_dim)
    if call.rope is not None:
        _check_rope(call.rope, num_tokens, k_format.head_dim)
    if call.bad is not None:
        _check_tensor("bad", call.bad, torch.int32, (2,))
    _check_devices(call)


def check_dequantize(
    rows: torch.Tensor, fmt: RowFormat, slots: torch.Tensor, out: torch.Tensor
) -> None:
    """Raise unless the rows at slots can be dequantized into out; errors as of check_append."""
    _check_pages("rows", rows, fmt)
    if slots.ndim != 1:
        raise ShapeError(f"slots is {list(slots.shape)}: it must be [num_tokens]")
    _check_tensor("slots", slots, torch.int64, tuple(slots.shape))
    if out.dtype not in FLOAT_DTYPES:
        raise ConfigError(f"out is {out.dtype}: use float32, bfloat16 or float16")
    _check_tensor("out", out, out.dtype, (slots.shape[0], rows.shape[1], fmt.head_dim))
    for name, tensor in (("slots", slots), ("out", out)):
        if tensor.device != rows.device:
            raise DeviceError(f"rows is on {rows.device}, {name} on {tensor.device}")


def check_types(
    k: torch.Tensor,
    v: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slots: Slots,
    exact_k: torch.Tensor | None,
    exact_v: torch.Tensor | None,
    k_transform: RowTransform | Basis | None,
    v_transform: RowTransform | Basis | None,
    rope: Rope | None,
) -> None:
    """Raise ConfigError unless what cannot be left out is a tensor, and the rest of its class."""
    check_readable(k=k, v=v, k_rows=k_rows, v_rows=v_rows, slots=slots.packed)
    optional = {"exact_k": exact_k, "exact_v": exact_v}
    optional |= {f"slots.{name}": x for name, x in slots._asdict().items()}
    check_readable(**{name: x for name, x in optional.items() if x is not None})
    for name, transform in (("k_transform", k_transform), ("v_transform", v_transform)):
        if not (transform is None or isinstance(transform, RowTransform | Basis)):
            raise ConfigError(
                f"{name} is of type {type(transform).__name__}: give a RowTransform or a Basis"
            )
        if isinstance(transform, RowTransform):
            given = transform._asdict().items()
            check_readable(**{f"{name}.{n}": x for n, x in given if isinstance(x, torch.Tensor)})
    if rope is not None:
        check_kind("rope", rope, Rope, "give Rope(cos, sin)")


def check_transform_values(name: str, transform: RowTransform) -> None:
    """Raise ConfigError if values of a transform are seen to be none: NaN, Inf, a clip of 0."""
    for what, values in transform._asdict().items():
        if not isinstance(values, torch.Tensor) or values.dtype != torch.float32:
            continue  # None, or told by check_append
        if not debug.may_read(values):
            continue
        if not bool(values.isfinite().all()):
            raise ConfigError(f"{name}.{what} has values that are not finite")
        if what == "clip" and not bool((values > 0).all()):
            raise ConfigError(f"{name}.clip has shares that are not positive")


def check_apart(k_name: str, k_rows: torch.Tensor, v_name: str, v_rows: torch.Tensor) -> None:
    """Raise ConfigError if K and V begin at one address, where V would be written over K."""
    if k_rows.data_ptr() == v_rows.data_ptr() != 0 and k_rows.numel():
        raise ConfigError(f"{k_name} and {v_name} are one tensor: K and V need one each")


def check_written(call: Append) -> None:
    """Raise unless every row that may be written has memory of its own, and torch lets it.

    Raises:
        ShapeError: rows of a tensor share memory.
        ConfigError: those of two tensors do, or a tensor was made in inference mode.
    """
    k_rows, v_rows, exact_k, exact_v = call.k_rows, call.v_rows, call.exact_k, call.exact_v
    places: tuple[object, ...] = _place(k_rows), _place(v_rows)
    if exact_k is not None and exact_v is not None:
        places += _place(exact_k), _place(exact_v)
    if places not in _apart:  # takes longer than the rest of a small call
        _check_apart(call)
        if len(_apart) >= _MOST_APART:
            _apart.clear()
        _apart.add(places)
    if not torch.is_inference_mode_enabled():
        for tensor in (k_rows, v_rows, exact_k, exact_v, call.bad):
            if tensor is not None and tensor.is_inference():
                raise ConfigError(
                    "rows or counters were made in torch.inference_mode(), outside of which torch "
                    "does not let them be changed: append inside, or give their clone()"
                )


def _place(rows: torch.Tensor) -> tuple[object, ...]:
    return rows.data_ptr(), rows.shape, rows.stride()


def _check_apart(call: Append) -> None:
    names = ("k_rows", "v_rows", "exact_k", "exact_v")
    given = call.k_rows, call.v_rows, call.exact_k, call.exact_v
    written = [(name, x) for name, x in zip(names, given, strict=True) if x is not None]
    for name, rows in written:
        address(rows, name)
        if not _are_apart(rows.shape, rows.stride()):
            raise ShapeError(
                f"{name} has strides {list(rows.stride())} for {list(rows.shape)}: some of its "
                "rows share memory, as those of expand() do: give a tensor with its own"
            )
    for (name, rows), (other_name, other) in itertools.combinations(written, 2):
        if _share_memory(rows, other):
            raise ConfigError(f"{name} and {other_name} share memory: rows need their own")


def _are_apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements lie in one place.

    The axes of what is cut out of a tensor, or transposed, can be put in an order in which each
    stride leads beyond all that the axes before it reach.
    """
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach += (size - 1) * stride
    return True


class _Bytes:
    """A tensor of bytes as numpy takes it, on any device: it looks at addresses only."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (rows.data_ptr(), False),
            "shape": tuple(rows.shape),
            "strides": rows.stride(),
        }


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common; K and V of one pool of pages have not."""
    if not a.numel() or not b.numel():
        return False
    return np.shares_memory(np.asarray(_Bytes(a)), np.asarray(_Bytes(b)))


def check_new(k: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
    """num_tokens and num_kv_heads, if K and V can be rows of the same tokens; errors likewise."""
    if k.ndim != 3 or v.ndim != 3 or k.shape[:2] != v.shape[:2]:
        raise ShapeError(
            f"k is {list(k.shape)} and v {list(v.shape)}: both must be [num_tokens, num_kv_heads, "
            "head_dim], alike but for head_dim"
        )
    if k.dtype not in FLOAT_DTYPES or v.dtype != k.dtype:
        raise ConfigError(
            f"k is {k.dtype} and v {v.dtype}: use float32, bfloat16 or float16 for both"
        )
    for name, x in (("k", k), ("v", v)):
        if x.stride(-1) != 1 and x.numel():
            raise ShapeError(
                f"{name} has strides {list(x.stride())}: the elements of a row must be contiguous"
            )
    return k.shape[0], k.shape[1]


def _check_storage(
    names: tuple[str, str], k_rows: torch.Tensor, v_rows: torch.Tensor, num_kv_heads: int
) -> None:
    """The rows of K and V are the same pages, with as many KV heads as the new tokens."""
    shape = k_rows.shape
    if shape[:3] != v_rows.shape[:3]:
        raise ShapeError(
            f"{names[0]} {list(shape)} and {names[1]} {list(v_rows.shape)} must be alike but for "
            "the bytes of a row"
        )
    if shape[1] != num_kv_heads:
        raise ShapeError(f"k and v have {num_kv_heads} KV heads, {names[0]} has {shape[1]}")


def _check_pages(name: str, rows: torch.Tensor, fmt: RowFormat) -> None:
    check_rows(rows, fmt, name)
    if rows.ndim != 4 or rows.stride(-1) != 1:
        raise ShapeError(
            f"{name} is {list(rows.shape)} with strides {list(rows.stride())}: it must be "
            "[num_pages, num_kv_heads, page_size, row_bytes], the bytes of a row contiguous"
        )


def _check_exact(call: Append, num_kv_heads: int) -> None:
    """The 16-bit rows and their slots: all or none."""
    codec, exact_k, exact_v = call.exact_format, call.exact_k, call.exact_v
    if codec not in EXACT_CODECS:
        raise ConfigError(f"exact_format {shown(codec)} does not exist: use 'bf16' or 'fp16'")
    if exact_k is None or exact_v is None or call.slots[1] is None or call.slots[2] is None:
        _refuse_incomplete(call)
        return
    _check_pages("exact_k", exact_k, RowFormat.parse(codec, call.k_format.head_dim))
    _check_pages("exact_v", exact_v, RowFormat.parse(codec, call.v_format.head_dim))
    _check_storage(("exact_k", "exact_v"), exact_k, exact_v, num_kv_heads)


def _refuse_incomplete(call: Append) -> None:
    """Raise unless there is nothing of the 16-bit rows."""
    together = {
        "exact_k": call.exact_k,
        "exact_v": call.exact_v,
        "slots.exact": call.slots.exact,
        "slots.evicted": call.slots.evicted,
    }
    missing = [name for name, tensor in together.items() if tensor is None]
    if len(missing) < len(together):
        raise ConfigError(
            f"{' and '.join(missing)} missing: {', '.join(together)} are given together, or none"
        )


def _check_transform(name: str, transform: RowTransform, num_kv_heads: int, head_dim: int) -> None:
    row, square = (num_kv_heads, head_dim), (num_kv_heads, head_dim, head_dim)
    for what, tensor, shape in (
        ("offset", transform.offset, row),
        ("matrix", transform.matrix, square),
        ("clip", transform.clip, (num_kv_heads,)),
        ("feedback", transform.feedback, square),
    ):
        if tensor is not None:
            _check_tensor(f"{name}.{what}", tensor, torch.float32, shape)
    check_flag(f"{name}.rotate", transform.rotate)


def _check_rope(rope: Rope, num_tokens: int, head_dim: int) -> None:
    check_tensors(**{"rope.cos": rope.cos})
    check_flag("rope.interleaved", rope.interleaved)
    half = rope.cos.shape[-1] if rope.cos.ndim else 0
    if not 0 < 2 * half <= head_dim:
        raise ShapeError(
            f"rope.cos is {list(rope.cos.shape)}: it must be [num_tokens, rotary_dim / 2], "
            f"rotary_dim at most the head_dim {head_dim} of K"
        )
    for name, tensor in (("rope.cos", rope.cos), ("rope.sin", rope.sin)):
        _check_tensor(name, tensor, torch.float32, (num_tokens, half))


def _check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    if not isinstance(tensor, torch.Tensor):
        check_tensors(**{name: tensor})
    if tensor.dtype != dtype:
        raise ConfigError(f"{name} is {tensor.dtype}: use {dtype}")
    if tensor.shape != shape or not tensor.is_contiguous():
        raise ShapeError(
            f"{name} is {list(tensor.shape)} with strides {list(tensor.stride())}: it must be "
            f"{list(shape)}, contiguous"
        )


def _check_devices(call: Append) -> None:
    k, device = call.k, call.k.device
    tensors = [call.v, call.k_rows, call.v_rows, call.exact_k, call.exact_v, call.bad, *call.slots]
    for transform in (call.k_transform, call.v_transform):
        if transform is not None:
            offset, _, *others = transform
            tensors += [offset, *others]
    if call.rope is not None:
        tensors += call.rope[:2]
    for tensor in tensors:
        if tensor is not None and tensor.device != device:
            raise DeviceError(
                f"k is on {k.device}, one of the other tensors {list(tensor.shape)} on "
                f"{tensor.device}"
            )
