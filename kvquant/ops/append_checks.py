"""Checks of the arguments of append_rows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .. import debug
from ..errors import ConfigError, ShapeError
from ..rehearsal import is_rehearsed
from ..rows.arguments import (
    FLOATS,
    address,
    check_flag,
    check_kind,
    check_readable,
    check_same_device,
    check_tensor,
    check_tensors,
)
from ..rows.basis import Basis, Encoding
from ..rows.call import AppendCall
from ..rows.codec import check_exact_format
from ..rows.format import RowFormat
from ..rows.latent import AnyFormat
from ..rows.quantize import check_rows
from ..rows.rotation import Rope
from ..rows.slots import Slots
from .slots import check_slots

Names = tuple[str, str]  # of what is appended, in messages
K_AND_V: Names = ("k", "v")
# where rows lay that were found to be apart: addresses, shapes, strides
_apart: set[tuple[object, ...]] = set()
_MOST_APART = 1024


def check_call(call: AppendCall) -> None:
    """Raise the errors of append_rows unless tokens can be appended; reads readable values."""
    check_append(call)
    k = call.k
    if not is_rehearsed(k.x):  # such rows have no memory
        _check_written(call)
    if debug.may_read(k.x):
        exact = 0 if k.exact_rows is None else k.exact_rows.shape[0] * k.exact_rows.shape[2]
        check_slots(call.slots, k.rows.shape[0] * k.rows.shape[2], exact)


def check_append(call: AppendCall) -> None:
    """Raise unless the arguments fit one another; values are not read."""
    k, v, slots, _, rope, bad = call
    num_tokens, num_kv_heads = check_new(k.x, v.x)
    check_pages("k_rows", k.rows, k.fmt)
    check_pages("v_rows", v.rows, v.fmt)
    _check_storage(("k_rows", "v_rows"), k.rows, v.rows, num_kv_heads)
    _check_exact(call, num_kv_heads)
    for name, one in zip(Slots._fields, slots, strict=True):
        if one is not None:
            check_contiguous(f"slots.{name}", one, torch.int64, (num_tokens,))
    for name, side in (("k_transform", k), ("v_transform", v)):
        _check_transform(name, side.transform, num_kv_heads, side.fmt.head_dim)
    if rope is not None:
        _check_rope(rope, num_tokens, k.fmt.head_dim)
    if bad is not None:
        check_contiguous("bad", bad, torch.int32, (2,))
    given = {"k": k.x, "v": v.x, "bad": bad}
    for name, side in (("k", k), ("v", v)):
        given |= {f"{name}_rows": side.rows, f"exact_{name}": side.exact_rows}
        given |= {f"{name}_transform.{at}": x for at, x in _tensors(side.transform)}
    given |= {f"slots.{at}": x for at, x in _tensors(slots)}
    given |= {f"rope.{at}": x for at, x in _tensors(rope or ())}
    check_same_device(**given)


def check_tokens(call: AppendCall, names: Names = K_AND_V) -> None:
    """Raise unless new tokens and rope fit the rows (all that a cache does not know)."""
    k, v, _, _, rope, _ = call
    num_tokens, num_kv_heads = check_new(k.x, v.x, names)
    heads = k.rows.shape[1]
    if heads != num_kv_heads:
        how = ". Give {}.transpose(0, 1) and {}.transpose(0, 1)" if heads == num_tokens else ""
        raise ShapeError(
            f"{names[0]} and {names[1]} have {num_kv_heads} KV heads, the cache {heads}"
            f"{how.format(*names)}"
        )
    if rope is not None:
        _check_rope(rope, num_tokens, k.fmt.head_dim)
    rotary = {f"rope.{at}": x for at, x in _tensors(rope or ())}
    check_same_device(**dict(zip(names, (k.x, v.x), strict=True)), rows=k.rows, **rotary)


def check_types(
    k: torch.Tensor,
    v: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slots: Slots,
    exact_k: torch.Tensor | None,
    exact_v: torch.Tensor | None,
    k_transform: Basis | None,
    v_transform: Basis | None,
    rope: Rope | None,
) -> None:
    check_new_types(k, v, rope)
    check_readable(k_rows=k_rows, v_rows=v_rows, slots=slots.packed)
    optional = {"exact_k": exact_k, "exact_v": exact_v}
    optional |= {f"slots.{name}": x for name, x in slots._asdict().items()}
    check_readable(**{name: x for name, x in optional.items() if x is not None})
    for name, transform in (("k_transform", k_transform), ("v_transform", v_transform)):
        if transform is not None:
            check_kind(name, transform, Basis, "give a Basis")


def check_new_types(
    k: torch.Tensor, v: torch.Tensor, rope: Rope | None, names: Names = K_AND_V
) -> None:
    check_readable(**dict(zip(names, (k, v), strict=True)))
    if rope is not None:
        check_kind("rope", rope, Rope, "give Rope(cos, sin)")


def check_apart(k_name: str, k_rows: torch.Tensor, v_name: str, v_rows: torch.Tensor) -> None:
    """Raise ConfigError if K and V begin at one address."""
    if k_rows.data_ptr() == v_rows.data_ptr() != 0 and k_rows.numel():
        raise ConfigError(f"{k_name} and {v_name} are one tensor: K and V need one each")


def _check_written(call: AppendCall) -> None:
    """Raise unless every row to write has memory of its own, and is no tensor of inference mode."""
    k, v, bad = call.k, call.v, call.bad
    given = {"k_rows": k.rows, "v_rows": v.rows, "exact_k": k.exact_rows, "exact_v": v.exact_rows}
    written = {name: rows for name, rows in given.items() if rows is not None}
    places = tuple((rows.data_ptr(), rows.shape, rows.stride()) for rows in written.values())
    if places not in _apart:  # takes longer than the rest of a small call
        _check_apart(written)
        if len(_apart) >= _MOST_APART:
            _apart.clear()
        _apart.add(places)
    if not torch.is_inference_mode_enabled():
        for tensor in (*written.values(), bad):
            if tensor is not None and tensor.is_inference():
                raise ConfigError(
                    "rows or counters were made in torch.inference_mode(), outside of which torch "
                    "does not let them be changed: append inside, or give their clone()"
                )


def _check_apart(written: Mapping[str, torch.Tensor]) -> None:
    for name, rows in written.items():
        address(rows, name)
        if not _are_apart(rows.shape, rows.stride()):
            raise ShapeError(
                f"{name} has strides {list(rows.stride())} for {list(rows.shape)}: some of its "
                "rows share memory, as those of expand() do: give a tensor with its own"
            )
    for (name, rows), (other_name, other) in itertools.combinations(written.items(), 2):
        if _share_memory(rows, other):
            raise ConfigError(f"{name} and {other_name} share memory: rows need their own")


def _are_apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements share a place.

    The axes of a slice or a transpose can be ordered so that each stride is larger than the reach
    of all axes before it.
    """
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach += (size - 1) * stride
    return True


