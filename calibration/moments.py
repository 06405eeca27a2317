"""Second moments of queries, keys and values: running sums, so no token is kept.

Sums can be added: over chunks of a text, over runs that were interrupted, over ranks. They are
float64, so that long texts do not drown new tokens and large offsets do not drown the rest.
"""

from __future__ import annotations

from pathlib import Path

import torch

from kvquant.errors import CheckpointError, UnsupportedError
from kvquant.files import TensorSource, open_safetensors, read_tensor, replaced, write_safetensors

_SUMS = ("q_outer", "k_sum", "k_outer", "v_sum", "v_outer")
_LEAST, _GREATEST = ("k_min", "v_min"), ("k_max", "v_max")
_TINY = torch.finfo(torch.float32).tiny


class LayerMoments:
    """The moments of one layer, for each KV head; properties are float64.

    Args:
        num_q_heads: query heads, a multiple of num_kv_heads.
        num_kv_heads: KV heads.
        k_dim: channels of a key.
        v_dim: channels of a value.
        device: where the sums lie.

    Attributes:
        tensors: the sums by name: "count" [1] of tokens, "k_sum" [num_kv_heads, k_dim], "k_outer"
            and "q_outer" [num_kv_heads, k_dim, k_dim], "k_min" and "k_max" [num_kv_heads, k_dim];
            of V likewise.
    """

    def __init__(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        k_dim: int,
        v_dim: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.q_heads_per_kv_head = num_q_heads // num_kv_heads

        def full(*shape: int, value: float = 0.0) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.float64, device=device)

        self.tensors = {"count": full(1), "q_outer": full(num_kv_heads, k_dim, k_dim)}
        for side, dim in (("k", k_dim), ("v", v_dim)):
            self.tensors |= {
                f"{side}_sum": full(num_kv_heads, dim),
                f"{side}_outer": full(num_kv_heads, dim, dim),
                f"{side}_min": full(num_kv_heads, dim, value=torch.inf),
                f"{side}_max": full(num_kv_heads, dim, value=-torch.inf),
            }

    def update(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Take in tokens: q [batch, num_q_heads, tokens, k_dim], k and v of the KV heads."""
        sums = self.tensors
        sums["count"] += k.shape[0] * k.shape[2]
        heads = k.shape[1]
        queries = q.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 3).double()
        sums["q_outer"] += queries.mT @ queries
        for side, x in (("k", k), ("v", v)):
            rows = x.transpose(0, 1).flatten(1, 2).double()  # [heads, tokens, dim]
            sums[f"{side}_sum"] += rows.sum(1)
            sums[f"{side}_outer"] += rows.mT @ rows
            sums[f"{side}_min"] = torch.minimum(sums[f"{side}_min"], rows.amin(1))
            sums[f"{side}_max"] = torch.maximum(sums[f"{side}_max"], rows.amax(1))

    @property
    def count(self) -> int:
        """Tokens seen."""
        return int(self.tensors["count"])

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

    def std(self, side: str) -> torch.Tensor:
        """[num_kv_heads, dim] of side "k" or "v"."""
        return self.covariance(side).diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()

    def absmax(self, side: str) -> torch.Tensor:
        """[num_kv_heads, dim] of side "k" or "v": the largest magnitude."""
        least, greatest = self.tensors[f"{side}_min"], self.tensors[f"{side}_max"]
        return torch.maximum(least.abs(), greatest.abs())

    @property
    def offset_ratio(self) -> torch.Tensor:
        """[num_kv_heads]: the largest mean of a key channel over the median channel deviation.

        A few in most models, tens in Qwen2-type ones, whose projections have a bias. Such a channel
        takes most of a row's range, and with 4 bits most of its codes.
        """
        typical = self.std("k").median(-1).values
        return self.mean("k").abs().amax(-1) / typical.clamp(min=_TINY)


class Moments:
    """The moments of every layer, made as layers show up.

    Attributes:
        layers: the LayerMoments of each layer, by its index.
        done: windows of the text that are in the sums.
    """

    def __init__(self) -> None:
        self.layers: dict[int, LayerMoments] = {}
        self.done = 0

    def observe(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
    ) -> None:
        """Take in what a layer attends with; a model's observer."""
        if q.shape[1] % k.shape[1] or q.shape[-1] != k.shape[-1]:
            raise UnsupportedError(
                f"layer {layer} attends with queries {list(q.shape)} to keys {list(k.shape)}: "
                "KVCache needs whole groups of query heads of the same width"
            )
        if layer not in self.layers:
            shape = q.shape[1], k.shape[1], k.shape[-1], v.shape[-1]
            self.layers[layer] = LayerMoments(*shape, device=k.device)
        self.layers[layer].update(q, k, v)

    @property
    def count(self) -> int:
        """Tokens seen."""
        return next(iter(self.layers.values())).count if self.layers else 0

    def all_reduce(self) -> None:
        """Add the sums of all ranks, where torch.distributed runs; every rank then has them."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        operations = dict.fromkeys(("count", *_SUMS), torch.distributed.ReduceOp.SUM)
        operations |= dict.fromkeys(_LEAST, torch.distributed.ReduceOp.MIN)
        operations |= dict.fromkeys(_GREATEST, torch.distributed.ReduceOp.MAX)
        for layer in sorted(self.layers):
            for name, tensor in self.layers[layer].tensors.items():
                torch.distributed.all_reduce(tensor, operations[name])

    def save(self, path: Path, key: str) -> None:
        """Write the sums to a file, to go on from them; key names the run that they belong to."""
        sources = {}
        for layer, moments in self.layers.items():
            sums = {"per": torch.tensor([float(moments.q_heads_per_kv_head)]), **moments.tensors}
            for name, tensor in sums.items():
                words = tensor.detach().cpu().double().contiguous().view(torch.int32)
                sources[f"{layer}.{name}"] = TensorSource(
                    torch.int32, tuple(words.shape), _Once(words)
                )
        facts = {"kvquant_moments": key, "done": str(self.done)}
        with replaced(path) as temporary:
            write_safetensors(temporary, sources, lambda _: facts)

    @classmethod
    def load(cls, path: Path, key: str, device: torch.device | str) -> Moments | None:
        """Read what save wrote; None if there is no file, or one of another run."""
        if not path.is_file():
            return None
        found = cls()
        try:
            with open_safetensors(path) as file:
                facts = file.metadata() or {}
                if facts.get("kvquant_moments") != key:
                    return None
                found.done = int(facts["done"])
                layers: dict[int, dict[str, torch.Tensor]] = {}
                for name in file.keys():
                    layer, sums = name.split(".")
                    words = read_tensor(file, name)
                    values = words.contiguous().view(torch.float64).to(device)
                    layers.setdefault(int(layer), {})[sums] = values
        except CheckpointError:
            return None  # it is begun anew
        for layer, tensors in sorted(layers.items()):
            (heads, dim), per = tensors["k_sum"].shape, int(tensors.pop("per"))
            shape = heads * per, heads, dim, tensors["v_sum"].shape[1]
            found.layers[layer] = LayerMoments(*shape, device=device)
            found.layers[layer].tensors = tensors
        return found


class _Once:
    """Gives one tensor when called, as TensorSource asks for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> list[torch.Tensor]:
        return [self.tensor]
