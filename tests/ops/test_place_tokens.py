"""Appends whose tokens are placed by one launch: what is launched, compiled, undone (5 s)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeDriver, install_for_caches
from slow_cases import mark_slow
from small_caches import BATCH, make, tokens
from torch_operations import Operations

from kvquant.cache import layer
from kvquant.ops import slots as slotops
from kvquant.ops.slots import Lens, Sizes

# that launch nothing
WITHOUT_KERNEL = "detach empty empty_strided slice squeeze transpose unbind view"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The CPU as a GPU whose driver takes notes."""
    return install_for_caches(monkeypatch)


def test_a_layer_takes_two_launches_and_no_operation_of_torch(gpu: FakeDriver) -> None:
    cache = make()
    k, v = tokens(1)
    with Operations() as calls:
        for index in range(2):
            cache.append(index, k, v)
    assert [launched.block[0] == 512 for launched in gpu.launched] == [True, False] * 2
    assert {*calls.names} <= {*WITHOUT_KERNEL.split()}, calls.names
    assert [layer.longest for layer in cache.layers] == [1, 1]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's own graphs
@pytest.mark.parametrize("window", mark_slow([None, 8], [8]))
def test_compiled_steps_launch_the_same(gpu: FakeDriver, window: int | None) -> None:
    cache = make(windows=[window, None])

    def step(k: torch.Tensor, v: torch.Tensor, new_lens: torch.Tensor) -> None:
        for index in range(2):
            cache.append(index, k, v, new_lens)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for count in (2, 2, 5, 7):
        gpu.launched.clear()
        with torch.compiler.set_stance("fail_on_recompile" if count == 7 else "default"):
            compiled(*tokens(count), torch.ones(BATCH, dtype=torch.int64))
        assert [launched.block[0] == 512 for launched in gpu.launched] == [True, False] * 2
    cache.append(0, *tokens(2))
    assert [at.longest for at in cache.layers] == [None, None], "the host cannot know"


@pytest.mark.parametrize("window", [None, 8])
def test_nothing_is_changed_when_rows_cannot_be_written(
    gpu: FakeDriver, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(
        lens: Lens, sizes: Sizes, new_lens: Any, new_tokens: int, overflow: Any, room: torch.Tensor
    ) -> None:
        """Every length is another one afterwards."""
        for before, one in zip(room[:, -BATCH:], (*lens[:2], lens.firsts), strict=True):
            before.copy_(torch.zeros(BATCH) if one is None else one)
        for one in lens:
            if one is not None:
                one += 3

    def fail(*call: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError

    cache = make(windows=[window, None])
    at = cache.layers[0]
    at.begin(torch.tensor([20, 13, 0]), torch.tensor([15, 6, 0]))
    before = {name: tensor.clone() for name, tensor in at.tensors().items()}
    monkeypatch.setattr(slotops, "_launcher", lambda room: SimpleNamespace(place_tokens=fill))
    monkeypatch.setattr(layer, "write_rows", fail)
    with pytest.raises(torch.OutOfMemoryError):
        cache.append(0, *tokens(1))
    for name, tensor in at.tensors().items():
        assert torch.equal(tensor, before[name]), name
    assert at.longest == 20
