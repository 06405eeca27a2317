"""Runs programs that a model has written, beside HumanEval's tests.

A program runs in namespaces of its own, without a network, with limits of processes, time, memory
and files. It passes if the tests reach their end: then the last line printed is a random word.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from kvquant.errors import ConfigError

SECONDS, MEMORY, WRITTEN, PROCESSES = 10, 2 << 30, 1 << 20, 16
LIMITS = f"""import resource as r
r.setrlimit(r.RLIMIT_FSIZE, ({WRITTEN}, {WRITTEN}))
r.setrlimit(r.RLIMIT_AS, ({MEMORY}, {MEMORY}))
r.setrlimit(r.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
r.setrlimit(r.RLIMIT_CORE, (0, 0))
r.setrlimit(r.RLIMIT_NPROC, ({PROCESSES}, {PROCESSES}))
"""
# a network that has nobody, processes that end with the first one
ALONE = ("unshare", "-rn", "--pid", "--fork", "--kill-child", "--mount-proc")


@cache
def interpreter(alone: bool) -> str:
    """A Python that a user of its own can run, without a network or with what the machine has.

    Raises:
        ConfigError: there is none, or the kernel lets nobody make namespaces.
    """
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        command = [*(ALONE if alone else ()), python, "-I", "-c", ""]
        with suppress(OSError):
            if not subprocess.run(
                command, capture_output=True, check=False, **_somebody()
            ).returncode:
                return python
    raise ConfigError(
        "no Python runs in namespaces of its own: install util-linux and let users make "
        "namespaces, or say --network-is-off on a machine that reaches nothing"
    )


def _somebody() -> dict[str, Any]:
    """A user of its own for each program, where we are root, whom no limit of processes binds."""
    if os.geteuid():
        return {}
    number = 100_000 + secrets.randbelow(1_000_000_000)
    return {"user": number, "group": number, "extra_groups": []}


def program_of(text: str, problem: Mapping[str, str]) -> str:
    """The program in an answer: its first block of code, behind the problem's own lines."""
    found = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|$)", text, re.DOTALL)
    code = found[0] if found else text
    if f"def {problem['entry_point']}" not in code:
        code = problem["prompt"] + code
    return f"{problem['prompt'].partition('def ')[0]}\n{code}\n"


def problems_of(data: Path, most: int) -> list[dict[str, Any]]:
    """The first problems of HumanEval.jsonl.gz."""
    with gzip.open(data, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file][:most]


def passed(texts: Sequence[str], problems: Sequence[Mapping[str, str]], *, alone: bool) -> str:
    """A 1 for each answer whose program passes its problem's tests, else a 0."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        right = pool.map(partial(passes, alone=alone), texts, problems)
        return "".join("01"[one] for one in right)


def passes(
    text: str, problem: Mapping[str, str], *, alone: bool = True, seconds: float = SECONDS
) -> bool:
    """Whether the program in an answer passes the problem's tests.

    Args:
        text: the answer.
        problem: of HumanEval: "prompt", "entry_point" and "test".
        alone: without a network; else the machine must have none.
        seconds: after which it is killed, with all that it has begun.
    """
    word = secrets.token_hex(8)
    tests = f"{problem['test']}\ncheck({problem['entry_point']})\nprint('\\n{word}')\n"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)  # for another user
        program, said = Path(folder, "program.py"), Path(folder, "said")
        program.write_text(f"{LIMITS}\n{program_of(text, problem)}\n{tests}", encoding="utf-8")
        with said.open("wb") as file:
            run = subprocess.Popen(
                [*(ALONE if alone else ()), interpreter(alone), "-I", str(program)],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.DEVNULL,
                env={"PATH": "/usr/bin:/bin"},
                start_new_session=True,
                **_somebody(),
            )
            try:
                code = run.wait(seconds)
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                with suppress(ProcessLookupError):  # what it has begun ends with it
                    os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        last = said.read_text(encoding="utf-8", errors="ignore").rstrip("\n").rpartition("\n")[2]
        return code == 0 and last == word
