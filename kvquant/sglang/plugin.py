"""The entry point: SGLang finds kvquant's backend here, in every process.

SGLang has a registry of attention backends, but none of memory pools or of bytes a token. So
kvquant wraps three methods by SGLang's own hooks; with other backends they do what SGLang's do.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..engine.hooks import check_further, check_version, hook
from ..engine.settings import Settings, accuracy_of, with_kept_plan
from ..errors import ConfigError, UnsupportedError
from .environment import VARIABLE, given, weights_of

NAME = "kvquant"  # of the attention backend
POOL_CLASS = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class"
SIZES = "sglang.srt.model_executor.pool_configurator."
CELL_SIZE = SIZES + "DefaultPoolConfigurator._compute_cell_size"
WINDOW_SIZES = SIZES + "HybridSWAPoolConfigurator.__init__"


@hook("sglang")
def register() -> None:
    """Register the backend and hook the memory pool, before SGLang reads its arguments."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_attention_backend(NAME)(_make_backend)
    add_attention_backend_choices([NAME])
    register_resolution_hook("handle_model_specific_adjustments")(_admit)
    HookRegistry.register(POOL_CLASS, _pool_class, HookType.AROUND)
    HookRegistry.register(CELL_SIZE, _cell_size, HookType.AROUND)
    HookRegistry.register(WINDOW_SIZES, _window_sizes, HookType.AROUND)


@hook("sglang")
def _make_backend(runner: Any) -> Any:
    check_version("sglang")
    from .backend import RowsAttention

    return RowsAttention(runner)


@hook("sglang")
def _admit(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Let SGLang adjust its arguments to the model."""
    # For gpt-oss and Gemma 4 SGLang accepts only a fixed list of backends. During its check
    # kvquant's backend has the name of SGLang's Triton backend, which serves the same models. Here
    # the model is known and SGLang has not started its other processes: so the kept plan replaces
    # "auto" in their environment, and rows that ruin the model are refused.
    from sglang.srt.arg_groups import model_hook

    backends_of = model_hook.attention_backends_of
    if NAME in backends_of(server_args):
        asked = with_kept_plan(given(), server_args.model_path)
        os.environ[VARIABLE] = json.dumps(asked)
        accuracy_of(Settings.parse(asked, VARIABLE), partial(weights_of, server_args))

    def counted(view: Any) -> tuple[str, ...]:
        return tuple("triton" if name == NAME else name for name in backends_of(view))

    model_hook.attention_backends_of = counted
    try:
        previous(server_args)
    finally:
        model_hook.attention_backends_of = backends_of


def _is_asked(configurator: Any, args: tuple[object, ...], more: dict[str, object]) -> bool:
    """Whether the model that is served has rows; a draft model has a backend of its own."""
    from sglang.srt.runtime_context import attention_backends

    asked = set(attention_backends())
    if NAME not in asked or configurator.is_draft_worker or configurator.use_mla_backend:
        return False
    check_version("sglang")
    check_further("sglang", "the hooks of its pool", dict(enumerate(args)) | more)
    if asked != {NAME}:
        raise ConfigError(
            f"prompts and decoding sequences have the attention backends {sorted(asked)}, and only "
            f"{NAME} can read its rows: give --attention-backend {NAME} for both"
        )
    return True


def _pool_class(
    original: Any, configurator: Any, *args: Any, kind: str, default: type, **more: Any
) -> Any:
    """The class of the memory pool: RowsPool for rows, else SGLang's choice."""
    if kind != "mha" or not _is_asked(configurator, args, more):
        return original(configurator, *args, kind=kind, default=default, **more)
    from .pool import RowsPool

    info = configurator.layer_info
    parts = {"Full": info.full_attention_layer_ids, "SWA": info.swa_attention_layer_ids}
    if default not in RowsPool.__mro__:
        raise UnsupportedError(
            f"SGLang chose the pool {default.__name__}, and rows need MHATokenToKVPool: leave "
            "--enable-page-major-kv-layout out"
        )
    return type("RowsPool", (RowsPool,), {"layers": parts})


def _cell_size(
    original: Any, sizes: Any, configurator: Any, num_layers: int, *args: Any, **more: Any
) -> int:
    """Bytes that a token takes in all layers, by which SGLang chooses the size of its pool."""
    found: int = original(sizes, configurator, num_layers, *args, **more)
    if not _is_asked(configurator, args, more):
        return found
    model = configurator.model_config
    in_16_bit: int = (model.head_dim + model.v_head_dim) * configurator.kv_cache_dtype.itemsize
    start, page_size = configurator.layer_info.start_layer, configurator.page_size
    layers = range(start, start + num_layers)
    mean = _bytes_of_head(layers, model.head_dim, model.v_head_dim, page_size)
    return round(found // in_16_bit * mean)


def _window_sizes(original: Any, sizes: Any, configurator: Any, *args: Any, **more: Any) -> None:
    """The same for a pool of two parts, of layers with a window and of others."""
    original(sizes, configurator, *args, **more)
    if not _is_asked(configurator, args, more):
        return
    from sglang.srt.runtime_context import get_parallel

    model, page_size = configurator.model_config, configurator.page_size
    ranks, info = get_parallel().attn_tp_size, configurator.layer_info
    dims = model.head_dim, model.v_head_dim
    full = _bytes_of_head(info.full_attention_layer_ids, *dims, page_size)
    dims = model.swa_head_dim, model.swa_v_head_dim
    window = _bytes_of_head(info.swa_attention_layer_ids, *dims, page_size)
    sizes._full_per_token = math.ceil(model.get_num_kv_heads(ranks) * full)
    sizes._swa_per_token = math.ceil(model.get_swa_num_kv_heads(ranks) * window)
    sizes._recompute_cell_size()


def _bytes_of_head(layers: Sequence[int], head_dim: int, v_head_dim: int, page_size: int) -> float:
    """Bytes of a token's K and V in one head, the mean over layers; 0 without layers."""
    from .pool import layouts_of

    found = layouts_of(layers, (1, head_dim, v_head_dim)).values()
    return sum(sum(one.row_bytes(page_size)) for one in found) / max(len(found), 1)
