"""Tests in the real engine are collected where vLLM is installed: make test-vllm."""

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore = ["test_contract.py", "test_engine.py", "test_processes.py"]
if find_spec("vllm"):
    collect_ignore.clear()


@pytest.fixture(autouse=True, scope="session")
def _temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of pytest's own: vLLM leaves files in it, over which processes meet."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("vllm"))
    yield
    tempfile.tempdir = before
