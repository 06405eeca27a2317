"""Running second moments, candidate bases, and choosing formats by what they cost (2 s)."""

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
from kvquant.calibration.format_search import Costs, Side, allocate, worst_layers
from kvquant.calibration.moments import LayerMoments, Moments
from kvquant.errors import UnsupportedError
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


SCALE = 0.125


def sample(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys of which some are far off zero, and values."""
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 4, 40, 64), torch.randn(3, 2, 40, 64), torch.randn(3, 2, 40, 64)
    return q, k * torch.linspace(0.1, 5, 64) + torch.linspace(-9, 9, 64), v


def moments(parts: int, seed: int = 0) -> Moments:
    found = Moments()
    for q, k, v in zip(*(x.chunk(parts, dim=2) for x in sample(seed)), strict=True):
        found.observe(3, q, k, v, SCALE)
    return found


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_moments_do_not_depend_on_how_tokens_arrive(parts: int) -> None:
    q, k, v = sample()
    layer = moments(parts).layers[3]
    rows = k.transpose(0, 1).flatten(1, 2).double()
    assert layer.count == moments(parts).count == 120
    torch.testing.assert_close(layer.mean("k"), rows.mean(1))
    variance = layer.covariance("k").diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(variance, rows.var(1, correction=0))
    torch.testing.assert_close(layer.covariance("k")[1], rows[1].T.cov(correction=0))
    assert torch.equal(layer.absmax("k"), rows.abs().amax(1))
    assert torch.equal(layer.tensors["v_min"], v.transpose(0, 1).flatten(1, 2).amin(1).double())
    heads = q[:, 2:].transpose(0, 1).flatten(0, 2).double()  # the query heads of KV head 1
    torch.testing.assert_close(layer.queries[1], heads.T @ heads / len(heads))


def test_long_sums_do_not_lose_tokens() -> None:
    layer = LayerMoments(1, 1, 64, 64)
    x = torch.full((1, 1, 4096, 64), 1000.1)
    for _ in range(20):
        layer.update(x, x, x)
    assert float(layer.mean("k")[0, 0]) == pytest.approx(1000.1, rel=1e-6)
    assert float(layer.covariance("k").abs().max()) < 0.01


def test_odd_groups_of_query_heads_are_refused() -> None:
    q, k, v = sample()
    with pytest.raises(UnsupportedError, match="layer 0 attends with queries"):
        Moments().observe(0, q[:, :3], k, v, SCALE)


BITS = {"int4": 4.25, "int4-g4": 5.0, "int8": 8.25}


def costs(k: list[float], v: list[float]) -> Costs:
    kl: dict[Side, dict[str, float]] = {}
    for side, each in (("k", k), ("v", v)):
        for layer, cost in enumerate(each):
            kl[layer, side] = {"int4": cost, "int4-g4": cost / 2, "int8": cost / 200}
    return Costs(kl, BITS)


def test_the_cheapest_is_enough_where_it_keeps_the_limit() -> None:
    assert set(allocate(costs([1, 1], [1, 1]), max_kl=4).values()) == {"int4"}


def test_the_layer_that_costs_most_gets_bits_first() -> None:
    found = allocate(costs([1, 9], [1, 3]), max_kl=9.6)
    assert found[1, "k"] != "int4"
    assert [found[0, "k"], found[0, "v"], found[1, "v"]] == ["int4"] * 3


@pytest.mark.parametrize("max_kl", [8.0, 3.0, 0.5, 0.08])
def test_limits_are_kept_with_fewer_bits_the_looser_they_are(max_kl: float) -> None:
    given = costs([1, 5, 2], [0.5, 1, 1])
    found = allocate(given, max_kl=max_kl)
    assert given.total(found) <= max_kl
    tighter = allocate(given, max_kl=max_kl / 2)
    assert given.mean_bits(tighter) >= given.mean_bits(found)


def test_sides_may_have_formats_of_their_own() -> None:
    """As latents and RoPE parts."""
    kl: dict[Side, dict[str, float]] = {
        (0, "k"): {"int4": 4.0, "int8": 0.1},
        (0, "v"): {"int8": 1.0, "bf16": 0.0},
    }
    v_bits = {"int8": 8.25, "bf16": 16.0}
    given = Costs(kl, {"int4": 4.25, "int8": 8.25}, v_bits=v_bits, v_width=1 / 8)
    assert allocate(given, max_kl=5) == {(0, "k"): "int4", (0, "v"): "int8"}
    assert allocate(given, max_kl=4) == {(0, "k"): "int4", (0, "v"): "bf16"}
    assert allocate(given, max_kl=0.1) == {(0, "k"): "int8", (0, "v"): "bf16"}


@pytest.mark.parametrize("budget", [4.25, 4.6, 5.0, 6.5, 9.0])
def test_budgets_are_kept_and_used(budget: float) -> None:
    given = costs([1, 5, 2], [0.5, 1, 1])
    found = allocate(given, budget=budget)
    assert given.mean_bits(found) <= budget
    assert given.total(found) <= given.total(allocate(given, budget=4.25))
    if budget >= 8.25:
        assert set(found.values()) == {"int8"}


def test_rows_of_values_count_by_their_own_width() -> None:
    given = costs([1, 5, 2], [0.5, 1, 1])
    v_bits = {"int4": 4.5, "int4-g4": 6.0, "int8": 8.5}  # rows of half the width
    given = Costs(given.kl, BITS, v_bits, 0.5)
    for budget in (4.5, 5.0, 6.5, 9.0):
        found = allocate(given, budget=budget)
        taken = sum(BITS[name] for (_, side), name in found.items() if side == "k")
        taken += sum(v_bits[name] / 2 for (_, side), name in found.items() if side == "v")
        assert given.mean_bits(found) == pytest.approx(taken / 4.5) and taken / 4.5 <= budget + 1e-9
    assert set(found.values()) == {"int8"}


def test_out_of_reach_gives_the_best_and_names_the_worst_layers() -> None:
    given = costs([1, 50, 1], [1, 2, 1])
    found = allocate(given, max_kl=1e-6)
    assert set(found.values()) == {"int8"}
    assert worst_layers(given, found) == [1]
    even = costs([1, 1, 1, 1, 1, 1, 1], [1] * 7)
    assert len(worst_layers(even, allocate(even, max_kl=1e-9))) == 3
