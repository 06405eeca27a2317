"""StagedTensors: the tensors of a step, at fixed addresses."""

from __future__ import annotations

import pytest
import torch

from kvquant.paged.staged_tensors import StagedTensors


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_staged_tensors_keep_their_addresses_and_take_what_was_set(device: str) -> None:
    specs = {"a": (torch.int64, (3,)), "b": (torch.int32, (2, 5)), "c": (torch.int32, (0,))}
    staged = StagedTensors(specs, torch.device(device))
    addresses = {name: tensor.data_ptr() for name, tensor in staged.tensors.items()}
    assert staged.nbytes == 32 + 48
    for step in range(50):
        arrays = staged.next_arrays()
        arrays["a"][:], arrays["b"][:] = step, -step
        staged.send()
        kept = staged.tensors["a"].clone()
        arrays = staged.next_arrays()
        arrays["a"][:] = 7
        staged.send()
        assert kept.tolist() == [step] * 3
        assert staged.tensors["a"].tolist() == [7] * 3
    assert {name: tensor.data_ptr() for name, tensor in staged.tensors.items()} == addresses
    assert staged.tensors["b"].shape == (2, 5)
