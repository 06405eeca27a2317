"""Where tensors lie, by names of devices that stand for several."""

from __future__ import annotations

import torch


def is_on(device: torch.device, name: str) -> bool:
    """Whether it is the device of this name; what lies on "cpu:0" says "cpu"."""
    wanted = torch.device(name)
    return device == wanted if wanted.type == "cuda" else device.type == wanted.type
