"""Where tensors lie, by names of devices that stand for several."""

from __future__ import annotations

from typing import Any

import torch


def is_on(device: torch.device, name: str) -> bool:
    """Whether it is the device of this name; what lies on "cpu:0" says "cpu"."""
    wanted = torch.device(name)
    return device == wanted if wanted.type == "cuda" else device.type == wanted.type


def moved(value: Any, device: torch.device | str) -> Any:
    """A copy of it on a device; of lists and named tuples, one of copies of their parts."""
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, list):
        return [moved(x, device) for x in value]
    return type(value)(*(moved(x, device) for x in value)) if hasattr(value, "_fields") else value
