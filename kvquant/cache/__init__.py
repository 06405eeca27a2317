"""The cache of one batch: contiguous rows for each sequence, with sinks and a recent window."""

from .contiguous import KVCache as KVCache
