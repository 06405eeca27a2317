"""The least error of a code of so many bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from bench_bound import least_share


def test_the_least_error_is_that_of_reverse_water_filling() -> None:
    even = torch.full((8,), 3.0, dtype=torch.float64)
    torch.testing.assert_close(least_share(even, 2.0), even.new_tensor(4.0**-2))
    # two numbers of variance 16 and 1, half a bit each: all bits go to the first one
    uneven = torch.tensor([[16.0, 1.0], [0.0, 4.0]], dtype=torch.float64)
    found = least_share(uneven, 0.5)
    torch.testing.assert_close(found, uneven.new_tensor([(4 + 1) / 17, 1 / 4]))
    # three bits each leave both the same error: the root of 16 * 1, in 4**3 parts
    torch.testing.assert_close(least_share(uneven[0], 3.0), uneven.new_tensor(2 * 4 / 64 / 17))
