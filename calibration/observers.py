"""Running statistics of keys or values: what a format has to hold, and how well each one does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvquant.layout import RowFormat
from kvquant.quant import dequantize_rows, quantize_rows


class ChannelObserver:
    """Statistics of each channel of each KV head, and the error of each format; no token is kept.

    Sums are float64, so that long texts do not drown new tokens.

    Args:
        num_kv_heads: KV heads of the layer.
        head_dim: channels of a head.
        formats: short names of the formats whose error is measured.

    Attributes:
        count: tokens seen.
        min, max: [num_kv_heads, head_dim], float32.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, formats: Sequence[str] = ()) -> None:
        shape = (num_kv_heads, head_dim)
        self.count = 0
        self.min = torch.full(shape, torch.inf)
        self.max = torch.full(shape, -torch.inf)
        self._sum = torch.zeros(shape, dtype=torch.float64)
        self._squares = torch.zeros(shape, dtype=torch.float64)
        self._formats = {name: RowFormat.parse(name, head_dim) for name in formats}
        self._errors = {name: torch.zeros(num_kv_heads, dtype=torch.float64) for name in formats}

    def update(self, x: torch.Tensor) -> None:
        """Take in tokens.

        Args:
            x: [batch, num_kv_heads, new_tokens, head_dim], float32, bfloat16 or float16.
        """
        rows = x.detach().float().transpose(0, 1).flatten(1, 2).cpu()  # [heads, tokens, head_dim]
        if not rows.shape[1]:
            return
        self.count += rows.shape[1]
        self.min = torch.minimum(self.min, rows.amin(1))
        self.max = torch.maximum(self.max, rows.amax(1))
        self._sum += rows.sum(1, dtype=torch.float64)
        self._squares += rows.double().square().sum(1)
        for name, fmt in self._formats.items():
            error = dequantize_rows(quantize_rows(rows, fmt), fmt) - rows
            self._errors[name] += error.square().sum((1, 2), dtype=torch.float64)

    @property
    def mean(self) -> torch.Tensor:
        """[num_kv_heads, head_dim], float32: the mean of each channel."""
        return (self._sum / max(self.count, 1)).float()

    @property
    def std(self) -> torch.Tensor:
        """[num_kv_heads, head_dim], float32: the standard deviation of each channel."""
        mean = self._sum / max(self.count, 1)
        return (self._squares / max(self.count, 1) - mean.square()).clamp(min=0).sqrt().float()

    @property
    def absmax(self) -> torch.Tensor:
        """[num_kv_heads, head_dim], float32: the largest magnitude of each channel."""
        return torch.maximum(self.min.abs(), self.max.abs())

    @property
    def offset(self) -> torch.Tensor:
        """[num_kv_heads], float32: the largest channel mean over the median channel deviation.

        Of keys a few in most models, tens in Qwen2-type ones, whose projections have a bias. Such a
        channel takes most of a row's range, and with 4 bits most of its codes.
        """
        typical = self.std.median(-1).values
        return self.mean.abs().amax(-1) / typical.clamp(min=torch.finfo(torch.float32).tiny)

    @property
    def errors(self) -> dict[str, torch.Tensor]:
        """Of each format [num_kv_heads], float32: |x - quantized x| / |x|, over all tokens."""
        norm = self._squares.sum(-1).clamp(min=torch.finfo(torch.float64).tiny)
        return {name: (error / norm).sqrt().float() for name, error in self._errors.items()}
