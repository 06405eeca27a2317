"""The layers of a model that SGLang serves: the rows of each, or the reason why it has none."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.runtime_context import get_parallel
from transformers import AutoConfig

from ..engine.contract import LayerRows, PageLayout
from ..engine.settings import Settings, rank_heads, rows_of_each, tell_settings
from ..engine.warmup import StepCalls
from ..engine.window import Window, WindowRows, slots_for
from ..errors import UnsupportedError, refuse
from ..rows.slots import Split
from ..rows.variant import AttentionVariant, names_of
from .environment import settings, weights_of
from .pool import pages_of, parts_of

MOVING = (  # attributes of server_args
    "enable_hierarchical_cache",
    "enable_lmcache",
    "enable_flexkv",
    "enable_unified_cache_external_linker",
    "disaggregation_mode",
)


def rows_of_layers(runner: Any, settings: Settings) -> dict[int, LayerRows]:
    """The rows of a model's layers, by SGLang's layer_id.

    Args:
        runner: SGLang's ModelRunner, with a pool of rows and loaded weights.
        settings: of the user.

    Raises:
        UnsupportedError: some layers cannot have rows; the message names them and the reasons.
        CheckpointError: the plan is of another model.
    """
    if settings.plan is not None:
        settings.plan.check_model(_saved_config(runner))
    layers = dict(_layers(runner.model))
    counts = Counter(layer.layer_id for layer in layers.values())
    odd = [name for name, layer in layers.items() if counts[layer.layer_id] > 1]
    refused = [
        f"{name}: it shares layer_id {layers[name].layer_id} with another layer" for name in odd
    ]
    rows_of = partial(_rows_of, runner=runner, settings=settings)
    found = rows_of_each(layers, rows_of, "with another --attention-backend", refused)
    held = [one.layout for one in found.values()]
    size = sum(one.num_kv_heads * sum(one.row_bytes(runner.page_size)) for one in held)
    bits = 8 * size / sum(one.elements for one in held)
    room = f"{runner.token_to_kv_pool.size:,} tokens, {bits:.3g} bits an element"
    tell_settings(settings, weights_of(runner.server_args), room)
    return {layers[name].layer_id: rows for name, rows in found.items()}


def _saved_config(runner: Any) -> dict[str, Any]:
    """The model's config as `kvquant calibrate` read it. SGLang changes its own copy."""
    model = runner.model_config
    config: dict[str, Any] = AutoConfig.from_pretrained(
        model.model_path,
        revision=model.revision,
        trust_remote_code=runner.server_args.trust_remote_code,
    ).to_dict()
    return config


