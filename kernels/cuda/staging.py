"""How rows stand in shared memory, and how their codes fall to the lanes of a warp.

    shared memory, one row      ┌ pad ┬ header ┬ codes, 16 bytes a chunk ┬ pad ┐
                                0            prefix                         stride

ldmatrix reads 8 rows x 16 bytes at once: without bank conflicts if the rows are an odd number of
16-byte units apart. An 80-byte row is (5 units) and needs no pad; a 68-byte row gets 12 bytes
before its header, so that its codes start at a unit; a 256-byte row gets a 17th unit.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvquant.errors import UnsupportedError
from kvquant.layout import RowFormat

UNIT = 16  # bytes


@dataclass(frozen=True)
class StagedRow:
    """The facts of a format in shared memory, for constants of a kernel.

    Attributes:
        fmt: the format.
    """

    fmt: RowFormat

    def __post_init__(self) -> None:
        fmt = self.fmt
        if fmt.groups > 1 and fmt.group_size % self.span and self.span % fmt.group_size:
            raise UnsupportedError(
                f"{fmt} with head_dim {fmt.head_dim} has no CUDA kernel: its groups of "
                f"{fmt.group_size} do not line up with the {self.span} elements in 16 bytes. Use "
                "other groups, or backend='reference'"
            )

    @property
    def span(self) -> int:
        """Elements in a chunk of 16 bytes; for 16-bit rows in the two chunks of an MMA."""
        return 32 if self.fmt.codec == "int4" else 16

    @property
    def prefix(self) -> int:
        """Bytes before the codes: the header and the pad that aligns the codes."""
        return 0 if self.fmt.is_exact else max(UNIT, self.fmt.header_bytes)

    @property
    def header(self) -> int:
        """Byte at which the header, and so the row itself, starts."""
        return self.prefix - self.fmt.header_bytes

    @property
    def chunks(self) -> int:
        """Units of codes, the last one perhaps not full."""
        return -(-self.fmt.code_bytes // UNIT)

    @property
    def stride(self) -> int:
        """Bytes from a row to the next: an odd number of units."""
        units = -(-(self.prefix + self.fmt.code_bytes) // UNIT)
        return UNIT * (units + 1 - units % 2)

    @property
    def granule(self) -> int:
        """Bytes of one asynchronous copy: what rows are aligned to in global memory, at most 16."""
        return min(self.fmt.alignment, UNIT)

    @property
    def pieces(self) -> int:
        """Copies that bring a row."""
        return self.fmt.row_bytes // self.granule

    @property
    def parts(self) -> int:
        """Groups that share a chunk; their products are kept apart by zeros."""
        if self.fmt.groups == 1 or self.fmt.group_size % self.span == 0:
            return 1
        return self.span // self.fmt.group_size

    @property
    def mmas(self) -> int:
        """MMAs that one part of a chunk takes."""
        return 2 if self.fmt.codec == "int4" else 1

    @property
    def factor(self) -> float:
        """By what the fp16 numbers in the MMAs are too small: codes stand there as subnormals."""
        if self.fmt.is_exact:
            return 1.0
        return 2.0**8 if self.fmt.codec == "fp8" else 2.0**24
