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
    LARGE,
    TOKENIZER,
    Sheets,
    batches,
    loss_of,
    made_model,
    optimizer_of,
    outliers,
    prepare,
    train,
)
from transformers import AutoTokenizer

from kvquant.evaluation.evaluate import Sizes, Task, evaluate
from kvquant.evaluation.retrieval import TASKS, variables


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


def test_kinds_have_the_shape_that_they_say(tokenizer: Any) -> None:
    for kind in KINDS:
        config = made_model(kind, tokenizer, 512, 1, 256).config
        assert config.num_attention_heads == 8 and config.tie_word_embeddings
        if kind == "latent":
            assert (config.kv_lora_rank, config.qk_rope_head_dim) == (256, 64)
        else:
            assert (config.num_key_value_heads, config.head_dim) == (2, 128)
    with pytest.raises(ValueError, match="'other' is no kind of model"):
        made_model("other", tokenizer, 128, 1, 256)


def test_key_biases_have_outliers_that_training_keeps(tokenizer: Any) -> None:
    torch.manual_seed(0)
    for _ in range(20):
        sizes, places = outliers(128).abs().sort(descending=True)
        assert LARGE[0] <= float(sizes[3]) and float(sizes[4]) < 4
        assert all(place % 64 >= 56 for place in places[:4].tolist())
    model = small("biased", tokenizer).train()
    biases = [layer.self_attn.k_proj.bias for layer in model.model.layers]
    before = [one.detach().clone() for one in biases]
    optimizer = optimizer_of(model, (0.9, 0.98), 10.0)  # leaves a tenth of what it decays
    train(model, optimizer, random_batches(25), 600, (0.01, 0.01), warm=1)
    for old, new in zip(before, biases, strict=True):
        assert float((new.detach() - old).abs().max()) < 1


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


def test_chains_are_short_at_first(tokenizer: Any) -> None:
    sheets = Sheets(tokenizer, 256, 0, lines=2, grow=1e9, tokens=2048, tasks=["variables"])
    tokens, counts = next(iter(sheets))
    assert tokens.shape == counts.shape and tokens.numel() == 2048
    assert 0.02 < float(counts.mean()) < 0.3
    assert "chains of 2 lines" in TASKS
    assert "chains of 3 lines" not in TASKS
    grown = Sheets(tokenizer, 256, 0, tokens=4096, tasks=["variables"])
    next(iter(grown))
    assert {f"chains of {lines} lines" for lines in (2, 3, 4)} < {*TASKS}
    answers = tokenizer.decode(tokens[counts > 0])
    assert answers.replace(".", "").replace(" ", "").isdigit()


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (3, 7)])
def test_chains_have_the_lines_that_are_asked_for(sizes: tuple[int, int]) -> None:
    sheet = variables(Random(0), 60, sizes)
    counts = {len(one.lines) for one in sheet.questions}
    assert min(counts) == sizes[0] and max(counts) == sizes[1]
    for one in sheet.questions:
        assert sheet.lines[one.lines[0]].endswith(f" = {one.answer}")


def test_tasks_without_room_are_left_out_and_nothing_else_is(tokenizer: Any) -> None:
    def wide(rng: Random, count: int) -> Any:
        sheet = TASKS["keys"](rng, count)
        sheet.lines[:] = [f"{one} {'very ' * 60}" for one in sheet.lines]
        return sheet

    TASKS["wide"] = wide
    tokens, _ = next(iter(Sheets(tokenizer, 128, 0, tokens=1024, tasks=["wide", "keys"])))
    assert tokens.shape == (8, 128)
    with pytest.raises(Exception, match="have no room for the task wide"):
        next(iter(Sheets(tokenizer, 128, 0, tokens=1024, tasks=["wide"])))


def test_an_error_of_a_worker_ends_the_training() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("no space")

    given = batches(broken(), 0)
    assert next(given) == 1
    with pytest.raises(OSError, match="no space"):
        for _ in range(10**7):
            next(given)


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
