"""Statistics of scores (1 s)."""

import pytest
import torch

from kvquant.calibration.score_stats import EDGES, QUERIES, ScoreObserver


def observed(
    scale: float, parts: int = 1, windows: dict[int, int] | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    q, k = torch.randn(4, 6, 90, 64), torch.randn(4, 2, 90, 64)
    observer = ScoreObserver(windows)
    for q_part, k_part in zip(q.chunk(parts), k.chunk(parts), strict=True):
        observer.observe(0, q_part, k_part, scale)
    scores = torch.einsum("bhgtd,bhsd->bhgts", q.unflatten(1, (2, 3)), k).flatten(1, 2) * scale
    return observer.tensors(), scores[:, :, -QUERIES:]


@pytest.mark.parametrize("window", [None, 1, 30, 60, 90, 1000])
def test_scores_are_those_that_causal_attention_sees(window: int | None) -> None:
    found, scores = observed(0.125, 2, {0: window} if window else {1: 5})
    place = torch.arange(90)
    seen = (place <= place[:, None]) & (place > place[:, None] - (window or 90))
    seen = seen[-QUERIES:]
    values = scores[:, :, seen]
    torch.testing.assert_close(found["scores.max"][0], values.amax((0, 2)))
    torch.testing.assert_close(found["scores.min"][0], values.amin((0, 2)))
    torch.testing.assert_close(found["scores.mean"][0], values.mean((0, 2)), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        found["scores.std"][0], values.std((0, 2), correction=0), atol=1e-5, rtol=1e-4
    )
    assert found["scores.histogram"].shape == (1, len(EDGES) - 1)
    assert float(found["scores.histogram"].sum()) == 1.0
    assert float(found["scores.phi_overflow"]) == 0.0


def test_a_wide_range_of_maxima_overflows() -> None:
    found, _ = observed(30.0)
    assert 0 < float(found["scores.phi_overflow"]) <= 1
