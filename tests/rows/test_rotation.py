"""The Hadamard rotation: what it is, and that it changes no score; 2 s."""

from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from kvquant.errors import ConfigError
from kvquant.rows.format import HEAD_DIMS
from kvquant.rows.rotation import Rope, apply_rope, block_size, rotate


def by_the_contract(x: list[float], size: int) -> list[float]:
    """One row, an element at a time, each step rounded to float32."""

    def f32(value: float) -> float:
        return torch.tensor(value, dtype=torch.float32).item()

    x, stride = list(x), 1
    while stride < size:
        for low in range(len(x)):
            if not low & stride:
                a, b = x[low], x[low + stride]
                x[low], x[low + stride] = f32(a + b), f32(a - b)
        stride *= 2
    return [f32(value * f32(1 / math.sqrt(size))) for value in x]


def test_blocks_are_the_largest_powers_of_two_that_divide() -> None:
    sizes = {head_dim: block_size(head_dim) for head_dim in HEAD_DIMS}
    assert sizes == {64: 64, 80: 16, 96: 32, 112: 16, 128: 128, 192: 64, 256: 256, 512: 512}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_it_is_a_matrix_of_sylvester_in_every_block(head_dim: int) -> None:
    size = block_size(head_dim)
    sylvester = torch.ones(1, 1, dtype=torch.float64)
    while len(sylvester) < size:
        sylvester = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), sylvester)
    expected = torch.block_diag(*[sylvester] * (head_dim // size)) / math.sqrt(size)
    assert torch.equal(rotate(torch.eye(head_dim)), expected.float())


@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_every_bit_is_that_of_the_contract(head_dim: int) -> None:
    x = torch.randn(head_dim) * 10 ** (4 * torch.rand(head_dim) - 2)
    assert rotate(x).tolist() == by_the_contract(x.tolist(), block_size(head_dim))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_it_undoes_itself_and_keeps_every_score(head_dim: int) -> None:
    q, k = torch.randn(2, 5, head_dim)
    torch.testing.assert_close(rotate(rotate(k)), k, rtol=0, atol=2e-6)
    torch.testing.assert_close(rotate(q) @ rotate(k).T, q @ k.T, rtol=1e-5, atol=1e-4)


def test_an_outlier_is_spread_over_its_block_only() -> None:
    x = torch.zeros(80)
    x[17] = 100
    rotated = rotate(x)
    assert rotated[16:32].abs().tolist() == [25] * 16
    assert not rotated[:16].any() and not rotated[32:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_are_rounded_once_to_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    x = torch.randn(3, 128).to(dtype)
    assert torch.equal(rotate(x), rotate(x.float()).to(dtype))


def test_shapes_and_strides_do_not_matter() -> None:
    x = torch.randn(64, 7, 3)
    before = x.clone()
    rotated = rotate(x.movedim(0, -1))
    assert rotated.is_contiguous()
    assert torch.equal(rotated[2, 1], rotate(x[:, 2, 1].clone()))
    assert rotate(torch.empty(0, 2, 96)).shape == (0, 2, 96)
    assert torch.equal(x, before), "the input stays"


def test_gradients_are_rotated_back() -> None:
    x, weight = torch.randn(3, 80, requires_grad=True), torch.randn(3, 80)
    (rotate(x) * weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, rotate(weight), rtol=0, atol=2e-6)


def test_a_graph_takes_it_and_gives_the_same_bits() -> None:
    x = torch.randn(4, 2, 80)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rotate, fullgraph=True, backend=counter)
    assert torch.equal(compiled(x), rotate(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"x is {dtype}: use float32, bfloat16 or float16"):
        rotate(torch.zeros(64, dtype=dtype))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_multiplies_pairs_by_complex_numbers(interleaved: bool) -> None:
    """Elements behind the first rotary_dim pass."""
    x, theta = torch.randn(5, 2, 64), 6 * torch.rand(5, 24)
    found = apply_rope(x, Rope(theta.cos(), theta.sin(), interleaved))
    shape, last = ((24, 2), -1) if interleaved else ((2, 24), -2)
    given, turned = (rows[..., :48].unflatten(-1, shape).unbind(last) for rows in (x, found))
    expected = torch.complex(*given) * torch.polar(torch.ones_like(theta), theta)[:, None]
    torch.testing.assert_close(torch.complex(*turned), expected, rtol=0, atol=1e-5)
    assert torch.equal(found[..., 48:], x[..., 48:])
