"""LatentPagedKVCache: a PagedKVCache with the latent for K and the RoPE part for V, in one row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache.latent import DEFAULT_FORMAT, LatentFormats, latent_formats
from ..ops.mla import check_kernels
from ..rows.arguments import check_device, check_size
from ..rows.basis import LayerBasis
from ..rows.kind import LATENT
from ..rows.latent import LatentFormat
from .cache import MAX_SEQ_LEN, SEQ_SLOTS, PagedKVCache


class LatentPagedKVCache(PagedKVCache):
    """Latent rows of many sequences of a model with multi-head latent attention, in pages.

    It is a PagedKVCache of one KV head without windows, whose K is the latent and V the RoPE part,
    also in errors and files. LatentPagedBatch appends and attends.

    Args:
        num_layers: layers with attention.
        num_pages: pages of packed tokens, in every layer.
        fmt: format of the packed rows, a name ("int4-g8+int8-g4") or a LatentFormat, or one
            of these per layer.
        latent_dim: elements of a latent, 512 or 256 (kv_lora_rank of the model).
        rope_dim: elements of the RoPE part, 64 or 32 (qk_rope_head_dim).
        max_num_seqs, max_seq_len, page_size, sink_len, recent_len, exact_format, rollback_len,
            device: as in PagedKVCache.
        bases: as in LatentKVCache; a plan has them, see from_plan.

    Raises:
        ConfigError: a size, a format or a device that does not exist, or takes too much memory.
        ShapeError: a basis is of other sizes.
        UnsupportedError: a basis with feedback; or, on CUDA, a format without kernels: latents
            of fewer than 4 groups, and RoPE parts of others, or of 32 elements unless in 16 bit.

    Example:
        >>> import torch
        >>> from kvquant import LatentPagedBatch, LatentPagedKVCache
        >>> paged = LatentPagedKVCache(1, num_pages=8, fmt="int4-g8+int8-g4", max_seq_len=256)
        >>> batch = LatentPagedBatch(paged, max_batch=2, max_tokens=64)
        >>> paged.allocate("a")
        0
        >>> with batch.extend(["a"], [20]):
        ...     batch.append(0, torch.randn(20, 1, 512), torch.randn(20, 1, 64))
        >>> paged.fork("a", "b")
        >>> paged.length("b")
        20
    """

    row_kind = LATENT

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        *,
        fmt: LatentFormats = DEFAULT_FORMAT,
        latent_dim: int = 512,
        rope_dim: int = 64,
        max_num_seqs: int = SEQ_SLOTS,
        max_seq_len: int = MAX_SEQ_LEN,
        page_size: int = 64,
        sink_len: int = 4,
        recent_len: int = 128,
        exact_format: str = "bf16",
        rollback_len: int | None = None,
        device: torch.device | str = "cpu",
        bases: Sequence[LayerBasis] | None = None,
    ) -> None:
        num_layers = check_size("num_layers", num_layers, at_least=1)
        formats = latent_formats(fmt, num_layers, latent_dim, rope_dim)
        if check_device(device, or_meta=True).type == "cuda":
            check_kernels(formats)
        super().__init__(
            num_layers,
            1,
            latent_dim,
            num_pages,
            max_num_seqs=max_num_seqs,
            max_seq_len=max_seq_len,
            page_size=page_size,
            k_format=[one.latent for one in formats],
            v_format=[one.rope for one in formats],
            sink_len=sink_len,
            recent_len=recent_len,
            exact_format=exact_format,
            rollback_len=rollback_len,
            device=device,
            bases=bases,
        )

    @property
    def formats(self) -> list[LatentFormat]:
        """Format of the packed rows of each layer."""
        return [LatentFormat(at.k_format, at.v_format) for at in self.rows.layers]

    def pages(self, layer: int) -> torch.Tensor:
        """The pages of a layer, as engines have them: [num_pages, page_size, 1, row_bytes], uint8.

        A view, with the rows of a page contiguous. LatentPagedBatch.block_table has the pages of a
        sequence's packed tokens: all tokens with sink_len=0 and recent_len=0. FlashMLA, and vLLM in
        fp8_ds_mla caches, read pages of 64 tokens in the format "fp8".

        Raises:
            ConfigError: the layer does not exist.
        """
        self.check_layer(layer)
        return self.rows.pages[0].layers[layer].transpose(1, 2)
