"""LatentPagedBatch: steps of several sequences of a LatentPagedKVCache."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, overload

import torch

from ..cache.checks import check_options
from ..errors import UnsupportedError
from ..ops.attention import State
from ..ops.mla import attend_latents, check_call, check_queries
from ..rows.arguments import check_kind, check_tensors
from ..rows.call import LatentCall, LatentPrefix
from ..rows.latent import LatentFormat
from .batch import Seen, StepBatch
from .cache import PagedKVCache
from .latent import LatentPagedKVCache
from .shared_prefix import pays_of_latents

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from ..rows.options import LatentOptions, No, Yes


class LatentPagedBatch(StepBatch):
    """A PagedBatch over latent rows; extend, positions and CUDA graphs work as there.

    Args:
        cache: the cache.
        max_batch: sequences of a step.
        max_tokens: new tokens of a step; max_batch when None.
        shared_prefix: as in PagedBatch. It saves time with few heads; with many, products take
            the time.

    Raises:
        ConfigError: a size that is not possible, or a cache that is no LatentPagedKVCache.

    Example:
        >>> import torch
        >>> from kvquant import LatentPagedBatch, LatentPagedKVCache
        >>> paged = LatentPagedKVCache(1, num_pages=8, max_seq_len=256)
        >>> batch = LatentPagedBatch(paged, max_batch=2, max_tokens=64)
        >>> present = [paged.allocate(name) for name in ("a", "b")]
        >>> with batch.extend(["a", "b"], [3, 5]):  # 3 new tokens of a, then 5 of b
        ...     batch.append(0, torch.randn(8, 1, 512), torch.randn(8, 1, 64))
        >>> with batch.extend(["a", "b"]):
        ...     latent, rope = torch.randn(2, 1, 512), torch.randn(2, 1, 64)
        ...     q_latent, q_rope = torch.randn(2, 16, 512), torch.randn(2, 16, 64)
        ...     out = batch.step(0, q_latent, q_rope, latent, rope, sm_scale=192**-0.5)
        >>> out.shape
        torch.Size([2, 16, 512])
    """

    cache: LatentPagedKVCache

    @staticmethod
    def _check_cache(cache: PagedKVCache) -> None:
        how = "give a LatentPagedKVCache; PagedBatch takes a PagedKVCache of keys and values"
        check_kind("cache", cache, LatentPagedKVCache, how)

    def append(self, layer: int, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """Append the step's new tokens, rows of [num_tokens, 1, dim], to a layer.

        Tokens of all sequences follow one another. It raises as PagedBatch.append.

        Args:
            layer: index of the layer.
            latent: [num_tokens, 1, latent_dim], bfloat16 or float16 (on the CPU float32 too),
                after its norm; rows after the tokens of the step are not read.
            rope: [num_tokens, 1, rope_dim], after RoPE.
        """
        self._append(layer, latent, rope, None, None)

    @overload
    def attend(
        self, layer: int, q_latent: Tensor, q_rope: Tensor, **options: Unpack[LatentOptions[No]]
    ) -> Tensor: ...
    @overload
    def attend(
        self, layer: int, q_latent: Tensor, q_rope: Tensor, **options: Unpack[LatentOptions[Yes]]
    ) -> State: ...
    def attend(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        *,
        sm_scale: float,
        return_lse: bool = False,
        num_splits: int | None = None,
        backend: str | None = None,
        q_indptr: object = None,
    ) -> torch.Tensor | State:
        """Attend with queries [batch, num_heads, dim], or [batch, q_len, num_heads, dim].

        One query belongs to the last token of a sequence, several to its new ones; see
        PagedBatch.attend for what they see.

        Args:
            layer: index of the layer; append the step's rows to it first.
            q_latent: [batch, num_heads, latent_dim], at least a row for each sequence: the
                query of its last token. Or [batch, q_len, num_heads, latent_dim]: those of its new
                tokens, then padding.
            q_rope: the same but for its last axis, rope_dim.
            sm_scale, return_lse, num_splits, backend: as in mla_decode_attention.
            q_indptr: None, because latent rows have no ragged queries.

        Returns:
            As mla_decode_attention; zeros for places without a sequence, and rows without a query.

        Raises:
            As mla_decode_attention; ShapeError and ConfigError as PagedBatch.attend.
            UnsupportedError: q_indptr is given.
        """
        _check_padded(q_indptr)
        check_tensors(q_latent=q_latent, q_rope=q_rope)
        options = sm_scale, num_splits, return_lse, backend
        return self._attend(layer, q_latent, q_rope, self._seen_by(layer, q_latent), *options)

    def _attend(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        seen: Seen,
        sm_scale: float,
        num_splits: int | None,
        return_lse: bool,
        backend: str | None,
    ) -> torch.Tensor | State:
        parts, q_lens, fixed = seen
        rows, prefix = parts.whole, None
        if self._reads_once(fixed):
            assert parts.prefix is not None
            shares = self._staged.tensors["shares"][: len(q_latent)]
            rows, prefix = parts.own, LatentPrefix(parts.prefix, shares)
        options = sm_scale, num_splits, return_lse, q_lens, prefix, backend
        call = LatentCall(q_latent, q_rope, rows, *options)
        basis, seq_lens = self.cache.rows.layers[layer].basis, self.seq_lens[: len(q_latent)]
        out, lse = attend_latents(call, basis, seq_lens)
        return out if lse is None else (out, lse)

    @overload
    def step(
        self,
        layer: int,
        q_latent: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        rope: Tensor,
        **options: Unpack[LatentOptions[No]],
    ) -> Tensor: ...
    @overload
    def step(
        self,
        layer: int,
        q_latent: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        rope: Tensor,
        **options: Unpack[LatentOptions[Yes]],
    ) -> State: ...
    def step(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        *,
        sm_scale: float,
        return_lse: bool = False,
        num_splits: int | None = None,
        backend: str | None = None,
        q_indptr: object = None,
    ) -> torch.Tensor | State:
        """Append rows [num_tokens, 1, dim], and attend with queries of each sequence.

        Rows have no axis of sequences, queries have one. The result is that of append and attend.

        Args:
            layer: index of the layer.
            q_latent, q_rope: as in attend.
            latent, rope: as in append.
            sm_scale, return_lse, num_splits, backend, q_indptr: as in attend.

        Returns:
            As attend.

        Raises:
            As append and attend; nothing is appended if a query or an option is invalid.
        """
        _check_padded(q_indptr)
        check_tensors(q_latent=q_latent, q_rope=q_rope, latent=latent, rope=rope)
        is_plain = num_splits is None is backend and type(return_lse) is bool
        is_scale = type(sm_scale) is float and 0 < sm_scale < math.inf
        if not (is_plain and is_scale and self._takes(q_latent)):
            check_call(q_latent, [], sm_scale, backend)
            check_options(q_latent, sm_scale, return_lse, num_splits, backend)
        seen = self._seen_by(layer, q_latent, in_step=True)
        at = self.cache.rows.layers[layer]
        check_queries(q_latent, q_rope, LatentFormat(at.k_format, at.v_format))
        self._append(layer, latent, rope, None, None)
        options = sm_scale, num_splits, return_lse, backend
        return self._attend(layer, q_latent, q_rope, seen, *options)

    def pays(self, batch: int, num_members: int, tokens: int, ratio: int) -> bool:
        return pays_of_latents(batch, num_members, tokens, ratio)


def _check_padded(q_indptr: object) -> None:
    if q_indptr is not None:
        raise UnsupportedError(
            "q_indptr is given, and latent rows have no ragged queries: give padded queries "
            "[batch, q_len, num_heads, dim], those of a sequence's new tokens in its first rows"
        )
