"""SGLang's engine on the CPU, unmodified, with kvquant's rows in its memory pool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant import CachedModel
from kvquant.cli.demo import MODEL

SUPPORT = Path(__file__).parents[1] / "support"
TOKENS = 12  # that are generated
LENGTHS = (150, 40, 7)  # of prompts, each in one chunk
MORE = 20  # tokens behind a prompt that is in the radix cache
# SGLang's logits of a prompt differ by up to 0.005 from transformers' before any row is read: codes
# near a rounding boundary are others. So answers must be nearer to those from kvquant's own rows
# than to those from 16 bit: measured were 0.36 of that distance, and 0.23 behind a prefix.
FIRST, NEAR, FAR = 0.02, 0.6, 0.6


@pytest.fixture(scope="module")
def model() -> CachedModel:
    return CachedModel.from_pretrained(MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(model: CachedModel) -> list[list[int]]:
    words = (Path(MODEL).parent / "unseen.txt").read_text(encoding="utf-8")
    ids = model.encode(words[:6000])
    return [ids[300 * i : 300 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def answers(prompts: list[list[int]]) -> dict[str, Any]:
    """Two rounds: prompts of mixed lengths; then the first one and others behind it, and one that
    comes in chunks."""
    behind = prompts[0] + prompts[1][:MORE]
    asked = {
        "model": str(MODEL),
        "rounds": [prompts, [behind, prompts[0] + prompts[1] + prompts[0]]],
        "tokens": TOKENS,
        "options": {"chunked_prefill_size": 256, "page_size": 1},
    }
    room = [str(SUPPORT / "sglang_stubs"), str(SUPPORT.parents[1]), os.environ.get("PYTHONPATH")]
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "sglang_answers.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, room))},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def from_rows(
    model: CachedModel, chunks: list[list[int]], answer: dict[str, Any], **formats: Any
) -> torch.Tensor:
    """Log probabilities of an answer, from a cache of kvquant's own that packs all tokens."""
    cache = model.new_cache(1, 512, sink_len=0, recent_len=0, rollback_len=0, **formats)
    for i, chunk in enumerate(chunks):
        logits = model.prefill(cache, torch.tensor([chunk]), append=i > 0)
    found = []
    for token in answer["tokens"]:
        found.append(logits.float().log_softmax(-1)[0, token])
        logits = model.step(cache, torch.tensor([token]))
    return torch.stack(found)


def test_answers_are_those_of_kvquants_own_cache(
    model: CachedModel, prompts: list[list[int]], answers: dict[str, Any]
) -> None:
    """Continuous batching over pages of one token; the first token comes from 16-bit prompts."""
    off, from_16_bit = [], []
    for prompt, answer in zip(prompts, answers["rounds"][0], strict=True):
        assert len(answer["tokens"]) == TOKENS and answer["found"] == 0
        got = torch.tensor(answer["logprobs"])
        off.append(got - from_rows(model, [prompt], answer, k_format="int4-g4", v_format="int4-g4"))
        exact = from_rows(model, [prompt], answer, k_format="fp16", v_format="fp16")
        from_16_bit.append(got - exact)
        assert abs(off[-1][0]) < FIRST
    assert torch.cat(off).norm() < NEAR * torch.cat(from_16_bit).norm(), "other rows were read"


def test_the_radix_cache_finds_rows(
    model: CachedModel, prompts: list[list[int]], answers: dict[str, Any]
) -> None:
    behind, chunked = answers["rounds"][1]
    assert behind["found"] == LENGTHS[0] and chunked["found"] >= LENGTHS[0]
    chunks = [prompts[0], prompts[1][:MORE]]
    expected = from_rows(model, chunks, behind, k_format="int4-g4", v_format="int4-g4")
    assert (torch.tensor(behind["logprobs"]) - expected).abs().max() < FAR


def test_pool_has_rows_and_moves_them(answers: dict[str, Any]) -> None:
    """2 heads of 64 elements: rows of 48 bytes, K and V; 512 bytes in 16 bit."""
    assert answers["overlaps"]
    for facts in answers["pool"].values():
        assert facts["bytes"] == 2 * 2 * 48
        assert facts["error"] < 0.25  # half a step of 15 in a group of 16 normal numbers
