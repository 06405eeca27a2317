"""Second moments of queries, keys and values: running sums, so no token is kept.

Sums can be added over chunks of a text. They are float64, so that long texts do not drown new
tokens and large offsets do not drown the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch

from kvquant.errors import UnsupportedError


class LayerMoments:
    """The moments of one layer, for each KV head; properties are float64.

    Args:
        num_q_heads: query heads, a multiple of num_kv_heads.
        num_kv_heads: KV heads.
        k_dim, v_dim: channels of a key and of a value.
        device: where the sums lie.
        is_latent: keys are latents and values RoPE parts, of one KV head; queries meet both.

    Attributes:
        tensors: the sums by name: "count" [1] of tokens, "k_sum" [num_kv_heads, k_dim], "k_outer"
            and "q_outer" [num_kv_heads, k_dim, k_dim], "k_min" and "k_max" [num_kv_heads, k_dim];
            the same of V. Of latent rows "r_outer" [1, v_dim, v_dim], too: q_outer is of the
            queries' part that meets latents, r_outer of the part that meets RoPE parts, times
            sm_scale.
    """

    def __init__(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        k_dim: int,
        v_dim: int,
        device: torch.device | str = "cpu",
        is_latent: bool = False,
    ) -> None:
        self.q_heads_per_kv_head = num_q_heads // num_kv_heads

        def full(*shape: int, value: float = 0.0) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.float64, device=device)

        self.tensors = {"count": full(1), "q_outer": full(num_kv_heads, k_dim, k_dim)}
        if is_latent:
            self.tensors["r_outer"] = full(num_kv_heads, v_dim, v_dim)
        for side, dim in (("k", k_dim), ("v", v_dim)):
            self.tensors |= {
                f"{side}_sum": full(num_kv_heads, dim),
                f"{side}_outer": full(num_kv_heads, dim, dim),
                f"{side}_min": full(num_kv_heads, dim, value=torch.inf),
                f"{side}_max": full(num_kv_heads, dim, value=-torch.inf),
            }

    def update(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add tokens: q [batch, num_q_heads, tokens, k_dim], k and v of the KV heads.

        Of latent rows q [batch, num_heads, tokens, k_dim + v_dim], times sm_scale.
        """
        sums = self.tensors
        sums["count"] += k.shape[0] * k.shape[2]
        heads = k.shape[1]
        queries = q.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 3).double()
        parts = queries.split([k.shape[-1], queries.shape[-1] - k.shape[-1]], dim=-1)
        for name, part in zip(("q_outer", "r_outer"), parts, strict=True):
            if name in sums:
                sums[name] += part.mT @ part
        for side, x in (("k", k), ("v", v)):
            rows = x.transpose(0, 1).flatten(1, 2).double()  # [heads, tokens, dim]
            sums[f"{side}_sum"] += rows.sum(1)
            sums[f"{side}_outer"] += rows.mT @ rows
            sums[f"{side}_min"] = torch.minimum(sums[f"{side}_min"], rows.amin(1))
            sums[f"{side}_max"] = torch.maximum(sums[f"{side}_max"], rows.amax(1))

    def with_queries(self, others: Sequence[LayerMoments]) -> LayerMoments:
        """These moments, with the queries of other layers that meet the same keys."""
        found = copy(self)
        found.q_heads_per_kv_head += sum(other.q_heads_per_kv_head for other in others)
        queries = [one.tensors["q_outer"] for one in (self, *others)]
        found.tensors = {**self.tensors, "q_outer": torch.stack(queries).sum(0)}
        return found

    @property
    def count(self) -> int:
        return int(self.tensors["count"])

    @property
    def is_latent(self) -> bool:
        return "r_outer" in self.tensors

    @property
    def rope_queries(self) -> torch.Tensor:
        """[1, v_dim, v_dim]: as queries, of the part that meets RoPE parts."""
        return self.tensors["r_outer"] / max(self.count * self.q_heads_per_kv_head, 1)

    @property
    def queries(self) -> torch.Tensor:
        """[num_kv_heads, k_dim, k_dim]: mean of q qᵀ over the queries that meet each KV head."""
        return self.tensors["q_outer"] / max(self.count * self.q_heads_per_kv_head, 1)

    def mean(self, side: str) -> torch.Tensor:
        """[num_kv_heads, dim] of side "k" or "v"."""
        return self.tensors[f"{side}_sum"] / max(self.count, 1)

    def covariance(self, side: str) -> torch.Tensor:
        """[num_kv_heads, dim, dim] of side "k" or "v"."""
        mean = self.mean(side)
        second = self.tensors[f"{side}_outer"] / max(self.count, 1)
        return second - mean[:, :, None] * mean[:, None]

    def absmax(self, side: str) -> torch.Tensor:
        """[num_kv_heads, dim] of side "k" or "v": the largest magnitude."""
        least, greatest = self.tensors[f"{side}_min"], self.tensors[f"{side}_max"]
        return torch.maximum(least.abs(), greatest.abs())


class Moments:
    """The moments of every layer, made as layers show up.

    Attributes:
        layers: the LayerMoments of each layer, by its index.
    """

    def __init__(self) -> None:
        self.layers: dict[int, LayerMoments] = {}

    def observe(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
    ) -> None:
        """Add a layer's queries, keys and values; a model's observer."""
        is_latent = k.shape[1] == 1 and q.shape[-1] == k.shape[-1] + v.shape[-1]
        if is_latent:
            q = q * sm_scale
        elif q.shape[1] % k.shape[1] or q.shape[-1] != k.shape[-1]:
            raise UnsupportedError(
                f"layer {layer} attends with queries {list(q.shape)} to keys {list(k.shape)}: "
                "KVCache needs whole groups of query heads of the same width"
            )
        if layer not in self.layers:
            shape = q.shape[1], k.shape[1], k.shape[-1], v.shape[-1]
            self.layers[layer] = LayerMoments(*shape, device=k.device, is_latent=is_latent)
        self.layers[layer].update(q, k, v)

    @property
    def count(self) -> int:
        return next(iter(self.layers.values())).count if self.layers else 0
