"""KVCache: preallocated packed rows for all layers of a model, with 16-bit rows at both ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast, overload

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
from ..rows.format import RowFormat
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
    lens_to_keep,
    planned_options,
    whole_numbers,
)
from .copying import NoShallowCopy
from .layer import ROLLBACK, SPARE, Kind, LayerCache, packed_row_bytes, rooms_of
from .memory import check_room
from .warmup import warm_up_first

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self, TypedDict, Unpack

    from ..io.plan import Plan
    from ..rows.options import AttendOptions, Maybe, No, StepOptions, Yes

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

    The cache allocates all memory when it is made. K and V have independent formats, which may
    differ per layer. One thread uses a cache at a time, also while it is saved.

    Args:
        num_layers: layers with attention.
        batch: sequences.
        num_kv_heads: KV heads of each layer.
        head_dim: elements of a row of K and of V; formats given as RowFormat may have their own.
        max_seq_len: tokens that a sequence has room for.
        k_format: format of the packed K rows: a name, a RowFormat, or one of these per layer.
            None is "int8-g4" for head_dim 64, 128 or 256 with the default window; see
            rows/defaults.py for others.
        v_format: of V, as k_format; None is "int4-g4" there, for any k_format.
        sink_len: first tokens of each sequence to keep in 16 bit.
        recent_len: last tokens of each sequence to keep in 16 bit.
        exact_format: "bf16" or "fp16" for the 16-bit rows; take the model's.
        device: where all tensors lie, or a list with the device of each layer. On "meta" a
            cache takes no memory and no tokens, but has its nbytes.
        bases: the transform of each layer's rows (see from_plan); None for none.
        windows: how many of the last tokens each layer attends to; None for all. A layer with a
            window has no sinks and keeps 512 tokens more, for crop.
        rollback_len: tokens before the recent ones that stay in 16 bit, too, for exact crops.
            Each takes 4 * head_dim bytes a KV head, layer and sequence; none where recent_len is 0.
            0, since nothing else is needed then.

    Attributes:
        layers: the LayerCache of each layer.
        devices: where each layer lies.
        device: where the first one lies, with the counters and start_positions.
        start_positions: [batch] int64: the position of each sequence's first token (for rotary
            embeddings); 0 unless set. It is saved and moves with the sequences.
        bad_rows: [2] int32, rows of K and of V that became NaN: see append. Layers on other
            devices have their own; check reads all.
        overflow_tokens: [1] int32, tokens without room in a graph, counted once for each layer.
        num_q_heads: query heads that the first append compiles kernels for; None for a guess.
        step_lens: new tokens of a sequence in later steps, for the same; (1,) unless set.
        step_variant: the AttentionVariant of these steps, of which only shapes and dtypes
            count; None for plain attention. The first step, or a Hugging Face model, sets it.
        changes: calls that may have changed lengths, without those inside of graphs.
        compared: layers whose few-bit K rows are still to be compared with exact ones, and how
            much they move attention's weights; None when done: see kvquant/cache/README.md.
        is_cold: whether the first append compiles missing kernels (on CUDA).

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
        self.num_kv_heads = check_size("num_kv_heads", num_kv_heads, at_least=1)
        self.head_dim = check_size("head_dim", head_dim, at_least=1)
        self.max_seq_len = max_seq_len = check_size("max_seq_len", max_seq_len)
        self.sink_len = check_size("sink_len", sink_len)
        self.recent_len = check_size("recent_len", recent_len)
        self.rollback_len = check_size("rollback_len", rollback_len)
        check_exact_format(exact_format)
        self.exact_format, kind = exact_format, self.LAYER.row_kind
        shape = num_layers, self.head_dim, self.sink_len, self.recent_len
        k_formats, v_formats = formats_of(kind, k_format, v_format, *shape)
        self.devices = devices_of(device, num_layers, or_meta=True)
        self.device = self.devices[0]
        if any(one.type == "cuda" for one in self.devices):
            check_cuda_codecs([*k_formats, *v_formats])
        checked = check_bases(kind, bases, self.num_kv_heads, k_formats, v_formats)
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
        is_plain = bases is None and kind is not LATENT
        self.compared = (
            dict[int, torch.Tensor]() if has_few and is_plain and self.recent_len else None
        )

    @classmethod
    def from_plan(
        cls, plan: Plan, batch: int, max_seq_len: int, **options: Unpack[PlanOptions]
    ) -> Self:
        """Make an empty cache whose formats and bases are those of a plan.

        Args:
            plan: a plan, or the path of its file, of the model whose keys and values will come
                (CachePlan.check_model compares). Layer i is the model's layer plan.places[i].
            batch, max_seq_len: as in the class.
            options: others of the class. A plan holds no windows: give windows= (as
                CachedModel.new_cache); LatentKVCache has none.

        Raises:
            ConfigError: a size that is not possible, an option that the plan decides, or a plan
                of latent rows (for LatentKVCache: of keys and values of heads).
            UnsupportedError: as LatentKVCache.
        """
        planned = planned_options(cls.LAYER.row_kind, plan, cast(Any, options))
        return cls(batch=batch, max_seq_len=max_seq_len, **planned)

    def __repr__(self) -> str:
        exact = f"{self.exact_format} sinks and recent tokens: {self.sink_len} and "
        others = ", bases" * bool(self.bases) + ", windows" * any(self.windows)
        devices = " and ".join(map(str, self._counters))
        return (
            f"{type(self).__name__}({self.num_layers} layers, {self.batch} sequences, "
            f"{self.LAYER.row_kind.described(self.num_kv_heads, *self._formats)}, max_seq_len "
            f"{self.max_seq_len}, {exact}{self.recent_len}{others}, on {devices})"
        )

    @property
    def _formats(self) -> tuple[list[RowFormat], list[RowFormat]]:
        """Of K and of V, of each layer."""
        return [at.k_format for at in self.layers], [at.v_format for at in self.layers]

    @property
    def latent(self) -> bool:
        """Whether K and V are the parts of latent rows."""
        return self.LAYER.row_kind is LATENT

    @property
    def is_spread(self) -> bool:
        """Whether layers lie on several devices."""
        return len(self._counters) > 1

    @property
    def bases(self) -> list[LayerBasis] | None:
        """The transforms of each layer's rows; None for none."""
        found = [layer.basis for layer in self.layers if layer.basis is not None]
        return found or None

    @property
    def windows(self) -> list[int | None]:
        """The sliding window of each layer; None where attention sees all tokens."""
        return [layer.window for layer in self.layers]

    @property
    def num_layers(self) -> int:
        """The number of layers."""
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
        """The stored rows of a layer as segments to attend to, without copies."""
        return list(self._layer(layer).segments())

    def dequantized(
        self, layer: int, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the values of a layer in token order; of its window, if it has one.

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
        In q tokens come before heads, unlike in k and v.

        With several queries, an early one may read packed rows of tokens that were still in 16 bit
        at its own step; with in_step it reads them in 16 bit.

        Args:
            layer: index of the layer; append these tokens' K and V to it first.
            q: as above; transpose(1, 2) brings Hugging Face's [batch, num_q_heads, q_len,
                head_dim] into this order.
            q_lens: [batch], int32, as in decode_attention.
            variant: see AttentionVariant; a layer's own window is applied without one.
            in_step: let all queries see the rows as the first one does: see step.
            sm_scale, return_lse, num_splits, backend: as in decode_attention.

        Returns:
            As decode_attention.

        Raises:
            As decode_attention.
            ShapeError: the layer holds no tokens (one empty sequence among others gives zeros;
                not checked while or after a graph or torch.compile appends), or queries see tokens
                that a layer with a window has dropped.
            UnsupportedError: more than 513 queries to a layer with a window.

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
        self, layer: int, k: torch.Tensor, v: torch.Tensor, new_lens: Counts | None = None
    ) -> None:
        """Append new tokens, k and v of [batch, num_kv_heads, new_tokens, head_dim], to a layer.

        Heads come before tokens, as in Hugging Face; transpose(1, 2) brings tensors with tokens
        first into this order. They are refused, but not if new_tokens equals num_kv_heads: the
        shapes are equal.

        Where values can be read (on the CPU, and on CUDA in debug mode, see kvquant.debug) bad
        input raises and nothing is written. Elsewhere a row with NaN, Inf or a value beyond its
        format decodes to NaN and counts in bad_rows; lengths are read only near max_seq_len. In
        CUDA graphs and under torch.compile tokens without room are dropped and count in
        overflow_tokens. Call check at times.

        Args:
            layer: index of the layer.
            k: as above, float32, bfloat16 or float16: keys as attention meets them (after RoPE).
            v: as k.
            new_lens: [batch]: how many of new_tokens, the first ones, belong to each sequence;
                all when None. A tensor on CUDA, or under torch.compile, is int32 or int64 and is
                not read: values are silently clamped to 0 to new_tokens.

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

        With one token q has no axis of tokens, [batch, num_q_heads, head_dim]; k and v have one.
        The result is that of append and attend, bit for bit, and on CUDA faster in a plan's basis.

        Several tokens (drafted ones) take one append and one attend. All of their queries see the
        rows as the first does: tokens that leave the recent window in this step are read in 16 bit.
        Token by token query i would find i of them packed. With recent_len 0 nothing differs.

        Args:
            layer: index of the layer.
            q: [batch, num_q_heads, head_dim], or [batch, new_tokens, num_q_heads, head_dim].
            k: [batch, num_kv_heads, new_tokens, head_dim], as in append. Beyond rollback_len +
                1 tokens some are read packed.
            v: as k.
            variant: as in attend.
            sm_scale, return_lse, num_splits, backend: as in decode_attention.

        Returns:
            As decode_attention.

        Raises:
            As append and attend; nothing is appended if q, the variant or an option is invalid.

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
        # with types: 1 equals True
        options = sm_scale, type(sm_scale), num_splits, type(num_splits), type(return_lse)
        taken = at.bound.find(q, k, v, options=options) if can_bind else None
        if taken is None:  # else such a step was taken before
            check_tensors(q=q, k=k, v=v)
            at.check_seen(layer, at.check_step(q, k, v))
            at.check_query(q)
            at.check_variant(q, variant)
            check_options(q, sm_scale, return_lse, num_splits, backend)
            self._change(k, variant)
        else:
            self.changes += 1
        append, work = taken or (None, None)  # work: of attention on the CPU, without a basis
        basis = at.basis
        ready = None if basis is None or q.ndim == 4 else queries_of(q, basis, sm_scale, backend)
        queries = None if ready is None else ready[0]
        found = at.append(k, v, None, *self.counters_of(layer), queries, append)
        state = None if work is None else work(q)
        if state is None:
            seen, of_layer = at.seen_by(layer, k.shape[2], None, variant, in_step=True)
            call = AttentionCall(q, seen, sm_scale, num_splits, return_lse, None, of_layer, backend)
            transformed = None if found is None or ready is None else (found, ready[1])
            out, lse = attend(call, basis, at.seq_lens, transformed)
            if taken is None and can_bind and (append := at.bound.find(k, v)):
                key = kind_of(q), sm_scale, num_splits  # as kernels/cpu/decode.py keeps it
                work = None if basis else getattr(seen, "bound", {}).get(key)
                at.bound.keep((kind_of(q, k, v), options), (append, work))
        else:
            out, lse = state[0].to(q.dtype), state[1] if return_lse else None
        if self.compared is not None and variant is None:
            self._compare(layer, q, sm_scale)
        return out if lse is None else (out, lse)

    def check(self) -> None:
        """Raise if an append since the last check failed silently (see append).

        Call it between steps, when every layer has the same tokens. It waits for each GPU once, to
        read counters and lengths, and resets the counters.

        Raises:
            NonFiniteError: rows had values that their formats cannot hold.
            ShapeError: tokens had no room, or layers hold different lengths: a step left one
                out, or appended twice.
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
        """Reset bad_rows and overflow_tokens on all devices."""
        for counter in self._all_counters():
            counter.zero_()

    def crop(self, seq_lens: int | Counts) -> None:
        """Drop the last tokens of each sequence.

        Removing at most rollback_len tokens, counted from the longest the sequence has been,
        restores the cache bit for bit. After more, or after loading a file, packed rows stay packed
        and the recent window fills again with the next tokens.

        Args:
            seq_lens: tokens to keep: one number for all (shorter sequences stay as they are), or
                [batch].

        Raises:
            ShapeError: a length below 0, or given per sequence and over the present one; or a
                layer with a window has dropped tokens that it would see (layer.SPARE).
        """
        wanted = lens_to_keep(seq_lens, self.seq_lens.cpu())
        self._crop_layers(wanted.expand(self.num_layers, -1))

    def _crop_layers(self, lens: torch.Tensor) -> None:
        """Crop each layer to [num_layers, batch] tokens, all or none."""
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
        """Keep the sequences at some places, in place; their number is the new batch.

        It moves the tensors of the layers and start_positions, as grow does.

        Args:
            index: [new batch] of places from 0 to batch - 1, in any order, with or without
                repeats.

        Raises:
            ShapeError: a place does not exist.
            ConfigError: too little memory beside this cache, or a call in a CUDA graph or under
                torch.compile; the cache stays as it was.

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
        """A new cache with `times` copies of each sequence, side by side, and memory of its own.

        Raises:
            ConfigError: times is not a whole number from 1, or there is too little memory.
        """
        times = check_size("times", times, at_least=1)
        nbytes = [times * sum(x.nbytes for x in at.tensors().values()) for at in self.layers]
        what = f"a cache of {times * self.batch} sequences"  # before there is a list of them
        self._check_memory(nbytes, what, "use a smaller number of times")
        places = torch.arange(self.batch, device="cpu").repeat_interleave(times)
        return self._taken(self._check_index(places))

    def fork(self, index: Counts | None = None) -> KVCache:
        """A new cache with the same contents that shares no memory with this one.

        Args:
            index: places of the sequences to take, in any order; all when None.

        Raises:
            ShapeError: a place does not exist.
        """
        return self._taken(self._check_index(range(self.batch) if index is None else index))

    @torch.inference_mode(False)  # as __init__
    def grow(self, max_seq_len: int) -> None:
        """Give every sequence room for more tokens, in place; the cache goes on bit for bit.

        Layers are copied one at a time: the peak is the larger cache and one layer of this one. The
        tensors move, so capture CUDA graphs and take segments again.

        Args:
            max_seq_len: tokens that a sequence has room for, at least as many as now.

        Raises:
            ConfigError: fewer than now, too little memory, or a call in a CUDA graph or under
                torch.compile; the cache stays as it was.

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

        It crops them. If more than 512 tokens may come, layers with a window are copied first and
        restored bit for bit. What the block crops, reorders or selects stays so.

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
        """[num_layers, batch] on the CPU, by one read of each device."""
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
        """A layer with as much room or more, and the same sequences."""
        copy = self._make_layer(self.batch, max_seq_len, layer.kind)
        copy.take(layer)
        return copy

    def _layer_bytes(self, batch: int, max_seq_len: int, kind: Kind) -> int:
        """Bytes of a layer of this kind."""
        k_format, v_format, _, window, _ = kind
        sizes = max_seq_len, self.sink_len, self.recent_len, window, self.rollback_len
        rooms = rooms_of(*sizes, packed_row_bytes(k_format, v_format, latent=self.latent))
        nbytes = rooms.bytes_of(k_format, v_format, self.exact_format)
        return batch * (self.num_kv_heads * nbytes + 32)  # eight lengths

    def _check_memory(
        self, nbytes: Sequence[int], what: str, advice: str, besides: int = 0
    ) -> None:
        """Raise ConfigError unless devices may have room for layers and `besides` (check_room)."""
        for device in dict.fromkeys(self.devices):
            own = [n for n, one in zip(nbytes, self.devices, strict=True) if one == device]
            if sum(own) + besides > _LARGE:
                check_room(sum(own) + besides, device, what, advice)

    def _lens(self) -> dict[torch.device, list[torch.Tensor]]:
        """seq_lens of the layers by device; the first layer's comes first."""
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
        if type(layer) is not int or not 0 <= layer < len(self.layers):
            check_layer(layer, self.num_layers)
        if self.device.type == "meta":
            check_holds(self.device)
        return self.layers[layer]

    def _change(self, k: torch.Tensor, variant: AttentionVariant | None = None) -> None:
        """Note an append; the first one compiles its kernels, and those of steps of `variant`."""
        if torch.compiler.is_compiling():
            return
        self.changes += 1
        if self.is_cold:
            self.is_cold = False
            if variant is not None:
                self.step_variant = moved(variant, "meta")
            warm_up_first(self, k)

    def _compare(self, layer: int, q: torch.Tensor, sm_scale: float | None) -> None:
        """Warn, once and eagerly, if K rows of few bits move recent attention weights."""
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
        """An empty cache like this one, of so many sequences, on the given devices."""
        kind: Any = type(self)
        other: KVCache = kind(
            num_layers=self.num_layers,
            batch=batch,
            max_seq_len=self.max_seq_len,
            sink_len=self.sink_len,
            recent_len=self.recent_len,
            exact_format=self.exact_format,
            device=device,
            bases=self.bases,
            rollback_len=self.rollback_len,
            **self.LAYER.row_kind.options(self.num_kv_heads, self.head_dim, *self._formats),
            **({} if self.latent else {"windows": self.windows}),
        )
        other.num_q_heads, other.step_lens = self.num_q_heads, self.step_lens
        other.step_variant = self.step_variant
        other.compared = None  # in this one, or never
        return other

    def _taken(self, index: torch.Tensor) -> KVCache:
        other = self.like(len(index), self.devices)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            theirs.take(mine, index)
        other.start_positions.copy_(self.start_positions.index_select(0, index))
        return other
