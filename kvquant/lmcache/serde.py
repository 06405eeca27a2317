"""The serde "kvquant" of LMCache: 16-bit keys and values become rows on the way to its storage.

    an object of LMCache   [layers, tokens, KV heads * 2 * head_dim] in 16 or 32 bit: K of a head,
                           then its V, as in pages of vLLM on GPUs; or, of other engines,
                           [2, layers, tokens, KV heads * head_dim]: K, then V
    what is stored         TAG bytes, which other formats or another plan would not have; then rows
                           [KV heads, tokens, row bytes] of K of each layer, then of V

Rows have one length, so sizes are exact. Importing this module registers the serde.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..errors import missing_extra

try:
    import lmcache  # noqa: F401
except ImportError as error:
    raise missing_extra("the serde of LMCache needs LMCache", "lmcache", error) from error

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde.async_processor import AsyncSerdeProcessor
from lmcache.v1.distributed.serde.base import Deserializer, SerdeProcessor, Serializer
from lmcache.v1.distributed.serde.factory import register_serde_factory
from lmcache.v1.memory_management import MemoryObj

from ..engine.hooks import check_version, hook
from ..engine.settings import Settings, rank_heads
from ..errors import CheckpointError, ConfigError, ShapeError, UnsupportedError, shown
from ..io.plan import CachePlan, ModelPlan, as_plan
from ..ops.quantize import dequantize_rows, quantize_calibrated, quantize_rows
from ..rows.arguments import check_size
from ..rows.basis import Basis, LayerBasis, fingerprints
from ..rows.format import RowFormat

check_version("lmcache")
KEYS = ("k_format", "v_format", "head_dim", "plan", "max_workers")
TAG = 32  # bytes


class Piece(NamedTuple):
    """K or V of a layer in an object.

    Attributes:
        values: [tokens, num_kv_heads, head_dim], of the object.
        rows: [num_kv_heads, tokens, row_bytes], uint8, of what is stored.
        fmt: format of the rows.
        basis: that they are stored in; None for none.
    """

    values: torch.Tensor
    rows: torch.Tensor
    fmt: RowFormat
    basis: Basis | None


@hook("lmcache")
class RowSerde(Serializer, Deserializer):
    """Quantize objects of LMCache to rows, and back, on their device.

    Args:
        head_dim: of the model; the plan's when None.
        k_format: short name of K's format ("int8"); None for the plan's of each layer, or the
            default.
        v_format: of V's, likewise; beside a plan and a k_format, K's when None.
        plan: bases of the model, or the path of its file; None for none.

    Raises:
        ConfigError: a format or a head_dim does not exist, or is missing.
    """

    def __init__(
        self,
        head_dim: int | None = None,
        k_format: str | None = None,
        v_format: str | None = None,
        plan: ModelPlan = None,
    ) -> None:
        plan = None if plan is None or plan is False else as_plan(plan)
        if plan is None and head_dim is None:
            raise ConfigError("the serde lacks head_dim: give that of the model, or a plan")
        self.head_dim: int = head_dim if plan is None else plan.head_dim  # type: ignore[assignment]
        # of each layer, or, without a plan, of all
        if plan is not None:
            plan.check_of_heads("the serde")
            if head_dim not in (None, plan.head_dim):
                told = f"head_dim is {shown(head_dim)}, that of the plan {plan.head_dim}"
                raise ConfigError(told)
            if k_format is None and v_format is not None:
                raise ConfigError("v_format is given beside a plan, without k_format: give both")
            plan = plan if k_format is None else plan.with_formats(k_format, v_format)
            self._formats = list(zip(plan.k_formats, plan.v_formats, strict=True))
        else:
            layout = Settings(k_format, v_format).layout(1, self.head_dim, self.head_dim)
            self._formats = [layout[:2]]
        self.plan = plan
        known = [self.head_dim, [list(map(str, pair)) for pair in self._formats]]
        bases = fingerprints(None if plan is None else plan.layers)
        self._tag = hashlib.sha256(json.dumps([known, bases]).encode()).digest()

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """The exact bytes of a stored object.

        Raises:
            ShapeError: it has neither of the two shapes above.
            UnsupportedError: the plan has other layers.
        """
        return self._size(layout_desc.shapes)

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        """Quantize an object; return the bytes written. A row with NaN or Inf comes back as NaN."""
        stored = self._stored(dst, src.get_shapes())
        stored[:TAG] = torch.frombuffer(bytearray(self._tag), dtype=torch.uint8)
        for values, rows, fmt, basis in self._pieces(src, stored, key):
            x = values.transpose(0, 1)[None]
            if basis is None:
                rows.copy_(quantize_rows(x, fmt, check=False)[0])
            else:
                x = basis.encode(x)
                rows.copy_(quantize_calibrated(x, fmt, clip=basis.clip, feedback=basis.feedback)[0])
        return len(stored)

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Dequantize an object; CheckpointError for other formats or another plan."""
        stored = self._stored(src, dst.get_shapes())
        if bytes(stored[:TAG].tolist()) != self._tag:
            raise CheckpointError(
                "the object was stored with other formats or another plan, or is none of "
                "kvquant's: give each of them a storage of its own"
            )
        for values, rows, fmt, basis in self._pieces(dst, stored, key):
            x = dequantize_rows(rows, fmt, values.dtype if basis is None else torch.float32)
            if basis is not None:
                x = basis.decode(x[None])[0]
            values.copy_(x.transpose(0, 1))

    def _size(self, shapes: Sequence[torch.Size]) -> int:
        size = TAG
        for shape in shapes:
            layers, tokens, heads = self._sizes(shape)
            if self.plan is not None and (len(shapes) > 1 or layers != self.plan.num_layers):
                raise UnsupportedError(
                    f"an object has {[self._sizes(one)[0] for one in shapes]} layers, the plan "
                    f"{self.plan.num_layers}: leave the plan out"
                )
            for layer in range(layers):
                size += tokens * heads * sum(fmt.row_bytes for fmt in self._formats_of(layer))
        return size

    def _sizes(self, shape: torch.Size) -> tuple[int, int, int]:
        is_fused = len(shape) == 3
        heads, rest = divmod(shape[-1], self.head_dim * (2 if is_fused else 1))
        if rest or not (is_fused or (len(shape) == 4 and shape[0] == 2)):
            raise ShapeError(
                f"an object is {list(shape)}: it must be [layers, tokens, KV heads * 2 * "
                f"{self.head_dim}] or [2, layers, tokens, KV heads * {self.head_dim}]"
            )
        return shape[-3], shape[-2], heads

    def _formats_of(self, layer: int) -> tuple[RowFormat, RowFormat]:
        return self._formats[0 if self.plan is None else layer]

    def _stored(self, obj: MemoryObj, shapes: Sequence[torch.Size]) -> torch.Tensor:
        size = self._size(shapes)
        stored: torch.Tensor | None = obj.tensor
        if stored is None or stored.dtype != torch.uint8 or stored.numel() < size:
            given = None if stored is None else f"{stored.numel()} of {stored.dtype}"
            raise ShapeError(f"the buffer is {given}: it must have {size} bytes")
        return stored.flatten()[:size]

    def _pieces(self, obj: MemoryObj, stored: torch.Tensor, key: ObjectKey) -> Iterator[Piece]:
        first = TAG
        for group, shape in enumerate(obj.get_shapes()):
            whole = obj.get_tensor(group)
            assert whole is not None
            # with all sizes: torch finds none for -1 where there is no token
            layers, tokens, heads = sizes = self._sizes(shape)
            if len(shape) == 4:
                whole = whole.view(2, *sizes, self.head_dim)
            else:
                whole = whole.view(*sizes, 2, self.head_dim).movedim(-2, 0)
            bases = None if self.plan is None else _bases_of(self.plan, heads, key.kv_rank)
            for side in range(2):
                for layer in range(layers):
                    fmt = self._formats_of(layer)[side]
                    last = first + heads * tokens * fmt.row_bytes
                    rows = stored[first:last].view(heads, tokens, fmt.row_bytes)
                    basis = None if bases is None else bases[layer][side]
                    yield Piece(whole[side, layer], rows, fmt, basis)
                    first = last


