"""Tests in the real engine are collected where vLLM is installed: make test-vllm."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

collect_ignore = ["test_contract.py", "test_drafts.py", "test_engine.py", "test_latent.py"]
collect_ignore += ["test_plugin.py"]
collect_ignore += ["test_processes.py", "test_refusals.py", "test_cuda_platform.py"]
collect_ignore += ["test_flash.py", "test_gpu_answers.py", "test_serving.py", "test_bench_vllm.py"]
if find_spec("vllm"):
    collect_ignore.clear()


@pytest.fixture(autouse=True, scope="session")
def _temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of pytest's own: vLLM leaves files in it, over which processes meet."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("vllm"))
    yield
    tempfile.tempdir = before


@pytest.fixture(scope="session")
def of_own_attention() -> dict[str, Any]:
    """What vLLM's own attention gives, from one engine: texts of prompts of mixed lengths, logits
    of windows, and how many pages it has."""
    from vllm_engines import LENGTHS, TOKENS, engine, generate, logits_of, passages, window_prompts

    with engine() as llm:
        given = passages(llm, len(LENGTHS), max(LENGTHS))
        prompts = [
            {"prompt_token_ids": one["prompt_token_ids"][:length]}
            for one, length in zip(given, LENGTHS, strict=True)
        ]
        return {
            "own": (prompts, generate(llm, prompts, TOKENS)),
            "logits": logits_of(llm, *window_prompts()),
            "pages": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        }


@pytest.fixture(scope="session")
def own(of_own_attention: dict[str, Any]) -> Any:
    """Prompts of mixed lengths, and the texts of vLLM's own attention for them."""
    return of_own_attention["own"]


@pytest.fixture(scope="session")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan of the demo model."""
    from vllm_engines import make_plan

    return make_plan(tmp_path_factory.mktemp("plan") / "plan.safetensors")
