"""No gradient flows through packed rows: backward raises, as it would leave attention out."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ..errors import UnsupportedError


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, out: torch.Tensor, *of: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(_: Any, *gradients: Any) -> NoReturn:
        raise UnsupportedError(
            "no gradient flows through the rows of a KVCache: decode under torch.no_grad(), or "
            "train without a QuantizedCache"
        )


def without_gradient(out: torch.Tensor, *of: torch.Tensor) -> torch.Tensor:
    """A tensor read from packed rows; backward raises where one of `of` has a gradient."""
    if not torch.is_grad_enabled() or not any(one.requires_grad for one in of):
        return out
    found: torch.Tensor = NoGradient.apply(out, *of)  # type: ignore[no-untyped-call]  # torch's
    return found
