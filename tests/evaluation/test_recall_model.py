"""The model of examples/ that finds facts: what 16 bit answers, and that a bad cache shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from peer_schemes import kivi

from kvquant import evaluate
from kvquant.evaluation import Sizes, Task

MODEL = Path(__file__).parents[2] / "examples" / "llama-recall-5m"
FINDS = ("single", "keys", "values", "overwritten", "phonebook", "copy", "frequent")


@pytest.mark.slow
def test_the_bundled_model_finds_facts_and_two_bits_do_not() -> None:
    two_bits = kivi(2, 128, 128)
    found = evaluate(
        MODEL,
        ["int8,sinks=0,recent=0", two_bits],
        task=Task(kinds=("retrieval",), retrieval=FINDS),
        sizes=Sizes(lengths=(512,), prompts=4, facts=(0,)),
    )
    for name, task in found["retrieval"]["512"].items():
        assert task["exact"] > 0.9, name  # it answers 99 % and more, of 1,000 questions
        int8, bad = task["caches"]
        assert int8["given"] > 0.9, name
        if name in ("keys", "values", "phonebook"):  # which lose 25 points and more
            assert bad["given"] < task["exact"] - 0.1, name
