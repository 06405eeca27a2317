"""States of ranks whose GPUs write into one another's memory, in one launch; see kernel.py."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..decode.arrange import CODECS
from ..runtime.launch import Launch, cached_launch
from ..runtime.spec import Spec, Table

MOST_RANKS = 32  # a lane each
MOST_ROWS = 4096  # query heads of all sequences: 1,024 blocks, which a GPU holds at once
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of a Linux kernel

EXCHANGE: Table = (
    ("out", "P"),  # [num_rows, head_dim], bfloat16 or float16, contiguous
    ("lse", "P"),  # [num_rows], float32, base e
    ("peers", "P"),  # int64 [world]: the address of each rank's memory
    ("calls", "P"),  # int32 [most_rows / warps]: how many calls each block has made
    ("rank", "i"),
    ("world", "i"),
    ("most_rows", "i"),
    ("num_rows", "i"),
)


@dataclass(frozen=True)
class ExchangeSpec(Spec):
    """The kernel that exchanges and merges states, a row a warp.

    Attributes:
        head_dim: elements of a row of out, a multiple of 4.
        query: "bf16" or "fp16", the codec of out.
    """

    head_dim: int
    query: str = "bf16"
    warps: int = 4

    arguments = EXCHANGE
    kernel = "ranks.kernel.make_exchange_kernel"


def slot_bytes(head_dim: int) -> int:
    """Bytes of a row's out and lse, a multiple of 16."""
    return -(-(2 * head_dim + 4) // 16) * 16


class Exchange:
    """The memory of this rank that all ranks write to, and the addresses of theirs.

    Args:
        memory: of this rank, uint8, zeros: `memory_bytes` of them.
        addresses: of the memory of all ranks, in order.
        rank: this one.
        head_dim: elements of a row of out.
        most_rows: of a call, a multiple of 16.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        addresses: list[int],
        rank: int,
        head_dim: int,
        most_rows: int = MOST_ROWS,
    ) -> None:
        self.memory, self.rank, self.head_dim, self.most_rows = memory, rank, head_dim, most_rows
        self._peers = torch.tensor(addresses, device=memory.device)
        blocks = most_rows // ExchangeSpec.warps
        self._calls = torch.zeros(blocks, dtype=torch.int32, device=memory.device)

    @staticmethod
    def memory_bytes(world: int, head_dim: int, most_rows: int = MOST_ROWS) -> int:
        """Bytes of a rank: flags of blocks, then two halves of slots."""
        flags = 4 * most_rows // ExchangeSpec.warps
        return world * (flags + 2 * most_rows * slot_bytes(head_dim))

    @classmethod
    def between(
        cls, group: dist.ProcessGroup | None, head_dim: int, device: torch.device
    ) -> Exchange | str:
        """Map the memory of the GPUs of a group, all ranks of which call this; or say why not."""
        group = group or dist.group.WORLD
        assert group is not None
        world = dist.get_world_size(group)
        host = BOOT_ID.read_text().strip() if BOOT_ID.exists() else socket.gethostname()
        places = [(host, str(torch.cuda.get_device_properties(device).uuid))] * world
        dist.all_gather_object(places, places[0], group)
        if len({host for host, _ in places}) > 1:
            return "the ranks are on several hosts"
        if len(set(places)) < world or world > MOST_RANKS:
            gpus = len(set(places))
            return f"{world} ranks have {gpus} GPUs: give at most {MOST_RANKS}, one each"
        found, error = None, ""
        try:
            import torch.distributed._symmetric_memory as symmetric_memory

            memory_bytes = cls.memory_bytes(world, head_dim)
            memory = symmetric_memory.empty(memory_bytes, dtype=torch.uint8, device=device)
            memory.zero_()
            starts, rank = symmetric_memory.rendezvous(memory, group).buffer_ptrs, group.rank()
            offset = memory.data_ptr() - starts[rank]  # of the tensor in what was mapped
            found = cls(memory, [start + offset for start in starts], rank, head_dim)
            torch.cuda.synchronize(device)  # the zeros are there before another rank writes
        except Exception as raised:  # what one rank cannot do none does
            error = f"{type(raised).__name__}: {raised}"
        errors = [error] * world
        dist.all_gather_object(errors, error, group)
        failed = next(filter(None, errors), None)
        return failed or found  # type: ignore[return-value]  # one of them is there

    def takes(self, out: torch.Tensor) -> bool:
        """Whether it merges states of such an out [..., head_dim]."""
        rows, fits = out.shape[:-1].numel(), out.shape[-1] == self.head_dim
        return fits and out.dtype in CODECS and out.is_contiguous() and 0 < rows <= self.most_rows

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a cache has None: other ranks do not write to the copy's memory."""
        return type(None), ()

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge states [..., head_dim] and [...], float32, of all ranks, in place.

        The states are those of each rank's tokens. They are contiguous; lse is -inf where a rank
        has no tokens of a sequence. All ranks make the same calls in the same order, each on one
        stream at a time.
        """
        index = out.get_device()
        key = ExchangeSpec, out.shape, out.dtype, self.rank, len(self._peers), self.most_rows, index
        launch = cached_launch(key, None, self._prepare, out)
        if launch is not None:
            launch((out, lse, self._peers, self._calls))

    def _prepare(self, out: torch.Tensor) -> Launch:
        spec = ExchangeSpec(self.head_dim, CODECS[out.dtype])
        rows = out.shape[:-1].numel()
        constants = {
            "rank": self.rank,
            "world": len(self._peers),
            "most_rows": self.most_rows,
            "num_rows": rows,
        }
        return Launch(spec, out.get_device(), (-(-rows // spec.warps), 1, 1), constants)
