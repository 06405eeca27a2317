"""Rows to round with feedback, and what is to come of them."""

from __future__ import annotations

import torch

from kvquant import RowFormat, quantize_rows
from kvquant.ops.quantize import quantize_calibrated
from kvquant.rows.quantize import feedback_matrix


def make_rows(
    fmt: RowFormat, batch: int, heads: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and feedback; a constant row, small ones, and ones that a format cannot hold are among
    them."""
    torch.manual_seed(0)
    dim = fmt.head_dim
    roots = torch.randn(heads, dim, dim).double() * torch.logspace(0, -1.5, dim).double()
    feedback = feedback_matrix(roots @ roots.mT + 1e-2 * torch.eye(dim)).float()
    x = torch.randn(batch, heads, tokens, dim) * torch.logspace(-6, 3, tokens)[:, None]
    x += torch.randn(batch, heads, tokens, 1)
    flat = x.view(-1, dim)
    if len(flat) > 5:
        flat[1] = 0.25
        flat[2, dim - 1] = torch.nan
        flat[3, 0] = torch.inf
        flat[4] *= 3e4
        flat[5] = 0.0
    return x, feedback


def quantized(
    x: torch.Tensor, fmt: RowFormat, feedback: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the nearest codes, and the rows that are expected, in plain torch."""
    rows = quantize_rows(x, fmt, check=False, backend="reference")
    return rows, quantize_calibrated(x, fmt, feedback=feedback, backend="reference")
