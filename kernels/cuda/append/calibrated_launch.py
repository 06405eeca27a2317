"""Append on CUDA where rows are multiplied by a matrix or rounded with feedback: a side at a time.

matrix      one launch of the turn kernel for the side, with the offset; torch's product after
            RoPE or a rotation, and of float32
feedback    one launch of the feedback kernel for the side; without it one of the append kernel
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvquant.rows.format import RowFormat
from kvquant.rows.quantize import LEVELS
from kvquant.rows.slots import Slots
from kvquant.rows.transforms import Rope, RowTransform, transform_rows

from ..affine.launch import SOURCES, encode_rows
from ..runtime.launch import launch_on
from .feedback_launch import Fed, prepare
from .launch import NO_TRANSFORM, prepare_side


def append_calibrated(
    k: torch.Tensor,
    v: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slots: Slots,
    k_format: RowFormat,
    v_format: RowFormat,
    exact_k: torch.Tensor | None = None,
    exact_v: torch.Tensor | None = None,
    exact_format: str = "bf16",
    k_transform: RowTransform | None = None,
    v_transform: RowTransform | None = None,
    rope: Rope | None = None,
    bad: torch.Tensor | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Append on the current stream; arguments and errors as of append.append."""
    rounded = k_transform or NO_TRANSFORM, v_transform or NO_TRANSFORM
    of_k = "k", k, k_rows, k_format, exact_k, rounded[0], rope
    of_v = "v", v, v_rows, v_format, exact_v, rounded[1], None
    fed, ready = [], []
    for i, (name, x, rows, fmt, exact_rows, transform, turn) in enumerate((of_k, of_v)):
        if transform.matrix is not None:
            x = _encode(x.detach(), transform, turn, check)
            transform, turn = RowTransform(clip=transform.clip, feedback=transform.feedback), None
        counted = None if bad is None else bad[i:]
        where = name, x, rows, slots, fmt
        how = exact_rows, exact_format, turn, counted
        if transform.feedback is not None and fmt.codec in LEVELS:
            fed.append(Fed(*where, transform, *how))
        else:
            ready.append(prepare_side(*where, transform, *how, check))
    if fed:
        ready.append(prepare(fed, check))
    for one in ready:  # both sides can be done
        if one:
            launch_on(*one)


def _encode(
    x: torch.Tensor, transform: RowTransform, rope: Rope | None, check: Callable[[], None] | None
) -> torch.Tensor:
    """What transform_rows gives, where there is a matrix; check: as of turn.turn_rows."""
    offset, rotate, matrix, _, _ = transform
    assert matrix is not None
    if rope is None and not rotate and x.dtype in SOURCES:
        return encode_rows(x, matrix, offset, check)
    if check:
        check()
    return transform_rows(x, transform, rope)
