"""Which cases of a test are slow: make test leaves them to -m slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mark_slow(cases: Iterable[Any], usual: Iterable[Any]) -> list[Any]:
    """Parameters of a test: all cases, slow but for the usual ones, which must be among them."""
    cases, usual = [*cases], [*usual]
    assert all(case in cases for case in usual), usual
    return [case if case in usual else pytest.param(case, marks=pytest.mark.slow) for case in cases]
