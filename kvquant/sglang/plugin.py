"""The entry point: SGLang finds kvquant's backend here, in every process, and uses it where asked.

SGLang has a registry of attention backends, and none of memory pools, nor of the bytes that a token
takes in them. So two methods are wrapped by SGLang's own hooks; both are as they were unless the
attention backend is kvquant's.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from typing import Any

from ..engine.settings import Settings
from ..errors import ConfigError, shown

NAME = "kvquant"  # of the attention backend
VARIABLE = "KVQUANT_SGLANG"  # of the environment: JSON of Settings.parse
DEFAULT = '{"k_format": "int4-g4"}'
POOL_CLASS = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class"
CELL_SIZE = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size"


def register() -> None:
    """Name the backend, and hook the choice of the memory pool; SGLang calls this in every process
    before it reads its arguments."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_attention_backend(NAME)(_make_backend)
    add_attention_backend_choices([NAME])
    HookRegistry.register(POOL_CLASS, _pool_class, HookType.AROUND)
    HookRegistry.register(CELL_SIZE, _cell_size, HookType.AROUND)


@lru_cache
def settings() -> Settings:
    """What the user asks for.

    Raises:
        ConfigError: the variable holds no JSON, or what Settings.parse refuses.
    """
    text = os.environ.get(VARIABLE, DEFAULT)
    try:
        given = json.loads(text)
    except ValueError:
        raise ConfigError(f"{VARIABLE} is {shown(text)}: give JSON, such as {DEFAULT}") from None
    return Settings.parse(given, VARIABLE)


def _make_backend(runner: Any) -> Any:
    from .backend import RowsAttention

    return RowsAttention(runner)


def _is_asked(configurator: Any) -> bool:
    """Whether the model that is served has rows; a draft model has a backend of its own."""
    from sglang.srt.runtime_context import attention_backends

    return NAME in attention_backends() and not configurator.is_draft_worker


def _pool_class(original: Any, configurator: Any, *, kind: str, default: type) -> Any:
    """SGLang's choice of a memory pool, but for rows."""
    if kind != "mha" or not _is_asked(configurator):
        return original(configurator, kind=kind, default=default)
    from .pool import RowsPool

    return RowsPool


def _cell_size(original: Any, sizes: Any, configurator: Any, num_layers: int) -> int:
    """Bytes that a token takes in all layers, by which SGLang chooses the size of its pool."""
    found: int = original(sizes, configurator, num_layers)
    if configurator.use_mla_backend or not _is_asked(configurator):
        return found
    from .pool import row_bytes

    model = configurator.model_config
    in_16_bit: int = (model.head_dim + model.v_head_dim) * configurator.kv_cache_dtype.itemsize
    return (
        found // in_16_bit * sum(row_bytes(settings().layout(1, model.head_dim, model.v_head_dim)))
    )
