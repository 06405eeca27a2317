"""Tests in the real engine are collected where SGLang is installed: make test-vllm."""

from __future__ import annotations

import runpy
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore = ["test_backend.py", "test_engine.py", "test_gpu_answers.py"]
if find_spec("sglang"):
    collect_ignore.clear()


@pytest.fixture(scope="session")
def sglang() -> Iterator[None]:
    """SGLang can be imported, without torchvision."""
    stubs = Path(__file__).parents[1] / "support" / "sglang_stubs" / "sitecustomize.py"
    before = [*sys.meta_path]
    runpy.run_path(str(stubs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and of SGLang, while they are imported
        from sglang.srt.arg_groups import model_hook  # noqa: F401
        from sglang.srt.mem_cache import swa_memory_pool  # noqa: F401
        from sglang.srt.model_executor import forward_batch_info  # noqa: F401
    yield
    sys.meta_path[:] = before
