"""MLA decode attention on CUDA, in one launch, or in two where tokens are split.

unit      the columns of a block, of a sequence; cut into splits where the GPU has room for more
plan      teams and stages: the most that shared memory and the kernel's registers allow, of
          spec.SHAPES; splits: see splits_of
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kvquant.errors import ConfigError, UnsupportedError
from kvquant.rehearsal import is_rehearsed
from kvquant.rows.latent import LatentFormat

from ..decode.arrange import pack_counts
from ..device.row_layout import UNIT
from ..runtime.launch import OVERLAPS, Launch, cached_launch, gpu_of, kernel_of
from ..runtime.tensors import aligned_copy, facts_of, is_readable, strides
from .spec import MOST_AHEAD, MOST_SPLITS, REGISTERS, ROWS, TILE, MlaCombineSpec, MlaSpec, shapes_of

CODECS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
LOG2_E = math.log2(math.e)
MOST_BLOCKS = 65535  # of a grid, but along x
LEAST_PAGE = 16
RESERVED = 1 << 10  # bytes of shared memory that a block takes besides
FEWEST = 2  # steps of a block that are worth a split (an estimate: nothing has been measured)


def attend(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    fmt: LatentFormat,
    sm_scale: float,
    *,
    q_lens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
    want_lse: bool = True,
    check: Callable[[], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to latent rows, on the current stream.

    Args:
        q_latent: [batch, q_len, num_heads, latent_dim], bfloat16 or float16.
        q_rope: [batch, q_len, num_heads, rope_dim], as q_latent.
        rows: [batch, capacity, row_bytes] or with a block_table [num_pages, page_size, row_bytes],
            uint8: the latent part of a row, then the RoPE part; without gaps.
        seq_lens: [batch], int32; longer ones count as the capacity.
        fmt: the format of the rows.
        sm_scale: factor on q·k, positive.
        q_lens: [batch], int32: how many of q_len are queries, the first ones; None: all.
        block_table: [batch, max_pages], int32; a page has a power of two of tokens, at least 16.
        num_splits: blocks that share a sequence's tokens, at most; chosen when None.
        want_lse: whether lse is wanted.
        check: raises unless the arguments fit one another; called only before a launch is prepared.

    Returns:
        out, as q_latent; lse [batch, q_len, num_heads], float32, base e, or None. Padding, and
        queries that see no token, have zeros and -inf.

    Raises:
        ConfigError: rows are not aligned or have gaps, or pages are too small.
        UnsupportedError: the GPU is too old, a format has no kernel, or sm_scale is not positive.
        DeviceError: CUDA refuses the launch.
    """
    table, lens = pack_counts(block_table), pack_counts(seq_lens)
    numbers = pack_counts(q_lens)
    tensors = q_latent, q_rope, rows, lens, numbers, table
    negated = q_latent.is_neg(), q_rope.is_neg()
    key = MlaSpec, fmt, sm_scale, num_splits, negated, *map(facts_of, tensors)
    prepared = cached_launch(
        key,
        check,
        _prepare,
        q_latent,
        q_rope,
        rows,
        numbers,
        table,
        fmt,
        sm_scale,
        num_splits,
    )
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
    assert isinstance(prepared, MlaLaunch)
    if prepared.copies_query:
        q_latent, q_rope = aligned_copy(q_latent), aligned_copy(q_rope)
    part_out = part_lse = None
    if prepared.combine is not None:
        part_out = torch.empty(prepared.parts, dtype=torch.float32, device=out.device)
        part_lse = torch.empty(prepared.parts[:-1], dtype=torch.float32, device=out.device)
    prepared((q_latent, q_rope, out, lse, part_out, part_lse, rows, lens, numbers, table))
    if prepared.combine is not None:
        prepared.combine((out, lse, part_out, part_lse))
    return out, lse


class MlaLaunch(Launch):
    """A call that is prepared.

    Attributes:
        copies_query: whether the kernel cannot read the queries where they are.
        parts: shape of what the splits give.
        combine: the launch that combines them, or None for one split.
    """

    def __init__(
        self,
        spec: MlaSpec,
        index: int,
        grid: tuple[int, int, int],
        constants: dict[str, float],
        copies_query: bool,
    ) -> None:
        super().__init__(spec, index, grid, constants)
        self.copies_query = copies_query
        blocks, batch, splits = grid
        columns = int(constants["q_len"] * constants["num_heads"])
        self.parts = batch, blocks, splits, spec.block_columns, spec.latent.head_dim
        self.combine = None
        if splits > 1:
            ahead = min(1 << (splits - 1).bit_length(), MOST_AHEAD)
            following = MlaCombineSpec(
                spec.latent.head_dim, spec.block_columns, spec.query, ahead, spec.overlapped
            )
            counts = {"splits": splits, "blocks": blocks, "columns": columns}
            self.combine = Launch(following, index, (batch * columns, 1, 1), counts)


