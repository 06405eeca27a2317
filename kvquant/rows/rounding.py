"""Better rows of the same formats: clipped ranges, and rounding with feedback.

Both choose other scales, shifts and codes; how a row is read does not change, so decoding costs
nothing more.

    clip        a group's elements are clamped to the middle of its range +- ratio * half of it:
                a few large errors for many smaller ones
    feedback    elements are rounded one after another, and each makes up for the errors of those
                before it, as far as the attention that will read them can tell:

                    e_j = value_j - x_j                          the errors so far
                    code_i = round(x_i - sum_{j<i} L_ij e_j)     against the group's scale and shift

    With W the weights of the error, L^T D L = W, L unit lower triangular: then e^T W e is the sum
    of D_i times the squared rounding error of step i, and not, as with independent errors, of W_ii.

Source: the rounding of GPTQ (https://arxiv.org/abs/2210.17323) in the form of LDLQ
(https://arxiv.org/abs/2307.13304), there for weights.
"""

from __future__ import annotations

import torch

from ..errors import ConfigError, DeviceError, ShapeError
from .format import RowFormat
from .quantize import LEVELS, choose_backend, quantize_rows


def feedback_matrix(weights: torch.Tensor) -> torch.Tensor:
    """L of the module's docstring.

    Args:
        weights: [num_kv_heads, head_dim, head_dim], symmetric and positive definite: how much the
            products of errors count.

    Returns:
        The same shape and dtype, unit lower triangular.
    """
    upper = torch.linalg.cholesky(weights.flip(-1, -2)).flip(-1, -2)
    unit: torch.Tensor = upper / upper.diagonal(dim1=-2, dim2=-1)[..., None, :]
    return unit.mT.contiguous()


def clip_rows(x: torch.Tensor, groups: int, ratio: torch.Tensor) -> torch.Tensor:
    """Clamp the elements of each group to a share of its range.

    Args:
        x: [batch, num_kv_heads, tokens, head_dim], float32.
        groups: of a row.
        ratio: [num_kv_heads], float32.

    Returns:
        The same shape.
    """
    grouped = x.unflatten(-1, (groups, -1))
    least, greatest = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    middle = (least + greatest) * 0.5
    half = (greatest - least) * 0.5 * ratio[:, None, None, None]
    clipped: torch.Tensor = grouped.clamp(middle - half, middle + half)
    return clipped.flatten(-2)


def quantize_calibrated(
    x: torch.Tensor,
    fmt: RowFormat,
    *,
    clip: torch.Tensor | None = None,
    feedback: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Quantize rows with a clip ratio and feedback for each KV head.

    Args:
        x: [batch, num_kv_heads, tokens, head_dim], float32, bfloat16 or float16.
        fmt: the format of the rows; clip and feedback concern integer codes only.
        clip: [num_kv_heads], float32: share of its range that a group keeps; None for all.
        feedback: [num_kv_heads, head_dim, head_dim], float32, from feedback_matrix; None for the
            nearest codes.
        backend: as in quantize_rows, or "cuda": feedback by one launch in place of about 800 of
            torch, the default for CUDA tensors.

    Returns:
        [batch, num_kv_heads, tokens, row_bytes], uint8; rows with values that the format cannot
        hold decode to NaN.

    Raises:
        ShapeError: clip or feedback does not fit the rows.
        ConfigError: clip or feedback is not float32.
        DeviceError: they lie on another device than x.
        UnsupportedError: feedback on CUDA without the cuda extra, or on too old a GPU.
    """
    _check(x, clip, feedback)
    if fmt.codec not in LEVELS or (clip is None and feedback is None) or not x.numel():
        return quantize_rows(x, fmt, check=False, backend=backend)
    if feedback is not None and x.is_cuda and backend in (None, "cuda"):
        from ..kernels.cuda.append.launch import quantize_with_feedback

        return quantize_with_feedback(x, fmt, clip, feedback)
    x = x.float()
    inside = x
    if clip is not None:  # what was too large must not look as if it were not
        holdable = (x.abs() <= fmt.max_abs).all(-1, keepdim=True)
        inside = torch.where(holdable, clip_rows(x, fmt.groups, clip), torch.nan)
    rows = quantize_rows(inside, fmt, check=False, backend=backend)
    if feedback is None:
        return rows
    params = rows[..., : fmt.header_bytes].contiguous().view(torch.float16).float()
    params = params.unflatten(-1, (fmt.groups, 2))
    levels = LEVELS[fmt.codec]
    if choose_backend(x, backend) == "cpu":
        from ..kernels.cpu.feedback import round_with_feedback

        codes = round_with_feedback(x, params, feedback, levels)
    else:
        codes = _round_with_feedback(x, params, feedback, levels)
    codes = codes.nan_to_num().to(torch.uint8)
    if fmt.codec == "int4":
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    is_nan = params[..., :1, 0].isnan()
    rows[..., fmt.header_bytes :] = torch.where(is_nan, 0, codes)
    return rows


def _check(x: torch.Tensor, clip: torch.Tensor | None, feedback: torch.Tensor | None) -> None:
    """Raise unless clip and feedback can be those of the heads of x."""
    if x.ndim != 4:
        raise ShapeError(
            f"x is {list(x.shape)}: it must be [batch, num_kv_heads, tokens, head_dim]"
        )
    heads, dim = x.shape[1], x.shape[3]
    for name, tensor, shape in (
        ("clip", clip, (heads,)),
        ("feedback", feedback, (heads, dim, dim)),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ShapeError(f"{name} is {list(tensor.shape)}: it must be {list(shape)}")
        if tensor.dtype != torch.float32:
            raise ConfigError(f"{name} is {tensor.dtype}: use torch.float32")
        if tensor.device != x.device:
            raise DeviceError(f"x is on {x.device}, {name} on {tensor.device}")


def _round_with_feedback(
    x: torch.Tensor, params: torch.Tensor, feedback: torch.Tensor, levels: float
) -> torch.Tensor:
    """Codes [batch, heads, tokens, head_dim], float32, one element after another."""
    batch, dim = len(x), x.shape[-1]
    params = params.repeat_interleave(dim // params.shape[-2], dim=-2)
    # elements first: each step works on contiguous vectors
    x, scale, shift = (t.permute(3, 1, 0, 2).flatten(2) for t in (x, *params.unbind(-1)))
    inverse = torch.where(scale == 0, 0.0, scale.reciprocal())
    owed = torch.zeros_like(x)  # what an element has to make up for
    codes = torch.empty_like(x)
    for i in range(dim):
        codes[i] = ((x[i] - owed[i] - shift[i]) * inverse[i]).round().clamp(0, levels)
        error = codes[i] * scale[i] + shift[i] - x[i]
        owed[i + 1 :] += feedback[:, i + 1 :, i].t()[..., None] * error
    ordered: torch.Tensor = codes.unflatten(2, (batch, -1)).permute(2, 1, 3, 0)
    return ordered
