"""Tests in the real engine are collected where vLLM is installed: make test-vllm."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of pytest's own: vLLM leaves files in it, over which processes meet."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("vllm"))
    yield
    tempfile.tempdir = before


@pytest.fixture(autouse=True, scope="session")
def probe() -> Iterator[Any]:
    """Engines of this process start no probe, which takes 10 seconds; what makes a figure."""
    from kvquant.engine import settings

    made = settings._made_figure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "_made_figure", lambda *_: None)
        yield made


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """Not here: vLLM reads what it has not written, and throws it away."""


@pytest.fixture(scope="session")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan of the demo model."""
    from vllm_engines import make_plan

    return make_plan(Path(tmp_path_factory.mktemp("plan")) / "plan.safetensors")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls whose kernels builders of engines would compile on a GPU."""
    from kvquant.vllm import backend, latent

    found: list[Any] = []
    for module in (backend, latent):
        monkeypatch.setattr(module, "warm_up_layers", lambda _, calls: found.extend(calls))
    return found
