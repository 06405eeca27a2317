"""Quantized KV caches for PyTorch decode loops.

Names load on first use, and the operators torch.ops.kvquant with them: `import kvquant` and
`kvquant --help` do not wait for torch. CachedModel, CapturedStep, QuantizedCache, calibrate and
evaluate need the hf extra; without it `from kvquant import *` leaves them out. `import kvquant.hf`,
or any of the first three, registers attn_implementation="kvquant" in transformers.
"""

import importlib
import importlib.metadata
import importlib.util
import typing

from .errors import (
    AccuracyError,
    CheckpointError,
    ConfigError,
    DeviceError,
    KVQuantError,
    NonFiniteError,
    OutOfPagesError,
    ShapeError,
    UnsupportedError,
    UnsupportedModelError,
)
from .version import __version__ as __version__

if typing.TYPE_CHECKING:
    from .cache.context_parallel import ContextParallelCache
    from .cache.contiguous import KVCache
    from .cache.latent import LatentKVCache
    from .calibration.calibrate import calibrate
    from .evaluation.evaluate import evaluate
    from .hf.cache import QuantizedCache
    from .hf.compile.captured import CapturedStep
    from .hf.model import CachedModel
    from .io.checkpoint import load_cache, save_cache
    from .io.plan import CachePlan
    from .io.sequences import load_sequences, save_sequences
    from .ops.append import append_rows
    from .ops.attention import decode_attention
    from .ops.merge import merge_states
    from .ops.mla import mla_decode_attention
    from .ops.quantize import dequantize_rows, quantize_rows
    from .ops.rows_at import dequantize_pages
    from .ops.slots import slots_of
    from .paged.batch import PagedBatch
    from .paged.cache import PagedKVCache
    from .paged.latent import LatentPagedKVCache
    from .paged.latent_batch import LatentPagedBatch
    from .rows.basis import Basis
    from .rows.format import RowFormat
    from .rows.latent import LatentFormat
    from .rows.reference import reference_attention
    from .rows.rotation import Rope
    from .rows.slots import Slots
    from .rows.variant import AttentionVariant

__all__ = [
    "AccuracyError",
    "AttentionVariant",
    "Basis",
    "CachePlan",
    "CachedModel",
    "CapturedStep",
    "CheckpointError",
    "ConfigError",
    "ContextParallelCache",
    "DeviceError",
    "KVCache",
    "KVQuantError",
    "LatentFormat",
    "LatentKVCache",
    "LatentPagedBatch",
    "LatentPagedKVCache",
    "NonFiniteError",
    "OutOfPagesError",
    "PagedBatch",
    "PagedKVCache",
    "QuantizedCache",
    "Rope",
    "RowFormat",
    "ShapeError",
    "Slots",
    "UnsupportedError",
    "UnsupportedModelError",
    "append_rows",
    "calibrate",
    "decode_attention",
    "dequantize_pages",
    "dequantize_rows",
    "evaluate",
    "load_cache",
    "load_sequences",
    "merge_states",
    "mla_decode_attention",
    "quantize_rows",
    "reference_attention",
    "save_cache",
    "save_sequences",
    "slots_of",
]

_HOMES = {
    "AttentionVariant": "rows.variant",
    "Basis": "rows.basis",
    "CachedModel": "hf.model",
    "CachePlan": "io.plan",
    "CapturedStep": "hf.compile.captured",
    "ContextParallelCache": "cache.context_parallel",
    "KVCache": "cache.contiguous",
    "LatentFormat": "rows.latent",
    "LatentKVCache": "cache.latent",
    "LatentPagedBatch": "paged.latent_batch",
    "LatentPagedKVCache": "paged.latent",
    "PagedBatch": "paged.batch",
    "PagedKVCache": "paged.cache",
    "QuantizedCache": "hf.cache",
    "Rope": "rows.rotation",
    "RowFormat": "rows.format",
    "Slots": "rows.slots",
    "append_rows": "ops.append",
    "calibrate": "calibration.calibrate",
    "decode_attention": "ops.attention",
    "dequantize_pages": "ops.rows_at",
    "dequantize_rows": "ops.quantize",
    "evaluate": "evaluation.evaluate",
    "load_cache": "io.checkpoint",
    "load_sequences": "io.sequences",
    "merge_states": "ops.merge",
    "mla_decode_attention": "ops.mla",
    "quantize_rows": "ops.quantize",
    "reference_attention": "rows.reference",
    "save_cache": "io.checkpoint",
    "save_sequences": "io.sequences",
    "slots_of": "ops.slots",
}

_TRANSFORMERS = 5, 14  # the oldest that the hf extra takes

if not typing.TYPE_CHECKING:  # else a type checker would take any name for a known one
    _NAMES = __all__
    del __all__  # so that `import *` asks __getattr__ for it

    def __getattr__(name: str) -> object:
        if name == "__all__":
            return _available()
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """All available names; help() asks for each of them."""
        return sorted({*globals(), *_available(), "__all__"})

    def _available() -> list[str]:
        """The names that can be had, found without loading a library."""
        try:
            found = tuple(map(int, importlib.metadata.version("transformers").split(".")[:2]))
        except (importlib.metadata.PackageNotFoundError, ValueError):
            found = ()
        has_hf = found >= _TRANSFORMERS and importlib.util.find_spec("transformers") is not None
        needs_hf = "hf.", "evaluation.", "calibration."
        return [name for name in _NAMES if has_hf or not _HOMES.get(name, "").startswith(needs_hf)]
