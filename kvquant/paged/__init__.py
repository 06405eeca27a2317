"""The paged cache: pages that sequences share, prefixes found again, forks, swaps."""

from .batch import PagedBatch as PagedBatch
from .cache import PagedKVCache as PagedKVCache
