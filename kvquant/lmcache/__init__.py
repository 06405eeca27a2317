"""Rows in the storage of LMCache, in place of 16-bit keys and values."""
