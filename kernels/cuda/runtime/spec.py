"""The base of all specs: what a kernel is compiled for, and the one table of its arguments.

    ("rows", "P")       name and code: P an address, Q bytes, i int32, I uint32, f float32
    ("k", SIDE)         a table: the kernel gets a tuple

numba's types, the packed bytes and the places of names follow from it. Nothing here needs numba.
"""

from __future__ import annotations

import importlib
import itertools
import struct
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

Table: TypeAlias = "tuple[tuple[str, str | Table], ...]"
Piece: TypeAlias = "int | bytes"
NUMBA_TYPES = {"P": "uint64", "Q": "uint64", "i": "int32", "I": "uint32", "f": "float32"}


def fields_of(table: Table) -> tuple[tuple[str, str], ...]:
    """Names and codes one after another; those in a tuple by dotted names, such as k.rows."""
    found: list[tuple[str, str]] = []
    for name, code in table:
        if isinstance(code, str):
            found.append((name, code))
        else:
            found += [(f"{name}.{inner}", one) for inner, one in fields_of(code)]
    return tuple(found)


def addresses_of(table: Table) -> tuple[str, ...]:
    return tuple(name for name, code in fields_of(table) if code == "P")


def layout_of(table: Table) -> str:
    """A struct format: every field is naturally aligned, as CUDA wants."""
    return "@" + "".join(code for _, code in fields_of(table))


class Spec:
    """What the machine code of a kernel depends on, but for the architecture: a frozen dataclass of
    numbers.

    Attributes:
        kernel: the name of the function that makes it, below kernels/cuda; it imports numba.
        warps: of a block; a spec without them has `threads`.
        overlaps: whether a launch may begin before the one before it on the stream is complete, for
            which the kernel waits; sm_90 and newer.
        arch_specific: whether the kernel has instructions of one architecture alone (sm_90a).
    """

    kernel: ClassVar[str]
    warps: int
    overlaps: bool = False
    arch_specific: ClassVar[bool] = False

    @property
    @abstractmethod
    def arguments(self) -> Table:
        """The table of the kernel's arguments."""

    def build(self) -> Any:
        """The kernel, a Python function that numba compiles; imports numba."""
        module, _, make = self.kernel.rpartition(".")
        return getattr(importlib.import_module(f"..{module}", __package__), make)(self)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        return 0

    @property
    def most_registers(self) -> int | None:
        """Registers of a thread that the compiler may take; None: as many as it likes."""
        return None

    def signature(self) -> tuple[Any, ...]:
        """The numba types of the kernel's arguments; imports numba."""
        from numba import types

        def numba_type(code: str | Table) -> Any:
            if isinstance(code, str):
                return getattr(types, NUMBA_TYPES[code])
            return types.Tuple([numba_type(inner) for _, inner in code])

        return tuple(numba_type(code) for _, code in self.arguments)

    def pack(self, constants: Mapping[str, float]) -> list[Piece]:
        """The arguments in turn: places among the addresses, or packed constants."""
        pieces, places = list[Piece](), itertools.count()
        fields = fields_of(self.arguments)
        for are_addresses, run in itertools.groupby(fields, lambda field: field[1] == "P"):
            names, codes = zip(*run, strict=True)
            if are_addresses:
                pieces += itertools.islice(places, len(names))
            else:
                layout = "@" + "".join(codes)
                pieces.append(struct.pack(layout, *(constants[name] for name in names)))
        return pieces
