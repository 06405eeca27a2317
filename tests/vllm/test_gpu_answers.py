"""Engines of vLLM on a GPU, compared with transformers in float32 (8 minutes): what
tests/support/vllm_answers.py finds, which also runs without pytest, and on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from compared_answers import run_script
from vllm_answers import CASES


@pytest.mark.gpu
@pytest.mark.slow
def test_engines_on_a_gpu_answer_as_transformers_does(tmp_path: Path) -> None:
    assert run_script("vllm_answers.py", tmp_path, "--side-by-side", "3") == len(CASES)
