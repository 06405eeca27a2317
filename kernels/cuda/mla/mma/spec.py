"""What the kernel for few heads is compiled for, and its shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from kvquant.errors import UnsupportedError
from kvquant.rows.format import NAMES, RowFormat
from kvquant.rows.segment import RUN

from ...device.row_layout import UNIT, mmas_of
from ...runtime.spec import Spec
from ..spec import MLA

SLICES = 4  # warps of a team: each has a quarter of the latent elements
TILE = 8 * SLICES  # tokens that a team works on at a time: eight for each warp's softmax
ROWS = 16  # columns of an MMA: its M
FRAGMENT = 512  # bytes of a fragment of 4 words a lane


def _is_read(fmt: RowFormat, part: str) -> bool:
    """Whether the kernel reads a part of rows: whole units of copies, groups of one or two MMAs."""
    least = 2 * UNIT * (SLICES if part == "latents" else 1)
    fits = not (fmt.header_bytes % UNIT or fmt.code_bytes % least)
    return fits and not fmt.group_size % (16 * mmas_of(fmt))


@dataclass(frozen=True)
class MlaSpec(Spec):
    """An MLA decode kernel.

    Attributes:
        latent, rope: the two parts of a row, side by side, of whole units of 16 bytes.
        query: "bf16" or "fp16", the codec of the queries and of out.
        run: rows in one run of memory at least: the page size, or TILE.
        place: "linear", "ring", "slots" (a ring, or sinks alone, in a sequence slot) or "paged".
        teams: teams of SLICES warps in a block, each with a ring and tiles of its own.
        stages: tiles in a team's ring.
        blocks: 16 columns each that a team has; a column is a head of a query.
        causal: whether a sequence may have several queries, those of its last tokens.
        overlapped: whether the next launch may begin, and wait for this one; sm_90 and newer.
        overlaps: as of Spec. A block waits for the launch before, of another segment, as its last
            act, so that the combining launch finds the parts of both.
        on_hopper: whether the GPU is one; see eights.
    """

    latent: RowFormat
    rope: RowFormat
    query: str = "bf16"
    run: int = TILE
    place: str = "linear"
    teams: int = 3
    stages: int = 4
    blocks: int = 1
    causal: bool = False
    overlapped: bool = False
    overlaps: bool = False
    on_hopper: bool = False

    arguments = MLA
    kernel = "mla.mma.kernel.make_mla_kernel"

    @property
    def eights(self) -> int:
        """Eights of tokens whose scores a warp works on at a time. With two blocks an H200 takes 4
        to 6 % less time with 4, though two to four registers are spilled; with one block it takes
        3 % more (2026-11-30, scratch). Other GPUs: not measured."""
        return 4 if self.on_hopper and self.blocks == 2 else 2

    def __post_init__(self) -> None:
        for part, fmt in (("latents", self.latent), ("RoPE parts", self.rope)):
            if not _is_read(fmt, part):
                others = (RowFormat.parse(name, fmt.head_dim) for name in NAMES)
                names = [str(other) for other in others if _is_read(other, part)]
                raise UnsupportedError(
                    f"{fmt} {part} of {fmt.head_dim} elements have no CUDA kernel of MLA: use "
                    f"{', '.join(names[:-1])} or {names[-1]} for them, or backend='reference'"
                )
            if fmt.codec == "bf16" and self.query == "fp16":
                raise UnsupportedError(
                    "bf16 rows with float16 queries have no CUDA kernel of MLA: make the queries "
                    "bfloat16, or use backend='reference'"
                )

    @property
    def warps(self) -> int:  # type: ignore[override]
        return SLICES * self.teams

    @property
    def block_columns(self) -> int:
        return ROWS * self.blocks

    @property
    def behind(self) -> bool:
        """Whether the latent part is FlashMLA's: codes, then float32 scales, without shifts."""
        return self.latent.pick(scales=True, pairs=False, none=False)

    @property
    def header_at(self) -> int:
        """Byte of a row at which the latent scales begin."""
        return self.latent.code_bytes if self.behind else 0

    @property
    def has_shifts(self) -> bool:
        """Whether the latent elements are more than codes times scales."""
        return not (self.latent.is_exact or self.behind)

    @property
    def row_bytes(self) -> int:
        return self.latent.row_bytes + self.rope.row_bytes

    @property
    def by_row(self) -> bool:
        return self.run < RUN

    @property
    def lanes_of_row(self) -> int:
        """Threads that copy a row where rows do not follow one another."""
        return 4 if self.row_bytes // UNIT % 8 == 4 else 8

    @property
    def lookups(self) -> int:
        """Pages that a thread looks up of a tile: of all runs, or of the rows that it copies."""
        return TILE * self.lanes_of_row // (32 * SLICES) if self.by_row else TILE // self.run

    @property
    def stride(self) -> int:
        """Bytes from a row in shared memory to the next, padded as in device/row_layout.py."""
        return self.row_bytes + UNIT * (self.row_bytes // UNIT % 4 == 0)

    @property
    def stage_bytes(self) -> int:
        return TILE * self.stride

    @property
    def query_bytes(self) -> int:
        """What all teams read of the queries: latents, RoPE parts, sums for shifts."""
        latent = self.latent_steps * SLICES if self.blocks > 1 else 0
        return FRAGMENT * self.blocks * (latent + self.rope_steps + 4)

    @property
    def latent_steps(self) -> int:
        return self.latent.head_dim // (16 * SLICES)

    @property
    def rope_steps(self) -> int:
        return self.rope.head_dim // 16

    @property
    def exchange_bytes(self) -> int:
        """What the warps of a team exchange (softmax.py)."""
        return self.blocks * (SLICES * SLICES * FRAGMENT + SLICES // 2 * FRAGMENT + 256) + 32

    @property
    def p_at(self) -> int:
        """Byte of that at which P stands, after the partial scores."""
        return FRAGMENT * self.blocks * SLICES * SLICES

    @property
    def team_bytes(self) -> int:
        return self.stages * self.stage_bytes + self.exchange_bytes

    @property
    def output_bytes(self) -> int:
        """A team's output as it is combined; a column is padded by 16 bytes."""
        return 4 * self.block_columns * (self.latent.head_dim + 4)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; over it all what is left to combine."""
        combined = self.teams * self.output_bytes + 4 * self.teams * 8 * self.block_columns
        return max(self.query_bytes + self.teams * self.team_bytes, combined)
