"""Models run without gradients: tests of these ask for them by torch.enable_grad."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def fresh() -> Iterator[None]:
    """Make torch forget what it has compiled, before the test and after it."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def llama() -> Any:
    """A small LlamaForCausalLM that attends by "kvquant"."""
    from hf_cases import by_kvquant, tiny

    return by_kvquant(tiny("Llama").model)
