"""What the kernels of a shared prefix are compiled for, their arguments and shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvquant.errors import UnsupportedError
from kvquant.rows.format import RowFormat
from kvquant.rows.segment import RUN

from ..device.row_layout import UNIT, StagedRow, staged_bytes
from ..runtime.spec import Spec, Table

STAGES = 3  # tiles of packed rows: one is expanded, one has come, one is on its way
ROWS = 16  # queries of an MMA
WIDE = 128  # elements of a row up to which the sums of 32 queries fit a warp's registers
WIDEST = 256  # those up to which the sums of 16 do: wider prefixes are for the decode kernel
# warps, blocks and tokens of a tile, the first that fits: the more queries a block has, the less
# often rows are expanded; the fewer tokens a tile has, the less shared memory it takes
SHAPES = ((8, 2, 64), (8, 2, 32), (4, 2, 32), (4, 1, 32), (4, 1, 16), (2, 1, 16), (1, 1, 16))
FEWEST = 64  # queries up to which all take as long
MOST_SPLITS = 32  # of the tokens, one of each lane of the kernel that combines them
SHORTEST = 128  # tokens of a split that are worth its start
FILLED = 0.9  # of the SMs have a block, at least, or blocks are too large
REGISTERS = {1: 168, 2: 256}  # of a thread, about, by the blocks of a warp

PREFIX: Table = (
    ("q", "P"),  # [batch, num_q_heads, head_dim], bfloat16 or float16
    ("members", "P"),  # int64 [num_members]: places in the batch, all else nobody; 0: 0, 1, 2 ...
    ("out", "P"),  # float32 [splits, num_kv_heads, num_members * ratio, head_dim of V]
    ("lse", "P"),  # float32 [splits, num_kv_heads, num_members * ratio], base e
    ("k_rows", "P"),
    ("v_rows", "P"),
    ("seq_lens", "P"),  # int32 [1]
    ("table", "P"),  # int32 [max_pages], or 0
    ("q_stride_batch", "Q"),  # bytes
    ("q_stride_head", "Q"),
    ("k_stride_page", "Q"),
    ("k_stride_head", "Q"),
    ("k_stride_row", "Q"),
    ("v_stride_page", "Q"),
    ("v_stride_head", "Q"),
    ("v_stride_row", "Q"),
    ("capacity", "i"),  # longer lengths count as this
    ("page_shift", "i"),  # log2 of the page size
    ("num_members", "i"),
    ("batch", "i"),
    ("ratio", "i"),  # query heads on a KV head
    ("score_scale", "f"),  # sm_scale * log2(e)
)
COMBINE: Table = (
    ("out", "P"),  # [batch, num_heads, head_dim], contiguous, as is each split of the others
    ("lse", "P"),  # [batch, num_heads], float32, base e
    ("prefix_out", "P"),  # [splits, num_kv_heads, num_members * ratio, head_dim]
    ("prefix_lse", "P"),  # float32 [splits, num_kv_heads, num_members * ratio], base e
    ("members", "P"),  # int64 [num_members]: places in the batch, all else nobody; 0: 0, 1, 2 ...
    ("out_stride", "Q"),  # bytes from a split of prefix_out to the next
    ("lse_stride", "Q"),  # the same of prefix_lse
    ("batch", "i"),
    ("num_heads", "i"),
    ("ratio", "i"),  # query heads on a KV head
    ("splits", "i"),  # at most 32
    ("num_rows", "i"),  # num_members * num_heads
)


@dataclass(frozen=True)
class PrefixSpec(Spec):
    """The kernel that attends to a prefix of such K and V.

    Attributes:
        query: "bf16" or "fp16", the codec of q.
        run: rows of a page that one look-up finds: RUN, or all of a smaller page.
        blocks: 16 queries each that a warp has.
        tokens: of a tile.
        span: tokens of a tile of which a warp has the scores at a time.
    """

    k_format: RowFormat
    v_format: RowFormat
    query: str = "bf16"
    paged: bool = True
    run: int = RUN
    warps: int = 4
    blocks: int = 2
    tokens: int = 64
    span: int = 32

    arguments = PREFIX

    kernel = "prefix.kernel.make_prefix_kernel"

    def __post_init__(self) -> None:
        for fmt in (self.k_format, self.v_format):
            StagedRow(fmt)  # refuses groups that no kernel reads; has_kernel refuses wide rows

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return self.warps * self.blocks * ROWS

    @property
    def k_bytes(self) -> int:
        return self.tokens * staged_bytes(self.k_format)

    @property
    def stage_bytes(self) -> int:
        return self.k_bytes + self.tokens * staged_bytes(self.v_format)

    def stride(self, fmt: RowFormat) -> int:
        """Bytes from a row of fp16 numbers to the next: an odd number of units (row_layout.py)."""
        return 2 * fmt.head_dim + UNIT

    @property
    def tile_bytes(self) -> int:
        return self.tokens * (self.stride(self.k_format) + self.stride(self.v_format))

    @property
    def query_bytes(self) -> int:
        return self.rows * self.stride(self.k_format)

    @property
    def facts_bytes(self) -> int:
        """Largest numbers of K and of V in two tiles, by warp."""
        return -(-2 * 2 * 4 * self.warps // UNIT) * UNIT

    @property
    def shared_bytes(self) -> int:
        tiles = STAGES * self.stage_bytes + 2 * self.tile_bytes
        return tiles + self.query_bytes + self.facts_bytes


@dataclass(frozen=True)
class CombineSpec(Spec):
    """The kernel that combines the splits of a prefix with each sequence's own tokens, a row a
    warp.

    Attributes:
        head_dim: elements of a row of out, a multiple of 4.
        query: "bf16" or "fp16", the codec of out.
        rounded: whether prefix_out has that codec, too; else it is float32.
    """

    head_dim: int
    query: str = "bf16"
    rounded: bool = False
    warps: int = 4

    arguments = COMBINE
    kernel = "prefix.combine.make_combine_kernel"


def fit(spec: PrefixSpec, num_rows: int, most_shared: int, units: int, sm_count: int) -> PrefixSpec:
    """The kernel for num_rows queries on a KV head: the largest blocks that still fill the SMs.

    most_shared: bytes of shared memory that a block may have. units: KV heads times splits that the
    tokens are worth (worth_splits). UnsupportedError if rows are too long for the GPU.
    """
    narrow = max(spec.k_format.head_dim, spec.v_format.head_dim) <= WIDE
    best: PrefixSpec | None = None
    for warps, blocks, tokens in SHAPES:
        found = replace(spec, warps=warps, blocks=blocks, tokens=tokens, span=min(tokens, 32))
        used = found.rows <= FEWEST or 2 * num_rows > found.rows
        if not used or not (narrow or blocks == 1) or found.shared_bytes > most_shared:
            continue
        if best is not None and not FEWEST <= found.rows < best.rows:
            continue  # as many queries with smaller tiles, or too few
        best = found
        if -(-num_rows // found.rows) * units >= FILLED * sm_count:
            break
    if best is None:
        raise UnsupportedError(
            f"a prefix of {spec.k_format} and {spec.v_format} rows with head_dim "
            f"{spec.k_format.head_dim} takes {found.shared_bytes} bytes of shared memory, this GPU "
            f"has {most_shared}: let the sequences share nothing, or use formats with fewer bits"
        )
    return best


def worth_splits(capacity: int) -> int:
    """Splits that so many tokens are worth."""
    return max(min(capacity // SHORTEST, MOST_SPLITS), 1)
