"""The eager attention call: checks, choice of the kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from .. import debug
from ..arguments import check_flag, check_num_splits, check_readable, check_scale, check_tensors
from ..errors import ConfigError, shown
from ..rows.format import RowFormat
from ..rows.quantize import FLOAT_DTYPES
from ..rows.reference import reference_over_segments
from ..rows.segment import LooseRows, Segment, check_segment_values, check_segments, make_segment
from .dispatch import kernels_for

Result = tuple[torch.Tensor, "torch.Tensor | None"]
Kernel = Callable[[torch.Tensor, Sequence[Segment], float, "int | None", bool], Result]
CudaKernel = Callable[..., Result]
_TENSORS = ("k_rows", "v_rows", "seq_lens", "starts", "block_table", "seq_slots")


def attend(
    q: torch.Tensor,
    segments: Sequence[Segment | LooseRows],
    sm_scale: float | None,
    return_lse: bool,
    num_splits: int | None,
    backend: str | None,
) -> Result:
    """Check and attend; see attention.attend_segments.

    Returns:
        out, the dtype of q, and lse, float32, base e, or None if it was not asked for.
    """
    if num_splits is not None and type(num_splits) is not int:
        num_splits = check_num_splits(num_splits)
    if type(return_lse) is not bool:
        check_flag("return_lse", return_lse)
    try:
        if (
            (backend is None or backend == "cuda") and q.is_cuda and not debug.enabled
        ):  # the CUDA launcher checks only calls that it has not seen
            return _cuda()(q, segments, sm_scale, num_splits, return_lse, _check_cuda)
        checked = _check(q, segments, num_splits)
        kernel = _choose_kernel(q, backend)
        if q.is_cpu or debug.enabled or backend == "reference":
            check_segment_values(checked)
        if q.requires_grad:
            q = q.detach()
        sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else check_scale(sm_scale)
        return kernel(q, checked, sm_scale, num_splits, return_lse)
    except (AttributeError, TypeError, RuntimeError):  # looked at only now: it takes time
        check_types(q, segments)
        raise


def _check(
    q: torch.Tensor, segments: Sequence[Segment | LooseRows], num_splits: int | None
) -> list[Segment]:
    """The segments, with formats and not their names, if q can attend to them."""
    made = []
    for rows in segments:
        if (
            type(rows) is not Segment
            or type(rows[3]) is not RowFormat
            or type(rows[4]) is not RowFormat
        ):
            if not isinstance(rows, tuple) or len(rows) != len(Segment._fields):
                raise TypeError("no segment")
            rows = make_segment(q, rows)
        made.append(rows)
    if q.dtype not in FLOAT_DTYPES:
        check_tensors(q=q)
        raise ConfigError(f"q is {q.dtype}: use float32, bfloat16 or float16")
    if num_splits is not None and num_splits < 1:
        check_num_splits(num_splits)
    check_segments(q, made)
    return made


def check_types(q: torch.Tensor, segments: Sequence[Segment | LooseRows]) -> None:
    """Raise ConfigError unless q and all of the segments are of the types that they must be."""
    check_readable(q=q)
    if not isinstance(segments, Sequence) or isinstance(segments, Segment):
        raise ConfigError(f"segments is of type {type(segments).__name__}: give a list of Segment")
    for rows in segments:
        if not isinstance(rows, tuple) or len(rows) != len(Segment._fields):
            raise ConfigError(f"segments has a {type(rows).__name__} in it: give a list of Segment")
        given = dict(zip(Segment._fields, rows, strict=True))
        optional = {name for name in ("starts", "block_table", "seq_slots") if given[name] is None}
        check_readable(**{name: given[name] for name in _TENSORS if name not in optional})
        for fmt in (given["k_format"], given["v_format"]):
            if not isinstance(fmt, RowFormat | str):
                raise ConfigError(f"the format is {shown(fmt)}: give a name ('int4-g4')")


def _check_cuda(
    q: torch.Tensor, segments: Sequence[Segment | LooseRows], num_splits: int | None
) -> list[Segment]:
    checked = _check(q, segments, num_splits)
    _require_extra()
    return checked


def _choose_kernel(q: torch.Tensor, backend: str | None) -> Kernel:
    backend = kernels_for(q, backend)
    if backend == "reference":
        return _attend_reference
    if backend == "cpu":
        return _attend_cpu
    _require_extra()
    return _cuda()


@functools.cache
def _cuda() -> CudaKernel:
    from ..kernels.cuda.decode.launch import attend

    return attend


def _require_extra() -> None:
    from ..kernels.cuda.runtime.compile import require_extra

    require_extra()


def _attend_cpu(
    q: torch.Tensor,
    segments: Sequence[Segment],
    sm_scale: float,
    num_splits: int | None,
    return_lse: bool,
) -> Result:
    from ..kernels.cpu.decode import attend

    out, lse = attend(q, segments, sm_scale, num_splits)
    return out.to(q.dtype), lse if return_lse else None


def _attend_reference(
    q: torch.Tensor,
    segments: Sequence[Segment],
    sm_scale: float,
    num_splits: int | None,
    return_lse: bool,
) -> Result:
    out, lse = reference_over_segments(q, segments, sm_scale)
    return out.to(q.dtype), lse.float() if return_lse else None
