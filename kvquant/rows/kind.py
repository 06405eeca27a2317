"""The kinds of rows that a cache holds: keys and values of heads, or latent rows.

Caches, layers, pages and batches are written once, for K and V, and ask KEY_VALUE or LATENT:

    KEY_VALUE   K and V are two rows, each in a tensor of its own
    LATENT      K is the latent, V the RoPE part, of one KV head: both parts lie side by side in one
                row of one tensor, and attention reads that row whole
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .basis import Encoding, LayerBasis, transform_rows
from .format import RowFormat, check_head_dims
from .latent import AnyFormat, LatentFormat
from .segment import Segment, latent_segment

Rows = tuple[torch.Tensor, torch.Tensor]  # of K and of V
Encodings = tuple[Encoding, Encoding]  # likewise
Tensors = Sequence[torch.Tensor]
RowFormats = Sequence[RowFormat]  # of each layer

LIKELY_Q_HEADS = 16, 128  # of DeepSeek's small and large models: kernels differ by their number


class KeyValue:
    """Keys and values of heads.

    Attributes:
        sides: what messages call K and V.
        query: what messages call queries.
        stores: names of the tensors of a layer that hold its packed rows, and its 16-bit rows.
    """

    sides = "k", "v"
    query = "q"
    stores: tuple[tuple[str, ...], tuple[str, ...]] = (
        ("k_packed", "v_packed"),
        ("k_exact_rows", "v_exact_rows"),
    )

    def check_formats(self, formats: Sequence[RowFormat]) -> None:
        check_head_dims(*formats)

    def stored(self, k_format: RowFormat, v_format: RowFormat) -> tuple[AnyFormat, ...]:
        """The formats of the rows in memory, one for each tensor."""
        return k_format, v_format

    def k_and_v(self, tensors: Tensors, k_format: RowFormat) -> Rows:
        k, v = tensors
        return k, v

    def segment(
        self, tensors: Tensors, formats: Sequence[AnyFormat], lens: torch.Tensor, *places: Any
    ) -> Segment:
        """The rows in these tensors as a segment; the formats are those of `stored`.

        places: starts, block_table, sinks and seq_slots of the segment, or the first of them.
        """
        (k, v), (k_format, v_format) = tensors, formats
        assert isinstance(k_format, RowFormat) and isinstance(v_format, RowFormat)
        return Segment(k, v, lens, k_format, v_format, *places)

    def to_write(
        self, k: torch.Tensor, v: torch.Tensor, basis: LayerBasis | None
    ) -> tuple[Rows, Encodings]:
        """New rows [num_tokens, heads, elements], and how to encode them."""
        if basis is None:
            return (k, v), (Encoding(), Encoding())
        return (k, v), (basis.k.encoding, basis.v.encoding)

    def options(
        self, num_kv_heads: int, head_dim: int, k_formats: RowFormats, v_formats: RowFormats
    ) -> dict[str, Any]:
        """Heads and formats of each layer, as the caches of these rows take them."""
        heads = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
        return heads | {"k_format": k_formats, "v_format": v_formats}

    def described(self, num_kv_heads: int, *formats: RowFormats) -> str:
        """Heads and formats of all layers, for people."""
        k, v = (" or ".join(dict.fromkeys(map(str, side))) for side in formats)
        return f"{num_kv_heads} KV heads of {formats[0][0].head_dim}, K {k}, V {v}"

    def likely_q_heads(self, num_kv_heads: int, ratios: Sequence[int] = (1,)) -> tuple[int, ...]:
        """Query heads to compile kernels for: a kernel serves up to 8 on a KV head."""
        return tuple(ratio * num_kv_heads for ratio in ratios)


class Latent(KeyValue):
    sides = "latent", "rope"
    query = "q_latent"
    stores = ("packed",), ("exact_rows",)

    def check_formats(self, formats: Sequence[RowFormat]) -> None:
        """Nothing: LatentFormat has checked them."""

    def stored(self, k_format: RowFormat, v_format: RowFormat) -> tuple[AnyFormat, ...]:
        return (LatentFormat(k_format, v_format),)

    def k_and_v(self, tensors: Tensors, k_format: RowFormat) -> Rows:
        (rows,) = tensors
        return rows[..., : k_format.row_bytes], rows[..., k_format.row_bytes :]

    def segment(
        self, tensors: Tensors, formats: Sequence[AnyFormat], lens: torch.Tensor, *places: Any
    ) -> Segment:
        """Latent rows [batch, 1, capacity, row_bytes], or pages of them, as rows of one KV head."""
        (rows,), (fmt,) = tensors, formats
        assert isinstance(fmt, LatentFormat)
        return latent_segment(rows, lens, fmt, *places)

    def to_write(
        self, k: torch.Tensor, v: torch.Tensor, basis: LayerBasis | None
    ) -> tuple[Rows, Encodings]:
        """New rows, transformed by torch: no kernel multiplies rows of these widths."""
        if basis is None:
            return super().to_write(k, v, basis)
        encodings = basis.k.encoding, basis.v.encoding
        k, v = (transform_rows(x, one) for x, one in zip((k, v), encodings, strict=True))
        if k.dtype != v.dtype:
            k, v = k.float(), v.float()
        return (k, v), (Encoding(clip=encodings[0].clip), Encoding(clip=encodings[1].clip))

    def options(
        self, num_kv_heads: int, head_dim: int, k_formats: RowFormats, v_formats: RowFormats
    ) -> dict[str, Any]:
        formats = list(map(LatentFormat, k_formats, v_formats))
        first = formats[0]
        return {"fmt": formats, "latent_dim": first.latent_dim, "rope_dim": first.rope_dim}

    def described(self, num_kv_heads: int, *formats: RowFormats) -> str:
        names = " or ".join(dict.fromkeys(map(str, map(LatentFormat, *formats))))
        latent, rope = formats[0][0].head_dim, formats[1][0].head_dim
        return f"{latent} latents and {rope} RoPE elements in {names}"

    def likely_q_heads(self, num_kv_heads: int, ratios: Sequence[int] = (1,)) -> tuple[int, ...]:
        """The query heads of DeepSeek's models."""
        return LIKELY_Q_HEADS


KEY_VALUE, LATENT = KeyValue(), Latent()
