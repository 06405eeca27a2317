"""LatentKVCache: a KVCache with the latent for K and the RoPE part for V, in one row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch

from ..errors import ConfigError, ShapeError, UnsupportedError, shown
from ..ops.attention import State
from ..ops.mla import attend_latents, check_call, check_kernels, check_queries
from ..rows.arguments import check_flag, check_size, check_tensors
from ..rows.basis import LayerBasis
from ..rows.bound import kind_of
from ..rows.call import LatentCall
from ..rows.kind import LATENT
from ..rows.latent import LatentFormat
from .checks import Counts, Devices, check_options, devices_of, per_layer
from .contiguous import KVCache
from .layer import ROLLBACK, LayerCache

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Unpack

    from ..rows.options import LatentAttendOptions, LatentStepOptions, Maybe, No, Yes
    from ..rows.variant import AttentionVariant


DEFAULT_FORMAT = "int8-g4"
LatentFormats = str | LatentFormat | Sequence[str | LatentFormat]


def latent_formats(
    fmt: LatentFormats, num_layers: int, latent_dim: int, rope_dim: int
) -> list[LatentFormat]:
    """One format for each layer; ConfigError for another number, or a format of other sizes."""
    parse = partial(LatentFormat.parse, latent_dim=latent_dim, rope_dim=rope_dim)
    return per_layer("fmt", fmt, num_layers, parse)


def _refuse_options(variant: object) -> NoReturn:
    """Raise for a variant, or a missing sm_scale."""
    if variant is not None:
        raise UnsupportedError(f"variant is {shown(variant)}: latent rows have none, leave it out")
    raise ConfigError("sm_scale is None: give the model's, latents do not tell it")


class LatentLayerCache(LayerCache):
    """The latent rows of one layer.

    packed [batch, 1, packed_len, row_bytes] and exact_rows [batch, 1, sink_len + ring_len, 16-bit
    row bytes] hold latents (k) and RoPE parts (v) side by side.
    """

    row_kind = LATENT
    sides = LATENT.sides
    packed: torch.Tensor
    exact_rows: torch.Tensor


class LatentKVCache(KVCache):
    """Latent rows of all layers of a model with multi-head latent attention (DeepSeek V2, V3 ...).

    One row a token serves all heads; queries come absorbed, see mla_decode_attention. It is a
    KVCache of one KV head without windows, whose K is the latent and V the RoPE part, also in
    errors. On CUDA queries are bfloat16, or float16 with exact_format="fp16" (RoPE parts too).

    Rows may have a basis in each layer (rows/basis.py), which queries and results do not show. With
    M and offset of the latents, N of the RoPE parts:

        stored      M^-1 (latent - offset)      N^-1 (rope - its offset)
        queries     M^T q_latent                N^T q_rope
        results     M (sum of p stored) + offset, as the sum of p is 1

    With M and offset in its weights a model skips these products: in_basis of attend and step.

    Args:
        num_layers: layers with attention.
        batch: sequences.
        max_seq_len: tokens that a sequence has room for.
        fmt: format of the packed rows, a name ("int4-g8+int8-g4") or a LatentFormat, or one
            of these per layer.
        latent_dim: elements of a latent, 512 or 256 (kv_lora_rank of the model).
        rope_dim: elements of the RoPE part, 64 or 32 (qk_rope_head_dim).
        sink_len, recent_len, exact_format, device, rollback_len: as in KVCache.
        bases: the transform of each layer's rows (see from_plan), k of the latents and v of the
            RoPE parts, both of one head and without feedback; None for none.

    Raises:
        ConfigError: a size, a format or a device that does not exist, or takes too much memory.
        ShapeError: a basis is of other sizes.
        UnsupportedError: a basis with feedback; or, on CUDA, a format without kernels: latents
            of fewer than 4 groups, and RoPE parts of others, or of 32 elements unless in 16 bit.

    Example:
        >>> import torch
        >>> from kvquant import LatentKVCache
        >>> cache = LatentKVCache(num_layers=1, batch=2, max_seq_len=64, fmt="int4-g8")
        >>> cache.append(0, torch.randn(2, 1, 10, 512), torch.randn(2, 1, 10, 64))
        >>> q_latent, q_rope = torch.randn(2, 16, 512), torch.randn(2, 16, 64)
        >>> cache.attend(0, q_latent, q_rope, sm_scale=192**-0.5).shape
        torch.Size([2, 16, 512])
    """

    LAYER = LatentLayerCache
    folded: list[Any]  # of each layer, what a model reads it with (hf/models/latent.py), or None

    def __init__(
        self,
        num_layers: int,
        batch: int,
        max_seq_len: int,
        *,
        fmt: LatentFormats = DEFAULT_FORMAT,
        latent_dim: int = 512,
        rope_dim: int = 64,
        sink_len: int = 4,
        recent_len: int = 128,
        exact_format: str = "bf16",
        device: Devices = "cpu",
        bases: Sequence[LayerBasis] | None = None,
        rollback_len: int = ROLLBACK,
    ) -> None:
        num_layers = check_size("num_layers", num_layers, at_least=1)
        formats = latent_formats(fmt, num_layers, latent_dim, rope_dim)
        if any(one.type == "cuda" for one in devices_of(device, or_meta=True)):
            check_kernels(formats)
        super().__init__(
            num_layers,
            batch,
            1,
            latent_dim,
            max_seq_len,
            k_format=[one.latent for one in formats],
            v_format=[one.rope for one in formats],
            sink_len=sink_len,
            recent_len=recent_len,
            exact_format=exact_format,
            device=device,
            bases=bases,
            rollback_len=rollback_len,
        )
        self.folded = [None] * num_layers

    @property
    def formats(self) -> list[LatentFormat]:
        """Format of the packed rows of each layer."""
        return [LatentFormat(layer.k_format, layer.v_format) for layer in self.layers]

    def append(
        self, layer: int, latent: torch.Tensor, rope: torch.Tensor, new_lens: Counts | None = None
    ) -> None:
        """Append new tokens, latent and rope of [batch, 1, new_tokens, dim], to a layer.

        The 1 is the one KV head that all heads share. It raises as KVCache.append.

        Args:
            layer, new_lens: as in KVCache.append.
            latent: [batch, 1, new_tokens, latent_dim], float32, bfloat16 or float16, after its
                norm.
            rope: [batch, 1, new_tokens, rope_dim], after RoPE.

        Example:
            >>> import torch
            >>> from kvquant import LatentKVCache
            >>> cache = LatentKVCache(num_layers=1, batch=2, max_seq_len=64)
            >>> latent, rope = torch.randn(2, 10, 512), torch.randn(2, 10, 64)  # as a model has it
            >>> cache.append(0, latent.unsqueeze(1), rope.unsqueeze(1))
            >>> cache.seq_lens.tolist()
            [10, 10]
        """
        super().append(layer, latent, rope, new_lens)

    @overload
    def attend(
        self,
        layer: int,
        q_latent: Tensor,
        q_rope: Maybe = ...,
        q_lens: Maybe = ...,
        **options: Unpack[LatentAttendOptions[No]],
    ) -> Tensor: ...
    @overload
    def attend(
        self,
        layer: int,
        q_latent: Tensor,
        q_rope: Maybe = ...,
        q_lens: Maybe = ...,
        **options: Unpack[LatentAttendOptions[Yes]],
    ) -> State: ...
    def attend(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor | None = None,
        q_lens: torch.Tensor | None = None,
        *,
        variant: AttentionVariant | None = None,
        sm_scale: float | None = None,
        in_step: bool = False,
        in_basis: bool = False,
        return_lse: bool = False,
        num_splits: int | None = None,
        backend: str | None = None,
    ) -> torch.Tensor | State:
        """Attend with queries [batch, num_heads, dim], or [batch, q_len, num_heads, dim].

        A query belongs to the last token of a sequence, or q_len of them to its last q_len tokens.
        Tokens come before heads; transpose(1, 2) brings Hugging Face's order into this one.

        Args:
            layer: index of the layer; append these tokens' rows to it first.
            q_latent, q_rope, q_lens, sm_scale: as in mla_decode_attention. All but q_lens are
                required; the defaults exist because KVCache.attend takes fewer arguments.
            variant: None only.
            in_step: let all queries see the rows as the first one does: see KVCache.step.
            in_basis: queries come as M^T q_latent and N^T q_rope, and results stay in the
                basis: the caller computes M out + offset. lse then lacks the scores of the offsets.
            return_lse, num_splits, backend: as in mla_decode_attention.

        Returns:
            As mla_decode_attention.

        Raises:
            As mla_decode_attention; ShapeError if the layer holds no tokens (see KVCache.attend),
            or, without q_lens, for more queries than tokens that the host knows.
        """
        check_tensors(q_latent=q_latent, q_rope=q_rope)
        assert q_rope is not None
        check_flag("in_step", in_step)
        check_flag("in_basis", in_basis)
        if variant is not None or sm_scale is None:
            _refuse_options(variant)
        if q_lens is not None:
            check_tensors(q_lens=q_lens)
        at = self._layer(layer)
        at.check_filled(layer)
        q_len = q_latent.shape[1] if q_latent.ndim == 4 else 1
        # one KV head fits any number of heads, so their axes may be swapped; a graph that looked at
        # the length would be made anew for each
        held = None if torch.compiler.is_compiling() else at.longest
        if held and q_len > held and q_lens is None:
            raise ShapeError(
                f"q_latent is {list(q_latent.shape)}, of the last {q_len} tokens, and layer "
                f"{layer} holds {held}: it must be [batch, q_len, num_heads, {q_latent.shape[-1]}] "
                "behind the append of its tokens. What has Hugging Face's order, [batch, "
                "num_heads, q_len, ...], is q.transpose(1, 2)"
            )
        segments, _ = at.seen_by(layer, q_len, q_lens, None, in_step=in_step)
        options = sm_scale, num_splits, return_lse, q_lens, None, backend
        call = LatentCall(q_latent, q_rope, segments, *options)
        out, lse = attend_latents(call, None if in_basis else at.basis, at.seq_lens)
        return out if lse is None else (out, lse)

    @overload
    def step(
        self,
        layer: int,
        q_latent: Tensor,
        q_rope: Maybe = ...,
        latent: Maybe = ...,
        rope: Maybe = ...,
        **options: Unpack[LatentStepOptions[No]],
    ) -> Tensor: ...
    @overload
    def step(
        self,
        layer: int,
        q_latent: Tensor,
        q_rope: Maybe = ...,
        latent: Maybe = ...,
        rope: Maybe = ...,
        **options: Unpack[LatentStepOptions[Yes]],
    ) -> State: ...
    def step(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor | None = None,
        latent: torch.Tensor | None = None,
        rope: torch.Tensor | None = None,
        *,
        variant: AttentionVariant | None = None,
        sm_scale: float | None = None,
        in_basis: bool = False,
        return_lse: bool = False,
        num_splits: int | None = None,
        backend: str | None = None,
    ) -> torch.Tensor | State:
        """Append rows [batch, 1, tokens, dim], attend with queries [batch, tokens, heads, dim].

        With one token queries may be [batch, heads, dim]. See KVCache.step for several tokens.

        Args:
            layer: index of the layer.
            q_latent: [batch, num_heads, latent_dim], or [batch, new_tokens, num_heads, latent_dim].
            q_rope: the same but for its last axis, rope_dim.
            latent, rope: as in append; required.
            variant, sm_scale, in_basis: as in attend; latent and rope are always outside of the
                basis.
            return_lse, num_splits, backend: as in mla_decode_attention.

        Returns:
            As mla_decode_attention.

        Raises:
            As append and attend; nothing is appended if the queries or an option are invalid.

        Example:
            >>> import torch
            >>> from kvquant import LatentKVCache
            >>> cache = LatentKVCache(num_layers=1, batch=2, max_seq_len=64)
            >>> latent, rope = torch.randn(2, 1, 3, 512), torch.randn(2, 1, 3, 64)
            >>> q = torch.randn(2, 3, 16, 512), torch.randn(2, 3, 16, 64)  # [batch, tokens, heads,
            >>> cache.step(0, *q, latent, rope, sm_scale=192**-0.5).shape  # dim] each
            torch.Size([2, 3, 16, 512])
        """
        at = self._layer(layer)
        can_bind = backend is None and not torch.compiler.is_compiling()
        bound = at.bound.find(q_latent, q_rope, latent, rope) if can_bind else None
        if bound is None:  # else such a step was taken before
            check_tensors(q_latent=q_latent, q_rope=q_rope, latent=latent, rope=rope)
        assert q_rope is not None and latent is not None and rope is not None
        if variant is not None or sm_scale is None:
            _refuse_options(variant)
        if bound is None:
            at.check_step(q_latent, latent, rope, "q_latent")
            at.check_query(q_latent)
            fmt, exact = *at.formats, *at.exact_formats
            assert isinstance(fmt, LatentFormat) and isinstance(exact, LatentFormat)
            check_queries(q_latent, q_rope, fmt)
            check_call(q_latent, [fmt, exact], sm_scale, backend)
        check_options(q_latent, sm_scale, return_lse, num_splits, backend)
        check_flag("in_basis", in_basis)
        self._change(latent)
        at.append(latent, rope, None, *self.counters_of(layer), None, bound)
        segments, _ = at.seen_by(layer, latent.shape[2], None, None, in_step=True)
        call = LatentCall(
            q_latent, q_rope, segments, sm_scale, num_splits, return_lse, backend=backend
        )
        out, lse = attend_latents(call, None if in_basis else at.basis, at.seq_lens)
        if bound is None and can_bind and at.bound:
            at.bound.keep(kind_of(q_latent, q_rope, latent, rope), at.bound.find(latent, rope))
        return out if lse is None else (out, lse)

    def check_kernels(self, query: str) -> None:
        """Raise UnsupportedError unless CUDA serves its rows with "bf16" or "fp16" queries."""
        check_kernels(self.formats, query)
