"""tests/benchmarks/train_recall.py in small: kinds of models, sheets, and training (30 s)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bench_recall
import train_recall
from train_recall import KINDS, TOKENIZER, made_model, prepare
from transformers import AutoTokenizer

from kvquant.evaluation.evaluate import Sizes, Task, evaluate


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TOKENIZER)


def small(kind: str, tokenizer: Any) -> Any:
    torch.manual_seed(0)
    return made_model(kind, tokenizer, width=128, layers=2, length=256)


@pytest.mark.parametrize("kind", KINDS)
def test_models_compute_in_training_what_transformers_does(kind: str, tokenizer: Any) -> None:
    model = small(kind, tokenizer).eval()
    tokens = torch.randint(5, 500, (2, 40))
    with torch.no_grad():
        expected = model(tokens).logits
        prepare(model, "cpu").eval()  # attends without a mask, and has no router
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
        if kind == "sinks":  # they count, and each head has its own
            for layer in model.model.layers:
                layer.self_attn.sinks.sub_(5.0)
            assert float((model(tokens).logits - expected).abs().max()) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_trained_and_measured(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    folder = tmp_path / kind
    small = ["--width", "128", "--layers", "1", "--length", "256", "--workers", "0"]
    monkeypatch.setattr(train_recall, "TOKENS", 512)
    for more in (["--kind", kind], ["--start", str(folder)]):
        given = ["train_recall.py", str(folder), *more, *small, "--seconds", "1"]
        monkeypatch.setattr(sys, "argv", given)
        train_recall.main()
    assert AutoTokenizer.from_pretrained(folder).vocab_size == tokenizer.vocab_size
    found = evaluate(
        folder,
        ["int8,sinks=0,recent=0"],
        task=Task(kinds=("kl",)),
        sizes=Sizes((256,), passages=2, scored=8),
    )
    assert found["kl"]["256"][0]["kl"] < 0.01
    if kind == "latent":
        amount = bench_recall.Amount(
            (256,), ((0, 0),), tasks=("keys",), seeds=1, prompts=1, questions=1, least=0
        )
        subject = bench_recall.prepare(folder, (256,), bench_recall.FORMATS, (), True, "cpu")
        runs = bench_recall.measure(subject, amount, None)
        named = [one["cache"] for one in runs[1]["caches"][1:]]
        # no other project's: they have K and V
        assert named == [f"{one}+bf16" for one in bench_recall.LATENT_FORMATS]
