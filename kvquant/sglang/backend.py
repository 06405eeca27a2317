"""The attention backend that SGLang instantiates: its batches as steps of the engine contract."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from ..engine.contract import NewTokens
from ..engine.step import Step, attend, describe_step
from ..errors import UnsupportedError
from .pool import RowsPool


class RowsAttention(AttentionBackend):
    """Attention to rows, of one ModelRunner of SGLang.

    Raises:
        UnsupportedError: its pool has no rows, or tokens are drafted.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, RowsPool):
            raise UnsupportedError(
                f"SGLang keeps K and V of this model in {type(pool).__name__}, and kvquant has "
                "rows for MHATokenToKVPool alone: with sliding windows give "
                "--disable-hybrid-swa-memory, else another --attention-backend"
            )
        if not runner.spec_algorithm.is_none():
            raise UnsupportedError(
                "kvquant has no backend for drafted tokens in SGLang: draft none"
            )
        self.token_to_kv_pool, self.req_to_token_pool = pool, runner.req_to_token_pool
        self._step: Step | None = None

    def init_forward_metadata(self, batch: Any) -> None:
        """Describe the step of a batch."""
        lens = batch.seq_lens_cpu
        counts = [1] * batch.batch_size
        if batch.forward_mode.is_extend():
            counts = batch.extend_seq_lens_cpu
        elif not batch.forward_mode.is_decode_or_idle():
            raise UnsupportedError(f"kvquant has no step of SGLang's {batch.forward_mode}")
        longest = int(lens.max()) if len(lens) else 0
        self._step = self._describe(batch, counts, lens.to(torch.int32), longest)

    def _describe(self, batch: Any, counts: list[int], lens: torch.Tensor, longest: int) -> Step:
        page_size = self.token_to_kv_pool.page_size
        table = self.req_to_token_pool.req_to_token[:, :longest:page_size]
        pages = table[batch.req_pool_indices]
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device="cpu")
        return describe_step(
            NewTokens(
                pages // page_size if page_size > 1 else pages,
                batch.seq_lens.to(torch.int32),
                starts,
                lens,
                int(starts[-1]),
            )
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Write the new tokens' rows, and attend with their queries."""
        if k is None or v is None or not save_kv_cache or others:
            what = "attends to another layer's K and V" if k is None else f"gives {[*others]}"
            raise UnsupportedError(f"layer {layer.layer_id} {what}, which kvquant does not know")
        pool, step = self.token_to_kv_pool, self._step
        assert step is not None
        rows = pool.rows_of(layer, sinks)
        k, v = k.view(-1, *_heads(layer)), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_zeros(*q.shape[:2], layer.v_head_dim)
        attend(rows, step, q, k, v, pool.pages(layer.layer_id), out)
        return out.flatten(1)

    forward_decode = forward_extend

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Refuse: steps are described outside of graphs only."""
        raise UnsupportedError("kvquant runs in SGLang without CUDA graphs: --disable-cuda-graph")


def _heads(layer: Any) -> tuple[int, int]:
    return layer.tp_k_head_num, layer.qk_head_dim
