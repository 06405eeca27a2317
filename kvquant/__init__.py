"""Quantized KV caches for PyTorch decode loops.

Names are loaded when they are first asked for, and with them the operators torch.ops.kvquant:
`import kvquant` and `kvquant --help` do not wait for torch.
"""

import importlib
import typing

from .errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    InvariantError,
    KVQuantError,
    NonFiniteError,
    OutOfPagesError,
    ShapeError,
    UnsupportedError,
    UnsupportedModelError,
)

if typing.TYPE_CHECKING:
    from .append import append_rows, dequantize_pages
    from .attention import decode_attention, merge_states
    from .cache import KVCache
    from .checkpoint import load_cache, save_cache
    from .layout import RowFormat
    from .paged import PagedKVCache
    from .pagedbatch import PagedBatch
    from .pagedfile import load_sequences, save_sequences
    from .plan import CachePlan
    from .quant import dequantize_rows, quantize_rows
    from .reference import reference_attention
    from .slots import Slots, slots_of
    from .transforms import Rope, RowTransform

__version__ = "0.1.0"

__all__ = [
    "CachePlan",
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "InvariantError",
    "KVCache",
    "KVQuantError",
    "NonFiniteError",
    "OutOfPagesError",
    "PagedBatch",
    "PagedKVCache",
    "Rope",
    "RowFormat",
    "RowTransform",
    "ShapeError",
    "Slots",
    "UnsupportedError",
    "UnsupportedModelError",
    "append_rows",
    "decode_attention",
    "dequantize_pages",
    "dequantize_rows",
    "load_cache",
    "load_sequences",
    "merge_states",
    "quantize_rows",
    "reference_attention",
    "save_cache",
    "save_sequences",
    "slots_of",
]

_HOMES = {
    "CachePlan": "plan",
    "KVCache": "cache",
    "PagedBatch": "pagedbatch",
    "PagedKVCache": "paged",
    "Rope": "transforms",
    "RowFormat": "layout",
    "RowTransform": "transforms",
    "Slots": "slots",
    "append_rows": "append",
    "decode_attention": "attention",
    "dequantize_pages": "append",
    "dequantize_rows": "quant",
    "load_cache": "checkpoint",
    "load_sequences": "pagedfile",
    "merge_states": "attention",
    "quantize_rows": "quant",
    "reference_attention": "reference",
    "save_cache": "checkpoint",
    "save_sequences": "pagedfile",
    "slots_of": "slots",
}

if not typing.TYPE_CHECKING:  # else a type checker would take any name for a known one

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
