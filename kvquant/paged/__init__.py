"""The paged cache: pages that sequences share, prefixes found again, forks, swaps."""
