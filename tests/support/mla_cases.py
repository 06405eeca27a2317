"""Random rows and queries of MLA, and what attention to them is in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvquant import LatentFormat, dequantize_rows, quantize_rows
from kvquant.kernels.cuda.mla.spec import TILE, MlaSpec

LIMITS = {torch.bfloat16: 3e-3, torch.float16: 8e-4}
NAN = 0xFF  # bytes of NaN


@dataclass
class MlaCase:
    """A call, and its result.

    Attributes:
        q_latent, q_rope: [batch, q_len, heads, latent_dim] and [..., rope_dim].
        rows: [batch, capacity, row_bytes], or [num_pages, page_size, row_bytes], uint8; what no
            token is in is NaN.
        table: [batch, max_pages], or None.
        out, lse: float64.
    """

    name: str
    fmt: LatentFormat
    spec: MlaSpec
    q_latent: torch.Tensor
    q_rope: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    q_lens: torch.Tensor | None
    table: torch.Tensor | None
    capacity: int
    page_shift: int
    sm_scale: float
    out: torch.Tensor
    lse: torch.Tensor


def make_mla(
    name: str,
    heads: int,
    lens: Sequence[int],
    *,
    page_size: int = 0,
    q_lens: Sequence[int] | None = None,
    dims: tuple[int, int] = (512, 64),
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.5,
    q_scale: float = 1.0,
    sm_scale: float = 192**-0.5,
    overlong: bool = False,
    device: str = "cpu",
) -> MlaCase:
    """Make a case: rows of `name`, latent+rope, with sequences so long; page_size 0: linear rows;
    q_lens: queries of each sequence, or None for one without causality; overlong: tell the kernel
    of more tokens than there is room for, where all room is taken."""
    torch.manual_seed(0)
    fmt = LatentFormat.parse(name, *dims)
    batch, q_len = len(lens), max(q_lens or [1])
    unit = page_size or 1
    capacity = -(-(max(1, *lens) + (0 if overlong else 5)) // unit) * unit
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    x = torch.randn(batch, capacity, fmt.head_dim) * scale + 0.5 * scale
    rows = quantize_rows(x, fmt)
    keys = dequantize_rows(rows, fmt).double()
    for b, length in enumerate(lens):
        rows[b, length:] = NAN
    shape = (batch, q_len, heads)
    q_latent, q_rope = (torch.randn(*shape, dim).to(dtype) * q_scale for dim in dims)
    numbers = torch.tensor(q_lens or [1] * batch, dtype=torch.int32)
    padding = torch.arange(q_len) >= numbers[:, None]
    q_latent[padding], q_rope[padding] = torch.nan, torch.nan
    queries = torch.cat([q_latent, q_rope], -1).double()
    scores = torch.einsum("bqhd,btd->bqht", queries, keys) * sm_scale
    last = seq_lens[:, None] - numbers[:, None] + torch.arange(q_len) + 1
    hidden = (torch.arange(capacity) >= last[..., None]) | padding[..., None]
    scores = scores.masked_fill(hidden[:, :, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    out = torch.einsum("bqht,btd->bqhd", weights, keys[..., : dims[0]])
    table = None
    if page_size:
        pages = capacity // page_size
        table = torch.randperm(batch * pages, dtype=torch.int32).view(batch, pages)
        store = torch.full((batch * pages + 2, page_size, rows.shape[-1]), NAN, dtype=torch.uint8)
        store[table.long()] = rows.view(batch, pages, page_size, -1)
        rows = store
        table = torch.where(torch.arange(pages) < -(-seq_lens // page_size)[:, None], table, -1)
    if overlong:
        seq_lens = torch.where(seq_lens == capacity, capacity + 1000, seq_lens)
    query = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    spec = MlaSpec(
        *fmt.parts,
        query,
        min(page_size or TILE, TILE),
        page_size > 0,
        causal=q_lens is not None,
    )
    return MlaCase(
        name,
        fmt,
        spec,
        q_latent.to(device),
        q_rope.to(device),
        rows.to(device),
        seq_lens.to(device),
        None if q_lens is None else numbers.to(device),
        None if table is None else table.to(device),
        capacity,
        page_size.bit_length() - 1 if page_size else 0,
        sm_scale,
        out.to(device),
        lse.to(device),
    )
