"""Run cases of a script in numba's simulator, which needs processes of its own."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

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
        script: beside that file; answers each line of JSON, a name and a case, by one.
        cases: by name.

    Returns:
        The answers by name.
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
    return {answer["name"]: answer for answer in answers}
