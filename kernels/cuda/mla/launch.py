"""MLA decode attention on CUDA: a launch for each segment, and one that combines their splits.

unit      the columns of a block, of a sequence; cut into splits (splits_of)
plan      teams and stages: mma/plan.py. More columns than NARROW take the kernel for many heads
          (Hopper), unless contexts are short: wide_splits_of
parts     the splits of all segments, whose results lie side by side; a single one is the result
prefix    one more segment, of one sequence, whose columns are those of all units. Its parts come
          first; sequences that do not share it leave them out
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from kvquant.errors import UnsupportedError
from kvquant.rehearsal import is_rehearsed
from kvquant.rows.call import LatentCall
from kvquant.rows.latent import LatentFormat
from kvquant.rows.segment import Segment

from ..decode.arrange import (
    arrange_in_order,
    codec_of,
    counts_of,
    log2_scale,
    pack_counts,
    packed_stride,
    place_of,
    stride_of,
)
from ..device.row_layout import UNIT
from ..runtime.launch import GPU, OVERLAPS, Launch, Rehearsed, cached_launch, gpu_of, kernel_of
from ..runtime.tensors import Tensors, aligned_copy, facts_of, is_readable, refuse_rows, strides
from .mma.plan import APART_REGISTERS, shapes_of, teams_of
from .mma.spec import ROWS, TILE, MlaSpec
from .spec import MOST_AHEAD, MOST_GROUPS, MOST_PARTS, MlaCombineSpec
from .wgmma.spec import COLUMNS, TOKENS, WideMlaSpec, is_wide

MOST_BLOCKS = 65535  # of a grid, but along x
FEWEST = 2  # steps of a block that are worth a split (an estimate: nothing has been measured)
WARPGROUPS = (9, 0)  # the one compute capability with wgmma
# When the kernel for many heads is taken, and in how many splits: as tests/benchmarks/bench_mla.py
# measures on an H200, which times both kernels, and several values of LEAST (kernels/FACTS.md).
# NARROW: columns up to which the other one is taken, by the codes of latents, by what both took for
# 32 and 64 columns; this one takes the same time for 1 to 64, and less for 16-bit rows. The first
# number counts with at most MANY tokens an SM, the second with more.
NARROW = {"elements": (0, 0), "nibbles": (16, 32), "bytes": (32, 32)}
MANY = 2048  # 993 tokens an SM: nibbles take 1.04 of the other one's time; 3,971: 0.94
LEAST = 512  # tokens of a block: for 64 heads 256 take up to 1.20 of its time, 1,024 up to 1.53
FILLED = 0.4  # of the blocks that the GPU has room for are there, at least: with 0.48 it takes 0.7
# to 0.9 of the time of the other one, whose blocks may be shorter, for 64 heads, and 1.06 for 16


def attend(
    call: LatentCall, check: Callable[[], object] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to latent rows, on the current stream.

    Args:
        call: q_latent and q_rope [batch, q_len, num_heads, elements], bfloat16 or float16; rows
            without gaps; pages of a power of two of tokens; with several queries at most two
            segments, in the order of arrange_in_order; num_splits: of a segment, at most.
        check: raises unless the arguments fit; called only before a launch is prepared.

    Returns:
        out, as q_latent; lse [batch, q_len, num_heads], float32, base e, or None. Padding, and
        queries that see no token, give zeros and -inf.

    Raises:
        ConfigError: q is float32, rows are not aligned or have gaps, or sm_scale is not positive.
        UnsupportedError: the GPU is too old, a format has no kernel, or there are too many
            segments for several queries.
        DeviceError: CUDA refuses the launch.
    """
    q_latent, q_rope, segments, sm_scale, num_splits, want_lse, q_lens, shared, _ = call
    prefix, shares = shared or (None, None)
    numbers, shares = pack_counts(q_lens), pack_counts(shares)
    every = [*segments] if prefix is None else [*segments, prefix]
    rows = [_rows_of(segment) for segment in every]
    tensors = [tensor for one in rows for tensor in one]
    kinds = tuple(
        (one.k_format, one.sinks, one.block_table is None, one.seq_slots is None) for one in every
    )
    negated = q_latent.is_neg(), q_rope.is_neg()
    facts = map(facts_of, (q_latent, q_rope, numbers, shares, *tensors))
    key = MlaSpec, kinds, sm_scale, num_splits, negated, *facts
    prepared = cached_launch(key, check, _prepare, call._replace(q_lens=numbers))
    shape = q_latent.shape
    out = torch.empty(shape, dtype=q_latent.dtype, device=q_latent.device)
    lse = None
    if want_lse:
        lse = torch.empty(shape[:-1], dtype=torch.float32, device=q_latent.device)
    if prepared is None:
        if not is_rehearsed(q_latent):  # no heads, sequences or rows
            out.zero_()
            if lse is not None:
                lse.fill_(-math.inf)
        return out, lse
    if prepared.copies_query:
        q_latent, q_rope = aligned_copy(q_latent), aligned_copy(q_rope)
    part_out = part_lse = None
    if prepared.combine is not None:
        parts = prepared.parts, *shape
        part_out = torch.empty(parts, dtype=torch.float32, device=out.device)
        part_lse = torch.empty(parts[:-1], dtype=torch.float32, device=out.device)
    results = out, lse, part_out, part_lse
    for launch, which, other in prepared.launches:
        other_lens = None if other is None else rows[other][1]
        launch((q_latent, q_rope, *results, *rows[which], other_lens, numbers))
    if prepared.combine is not None:
        prepared.combine((*results, shares, numbers))
    return out, lse


