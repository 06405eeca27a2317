"""Engines of vLLM on a GPU, compared with transformers in float32 (8 minutes): what
tests/support/vllm_answers.py finds, which also runs without pytest, and on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_answers import CASES
from vllm_engines import ROOT

SIDE_BY_SIDE = 3  # engines


@pytest.mark.gpu
@pytest.mark.slow
def test_engines_on_a_gpu_answer_as_transformers_does(tmp_path: Path) -> None:
    script = ROOT / "tests" / "support" / "vllm_answers.py"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(script), str(tmp_path), "--side-by-side", str(SIDE_BY_SIDE)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.count(": KL ") == len(CASES)
