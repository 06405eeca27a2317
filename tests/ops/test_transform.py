"""Rows into a basis: the kernel of the CPU and plain torch. On CUDA: test_transform_cuda.py."""

from __future__ import annotations

import pytest
import torch

from kvquant.ops.transform import encode_rows
from kvquant.rows.basis import Basis


@pytest.mark.parametrize("head_dim", [64, 80, 24])
@pytest.mark.parametrize("kind", ["none", "hadamard", "matrix"])
def test_rows_are_encoded_as_the_basis_says(kind: str, head_dim: int) -> None:
    torch.manual_seed(3)
    matrix = torch.eye(head_dim) + 0.1 * torch.randn(2, head_dim, head_dim)
    basis = Basis(torch.randn(2, head_dim) * 4, kind, matrix if kind == "matrix" else None)
    x = torch.randn(3, 2, 7, head_dim) * 5
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        encoded = encode_rows(x.to(dtype), basis)
        assert encoded.dtype == torch.float32
        assert torch.equal(encoded, basis.encode(x.to(dtype)))
    assert not encode_rows(x.requires_grad_(), basis).requires_grad