class _Bytes:
    """A tensor's addresses as numpy takes them, on any device."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (rows.data_ptr(), False),
            "shape": tuple(rows.shape),
            "strides": rows.stride(),
        }


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share a byte; K and V of one pool of pages do not."""
    if not a.numel() or not b.numel():
        return False
    return np.shares_memory(np.asarray(_Bytes(a)), np.asarray(_Bytes(b)))


def check_new(k: torch.Tensor, v: torch.Tensor, names: Names = K_AND_V) -> tuple[int, int]:
    """Check that K and V are rows of the same tokens; return num_tokens and num_kv_heads."""
    k_name, v_name = names
    if k.ndim != 3 or v.ndim != 3 or k.shape[:2] != v.shape[:2]:
        raise ShapeError(
            f"{k_name} is {list(k.shape)} and {v_name} {list(v.shape)}: both must be [num_tokens, "
            "num_kv_heads, head_dim], alike but for head_dim"
        )
    check_tensor(k_name, k, FLOATS)
    check_tensor(v_name, v, [k.dtype])
    for name, x in zip(names, (k, v), strict=True):
        if x.stride(-1) != 1 and x.numel():
            raise ShapeError(
                f"{name} has strides {list(x.stride())}: the elements of a row must be contiguous"
            )
    return k.shape[0], k.shape[1]


