"""LatentKVCache: a KVCache whose K and V are the two parts of one latent row.

The latent stands where K does, the RoPE part where V does, of one KV head. All bookkeeping is that
of KVCache; two things differ: both rows of a token lie in one row of memory, and attention reads
that row whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NoReturn, overload

import torch

from ..errors import ConfigError, ShapeError, UnsupportedError
from ..ops.attention import State
from ..ops.mla import attend_latents, check_call, check_kernels, check_queries, latent_segment
from ..rows.arguments import check_flag, check_size, check_tensors
from ..rows.format import RowFormat
from ..rows.latent import LatentFormat
from ..rows.segment import Segment
from .checks import Counts, Devices, check_options, devices_of
from .contiguous import KVCache
from .layer import ROLLBACK, Kind, LayerCache, rows_of

DEFAULT_FORMAT = "int8-g4"
LatentFormats = str | LatentFormat | Sequence[str | LatentFormat]


class LatentLayerCache(LayerCache):
    """The latent rows of one layer.

    Attributes:
        packed: [batch, 1, packed_len, row_bytes]: k_packed, the latents, and v_packed, the RoPE
            parts, side by side.
        exact_rows: [batch, 1, sink_len + ring_len, 16-bit row bytes], likewise.
    """

    def _make_rows(self, batch: int, num_kv_heads: int, device: torch.device) -> None:
        self.fmt = LatentFormat(self.k_format, self.v_format)
        self.exact = LatentFormat(self.k_exact, self.v_exact)
        self.packed = rows_of(batch, num_kv_heads, self.packed_len, self.fmt, device)
        self.exact_rows = rows_of(batch, num_kv_heads, self.split.exact_len, self.exact, device)

    @property
    def k_packed(self) -> torch.Tensor:  # type: ignore[override]
        """[batch, 1, packed_len, latent bytes], of packed."""
        return self.packed[..., : self.k_format.row_bytes]

    @property
    def v_packed(self) -> torch.Tensor:  # type: ignore[override]
        """[batch, 1, packed_len, RoPE bytes], of packed."""
        return self.packed[..., self.k_format.row_bytes :]

    @property
    def k_exact_rows(self) -> torch.Tensor:  # type: ignore[override]
        """[batch, 1, exact_len, 16-bit latent bytes], of exact_rows."""
        return self.exact_rows[..., : self.k_exact.row_bytes]

    @property
    def v_exact_rows(self) -> torch.Tensor:  # type: ignore[override]
        """[batch, 1, exact_len, 16-bit RoPE bytes], of exact_rows."""
        return self.exact_rows[..., self.k_exact.row_bytes :]

    def _packed_segment(self, lens: torch.Tensor, starts: torch.Tensor | None) -> Segment:
        return latent_segment(self.packed, lens, self.fmt, starts)

    def _exact_segment(self, lens: torch.Tensor, starts: torch.Tensor | None) -> Segment:
        return latent_segment(self.exact_rows, lens, self.exact, starts, sinks=self.sink_len)


class LatentKVCache(KVCache):
    """Latent rows of all layers of a model with multi-head latent attention (DeepSeek V2, V3 ...).

    One row a token serves all heads; queries come absorbed, see mla_decode_attention. It is a
    KVCache of one KV head whose K is the latent and whose V is the RoPE part: crop, reorder, fork,
    repeat, grow, attempt, reset, check, seq_lens and dequantized are those of KVCache, and errors
    call the latent k and the RoPE part v. It has no bases and no windows. On CUDA queries are of
    bfloat16, or with float16 rows (exact_format="fp16", RoPE parts too) of float16.

    Args:
        num_layers: layers with attention.
        batch: sequences.
        max_seq_len: tokens that a sequence has room for.
        fmt: format of the packed rows, a name ("int4-g8+fp8-g4") or a LatentFormat, or one of these
            per layer.
        latent_dim: elements of a latent, 512 or 256 (kv_lora_rank of the model).
        rope_dim: elements of the RoPE part, 64 or 32 (qk_rope_head_dim).
        sink_len, recent_len, exact_format, device, rollback_len: as in KVCache.

    Raises:
        ConfigError: a size, a format or a device that does not exist, or takes too much memory.
        UnsupportedError: on CUDA a format of fewer than 4 groups: rows have no kernel there.

    Example:
        >>> import torch
        >>> from kvquant import LatentKVCache
        >>> cache = LatentKVCache(num_layers=1, batch=2, max_seq_len=64, fmt="int4-g8")
        >>> cache.append(0, torch.randn(2, 1, 10, 512), torch.randn(2, 1, 10, 64))
        >>> q_latent, q_rope = torch.randn(2, 16, 512), torch.randn(2, 16, 64)
        >>> cache.attend(0, q_latent, q_rope, sm_scale=192**-0.5).shape
        torch.Size([2, 16, 512])
    """

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
        rollback_len: int = ROLLBACK,
    ) -> None:
        num_layers = check_size("num_layers", num_layers, at_least=1)
        if isinstance(fmt, str | LatentFormat) or not isinstance(fmt, Sequence):
            formats = [LatentFormat.parse(fmt, latent_dim, rope_dim)] * num_layers
        else:
            formats = [LatentFormat.parse(one, latent_dim, rope_dim) for one in fmt]
        if len(formats) != num_layers:
            raise ConfigError(f"fmt lists {len(formats)} formats for {num_layers} layers")
        if any(one.type == "cuda" for one in devices_of(device)):
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
            rollback_len=rollback_len,
        )

    @classmethod
    def from_plan(cls, *args: object, **options: object) -> NoReturn:
        """Refused: plans are of keys and values of heads."""
        raise UnsupportedError("there are no plans of latent rows: give LatentKVCache a format")

    def __repr__(self) -> str:
        names = " or ".join(dict.fromkeys(str(fmt) for fmt in self.formats))
        fmt = self.formats[0]
        return (
            f"LatentKVCache({self.num_layers} layers, {self.batch} sequences, {fmt.latent_dim} "
            f"latents and {fmt.rope_dim} RoPE elements in {names}, max_seq_len {self.max_seq_len}, "
            f"{self.exact_format} sinks and recent tokens: {self.sink_len} and {self.recent_len}, "
            f"on {self._where})"
        )

    @property
    def formats(self) -> list[LatentFormat]:
        """Format of the packed rows of each layer."""
        return [LatentFormat(layer.k_format, layer.v_format) for layer in self.layers]

    def append(
        self,
        layer: int,
        latent: torch.Tensor,
        rope: torch.Tensor,
        new_lens: Counts | None = None,
    ) -> None:
        """Add tokens to the end of each sequence of a layer; errors as of KVCache.append.

        Args:
            layer: index of the layer.
            latent: [batch, 1, new_tokens, latent_dim], float32, bfloat16 or float16, after
                its norm.
            rope: [batch, 1, new_tokens, rope_dim], after RoPE.
            new_lens: [batch]: how many of the new_tokens, the first ones, belong to each sequence;
                all when None.
        """
        super().append(layer, latent, rope, new_lens)

    @overload  # type: ignore[override]
    def attend(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        q_lens: torch.Tensor | None = ...,
        *,
        sm_scale: float,
        in_step: bool = ...,
        return_lse: Literal[False] = ...,
        num_splits: int | None = ...,
        backend: str | None = ...,
    ) -> torch.Tensor: ...
    @overload
    def attend(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        q_lens: torch.Tensor | None = ...,
        *,
        sm_scale: float,
        in_step: bool = ...,
        return_lse: Literal[True],
        num_splits: int | None = ...,
        backend: str | None = ...,
    ) -> State: ...
    @overload
    def attend(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        q_lens: torch.Tensor | None = ...,
        *,
        sm_scale: float,
        in_step: bool = ...,
        return_lse: bool = ...,
        num_splits: int | None = ...,
        backend: str | None = ...,
    ) -> torch.Tensor | State: ...
    def attend(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        q_lens: torch.Tensor | None = None,
        *,
        sm_scale: float,
        in_step: bool = False,
        return_lse: bool = False,
        num_splits: int | None = None,
        backend: str | None = None,
    ) -> torch.Tensor | State:
        """Attend one token of each sequence, or its last few, to a layer's tokens.

        Args:
            layer: index of the layer; append these tokens' rows to it first.
            q_latent, q_rope, q_lens, sm_scale: as in mla_decode_attention.
            in_step: let all queries see the rows as the first of them saw them: see step.
            return_lse, num_splits, backend: as in mla_decode_attention.

        Returns:
            As mla_decode_attention.

        Raises:
            As mla_decode_attention.
        """
        check_tensors(q_latent=q_latent, q_rope=q_rope)
        check_flag("in_step", in_step)
        if q_lens is not None:
            check_tensors(q_lens=q_lens)
        at = self._layer(layer)
        q_len = q_latent.shape[1] if q_latent.ndim == 4 else 1
        segments, _ = at.seen_by(layer, q_len, q_lens, None, in_step=in_step)
        return attend_latents(
            q_latent,
            q_rope,
            segments,
            q_lens=q_lens,
            sm_scale=sm_scale,
            return_lse=return_lse,
            num_splits=num_splits,
            backend=backend,
        )

    @overload  # type: ignore[override]
    def step(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        *,
        sm_scale: float,
        return_lse: Literal[False] = ...,
        num_splits: int | None = ...,
        backend: str | None = ...,
    ) -> torch.Tensor: ...
    @overload
    def step(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        *,
        sm_scale: float,
        return_lse: Literal[True],
        num_splits: int | None = ...,
        backend: str | None = ...,
    ) -> State: ...
    @overload
    def step(
        self,
        layer: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        *,
        sm_scale: float,
        return_lse: bool = ...,
        num_splits: int | None = ...,
        backend: str | None = ...,
    ) -> torch.Tensor | State: ...
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
    ) -> torch.Tensor | State:
        """Append one token to each sequence of a layer, or a few, and attend with their queries.

        Which rows the queries of several tokens see is told in KVCache.step.

        Args:
            layer: index of the layer.
            q_latent: [batch, num_heads, latent_dim], or [batch, new_tokens, num_heads, latent_dim].
            q_rope: the same but for its last axis, rope_dim.
            latent, rope: as in append; one token where q_latent has three axes.
            sm_scale, return_lse, num_splits, backend: as in mla_decode_attention.

        Returns:
            As mla_decode_attention.

        Raises:
            As append and attend; nothing is appended where the queries do not fit, or an option is
            not possible.
        """
        at = self._layer(layer)
        check_tensors(q_latent=q_latent, q_rope=q_rope, latent=latent, rope=rope)
        new_tokens = q_latent.shape[1] if q_latent.ndim == 4 else 1
        if latent.ndim != 4 or latent.shape[2] != new_tokens:
            raise ShapeError(
                f"latent is {list(latent.shape)}: a step with q_latent {list(q_latent.shape)} has "
                f"{new_tokens} of each sequence, [{self.batch}, 1, {new_tokens}, {self.head_dim}]"
            )
        at.check_query(q_latent)
        assert isinstance(at, LatentLayerCache)
        check_queries(q_latent, q_rope, at.fmt)
        check_call(q_latent, [at.fmt, at.exact], sm_scale, backend)
        check_options(q_latent, sm_scale, return_lse, num_splits, backend)
        self.append(layer, latent, rope)
        return self.attend(
            layer,
            q_latent,
            q_rope,
            sm_scale=sm_scale,
            in_step=True,
            return_lse=return_lse,
            num_splits=num_splits,
            backend=backend,
        )

    def like(self, batch: int, device: Devices) -> LatentKVCache:
        """An empty cache of so many sequences on a device, or several, else like this one."""
        fmt = self.formats[0]
        other = LatentKVCache(
            self.num_layers,
            batch,
            self.max_seq_len,
            fmt=self.formats,
            latent_dim=fmt.latent_dim,
            rope_dim=fmt.rope_dim,
            sink_len=self.sink_len,
            recent_len=self.recent_len,
            exact_format=self.exact_format,
            device=device,
            rollback_len=self.rollback_len,
        )
        other.num_q_heads = self.num_q_heads
        return other

    def likely_q_heads(self) -> tuple[int, ...]:
        """As of KVCache; of DeepSeek's small and large models where nothing is known."""
        return (self.num_q_heads,) if self.num_q_heads else (16, 128)

    def rehearse_step(
        self, layer: int, queries: Sequence[torch.Tensor], k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """As of KVCache."""
        self.step(layer, queries[0], queries[1], k, v, sm_scale=1.0)

    def _check_formats(self, *formats: RowFormat) -> None:
        """LatentFormat has checked them."""

    def _make_layer(self, batch: int, max_seq_len: int, kind: Kind) -> LayerCache:
        k_format, v_format, _, _, device = kind
        return LatentLayerCache(
            batch,
            1,
            max_seq_len,
            k_format,
            v_format,
            self.sink_len,
            self.recent_len,
            self.exact_format,
            device,
            rollback_len=self.rollback_len,
        )
