"""SGLang's memory pool of K and V, with rows in place of elements.

SGLang takes the bytes of a row for the elements of a head, so whatever moves pages moves rows.

    SGLang    [pages, page_size, num_kv_heads, head_dim], the model's dtype
    here      [pages, num_kv_heads, page_size, row bytes] in the same memory, uint8
"""

from __future__ import annotations

from typing import Any

import torch

from ..engine.contract import Pages
from ..errors import UnsupportedError, missing_extra
from .environment import settings

try:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
except ImportError as error:
    raise missing_extra("rows in SGLang's pool need SGLang", "sglang", error) from error


class RowsPool(MHATokenToKVPool):
    """Rows of all layers; SWAKVPool has two RowsPools, one of them for layers with a window."""

    # It raises UnsupportedError if SGLang wants a dtype or a layout that rows cannot have.

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        *args: Any,
        v_head_dim: int | None = None,
        swa_head_num: int | None = None,
        swa_head_dim: int | None = None,
        swa_v_head_dim: int | None = None,
        quant_method: object = None,
        **options: Any,
    ) -> None:
        if quant_method is not None or dtype.itemsize < 2:
            raise UnsupportedError(
                f"--kv-cache-dtype or the checkpoint asks for {quant_method or dtype}, and rows "
                "have formats of their own: give --kv-cache-dtype bfloat16"
            )
        heads = swa_head_num or head_num
        k_size = swa_head_dim or head_dim
        self.layout = settings().layout(heads, k_size, swa_v_head_dim or v_head_dim or k_size)
        k_bytes, v_bytes = self.layout.row_bytes(page_size)
        super().__init__(
            size, page_size, torch.uint8, heads, k_bytes, *args, v_head_dim=v_bytes, **options
        )
        if self.kv_cache_layout != "nhd":
            raise UnsupportedError(
                f"SGLang's pool has the layout {self.kv_cache_layout}, and rows need nhd: leave "
                "SGLANG_USE_HND_KVCACHE, and what else sets a layout, unset"
            )

    def set_kv_buffer(self, *_: Any, **__: Any) -> None:
        """Refuse the call: elements written here would destroy rows."""
        raise UnsupportedError("rows are written by kvquant's attention backend alone")


def pages_of(pool: Any, layer_id: int) -> Pages:
    """A layer's pages of K and V in a RowsPool or an SWAKVPool, as in the engine contract."""
    size: int = pool.page_size
    k, v = (
        buffer[: len(buffer) // size * size].view(-1, buffer.shape[1], size, buffer.shape[2])
        for buffer in pool.get_kv_buffer(layer_id)
    )
    return k, v
