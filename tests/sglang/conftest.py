"""Tests in the real engine are collected where SGLang is installed: make test-vllm."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("sglang") else ["test_engine.py"]
