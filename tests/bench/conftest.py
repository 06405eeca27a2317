"""What the tests of a file add to the retrieval tasks goes with them."""

from collections.abc import Iterator

import pytest

from kvquant.evaluation.retrieval import TASKS


@pytest.fixture(autouse=True, scope="module")
def _same_tasks() -> Iterator[None]:
    before = dict(TASKS)
    yield
    TASKS.clear()
    TASKS.update(before)
