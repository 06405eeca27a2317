"""Hugging Face transformers: its models decode from a kvquant cache, and are observed."""
