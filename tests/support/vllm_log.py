"""What a log of vLLM says of an engine that did not start."""

from __future__ import annotations

import re
from pathlib import Path

ERROR = re.compile(r"\b\w*(Error|Exception)(: |$)")  # the last line of a traceback
BEFORE, LAST = 5, 20  # lines that are told


def what_failed(log: Path) -> str:
    """The first error of a log with the lines before it, and the log's last lines.

    The error comes first: the last lines are of processes that noticed that another one had ended.
    """
    lines = log.read_text(errors="replace").splitlines()
    first = next((i for i, line in enumerate(lines) if ERROR.search(line)), None)
    told = [f"--- last lines of {log.name}", *lines[-LAST:]]
    if first is not None:
        told = ["--- first error", *lines[max(first - BEFORE, 0) : first + 1], *told]
    return "\n".join(line[:400] for line in told)
