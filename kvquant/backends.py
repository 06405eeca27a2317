"""The eager attention call: checks, choice of the kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from . import debug
from .devices import kernels_for
from .errors import ConfigError
from .quant import FLOAT_DTYPES
from .reference import reference_over_segments
from .segments import LooseRows, Segment, check_segments, make_segment

Result = tuple[torch.Tensor, "torch.Tensor | None"]
Kernel = Callable[[torch.Tensor, Sequence[Segment], float, "int | None", bool], Result]
CudaKernel = Callable[..., Result]


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
    if (
        (backend is None or backend == "cuda")
        and q.is_cuda
        and not debug.enabled
        and (num_splits is None or type(num_splits) is int)
    ):  # the CUDA launcher checks only calls that it has not seen
        return _cuda()(q, segments, sm_scale, num_splits, return_lse, _check_cuda)
    checked = _check(q, segments, num_splits)
    kernel = _choose_kernel(q, backend)
    if q.is_cpu or debug.enabled or backend == "reference":
        debug.check_values(checked)
    if q.requires_grad:
        q = q.detach()
    sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    return kernel(q, checked, sm_scale, num_splits, return_lse)


def _check(
    q: torch.Tensor, segments: Sequence[Segment | LooseRows], num_splits: int | None
) -> list[Segment]:
    """The segments, with formats and not their names, if q can attend to them."""
    made = []
    for rows in segments:
        if not isinstance(rows, Segment):
            k_rows, v_rows, seq_lens, k_format, v_format, _, block_table, _, _ = rows
            rows = make_segment(q, k_rows, v_rows, seq_lens, k_format, v_format, block_table)
        made.append(rows)
    if q.dtype not in FLOAT_DTYPES:
        raise ConfigError(f"q is {q.dtype}: use float32, bfloat16 or float16")
    check_num_splits(num_splits)
    check_segments(q, made)
    return made


def check_num_splits(num_splits: int | None) -> None:
    """Raise ConfigError unless it is a number of splits; torch.compile traces this."""
    if num_splits is None:
        return
    if isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 1:
        raise ConfigError(
            f"num_splits {num_splits} is not possible: use a whole number from 1, or None"
        )


def _check_cuda(
    q: torch.Tensor, segments: Sequence[Segment | LooseRows], num_splits: int | None
) -> list[Segment]:
    checked = _check(q, segments, num_splits)
    _require_extra()
    return checked


def _choose_kernel(q: torch.Tensor, backend: str | None) -> Kernel:
    backend = kernels_for(q, backend, "reference")
    if backend == "reference":
        return _attend_reference
    if backend == "cpu":
        return _attend_cpu
    _require_extra()
    return _cuda()


@functools.cache
def _cuda() -> CudaKernel:
    from .kernels.cuda.launch import attend

    return attend


def _require_extra() -> None:
    from .kernels.cuda.compile import require_extra

    require_extra()


def _attend_cpu(
    q: torch.Tensor,
    segments: Sequence[Segment],
    sm_scale: float,
    num_splits: int | None,
    return_lse: bool,
) -> Result:
    from .kernels.cpu.decode import attend

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
