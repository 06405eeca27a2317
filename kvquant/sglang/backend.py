"""The attention backend of SGLang: its batches as steps of the engine contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_exec

from ..engine.contract import NewTokens
from ..engine.hooks import hook
from ..engine.step import Step, append, attend, begin_window, describe_step
from ..engine.warmup import warm_up_layers
from ..errors import UnsupportedError, refuse
from .environment import settings
from .layers import calls_of, moving_flags, rows_of_layers, windows_of, with_sinks
from .pool import RowsPool, pages_of, parts_of


@hook("sglang", "init_cpu_graph_state")
class RowsAttention(AttentionBackend):
    """Attention to rows, of one ModelRunner of SGLang.

    SGLang's pool may have one part for layers that see all tokens and one for layers with a window.
    Then a batch has a step for each part, because pages and slots differ.

    Raises:
        UnsupportedError: SGLang's pool has no rows, tokens are drafted, prompts run in whole CUDA
            graphs, or layers cannot have rows.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        self._parts = parts = parts_of(pool)
        refuse(UnsupportedError, _problems(runner, parts))
        self.token_to_kv_pool, self.req_to_token_pool = pool, runner.req_to_token_pool
        self._rows = rows_of_layers(runner, settings())
        self._windows = windows_of(runner, self._rows, parts)
        if torch.device(runner.device).type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
            warm_up_layers(device, calls_of(runner, self._rows))
        self._steps: list[Step] = []
        self._slots: list[torch.Tensor] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Describe the steps of a batch that runs without a graph."""
        batch, counts = forward_batch, [1] * forward_batch.batch_size
        is_prompt = batch.forward_mode.is_extend()
        if is_prompt:
            counts = batch.extend_seq_lens_cpu
        elif not batch.forward_mode.is_decode_or_idle():
            raise UnsupportedError(f"kvquant does not serve SGLang's {batch.forward_mode}")
        seq_lens = batch.seq_lens.to(torch.int32)
        given = self._tables(batch), seq_lens, counts, batch.seq_lens_cpu
        self._steps = self._describe(*given, is_prompt=is_prompt)
        self.init_forward_metadata_in_graph(batch)

    def _describe(
        self,
        tables: Sequence[torch.Tensor],
        lens: torch.Tensor,
        counts: Sequence[int],
        host: torch.Tensor,
        *,
        is_prompt: bool = False,
    ) -> list[Step]:
        """A step for each part of the pool."""
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device="cpu")
        prompts = torch.full((len(counts),), is_prompt, dtype=torch.bool, device="cpu")
        rest = lens, starts, host.to(torch.int32), int(starts[-1]), 1, prompts
        new = NewTokens(tables[0], *rest)
        steps = [describe_step(new, self._windows[0])]
        for table, window in zip(tables[1:], self._windows[1:], strict=True):
            steps.append(replace(steps[0], block_table=table, kept={}))
            if window is not None:
                begin_window(window, new._replace(block_table=table), steps[-1])
        return steps

    def _tables(self, batch: Any) -> list[torch.Tensor]:
        """For each part of the pool: the pages of each sequence, as many as the longest has."""
        lens, pool, page_size = batch.seq_lens_cpu, self.token_to_kv_pool, self._page_size
        longest = int(lens.max()) if len(lens) else 0
        slots = self.req_to_token_pool.req_to_token[:, :longest:page_size][batch.req_pool_indices]
        tables = [slots]
        if len(self._parts) > 1:
            tables.append(pool.translate_loc_from_full_to_swa(slots).to(torch.int32))
        return [table // page_size for table in tables] if page_size > 1 else tables

    @property
    def _page_size(self) -> int:
        size: int = self.token_to_kv_pool.page_size
        return size

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the tables and lengths of graphs; UnsupportedError for several tokens a step."""
        if max_num_tokens != max_bs:
            raise UnsupportedError(
                "kvquant has CUDA graphs of one token for each sequence: leave "
                "--speculative-algorithm out"
            )
        tokens = self.req_to_token_pool.req_to_token
        shape = max_bs, -(-tokens.shape[1] // self._page_size)
        self._fixed_tables = [tokens.new_zeros(shape, dtype=torch.int32) for _ in self._parts]
        self._fixed_lens = tokens.new_ones(max_bs, dtype=torch.int32)

    def init_cpu_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Refuse SGLang's graphs on the CPU."""
        raise UnsupportedError("kvquant has no graphs on the CPU: leave --enable-torch-compile out")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a graph's padding sequences: 1 token, in SGLang's reserved slot."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Write the tables and lengths that a graph reads, before its capture and each replay."""
        batch, size = forward_batch, forward_batch.batch_size
        if not batch.forward_mode.is_decode_or_idle():
            raise UnsupportedError(f"kvquant has no CUDA graph of {batch.forward_mode}")
        for fixed, table in zip(self._fixed_tables, self._tables(batch), strict=True):
            fixed[:size, : table.shape[1]] = table
        self._fixed_lens[:size] = batch.seq_lens
        tables, lens = [table[:size] for table in self._fixed_tables], self._fixed_lens[:size]
        if in_capture:
            # as if they had a past: what SGLang captures with takes no slot for 16-bit rows
            self._steps = self._describe(tables, lens, [1] * size, batch.seq_lens_cpu + 1)
            return
        for window, table in zip(self._windows, tables, strict=True):
            if window is not None and size:
                window.begin(table, lens, [1] * size, {})

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Find the slots of new tokens. In a graph this runs in each replay."""
        slots = forward_batch.out_cache_loc
        self._slots = [slots]
        if len(self._parts) > 1:
            self._slots.append(self.token_to_kv_pool.translate_loc_from_full_to_swa(slots))

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
    ) -> torch.Tensor:
        """Write the new tokens' rows, and attend with their queries."""
        if k is None or v is None or not save_kv_cache:
            raise UnsupportedError(
                f"layer {layer.layer_id} attends to another layer's K and V, which kvquant does "
                "not serve: take another --attention-backend"
            )
        pool, rows = self.token_to_kv_pool, self._rows[layer.layer_id]
        if sinks is not None:
            rows = with_sinks(rows, sinks)
        part = int(layer.layer_id not in self._parts[0].layouts)
        pages = pages_of(pool, layer.layer_id)
        k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        append(rows, k, v, pages, self._slots[part][: len(k)])
        out = q.new_zeros(*q.shape[:2], layer.v_head_dim)
        attend(rows, self._steps[part], q, k, v, pages, out)
        return out.flatten(1)

    forward_decode = forward_extend


def _problems(runner: Any, parts: Sequence[Any]) -> Iterator[str]:
    """Why SGLang is not served as it is set; parts of its pool."""
    if not all(isinstance(part, RowsPool) for part in parts):
        yield (
            f"SGLang keeps K and V of this model in {type(runner.token_to_kv_pool).__name__}, and "
            "kvquant serves only MHATokenToKVPool, and SWAKVPool with two such pools: take another "
            "--attention-backend"
        )
    if not runner.spec_algorithm.is_none():
        yield (
            "kvquant has no backend for drafted tokens in SGLang: leave --speculative-algorithm out"
        )
    if runner.server_args.disaggregation_mode != "null" and runner.page_size > 1:
        yield (
            "disaggregation moves single tokens, and kvquant's pages move as a whole: give "
            "--page-size 1, or leave --disaggregation-mode out"
        )
    plan, flags = settings().plan, moving_flags(runner.server_args)
    if flags and plan is not None and len(set(plan.formats)) > 1:
        yield (
            f"{flags} moves rows of one size, and layers of the plan have several: leave it out, "
            "or give k_format and v_format, without a plan that keeps layers in 16 bit"
        )
    graphs = get_exec().graph.cuda_graph_config
    if graphs is not None and graphs.prefill.backend == Backend.FULL:
        yield (
            "kvquant divides prompts on the host, which a CUDA graph of a whole prompt cannot do: "
            "give --cuda-graph-backend-prefill breakable or disabled"
        )