def _rows_of(segment: Segment) -> Tensors:
    """Rows, lengths, starts or block table, and sequence slots, as the kernel reads them."""
    return segment.k_rows, *map(pack_counts, counts_of(segment))


class MlaCall(NamedTuple):
    """A call that is prepared.

    Attributes:
        launches: of each segment that has room, first of the prefix: launch, index, and the index
            of the other segment where the rows that a query sees depend on it.
        copies_query: whether the kernel cannot read the queries where they are.
        parts: splits of all segments.
        combine: the launch that combines them, or None for one part.
    """

    launches: list[tuple[Launch, int, int | None]]
    copies_query: bool
    parts: int
    combine: Launch | None


def _prepare(call: LatentCall) -> MlaCall | None:
    q_latent, q_rope, segments, sm_scale, num_splits, _, q_lens, shared, _ = call
    prefix = None if shared is None else shared.rows
    batch, q_len, num_heads, latent_dim = q_latent.shape
    causal = q_len > 1 or q_lens is not None
    order = [i for i, one in enumerate(segments) if one.capacity and one.k_rows.numel()]
    if prefix is not None and not (prefix.capacity and prefix.k_rows.numel()):
        prefix = None
    if not q_latent.numel() or not order:
        return None
    query, score_scale = codec_of("q_latent", q_latent), log2_scale(sm_scale)
    if batch > MOST_BLOCKS:
        raise UnsupportedError(f"batch {batch} is too much for one launch: at most {MOST_BLOCKS}")
    if causal:
        arrange_in_order(segments)
    index, columns = q_latent.get_device(), q_len * num_heads
    tasks = [(i, segments[i], batch, columns, causal) for i in order]
    if prefix is not None:  # all queries are those of its one sequence
        tasks = [(len(segments), prefix, 1, batch * columns, False), *tasks]
    if len(tasks) > MOST_PARTS:
        raise UnsupportedError(f"{len(tasks)} segments are too many: at most {MOST_PARTS}")
    gpu = gpu_of(index)
    room = Room(index, gpu, num_splits, MOST_PARTS // len(tasks))
    fitted = [
        _fitted(segment, sequences, of_each, masks, query, room, is_first=number == 0)
        for number, (_, segment, sequences, of_each, masks) in enumerate(tasks)
    ]
    parts = sum(grid[2] for _, grid in fitted)
    prefix_parts = 0 if prefix is None else fitted[0][1][2]
    combine = None
    if parts > 1:  # the first one that is loaded: a rehearsal ends here, and has noted the others
        most = 1 << (parts - 1).bit_length()
        ahead, groups = min(most, MOST_AHEAD), min(max(most // MOST_AHEAD, 1), MOST_GROUPS)
        overlaps = gpu.capability >= OVERLAPS
        following = MlaCombineSpec(latent_dim, query, ahead, groups, prefix is not None, overlaps)
        sizes = {"prefix_parts": prefix_parts, "num_heads": num_heads, "q_len": q_len}
        combine = Launch(following, index, (batch * columns, 1, 1), {"parts": parts, **sizes})
    is_copied, constants = _of_queries(q_latent, q_rope, prefix is not None)
    constants |= {"parts": parts, "score_scale": score_scale}
    constants |= {"is_second": 0, "second_sinks": 0, "other_capacity": 0, "first_part": 0}
    launches: list[tuple[Launch, int, int | None]] = []
    first_part = 0
    for (i, segment, *_), (spec, grid) in zip(tasks, fitted, strict=True):
        mine, other = constants | _of_segment(segment) | {"first_part": first_part}, None
        if i == len(segments):
            mine["q_len"] = batch * q_len
        elif causal and len(order) > 1:
            other = order[i == order[0]]
            mine["is_second"] = int(i != order[0])
            mine["second_sinks"] = segments[order[1]].sinks
            mine["other_capacity"] = segments[other].capacity
        launches.append((Launch(spec, index, grid, mine), i, other))
        first_part += grid[2]
    return MlaCall(launches, is_copied, parts, combine)


class Room(NamedTuple):
    """Where a call runs; num_splits: as of attend; parts: splits that a segment may have."""

    device: int
    gpu: GPU
    num_splits: int | None
    parts: int


def _fitted(
    segment: Segment,
    batch: int,
    columns: int,
    causal: bool,
    query: str,
    room: Room,
    is_first: bool,
) -> tuple[MlaSpec | WideMlaSpec, tuple[int, int, int]]:
    """The kernel of a segment, and its grid; the first of a call does not begin early."""
    device, gpu, num_splits, most = room
    page_size = segment.k_rows.shape[2]
    place = place_of(segment) if segment.seq_slots is None else "slots"
    fmt = segment.k_format
    assert isinstance(fmt, LatentFormat)
    spec = MlaSpec(
        *fmt.parts,
        query,
        min(page_size, TILE) if place == "paged" else TILE,
        place,
        blocks=1 if columns <= ROWS else 2,
        causal=causal,
        overlapped=gpu.capability >= OVERLAPS,
        overlaps=gpu.capability >= OVERLAPS and not is_first,
        on_hopper=gpu.capability == WARPGROUPS,
    )
    _check_rows(segment.k_rows, spec)
    has_many_tokens = batch * segment.capacity > MANY * gpu.sm_count
    is_many = columns > fmt.latent.pick(**NARROW)[has_many_tokens]
    if is_many and gpu.capability == WARPGROUPS and is_wide(spec):
        blocks = -(-columns // COLUMNS)
        splits = num_splits or splits_of(batch * blocks, segment.capacity, gpu.sm_count, TOKENS)
        splits = max(min(splits, most), 1)
        long_enough = wide_splits_of(splits, segment.capacity)
        if long_enough:
            splits = splits if num_splits else long_enough
            wide = WideMlaSpec.of(spec)
            _registers_of(wide, device)  # a rehearsal notes it
            return wide, (blocks, batch, splits)
    units = batch * -(-columns // spec.block_columns)
    teams = teams_of(spec.blocks, units, segment.capacity, gpu.sm_count)
    spec = _fit(spec, gpu, teams, segment.capacity)
    registers = _registers_of(spec, device)
    blocks = -(-columns // spec.block_columns)
    per_sm = gpu.blocks_per_sm(spec.warps, registers, spec.shared_bytes)
    at_once = gpu.sm_count * max(per_sm, 1)
    step = TILE * spec.teams
    splits = num_splits or splits_of(batch * blocks, segment.capacity, at_once, step)
    return spec, (blocks, batch, max(min(splits, most), 1))


def _of_queries(
    q_latent: torch.Tensor, q_rope: torch.Tensor, as_one: bool
) -> tuple[bool, dict[str, float]]:
    """Whether the kernel cannot read the queries where they are, and its constants; as_one: whether
    those of all sequences are also read as one's."""
    batch, q_len, num_heads, _ = q_latent.shape
    is_copied = any(q.stride(3) != 1 or not is_readable(q, UNIT) for q in (q_latent, q_rope))
    if as_one and min(batch, q_len) > 1:
        is_copied |= any(q.stride(0) != q_len * q.stride(1) for q in (q_latent, q_rope))
    constants: dict[str, float] = {"num_heads": num_heads, "q_len": q_len}
    for side, q in (("latent", q_latent), ("rope", q_rope)):
        steps = strides(q, is_copied)
        if as_one and q_len == 1:
            steps[1] = steps[0]
        names = (f"{side}_stride_{axis}" for axis in ("batch", "query", "head"))
        constants |= dict(zip(names, steps, strict=True))
    return is_copied, constants


def _of_segment(segment: Segment) -> dict[str, float]:
    """The kernel's constants of a segment's rows."""
    rows, table = segment.k_rows, segment.block_table
    return {
        "stride_outer": stride_of(rows, 0),
        "capacity": segment.capacity,
        "sinks": segment.sinks,
        "ring_len": segment.capacity - segment.sinks,
        "page_shift": 0 if table is None else rows.shape[2].bit_length() - 1,
        "table_stride": 0 if table is None else packed_stride(table),
    }


def _fit(spec: MlaSpec, gpu: GPU, teams: int, capacity: int) -> MlaSpec:
    """The kernel with the first of the shapes that a block has room for."""
    found = next(shapes_of(spec, gpu, teams, capacity), None)
    if found is not None:
        return found
    raise UnsupportedError(
        f"MLA rows of {spec.latent} and {spec.rope} for {spec.block_columns} columns have no room "
        f"in the {gpu.shared_per_block} bytes of shared memory of this GPU: use formats with fewer "
        "bits"
    )


def _registers_of(spec: MlaSpec | WideMlaSpec, index: int) -> int:
    try:
        return kernel_of(spec, index).registers
    except Rehearsed:  # it is noted: suppose that as many blocks as are planned have them
        return APART_REGISTERS


def _check_rows(rows: torch.Tensor, spec: MlaSpec) -> None:
    steps = rows.stride()
    is_dense = stride_of(rows, 2) in (0, spec.row_bytes) and steps[3] == 1
    if not is_dense or stride_of(rows, 0) % UNIT or rows.data_ptr() % UNIT:
        wanted = f"rows of {spec.row_bytes} bytes must follow one another without gaps"
        refuse_rows("rows", rows, f"{wanted} from a multiple of {UNIT} bytes on")


def splits_of(units: int, capacity: int, room: int, step: int) -> int:
    """Blocks of a unit: as many as the GPU has room for, but each with some steps of `step`
    tokens.

    units: sequences times blocks of columns. capacity: the most tokens of a sequence. room: blocks
    that run at a time.
    """
    steps = -(-capacity // step)
    return max(min(room // units, -(-steps // FEWEST)), 1)


def wide_splits_of(splits: int, capacity: int) -> int:
    """Splits of the kernel for many heads, none too short; 0 if these are too few to be worth
    it.

    splits: that the GPU has room for. capacity: the most tokens of a sequence.
    """
    found = min(splits, capacity // LEAST)
    if not found or found < FILLED * splits:
        return 0
    tiles = -(-capacity // TOKENS)
    return -(-tiles // -(-tiles // found))
