"""What rounded keys do to attention: the measure by which K rows of few bits are refused.

It is the KL divergence of attention's weights from rounded and from exact keys, averaged over
layers, for rows of 4 bits or fewer. For 8-bit keys it misleads: in layer 0 of Qwen2.5-Coder-0.5B it
is 1.25 (mean .056), and the model loses nothing. tests/benchmarks/bench_probe.py
sets it beside the KL of predictions.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .format import RowFormat
from .quantize import dequantize, full_precision, quantize

FEW_BITS = 4  # K rows of more bits are not probed
WARNED, REFUSED = 0.01, 0.12  # limits of the figure; kvquant/hf/README.md has models on both sides
TOKENS = 256  # that are read for a probe
MEASURE = "2"  # another name for another measure: kept figures are found by it
_FIRST, _STRIDE = 64, 16  # the first query that is compared, and from one to the next


def divergence(
    q: torch.Tensor, k: torch.Tensor, fmt: RowFormat, sm_scale: float, window: int | None = None
) -> torch.Tensor:
    """The mean KL divergence of attention's weights from rounded keys to those from exact keys.

    q is [batch, num_q_heads, tokens, head_dim], k [batch, num_kv_heads, tokens, head_dim], both
    after RoPE; a query sees the last `window` tokens. The result is one float32 on the device of k,
    in nats; NaN where fmt cannot hold k.
    """
    tokens, device = k.shape[2], k.device
    at = torch.arange(min(_FIRST, tokens // 2), tokens, _STRIDE, device=device)
    back = at[:, None] - torch.arange(tokens, device=device)
    hidden = (back < 0) | (back >= (window or tokens))
    return divergence_among(q[:, :, at], k, fmt, sm_scale, hidden)


def divergence_among(
    q: torch.Tensor, k: torch.Tensor, fmt: RowFormat, sm_scale: float, hidden: torch.Tensor
) -> torch.Tensor:
    """`divergence` of queries [batch, num_q_heads, queries, head_dim] that see all keys but the
    hidden ones: bool, broadcast to [batch, num_kv_heads, heads of each, queries, tokens].
    """
    queries = q.detach().float().unflatten(1, (k.shape[1], -1))

    def log_weights(keys: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = queries @ keys[:, :, None].float().mT * sm_scale
        return scores.masked_fill(hidden, -1e9).log_softmax(-1)

    with full_precision(k):
        exact = log_weights(k)
        rounded = log_weights(dequantize(quantize(k, fmt)[0], fmt))
        return (exact.exp() * (exact - rounded)).sum(-1).mean()


def loss_of(figure: float) -> str:
    """What a figure of WARNED or more means, for messages."""
    limit = f"from {REFUSED:g} on texts are ruined"
    found = f"change what attention reads: its weights move by a KL divergence of {figure:.2g}"
    return f"{found}, and {limit}" if figure >= REFUSED else f"{found}. Expect a loss; {limit}"


def combined(divergences: Iterable[torch.Tensor]) -> float:
    """A model's figure from its layers' divergences."""
    layers = torch.stack([one.to("cpu", torch.float64) for one in divergences])
    return float(layers.mean())
