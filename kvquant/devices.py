"""Which kernels serve a tensor: those of its device, or the slow way that serves any."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from .errors import ConfigError, DeviceError, shown

DEVICES = ("cpu", "cuda")  # that have kernels
_NOTHING = nullcontext()


def check_device(device: torch.device | str) -> torch.device:
    """A device that a cache can lie on.

    Raises:
        ConfigError: there is no such name.
        DeviceError: no kernels serve it, or it is not there.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"device {shown(device)} does not exist: use 'cpu' or 'cuda'") from error
    if found.type not in DEVICES:
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
    return found


def available_memory() -> int | None:
    """Bytes that this process may still take, where the system says so."""
    found = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found.append(int(file.read().split("MemAvailable:")[1].split()[0]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            found.append(int(file.read()))
    except (OSError, ValueError):
        pass
    if not found:
        try:
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        except (AttributeError, OSError, ValueError):
            pass
    return min(found, default=None)


def check_room(nbytes: int, device: torch.device, what: str, advice: str) -> None:
    """Raise unless there may be memory for so many bytes, before any of it is taken.

    A GPU tells by itself when it is asked for too much, where the system only ends the process.

    Raises:
        ConfigError: "{what} takes ... GiB, more than there is: {advice}".
    """
    available = available_memory() if device.type == "cpu" else None
    if nbytes > 2**62 or (available is not None and nbytes > available):
        gib = f"{nbytes / 2**30:,.1f} GiB"
        raise ConfigError(f"{what} takes {gib}, more than there is: {advice}")


def kernels_for(tensor: torch.Tensor, backend: str | None, slow: str) -> str:
    """Name the backend that serves a tensor, or check the one that was asked for.

    Args:
        tensor: of the call.
        backend: "cpu", "cuda" or the slow one; by the tensor's device when None.
        slow: the backend that serves any device, never taken unasked.

    Raises:
        ConfigError: the backend does not exist.
        DeviceError: it does not serve the tensor's device, or no kernel does.
    """
    device = tensor.device.type
    if backend is None:
        if device not in DEVICES:
            raise DeviceError(
                f"no kernel serves {tensor.device}: move the tensors to the CPU or to CUDA, or "
                f"pass backend={slow!r}, which is slow"
            )
        return device
    if backend not in (*DEVICES, slow):
        known = " or ".join((*DEVICES, slow))
        raise ConfigError(f"backend {shown(backend)} does not exist: use {known}")
    if backend not in (slow, device):
        raise DeviceError(
            f"backend {backend!r} takes {backend.upper()} tensors, not {tensor.device}"
        )
    return backend


def full_precision(x: torch.Tensor) -> AbstractContextManager[object]:
    """Let products of tensors on the device of x keep their dtype, inside torch.autocast too."""
    device = x.device.type
    if device in DEVICES and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return _NOTHING
