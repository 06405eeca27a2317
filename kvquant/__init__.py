"""Quantized KV caches for PyTorch decode loops."""

from .attention import decode_attention, merge_states
from .cache import KVCache
from .checkpoint import load_cache, save_cache
from .layout import RowFormat
from .quant import dequantize_rows, quantize_rows
from .reference import reference_attention

__version__ = "0.1.0.dev0"

__all__ = [
    "KVCache",
    "RowFormat",
    "decode_attention",
    "dequantize_rows",
    "load_cache",
    "merge_states",
    "quantize_rows",
    "reference_attention",
    "save_cache",
]
