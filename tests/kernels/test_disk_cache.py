"""The folder of compiled kernels: what killed processes leave there goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvquant.kernels import disk_cache


def test_files_that_were_never_finished_are_removed_a_day_later(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (".a.x1.tmp", ".b.x2.tmp", ".a.lock"))
    for path in (old, new, other):
        path.touch(mode=0o600)
        past = time.time() - (0 if path is new else 2 * disk_cache.LEFT_AFTER)
        os.utime(path, (past, past))
    disk_cache.replace_file(tmp_path / "a", b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {"a", new.name, other.name}


def test_a_file_that_is_written_is_named_as_what_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", lambda source, target: None)  # killed before it
    disk_cache.replace_file(tmp_path / "a", b"whole")
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".a.") and left.name.endswith(disk_cache.TEMPORARY)
