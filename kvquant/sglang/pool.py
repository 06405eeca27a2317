"""SGLang's memory pool of K and V, of rows in place of elements.

To SGLang a row is an element axis of bytes: whatever moves tokens moves rows.

    SGLang    [slots, num_kv_heads, head_dim], the model's dtype
    here      [slots, num_kv_heads, row bytes, up to a multiple of 16], uint8
"""

from __future__ import annotations

from typing import Any

import torch

from ..engine.contract import UNIT, LayerRows, PageLayout, Pages
from ..engine.settings import rank_heads
from ..engine.step import append
from ..errors import UnsupportedError, missing_extra
from ..rows.variant import AttentionVariant
from .plugin import settings

try:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc
except ImportError as error:
    raise missing_extra("rows in SGLang's pool need SGLang", "sglang", error) from error


def row_bytes(layout: PageLayout) -> tuple[int, int]:
    """Bytes that a row of K and one of V take: CUDA reads rows at multiples of 16."""
    k, v = (-(-fmt.row_bytes // UNIT) * UNIT for fmt in (layout.k_format, layout.v_format))
    return k, v


class RowsPool(MHATokenToKVPool):
    """Rows of all layers that attend to all tokens."""

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        *args: Any,
        v_head_dim: int | None = None,
        **options: Any,
    ) -> None:
        self.layout = settings().layout(head_num, head_dim, v_head_dim or head_dim)
        self._rows: dict[int, LayerRows] = {}
        k_bytes, v_bytes = row_bytes(self.layout)
        super().__init__(
            size, page_size, torch.uint8, head_num, k_bytes, *args, v_head_dim=v_bytes, **options
        )

    def pages(self, layer_id: int) -> Pages:
        """K's and V's pages of a layer, as the engine contract has them apart."""
        k, v = (
            buffer[: len(buffer) // self.page_size * self.page_size]
            .unflatten(0, (-1, self.page_size))
            .transpose(1, 2)
            for buffer in self.get_kv_buffer(layer_id)
        )
        return k, v

    def rows_of(self, layer: Any, sinks: torch.Tensor | None = None) -> LayerRows:
        """What a layer's attention needs, of a RadixAttention.

        Raises:
            UnsupportedError: rows cannot serve such a layer.
        """
        found = self._rows.get(layer.layer_id)
        if found is None:
            found = self._rows[layer.layer_id] = self._make_rows(layer, sinks)
        return found

    def _make_rows(self, layer: Any, sinks: torch.Tensor | None) -> LayerRows:
        from sglang.srt.layers.radix_attention import AttentionType
        from sglang.srt.runtime_context import get_parallel, process_model_config

        name = f"layer {layer.layer_id}"
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            raise UnsupportedError(f"{name} is {layer.attn_type}, which decodes from no rows")
        if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
            raise UnsupportedError(f"{name} caps scores by {layer.logit_capping_method}, not tanh")
        asked, basis = settings(), None
        if asked.plan is not None:
            model, parallel = process_model_config(), get_parallel()
            asked.plan.check_model(model.hf_config.to_dict())
            total = model.get_total_num_kv_heads()
            heads = rank_heads(total, parallel.attn_tp_rank, parallel.attn_tp_size)
            basis = asked.basis(layer.layer_id, heads, layer.qk_head_dim)
            basis = basis and basis.to(self.device)
        variant = None
        if sinks is not None or layer.sliding_window_size > 0 or layer.logit_cap > 0:
            variant = AttentionVariant(
                # of SGLang without the query's own token
                window=layer.sliding_window_size + 1 if layer.sliding_window_size > 0 else None,
                soft_cap=layer.logit_cap if layer.logit_cap > 0 else None,
                sink_logits=None if sinks is None else sinks.float(),
            )
        return LayerRows(self.layout, layer.scaling, basis, variant, asked.prompts_from_rows)

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor, **_: Any
    ) -> None:
        """Write the rows of new tokens; SGLang calls this, and RowsAttention."""
        slots, _, _ = unwrap_write_loc(loc_info)
        append(self.rows_of(layer), cache_k, cache_v, self.pages(layer.layer_id), slots)
