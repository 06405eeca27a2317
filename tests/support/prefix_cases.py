"""A prefix in pages, whatever stands in the others, and attention to it in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from decode_rows import in_pages, nan_rows

from kvquant import RowFormat, dequantize_rows, quantize_rows
from kvquant.rows.segment import Segment


class PrefixCase(NamedTuple):
    """A prefix, queries, and what they find.

    Attributes:
        prefix: of one sequence.
        q: [batch, num_q_heads, head_dim].
        out, lse: [batch, num_q_heads, ...], float64.
    """

    prefix: Segment
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def make_prefix(
    names: str,
    head_dim: int,
    batch: int,
    heads: tuple[int, int],
    tokens: int,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0),
    device: str = "cpu",
) -> PrefixCase:
    """Make a case.

    Args:
        names: formats of K and V, such as "int4-g4/int8".
        head_dim: of K and V.
        batch: sequences.
        heads: query heads and KV heads.
        tokens: of the prefix.
        page_size: 0 for rows that follow one another.
        dtype: of the queries.
        scales: of queries, keys and values.
        device: of the tensors.
    """
    k_name, _, v_name = names.partition("/")
    k_format, v_format = (RowFormat.parse(name, head_dim) for name in (k_name, v_name or k_name))
    q_scale, k_scale, v_scale = scales
    num_q_heads, num_kv_heads = heads
    q = (q_scale * torch.randn(batch, num_q_heads, head_dim, device=device)).to(dtype)
    k, v = torch.randn(2, 1, num_kv_heads, tokens, head_dim, device=device)
    k_rows, v_rows = quantize_rows(k * k_scale, k_format), quantize_rows(v * v_scale, v_format)
    k, v = (
        dequantize_rows(rows, fmt).double()[0]
        for rows, fmt in ((k_rows, k_format), (v_rows, v_format))
    )
    scores = torch.einsum("bhrd,htd->bhrt", q.double().unflatten(1, (num_kv_heads, -1)), k)
    scores *= head_dim**-0.5
    out = torch.einsum("bhrt,htd->bhrd", scores.softmax(-1), v).flatten(1, 2)
    lens = torch.tensor([tokens], dtype=torch.int32, device=device)
    table = None
    if page_size:
        (k_rows, v_rows), table = in_pages((k_rows, v_rows), lens, page_size)
        table = table[:, :-1].to(device)  # of the prefix's own pages
    prefix = Segment(k_rows, v_rows, lens, k_format, v_format, None, table)
    return PrefixCase(prefix, q, out, scores.logsumexp(-1).flatten(1, 2))


def nothing_of_its_own(case: PrefixCase) -> Segment:
    """Segments of the sequences that hold no token."""
    prefix = case.prefix
    formats, shape = (prefix.k_format, prefix.v_format), (len(case.q), prefix.k_rows.shape[1], 32)
    k_rows, v_rows = (nan_rows(fmt, *shape).to(case.q.device) for fmt in formats)
    lens = torch.zeros(len(case.q), dtype=torch.int32, device=case.q.device)
    return Segment(k_rows, v_rows, lens, *formats)
