"""What the kernel for many heads is compiled for, and its shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvquant.rows.format import RowFormat

from ...device.row_layout import operand_of
from ...runtime.spec import Spec
from ..mma.spec import MlaSpec
from ..spec import MLA

COLUMNS = TOKENS = 64  # of a block: M of its products; of a tile
STAGES = 2  # tiles in shared memory
LATENT_DIM, ROPE_DIM = 512, 64
BLOCKS = (LATENT_DIM + ROPE_DIM) // 64  # of 64 elements each, of a tile and of the queries
STAGE = 64 * 128 * BLOCKS  # bytes
# after the queries and the stages, for each stage: of a token the inverse of the power of two that
# its row is multiplied by, and its exponent; of a column what the output so far is multiplied by;
# of a warp whether it is. Then of a column a factor: of its scores, at the end of its output
POWERS, FACTORS, FLAGS, NOTES = 0, 8 * TOKENS, 12 * TOKENS, 12 * TOKENS + 16
QUERIES, FIRST_STAGE = 0, STAGE
FIRST_NOTES = FIRST_STAGE + STAGES * STAGE
SHARES = FIRST_NOTES + STAGES * NOTES
GROUP = 128  # threads of a warpgroup
# registers of a thread of the rows, of the scores, of each half of the values: 512 in all
REGISTERS_EXACT, REGISTERS_PACKED = (96, 96, 160), (112, 80, 160)
# barriers; FULL, READY and FREE are of the first stage, the numbers after them of the second one.
# OWN: the scores of a tile are done, and P may take the place of RoPE elements; END: shares are
# there, and no half reads the stages any more; DONE: the output stands where they were
FULL, READY, FREE, OWN, END, DONE = 1, 3, 5, 7, 8, 9


@dataclass(frozen=True)
class WideMlaSpec(Spec):
    """An MLA decode kernel for 64 columns a block; sm_90 alone; attributes as of MlaSpec."""

    latent: RowFormat
    rope: RowFormat
    query: str = "bf16"
    place: str = "linear"
    causal: bool = False
    overlapped: bool = False

    arguments = MLA
    kernel = "mla.wgmma.kernel.make_wide_kernel"
    warps = 16
    arch_specific: ClassVar[bool] = True
    shared_bytes = SHARES + 4 * COLUMNS

    @classmethod
    def of(cls, spec: MlaSpec) -> WideMlaSpec:
        """The kernel for many heads that does what another one does for few."""
        return cls(spec.latent, spec.rope, spec.query, spec.place, spec.causal, spec.overlapped)

    @property
    def codec(self) -> str:
        return operand_of(self.latent)

    @property
    def parts(self) -> tuple[RowFormat, RowFormat]:
        return self.latent, self.rope

    @property
    def orders(self) -> tuple[str, str]:
        """The orders of eight elements of both parts, as in device/codes.py."""
        as_it_is = "as they are"
        of_codes = self.latent.pick(nibbles="pairs", bytes="bytes", elements=as_it_is)
        of_latent = self.latent.pick(integers=of_codes, e4m3=as_it_is, bf16=as_it_is, fp16=as_it_is)
        return of_latent, self.rope.pick(elements=as_it_is, bytes="bytes")

    @property
    def shares(self) -> tuple[int, int, int]:
        """Registers of a thread of the rows, of the scores, of the values."""
        return REGISTERS_EXACT if self.latent.is_exact else REGISTERS_PACKED

    @property
    def row_bytes(self) -> int:
        return self.latent.row_bytes + self.rope.row_bytes

    @property
    def behind(self) -> bool:
        """As of MlaSpec."""
        return self.latent.pick(scales=True, pairs=False, none=False)


def is_wide(spec: MlaSpec) -> bool:
    """Whether the kernel for many heads reads such rows: usual size, 16-bit or packed."""
    sizes = spec.latent.head_dim, spec.rope.head_dim
    is_one_kind = not spec.latent.is_exact or spec.latent.codec == spec.rope.codec
    return sizes == (LATENT_DIM, ROPE_DIM) and is_one_kind
