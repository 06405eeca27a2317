"""Heads of multi-head latent attention (MLA; DeepSeek V2, V3), which decode from latent rows.

transformers caches one latent (after its norm) and one RoPE part (after RoPE) a token, and makes
keys and values of all heads from the cache's output:

    K of a head = W_UK latent, the RoPE part beside it        V of a head = W_UV latent

W_UK and W_UV are the rows of one weight, kv_b_proj. Steps do not expand latents: W_UK goes into the
query and W_UV into the output (absorption, ops/mla.py). In a prompt's chunk each latent meets many
queries, so expansion is cheaper: a few heads at a time. For rows in a basis (rows/basis.py), latent
= M stored + offset, W_UK M and W_UV M replace the two matrices (FoldedWeights): a step multiplies
by a basis of RoPE parts only, as RoPE stands between it and the weights.

Source: DeepSeek-V2 (https://arxiv.org/abs/2405.04434), 2.1.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch.nn.functional import linear

from ... import debug
from ...cache.latent import LatentKVCache
from ...errors import UnsupportedModelError
from ...ops.causal import causal_attention
from ...rows.basis import Basis, LayerBasis, for_fp16
from ...rows.latent import LatentFormat
from ...rows.quantize import full_precision

EXPANDED = 1 << 28  # bytes of keys and values that are expanded at a time, if a head takes fewer
SAME = 0.05  # relative error of expanded rows: of bf16, far less; if they are others, 1 or so
_NEWER = (
    "gives a cache the keys and values of all heads, not latent rows: install transformers 5.17 "
    "or newer"
)


class FoldedWeights:
    """W_UK and W_UV of a layer, with M and offset of its latents' basis folded in.

        queries     (W_UK M / factor)^T q       results     (W_UV M) out + W_UV offset

    Computed in float32, and rounded once to the weights' dtype. They take as much memory as
    kv_b_proj, which prompts still read, and serve all caches in a basis. The factor, a power of
    two, scales scores and keeps queries within fp16 (basis.for_fp16).

    Args:
        weight: [heads, nope_dim + v_dim, latent_dim].
        nope_dim: rows of W_UK in it.
        basis: of the layer, on the device of the weight.

    Attributes:
        weight: of the same shape: W_UK M / factor and W_UV M.
        bias: [heads, v_dim]: W_UV offset; None if it is zero.
        factor: on scores; 1 for bfloat16, which has the range of float32.
        rope: basis of the RoPE parts.
    """

    def __init__(self, weight: torch.Tensor, nope_dim: int, basis: LayerBasis) -> None:
        self._source, self._version = weight, _version_of(weight)
        self.rope = basis.v
        sides = [side.matrix for side in basis if side.matrix is not None]
        self.factor = 1.0
        if weight.dtype != torch.bfloat16:  # of float32 autocast may make fp16
            self.factor = max((for_fp16(matrix)[1] for matrix in sides), default=1.0)
        self.weight = weight
        self.bias: torch.Tensor | None = None
        # graphs and steps outside of inference mode read them, too
        with torch.inference_mode(False), torch.no_grad(), full_precision(weight):
            if sides:
                whole = weight.float()
                if basis.k.matrix is not None:
                    whole = whole @ basis.k.matrix[0]
                up, down = whole.split([nope_dim, whole.shape[1] - nope_dim], dim=1)
                self.weight = torch.cat([up / self.factor, down], dim=1).to(weight.dtype)
            if bool(basis.k.offset.any()):
                bias = weight[:, nope_dim:].float() @ basis.k.offset[0]
                self.bias = bias.to(weight.dtype)
        for tensor in (self.weight, self.bias):
            if tensor is not None:  # graphs of torch.compile read it where it lies
                torch._dynamo.mark_static_address(tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> FoldedWeights:
        return self  # of the model, whatever copies a cache

    def rope_query(self, q_rope: torch.Tensor) -> torch.Tensor:
        """N^T q / factor of RoPE parts of queries, [..., heads, rope_dim], N their basis."""
        if self.rope.matrix is not None:
            q_rope = self.rope.transform_query(q_rope)
        return q_rope if self.factor == 1 else q_rope / self.factor

    @property
    def is_current(self) -> bool:
        """Whether the weights that were folded have not changed in place since."""
        return self._version == _version_of(self._source)

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether the weights are still those that were folded."""
        same = self._source.data_ptr() == weight.data_ptr() and self._source.dtype == weight.dtype
        return same and self.is_current


