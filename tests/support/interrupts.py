"""Ctrl-C at a chosen line of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from types import FrameType
from typing import Any


def interrupted(call: Callable[[], object], files: Collection[str], number: int) -> bool:
    """Whether a call ran a line of this number in files, where it was interrupted then."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        lines += event == "line"
        if lines == number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(before)
    return lines >= number
