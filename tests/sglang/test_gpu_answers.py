"""Engines of SGLang compared with transformers in float32 (tests/support/sglang_compared.py): all
of them on a GPU, and three on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from compared_answers import run_script
from sglang_compared import CASES, faults

SCRIPT = "sglang_compared.py"


@pytest.mark.slow
def test_engines_on_the_cpu_answer_as_transformers_does(tmp_path: Path) -> None:
    names = "int4", "bf16-retracted", "gpt-oss"
    assert run_script(SCRIPT, tmp_path, *names) == len(names)


@pytest.mark.gpu
@pytest.mark.slow
def test_engines_on_a_gpu_answer_as_transformers_does(tmp_path: Path) -> None:
    assert run_script(SCRIPT, tmp_path, "--side-by-side", "3") == len(CASES)


def test_faults_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    kl = [[0.02, 1.0]] * 4
    kinds = dict.fromkeys(["generated", "again", "sampled", "beside_aborted", "prompts"], kl)
    one = {**kinds, "hits": 0, "retractions": 0, "sampled_texts": 1, "aborted": 48}
    told = faults({"int4": {**one, "graphs": False}, "bf16-retracted": {**one, "graphs": True}})
    assert "int4: KL of generated 0.020000, not below 0.0165" in told
    assert "int4: 0 tokens were found in the prefix cache" in told
    assert "int4: the aborted request has 48 tokens" in told
    assert "int4: 1 of 12 samples differ" in told
    assert "int4: CUDA graphs False" in told
    assert "bf16-retracted: no request was retracted" in told
    assert "bf16-retracted: CUDA graphs True" in told
