"""Quantized KV caches for PyTorch decode loops."""

from .append import append_rows, dequantize_pages
from .attention import decode_attention, merge_states
from .cache import KVCache
from .checkpoint import load_cache, save_cache
from .layout import RowFormat
from .paged import PagedKVCache
from .pagedbatch import PagedBatch
from .pagedfile import load_sequences, save_sequences
from .quant import dequantize_rows, quantize_rows
from .reference import reference_attention
from .slots import Slots, slots_of
from .transforms import Rope, RowTransform

__version__ = "0.1.0.dev0"

__all__ = [
    "KVCache",
    "PagedBatch",
    "PagedKVCache",
    "Rope",
    "RowFormat",
    "RowTransform",
    "Slots",
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
