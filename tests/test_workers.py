"""What workers of pytest-xdist share out: whole files, so that each fixture of one is made once."""

from __future__ import annotations

import os

import pytest


@pytest.mark.parametrize("part", range(4))
def test_a_worker_has_whole_files(
    part: int, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    given = getattr(request.config, "workerinput", {}).get("mainargv", [])
    if "--dist" not in given:
        pytest.skip("asks of make's workers")
    seen = tmp_path_factory.getbasetemp().parent / "workers"  # the folder of all workers
    with seen.open("a", encoding="utf-8") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], file=file)
    assert len({*seen.read_text(encoding="utf-8").split()}) == 1
