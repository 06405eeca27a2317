"""tests/benchmarks/train_recall.py in small: kinds of models, sheets, and training (30 s)."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bench_recall
import train_recall
from train_recall import (
    KINDS,
    TOKENIZER,
    loss_of,
    made_model,
    optimizer_of,
    prepare,
    train,
)
from transformers import AutoTokenizer

from kvquant.evaluation.evaluate import Sizes, Task, evaluate
from kvquant.evaluation.retrieval import variables


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TOKENIZER)


def small(kind: str, tokenizer: Any) -> Any:
    torch.manual_seed(0)
    return made_model(kind, tokenizer, width=128, layers=2, length=256)


def random_batches(count: int = 1000) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    for _ in range(count):
        yield torch.randint(5, 500, (2, 32)), torch.ones(2, 32)


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


def test_training_lowers_the_loss_of_what_counts(tokenizer: Any) -> None:
    model = small("plain", tokenizer).train()
    model.set_attn_implementation("causal")
    (tokens, counts), *_ = random_batches(1)
    counts[:, :20], counts[:, 20:24] = 0, 3
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1].log_softmax(-1)
        costs = -logits.gather(-1, tokens[:, 1:, None])[..., 0]
        expected = float((costs * counts[:, 1:]).sum() / counts[:, 1:].sum())
        assert float(loss_of(model, tokens, counts)) == pytest.approx(expected, rel=1e-4)
    one = itertools.repeat((tokens, counts), 30)
    train(model, optimizer_of(model, (0.9, 0.98), 0.01), one, 600, (1e-3, 1e-3), warm=5)
    with torch.no_grad():
        assert float(loss_of(model, tokens, counts)) < 0.7 * expected


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (3, 7)])
def test_chains_have_the_lines_that_are_asked_for(sizes: tuple[int, int]) -> None:
    sheet = variables(Random(0), 60, sizes)
    counts = {len(one.lines) for one in sheet.questions}
    assert min(counts) == sizes[0] and max(counts) == sizes[1]
    for one in sheet.questions:
        assert sheet.lines[one.lines[0]].endswith(f" = {one.answer}")


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
