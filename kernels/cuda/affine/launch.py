"""Multiply rows by a matrix and add an offset, or encode them, on CUDA, in one launch.

See kvquant/ops/transform.py. A block has 32 * width columns of a KV head's matrix.

    rows    float32 [head_dim, warps]: element after element of all rows, as warps read them
    sums    float32 [warps, warps, width, 32]: of each warp's part of a row, of each row
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..device.row_layout import divisor
from ..runtime.launch import OVERLAPS, Launch, cached_launch, gpu_of
from ..runtime.spec import Spec, Table
from ..runtime.tensors import facts_of, is_readable, strides

SOURCES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
COLUMNS = 32  # of a block, one of each lane, times its width
BLOCKS_PER_SM = 4  # at most: more rows, and blocks go on with their part of M
# Shared memory gives lanes four rows' elements in the time of 16 products: of one column, products
# wait for it. Of several a block needs more registers, so that fewer are on an SM.
FEW_BLOCKS_PER_SM = 2
MOST_BLOCKS = 65535  # along y and z
AFFINE: Table = (
    ("x", "P"),  # [batch, num_heads, head_dim], a multiple of 4 bytes, as are its strides
    ("y", "P"),  # the same, contiguous; float32 where rows are encoded
    ("matrix", "P"),  # float32 [num_kv_heads, head_dim, head_dim]
    ("offset", "P"),  # float32 [num_kv_heads, head_dim], contiguous; 0: none
    ("seq_lens", "P"),  # int32 [batch]: where it is 0, so is y; 0: all as if 1
    ("x_stride_batch", "Q"),  # bytes, as are all strides
    ("x_stride_head", "Q"),
    ("matrix_stride", "Q"),  # from one KV head to the next
    ("lens_stride", "Q"),
    ("waits", "i"),  # whether matrix and offset, too, are read after the launch before
    ("num_heads", "i"),
    ("ratio", "i"),  # query heads on a KV head
    ("ratio_factor", "I"),  # row_layout.divisor
    ("ratio_shift", "I"),
    ("num_rows", "i"),  # of a KV head: batch * ratio
    ("rows_of_block", "i"),  # a multiple of warps
)


@dataclass(frozen=True)
class AffineSpec(Spec):
    """The affine kernel.

    Attributes:
        head_dim: a multiple of 2 * warps.
        source: "bf16" or "fp16", the codec of x and, but for encoded rows, of y.
        product: whether rows are multiplied by a matrix.
        encodes: whether y is (x - offset) M in float32, and not x M + offset.
        width: columns of a lane.
        warps: of a block, 4 or 8.
        overlaps: as of Spec.
    """

    head_dim: int
    source: str = "bf16"
    product: bool = True
    encodes: bool = False
    width: int = 1
    warps: int = 8
    overlaps: bool = False

    arguments = AFFINE
    kernel = "affine.kernel.make_affine_kernel"

    @property
    def shared_bytes(self) -> int:
        return 4 * self.warps * (self.head_dim + self.warps * COLUMNS * self.width) * self.product


def affine_rows(
    x: torch.Tensor,
    matrix: torch.Tensor | None,
    offset: torch.Tensor | None,
    seq_lens: torch.Tensor | None = None,
    check: Callable[[], None] | None = None,
    *,
    overlaps: bool = False,
    encodes: bool = False,
) -> torch.Tensor:
    """Compute x M + offset on the current stream; see kvquant.ops.transform.affine_rows.

    check raises unless the arguments fit, and is called only before a launch is prepared. encodes
    asks for (x - offset) M in float32. Returns [batch, num_heads, head_dim], contiguous; the bits
    of a row do not depend on the others. Errors: as of cached_launch.
    """
    facts = map(facts_of, (x, matrix, offset, seq_lens))
    key = AffineSpec, encodes, x.is_neg(), overlaps, *facts
    launch = cached_launch(key, check, _prepare, x, matrix, offset, seq_lens, encodes, overlaps)
    y = torch.empty(x.shape, dtype=torch.float32 if encodes else x.dtype, device=x.device)
    if launch is not None:
        launch((x, y, matrix, offset, seq_lens))
    return y


encode_rows = functools.partial(affine_rows, encodes=True)


def _prepare(
    x: torch.Tensor,
    matrix: torch.Tensor | None,
    offset: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    encodes: bool,
    overlaps: bool,
) -> Launch | None:
    if not x.numel():
        return None
    index = x.get_device()
    is_copied = x.stride(2) != 1 or not is_readable(x, 4)
    batch, num_heads, head_dim = x.shape
    per_head = offset if matrix is None else matrix
    assert per_head is not None
    num_kv_heads = per_head.shape[0]
    ratio = num_heads // num_kv_heads
    spec = AffineSpec(head_dim, SOURCES[x.dtype], matrix is not None, encodes)
    gpu = gpu_of(index)
    if gpu.capability >= OVERLAPS:
        spec = replace(spec, overlaps=True)
    rows, columns = batch * ratio, -(-head_dim // COLUMNS)
    most = BLOCKS_PER_SM * gpu.sm_count
    groups = -(-rows // spec.warps)
    if spec.product and groups * columns * num_kv_heads > FEW_BLOCKS_PER_SM * gpu.sm_count:
        spec = replace(spec, width=4 if 64 < head_dim <= 128 else 2)
        columns, most = -(-columns // spec.width), most // spec.width
    walked = max(-(-groups * columns * num_kv_heads // most), -(-groups // MOST_BLOCKS))
    rows_of_block = spec.warps * walked
    x_stride_batch, x_stride_head = strides(x, is_copied)
    ratio_factor, ratio_shift = divisor(ratio)
    constants = {
        "x_stride_batch": x_stride_batch,
        "x_stride_head": x_stride_head,
        "matrix_stride": 0 if matrix is None else 4 * matrix.stride(0),
        "lens_stride": 0 if seq_lens is None else 4 * seq_lens.stride(0),
        "waits": not overlaps or is_copied,
        "num_heads": num_heads,
        "ratio": ratio,
        "ratio_factor": ratio_factor,
        "ratio_shift": ratio_shift,
        "num_rows": rows,
        "rows_of_block": rows_of_block,
    }
    grid = columns, num_kv_heads, -(-rows // rows_of_block)
    copied = (0,) if is_copied else ()
    return Launch(spec, index, grid, constants, copied, overlaps=not encodes)