def _check_storage(
    names: tuple[str, str], k_rows: torch.Tensor, v_rows: torch.Tensor, num_kv_heads: int
) -> None:
    """Raise unless K and V have the same pages, with the KV heads of the new tokens."""
    shape = k_rows.shape
    if shape[:3] != v_rows.shape[:3]:
        raise ShapeError(
            f"{names[0]} {list(shape)} and {names[1]} {list(v_rows.shape)} must be alike but for "
            "the bytes of a row"
        )
    if shape[1] != num_kv_heads:
        raise ShapeError(f"k and v have {num_kv_heads} KV heads, {names[0]} has {shape[1]}")


def check_pages(name: str, rows: torch.Tensor, fmt: AnyFormat) -> None:
    check_rows(rows, fmt, name)
    if rows.ndim != 4 or rows.stride(-1) != 1:
        raise ShapeError(
            f"{name} is {list(rows.shape)} with strides {list(rows.stride())}: it must be "
            "[num_pages, num_kv_heads, page_size, row_bytes], the bytes of a row contiguous"
        )


def _check_exact(call: AppendCall, num_kv_heads: int) -> None:
    """Raise unless 16-bit rows and their slots fit, and all or none are given."""
    k, v, slots, codec, _, _ = call
    check_exact_format(codec)
    has_slots = slots.exact is not None and slots.evicted is not None
    if k.exact_rows is not None and v.exact_rows is not None and has_slots:
        check_pages("exact_k", k.exact_rows, RowFormat.parse(codec, k.fmt.head_dim))
        check_pages("exact_v", v.exact_rows, RowFormat.parse(codec, v.fmt.head_dim))
        _check_storage(("exact_k", "exact_v"), k.exact_rows, v.exact_rows, num_kv_heads)
        return
    together = {
        "exact_k": k.exact_rows,
        "exact_v": v.exact_rows,
        "slots.exact": slots.exact,
        "slots.evicted": slots.evicted,
    }
    missing = [name for name, tensor in together.items() if tensor is None]
    if len(missing) < len(together):
        raise ConfigError(
            f"{' and '.join(missing)} missing: {', '.join(together)} are given together, or none"
        )


def _check_transform(name: str, transform: Encoding, num_kv_heads: int, head_dim: int) -> None:
    row, square = (num_kv_heads, head_dim), (num_kv_heads, head_dim, head_dim)
    for what, tensor, shape in (
        ("offset", transform.offset, row),
        ("matrix", transform.matrix, square),
        ("clip", transform.clip, (num_kv_heads,)),
        ("feedback", transform.feedback, square),
    ):
        if tensor is not None:
            check_contiguous(f"{name}.{what}", tensor, torch.float32, shape)


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
        check_contiguous(name, tensor, torch.float32, (num_tokens, half))


def check_contiguous(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """check_tensor, of a contiguous one."""
    check_tensor(name, tensor, [dtype])
    if tensor.shape != shape or not tensor.is_contiguous():
        raise ShapeError(
            f"{name} is {list(tensor.shape)} with strides {list(tensor.stride())}: it must be "
            f"{list(shape)}, contiguous"
        )


def _tensors(fields: tuple[Any, ...]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a named tuple, by name."""
    named = zip(getattr(fields, "_fields", ()), fields, strict=True)
    return [(name, x) for name, x in named if isinstance(x, torch.Tensor)]
