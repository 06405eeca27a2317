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

from engine_reference import check_answers
from vllm_engines import SIZES as SMALL_SIZES
from vllm_texts import Text

from kvquant.engine.settings import Settings

SUPPORT = Path(__file__).parent
STUBS = SUPPORT / "sglang_stubs"
CHUNK = 256  # tokens of a prompt's chunk

SIZES: dict[str, Any] = {
    **SMALL_SIZES,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "sliding_window": 32,
}


def run_engine(
    rows: dict[str, Any] | None,
    rounds: Sequence[dict[str, Any]],
    model: Path | str,
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
    rows: dict[str, Any], rounds: Sequence[dict[str, Any]], model: Path | str, **options: Any
) -> dict[str, Any]:
    """What an engine gives, as run_engine; for each round its "texts", too."""
    done = run_engine(rows, rounds, model, **options)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["texts"] = [
        [
            Text(x["tokens"], [{a: b} for a, b in zip(x["tokens"], x["logprobs"])], x["found"])  # noqa: B905
            for x in given
        ]
        for given in found["rounds"]
    ]
    return found


def check(
    rows: dict[str, Any],
    rounds: Sequence[dict[str, Any]],
    texts: Sequence[Sequence[Text]],
    model: Path | str,
) -> None:
    """Compare the texts of rounds with those of transformers which attends to the same rows."""
    prompts = [one for asked in rounds for one in asked["prompts"]]
    given = [text for several in texts for text in several]
    check_answers(Settings.parse(rows), prompts, given, model, chunk=CHUNK, keeps_old=True)
