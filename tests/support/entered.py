"""Functions of kvquant that a call enters: its cost on the host, which no other work disturbs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import kvquant


def calls_of(call: Callable[[], object]) -> int:
    count, ours = 0, str(Path(kvquant.__file__).parent)

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(ours)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count
