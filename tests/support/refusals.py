"""Refused calls: the error and words that it must have, in one text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvquant.errors import KVQuantError


@contextmanager
def refused(text: str) -> Iterator[None]:
    """Assert that the block raises an error of ours, such as "ShapeError: q is [2, 4]"."""
    with pytest.raises(KVQuantError) as caught:
        yield
    error, _, words = text.partition(": ")
    assert type(caught.value).__name__ == error and words in str(caught.value), caught.value


def assert_refused(error: type[Exception], *rows: tuple[Callable[[], object], str]) -> None:
    """Assert that each of these calls raises this error, in words of its pattern."""
    for call, words in rows:
        with pytest.raises(error, match=words):
            call()
            pytest.fail(f"taken, not refused: {words}")
