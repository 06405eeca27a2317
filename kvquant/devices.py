"""Which kernels serve a tensor: those of its device, or the slow way that serves any."""

from __future__ import annotations

import torch

from .errors import ConfigError, DeviceError

DEVICES = ("cpu", "cuda")  # that have kernels


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
        raise ConfigError(f"backend {backend!r} does not exist: use {known}")
    if backend not in (slow, device):
        raise DeviceError(
            f"backend {backend!r} takes {backend.upper()} tensors, not {tensor.device}"
        )
    return backend
