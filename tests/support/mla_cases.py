"""Random rows and queries of MLA, and what attention to them is in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvquant import RowFormat, dequantize_rows, quantize_rows
from kvquant.kernels.cuda.mla.spec import TILE, MlaSpec

LIMITS = {torch.bfloat16: 3e-3, torch.float16: 8e-4}
NAN = 0xFF  # bytes of NaN
FLASH_MLA = "FlashMLA"  # 512 FP8, 4 float32 scales, 64 bfloat16: 656 bytes


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


def flash_mla_latent(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent part of FlashMLA's rows and what they hold: [..., 512] to [..., 528]."""
    groups = x.unflatten(-1, (4, 128))
    scales = groups.abs().amax(-1, keepdim=True) / 448
    codes = (groups / scales).to(torch.float8_e4m3fn)
    row = [codes.flatten(-2).view(torch.uint8), scales.squeeze(-1).view(torch.uint8)]
    return torch.cat(row, -1), (codes.float() * scales).flatten(-2)


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
    latent_name, _, rope_name = ("fp8-g4+bf16" if name == FLASH_MLA else name).partition("+")
    latent = RowFormat.parse(latent_name, dims[0])
    rope = RowFormat.parse(rope_name or latent_name, dims[1])
    batch, q_len = len(lens), max(q_lens or [1])
    unit = page_size or 1
    capacity = -(-(max(1, *lens) + (0 if overlong else 5)) // unit) * unit
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    parts, values = [], []
    for fmt in (latent, rope):
        x = torch.randn(batch, capacity, fmt.head_dim) * scale + 0.5 * scale
        if name == FLASH_MLA and fmt is latent:
            part, value = flash_mla_latent(x)
        else:
            part = quantize_rows(x, fmt)
            value = dequantize_rows(part, fmt)
        parts.append(part)
        values.append(value.double())
    rows = torch.cat(parts, -1)
    for b, length in enumerate(lens):
        rows[b, length:] = NAN
    shape = (batch, q_len, heads)
    q_latent, q_rope = (torch.randn(*shape, dim).to(dtype) * q_scale for dim in dims)
    numbers = torch.tensor(q_lens or [1] * batch, dtype=torch.int32)
    padding = torch.arange(q_len) >= numbers[:, None]
    q_latent[padding], q_rope[padding] = torch.nan, torch.nan
    keys = torch.cat(values, -1)
    queries = torch.cat([q_latent, q_rope], -1).double()
    scores = torch.einsum("bqhd,btd->bqht", queries, keys) * sm_scale
    last = seq_lens[:, None] - numbers[:, None] + torch.arange(q_len) + 1
    hidden = (torch.arange(capacity) >= last[..., None]) | padding[..., None]
    scores = scores.masked_fill(hidden[:, :, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    out = torch.einsum("bqht,btd->bqhd", weights, values[0])
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
        latent,
        rope,
        query,
        min(page_size or TILE, TILE),
        page_size > 0,
        causal=q_lens is not None,
        behind=name == FLASH_MLA,
    )
    return MlaCase(
        name,
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
