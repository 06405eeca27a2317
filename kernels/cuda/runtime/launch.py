"""Launch kernels: GPUs and their loaded kernels, and launches that are cached.

A launch is prepared once for all calls of the same shapes, strides, formats and dtypes. The next
call finds it in a dictionary, packs the addresses and launches: no host synchronization; safe in
CUDA graphs and from several threads. Launch.bind binds it to tensors that stay
(kvquant/rows/bound.py).
"""

from __future__ import annotations

import copy
import struct
import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

import torch

from kvquant import rehearsal
from kvquant.errors import UnsupportedError

from .compile import load_cubin
from .driver import Kernel, Launcher, peak_bandwidth
from .spec import Piece, Spec, addresses_of
from .tensors import Tensors, with_copies

MOST_LAUNCHES = 4096  # that are remembered
BLOCKS_PER_SM = 32  # more blocks walk over fewer heads each: a few waves, so that the last is short
# compute capabilities: of the kernels, of E4M3 instructions, of launches that overlap another
OLDEST, FP8, OVERLAPS = (8, 0), (8, 9), (9, 0)

# not in torch without CUDA
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# A tensor on the current device, of shape, strides and dtype; compiled code of torch makes its
# results by it. torch.empty takes 1.5 times as long: it goes through the dispatcher.
empty_strided: Any = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
_lock = threading.RLock()
_gpus: dict[int, GPU] = {}
_kernels: dict[tuple[Spec, int], Kernel] = {}
_launches: dict[Hashable, Any] = {}
Kept = TypeVar("Kept")
ADDRESS = struct.Struct("@P")
QUARTERS = 4  # of an SM; a warp has its registers in one of them
REGISTERS_PER_QUARTER = 1 << 14  # of every GPU from sm_80 on
RESERVED_SHARED = 1 << 10  # bytes of shared memory that the driver takes for each block


