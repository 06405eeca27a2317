"""Collecting over layers and texts (1 s)."""

from collections.abc import Callable

import pytest
import torch

from kvquant.calibration.collect import collect
from kvquant.calibration.run import OBSERVED_FORMATS, spread
from kvquant.errors import ConfigError


class FakeModel:
    """Keys are the token everywhere, values its negative; layer 1 doubles them."""

    def observe(
        self, tokens: torch.Tensor, observer: Callable[[int, torch.Tensor, torch.Tensor], None]
    ) -> None:
        k = tokens.float()[:, None, :, None].expand(-1, 2, -1, 64)
        for layer in (0, 1):
            observer(layer, k * (layer + 1), -k * (layer + 1))


def test_every_layer_sees_every_token_once() -> None:
    windows = torch.arange(50).view(5, 10)
    done: list[int] = []
    statistics = collect(FakeModel(), windows, ("int8",), batch=2, progress=done.append)
    assert statistics.num_tokens == 50
    assert done == [20, 20, 10]
    tensors = statistics.tensors()
    assert tensors["k.mean"].shape == (2, 2, 64)
    assert tensors["k.mean"][:, 0, 0].tolist() == [24.5, 49.0]
    assert tensors["v.min"][:, 1, 5].tolist() == [-49.0, -98.0]
    assert tensors["k.absmax"][:, 1, 5].tolist() == [49.0, 98.0]
    assert tensors["k.error.int8"].shape == tensors["v.offset"].shape == (2, 2)
    assert set(tensors) == {
        f"{kind}.{name}"
        for kind in "kv"
        for name in ("mean", "std", "min", "max", "absmax", "offset", "error.int8")
    }


@pytest.mark.parametrize(("count", "length"), [(1, 100), (3, 20), (10, 10), (7, 14)])
def test_windows_are_spread_over_the_text_without_overlap(count: int, length: int) -> None:
    windows = spread(range(100), count, length)
    assert windows.shape == (count, length)
    assert windows[0, 0] == 0
    assert len(set(windows.flatten().tolist())) == count * length
    assert bool((windows.diff(dim=1) == 1).all())


def test_a_text_that_is_too_short_is_told() -> None:
    with pytest.raises(ConfigError, match="99 tokens are too few for 10 windows of 10"):
        spread(range(99), 10, 10)


def test_the_error_of_every_format_is_measured() -> None:
    names = set(OBSERVED_FORMATS)
    assert {"int4-g2", "int8-g2", "int8-g8", "fp8-g2", "fp8-g8", "fp16", "bf16"} < names
    assert len(names) == len(OBSERVED_FORMATS) == 3 * 4 + 2
    tensors = collect(FakeModel(), torch.arange(20).view(1, 20), OBSERVED_FORMATS).tensors()
    for name in names:
        assert bool((tensors[f"v.error.{name}"] < 1e-2).all()), name
