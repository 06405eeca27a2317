"""Checks of memory before a cache takes any."""

from __future__ import annotations

import os

import torch

from ..errors import ConfigError


def available_memory() -> int | None:
    """Bytes that this process may still take; None where the system does not say."""
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
    """Raise ConfigError "{what} takes ... GiB, more than there is: {advice}" unless there may be
    room.

    A GPU raises by itself; the system would end the process.
    """
    available = available_memory() if device.type == "cpu" else None
    if nbytes > 2**62 or (available is not None and nbytes > available):
        gib = f"{nbytes / 2**30:,.1f} GiB"
        raise ConfigError(f"{what} takes {gib}, more than there is: {advice}")
