"""Candidate bases (1 s)."""

import pytest
import torch

from kvquant.calibration.bases import (
    candidates,
    mixing,
    optimal_matrix,
    output_moment,
    regularized,
    spreading,
)
from kvquant.calibration.moments import LayerMoments
from kvquant.rows.format import HEAD_DIMS

HEADS, DIM = 2, 64


def moment(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    roots = torch.randn(HEADS, DIM, DIM).double() * torch.logspace(0, -2, DIM).double()
    return roots @ roots.mT + 1e-6 * torch.eye(DIM)


def cost(weights: torch.Tensor, spread: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    inverse = torch.linalg.inv(matrix)
    stored = inverse @ spread @ inverse.mT
    turned = matrix.mT @ weights @ matrix
    traces = [x.diagonal(dim1=-2, dim2=-1).sum(-1) for x in (turned, stored)]
    return torch.stack(traces).prod(0)


def test_the_optimal_matrix_reaches_the_bound_and_keeps_the_size_of_rows() -> None:
    weights, spread = moment(0), moment(1)
    matrix = optimal_matrix(weights, spread)
    a, b = regularized(weights), regularized(spread)
    singular = torch.linalg.eigvals(a @ b).real.clamp(min=0).sqrt()  # of W^1/2 C^1/2
    found = cost(a, b, matrix)
    torch.testing.assert_close(found, singular.sum(-1).square(), rtol=1e-6, atol=0)
    hadamard = spreading(DIM).expand(HEADS, DIM, DIM)
    assert bool((found < cost(a, b, hadamard)).all())
    inverse = torch.linalg.inv(matrix)
    variance = (inverse @ b @ inverse.mT).diagonal(dim1=-2, dim2=-1)
    size = b.diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(variance.sum(-1), size, rtol=0.01, atol=0)
    torch.testing.assert_close(variance, variance.mean(-1, keepdim=True).expand_as(variance))


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_width_is_spread_over_all_channels(dim: int) -> None:
    found, eye = spreading(dim), torch.eye(dim).double()
    torch.testing.assert_close(found @ found.mT, eye, atol=1e-6, rtol=0)
    assert torch.equal(found, found.mT)
    assert float(found.abs().max()) <= (2 / dim) ** 0.5 + 1e-9
    sizes = torch.logspace(0, -3, dim).double()  # as singular values are sorted
    channels = (found.mT @ (sizes[:, None] * found)).diagonal()
    assert float(channels.max() / channels.min()) < 2.5


def test_mixing_is_a_rotation_and_always_the_same() -> None:
    for dim in HEAD_DIMS:
        found = mixing(dim)
        torch.testing.assert_close(found @ found.mT, torch.eye(dim).double(), atol=1e-6, rtol=0)
        assert torch.equal(found.abs().sort(0).values, spreading(dim).abs().sort(0).values)
        assert torch.equal(mixing(dim), found) and not torch.equal(found, spreading(dim))


def test_rounding_with_feedback_has_a_better_matrix_of_its_own() -> None:
    weights, spread = moment(0), moment(1)
    found = []
    for feedback in (False, True):
        matrix = optimal_matrix(weights, spread, feedback=feedback)
        inverse = torch.linalg.inv(matrix)
        turned = matrix.mT @ regularized(weights) @ matrix
        roots = torch.linalg.eigvalsh(turned).clamp(min=0).sqrt().sum(-1)
        size = (inverse @ spread @ inverse.mT).diagonal(dim1=-2, dim2=-1).sum(-1)
        found.append(roots.square() * size)
    assert bool((found[1] < found[0]).all())


def test_what_was_never_seen_has_a_basis_all_the_same() -> None:
    layer = LayerMoments(2, HEADS, DIM, DIM)
    x = torch.zeros(1, HEADS, 3, DIM)
    layer.update(x, x, x)
    weights = {"k": layer.queries, "v": torch.zeros(HEADS, DIM, DIM).double()}
    for side in "kv":
        for name, basis in candidates(layer, weights, side).items():
            assert (basis.feedback is not None) == name.endswith("+feedback")
            assert not basis.decode(basis.encode(x)).any()


def test_rows_that_are_all_alike_leave_no_matrix_of_rounding() -> None:
    torch.manual_seed(0)
    layer = LayerMoments(2, HEADS, DIM, DIM)
    row, noise = torch.randn(1, HEADS, 1, DIM), 1e-7 * torch.randn(1, HEADS, 2, DIM)
    x = row.double() + noise[:, :, torch.arange(50) % 2]  # one text: a token again and again
    layer.update(x, x, x)
    weights = {"k": layer.queries, "v": moment(0)}
    for side in "kv":
        for basis in candidates(layer, weights, side).values():
            if basis.matrix is not None:
                assert float(torch.linalg.cond(basis.matrix).max()) < 1e3
            found = basis.decode(basis.encode(x.float()))
            torch.testing.assert_close(found, x.float(), rtol=0, atol=1e-4)


def test_the_weights_of_values_are_those_of_the_output_projection() -> None:
    torch.manual_seed(0)
    weight, error = torch.randn(100, 6 * DIM), torch.randn(DIM).double()
    heads = output_moment(weight, HEADS, DIM)
    for head in range(HEADS):
        parts = weight.double()[:, head * 3 * DIM : (head + 1) * 3 * DIM].unflatten(1, (3, DIM))
        expected = torch.einsum("ohd,d->oh", parts, error).square().sum()
        assert float(error @ heads[head] @ error) == pytest.approx(float(expected))
    assert torch.equal(output_moment(None, HEADS, DIM)[1], torch.eye(DIM).double())
