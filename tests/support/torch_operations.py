"""What torch does in a block: for tests of how many operations there are, and how large."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Notes the names of operations, and the numbers that each gives; of views none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: list[str] = []
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        out = func(*args, **(kwargs or {}))
        is_new = isinstance(out, torch.Tensor) and not func.is_view
        self.sizes.append(out.numel() if is_new else 0)
        return out
