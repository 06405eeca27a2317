"""SGLang's memory pool of K and V, with rows in place of elements.

SGLang takes the bytes of a row for the elements of a head, so whatever moves pages moves rows.

    SGLang    [pages, page_size, num_kv_heads, head_dim], the model's dtype
    here      [pages, num_kv_heads, page_size, row bytes] in the same memory, uint8

Layers whose formats differ have buffers of their own sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch

from ..engine.contract import PageLayout, Pages
from ..errors import UnsupportedError, missing_extra
from .environment import settings

try:
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
    from sglang.srt.mem_cache.memory_pool import KvBufferDesc, MHATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
except ImportError as error:
    raise missing_extra("rows in SGLang's pool need SGLang", "sglang", error) from error


class RowsPool(MHATokenToKVPool):
    """Rows of all layers; SWAKVPool has two RowsPools, one of them for layers with a window.

    It raises UnsupportedError if SGLang wants a dtype or a layout that rows cannot have.

    Attributes:
        layers: layer_id of the layers in each part of an SWAKVPool, by SGLang's label of the part.
        layouts: of pages of each layer, by layer_id.
    """

    layers: ClassVar[Mapping[str | None, Sequence[int]]] = {}

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
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
        sizes = swa_head_num or head_num, swa_head_dim or head_dim
        shape = *sizes, swa_v_head_dim or v_head_dim or sizes[1]
        start = options.get("start_layer") or 0
        layers = self.layers.get(options.get("allocation_label"), range(start, start + layer_num))
        self.layouts = layouts_of(layers, shape)
        # SGLang's host cache, which needs layers of one size, reads these
        k_bytes, v_bytes = settings().layout(*shape).row_bytes(page_size)
        given = size, page_size, torch.uint8, shape[0], k_bytes, layer_num
        super().__init__(*given, *args, v_head_dim=v_bytes, **options)
        if self.kv_cache_layout != "nhd":
            raise UnsupportedError(
                f"SGLang's pool has the layout {self.kv_cache_layout}, and rows need nhd: leave "
                "SGLANG_USE_HND_KVCACHE, and what else sets a layout, unset"
            )

    def _build_kv_buffer_descs(self) -> list[KvBufferDesc]:
        """What SGLang reserves, and tells to those that move tokens: K of all layers, then V."""
        tokens, heads = self.size + self.page_size, self.head_num
        rows = [layout.row_bytes(self.page_size) for layout in self.layouts.values()]
        return [
            KvBufferDesc(name, (tokens, heads, size), row_bytes=heads * size, tokens_per_row=1)
            for name, sizes in zip("kv", zip(*rows, strict=True), strict=False)
            for size in sizes
        ]

    def _create_buffers_normal(self) -> None:
        own = torch.cuda.use_mem_pool(self.custom_mem_pool) if self.custom_mem_pool else None
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), own or nullcontext():
            shapes = [one.shape for one in self._build_kv_buffer_descs()]
            tensors = [torch.zeros(one, dtype=torch.uint8, device=self.device) for one in shapes]
        self._assign_post_capture_tensors(tensors)

    def set_kv_buffer(self, *_: Any, **__: Any) -> None:
        """Refuse the call: elements, and tokens out of pages, would destroy rows."""
        raise UnsupportedError(
            "rows are written by kvquant's attention backend alone, and single tokens do not move: "
            "leave out what asks for it (--speculative-algorithm)"
        )

    move_kv_cache = set_kv_buffer


def layouts_of(layers: Sequence[int], shape: tuple[int, int, int]) -> dict[int, PageLayout]:
    """The layouts of layers by layer_id; layers.py refuses those that a plan lacks.

    shape: KV heads on this rank, head_dim of K, and of V.
    """
    asked = settings()
    known = layers if asked.plan is None else asked.plan.places
    return {
        layer: (asked.of_layer(layer) if layer in known else asked).layout(*shape)
        for layer in layers
    }


def parts_of(pool: Any) -> list[Any]:
    """The pools of a pool: that of layers that see all tokens, and that of layers with a window."""
    return [pool.full_kv_pool, pool.swa_kv_pool] if isinstance(pool, SWAKVPool) else [pool]


def pages_of(pool: Any, layer_id: int) -> Pages:
    """A layer's pages of K and V in a RowsPool or an SWAKVPool, as in the engine contract."""
    size: int = pool.page_size
    k, v = (
        buffer[: len(buffer) // size * size].view(-1, buffer.shape[1], size, buffer.shape[2])
        for buffer in pool.get_kv_buffer(layer_id)
    )
    return k, v
