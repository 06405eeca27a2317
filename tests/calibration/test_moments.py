"""Running second moments."""

from pathlib import Path

import pytest
import torch
from forged import Edit, forge

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
        found.done += 1
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


def test_sums_go_on_from_a_file(tmp_path: Path) -> None:
    path, whole = tmp_path / "sums", moments(4)
    begun = moments(4)
    begun.save(path, "mine")
    with pytest.warns(RuntimeWarning, match="other weights, text or options. Observing begins"):
        assert Moments.load(path, "other") is None
    assert Moments.load(tmp_path / "none", "mine") is None
    again = Moments.load(path, "mine")
    assert again is not None and again.done == 4
    for one in (again, whole):
        one.observe(3, *sample(1), SCALE)
    for name, tensor in whole.layers[3].tensors.items():
        assert torch.equal(tensor, again.layers[3].tensors[name]), name
    assert torch.equal(again.layers[3].queries, whole.layers[3].queries)
    q, k, v = (x.to("meta") for x in sample(1))
    again.follow(3, q, k, v, SCALE)
    assert {tensor.device for tensor in again.layers[3].tensors.values()} == {k.device}


@pytest.mark.parametrize(
    "edit",
    [
        lambda facts, _: facts.update(done=-5),
        lambda facts, _: facts.update(done="x"),
        lambda facts, _: facts.pop("done"),
        lambda facts, _: facts["ratios"].update(x=1),
        lambda facts, _: facts["ratios"].update({"3": 0}),
        lambda facts, _: facts["ratios"].update({"9" * 5000: 1}),
        lambda facts, _: facts["ratios"].update({"03": 1}),
        lambda facts, _: facts["ratios"].clear(),
        lambda _, tensors: tensors.pop("3.k_min"),
        lambda _, tensors: tensors.update({"3.other": torch.zeros(1)}),
        lambda _, tensors: tensors.update({"odd": torch.zeros(1)}),
        lambda _, tensors: tensors.update({"3.k_outer": torch.zeros(1, 3)}),
        lambda _, tensors: tensors.update({"3.k_sum": torch.zeros(1, 1, 0)}),
        lambda _, tensors: tensors.update({"3.k_sum": tensors["3.k_sum"].long()}),
    ],
    ids="negative word none layer ratio digits twice layers lost more odd shape sum type".split(),
)
def test_odd_sums_are_begun_anew(tmp_path: Path, edit: Edit) -> None:
    path = tmp_path / "sums"
    moments(2).save(path, "mine")
    forge(path, edit)
    with pytest.warns(RuntimeWarning, match="Observing begins anew"):
        assert Moments.load(path, "mine") is None


def test_damaged_sums_are_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "sums"
    moments(2).save(path, "mine")
    data = path.read_bytes()
    flipped = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
    for damaged in (b"", data[:100], data[:-1], flipped, b"{" + data):
        path.write_bytes(damaged)
        with pytest.warns(RuntimeWarning, match="Observing begins anew"):
            assert Moments.load(path, "mine") is None
    for place in range(8, 400, 7):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.warns(RuntimeWarning, match="Observing begins anew"):
            assert Moments.load(path, "mine") is None


def test_odd_groups_of_query_heads_are_refused() -> None:
    q, k, v = sample()
    with pytest.raises(UnsupportedError, match="layer 0 attends with queries"):
        Moments().observe(0, q[:, :3], k, v, SCALE)