@dataclass(frozen=True)
class GPU:
    """What launches need to know of a GPU: its name, compute capability and SMs.

    Attributes:
        shared_per_sm, shared_per_block: bytes of shared memory, the most that there is.
        bandwidth: GB/s of its memory by clock and bus; 0 if that is not known.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    shared_per_sm: int
    shared_per_block: int
    bandwidth: float = 0.0

    @property
    def arch(self) -> str:
        """What kernels are compiled for."""
        return "sm_{}{}".format(*self.capability)

    @property
    def converts_fp8(self) -> bool:
        """Whether it has instructions for E4M3."""
        return self.capability >= FP8

    def blocks_per_sm(self, warps: int, registers: int, shared_bytes: int) -> int:
        """Blocks that an SM holds, of such warps, registers a thread and dynamic bytes."""
        if shared_bytes > self.shared_per_block:
            return 0
        granted = -(-registers // 8) * 8  # by eights
        most_warps = QUARTERS * (REGISTERS_PER_QUARTER // (granted * 32))
        return min(most_warps // warps, self.shared_per_sm // (shared_bytes + RESERVED_SHARED))


# of each architecture the GPU that kernels are chosen for where none is at hand
GPUS = {
    gpu.arch: gpu
    for gpu in (
        GPU("NVIDIA A100-SXM4-80GB", (8, 0), 108, 167936, 166912, 2039.0),
        GPU("NVIDIA A10", (8, 6), 72, 102400, 101376, 600.0),
        GPU("NVIDIA GeForce RTX 4090", (8, 9), 128, 102400, 101376, 1008.0),
        GPU("NVIDIA H200", (9, 0), 132, 233472, 232448, 4814.0),
        GPU("NVIDIA B200", (10, 0), 148, 233472, 232448, 8000.0),
        GPU("NVIDIA GeForce RTX 5090", (12, 0), 170, 102400, 101376, 1792.0),
    )
}


def gpu_of(index: int) -> GPU:
    """The GPU with this index, as torch counts; UnsupportedError if it is too old."""
    rehearsed = _rehearsed(index)
    if rehearsed is not None:
        gpu: GPU = rehearsed.gpu
        return gpu
    found = _gpus.get(index)  # without the lock, which is held while a kernel is compiled
    if found is not None:
        return found
    with _lock:
        if index not in _gpus:
            facts = torch.cuda.get_device_properties(index)
            capability = torch.cuda.get_device_capability(index)
            if capability < OLDEST:
                raise UnsupportedError(
                    "the CUDA kernels need compute capability 8.0 or newer (A100, RTX 30 and "
                    f"later), {facts.name} has {capability[0]}.{capability[1]}: pass "
                    "backend='reference', which runs anywhere but is slow"
                )
            _gpus[index] = GPU(
                facts.name,
                capability,
                facts.multi_processor_count,
                facts.shared_memory_per_multiprocessor,
                facts.shared_memory_per_block_optin,  # type: ignore[attr-defined]
                peak_bandwidth(index),
            )
        return _gpus[index]


def kernel_of(spec: Spec, index: int, most_shared: int = 0) -> Kernel:
    """A kernel on a GPU, loaded, and compiled if need be; Rehearsed if it was noted only.

    most_shared: bytes of shared memory that a launch may ask for, if more than the spec's.
    """
    rehearsed = _rehearsed(index)
    if rehearsed is not None:
        rehearsed.kernels[spec] = None
        raise Rehearsed
    found = _kernels.get((spec, index))
    if found is not None:
        return found
    arch = gpu_of(index).arch
    with _lock:
        if (spec, index) not in _kernels:
            cubin = load_cubin(spec, arch)
            _kernels[spec, index] = Kernel(
                cubin.code,
                cubin.name,
                index,
                threads=spec.threads,
                shared=spec.shared_bytes,
                most_shared=most_shared,
                registers=cubin.report.registers,
            )
        return _kernels[spec, index]


class Rehearsed(Exception):
    """A kernel is not there: kvquant.rehearsal has noted it."""


def _rehearsed(index: int) -> rehearsal.Rehearsal | None:
    """The rehearsal that is under way, if that is the index of tensors without memory."""
    return rehearsal.current() if index < 0 else None


class Launch:
    """A prepared call: everything but the addresses of its tensors."""

    def __init__(
        self,
        spec: Spec,
        index: int,
        grid: tuple[int, int, int],
        constants: Mapping[str, float],
        copied: Collection[int] = (),
        *,
        overlaps: bool = True,
    ) -> None:
        """Load the kernel and pack what stays.

        constants: the arguments that are no addresses, by name. copied: places of the tensors that
        the kernel cannot read where they are. overlaps: as of Launcher, if the spec may.
        """
        self.grid, self._index, self._copied = grid, index, tuple(copied)
        self._names = addresses_of(spec.arguments)
        self._kernel, self._overlaps = kernel_of(spec, index), overlaps and spec.overlaps
        self._put(spec.pack(constants))

    def _put(self, pieces: Sequence[Piece]) -> None:
        """Take arguments: of an address its place among those that at is given, or packed ones."""
        self._pieces = pieces
        self._constants = [piece for piece in pieces if isinstance(piece, bytes)]
        layout, order, packed = "@", list[int](), -len(self._constants)  # they come last
        for piece in pieces:
            if isinstance(piece, int):
                layout += "P"
                order.append(piece)
            else:
                layout += f"{len(piece)}s"
                order.append(packed)
                packed += 1
        # of a single argument itemgetter makes no tuple
        self._order = itemgetter(*order) if len(order) > 1 else itemgetter(slice(None))
        self._launch = Launcher(self._kernel, self.grid, layout, overlaps=self._overlaps)

    def bind(self, tensors: Tensors, new: Collection[str]) -> Launch | None:
        """This launch with tensors that stay: `at` takes addresses of the new ones, in order.

        new: their names. None if tensors are copied first, which `at` does not do.
        """
        if self._copied:
            return None
        pieces, count = list[Piece](), 0
        for piece in self._pieces:
            if isinstance(piece, int):
                if self._names[piece] in new:
                    pieces.append(count)
                    count += 1
                    continue
                tensor = tensors[piece]
                piece = ADDRESS.pack(0 if tensor is None else tensor.data_ptr())
            before = pieces[-1] if pieces else 0
            if isinstance(before, bytes):  # what follows is aligned as an address is
                pieces.pop()
                piece = before + bytes(-len(before) % ADDRESS.size) + piece
            pieces.append(piece)
        bound = copy.copy(self)
        bound._put(pieces)
        return bound

    def __call__(self, tensors: Tensors) -> None:
        """Launch on the GPU's current stream, with tensors in the kernel's order."""
        if self._copied:
            tensors = with_copies(tensors, self._copied)
        self.at([0 if one is None else one.data_ptr() for one in tensors])

    def at(self, addresses: Sequence[int]) -> None:
        """Launch as above, where nothing is to be copied; 0 stands for no tensor."""
        values = self._order((*addresses, *self._constants))
        if self._index == current_device():
            self._launch(current_stream(self._index), values)
            return
        with torch.cuda.device(self._index):
            self._launch(current_stream(self._index), values)


def cached_launch(
    key: Hashable,
    check: Callable[[], object] | None,
    prepare: Callable[..., Kept | None],
    *arguments: Any,
) -> Kept | None:
    """Find a launch, or prepare it and remember it; None if there is nothing to do, or only to
    rehearse.

    key: all that the check and the launch depend on. check raises unless the call is possible,
    prepare gives the launch; both are called only before it is prepared. UnsupportedError if the
    GPU is too old, DeviceError if CUDA refuses the launch.
    """
    launch: Kept | None = _launches.get(key)
    if launch is None:
        if check is not None:
            check()
        try:
            launch = prepare(*arguments)
        except Rehearsed:
            return None
        if launch is not None:
            keep(_launches, key, launch)
    return launch


def keep(launches: dict[Hashable, Kept], key: Hashable, launch: Kept) -> None:
    """Remember a launch among a limited number: the oldest one goes."""
    with _lock:
        if len(launches) >= MOST_LAUNCHES:  # such as a number of tokens that is new in every call
            del launches[next(iter(launches))]
        launches[key] = launch


def grid_of(
    num_tokens: int, num_heads: int, sides: int, tokens: int, num_sms: int
) -> tuple[int, int, int]:
    """Blocks: of tokens, of heads, sides."""
    groups = -(-num_tokens // tokens)
    heads = min(max(groups * num_heads * sides // (num_sms * BLOCKS_PER_SM), 1), num_heads)
    return groups, -(-num_heads // heads), sides
