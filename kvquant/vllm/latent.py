"""The backend of layers with latent attention (MLA): rows of latents in vLLM's pages.

vLLM's common parts of MLA backends absorb the matrices and compute the attention of prompt tokens.
kvquant does what touches a page: it appends rows, attends with decoding sequences, and dequantizes
the latents of a prompt's past.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
    accumulate_mla_context_chunk,
    init_mla_context_partial,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import AttentionSpec

from ..engine.contract import NewTokens
from ..engine.hooks import hook
from ..engine.latent import (
    LatentCalls,
    LatentRows,
    append_latents,
    attend_to_latents,
    check_kernels,
    latents_at,
)
from ..engine.settings import LatentSettings, rows_of_each
from ..engine.step import Step, describe_step
from ..engine.warmup import warm_up_layers
from ..errors import UnsupportedError, refuse
from .backend import (
    WITHOUT,
    RowsBackend,
    backend_of,
    basis_of,
    begin_to_compile,
    calls_of,
    check_request,
    is_draft,
    odd_cache_dtype,
    probable_places,
    request_of,
    tell_rows,
)
from .entries import OURS

# elements of a latent and of its RoPE part, by their sum: the sizes that vLLM's metadata takes too
LATENT_AND_ROPE = {576: (512, 64), 320: (256, 64)}


@hook("vllm")
class KVQuantLatentBackend(RowsBackend, MLACommonBackend):  # type: ignore[misc]
    """Attention to latent rows; see backend_of."""

    kind_of_settings = LatentSettings

    @staticmethod
    def get_impl_cls() -> type[KVQuantLatentImpl]:
        return KVQuantLatentImpl

    @staticmethod
    def get_builder_cls() -> type[LatentStepBuilder]:
        return LatentStepBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(LATENT_AND_ROPE)

    @classmethod
    def room_of_rows(cls, spec: AttentionSpec) -> dict[str, int]:
        sizes = LATENT_AND_ROPE.get(spec.head_size, (spec.head_size, 0))
        return {"state_content_bytes": cls.settings.layout(*sizes).row_bytes}


@dataclass
class LatentMetadata(MLACommonMetadata[Step]):  # type: ignore[misc]
    """vLLM's metadata of a step, with a Step of the engine contract for the decoding sequences.

    Attributes:
        kept: slots of each part of the past that prompts attend to, by the part's index.
    """

    kept: dict[int, torch.Tensor] = field(default_factory=dict)


@hook("vllm")
class LatentStepBuilder(MLACommonMetadataBuilder[LatentMetadata]):  # type: ignore[misc]
    """Describes steps to the layers of a group; made once, when the model is loaded."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    query_len_support = QueryLenSupport.VARLEN

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        layers = get_layers_from_vllm_config(vllm_config, MLAAttention, layer_names)
        for layer in layers.values():
            check_request(layer.attn_backend.request, vllm_config)
        rows_of = partial(_rows_of, vllm_config=vllm_config, device=device)
        for name, rows in rows_of_each(layers, rows_of, WITHOUT).items():
            layers[name].impl.rows = rows
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, LatentMetadata)
        self.most_queries = self.reorder_batch_threshold
        calls = [
            calls_of(LatentCalls, vllm_config, one.impl.rows, one.num_heads, self.most_queries)
            for one in layers.values()
        ]
        warm_up_layers(device, calls)
        spec, settings = kv_cache_spec, next(iter(layers.values())).attn_backend.settings
        elements = spec.block_size * spec.num_kv_heads * spec.head_size
        tell_rows(settings, vllm_config, 8 * spec.unpadded_page_size_bytes / elements)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> Step:
        # vLLM counts all of these as decoding, so they are described as if all had a past
        lens = query_start_loc_cpu.diff() + 1
        return describe_step(
            NewTokens(
                block_table_tensor,
                seq_lens_device,
                query_start_loc_cpu,
                lens,
                num_decode_tokens,
                self.most_queries,
            )
        )


def _rows_of(name: str, layer: Any, vllm_config: VllmConfig, device: torch.device) -> LatentRows:
    settings, impl = layer.attn_backend.settings, layer.impl
    refuse(UnsupportedError, _problems(layer, vllm_config.parallel_config))
    fmt = settings.layout(layer.kv_lora_rank, layer.qk_rope_head_dim)
    if device.type == "cuda":
        check_kernels(fmt, vllm_config.model_config.dtype)
    basis = basis_of(name, layer, vllm_config)
    return LatentRows(fmt, impl.scale, basis and basis.to(device), settings.prompts_from_rows)


