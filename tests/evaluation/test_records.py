"""Results and times of a run, kept for one that continues."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvquant.evaluation.records import Records


def test_each_cache_has_its_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def measure(*steps: float) -> Iterator[float]:
        for step in steps:
            now[0] += step
            yield step

    path = tmp_path / "state"
    kept = Records(path, {"seed": 0})
    assert kept.get("keys 512 0", lambda: measure(4.0, 1.0, 2.0)) == [4.0, 1.0, 2.0]
    kept.get("keys 512 4", lambda: measure(5.0, 1.0, 1.0))
    kept.get("kl 512 0", lambda: measure(0.5, 0.25, 0.125))
    times = {"keys": [9.0, 2.0, 3.0], "kl": [0.5, 0.25, 0.125]}
    assert kept.seconds() == times
    again = Records(path, {"seed": 0})
    assert again.get("keys 512 0", lambda: measure(9.0)) == [4.0, 1.0, 2.0]  # not measured again
    assert again.seconds() == times
    assert Records(path, {"seed": 1}).seconds() == {}


@pytest.mark.parametrize("text", ["", "[]", '{"settings": {}}', '{"settings": {}, "measured": 3}'])
def test_a_file_that_is_no_record_is_not_used(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state"
    path.write_text(text)
    assert Records(path, {}).get("kl 1 0", lambda: [7]) == [7]