@lru_cache(maxsize=64)
def _bases_of(plan: CachePlan, num_kv_heads: int, kv_rank: int) -> list[LayerBasis]:
    """The bases of a rank's heads in each layer."""
    total = plan.num_kv_heads
    ranks, rank = kv_rank >> 24 & 0xFF, kv_rank >> 16 & 0xFF  # as ObjectKey.ComputeKVRank
    heads = list(range(total)) if num_kv_heads == total else rank_heads(total, rank, ranks)
    if len(heads) != num_kv_heads:
        raise UnsupportedError(
            f"an object has {num_kv_heads} KV heads on rank {rank} of {ranks}, the plan {total} "
            "on all: calibrate this model, or leave the plan out"
        )
    return plan.of_heads(heads).layers


@hook("lmcache")
def create_serde(given: Mapping[str, Any]) -> SerdeProcessor:
    """Make the serde of an adapter's "serde" settings.

    Args:
        given: arguments of RowSerde, and "max_workers" (threads, 1 unless given).

    Raises:
        ConfigError: a key does not exist, or as RowSerde.
        FileNotFoundError: there is no such plan.
        CheckpointError: the file is damaged, or no plan.
    """
    if not given.keys() <= set(KEYS):
        raise ConfigError(f'"serde" of type "kvquant" has {shown([*given])}: it may have {KEYS}')
    options = dict(given)
    max_workers = check_size("max_workers", options.pop("max_workers", 1), at_least=1)
    serde = RowSerde(**options)
    return AsyncSerdeProcessor(serde, serde, max_workers=max_workers)


register_serde_factory("kvquant", create_serde)
