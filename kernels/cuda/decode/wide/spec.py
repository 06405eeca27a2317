"""What the decode kernel for wide groups is compiled for, and its shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvquant.rows.format import RowFormat

from ..spec import HALF, TILE, DecodeSpec, Path, combine_bytes

GROUP, GROUP_WARPS = 128, 4  # threads and warps of a warpgroup
ROWS = TOKENS = 64  # columns of a warpgroup: M of its products; tokens of a tile: N
WARP_COLUMNS = 16  # of a warp of it
BLOCK = 64 * 128  # bytes of 64 rows of 64 elements
ALIGNMENT = 1024  # of tiles: where the swizzle of eight rows begins
HEAD_DIMS = (64, 128)  # more sums have no room in registers
# columns of a KV head from which on it is taken: of one query a sequence, and of several
FEWEST, FEWEST_OF_QUERIES = 17, 33
MOST_WARPS = 16
MOST_PARTIES = 2  # consumers that share a tile: more have no room in the registers of an SM
# by the consumers that share a tile: the first is the fastest of those measured on an H200
# (kernels/FACTS.md); where rows land in more memory than it has, or small pages take more registers
# than 512 threads have, the next one that has room
SHAPES: dict[int, tuple[dict[str, Any], ...]] = {
    1: (
        {"warps": 16, "feeders": 2, "stages": 4, "landings": 3},
        {"warps": 12, "feeders": 1, "stages": 4, "landings": 4},
        {"warps": 12, "feeders": 1, "stages": 4, "landings": 3},
    ),
    2: (
        {"warps": 12, "feeders": 1, "stages": 3, "landings": 4, "ahead": True},
        {"warps": 12, "feeders": 1, "stages": 3, "landings": 3, "ahead": True},
    ),
}
MOST_SHARED = 232448  # bytes of a block on sm_90
# barriers: FULL and FREE are of the first stage, the numbers after them of the others
QUERIES, FULL, FREE = 1, 2, 8
MOST_STAGES = FREE - FULL


@dataclass(frozen=True)
class WideSpec(DecodeSpec):
    """A decode kernel for wide groups; sm_90 alone.

    Attributes:
        warps: feeders and consumers, warpgroups of four.
        stages: expanded tiles of K and V in shared memory.
        columns, sharers: of a consumer's warp, and the warps whose columns are those of a block.
        feeders: warpgroups that expand rows: each every feeders-th tile.
        landings: halves of a tile that a feeder's warp has on their way, and the one it reads.
        ahead: whether a consumer asks for the scores of its next tile before its softmax.
    """

    warps: int = 12
    stages: int = 4
    columns: int = WARP_COLUMNS
    sharers: int = GROUP_WARPS
    feeders: int = 1
    landings: int = 4
    ahead: bool = False

    arch_specific: ClassVar[bool] = True
    is_wide: ClassVar[bool] = True

    @property
    def segments(self) -> int:
        return 1 if self.second is None else 2

    @property
    def column_words(self) -> tuple[str, ...]:
        words = super().column_words
        return (*words, "seen in second") if words and self.second else words

    @property
    def consumers(self) -> int:
        return self.warps // GROUP_WARPS - self.feeders

    @property
    def parties(self) -> int:
        """Consumers that share a tile, each with columns of its own."""
        return self.sharers // GROUP_WARPS

    def rings_of(self, path: Path) -> int:
        """Consumers that take turns: each has every rings-th tile."""
        return self.consumers // self.parties

    @property
    def steps(self) -> tuple[int, int]:
        return TOKENS, TOKENS

    @property
    def rings_at(self) -> int:
        """Byte at which tiles begin: after what warps keep."""
        return -(-self.warps * self.kept // ALIGNMENT) * ALIGNMENT

    @property
    def tile_bytes(self) -> tuple[int, int]:
        k, v = self.first.k_format, self.first.v_format
        return BLOCK * (k.head_dim // 64), BLOCK * (v.head_dim // 64)

    @property
    def tiles_at(self) -> int:
        """Byte after rings_at at which the stages begin: after the queries."""
        return self.parties * self.tile_bytes[0]

    @property
    def landings_at(self) -> int:
        return self.tiles_at + self.stages * sum(self.tile_bytes)

    @property
    def landing_bytes(self) -> int:
        """What a feeder's warp has of it: halves of tiles, and one of realigned rows."""
        rows = self.rows(self.first)
        landed = max(TILE * row.landing for row in rows)
        return self.landings * landed + self.scratch_bytes(self.first) + 16

    @property
    def factors_at(self) -> int:
        """Byte at which the factors of the scores of each column stand."""
        return self.landings_at + GROUP_WARPS * self.feeders * self.landing_bytes

    @property
    def shared_bytes(self) -> int:
        copies = self.rings_of(self.first) * self.block_columns
        combined = combine_bytes(self.first.v_format.head_dim, copies)
        tiles = self.factors_at + 4 * self.block_columns
        return self.rings_at + max(tiles, combined, self.merged_bytes)


def widened(spec: DecodeSpec, count: int) -> WideSpec | None:
    """The kernel for wide groups that does what `spec` does, for `count` columns of a KV head; None
    if there is none. It takes packed rows, then at most one segment of 16-bit rows, and no
    variant."""
    formats = spec.first.k_format, spec.first.v_format
    others = [] if spec.second is None else [spec.second.k_format, spec.second.v_format]
    if spec.variant or not all(fmt.is_exact for fmt in others):
        return None
    if count < (FEWEST_OF_QUERIES if spec.causal else FEWEST):
        return None
    if not all(is_expanded(fmt) for fmt in formats):
        return None
    blocks = -(-count // (MOST_PARTIES * ROWS))
    parties = -(-count // (blocks * ROWS))
    chosen = WideSpec(
        spec.first,
        spec.second,
        query=spec.query,
        sharers=GROUP_WARPS * parties,
        overlapped=spec.overlapped,
        causal=spec.causal,
        ragged=spec.ragged,
    )
    warps = MOST_WARPS if spec.first.run == HALF else MOST_WARPS - GROUP_WARPS
    shapes = (replace(chosen, **shape) for shape in SHAPES[parties] if shape["warps"] <= warps)
    return next((one for one in shapes if one.shared_bytes <= MOST_SHARED), None)


def is_expanded(fmt: RowFormat) -> bool:
    """Whether rows of a format are expanded: integers and E4M3; INT3 stands in another order."""
    known = fmt.pick(quarters=True, planes=False, nibbles=True, bytes=True, elements=False)
    return known and fmt.is_of_heads and fmt.head_dim in HEAD_DIMS


def order_of(fmt: RowFormat) -> str:
    """How elements come out of words (device/codes.py): "pairs", "bytes" or "as they are"."""
    of_integers = fmt.pick(quarters="pairs", planes="", nibbles="pairs", bytes="bytes", elements="")
    return fmt.pick(integers=of_integers, e4m3="as they are", bf16="", fp16="")


def halves_of(fmt: RowFormat, unit: int) -> tuple[int, int]:
    """The first of each four elements that stand in a unit of eight."""
    if fmt.pick(quarters=True, planes=False, nibbles=False, bytes=False, elements=False):
        first = 16 * (unit // 2) + 4 * (unit % 2)
        return first, first + 8
    return 8 * unit, 8 * unit + 4
