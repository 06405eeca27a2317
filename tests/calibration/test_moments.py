"""Running second moments."""

import pytest
import torch

from kvquant.calibration.moments import LayerMoments, Moments
from kvquant.errors import UnsupportedError

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
