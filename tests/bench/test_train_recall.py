"""tests/benchmarks/train_recall.py in small: kinds of models, sheets, and training (30 s)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from train_recall import KINDS, TOKENIZER, made_model, prepare
from transformers import AutoTokenizer


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