def _prepare(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    rows: torch.Tensor,
    q_lens: torch.Tensor | None,
    table: torch.Tensor | None,
    fmt: LatentFormat,
    sm_scale: float,
    num_splits: int | None,
) -> MlaLaunch | None:
    batch, q_len, num_heads, _ = q_latent.shape
    page_size = rows.shape[1]
    capacity = page_size if table is None else page_size * table.shape[1]
    if not (q_latent.numel() and rows.numel() and capacity):
        return None
    if q_latent.dtype not in CODECS:
        raise ConfigError(f"q_latent is {q_latent.dtype}: on CUDA use bfloat16 or float16")
    if table is not None and (page_size < LEAST_PAGE or page_size & (page_size - 1)):
        raise ConfigError(
            f"pages have {page_size} tokens: on CUDA use a power of two, {LEAST_PAGE} or more"
        )
    if not sm_scale > 0:
        raise UnsupportedError(
            f"sm_scale is {sm_scale}: on CUDA it must be positive; backend='reference' takes any"
        )
    index = q_latent.get_device()
    gpu = gpu_of(index)
    run = TILE if table is None else min(page_size, TILE)
    causal = q_len > 1 or q_lens is not None
    columns = q_len * num_heads
    spec = MlaSpec(
        *fmt.parts,
        CODECS[q_latent.dtype],
        run,
        table is not None,
        blocks=1 if columns <= ROWS else 2,
        causal=causal,
        overlapped=gpu.capability >= OVERLAPS,
    )
    _check_rows(rows, spec)
    spec, registers = _fit(spec, index, gpu.shared_per_block)
    blocks = -(-columns // spec.block_columns)
    if batch > MOST_BLOCKS:
        raise UnsupportedError(f"batch {batch} is too much for one launch: at most {MOST_BLOCKS}")
    per_sm = min(
        REGISTERS // (spec.threads * registers),
        gpu.shared_per_sm // (spec.shared_bytes + RESERVED),
    )
    room = gpu.sm_count * max(per_sm, 1)
    splits = num_splits or splits_of(batch * blocks, capacity, room, spec.teams)
    splits = max(min(splits, MOST_SPLITS), 1)
    is_copied = any(q.stride(3) != 1 or not is_readable(q, UNIT) for q in (q_latent, q_rope))
    constants: dict[str, float] = {}
    for side, q in (("latent", q_latent), ("rope", q_rope)):
        steps = strides(q)
        if is_copied:  # contiguous
            of_head = q.shape[3] * q.element_size()
            steps = [q_len * num_heads * of_head, num_heads * of_head, of_head]
        names = (f"{side}_stride_{axis}" for axis in ("batch", "query", "head"))
        constants |= dict(zip(names, steps, strict=True))
    constants |= {
        "stride_outer": rows.stride(0),
        "capacity": capacity,
        "page_shift": page_size.bit_length() - 1 if table is not None else 0,
        "table_stride": 0 if table is None else table.stride(0),
        "num_heads": num_heads,
        "q_len": q_len,
        "score_scale": sm_scale * LOG2_E,
    }
    return MlaLaunch(spec, index, (blocks, batch, splits), constants, is_copied)


def _fit(spec: MlaSpec, index: int, most_shared: int) -> tuple[MlaSpec, int]:
    """The kernel with the first of the shapes that a block has room for, and its registers."""
    most = REGISTERS
    for found in shapes_of(spec, most_shared):
        if found.threads <= most:
            registers = kernel_of(found, index).registers
            if registers * found.threads <= REGISTERS:
                return found, registers
            most = REGISTERS // registers
    raise UnsupportedError(
        f"MLA rows of {spec.latent} and {spec.rope} for {spec.block_columns} columns have no room "
        f"in the {most_shared} bytes of shared memory of this GPU: use formats with fewer bits"
    )


def _check_rows(rows: torch.Tensor, spec: MlaSpec) -> None:
    steps = rows.stride()
    if steps[1:] != (spec.row_bytes, 1) or steps[0] % UNIT or rows.data_ptr() % UNIT:
        raise ConfigError(
            f"rows of {spec.row_bytes} bytes must follow one another without gaps from a multiple "
            f"of {UNIT} bytes on, these start {rows.data_ptr() % UNIT} bytes after one and have "
            f"strides {list(steps)}. Allocate them apart"
        )


def splits_of(units: int, capacity: int, room: int, teams: int) -> int:
    """Blocks of a unit: as many as the GPU has room for, but each with some steps of work.

    Args:
        units: sequences times blocks of columns.
        capacity: the most tokens of a sequence.
        room: blocks that run at a time.
        teams: of a block.
    """
    steps = -(-capacity // (TILE * teams))
    return max(min(room // units, -(-steps // FEWEST)), 1)
