"""pip install, with one line that says what it is doing and for how long.

    python .ci/install.py ARGUMENTS

The Makefile installs with it. It runs before anything is installed, so it needs only Python. On a
terminal the line is written anew each second, elsewhere a line is added each 15 seconds. pip's
errors and warnings, and its exit code, are passed on.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time

STAGES = (  # what pip prints, and the words for it
    (r"Collecting ([\w.-]+)", "looking for {}"),
    (r"Downloading .*?([^/\s]+)\.whl \((.*)\)", "downloading {} ({})"),
    (r"Building (?:wheel|editable) for (\S+)", "building {}"),
    (r"Installing collected packages: (.*)", "installing {} packages"),
)
EVERY = 15  # seconds between two lines that stay


def stage(line: str) -> str | None:
    """What pip is doing, by a line of its output; None for lines that do not tell."""
    for pattern, words in STAGES:
        if found := re.match(rf"\s*{pattern}", line):
            parts = found.groups()
            if "Installing" in pattern:
                parts = (str(len(parts[0].split(", "))),)
            return words.format(*parts)
    return None


def main() -> int:
    """Run pip; return its exit code."""
    command = [sys.executable, "-m", "pip", "install", *sys.argv[1:], "--progress-bar", "off"]
    command += ["--no-compile"]  # Python compiles a module at its import: a third of them
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # else lines come when all is over
    start, shown, seen = time.monotonic(), 0.0, ["starting"]
    on_terminal = sys.stdout.isatty()

    def show(words: str, end: str = "\n") -> None:
        line = f"pip: {words}, {time.monotonic() - start:.0f} s"
        print(f"\r\033[K{line}" if on_terminal else line, end=end, flush=True)

    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    output = process.stdout or ()
    reader = threading.Thread(
        target=lambda: seen.extend(filter(None, map(stage, output))), daemon=True
    )
    reader.start()
    while True:
        try:
            code = process.wait(1)
        except subprocess.TimeoutExpired:
            if on_terminal:
                show(seen[-1], end="")
            elif time.monotonic() - start - shown >= EVERY:
                shown = time.monotonic() - start
                show(seen[-1])
        except KeyboardInterrupt:  # pip has got it as well
            process.wait()
            return 130
        else:
            show("failed" if code else "done")
            return code


if __name__ == "__main__":
    sys.exit(main())
