"""Types of attention's options: return_lse decides what a call returns.

    @overload
    def attend(self, layer: int, q: Tensor, **options: Unpack[StepOptions[No]]) -> Tensor: ...
    @overload
    def attend(self, layer: int, q: Tensor, **options: Unpack[StepOptions[Yes]]) -> State: ...

A type checker refuses a flag that is known only when the call runs: write both calls. Import this
file under TYPE_CHECKING. Each function names its options, for help().
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from torch import Tensor
from typing_extensions import Required, TypedDict

from .format import RowFormat
from .latent import LatentFormat
from .rotation import Rope
from .variant import AttentionVariant

No = Literal[False]
Yes = Literal[True]
Lse = TypeVar("Lse")  # No or Yes
Maybe = Tensor | None
State = tuple[Tensor, Tensor]


class _Options(TypedDict, Generic[Lse], total=False):
    return_lse: Lse
    backend: str | None


class RankOptions(_Options[Lse], total=False):
    """Options of ContextParallelCache.attend."""

    variant: AttentionVariant | None
    sm_scale: float | None


class StepOptions(RankOptions[Lse], total=False):
    """Options of KVCache.step."""

    num_splits: int | None


class AttendOptions(StepOptions[Lse], total=False):
    """Options of KVCache.attend; LatentKVCache has q_rope in place of q_lens."""

    q_lens: Maybe
    in_step: bool


class PagedAttendOptions(StepOptions[Lse], total=False):
    """Options of PagedBatch.attend."""

    q_indptr: Maybe


class PagedStepOptions(PagedAttendOptions[Lse], total=False):
    """Options of PagedBatch.step."""

    rope: Rope | None


class LatentStepOptions(StepOptions[Lse], total=False):
    """Options of LatentKVCache.step."""

    in_basis: bool


class LatentAttendOptions(LatentStepOptions[Lse], total=False):
    """Options of LatentKVCache.attend."""

    in_step: bool


class LatentOptions(_Options[Lse], total=False):
    """Options of LatentPagedBatch."""

    sm_scale: Required[float]
    num_splits: int | None


class MlaOptions(LatentOptions[Lse], total=False):
    """Options of mla_decode_attention."""

    fmt: Required[str | LatentFormat]
    block_table: Maybe
    q_lens: Maybe


class RowOptions(TypedDict, Generic[Lse], total=False):
    """Options of reference_attention."""

    return_lse: Lse
    k_format: Required[str | RowFormat]
    v_format: Required[str | RowFormat]
    block_table: Maybe
    q_lens: Maybe
    q_indptr: Maybe
    variant: AttentionVariant | None
    sm_scale: float | None


class OpOptions(RowOptions[Lse], total=False):
    """Options of decode_attention."""

    num_splits: int | None
    backend: str | None
