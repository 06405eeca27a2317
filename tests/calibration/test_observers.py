"""Running statistics (1 s)."""

import pytest
import torch

from kvquant import RowFormat, dequantize_rows, quantize_rows
from kvquant.calibration.observers import ChannelObserver


def observed(x: torch.Tensor, parts: int, formats: tuple[str, ...] = ()) -> ChannelObserver:
    observer = ChannelObserver(x.shape[1], x.shape[3], formats)
    for part in x.chunk(parts, dim=2):
        observer.update(part)
    return observer


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_statistics_do_not_depend_on_how_tokens_arrive(parts: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 40, 64) * torch.linspace(0.1, 5, 64) + torch.linspace(-9, 9, 64)
    observer = observed(x, parts)
    flat = x.transpose(0, 1).flatten(1, 2)
    assert observer.count == 120
    torch.testing.assert_close(observer.mean, flat.mean(1))
    torch.testing.assert_close(observer.std, flat.std(1, correction=0))
    assert torch.equal(observer.min, flat.amin(1))
    assert torch.equal(observer.max, flat.amax(1))
    assert torch.equal(observer.absmax, flat.abs().amax(1))


def test_errors_are_those_of_the_rows() -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 30, 128).bfloat16()
    errors = observed(x, 4, ("int4", "int8-g4", "bf16")).errors
    assert torch.equal(errors["bf16"], torch.zeros(3))
    for name in ("int4", "int8-g4"):
        fmt = RowFormat.parse(name, 128)
        wrong = dequantize_rows(quantize_rows(x, fmt), fmt) - x.float()
        expected = [wrong[:, h].norm() / x[:, h].float().norm() for h in range(3)]
        torch.testing.assert_close(errors[name], torch.stack(expected))
    assert bool((errors["int4"] > 5 * errors["int8-g4"]).all())


def test_a_large_offset_is_found_and_a_spread_is_not() -> None:
    torch.manual_seed(2)
    x = torch.randn(1, 2, 500, 64)
    x[:, :, :, 3] *= 30
    x[:, 1, :, 9] += 40
    offset = observed(x, 1).offset
    assert float(offset[0]) < 5
    assert float(offset[1]) == pytest.approx(40, rel=0.1)


def test_long_sums_do_not_lose_tokens() -> None:
    observer = ChannelObserver(1, 64)
    for _ in range(20):
        observer.update(torch.full((1, 1, 4096, 64), 1000.1))
    assert float(observer.mean[0, 0]) == pytest.approx(1000.1, rel=1e-6)


def test_nothing_observed_is_zero_not_nan() -> None:
    observer = ChannelObserver(2, 64, ("int4",))
    observer.update(torch.zeros(1, 2, 0, 64))
    assert observer.count == 0
    assert torch.equal(observer.mean, torch.zeros(2, 64))
    assert torch.equal(observer.errors["int4"], torch.zeros(2))
