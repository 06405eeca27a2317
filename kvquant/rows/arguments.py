"""Checks of the arguments of public calls: tensors, numbers, flags, devices."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Integral, Real
from typing import TypeGuard

import numpy as np
import torch

from ..errors import ConfigError, DeviceError, ShapeError, shown

MAX_LENGTH = 2**31 - 1  # lengths are int32
MOST_SCALE = 1e30  # of scores on CUDA: float32 holds what it is multiplied with
FLOATS = torch.float32, torch.bfloat16, torch.float16
INTEGERS = torch.int32, torch.int64


def check_tensors(**given: object) -> None:
    """Raise ConfigError unless each is a dense tensor."""
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                raise ConfigError(f"{name} is a nested tensor: give a dense one")
            if value.layout is torch.strided:
                continue
            raise ConfigError(f"{name} is {value.layout}: give a dense tensor, {name}.to_dense()")
        how = "give a tensor"
        if isinstance(value, np.ndarray):
            how += " (torch.from_numpy makes one of an array)"
        raise ConfigError(f"{name} is of type {type(value).__name__}: {how}")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | str] | None = None,
) -> None:
    """Raise unless a value is a dense tensor of one of these dtypes, and of this shape.

    shape: of each axis its size, or the name of an axis of any size; None for any shape.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        check_tensors(**{name: tensor})
    if tensor.dtype not in dtypes:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(f"{name} is {tensor.dtype}: use {allowed}")
    if shape is None or tensor.shape == shape:
        return
    sizes = zip(tensor.shape, shape, strict=False)
    if len(shape) != tensor.ndim or any(a != b and not isinstance(b, str) for a, b in sizes):
        must = ", ".join(map(str, shape))
        raise ShapeError(f"{name} is {list(tensor.shape)}: it must be [{must}]")


def check_same_device(**tensors: torch.Tensor | None) -> None:
    """Raise DeviceError unless all lie where the first one does."""
    device = None
    for name, tensor in tensors.items():
        if device is None:
            assert tensor is not None
            first, device = name, tensor.device
        elif tensor is not None and tensor.device != device:
            raise DeviceError(f"{first} is on {device}, {name} on {tensor.device}")


def check_readable(**given: object) -> None:
    """Raise ConfigError unless tensors have memory: fake ones, vmap's and DTensor have none."""
    check_tensors(**given)
    if torch.compiler.is_compiling():
        return
    for name, value in given.items():
        assert isinstance(value, torch.Tensor)
        if value.is_cpu or value.is_cuda:
            address(value, name)


def address(tensor: torch.Tensor, name: str = "one of the tensors") -> int:
    """The address of a tensor's values, 0 if it has none; ConfigError if not in memory."""
    try:
        found = tensor.data_ptr()
    except Exception:  # of torch, as RuntimeError or as a warning
        found = 0
    # a view of what begins nowhere begins at its offset
    if found <= tensor.storage_offset() * tensor.itemsize and tensor.numel():
        raise ConfigError(
            f"{name} is a {type(tensor).__name__} whose values lie nowhere in memory: it is fake, "
            "wraps other tensors (DTensor, vmap, grad), or its storage was freed. Give a plain one"
        )
    return found


def check_device(device: torch.device | str, *, or_meta: bool = False) -> torch.device:
    """The device, if kernels serve it (DeviceError else); "cuda" is the current GPU.

    or_meta allows "meta", where an empty cache takes no memory and its nbytes is what it would
    take.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"device {shown(device)} does not exist: use 'cpu' or 'cuda'") from error
    if found.type not in ("cpu", "cuda") and not (or_meta and found.type == "meta"):
        raise DeviceError(f"no kernel serves device {str(found)!r}: use 'cpu' or 'cuda'")
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not torch.backends.cuda.is_built():
            why = f"torch {torch.__version__} was built without CUDA"
        elif not count:
            why = "torch finds no NVIDIA GPU with a driver that it can use"
        else:
            why = f"there are {count} GPUs, the first one is cuda:0"
        if (found.index or 0) >= count:
            raise DeviceError(f"device {str(found)!r} cannot be used: {why}")
        if found.index is None:  # else it would not equal the device of tensors that lie there
            found = torch.device("cuda", torch.cuda.current_device())
    return found


def check_kind(name: str, value: object, kind: type, how: str) -> None:
    """Raise ConfigError unless a value is of a kind: "{name} is of type ...: {how}"."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is of type {name_of_kind(value)}: {how}")


def name_of_kind(value: object) -> str:
    """The name of a value's type, with "transformers." before its QuantizedCache and others."""
    kind = type(value)
    is_theirs = kind.__module__.partition(".")[0] == "transformers"
    return "transformers." * is_theirs + kind.__name__


def check_flag(name: str, value: bool) -> None:
    """Raise ConfigError unless a value is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {shown(value)}: use True or False")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number of any kind, but no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_size(name: str, size: int, *, at_least: int = 0) -> int:
    """A size as an int; ConfigError unless it is a whole number within bounds."""
    if not is_whole(size) or not at_least <= size <= MAX_LENGTH:
        raise ConfigError(
            f"{name} {shown(size)} is not possible: use a whole number from {at_least} to "
            f"{MAX_LENGTH}"
        )
    return operator.index(size)


def check_scale(sm_scale: float) -> float:
    """A factor on scores as a float; ConfigError unless finite. torch.compile traces this."""
    if not isinstance(sm_scale, float):
        if not isinstance(sm_scale, Real) or isinstance(sm_scale, bool):
            raise ConfigError(f"sm_scale is {shown(sm_scale)}: use a number")
        try:
            sm_scale = float(sm_scale)
        except OverflowError:
            sm_scale = math.inf
    if not torch.compiler.is_compiling() and not math.isfinite(sm_scale):
        raise ConfigError(f"sm_scale is {sm_scale}: use a finite number")
    return sm_scale


def check_cuda_scale(sm_scale: float) -> float:
    """A factor on scores that CUDA kernels take: masks and maxima count on its being positive."""
    if type(sm_scale) is not float:
        sm_scale = check_scale(sm_scale)
    if not 0 < sm_scale < MOST_SCALE:
        raise ConfigError(
            f"sm_scale {sm_scale} is not possible on CUDA: use a positive number below "
            f"{MOST_SCALE:g}, or backend='reference'"
        )
    return sm_scale


def check_num_splits(num_splits: int | None) -> int | None:
    """A number of splits as an int; ConfigError unless it is whole and within bounds. Traced."""
    if num_splits is None:
        return None
    is_int = isinstance(num_splits, int) and not isinstance(num_splits, bool)
    if is_int and 1 <= num_splits <= MAX_LENGTH:  # a number of a graph stays one
        return num_splits
    if not is_whole(num_splits) or not 1 <= num_splits <= MAX_LENGTH:
        raise ConfigError(
            f"num_splits {shown(num_splits)} is not possible: use a whole number from 1 to "
            f"{MAX_LENGTH}, or None"
        )
    return operator.index(num_splits)
