"""Evaluations of models of which a KVCache holds a part, with the demo's tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
import transformers
from families import CHANGES
from hf_cases import random_module

from kvquant.cli.demo import MODEL
from kvquant.evaluation.decoding import Reading
from kvquant.evaluation.evaluate import Sizes, Task, evaluate
from kvquant.evaluation.report import render
from kvquant.hf.hybrid import decoder_of
from kvquant.hf.model import CachedModel

CACHES = ["bf16,sinks=0,recent=0", "int4-g4,recent=16", "int4,sinks=0,recent=0"]
SIZES = Sizes((160,), 2, 3, facts=(0,), passages=2, scored=8, new_tokens=8, batch=2)


def model_of(kind: str) -> CachedModel:
    """A random model with the demo's vocabulary."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    changes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    return decoder_of(random_module(kind, CHANGES[kind] | changes), tokenizer)


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "mimo_v2_flash"])
def test_every_cache_goes_on_from_the_states_of_the_prompt(kind: str) -> None:
    task = Task(("kl", "generation", "retrieval"), retrieval=("keys",))
    found = evaluate(model_of(kind), CACHES, task=task, sizes=SIZES)
    exact, _, int4 = found["kl"]["160"]
    assert exact["kl"] == exact["kl_tail"] == 0 and exact["top1"] == 1
    assert int4["kl"] > 0
    for way in ("greedy", "sampled"):
        assert found["generation"]["160"][way][0]["first_divergence"] == [None, None]
    (keys,) = found["retrieval"]["160"].values()
    assert keys["caches"][0]["lost"] == keys["caches"][0]["won"] == 0
    text = " ".join(render(found).split())
    assert all(note in text for note in found["notes"])


def test_what_no_cache_holds_is_told() -> None:
    """Of the figures of bits and bytes, too."""
    few = Sizes((32,), passages=1, scored=2, batch=1)
    task, caches = Task(kinds=("kl",)), ["int8,recent=0"]
    found = {
        kind: evaluate(model_of(kind), caches, task=task, sizes=few)
        for kind in ("jamba", "falcon_h1")
    }
    (layers,) = found["jamba"]["notes"]
    assert layers == (
        "Layers 0, 2 of 4 are kept as transformers keeps layers, alike for all caches, and no "
        "figure of bits or bytes counts them. Each is 'linear_attention', which keeps other than "
        "keys and values."
    )
    (states,) = found["falcon_h1"]["notes"]
    assert states.startswith("Layers 0-1 of 2 have a state beside attention. The state is copied")


def test_states_that_longer_calls_forget_are_asked_in_steps() -> None:
    task = Task(("retrieval",), retrieval=("keys",))
    found = evaluate(model_of("jamba"), CACHES[:1], task=task, sizes=SIZES)
    (bf16,) = found["retrieval"]["160"]["keys"]["caches"]
    assert bf16["answers"] == 2 * 3 and bf16["drop"] == bf16["lost"] == bf16["won"] == 0


def test_models_that_compute_attention_by_themselves() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = decoder_of(random_module("falcon", {"vocab_size": len(tokenizer)}), tokenizer)
    few = Sizes((40,), passages=2, scored=4, new_tokens=4, prompts=2)
    caches = ["bf16,recent=0", "int4,recent=0,sinks=0"]
    found = evaluate(model, caches, task=Task(kinds=("kl", "generation")), sizes=few)
    exact, int4 = found["kl"]["40"]
    assert exact["kl"] == 0 < int4["kl"]
    assert "gets dequantized rows" in found["notes"][0]


def test_prompts_from_rows_have_states_of_their_own() -> None:
    model: Any = model_of("qwen3_next")
    read = Reading(chunk=40, from_rows=True)
    kl = Task(kinds=("kl",))
    found = evaluate(model, CACHES, task=kl, sizes=SIZES, reading=read)
    exact, _, int4 = found["kl"]["160"]
    assert exact["kl"] == 0 < int4["kl"]
