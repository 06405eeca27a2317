"""Segments of every kind with the same tokens, and how results are compared: for attention."""

from __future__ import annotations

from typing import Any

import torch
from decode_rows import INT4, State, in_pages, nan_rows
from decode_rows import lens as lens
from relative_l2 import relative_l2

from kvquant import KVCache, RowFormat, quantize_rows
from kvquant.rows.segment import Segment

HEADS = 2  # of K and V


def packed(*shape: int, fmt: RowFormat = INT4) -> torch.Tensor:
    """Rows of normal values."""
    return quantize_rows(torch.randn(*shape, fmt.head_dim), fmt, backend="reference")


def ring_of(
    k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor, fmt: RowFormat, sinks: int
) -> Segment:
    """The same behind sinks in a ring of 40 rows that begins anywhere, at any sequence slots."""
    batch, heads = k.shape[:2]
    slots, starts = torch.randperm(batch + 1)[:batch], torch.randint(0, 40, (batch,))
    rings = [nan_rows(fmt, batch + 1, heads, sinks + 40) for _ in "kv"]
    for b, count in enumerate(counts.tolist()):
        for token in range(count):
            row = token if token < sinks else sinks + (token - sinks + int(starts[b])) % 40
            for ring, rows in zip(rings, (k, v), strict=True):
                ring[slots[b], :, row] = rows[b, :, token]
    k_ring, v_ring = rings
    return Segment(k_ring, v_ring, counts, fmt, fmt, starts.int(), None, sinks, slots.int())


def segments_of(
    kind: str, counts: tuple[int, ...], dim: int
) -> tuple[list[Segment], torch.Tensor, torch.Tensor]:
    """Segments of a kind, and dequantized K and V [batch, heads, tokens, dim] in token order."""
    seq_lens, longest = lens(*counts), max(*counts, 1)
    int4, bf16 = RowFormat.parse("int4-g4", dim), RowFormat.parse("bf16", dim)
    if kind == "cache":  # sinks, packed rows, recent tokens; some cropped into the packed rows
        options: dict[str, Any] = {"k_format": int4, "v_format": int4}
        cache = KVCache(1, len(counts), HEADS, dim, 200, sink_len=3, recent_len=12, **options)
        k, v = torch.randn(2, len(counts), HEADS, longest + 9, dim)
        cache.append(0, k, v, [n + 9 if i % 2 else n for i, n in enumerate(counts)])
        cache.crop(seq_lens)
        return cache.segments(0), *cache.dequantized(0)
    fmt = bf16 if kind == "ring" else int4
    k, v = (packed(len(counts), HEADS, longest, fmt=fmt) for _ in "kv")
    for b, count in enumerate(counts):
        k[b, :, count:], v[b, :, count:] = 255, 255
    linear = Segment(k, v, seq_lens, fmt, fmt)
    segment = linear
    if kind == "pages":
        (k, v), table = in_pages((k, v), seq_lens, 16)
        segment = Segment(k, v, seq_lens, fmt, fmt, None, table)
    elif kind == "ring":
        segment = ring_of(k, v, seq_lens, fmt, 2)
    keys, values = torch.zeros(2, len(counts), HEADS, longest, dim)
    for b, count in enumerate(counts):
        keys[b, :, :count], values[b, :, :count] = linear.dequantized(b)
    return [segment], keys, values


def assert_close(found: State, expected: State, limit: float, rtol: float = 1e-5) -> None:
    """Assert that out and lse, of float32 results, are what was expected, within limit."""
    (out, lse), (wanted, wanted_lse) = found, expected
    empty = wanted_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert not out[empty].any()
    assert relative_l2(out, wanted) <= limit
    torch.testing.assert_close(
        lse[~empty].double(), wanted_lse[~empty], rtol=rtol, atol=max(rtol, limit)
    )
