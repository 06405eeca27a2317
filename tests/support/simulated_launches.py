"""Launch CUDA kernels in numba's simulator by their own launchers: what these pack is tested, too.

To be imported in a process of the simulator.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import simulator
import torch
from fake_cuda import CPU, arguments_of, empty_strided
from in_simulator import typed

from kvquant.kernels.cuda.decode import launch as decode
from kvquant.kernels.cuda.mla import launch as mla
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime.launch import GPU
from kvquant.kernels.cuda.slots import launch as slots

ONE_SM = GPU("one SM", (9, 0), 1, 233472, 232448)
REGISTERS = 128  # of a thread, as if the kernel had been compiled


class Simulation:
    """Kernels that are launched, and the memory that they may read and write.

    Attributes:
        backwards: whether blocks and lanes run in the other order.
        counters: those that were given to launches that merge splits.
    """

    def __init__(self, backwards: bool) -> None:
        self.backwards = backwards
        self.counters: list[torch.Tensor] = []
        self._tensors: list[torch.Tensor] = []

    def note(self, *values: Any) -> None:
        """Let kernels use these tensors, and those within tuples, lists and dictionaries."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self._tensors.append(value)
            elif isinstance(value, dict):
                self.note(*value.values())
            elif isinstance(value, (tuple, list)):
                self.note(*value)

    def noted(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The same function, whose result kernels may use."""

        def make_and_note(*given: Any, **options: Any) -> torch.Tensor:
            made = make(*given, **options)
            self.note(made)
            return made

        return make_and_note

    def unwritten(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The same of a function that allocates; numbers that nobody writes are NaN."""

        def make_and_spoil(*given: Any, **options: Any) -> torch.Tensor:
            made = make(*given, **options)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        return self.noted(make_and_spoil)

    def take(self, stream: int, counters: int, partial: int) -> SimpleNamespace:
        """A workspace, in place of those of runtime/workspace.py."""
        self.counters.append(torch.zeros(counters, dtype=torch.int32))
        kept = torch.full((partial,), torch.nan)
        self.note(self.counters[-1], kept)
        addresses = self.counters[-1].data_ptr(), kept.data_ptr()
        return SimpleNamespace(counters_address=addresses[0], partial_address=addresses[1])

    def launcher(
        self, kernel: Any, grid: Sequence[int], layout: str, *_: Any, **options: Any
    ) -> Callable[[int, Sequence[Any]], None]:
        """In place of driver.Launcher."""
        spec = kernel.spec

        def launch(stream: int, values: Sequence[Any]) -> None:
            given = arguments_of(spec, struct.pack(layout, *values))
            storages = [x.untyped_storage() for x in self._tensors]
            simulator.launch(
                spec.build(),
                grid,
                spec.threads,
                spec.shared_bytes,
                typed(spec, list(given.values())),
                [(one.data_ptr(), one.nbytes()) for one in storages],
                backwards=self.backwards,
            )

        return launch


def orders_of(name: str, *, both: bool) -> tuple[bool, ...]:
    """In which orders the blocks and lanes of a case run, as `backwards` of `simulated`.

    A case about blocks that meet in memory runs in both orders, because its result must not depend
    on the order. In other cases the simulator finds, in either order, what lanes do not order by
    barriers. Half of these cases run backwards.
    """
    return (False, True) if both else (len(name) % 2 == 1,)


@contextmanager
def simulated(*given: Any, gpu: GPU = ONE_SM, backwards: bool = False) -> Iterator[Simulation]:
    """Let all launchers launch in the simulator.

    Args:
        given: tensors that kernels may use, beside those that the launchers allocate.
        gpu: what the CPU is taken for.
        backwards: whether blocks and lanes run in the other order.
    """
    simulation = Simulation(backwards)
    simulation.note(*given)
    changes: dict[str, Any] = {
        "Launcher": simulation.launcher,
        "kernel_of": lambda spec, *_: SimpleNamespace(spec=spec, registers=REGISTERS),
        "current_device": lambda: CPU,
        "current_stream": lambda index: 0,
        "empty_strided": simulation.unwritten(empty_strided),
        "workspaces_of": lambda device: simulation,
        "_gpus": {CPU: gpu},
        "_launches": {},
    }
    with ExitStack() as stack:
        for module in (runtime, decode, mla, slots):
            of_module = {name: value for name, value in changes.items() if hasattr(module, name)}
            if of_module:
                stack.enter_context(mock.patch.multiple(module, **of_module))
        stack.enter_context(mock.patch.object(torch, "empty", simulation.unwritten(torch.empty)))
        yield simulation
