"""Tests in the real engine are collected where vLLM is installed: make test-vllm."""

from importlib.util import find_spec

collect_ignore = ["test_contract.py", "test_engine.py", "test_processes.py"]
if find_spec("vllm"):
    collect_ignore.clear()