def windows_of(
    runner: Any, rows: dict[int, LayerRows], parts: Sequence[Any]
) -> list[Window | None]:
    """The 16-bit rows of each part of the pool, which its layers have from now on."""
    pool, schedule, asked = runner.token_to_kv_pool, runner.server_args, settings()
    device, page, refused = torch.device(runner.device), pool.page_size, _without_window(runner)
    layers = [
        [i for i in part.layouts if i in rows and asked.window_len(part.layouts[i], refused)]
        for part in parts
    ]
    elements = sum(rows[layer].layout.elements for ids in layers for layer in ids)
    if not elements:
        return [None for _ in parts]
    size = (page + asked.recent_len) * 2 * elements
    # SGLang may pad a batch to a multiple of the ranks that share attention
    num_seqs = -(-runner.req_to_token_pool.size // schedule.tp_size) * schedule.tp_size
    slots = slots_for(num_seqs, size, device)
    most = max(schedule.chunked_prefill_size or 0, schedule.max_prefill_tokens)
    if (schedule.chunked_prefill_size or 0) <= 0:  # then any prompt is read in one step
        most = max(most, runner.model_config.context_len)
    most = 5 * most // 4 + num_seqs  # chunks may grow by a quarter
    windows: list[Window | None] = []
    for ids in layers:
        if not ids:
            windows.append(None)
            continue
        width = -(-runner.req_to_token_pool.req_to_token.shape[1] // page)
        pages = pages_of(pool, ids[0])[0].shape[0]
        window = Window(
            Split(page, asked.recent_len, page), slots, pages, num_seqs, most, width, device
        )
        for layer in ids:
            made = WindowRows.of(window, rows[layer].layout, runner.dtype)
            rows[layer] = rows[layer]._replace(window=made)
        windows.append(window)
    return windows


def moving_flags(server_args: Any) -> str:
    """Flags that were given of what moves pages between SGLang's pool and others; "" for none."""
    found = [name for name in MOVING if getattr(server_args, name) not in (False, "null")]
    return ", ".join("--" + name.replace("_", "-") for name in found)


def _without_window(runner: Any) -> str | None:
    """Why first pages and last tokens cannot be in 16 bit."""
    given = runner.server_args
    if runner.page_size < 4:
        return "pages of --page-size 1 and 2 hold less than 4 first tokens (give 16)"
    if flags := moving_flags(given):
        return f"{flags} writes pages without 16-bit rows"
    if given.enable_two_batch_overlap:
        return "--enable-two-batch-overlap runs two steps at a time"
    return None


def calls_of(runner: Any, rows: dict[int, LayerRows]) -> list[StepCalls]:
    schedule = runner.server_args
    most = schedule.chunked_prefill_size or 0
    calls = []
    for name, layer in _layers(runner.model):
        one, parent = rows[layer.layer_id], runner.model.get_submodule(name.rpartition(".")[0])
        if getattr(parent, "sinks", None) is not None:  # which the layer gets with its queries
            one = with_sinks(one, parent.sinks)
        calls.append(
            StepCalls(
                one,
                layer.tp_q_head_num,
                runner.dtype,
                runner.page_size,
                runner.model_config.context_len,
                runner.req_to_token_pool.size,
                most if most > 0 else schedule.max_prefill_tokens,
                is_apart=True,
                recent_len=one.window.window.split.recent_len if one.window else 0,
            )
        )
    return calls


def with_sinks(rows: LayerRows, sinks: torch.Tensor) -> LayerRows:
    """The same with sink logits, [num_q_heads], of any dtype."""
    variant = rows.variant or AttentionVariant()
    return rows._replace(variant=variant._replace(sink_logits=sinks.detach().float()))


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, RadixAttention):
            yield name, module


def _problems(layer: Any, layout: PageLayout) -> Iterator[str]:
    """Why a layer cannot have rows."""
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        kind = "cross attention" if layer.is_cross_attention else layer.attn_type.value
        yield f"it is of type {kind}, and rows serve decoders only"
    if layer.use_irope:
        yield "it attends within local chunks"
    if layer.xai_temperature_len > 0:
        yield "it changes its queries' temperature with their positions"
    if layer.pos_encoding_mode != "NONE":
        yield f"it encodes positions by {layer.pos_encoding_mode}"
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        yield f"it caps scores by {layer.logit_capping_method}, not tanh"
    shape = layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim
    held = layout.num_kv_heads, layout.k_format.head_dim, layout.v_format.head_dim
    if shape != held:
        yield (
            f"it has {shape[0]} KV heads (head_dim {shape[1]} of K, {shape[2]} of V), and SGLang's "
            f"pool has {held[0]} for all layers (head_dim {held[1]} of K, {held[2]} of V)"
        )


def _rows_of(_: str, layer: Any, runner: Any, settings: Settings) -> LayerRows:
    parts = parts_of(runner.token_to_kv_pool)
    layout = ChainMap(*(part.layouts for part in parts)).get(layer.layer_id)
    if layout is None:
        raise UnsupportedError(f"SGLang's pool has no layer {layer.layer_id}")
    refuse(UnsupportedError, _problems(layer, layout))
    basis = None
    if settings.plan is not None:
        parallel, total = get_parallel(), runner.model_config.get_total_num_kv_heads()
        heads = rank_heads(total, parallel.attn_tp_rank, parallel.attn_tp_size)
        basis = settings.basis(layer.layer_id, heads, layout)
        basis = basis and basis.to(runner.device)
    variant = AttentionVariant(
        # of SGLang without the query's own token
        window=layer.sliding_window_size + 1 if layer.sliding_window_size > 0 else None,
        soft_cap=layer.logit_cap if layer.logit_cap > 0 else None,
    )
    given = variant if names_of(variant) else None
    return LayerRows(layout, layer.scaling, basis, given, settings.prompts_from_rows)
