"""The range of attention scores, and whether one reference maximum would serve a whole layer.

FlashDecoding++ (https://arxiv.org/abs/2311.01282) takes exp(score - phi) with one phi for all, in
place of each query's own maximum, and computes anew where a score is too far from it. phi is the
middle of the queries' own maxima. A query overflows if its maximum is more than ROOM above phi
(exp grows beyond what sums of float32 hold) or below it (its sum loses digits to underflow).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

ROOM = 60.0  # exp(60) * 1e6 tokens is within float32, and exp(-60 - 27) too
QUERIES = 64  # of a window, the last ones: they see the most keys
EDGES = torch.linspace(-64.0, 64.0, 129, dtype=torch.float32, device="cpu")


class ScoreObserver:
    """Statistics of the scores sm_scale * q·(k - offset) that softmax sees.

    Args:
        windows: tokens that a query sees, itself included, by layer; others see all before them.
    """

    def __init__(self, windows: Mapping[int, int] | None = None) -> None:
        self._windows = windows or {}
        self._maxima: dict[int, list[torch.Tensor]] = {}
        self._least: dict[int, torch.Tensor] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self._histogram: dict[int, torch.Tensor] = {}

    def observe(self, layer: int, q: torch.Tensor, k: torch.Tensor, sm_scale: float) -> None:
        """Take in the last queries of a window and all keys that each of them sees.

        Args:
            layer: index of the layer.
            q: [batch, num_q_heads, tokens, head_dim].
            k: [batch, num_kv_heads, tokens, head_dim], less the offset.
            sm_scale: factor on q·k.
        """
        tokens, heads = k.shape[2], k.shape[1]
        last = min(QUERIES, tokens)
        queries = q[:, :, tokens - last :].float().unflatten(1, (heads, -1))
        scores = queries @ k.float().mT[:, :, None] * sm_scale  # [batch, heads, per, last, tokens]
        every = torch.ones(last, tokens, dtype=torch.bool, device="cpu")
        hidden = every.triu(tokens - last + 1)
        if layer in self._windows:
            hidden |= every.tril(tokens - last - self._windows[layer])
        hidden = hidden.to(scores.device)
        flat = scores.flatten(1, 2).transpose(0, 1)  # [num_q_heads, batch, last, tokens]
        seen = flat[:, :, ~hidden].double().flatten(1)
        maxima = flat.masked_fill(hidden, -torch.inf).amax(-1).flatten(1)
        least = flat.masked_fill(hidden, torch.inf).amin((1, 2, 3))
        counts = torch.full_like(seen[:, 0], seen.shape[1])
        sums = torch.stack([seen.sum(1), seen.square().sum(1), counts])
        low, high = float(EDGES[0]), float(EDGES[-1])
        inside = seen.flatten().clamp(low, high).float().cpu()
        histogram = torch.histc(inside, len(EDGES) - 1, low, high).double()
        if layer in self._sums:
            least, sums = torch.minimum(least, self._least[layer]), sums + self._sums[layer]
            histogram = histogram + self._histogram[layer]
        self._least[layer], self._sums[layer], self._histogram[layer] = least, sums, histogram
        self._maxima.setdefault(layer, []).append(maxima)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors "scores." of a CachePlan, all layers."""
        found: dict[str, list[torch.Tensor]] = {}
        for layer in sorted(self._sums):
            total, squares, counts = self._sums[layer]
            mean = total / counts
            maxima = torch.cat(self._maxima[layer], 1)
            phi = (maxima.min() + maxima.max()) / 2
            values = {
                "min": self._least[layer],
                "max": maxima.amax(1),
                "mean": mean,
                "std": (squares / counts - mean.square()).clamp(min=0).sqrt(),
                "histogram": self._histogram[layer] / self._histogram[layer].sum(),
                "phi": phi,
                "phi_overflow": ((maxima - phi).abs() > ROOM).double().mean(),
            }
            for name, value in values.items():
                found.setdefault(name, []).append(value.float().cpu())
        stacked = {f"scores.{name}": torch.stack(values) for name, values in found.items()}
        return stacked | ({"scores.edges": EDGES.clone()} if stacked else {})
