"""What a decode kernel is compiled for, its arguments and its shared memory: plain numbers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

from kvquant.rows.format import RowFormat
from kvquant.rows.segment import RUN

from ..device.row_layout import StagedRow, operand_of
from ..runtime.spec import Spec, Table

MMA_COLUMNS = 8  # of an MMA: its N
TILE = 32  # tokens that a warp works on at a time: a row for each lane
HALF = RUN  # those of them that have a page of their own, but where pages are smaller
MOST_COLUMNS = 16  # of a warp: the sums of more take too many registers
WIDE_HEAD_DIM, WIDE_GROUPS = 128, 4  # rows with more leave no room for more than 8
# of a thread in a crowded kernel: an SM has registers for 16 warps, in place of 12 with up to 168.
# With few bits and a window an H200 takes .85 to .98 of the time (scratch, 2026-11-30)
FEW_REGISTERS = 128
MOST_IN_REGISTERS = 256  # head_dim of keys whose queries stay in registers
MOST_SHARERS = 8  # warps that share a ring: as many as an SM has registers for
PROMOTION_INTERVAL = 16  # tiles of a warp after which it promotes its sums (accumulators.py)
# The merge of a unit's parts. AHEAD: parts in one group of a thread's copies. ASKED: groups under
# way before the thread adds the first. LEAST_PARTS: parts whose weights must have room beside them
AHEAD, ASKED, LEAST_PARTS = 8, 3, 64
KEPT = 64  # bytes in which a warp keeps what it needs after its attention
UNIT_STEPS = 2  # what a unit costs besides its tokens where work is balanced (schedule.py)
MORE_PARTS = 4  # of a unit than its longest segment is cut into

COMMON: Table = (
    ("q", "P"),  # [batch, num_q_heads, head_dim], bfloat16 or float16
    ("out", "P"),  # [batch, num_q_heads, head_dim of V], as q
    ("lse", "P"),  # [batch, num_q_heads], float32, base e; 0: not wanted
    # float32 [places, columns of a block, head_dim of V], then [places, these columns]
    ("partial", "P"),
    ("counters", "P"),  # uint32 [units], zero before the launch and after it
    ("q_stride_batch", "Q"),  # bytes
    ("q_stride_head", "Q"),
    ("num_q_heads", "i"),
    ("ratio", "i"),  # query heads on a KV head
    ("head_blocks", "i"),  # blocks on a KV head, `block_columns` of its columns in each
    ("batch", "I"),
    ("columns", "I"),  # units of a sequence: KV heads times head_blocks
    ("parts", "I"),  # splits of all segments
    ("places", "I"),  # parts that `partial` has room for
    ("workers", "I"),  # blocks that share the work where lengths differ; 0: it is never balanced
    ("most_parts", "I"),  # of a unit that can be merged
    ("score_scale", "f"),  # sm_scale * log2(e)
)
# of a kernel with several queries a sequence, after those: q is [batch, q_len, num_q_heads,
# head_dim], out and lse have its axis of queries
QUERIES: Table = (
    # [batch], int32: queries of each sequence; 0: q_len of all. Of ragged queries the pieces, which
    # stand for sequences (ragged.py)
    ("q_lens", "P"),
    ("q_stride_query", "Q"),  # bytes
    ("q_len", "i"),
)
# of a variant (kvquant/rows/variant.py), after those: what each of its fields takes
VARIANT: dict[str, tuple[tuple[str, str], ...]] = {
    "alibi_slopes": (("alibi_slopes", "P"),),  # [num_q_heads], float32
    "score_offsets": (("score_offsets", "P"),),  # as lse, float32
    "sink_logits": (("sink_logits", "P"),),  # [num_q_heads], float32
    "soft_cap": (("soft_cap", "f"),),  # in powers of two
    "tree_mask": (("tree_mask", "P"),),  # [batch, q_len, q_len], bool
    "window": (("window", "i"),),
}
# and the words that a warp keeps of each of its columns for it
COLUMN_WORDS = {
    "alibi_slopes": ("slope", "lag"),
    "score_offsets": ("offset",),
    "tree_mask": ("branch",),
    "window": ("unseen",),
}
# those that need positions, and so a kernel for several queries
POSITIONAL = frozenset({"alibi_slopes", "tree_mask", "window"})
SEGMENT: Table = (
    ("k_rows", "P"),
    ("v_rows", "P"),
    ("seq_lens", "P"),  # [batch], int32
    ("index", "P"),  # ring: starts [batch], int32, or 0; paged: block table, int32
    ("seq_slots", "P"),  # ring: [batch], int32: which sequence of the rows to read; 0: the same
    ("k_stride_outer", "Q"),  # bytes from a sequence, or a page, to the next
    ("k_stride_head", "Q"),
    ("v_stride_outer", "Q"),
    ("v_stride_head", "Q"),
    ("k_stride_row", "i"),  # bytes
    ("v_stride_row", "i"),
    ("capacity", "i"),  # rows that a sequence has room for; longer lengths count as this
    ("sinks", "i"),  # ring: rows before it, which stay
    ("ring", "i"),  # ring: its rows
    ("page_shift", "i"),  # log2 of the page size
    ("table_stride", "i"),  # entries from a sequence's part of the block table to the next
    ("splits", "i"),  # blocks that share the tokens; 0: no such segment
)
FIELD = {name: place for place, (name, _) in enumerate(SEGMENT)}


class QueryWords:
    """How many words of registers a query takes for 8 columns, by K's format and its own codec.

    Attributes:
        parts: fragments for one MMA: a high and a low one for an fp16 query on bf16 keys.
        shifts: the first word of the B fragments of the shifts.
        fragments: words of all B fragments.
        raw: words of a lane's elements as they are loaded.
        in_shared: whether a block keeps them in shared memory, beside the sums of wider values.
    """

    def __init__(self, staged: StagedRow, query: str) -> None:
        chunks = staged.chunks
        exact = staged.fmt.is_exact
        self.parts = 2 if operand_of(staged.fmt) == "bf16" and query == "fp16" else 1
        self.shifts = chunks * self.parts if exact else 2 * chunks * staged.parts * staged.mmas
        self.fragments = self.shifts + 2 * staged.header_units
        self.raw = chunks if exact else chunks * staged.span // 8
        self.in_shared = staged.fmt.head_dim > MOST_IN_REGISTERS

    @property
    def nbytes(self) -> int:
        return 4 * 32 * self.fragments if self.in_shared else 0


@dataclass(frozen=True)
class Path:
    """A kind of segment, with code of its own in the kernel.

    Attributes:
        k_format, v_format: the rows.
        place: "linear", "ring" (from a start, around) or "paged".
        dense: whether rows have no gaps, and sequences, heads and pages start at 16 bytes.
        run: rows of a page that one look-up finds: HALF, or all of a smaller page.
    """

    k_format: RowFormat
    v_format: RowFormat
    place: str = "linear"
    dense: bool = True
    run: int = HALF

    @property
    def by_row(self) -> bool:
        """Whether each row of a tile is looked up."""
        return self.run < HALF


@dataclass(frozen=True)
class DecodeSpec(Spec):
    """A decode kernel.

    Attributes:
        first: the path of the first segment.
        second: of the second and third (16-bit sinks and recent rows), or None.
        query: "bf16" or "fp16", the codec of q and out.
        stages: tiles of K and V in a warp's ring.
        columns: that a warp multiplies every code with, a multiple of 8.
        sharers: warps that share a ring, each with columns of its own.
        overlapped: whether the next launch may begin, and wait for this one; sm_90 and newer.
        causal: whether a sequence has several queries (queries.py).
        variant: the fields of AttentionVariant in use, sorted (variant.py).
        ragged: whether q, out and lse are flat, and pieces stand for sequences (ragged.py).
        crowded: whether a thread has few registers, so that an SM holds more warps.
    """

    first: Path
    second: Path | None = None
    query: str = "bf16"
    warps: int = 4
    stages: int = 3
    columns: int = MMA_COLUMNS
    sharers: int = 1
    overlapped: bool = False
    causal: bool = False
    variant: tuple[str, ...] = ()
    ragged: bool = False
    crowded: bool = False

    kernel = "decode.kernel.make_decode_kernel"
    is_wide: ClassVar[bool] = False  # wide/spec.py

    @property
    def may_be_crowded(self) -> bool:
        """Whether FEW_REGISTERS are enough, but for 8 bytes of one kernel (test_compile.py)."""
        formats = self.first.k_format, self.first.v_format
        is_usual = all(
            one.groups == 1 and one.head_dim == WIDE_HEAD_DIM and one.facts.is_integer
            for one in formats
        )
        is_plain = self.query == "bf16" and not (self.causal or self.variant)
        return is_usual and is_plain and self.first.dense and self.eights == 1

    @property
    def most_registers(self) -> int | None:
        return FEW_REGISTERS if self.crowded else None

    @property
    def segments(self) -> int:
        return 1 if self.second is None else 3

    @property
    def common(self) -> Table:
        variant = (field for name in self.variant for field in VARIANT[name])
        return (*COMMON, *(QUERIES if self.causal else ()), *variant)

    @property
    def places(self) -> dict[str, int]:
        return {name: place for place, (name, _) in enumerate(self.common)}

    @property
    def arguments(self) -> Table:
        """A tuple of them, and one for each segment."""
        segments = ((name, SEGMENT) for name in ("one", "two", "three")[: self.segments])
        return (("common", self.common), *segments)

    @property
    def column_words(self) -> tuple[str, ...]:
        """What a warp keeps of each of its columns, a word each (queries.py, variant.py)."""
        words = ["seen"] if self.causal else []
        for name, of_name in COLUMN_WORDS.items():
            words += of_name if name in self.variant else ()
        return tuple(words)

    @property
    def kept(self) -> int:
        """Bytes in which a warp keeps what it does not need while it attends."""
        return KEPT + 4 * self.columns * len(self.column_words)

    @property
    def rings_at(self) -> int:
        """Byte of a block's memory at which the rings begin: after what warps keep."""
        return self.warps * self.kept

    def word_at(self, name: str) -> int:
        """Byte of what a warp keeps at which such a word of its first column stands; 0: nowhere."""
        words = self.column_words
        return KEPT + 4 * self.columns * words.index(name) if name in words else 0

    @property
    def changes_scores(self) -> bool:
        """Whether scores are more than q·k times a factor."""
        return bool({"alibi_slopes", "score_offsets", "soft_cap"} & {*self.variant})

    def rows(self, path: Path) -> tuple[StagedRow, ...]:
        """K and V of a path in shared memory."""
        return _staged_rows(path, self.is_wide)

    def stages_of(self, path: Path) -> int:
        """Tiles in a warp's ring on a path; the second has few tokens and should not cost room."""
        return min(self.stages, 2) if path is self.second else self.stages

    @property
    def block_columns(self) -> int:
        """Columns of a block: those of the warps that share a ring."""
        return self.columns * self.sharers

    def rings_of(self, path: Path) -> int:
        """Rings of a block on a path: on the second as many as have room where the first's are."""
        rings = self.warps // self.sharers
        if path is not self.second:
            return rings
        room = rings * self.ring_bytes(self.first)
        return max(1, min(rings, room // self.ring_bytes(path)))

    @property
    def steps(self) -> tuple[int, int]:
        """Tokens of a tile of every ring, in the first segment and in the others."""
        return TILE * self.rings_of(self.first), TILE * self.rings_of(self.second or self.first)

    @property
    def second_weight(self) -> int:
        """Steps of the first segment that take as long as one of the others, by their bytes."""
        if self.second is None:
            return 1
        one, other = (
            step * (path.k_format.row_bytes + path.v_format.row_bytes)
            for step, path in zip(self.steps, (self.first, self.second), strict=True)
        )
        return max(1, round(other / one))

    def stage_bytes(self, path: Path) -> int:
        """A tile of K and of V as it is copied."""
        return sum(TILE * row.landing for row in self.rows(path))

    @property
    def eights(self) -> int:
        """Times that a warp multiplies a code: the MMAs that its columns take side by side."""
        return self.columns // MMA_COLUMNS

    def scratch_bytes(self, path: Path) -> int:
        """Bytes of a tile of a warp's realigned rows, K's and V's in turn."""
        return max([TILE * row.stride for row in self.rows(path) if row.realigned], default=0)

    def promoted_bytes(self, path: Path) -> int:
        """Bytes of a warp's promoted sums and references: of codes that are never negative."""
        one_sided = path.v_format.facts.is_integer
        sums = (self.rows(path)[1].sums + 4 + 2) * self.eights
        return 128 * sums if one_sided else 0

    def scratch_at(self, path: Path) -> int:
        """Byte of a ring's memory at which realigned rows stand: after its stages."""
        return self.stages_of(path) * self.stage_bytes(path)

    def promoted_at(self, path: Path) -> int:
        """Byte of a ring's memory of promoted sums: after realigned rows and 16 bytes more."""
        return self.scratch_at(path) + self.sharers * self.scratch_bytes(path) + 16

    def ring_bytes(self, path: Path) -> int:
        """Shared memory of a ring, and of the warps that share it."""
        return self.promoted_at(path) + self.sharers * self.promoted_bytes(path)

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)

    def query_bytes(self, path: Path) -> int:
        """Shared memory of the queries of a warp's columns, which the rings of a block share."""
        return self.eights * QueryWords(self.rows(path)[0], self.query).nbytes

    @property
    def queries_at(self) -> int:
        """Byte of the rings' memory at which these stand: after the rings."""
        return max(self.rings_of(path) * self.ring_bytes(path) for path in self.paths)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: what is kept, and over rings and queries the merge."""
        queries = self.sharers * max(map(self.query_bytes, self.paths))
        combined = combine_bytes(self.first.v_format.head_dim, self.warps * self.columns)
        return self.rings_at + max(self.queries_at + queries, combined, self.merged_bytes)

    @property
    def merged_bytes(self) -> int:
        """The least shared memory of a merge: LEAST_PARTS weights, and a group of copies."""
        return 4 * LEAST_PARTS * self.block_columns + self.asked_bytes

    @property
    def asked(self) -> int:
        """Groups of copies on their way at a time; fewer where shared memory is small."""
        room = self.shared_bytes - self.rings_at - self.merged_bytes
        return min(ASKED, 1 + room // self.asked_bytes)

    @property
    def asked_bytes(self) -> int:
        """Shared memory of the parts that a block asks for together."""
        return 16 * AHEAD * self.threads

    @property
    def asked_at(self) -> int:
        """Byte of the rings' memory at which copied parts begin, after the weights."""
        room = self.shared_bytes - self.rings_at
        return (room - self.asked * self.asked_bytes) // 16 * 16

    @property
    def most_parts(self) -> int:
        """Parts of a unit that the merge has room for."""
        return self.asked_at // (4 * self.block_columns) // AHEAD * AHEAD


@functools.lru_cache(256)
def _staged_rows(path: Path, is_wide: bool) -> tuple[StagedRow, ...]:
    """K and V of a path in shared memory: direct if both may be."""
    dense = path.dense and path.place != "ring"
    rows = tuple(StagedRow(fmt, dense) for fmt in (path.k_format, path.v_format))
    if is_wide or not all(row.may_be_direct for row in rows):
        return rows
    return tuple(replace(row, direct=True) for row in rows)


def columns_of(count: int, *formats: RowFormat) -> tuple[int, int]:
    """Columns of a warp, and warps that share a ring, for `count` columns on a KV head.

    More columns a warp mean that a code is unpacked less often, more a block that it is read less
    often.
    """
    wide = all(fmt.head_dim <= WIDE_HEAD_DIM and fmt.groups <= WIDE_GROUPS for fmt in formats)
    columns = MOST_COLUMNS if wide and count > MMA_COLUMNS else MMA_COLUMNS
    warps = -(-count // columns)
    blocks = -(-warps // MOST_SHARERS)
    return columns, -(-warps // blocks)


def combine_bytes(head_dim: int, columns: int) -> int:
    """Maxima, sums and outputs of all warps' columns; outputs are padded by 16 bytes."""
    return columns * (8 + 4 * (head_dim + 4))
