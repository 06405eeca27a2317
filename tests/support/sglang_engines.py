"""Engines of SGLang, each in a process of its own; only where SGLang is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from engine_reference import log_probabilities
from transformers import AutoModelForCausalLM

from kvquant.engine.settings import Settings

SUPPORT = Path(__file__).parent
STUBS = SUPPORT / "sglang_stubs"
CHUNK = 256  # tokens of a prompt's chunk
# Log probabilities are as exact as float32 until an element lies so near a rounding boundary that
# the other order of a sum gives it another code. A few answers of a test have such codes: measured
# were .006 at most. Other rows, or rows of other tokens, move most answers by .01 and more.
MOST, MEDIAN = 0.05, 5e-4

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "sliding_window": 32,
}


def random_model(folder: Path, config: Any) -> Path:
    """A small model with random weights, such as of SIZES. Experts give zeros, and sink logits are
    numbers of bfloat16, in which SGLang keeps them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if "sinks" in name:
            weight.data = torch.randn_like(weight).bfloat16().to(weight.dtype)
        if "experts.down_proj" in name:
            torch.nn.init.zeros_(weight)
    model.save_pretrained(folder)
    return folder


def run_engine(
    rows: dict[str, Any] | None,
    rounds: Sequence[dict[str, Any]],
    model: Path,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Start an engine, give it rounds of prompts (sglang_answers.py), and end it.

    Args:
        rows: what KVQUANT_SGLANG says; None if the options name another backend.
        rounds: of prompts.
        model: its folder.
        env: more of the environment.
        options: of sglang.Engine.
    """
    stubs = [] if PathFinder.find_spec("torchvision") else [str(STUBS)]
    room = [*stubs, str(SUPPORT), str(SUPPORT.parents[1]), os.environ.get("PYTHONPATH")]
    named = {} if rows is None else {"KVQUANT_SGLANG": json.dumps(rows)}
    asked = {
        "model": str(model),
        "rounds": rounds,
        "options": {"chunked_prefill_size": CHUNK, **options},
    }
    return subprocess.run(
        [sys.executable, str(SUPPORT / "sglang_answers.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={
            **os.environ,
            **named,
            **(env or {}),
            "PYTHONPATH": os.pathsep.join(filter(None, room)),
        },
    )


def has_graphs(log: str) -> bool:
    """Whether an engine, by its log, has CUDA graphs of decoding sequences."""
    return bool(re.search(r"Capture .*decode .* end", log))


def answers(
    rows: dict[str, Any], rounds: Sequence[dict[str, Any]], model: Path, **options: Any
) -> dict[str, Any]:
    """What an engine gives, as run_engine."""
    done = run_engine(rows, rounds, model, **options)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_answers(
    rows: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    given: Sequence[dict[str, Any]],
    model: Path,
    chunk: int = CHUNK,
) -> None:
    """Assert that answers are those of transformers which attends to the same rows.

    Args:
        rows: as of run_engine.
        prompts: of the answers.
        given: the answers.
        model: its folder.
        chunk: most tokens of a chunk that prompts came in.
    """
    settings, off = Settings.parse(rows), []
    exact = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    for prompt, answer in zip(prompts, given, strict=True):
        found = answer["found"]
        chunks = [prompt[:found]] if found else []
        chunks += [prompt[i : i + chunk] for i in range(found, len(prompt), chunk)]
        # Where all of it was in the radix cache the last token is read again, for its logits. Its
        # new row gives way to the old one a step later, as steps overlap.
        old = [prompt] if found == len(prompt) - 1 else []
        expected = log_probabilities(exact, chunks, answer["tokens"], settings, old)
        off.append((torch.tensor(answer["logprobs"]) - expected).abs())
    assert torch.cat(off).max() < MOST and torch.cat(off).median() < MEDIAN, off
