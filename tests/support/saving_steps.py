"""Every step that a save takes on the disk, so that it can fail at it or be killed by it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvquant.io import atomic as writing

CALLS = ("open", "fsync", "replace", "unlink", "chmod", "scandir")
# what is saved over what
PAIRS = [("cache", "cache"), ("pages", "pages"), ("plan", "plan"), ("raw", "raw")]


class _Counted:
    """A file each of whose writes is a step: half of it is written before the step."""

    def __init__(self, file: Any, step: Callable[[str], None]) -> None:
        self._file, self._step = file, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._step("write")
        return half + int(self._file.write(data[half:]))


@contextmanager
def steps(happen: Callable[[int, str], None]) -> Iterator[None]:
    """Call `happen` with a number, from 1, and a name before every step that a save takes."""
    count = 0

    def step(name: str) -> None:
        nonlocal count
        count += 1
        happen(count, name)

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*given: Any, **named: Any) -> Any:
            is_read = name == "open" and not given[1] & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY)
            if not is_read:
                step(name)
            return real(*given, **named)

        return call

    real_file, real_calls = writing._new_file, {name: getattr(os, name) for name in CALLS}

    def new_file(*given: Any) -> tuple[Any, Any]:
        path, file = real_file(*given)
        return path, _Counted(file, step)

    writing._new_file = new_file  # type: ignore[assignment]
    for name in CALLS:
        setattr(os, name, counted(name))
    try:
        yield
    finally:
        writing._new_file = real_file
        for name, call in real_calls.items():
            setattr(os, name, call)