def _version_of(weight: torch.Tensor) -> int | None:
    """torch's count of in-place changes, without those through .data; None if torch keeps none."""
    return None if weight.is_inference() else weight._version


class LatentHeads:
    """The heads of one layer.

    Products have the dtype of the weights: each step would read a float32 copy, and 16-bit products
    sum in float32 anyway.

    Args:
        module: of transformers, that attends.
        name: of the layer, for errors.
        latent_dim, rope_dim: elements of its latent rows.

    Raises:
        UnsupportedModelError: it makes keys and values otherwise, or cannot absorb its weight.
    """

    def __init__(
        self, module: torch.nn.Module, name: str, *, latent_dim: int, rope_dim: int
    ) -> None:
        if getattr(module, "indexer", None) is not None:
            raise UnsupportedModelError(
                f"{name} attends to tokens that an indexer chooses (DeepSeek sparse attention): "
                "a LatentKVCache attends to all of them"
            )
        up: Any = getattr(module, "kv_b_proj", None)
        weight = _of_rank(getattr(up, "weight", None))
        if not hasattr(module, "expand_kv"):
            raise UnsupportedModelError(f"{name} {_NEWER}")
        is_linear = type(up) is torch.nn.Linear and up.bias is None
        # tensors of other types hold quantized weights (torchao), or parts of them
        if not is_linear or type(weight) not in (torch.Tensor, torch.nn.Parameter):
            made = f"Linear of a {type(weight).__name__}" if is_linear else type(up).__name__
            raise UnsupportedModelError(
                f"{name} makes keys and values by {made}, whose weight cannot be "
                "absorbed: kv_b_proj has to be a torch.nn.Linear without bias, so load the model "
                "without quantization or adapters"
            )
        self.name, self.rope_dim = name, rope_dim
        self.weight: torch.Tensor = weight
        self.folded: FoldedWeights | None = None  # of rows in a basis, see read_in_basis
        self._module = module
        self.nope_dim = int(getattr(module, "qk_nope_head_dim", 0))
        self.v_dim = int(getattr(module, "v_head_dim", 0))
        rows, columns = self.weight.shape
        if not self._head_rows or rows % self._head_rows or columns != latent_dim:
            raise UnsupportedModelError(
                f"{name} has kv_b_proj {[rows, columns]}: a head has {self._head_rows} rows "
                f"(qk_nope_head_dim and v_head_dim) of {latent_dim} latents"
            )
        if not torch.compiler.is_compiling():  # the prompt before has shown it (QuantizedCache)
            self._check_same(module)

    @property
    def _head_rows(self) -> int:
        return self.nope_dim + self.v_dim

    @property
    def output_dim(self) -> int:
        return len(self._of_heads) * self.v_dim

    def _check_same(self, module: Any) -> None:
        """Raise unless the module expands latents as this does; each is looked at once."""
        if module in _checked:
            return
        weight = self.weight
        if weight.is_meta:
            raise UnsupportedModelError(
                f"{self.name} has its weights elsewhere (device_map): load the model on one device"
            )
        elements = weight.shape[1] + self.rope_dim
        row = torch.linspace(-1, 1, elements, dtype=weight.dtype, device=weight.device)
        latent, rope = row[None, None, None].split([weight.shape[1], self.rope_dim], dim=-1)
        with torch.no_grad():
            theirs, ours = module.expand_kv(latent, rope), self._expand(latent, rope, weight)
        for given, own in zip(theirs, ours, strict=True):
            fits, most = given.shape == own.shape, SAME * float(own.norm())
            if not (fits and float((given - own).norm()) <= most):
                raise UnsupportedModelError(
                    f"{self.name} makes other keys and values of latents than DeepSeek's: the "
                    "weight of kv_b_proj has the rows of K and then those of V of each head"
                )
        _checked.add(module)

    def check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raise unless query, key and value are expanded, of all heads and the new tokens."""
        heads = self.weight.shape[0] // self._head_rows
        rows = query.shape[0], heads, query.shape[2]
        wanted = (*rows, self.nope_dim + self.rope_dim), (*rows, self.v_dim)
        if query.shape != wanted[0] or (key.shape, value.shape) != wanted:
            raise UnsupportedModelError(
                f"{self.name} attends with queries {list(query.shape)} to keys {list(key.shape)} "
                f"and values {list(value.shape)}: its latents make keys {list(wanted[0])} and "
                f"values {list(wanted[1])}"
            )

    def read_in_basis(self, cache: LatentKVCache, at: int) -> FoldedWeights | None:
        """Folded weights of a cache's layer, or None without a basis; cached outside of graphs."""
        basis, self.folded = cache.layers[at].basis, cache.folded[at]
        if basis is None or basis.is_identity:
            return None
        if torch.compiler.is_compiling():  # a call before has folded them
            return self.folded
        weight = self._of_heads.detach()
        if self.folded is not None and self.folded.is_of(weight):
            return self.folded
        if debug.is_recorded(weight):
            raise UnsupportedModelError(
                f"{self.name} meets rows in a plan's bases for the first time while a CUDA graph "
                "is captured: let the model read a token into the cache before"
            )
        known = _folded.setdefault(self._module, WeakValueDictionary())
        found = known.get(basis.k)
        if found is None or found.rope is not basis.v or not found.is_of(weight):
            known[basis.k] = found = FoldedWeights(weight, self.nope_dim, basis)
        self.folded = cache.folded[at] = found
        return found

    def absorb(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Absorbed queries for latent rows, in their basis if there is one.

        Args:
            query: [..., heads, nope_dim + rope_dim].

        Returns:
            W_UK^T q [..., heads, latent_dim], and the RoPE part [..., heads, rope_dim].
        """
        q_nope, q_rope = query.split([self.nope_dim, self.rope_dim], dim=-1)
        weight = self._of_heads if self.folded is None else self.folded.weight
        absorbed = torch.einsum("...hd,hdl->...hl", q_nope, weight[:, : self.nope_dim])
        if self.folded is not None:
            q_rope = self.folded.rope_query(q_rope)
        # autocast makes the first alone 16 bit, a basis the second float32
        return absorbed.to(query.dtype), q_rope.to(query.dtype)

    def scale_of(self, sm_scale: float | None) -> float | None:
        """The scale of scores of absorbed queries, from the model's own."""
        if sm_scale is None or self.folded is None:
            return sm_scale
        return sm_scale * self.folded.factor

    def values(self, latents: torch.Tensor) -> torch.Tensor:
        """W_UV of each head by what it attended to: [..., heads, latent_dim] -> [..., v_dim]."""
        weight = self._of_heads if self.folded is None else self.folded.weight
        found = torch.einsum("...hl,hvl->...hv", latents, weight[:, self.nope_dim :])
        bias = None if self.folded is None else self.folded.bias
        return found if bias is None else found + bias.to(found.dtype)

    def output_factor(self, projection: torch.Tensor) -> torch.Tensor:
        """F [heads * v_dim, latent_dim], float32: |F e|^2 = sum over the heads of |W_O W_UV e|^2.

        projection is W_O of all heads, [hidden, heads * v_dim].
        """
        up = self._of_heads[:, self.nope_dim :].detach().float()
        heads = projection.detach().float().unflatten(1, (len(up), self.v_dim)).transpose(0, 1)
        factor: torch.Tensor = torch.linalg.qr(heads, mode="r").R @ up
        return factor.flatten(0, 1)

    def attend(
        self,
        query: torch.Tensor,
        latents: torch.Tensor,
        ropes: torch.Tensor,
        lens: Sequence[int],
        sm_scale: float | None,
    ) -> torch.Tensor:
        """Attend causally with the last tokens of each sequence, to expanded keys and values.

        Args:
            query: [batch, heads, q_len, nope_dim + rope_dim].
            latents: [batch, 1, longest or more, latent_dim], the dtype of query.
            ropes: [batch, 1, longest or more, rope_dim].
            lens, sm_scale: as in causal_attention.

        Returns:
            [batch, heads, q_len, v_dim].
        """
        # of a head and token: K and V as they are made, then K with its RoPE part beside it
        row = 2 * self.nope_dim + self.v_dim + self.rope_dim
        elements = latents.shape[0] * latents.shape[2] * row
        heads = max(EXPANDED // (elements * latents.element_size()), 1)
        found = []
        for begin in range(0, query.shape[1], heads):
            rows = slice(begin * self._head_rows, (begin + heads) * self._head_rows)
            keys, values = self._expand(latents, ropes, self.weight[rows])
            some = query[:, begin : begin + heads]
            found.append(causal_attention(some, keys, values, lens, sm_scale))
            del keys, values  # before there are others
        return torch.cat(found, dim=1)

    def _expand(
        self, latents: torch.Tensor, ropes: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the heads whose rows these are."""
        expanded = linear(latents[:, 0], weight).unflatten(-1, (-1, self._head_rows))
        keys, values = expanded.transpose(1, 2).split([self.nope_dim, self.v_dim], dim=-1)
        ropes = ropes.expand(-1, keys.shape[1], -1, -1)
        return torch.cat([keys, ropes], dim=-1), values

    @property
    def _of_heads(self) -> torch.Tensor:
        """The weight as [heads, nope_dim + v_dim, latent_dim]."""
        rows = self._head_rows
        return self.weight.view(len(self.weight) // rows, rows, -1)


def _of_rank(weight: Any) -> Any:
    """A weight; of one that transformers' tp_plan cuts by heads, the rows that are here."""
    placements: Any = getattr(weight, "placements", ())  # of a DTensor
    return weight.to_local() if len(placements) == 1 and placements[0].is_shard(0) else weight


_checked: WeakSet[torch.nn.Module] = WeakSet()
# of a module, by the basis of latents; caches keep the values
_folded: WeakKeyDictionary[torch.nn.Module, WeakValueDictionary[Basis, FoldedWeights]]
_folded = WeakKeyDictionary()


def hands_latents(module: torch.nn.Module) -> bool:
    """Whether a module attends to all tokens (no indexer) and caches latent rows."""
    is_whole = getattr(module, "indexer", None) is None
    return hasattr(module, "kv_b_proj") and hasattr(module, "expand_kv") and is_whole


def heads_of(module: torch.nn.Module, latent_dim: int, rope_dim: int) -> LatentHeads:
    name = f"layer {getattr(module, 'layer_idx', None)} ({type(module).__name__})"
    return LatentHeads(module, name, latent_dim=latent_dim, rope_dim=rope_dim)


def check_latents(layer: int, keys: torch.Tensor, values: torch.Tensor, fmt: LatentFormat) -> None:
    """Raise UnsupportedModelError unless a layer caches latent rows of this shape."""
    heads, dims = (keys.shape[1], values.shape[1]), (keys.shape[3], values.shape[3])
    if heads != (1, 1) or dims != (fmt.latent_dim, fmt.rope_dim):
        raise UnsupportedModelError(f"layer {layer} {_NEWER}")
