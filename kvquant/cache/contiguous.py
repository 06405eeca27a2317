"""KVCache: preallocated packed rows for all layers of a model, with 16-bit rows at both ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch

from .. import debug
from ..errors import ConfigError, ShapeError
from ..ops.attention import State, attend
from ..ops.dispatch import check_cuda_codecs
from ..ops.transform import queries_of
from ..rows.arguments import check_flag, check_size, check_tensors
from ..rows.basis import LayerBasis
from ..rows.bound import kind_of
from ..rows.call import AttentionCall
from ..rows.codec import check_exact_format
from ..rows.kind import LATENT
from ..rows.probe import FEW_BITS, WARNED, combined, divergence_among, loss_of
from ..rows.quantize import check_dtype, dequantize
from ..rows.segment import Segment
from ..rows.variant import AttentionVariant, moved
from .checks import (
    Counts,
    Devices,
    Formats,
    check_bad_rows,
    check_bases,
    check_holds,
    check_layer,
    check_options,
    check_windows,
    devices_of,
    formats_of,
    plan_for,
    whole_numbers,
)
from .copying import NoShallowCopy
from .layer import ROLLBACK, SPARE, Kind, LayerCache, packed_row_bytes, rooms_of
from .memory import check_room
from .warmup import warm_up_first

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import TypedDict, Unpack

    from ..io.plan import Plan
    from ..rows.options import AttendOptions, Either, Maybe, No, StepOptions, Yes

    class PlanOptions(TypedDict, total=False):
        """Options of KVCache that a plan does not decide."""

        sink_len: int
        recent_len: int
        exact_format: str
        device: Devices
        windows: Sequence[int | None] | None
        rollback_len: int

    class CacheOptions(PlanOptions, total=False):
        """All options of KVCache."""

        k_format: Formats
        v_format: Formats
        bases: Sequence[LayerBasis] | None


# what transformers asks of its caches, and a KVCache has not
_CACHE_OF_TRANSFORMERS = {"get_mask_sizes", "get_seq_length", "is_compileable", "update"}

log = logging.getLogger("kvquant")
_COMPARED = 4  # sequences whose keys are compared, at most
_LARGE = 1 << 28  # bytes, from which on it is looked whether there is memory


class KVCache(NoShallowCopy):
    """Keys and values of all layers of a model, for a batch of sequences of unequal lengths.

    All memory is allocated when the cache is made. Formats of K and of V are independent, and may
    be given per layer. A cache belongs to one thread at a time, while it is saved, too.

    Args:
        num_layers: layers with attention.
        batch: sequences.
        num_kv_heads: KV heads of each layer.
        head_dim: elements of a row of K and of V; formats given as RowFormat may have their own.
        max_seq_len: tokens that a sequence has room for.
        k_format: format of the packed K rows: a name, a RowFormat, or one of these per layer. None
            is the default: "int8-g4" with head_dim 64, 128 or 256 and the default window. Of other
            head_dims, or without the window, rows/defaults.py says it.
        v_format: of V, as k_format; None is "int4-g4" there, whatever K's format is.
        sink_len: first tokens of each sequence to keep in 16 bit.
        recent_len: last tokens of each sequence to keep in 16 bit.
        exact_format: "bf16" or "fp16": the 16-bit rows; take that of the model.
        device: where all tensors lie; or a list, where those of each layer lie, as of a model
            whose layers are spread over several. On "meta" a cache takes no memory and no tokens:
            nbytes says how many bytes it would take.
        bases: what the rows of each layer are stored as; as they come when None. A plan has them:
            see from_plan.
        windows: of each layer, how many tokens, the last ones, attention sees; None for all. A
            layer with a window has no sinks and keeps 512 tokens before it, so many can be cropped.
        rollback_len: tokens before the recent ones whose 16-bit rows are kept, too: so many can be
            cropped as if they had never come, see crop. For each of them a sequence has 4 *
            head_dim bytes more a KV head and layer, 512 of head_dim 128; none where recent_len is
            0, since nothing else is needed then.

    Attributes:
        layers: the LayerCache of each layer.
        devices: where each layer lies.
        device: where the first one lies, and all below.
        start_positions: [batch] int64: the position of each sequence's first token (for rotary
            embeddings); 0 unless set. It is saved and moves with the sequences.
        bad_rows: [2] int32, rows of K and of V that were written as NaN: see append. Layers on
            other devices have counters of their own; check reads all.
        overflow_tokens: [1] int32, tokens that found no room in a graph, once for each layer.
        num_q_heads: of the queries that will come, where that is known, as for a model: the kernels
            that the first append compiles are for them. None: few on a KV head.
        step_lens: new tokens of a sequence in the steps that will come, (1,) unless set: the first
            append compiles kernels for them, too.
        step_variant: the AttentionVariant of these steps, None for plain attention. The kernels
            that the first append compiles are for it. A first call of step sets it, and so does
            the first layer of a Hugging Face model. Of its tensors only shapes and dtypes count.
        changes: calls that may have changed lengths; those inside of graphs are not counted.
        compared: of layers, how far K rows of few bits move attention's weights among the recent
            tokens; None once that is known, or where it cannot be: see kvquant/cache/README.md.
        is_cold: whether the first append will compile the kernels that are missing (on CUDA).

    Raises:
        ConfigError: a size, a format or a device that does not exist, or takes too much memory.
        DeviceError: no kernels serve the device, or it is not there.

    Example:
        >>> import torch
        >>> from kvquant import KVCache
        >>> cache = KVCache(num_layers=1, batch=2, num_kv_heads=8, head_dim=128, max_seq_len=64)
        >>> k, v = torch.randn(2, 2, 8, 10, 128)  # [batch, num_kv_heads, tokens, head_dim] each
        >>> cache.append(0, k, v)
        >>> cache.attend(0, torch.randn(2, 32, 128)).shape  # [batch, num_q_heads, head_dim]
        torch.Size([2, 32, 128])
        >>> KVCache(32, 16, 8, 128, 32768, device="meta").nbytes >> 30  # GiB, without any memory
        28
    """

    LAYER: ClassVar[type[LayerCache]] = LayerCache

    @torch.inference_mode(False)  # else what is made inside it could not be changed outside
    def __init__(
        self,
        num_layers: int,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        *,
        k_format: Formats | None = None,
        v_format: Formats | None = None,
        sink_len: int = 4,
        recent_len: int = 128,
        exact_format: str = "bf16",
        device: Devices = "cpu",
        bases: Sequence[LayerBasis] | None = None,
        windows: Sequence[int | None] | None = None,
        rollback_len: int = ROLLBACK,
    ) -> None:
        num_layers = check_size("num_layers", num_layers, at_least=1)
        batch = check_size("batch", batch, at_least=1)
        num_kv_heads = check_size("num_kv_heads", num_kv_heads, at_least=1)
        head_dim = check_size("head_dim", head_dim, at_least=1)
        max_seq_len = check_size("max_seq_len", max_seq_len)
        sink_len = check_size("sink_len", sink_len)
        recent_len = check_size("recent_len", recent_len)
        rollback_len = check_size("rollback_len", rollback_len)
        check_exact_format(exact_format)
        shape = {"sink_len": sink_len, "recent_len": recent_len}
        k_formats = formats_of("k_format", k_format, num_layers, head_dim, **shape)
        v_formats = formats_of("v_format", v_format, num_layers, head_dim, **shape)
        self.LAYER.row_kind.check_formats([*k_formats, *v_formats])
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.max_seq_len = max_seq_len
        self.sink_len = sink_len
        self.recent_len = recent_len
        self.rollback_len = rollback_len
        self.exact_format = exact_format
        self.devices = devices_of(device, num_layers, or_meta=True)
        self.device = self.devices[0]
        if any(one.type == "cuda" for one in self.devices):
            check_cuda_codecs([*k_formats, *v_formats])
        checked = check_bases(bases, num_kv_heads, k_formats, v_formats)
        windows = check_windows(windows, num_layers)
        kinds = list(zip(k_formats, v_formats, checked, windows, self.devices, strict=True))
        nbytes = [self._layer_bytes(batch, max_seq_len, kind) for kind in kinds]
        what = f"a cache of {num_layers} layers and {batch} sequences of {max_seq_len} tokens"
        self._check_memory(nbytes, what, "use a smaller max_seq_len or batch")
        self.layers = [self._make_layer(batch, max_seq_len, kind) for kind in kinds]
        self.start_positions = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self._counters = {
            one: (
                torch.zeros(2, dtype=torch.int32, device=one),
                torch.zeros(1, dtype=torch.int32, device=one),
            )
            for one in dict.fromkeys(self.devices)
        }
        self.bad_rows, self.overflow_tokens = self._counters[self.device]
        self.num_q_heads: int | None = None
        self.step_lens: tuple[int, ...] = (1,)
        self.step_variant: AttentionVariant | None = None
        self.changes = 0
        self.is_cold = any(one.type == "cuda" for one in self.devices)
        has_few = min((fmt.bits for fmt in k_formats), default=16) <= FEW_BITS
        is_plain = bases is None and self.LAYER.row_kind is not LATENT
        self.compared = dict[int, torch.Tensor]() if has_few and is_plain and recent_len else None

    @classmethod
    def from_plan(
        cls, plan: Plan, batch: int, max_seq_len: int, **options: Unpack[PlanOptions]
    ) -> KVCache:
        """Make an empty cache whose formats and bases are those of a plan.

        Args:
            plan: of the model whose keys and values will come, or the path of its file;
                CachePlan.check_model tells whether it is. Layer i is the model's layer
                plan.places[i].
            batch, max_seq_len: as in KVCache.
            options: the others of KVCache, but for formats and bases. A plan does not hold windows:
                give windows= (CachedModel.new_cache does it).

        Raises:
            ConfigError: a size that is not possible, or an option that the plan decides.
        """
        plan = plan_for(plan, options)
        shape = plan.num_layers, batch, plan.num_kv_heads, plan.head_dim, max_seq_len
        k_format, v_format, bases = plan.k_formats, plan.v_formats, plan.layers
        return cls(*shape, k_format=k_format, v_format=v_format, bases=bases, **options)

    def __repr__(self) -> str:
        layers = self.layers
        parts = [f"{len(layers)} layers", f"{self.batch} sequences"]
        parts += [f"{self.num_kv_heads} KV heads of {self.head_dim}"]
        parts += [f"max_seq_len {self.max_seq_len}"]
        for side, formats in (
            ("K", [layer.k_format for layer in layers]),
            ("V", [layer.v_format for layer in layers]),
        ):
            parts.append(f"{side} " + " or ".join(dict.fromkeys(map(str, formats))))
        exact = f"{self.exact_format} sinks and recent tokens"
        parts.append(f"{exact}: {self.sink_len} and {self.recent_len}")
        parts += ["bases"] * bool(self.bases) + ["windows"] * any(self.windows)
        return f"KVCache({', '.join(parts)}, on {self._where})"

    @property
    def latent(self) -> bool:
        """Whether K and V are the parts of latent rows."""
        return self.LAYER.row_kind is LATENT

    @property
    def is_spread(self) -> bool:
        """Whether layers lie on several devices."""
        return len(self._counters) > 1

    @property
    def _where(self) -> str:
        return " and ".join(map(str, self._counters))

    @property
    def bases(self) -> list[LayerBasis] | None:
        """What the rows of each layer are stored as; None if as they came."""
        found = [layer.basis for layer in self.layers if layer.basis is not None]
        return found or None

    @property
    def windows(self) -> list[int | None]:
        """The sliding window of each layer; None where attention sees all tokens."""
        return [layer.window for layer in self.layers]

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.layers)

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.start_positions.shape[0]

    @property
    def seq_lens(self) -> torch.Tensor:
        """[batch] int32: the tokens of each sequence that every layer holds."""
        first, *others = (torch.stack(lens).amin(0) for lens in self._lens().values())
        for other in others:
            first = torch.minimum(first, other.to(first.device))
        return first

    @property
    def positions(self) -> torch.Tensor:
        """[batch] int64: the position of the next token of each sequence."""
        return self.start_positions + self.seq_lens

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor of the cache."""
        tensors = *self._tensors(), *self._all_counters(), self.start_positions
        return sum(tensor.nbytes for tensor in tensors)

    def segments(self, layer: int) -> list[Segment]:
        """The rows of a layer as segments to attend to, without copies, as they are stored."""
        return list(self._layer(layer).segments())

    def dequantized(
        self, layer: int, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the values of a layer, in the order of the tokens; of its window, if it has one.

        Returns:
            K [batch, num_kv_heads, most tokens, head_dim] and V of that shape, dtype; zeros after
            the end of a shorter sequence.
        """
        check_dtype(dtype)
        return self._layer(layer).dequantized(dtype)

    @overload
    def attend(
        self, layer: int, q: Tensor, q_lens: Maybe = ..., /, **options: Unpack[AttendOptions[No]]
    ) -> Tensor: ...
    @overload
    def attend(
        self, layer: int, q: Tensor, q_lens: Maybe = ..., /, **options: Unpack[AttendOptions[Yes]]
    ) -> State: ...
    @overload
    def attend(
        self, layer: int, q: Tensor, q_lens: Maybe = ..., /, **options: Unpack[AttendOptions[bool]]
    ) -> Either: ...
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        q_lens: torch.Tensor | None = None,
        *,
        variant: AttentionVariant | None = None,
        in_step: bool = False,
        sm_scale: float | None = None,
        return_lse: bool = False,
        num_splits: int | None = None,
        backend: str | None = None,
    ) -> torch.Tensor | State:
        """Attend with q [batch, num_q_heads, head_dim], or [batch, q_len, num_q_heads, head_dim].

        A query belongs to the last token of a sequence, or q_len of them to its last q_len tokens.
        The axes are in another order than those of new K and V, [batch, num_kv_heads, new_tokens,
        head_dim]: in q tokens come before heads.

        Every query sees the rows as they are now: of several, one sees tokens in their packed
        format that were still 16-bit rows when its own token came; in_step shows them in 16 bit.

        Args:
            layer: index of the layer; append these tokens' K and V to it first.
            q: as above; queries in the order of Hugging Face, [batch, num_q_heads, q_len,
                head_dim], are given as q.transpose(1, 2).
            q_lens: [batch], int32, as in decode_attention.
            variant: see AttentionVariant. A layer's own window needs none.
            in_step: let all queries see the rows as the first of them saw them: see step.
            sm_scale, return_lse, num_splits, backend: as in decode_attention.

        Returns:
            As decode_attention.

        Raises:
            As decode_attention. ShapeError where nothing was appended to the layer, or all was
            dropped by reset or crop. A sequence without tokens is no error and gives zeros: its
            count of new tokens was 0, or select took it. A CUDA graph or torch.compile that has
            appended, or that records this call, is not looked at. Where a layer has a
            window: UnsupportedError for more than 513 queries, ShapeError for queries that see
            what it no longer holds.

        Example:
            >>> import torch
            >>> from kvquant import KVCache
            >>> cache = KVCache(num_layers=1, batch=2, num_kv_heads=8, head_dim=128, max_seq_len=64)
            >>> k, v = torch.randn(2, 2, 8, 10, 128)
            >>> new_lens = torch.tensor([3, 2], dtype=torch.int32)
            >>> cache.append(0, k, v)
            >>> cache.append(0, k[:, :, :3], v[:, :, :3], new_lens)
            >>> q = torch.randn(2, 3, 32, 128)  # [batch, q_len, num_q_heads, head_dim]
            >>> cache.attend(0, q, new_lens).shape
            torch.Size([2, 3, 32, 128])
        """
        at = self._layer(layer)
        at.check_filled(layer)
        segments = at.segments()
        is_plain = variant is None is q_lens  # with q_lens rows of q may be padding
        if at.window is not None or in_step:
            check_flag("in_step", in_step)
            if q_lens is not None:
                check_tensors(q_lens=q_lens)
            q_len = q.shape[1] if isinstance(q, torch.Tensor) and q.ndim == 4 else 1
            at.check_seen(layer, q_len)
            segments, variant = at.seen_by(layer, q_len, q_lens, variant, in_step=in_step)
        call = AttentionCall(
            q, segments, sm_scale, num_splits, return_lse, q_lens, variant, backend
        )
        out, lse = attend(call, at.basis, at.seq_lens)
        if self.compared is not None and is_plain:
            self._compare(layer, q, sm_scale)
        return out if lse is None else (out, lse)

    def append(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        new_lens: Counts | None = None,
    ) -> None:
        """Append new tokens, k and v of [batch, num_kv_heads, new_tokens, head_dim], to a layer.

        Heads come before tokens, as in the caches of Hugging Face. Tensors with the tokens first
        are given as k.transpose(1, 2) and v.transpose(1, 2). They are refused as they are, but not
        where new_tokens equals num_kv_heads: there both orders have the same shape.

        Nothing is written unless everything can be. That is known where values can be read: on the
        CPU, and in debug mode (kvquant.debug) on CUDA, where the host would wait for the GPU in
        every call. Else a row that comes with NaN, Inf or a value that one of the formats cannot
        hold decodes to NaN and is counted in bad_rows, and lengths are read only when max_seq_len
        comes near. In a CUDA graph, and under torch.compile, lengths cannot be read at all: there
        tokens that have no room are left out and counted in overflow_tokens. Call check at times.

        Args:
            layer: index of the layer.
            k: as above, float32, bfloat16 or float16: keys as attention meets them (after RoPE).
            v: as k.
            new_lens: [batch]: how many of the new_tokens, the first ones, belong to each sequence;
                all when None. A tensor on CUDA, or under torch.compile, int32 or int64, is not
                read: counts below 0 or over new_tokens are taken as 0 or new_tokens, silently.

        Raises:
            ShapeError: k or v does not fit the cache, or a sequence would outgrow max_seq_len.
            ConfigError: the dtype of k or v, or a layer that does not exist.
            DeviceError: k or v lies on another device than the cache.
            NonFiniteError: NaN, Inf or a value that one of the formats cannot hold.

        Example:
            >>> import torch
            >>> from kvquant import KVCache
            >>> cache = KVCache(num_layers=1, batch=2, num_kv_heads=8, head_dim=128, max_seq_len=64)
            >>> k, v = torch.randn(2, 2, 10, 8, 128)  # [batch, new_tokens, num_kv_heads, head_dim]
            >>> cache.append(0, k.transpose(1, 2), v.transpose(1, 2))
            >>> cache.seq_lens.tolist()
            [10, 10]
        """
        at = self._layer(layer)
        self._change(k)
        at.append(k, v, new_lens, *self.counters_of(layer))

    @overload
    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[StepOptions[No]]
    ) -> Tensor: ...
    @overload
    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[StepOptions[Yes]]
    ) -> State: ...
    @overload
    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[StepOptions[bool]]
    ) -> Either: ...
    def step(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        variant: AttentionVariant | None = None,
        sm_scale: float | None = None,
        return_lse: bool = False,
        num_splits: int | None = None,
        backend: str | None = None,
    ) -> torch.Tensor | State:
        """Append k and v [batch, heads, tokens, dim], attend with q [batch, tokens, heads, dim].

        One token of each sequence, or a few. With one token q has no axis of tokens, [batch,
        num_q_heads, head_dim], and k and v have one, [batch, num_kv_heads, 1, head_dim].

        With one token it is what append and attend give, bit for bit. In a plan's basis it is
        sooner on CUDA: queries are brought into the basis by the launch that does it with the new
        rows.

        Several tokens (drafted ones, say) are appended and attended in one call each. All of their
        queries see the rows as the first of them: tokens that have left the recent window since
        then are read in 16 bit. Token by token the i-th query (from 0) would find i of these
        packed. That is all that differs, and with recent_len 0 nothing does; one call of the
        kernel has one border between packed and 16-bit rows.

        Args:
            layer: index of the layer.
            q: [batch, num_q_heads, head_dim], or [batch, new_tokens, num_q_heads, head_dim].
            k: [batch, num_kv_heads, new_tokens, head_dim], as in append; one token where q has
                three axes. More than rollback_len + 1 tokens see more of them packed.
            v: as k.
            variant: as in attend.
            sm_scale, return_lse, num_splits, backend: as in decode_attention.

        Returns:
            As decode_attention.

        Raises:
            As append and attend; nothing is appended where q, the variant or an option is not
            possible.

        Example:
            >>> import torch
            >>> from kvquant import KVCache
            >>> cache = KVCache(num_layers=1, batch=2, num_kv_heads=8, head_dim=128, max_seq_len=64)
            >>> k, v = torch.randn(2, 2, 8, 1, 128)  # [batch, num_kv_heads, 1, head_dim] each
            >>> cache.step(0, torch.randn(2, 32, 128), k, v).shape  # [batch, num_q_heads, head_dim]
            torch.Size([2, 32, 128])
            >>> q = torch.randn(2, 3, 32, 128)  # [batch, new_tokens, num_q_heads, head_dim]
            >>> k, v = torch.randn(2, 2, 8, 3, 128)  # [batch, num_kv_heads, new_tokens, head_dim]
            >>> cache.step(0, q, k, v).shape
            torch.Size([2, 3, 32, 128])
        """
        at = self._layer(layer)
        can_bind = variant is None and backend is None and not torch.compiler.is_compiling()
        bound = at.bound.find(q, k, v) if can_bind else None
        if bound is None:  # else such a step was taken before
            check_tensors(q=q, k=k, v=v)
            at.check_seen(layer, at.check_step(q, k))
            at.check_query(q)
            at.check_variant(q, variant)
        if bound is None or not (sm_scale is None is num_splits and type(return_lse) is bool):
            check_options(q, sm_scale, return_lse, num_splits, backend)
        self._change(k, variant)
        ready = None if q.ndim == 4 else queries_of(q, at.basis, sm_scale, backend)
        queries = None if ready is None else ready[0]
        found = at.append(k, v, None, *self.counters_of(layer), queries, bound)
        segments, of_layer = at.seen_by(layer, k.shape[2], None, variant, in_step=True)
        call = AttentionCall(q, segments, sm_scale, num_splits, return_lse, None, of_layer, backend)
        transformed = None if found is None or ready is None else (found, ready[1])
        out, lse = attend(call, at.basis, at.seq_lens, transformed)
        if bound is None and can_bind and at.bound:
            at.bound.keep(kind_of(q, k, v), at.bound.find(k, v))
        if self.compared is not None and variant is None:
            self._compare(layer, q, sm_scale)
        return out if lse is None else (out, lse)

    def check(self) -> None:
        """Raise if an append since the last check could not do what it was asked to (see append).

        Call it between steps, when every layer has got the same tokens. Reads the counters and the
        lengths, so it waits for each GPU once, and sets the counters back.

        Raises:
            NonFiniteError: rows came with values that their formats cannot hold.
            ShapeError: tokens came that had no room, or layers hold different lengths: a layer was
                left out, or appended twice.
        """
        counts, held = [0, 0, 0], [[0]] * self.num_layers
        for device, lens in self._lens().items():
            numbers = torch.cat([*self._counters[device], *lens]).tolist()
            counts = [own + more for own, more in zip(counts, numbers, strict=False)]
            places = [i for i, one in enumerate(self.devices) if one == device]
            for i, first in zip(places, range(3, len(numbers), self.batch), strict=True):
                held[i] = numbers[first : first + self.batch]
        k_rows, v_rows, overflow = counts
        if any(counts):
            self.forget_counts()
        check_bad_rows((k_rows, v_rows), "crop the cache to the tokens before them")
        if overflow:
            raise ShapeError(
                f"{overflow} tokens (counted in every layer) found no room, max_seq_len is "
                f"{self.max_seq_len}: crop the cache, or make a larger one"
            )
        for layer, found in enumerate(held):
            if found != held[0]:
                sequence = next(b for b in range(self.batch) if found[b] != held[0][b])
                raise ShapeError(
                    f"layers hold different lengths: of sequence {sequence} layer 0 has "
                    f"{held[0][sequence]} tokens and layer {layer} {found[sequence]}. Append each "
                    "token once to every layer; cache.crop(cache.seq_lens) keeps what all layers "
                    "have"
                )

    def counters_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """bad_rows and overflow_tokens on the device of a layer."""
        return self._counters[self.devices[layer]]

    def forget_counts(self) -> None:
        """Set bad_rows and overflow_tokens back, of all devices."""
        for counter in self._all_counters():
            counter.zero_()

    def crop(self, seq_lens: int | Counts) -> None:
        """Drop the last tokens of each sequence.

        If those that a sequence has had most are rollback_len more or fewer, the cache goes on bit
        for bit as one that never saw the cropped tokens: recent_len tokens are read in 16 bit
        again. Beyond, and from those that came by a file, what has been packed stays packed, and
        the recent window fills again with the next tokens.

        Args:
            seq_lens: tokens to keep: one number for all (shorter sequences stay as they are), or
                [batch].

        Raises:
            ShapeError: a length below 0, or over the present one where given per sequence; or a
                layer with a window no longer has the tokens that it would see (layer.SPARE).
        """
        present = self.seq_lens.cpu()
        if isinstance(seq_lens, int | Integral) and not isinstance(seq_lens, bool):
            most = min(max(int(seq_lens), -1), self.max_seq_len)  # within int32
            wanted = present.clamp(max=most)
        else:
            wanted = whole_numbers("seq_lens", seq_lens)
        if wanted.shape != present.shape or bool((wanted < 0).any() or (wanted > present).any()):
            raise ShapeError(
                f"cannot crop sequences of {present.tolist()} tokens to {wanted.tolist()}: give "
                "lengths from 0 to the present ones"
            )
        self._crop_layers(wanted.expand(self.num_layers, -1))

    def _crop_layers(self, lens: torch.Tensor) -> None:
        """Keep so many tokens, [num_layers, batch]; in all layers, or raise as crop."""
        for i, layer in enumerate(self.layers):
            layer.check_crop(i, lens[i])
        self.changes += 1
        for layer, wanted in zip(self.layers, lens, strict=True):
            layer.crop(wanted)

    def reorder(self, index: Counts) -> None:
        """Put sequence index[b] at place b, in place; a sequence may be taken twice (beam search).

        Args:
            index: [batch] of places from 0 to batch - 1.

        Raises:
            ShapeError: index is not [batch], or a place does not exist.
        """
        check_holds(self.device)
        chosen = self._check_index(index)
        if chosen.shape[0] != self.batch:
            raise ShapeError(f"index has {chosen.shape[0]} places, the batch {self.batch}")
        self.changes += 1
        for layer in self.layers:
            layer.take(layer, chosen)
        self.start_positions.copy_(self.start_positions.index_select(0, chosen))

    def select(self, index: Counts) -> None:
        """Keep the sequences at some places, in place; the batch is as many as these are.

        As after grow, tensors of the layers lie elsewhere then, and of start_positions, too.

        Args:
            index: [new batch] of places from 0 to batch - 1, in any order; a place may be taken
                several times, or not at all.

        Raises:
            ShapeError: a place does not exist.
            ConfigError: so many take more memory than there is beside this cache; or in a CUDA
                graph or under torch.compile. The cache has what it had, then.

        Example:
            >>> from kvquant import KVCache
            >>> cache = KVCache(num_layers=1, batch=2, num_kv_heads=8, head_dim=128, max_seq_len=64)
            >>> cache.select([1, 1, 0])
            >>> cache.batch
            3
        """
        if debug.is_recorded(self.start_positions):
            raise ConfigError(
                "a cache cannot get other sequences while a CUDA graph or torch.compile records it"
            )
        check_holds(self.device)
        other = self._taken(self._check_index(index))
        self.layers, self.start_positions = other.layers, other.start_positions
        self.is_cold = other.is_cold  # kernels differ with the batch
        self.changes += 1

    def repeat(self, times: int) -> KVCache:
        """A new cache with each sequence repeated, its copies side by side.

        Args:
            times: 1 or more copies of each.

        Returns:
            A cache of batch * times sequences that shares no memory with this one.

        Raises:
            ConfigError: times is no such number, or so many take more memory than there is.
        """
        times = check_size("times", times, at_least=1)
        nbytes = [times * sum(x.nbytes for x in at.tensors().values()) for at in self.layers]
        what = f"a cache of {times * self.batch} sequences"  # before there is a list of them
        self._check_memory(nbytes, what, "use a smaller number of times")
        places = torch.arange(self.batch, device="cpu").repeat_interleave(times)
        return self._taken(self._check_index(places))

    def fork(self, index: Counts | None = None) -> KVCache:
        """A new cache with the same contents, to go on independently.

        Args:
            index: places of the sequences to take, in any order; all when None.

        Returns:
            A cache that shares no memory with this one.

        Raises:
            ShapeError: a place does not exist.
        """
        return self._taken(self._check_index(range(self.batch) if index is None else index))

    @torch.inference_mode(False)  # as __init__
    def grow(self, max_seq_len: int) -> None:
        """Give every sequence room for more tokens, in place; the cache goes on bit for bit.

        One layer after another is copied, so that the most memory taken is that of the larger
        cache and one layer of this one. Tensors of the layers lie elsewhere then: a CUDA graph
        that was captured before, and segments taken before, have the old ones. Capture it again.

        Args:
            max_seq_len: tokens that a sequence has room for; as many as now, or more.

        Raises:
            ConfigError: fewer than now, more than there is memory for, or in a CUDA graph or under
                torch.compile. The cache has what it had, then.

        Example:
            >>> import torch
            >>> from kvquant import KVCache
            >>> cache = KVCache(num_layers=1, batch=2, num_kv_heads=8, head_dim=128, max_seq_len=64)
            >>> cache.append(0, *torch.randn(2, 2, 8, 64, 128))
            >>> cache.grow(128)
            >>> cache.append(0, *torch.randn(2, 2, 8, 1, 128))
        """
        max_seq_len = check_size("max_seq_len", max_seq_len)
        if max_seq_len < self.max_seq_len:
            raise ConfigError(
                f"max_seq_len is {max_seq_len}, the cache has room for {self.max_seq_len} tokens: "
                "it can only grow"
            )
        if debug.is_recorded(self.start_positions):
            raise ConfigError("a cache cannot grow while a CUDA graph or torch.compile records it")
        layers = self.layers
        held = [self._layer_bytes(self.batch, self.max_seq_len, layer.kind) for layer in layers]
        wanted = [self._layer_bytes(self.batch, max_seq_len, layer.kind) for layer in layers]
        more = [new - old for new, old in zip(wanted, held, strict=True)]
        what = f"room for {max_seq_len} tokens"
        self._check_memory(more, what, "use a smaller max_seq_len", besides=max(held))
        try:
            for i, old in enumerate(layers):
                new = self._copy(old, max_seq_len)
                if not old.packed_len:  # all tokens were recent
                    new.pack_recent(self.counters_of(i)[0])
                layers[i] = new
        except BaseException:  # such as a lack of memory, or Ctrl-C
            for layer in layers:
                layer.limit(self.max_seq_len)
            raise
        self.max_seq_len = max_seq_len

    @contextmanager
    def attempt(self, new_tokens: int) -> Iterator[None]:
        """Drop the tokens that a block of code appends, if it raises.

        They are cropped. Layers with a window, which forget a token for each new one, are copied
        before if more than 512 tokens may come, and are as they were, bit for bit. What the block
        crops, reorders or selects stays so.

        Args:
            new_tokens: the most that the block appends to a sequence.

        Raises:
            ConfigError: new_tokens is no whole number from 0.
            ShapeError: the block appended more to a layer with a window.

        Example:
            >>> import torch
            >>> from kvquant import KVCache
            >>> cache = KVCache(num_layers=1, batch=2, num_kv_heads=8, head_dim=128, max_seq_len=64)
            >>> try:
            ...     with cache.attempt(10):
            ...         cache.append(0, *torch.randn(2, 2, 8, 10, 128))
            ...         raise KeyboardInterrupt
            ... except KeyboardInterrupt:
            ...     print(cache.seq_lens.tolist())
            [0, 0]
        """
        new_tokens = check_size("new_tokens", new_tokens)
        before, kept = self._lens_of_layers(), dict[int, LayerCache]()
        counters = [(x, x.clone()) for x in self._all_counters()]
        if new_tokens > SPARE and bool(before.any()):
            for i, layer in enumerate(self.layers):
                if layer.lens.firsts is not None:
                    kept[i] = self._copy(layer, self.max_seq_len)
        try:
            yield
        except BaseException:
            for i, layer in kept.items():
                self.layers[i].take(layer)
            present = self._lens_of_layers()
            if present.shape == before.shape:  # as many sequences as then
                self._crop_layers(torch.minimum(present, before))
            for counter, earlier in counters:  # lower where check has set them back
                counter.copy_(torch.minimum(counter, earlier))
            raise

    def _lens_of_layers(self) -> torch.Tensor:
        """[num_layers, batch], on the CPU, by one read of each device: tokens of each sequence."""
        read = {device: iter(torch.stack(lens).cpu()) for device, lens in self._lens().items()}
        return torch.stack([next(read[device]) for device in self.devices])

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        check_holds(self.device)
        self.changes += 1
        for layer in self.layers:
            layer.crop(torch.zeros(self.batch, dtype=torch.int64, device="cpu"))
        self.start_positions.zero_()
        self.forget_counts()

    if not TYPE_CHECKING:  # or any name would pass as one

        def __getattr__(self, name: str) -> Any:
            hint = ""
            if name in _CACHE_OF_TRANSFORMERS:
                hint = ". Give it to a transformers model as kvquant.QuantizedCache(cache)"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def _make_layer(self, batch: int, max_seq_len: int, kind: Kind) -> LayerCache:
        k_format, v_format, basis, window, device = kind
        return self.LAYER(
            batch,
            self.num_kv_heads,
            max_seq_len,
            k_format,
            v_format,
            self.sink_len,
            self.recent_len,
            self.exact_format,
            device,
            basis and basis.to(device),
            window,
            self.rollback_len,
        )

    @torch.inference_mode(False)
    def _copy(self, layer: LayerCache, max_seq_len: int) -> LayerCache:
        """A layer of as much room or more, with the same sequences."""
        copy = self._make_layer(self.batch, max_seq_len, layer.kind)
        copy.take(layer)
        return copy

    def _layer_bytes(self, batch: int, max_seq_len: int, kind: Kind) -> int:
        """Bytes of such a layer, before it is made."""
        k_format, v_format, _, window, _ = kind
        sizes = max_seq_len, self.sink_len, self.recent_len, window, self.rollback_len
        rooms = rooms_of(*sizes, packed_row_bytes(k_format, v_format, latent=self.latent))
        nbytes = rooms.bytes_of(k_format, v_format, self.exact_format)
        return batch * (self.num_kv_heads * nbytes + 32)  # eight lengths

    def _check_memory(
        self, nbytes: Sequence[int], what: str, advice: str, besides: int = 0
    ) -> None:
        """Raise ConfigError unless each device may have room for its layers; see check_room.

        Args:
            nbytes: of each layer.
            what, advice: for the error.
            besides: bytes more on each.
        """
        for device in dict.fromkeys(self.devices):
            own = [n for n, one in zip(nbytes, self.devices, strict=True) if one == device]
            if sum(own) + besides > _LARGE:
                check_room(sum(own) + besides, device, what, advice)

    def _lens(self) -> dict[torch.device, list[torch.Tensor]]:
        """seq_lens of the layers on each device; that of the first layer comes first."""
        check_holds(self.device)
        found: dict[torch.device, list[torch.Tensor]] = {one: [] for one in self._counters}
        for device, layer in zip(self.devices, self.layers, strict=True):
            found[device].append(layer.seq_lens)
        return found

    def _all_counters(self) -> list[torch.Tensor]:
        return [counter for both in self._counters.values() for counter in both]

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for layer in self.layers for tensor in layer.tensors().values()]

    def _layer(self, layer: int) -> LayerCache:
        check_layer(layer, self.num_layers)
        check_holds(self.device)
        return self.layers[layer]

    def _change(self, k: torch.Tensor, variant: AttentionVariant | None = None) -> None:
        """Note that an append comes; the first one compiles what it and others will need. A step
        tells its variant."""
        if torch.compiler.is_compiling():
            return
        self.changes += 1
        if self.is_cold:
            self.is_cold = False
            if variant is not None:
                self.step_variant = moved(variant, "meta")
            warm_up_first(self, k)

    def _compare(self, layer: int, q: torch.Tensor, sm_scale: float | None) -> None:
        """Warn, once and eagerly, if K rows of few bits change what queries read.

        Only recent tokens have exact keys here. Attention's weights among them are compared with
        those among the same keys, rounded, in sequences that have more tokens than they.
        """
        if debug.is_recorded(q) or q.is_meta:
            return
        at, found = self.layers[layer], self.compared
        most = at.sink_len + at.split.ring_len
        if found is None or layer in found or (at.longest or 0) <= most:
            return
        lens = at.seq_lens.tolist()
        at.longest = max(lens)  # it was a bound: with it each step would wait for the GPU here
        long = [place for place, tokens in enumerate(lens) if tokens > most][:_COMPARED]
        if not long:
            return
        last = (q if q.ndim == 4 else q[:, None])[long, -1:]
        keys = dequantize(at.k_recent[long], at.k_exact)
        scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
        none = torch.zeros((), dtype=torch.bool, device=at.device)
        found[layer] = divergence_among(last.transpose(1, 2), keys, at.k_format, scale, none)
        if len(found) < len(self.layers):
            return
        self.compared = None
        figure = combined(found.values())
        if figure >= WARNED:
            log.warning(
                "kvquant: K rows of %s without a plan %s. Take a plan of kvquant calibrate, or "
                'k_format="int8"',
                *(", ".join(dict.fromkeys(str(one.k_format) for one in self.layers)),),
                loss_of(figure),
            )

    def _check_index(self, index: Counts) -> torch.Tensor:
        chosen = whole_numbers("index", index)
        outside = (chosen < 0) | (chosen >= self.batch)
        if chosen.ndim != 1 or not len(chosen) or bool(outside.any()):
            raise ShapeError(
                f"index is {chosen.tolist()}: give places from 0 to {self.batch - 1}, one or more"
            )
        return chosen.to(self.device)

    def like(self, batch: int, device: Devices) -> KVCache:
        """An empty cache of so many sequences on a device, or several, else like this one."""
        other = self._made(
            num_layers=self.num_layers,
            batch=batch,
            max_seq_len=self.max_seq_len,
            sink_len=self.sink_len,
            recent_len=self.recent_len,
            exact_format=self.exact_format,
            device=device,
            bases=self.bases,
            rollback_len=self.rollback_len,
        )
        other.num_q_heads, other.step_lens = self.num_q_heads, self.step_lens
        other.step_variant = self.step_variant
        other.compared = None  # in this one, or never
        return other

    def _made(self, **options: Any) -> KVCache:
        """A cache with rows like these, and other options as given."""
        return KVCache(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            k_format=[layer.k_format for layer in self.layers],
            v_format=[layer.v_format for layer in self.layers],
            windows=self.windows,
            **options,
        )

    def _taken(self, index: torch.Tensor) -> KVCache:
        """A new cache with the sequences at these places."""
        other = self.like(len(index), self.devices)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            theirs.take(mine, index)
        other.start_positions.copy_(self.start_positions.index_select(0, index))
        return other