def _problems(layer: Any, parallel: Any) -> Iterator[str]:
    """Why a layer cannot have rows."""
    yield from odd_cache_dtype(layer.kv_cache_dtype)
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "it has context parallelism, which rows do not serve: turn it off"
    if layer.sliding_window is not None:
        yield f"it has a window of {layer.sliding_window} tokens, which latent rows do not serve"
    if layer.non_causal_multi_token_decode:
        yield "its tokens attend to later ones, which latent rows do not serve"


@hook("vllm")
class KVQuantLatentImpl(MLACommonImpl[LatentMetadata]):  # type: ignore[misc]
    """Attention of a layer.

    Attributes:
        rows: the layer's rows, from the builder, once the model is loaded.
        is_draft: whether the layer belongs to a draft model (MTP heads, too).
    """

    rows: LatentRows
    supports_pcp = False

    def __init__(self, *args: Any, indexer: object = None, **others: Any) -> None:
        if indexer is not None or "topk_indices_buffer" in others:
            raise UnsupportedError(
                "this model has sparse attention (DeepSeek V3.2), where an indexer chooses tokens. "
                'kvquant does not serve it: leave "kvquant" out of --additional-config'
            )
        super().__init__(*args, indexer=indexer, **others)
        self.supports_quant_query_input = False
        self.is_draft = is_draft()
        begin_to_compile(get_current_vllm_config(), self)

    def probable_calls(self, vllm_config: VllmConfig, queries: int) -> Iterator[LatentCalls]:
        settings = backend_of(KVQuantLatentBackend, OURS[0], request_of(vllm_config)).settings
        fmt = settings.layout(self.kv_lora_rank, self.qk_rope_head_dim)
        for place in probable_places(settings, self):
            basis = None if place is None else settings.basis(place)
            rows = LatentRows(fmt, self.scale, basis, settings.prompts_from_rows)
            yield calls_of(LatentCalls, vllm_config, rows, self.num_heads, queries)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        if kv_cache.numel():
            append_latents(self.rows, kv_c_normed, k_pe.squeeze(1), kv_cache, slot_mapping)

    def forward_mqa(
        self,
        q: tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: LatentMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend with the queries of decoding sequences, to rows only."""
        return attend_to_latents(self.rows, attn_metadata.decode, *q, kv_c_and_k_pe_cache), None

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: LatentMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attend with prompts' tokens; "prompts": "rows" reads their own latents from rows."""
        if self.rows.prompts_from_rows:
            first = attn_metadata.num_decode_tokens
            slots = attn_metadata.slot_mapping[first : first + len(q)]
            out = q.new_empty(len(q) * self.head_size)
            kv_c_normed, k_pe = latents_at(self.rows, kv_c_and_k_pe_cache, slots, out)
            kv_c_normed = kv_c_normed.squeeze(1)
        super().forward_mha(
            q,
            kv_c_normed,
            k_pe,
            kv_c_and_k_pe_cache,
            attn_metadata,
            k_scale,
            output,
            output_scale,
        )

    def _compute_prefill_context(
        self,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: LatentMetadata,
        k_scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with the tokens of prompts to their past, as vLLM does, with latents from rows."""
        prefill = attn_metadata.prefill
        context = prefill.chunked_context
        whole: tuple[torch.Tensor, torch.Tensor] | None = None
        for chunk in context.chunks:
            slots = attn_metadata.kept.get(chunk.index)
            if slots is None:
                size = kv_c_and_k_pe_cache.shape[1]
                slots = _slots_of(chunk, prefill.block_table, size)
                attn_metadata.kept[chunk.index] = slots
            latent, rope = latents_at(self.rows, kv_c_and_k_pe_cache, slots, context.workspace)
            sizes = self.qk_nope_head_dim, self.v_head_dim
            made = self.kv_b_proj(latent.squeeze(1))[0].view(-1, self.num_heads, sum(sizes))
            k, v = made.split(sizes, dim=-1)
            part = prefill.prefill_backend.run_prefill_context_chunk(
                chunk=chunk, q=q[chunk.token_slice], k=self._concat_k_nope_k_pe(k, rope), v=v
            )
            if whole is None:
                if len(context.chunks) == 1 and not context.empty_token_slices:
                    return part  # type: ignore[no-any-return]
                whole = init_mla_context_partial(context, *part, num_tokens=q.shape[0])
            accumulate_mla_context_chunk(chunk, *part, *whole)
        assert whole is not None
        return whole


def _slots_of(chunk: Any, block_table: torch.Tensor, page_size: int) -> torch.Tensor:
    """The slots of the tokens of a part of the past, prompt by prompt, int64."""
    prompt: torch.Tensor = chunk.token_to_seq.long()
    token = torch.arange(len(prompt), device=prompt.device)
    token += chunk.starts[prompt] - chunk.cu_seq_lens[prompt]
    page: torch.Tensor = block_table[chunk.request_slice][prompt, token // page_size]
    return page.long() * page_size + token % page_size
