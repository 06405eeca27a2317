"""Random rows and queries of MLA, and what attention to them is in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from variant_cases import by_hand

from kvquant import LatentFormat, dequantize_rows, quantize_rows
from kvquant.rows.segment import Segment, latent_segment

LIMITS = {torch.bfloat16: 3e-3, torch.float16: 8e-4}
NAN = 0xFF  # bytes of NaN


@dataclass
class MlaCase:
    """A call, and its result.

    Attributes:
        q_latent, q_rope: [batch, q_len, heads, latent_dim] and [..., rope_dim].
        segments: packed rows, and 16-bit rows if there are any; what no token is in is NaN.
        q_lens: [batch], or None for one query.
        out, lse: float64.
    """

    q_latent: torch.Tensor
    q_rope: torch.Tensor
    segments: list[Segment]
    q_lens: torch.Tensor | None
    sm_scale: float
    out: torch.Tensor
    lse: torch.Tensor


def make_mla(
    name: str,
    heads: int,
    lens: Sequence[int],
    *,
    page_size: int = 0,
    exact: str = "",
    sinks: int = 0,
    recent: Sequence[int] | None = None,
    q_lens: Sequence[int] | None = None,
    dims: tuple[int, int] = (512, 64),
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.5,
    q_scale: float = 1.0,
    rope_scale: float = 1.0,
    sm_scale: float = 192**-0.5,
    overlong: bool = False,
    in_slots: bool = False,
    raw_scales: bool = False,
    growth: float = 1.0,
    device: str = "cpu",
) -> MlaCase:
    """Make a case.

    Args:
        name: of the packed rows, latent+rope.
        heads: of queries.
        lens: tokens of each sequence.
        page_size: of the packed rows; 0: they are linear.
        exact: "bf16" or "fp16", where sinks and recent tokens are such rows, of a ring with room
            for three more and any starts; "" for none.
        sinks: first tokens of each sequence that are 16-bit rows.
        recent: last ones of each sequence, behind its sinks; None for none, and no ring.
        q_lens: queries of each sequence, or None for one without causality.
        in_slots: whether 16-bit rows stand in sequence slots, more of them than sequences.
        rope_scale: by how much RoPE elements are larger, and those of queries smaller.
        raw_scales: of "fp8" rows, as others write them: see raw_rows.
        growth: by how much the last latents are larger than the first ones.
        overlong: tell the kernel of more tokens than there is room for, where all room is taken.
    """
    torch.manual_seed(0)
    fmt = LatentFormat.parse(name, *dims)
    batch, q_len = len(lens), max(q_lens or [1])
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    unit = page_size or 1
    capacity = -(-(max(1, *lens) + (0 if overlong else 5)) // unit) * unit
    x = torch.randn(batch, capacity, fmt.head_dim) * scale + 0.5 * scale
    x[..., dims[0] :] *= rope_scale
    x[..., : dims[0]] *= (growth ** torch.linspace(0, 1, capacity))[:, None]
    rows = raw_rows(x) if raw_scales else quantize_rows(x, fmt)
    keys = dequantize_rows(rows, fmt).double()
    segments = []
    exact_lens = torch.zeros_like(seq_lens)
    if exact:
        kept = LatentFormat.parse(f"{exact}+{exact}", *dims)
        whole = quantize_rows(x, kept)
        recent_lens = torch.tensor(recent or [0] * batch, dtype=torch.int32)
        exact_lens = torch.minimum(seq_lens, recent_lens + sinks)
        ring = max(recent) + 3 if recent else 0
        held = torch.full((batch, sinks + ring, kept.row_bytes), NAN, dtype=torch.uint8)
        starts = torch.randint(ring, (batch,), dtype=torch.int32) if recent else None
        for b, length in enumerate(lens):
            first, count = min(sinks, length), int(exact_lens[b])
            last = length - (count - first)
            held[b, :first] = whole[b, :first]
            if starts is not None:
                places = (torch.arange(count - first) + starts[b]) % ring
                held[b, sinks + places] = whole[b, last:length]
            here = [*range(first), *range(last, length)]
            keys[b, here] = dequantize_rows(whole[b, here], kept).double()
            rows[b, : last - first] = rows[b, first:last].clone()
        seq_slots = None
        if in_slots:
            seq_slots = torch.randperm(batch + 2, dtype=torch.int32)[:batch]
            store = torch.full((batch + 2, *held.shape[1:]), NAN, dtype=torch.uint8)
            store[seq_slots.long()] = held
            held = store
        segments.append(
            latent_segment(
                held[:, None], exact_lens, kept, starts, sinks=sinks, seq_slots=seq_slots
            )
        )
    packed_lens = seq_lens - exact_lens
    for b, length in enumerate(packed_lens.tolist()):
        rows[b, length:] = NAN
    shape = (batch, q_len, heads)
    q_latent, q_rope = (torch.randn(*shape, dim).to(dtype) * q_scale for dim in dims)
    q_rope /= rope_scale
    numbers = torch.tensor(q_lens or [1] * batch, dtype=torch.int32)
    padding = torch.arange(q_len) >= numbers[:, None]
    q_latent[padding], q_rope[padding] = torch.nan, torch.nan
    queries, keys = torch.cat([q_latent, q_rope], -1), keys[:, None]
    of_rows = queries, keys, keys[..., : dims[0]], lens
    out, lse = by_hand(*of_rows, q_lens or [1] * batch, scale=sm_scale)
    table = None
    if page_size:
        pages = capacity // page_size
        table = torch.randperm(batch * pages, dtype=torch.int32).view(batch, pages)
        store = torch.full((batch * pages + 2, page_size, rows.shape[-1]), NAN, dtype=torch.uint8)
        store[table.long()] = rows.view(batch, pages, page_size, -1)
        rows = store
        table = torch.where(torch.arange(pages) < -(-packed_lens // page_size)[:, None], table, -1)
    if overlong:
        packed_lens = torch.where(packed_lens == capacity, capacity + 1000, packed_lens)
    segments.insert(0, latent_segment(rows[:, None], packed_lens, fmt, block_table=table))
    return MlaCase(
        q_latent.to(device),
        q_rope.to(device),
        [_moved(segment, device) for segment in segments],
        None if q_lens is None else numbers.to(device),
        sm_scale,
        out.to(device),
        lse.to(device),
    )


def raw_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows [..., 656] of FlashMLA's layout with scales as vLLM writes them: the largest number of
    128 over 448, no power of two and of any size."""
    latent = x[..., :512].float().unflatten(-1, (4, 128))
    scales = latent.abs().amax(-1, keepdim=True) / 448
    codes = (latent / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    parts = codes.flatten(-2), scales[..., 0].contiguous(), x[..., 512:].bfloat16().contiguous()
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def _moved(segment: Segment, device: str) -> Segment:
    rows, _, lens, fmt, _, starts, table, sinks, seq_slots = segment
    starts, table, seq_slots = (
        None if one is None else one.to(device) for one in (starts, table, seq_slots)
    )
    return latent_segment(rows.to(device), lens.to(device), fmt, starts, table, sinks, seq_slots)  # type: ignore[arg-type]
