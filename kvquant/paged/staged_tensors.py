"""StagedTensors: small tensors at fixed addresses, set together by one copy from the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..cache.copying import NotCopied
from ..cache.memory import check_room

_ALIGNMENT = 16


class StagedTensors(NotCopied):
    """Tensors that a CUDA graph reads, and arrays with their next values.

    On CUDA two pinned buffers alternate, so that one may still be copied; next_arrays waits for the
    copy before that. On the CPU the arrays are the tensors.

    specs has dtype and shape of each tensor by name. tensors, by name, are at fixed addresses and
    zeros at first. It raises ConfigError without enough memory.
    """

    def __init__(
        self, specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
    ) -> None:
        on_cuda = device.type == "cuda"
        places, end = {}, 0
        for name, (dtype, shape) in specs.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            places[name] = slice(end, end + size)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        check_room(end, device, "a batch", "use a smaller max_batch, max_tokens or max_seq_len")
        self._target = torch.zeros(end, dtype=torch.uint8, device=device)
        self._hosts, self._events = [self._target], []
        if device.type != "cpu":
            self._hosts = [
                torch.zeros(end, dtype=torch.uint8, device="cpu", pin_memory=on_cuda)
                for _ in range(2)
            ]
        if on_cuda:
            self._events = [torch.cuda.Event() for _ in self._hosts]
        self._turn = 0

        def views(buffer: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: buffer[places[name]].view(dtype).view(shape)
                for name, (dtype, shape) in specs.items()
            }

        self.tensors = views(self._target)
        self._arrays: list[dict[str, NDArray[Any]]] = [
            {name: view.numpy() for name, view in views(host).items()} for host in self._hosts
        ]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._target.nbytes

    def next_arrays(self) -> dict[str, NDArray[np.int64]]:
        """Arrays to fill, which may still hold the values before the last ones."""
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._events:
            self._events[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self) -> None:
        """Set the tensors to the arrays, on the current stream."""
        if self._events:
            self._target.copy_(self._hosts[self._turn], non_blocking=True)
            self._events[self._turn].record(torch.cuda.current_stream(self._target.device))
