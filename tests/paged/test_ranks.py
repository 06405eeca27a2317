"""Heads shared out over ranks: each has a paged cache of its heads, and no more (10 s)."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

SCRIPT = Path(__file__).parent.parent / "support" / "rank_of_heads.py"


@pytest.mark.slow
def test_ranks_have_the_rows_of_their_heads_and_the_same_pages(tmp_path: Path) -> None:
    assert run_ranks(SCRIPT, 2, tmp_path) == ["right\n"] * 2
