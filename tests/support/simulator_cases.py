"""Run cases of a script in numba's simulator, which needs processes of its own.

A script answers each line of JSON on stdin, a name and a case, by one on stdout.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_codec import INT5

from kvquant.rows.codec import CODECS

ROOT = Path(__file__).parents[2]
CASES_PER_PROCESS = 16  # a process takes three seconds to start


def of(words: str) -> dict[str, Any]:
    """What differs from the usual case, such as "k=int4 heads=[4,2] lens=[33,70]"."""
    return {name: _value(text) for name, text in (word.split("=") for word in words.split())}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:  # the name of a format, or of a place
        return text


def run_selected(
    request: pytest.FixtureRequest, script: str, cases: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Run the cases of the tests that were selected from a file, in two processes if they are many.

    Args:
        request: of a fixture in that file, whose tests have a parameter "name".
        script: beside that file; it calls `answer`.
        cases: by name.

    Returns:
        By name, what the script found of each case, or "problem".
    """
    names = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
        if "name" in item.callspec.params
    ]
    lines = [json.dumps({"name": name, "case": cases[name]}) for name in names]
    folders = ROOT, Path(__file__).parent, ROOT / "tests" / "simulator"
    path = os.pathsep.join(map(str, folders))
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": path}

    def run(some: list[str]) -> str:
        return subprocess.run(
            [sys.executable, str(request.path.with_name(script))],
            input="\n".join(some),
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            check=True,
        ).stdout

    count = min(2, -(-len(lines) // CASES_PER_PROCESS))
    with ThreadPoolExecutor(count) as pool:
        outputs = pool.map(run, [lines[i::count] for i in range(count)])
        answers = [json.loads(line) for output in outputs for line in output.splitlines()]
    return {answer.pop("name"): answer for answer in answers}


def answer(run: Callable[[str, dict[str, Any]], dict[str, float]]) -> None:
    """What a script does: tell what `run` finds of each case, or why it fails."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    CODECS[INT5.name] = INT5
    for line in sys.stdin:
        request = json.loads(line)
        try:
            found: dict[str, Any] = run(request["name"], request["case"])
        except BaseException:
            found = {"problem": traceback.format_exc()}
        print(json.dumps({"name": request["name"], **found}), flush=True)
