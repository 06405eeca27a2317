"""Quantize and dequantize rows: the reference of every format, in plain torch, on any device.

The contract, which every kernel repeats bit for bit (all arithmetic in float32, round to nearest
even unless said otherwise; mn, mx = the least and the greatest element of a group):

    INT2, INT3, INT4, INT8   levels = 3, 7, 15, 255
        shift = mn rounded down to fp16
        scale = (mx - shift) * (1 / levels) rounded up to fp16
        code  = clamp(round((x - shift) * (1 / scale)), 0, levels)
    FP8
        shift = (mn / 2 + mx / 2) rounded to fp16
        scale = max(mx - shift, shift - mn) * (1 / 448) rounded up to fp16
        code  = e4m3(clamp((x - shift) * (1 / scale), -448, 448))
    all: where scale is 0, 1 / scale counts as 0
        value = code * scale + shift
    FP8_DS_MLA (FlashMLA's latents)
        shift = 0
        scale = the least power of two not under max(mx, -mn, 448 * 1e-4) / 448, in float32
        code  = as of FP8

A latent row is quantized part by part, each as a row of its own.

Codes are computed against the stored scale and shift, and both are rounded outwards, so that no
element lies outside the codes' range and for every finite input, with u = 2**-24 |value|, or
2**-140 (deep in float32's subnormals) where that is more:

    INT2 to 8    |x - value| <= scale * (1/2 + 2**-12) + u
    FP8          |x - value| <= max(|x - shift| / 16, scale * 2**-10) * (1 + 2**-12) + u
    FP8_DS_MLA   |x - value| <= max(|x| / 16, scale * 2**-10)

code * scale is exact in float32 (at most 8 + 11 bits), so a fused multiply-add gives the same
value. FBGEMM reads these rows alike, but rounds parameters to the nearest fp16 and codes against
the unrounded ones: groups with a large offset lose most of their codes.

Calibrated rows have the same formats with other scales, shifts and codes; reading costs the same.

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

import functools
import math
from contextlib import AbstractContextManager, nullcontext

import torch

from ..errors import ConfigError, NonFiniteError, ShapeError, shown
from .arguments import check_readable, check_tensor
from .codec import BF16_MAX, FP16_MAX
from .format import NAMES, ROW_DIMS, RowFormat
from .latent import AnyFormat, LatentFormat

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXACT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FORMATS = [RowFormat.parse(name, head_dim) for name in NAMES for head_dim in ROW_DIMS]
# by short name and bytes of a row; torch.compile can look here, and make no format
_OF_LENGTH = {(str(fmt), fmt.row_bytes): fmt for fmt in _FORMATS}
# the bits of each code that the planes of a layout have, the lowest first; none: a byte is a code
PLANES: dict[str, tuple[int, ...]] = {
    "bytes": (),
    "nibbles": (4,),
    "quarters": (2,),
    "planes": (2, 1),
}
LEAST_DS_SCALE = 1e-4  # FlashMLA's, before it is rounded up to a power of two


def quantize(x: torch.Tensor, fmt: AnyFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the last axis of x [..., head_dim] to rows [..., row_bytes], uint8.

    A row, or part of a latent row, with a value that the format cannot hold decodes to NaN. The
    second result, a bool tensor of one, says whether every value was held.
    """
    if isinstance(fmt, LatentFormat):
        latent, rope = map(quantize, x.split([fmt.latent_dim, fmt.rope_dim], dim=-1), fmt.parts)
        return torch.cat([latent[0], rope[0]], dim=-1), latent[1] & rope[1]
    holdable = _holdable(x, fmt).all(dim=-1, keepdim=True)
    if fmt.is_exact:
        exact = x.to(EXACT_DTYPES[fmt.codec])
        exact = torch.where(holdable, exact, float("nan")).contiguous()
        return exact.view(torch.uint8), holdable.all()

    grouped = torch.where(holdable, x, 0.0).float()
    grouped = grouped.reshape(*x.shape[:-1], fmt.groups, fmt.group_size)
    empty = grouped[..., :1]  # without elements aminmax fails
    mn, mx = grouped.aminmax(dim=-1, keepdim=True) if grouped.numel() else (empty, empty)
    levels, has_shifts = fmt.facts.levels, fmt.pick(pairs=True, scales=False)
    is_e4m3 = fmt.pick(e4m3=True, integers=False)
    if not has_shifts:
        shift = torch.zeros_like(mn)
        scale = _power_up((torch.maximum(mx, -mn) / levels).clamp(min=LEAST_DS_SCALE))
    elif is_e4m3:  # + 0.0 turns -0.0, which min or max may return beside 0.0, into 0.0
        shift = (mn * 0.5 + mx * 0.5).half() + 0.0
        radius = torch.maximum(mx - shift.float(), shift.float() - mn)
        scale = _half_up(radius * (1 / levels)) + 0.0
    else:
        shift = _half_down(mn) + 0.0
        scale = _half_up((mx - shift.float()) * (1 / levels)) + 0.0
    inverse = torch.where(scale == 0, 0.0, scale.float().reciprocal())
    scaled = (grouped - shift.float()) * inverse
    if is_e4m3:
        codes = scaled.clamp(-levels, levels).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = scaled.round().clamp(0, levels).to(torch.uint8)
    codes = pack(codes.flatten(-2), fmt)

    if not has_shifts:
        scale = torch.where(holdable, scale[..., 0], float("nan")).contiguous()
        return torch.cat([codes, scale.view(torch.uint8)], dim=-1), holdable.all()
    with full_precision(x):  # torch.autocast cannot put fp16 together on the CPU
        params = torch.cat([scale, shift], dim=-1).flatten(-2)
    params = torch.where(holdable, params, float("nan")).contiguous()
    return torch.cat([params.view(torch.uint8), codes], dim=-1), holdable.all()


def dequantize(rows: torch.Tensor, fmt: AnyFormat) -> torch.Tensor:
    """The values of rows [..., row_bytes]: [..., head_dim], float32."""
    if isinstance(fmt, LatentFormat):
        parts = rows.split([part.row_bytes for part in fmt.parts], dim=-1)
        return torch.cat(list(map(dequantize, parts, fmt.parts)), dim=-1)
    if fmt.is_exact:
        return _viewed(rows, EXACT_DTYPES[fmt.codec]).float()
    scale, shift = (params[..., None] for params in parameters(rows, fmt))
    codes = unpack(rows[..., fmt.code_offset :][..., : fmt.code_bytes], fmt)
    if fmt.pick(e4m3=True, integers=False):
        codes = codes.contiguous().view(torch.float8_e4m3fn)
    numbers = codes.float()
    numbers = numbers.reshape(*rows.shape[:-1], fmt.groups, fmt.group_size)
    return (numbers * scale + shift).flatten(-2)


def parameters(rows: torch.Tensor, fmt: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and shifts of quantized rows [..., row_bytes]: [..., groups] each, float32."""
    if fmt.pick(pairs=False, scales=True):
        scale = _viewed(rows[..., fmt.code_bytes :], torch.float32)
        return scale, torch.zeros_like(scale)
    params = _viewed(rows[..., : fmt.header_bytes], torch.float16).float()
    return params[..., 0::2], params[..., 1::2]


def pack(codes: torch.Tensor, fmt: RowFormat) -> torch.Tensor:
    """The bytes of codes [..., head_dim], uint8: [..., code_bytes]."""
    if not (sizes := fmt.pick(**PLANES)):
        return codes
    planes, first = [], 0
    for bits in sizes:
        plane = codes >> first & (1 << bits) - 1
        if bits == 1:  # element 8 h + 2 i + j of 16 stands at 4 i + 2 h + j
            plane = plane.unflatten(-1, (-1, 2, 4, 2)).transpose(-3, -2).flatten(-4)
        parts = [plane[..., i :: 8 // bits] << i * bits for i in range(8 // bits)]
        planes.append(functools.reduce(torch.bitwise_or, parts))
        first += bits
    return torch.cat(planes, dim=-1)


def unpack(packed: torch.Tensor, fmt: RowFormat) -> torch.Tensor:
    """The codes [..., head_dim], uint8, of bytes [..., code_bytes]."""
    if not (sizes := fmt.pick(**PLANES)):
        return packed
    planes, first = [], 0
    lengths = [fmt.head_dim * bits // 8 for bits in sizes]
    for bits, plane in zip(sizes, packed.split(lengths, dim=-1), strict=True):
        parts = [plane >> i * bits & (1 << bits) - 1 for i in range(8 // bits)]
        plane = torch.stack(parts, dim=-1).flatten(-2)
        if bits == 1:
            plane = plane.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2).flatten(-4)
        planes.append(plane << first)
        first += bits
    codes: torch.Tensor = functools.reduce(torch.bitwise_or, planes)
    return codes


def _viewed(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of bytes as numbers; view refuses odd addresses."""
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)


def _holdable(x: torch.Tensor, fmt: AnyFormat) -> torch.Tensor:
    if isinstance(fmt, LatentFormat):
        parts = x.split([fmt.latent_dim, fmt.rope_dim], dim=-1)
        return torch.cat(list(map(_holdable, parts, fmt.parts)), dim=-1)
    return x.float().abs() <= fmt.max_abs


def _half_down(x: torch.Tensor) -> torch.Tensor:
    """The greatest fp16 that is not over x."""
    half = x.half()
    bits = half.view(torch.int16)
    # one step down: towards zero above it, away from it below; under either zero comes 0x8001
    below = torch.where(half > 0, bits - 1, torch.where(half < 0, bits + 1, -32767))
    return torch.where(half.float() > x, below.to(torch.int16).view(torch.float16), half)


def _half_up(x: torch.Tensor) -> torch.Tensor:
    """The least fp16 that is not under x, for x >= 0."""
    half = x.half()
    above = (half.view(torch.int16) + 1).view(torch.float16)
    return torch.where(half.float() < x, above, half)


def _power_up(x: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not under x, for normal float32."""
    bits = x.view(torch.int32) + 0x7FFFFF
    return (bits & 0x7F800000).view(torch.float32)


def feedback_matrix(weights: torch.Tensor) -> torch.Tensor:
    """The L of the module's docstring, from weights [num_kv_heads, head_dim, head_dim]."""
    upper = torch.linalg.cholesky(weights.flip(-1, -2)).flip(-1, -2)
    unit: torch.Tensor = upper / upper.diagonal(dim1=-2, dim2=-1)[..., None, :]
    return unit.mT.contiguous()


def clip_rows(x: torch.Tensor, groups: int, ratio: torch.Tensor) -> torch.Tensor:
    """Clamp the groups of x [batch, num_kv_heads, tokens, head_dim] to ratio [num_kv_heads]."""
    grouped = x.unflatten(-1, (groups, -1))
    least, greatest = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    middle = (least + greatest) * 0.5
    half = (greatest - least) * 0.5 * ratio[:, None, None, None]
    clipped: torch.Tensor = grouped.clamp(middle - half, middle + half)
    return clipped.flatten(-2)


def round_with_feedback(
    x: torch.Tensor, params: torch.Tensor, feedback: torch.Tensor, levels: float
) -> torch.Tensor:
    """The codes of rows, one element after another, in float32.

    Args:
        x: [batch, num_kv_heads, tokens, head_dim], float32.
        params: [batch, num_kv_heads, tokens, groups, 2], float32: scale and shift.
        feedback: [num_kv_heads, head_dim, head_dim], float32, from feedback_matrix.
    """
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


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOAT_DTYPES:
        raise ConfigError(
            f"dtype {shown(dtype)} is not supported: use float32, bfloat16 or float16"
        )


def format_of(rows: torch.Tensor, fmt: str | AnyFormat) -> AnyFormat:
    """The format of rows, by their length if fmt is a name; ConfigError or ShapeError if none."""
    check_readable(rows=rows)
    if not isinstance(fmt, str):
        return fmt
    found = _OF_LENGTH.get((fmt, rows.shape[-1] if rows.ndim else 0))
    if found is None:
        formats = [RowFormat.parse(fmt, head_dim) for head_dim in ROW_DIMS]
        known = ", ".join(str(one.row_bytes) for one in formats)
        raise ShapeError(
            f"rows is {list(rows.shape)}: its last axis must be the bytes of a row of {fmt}, one "
            f"of {known}"
        )
    return found


def check_rows(rows: torch.Tensor, fmt: AnyFormat, name: str = "rows") -> None:
    check_format(fmt)
    check_tensor(name, rows, [torch.uint8])
    if rows.ndim < 1 or rows.shape[-1] != fmt.row_bytes:
        raise ShapeError(
            f"{name} is {list(rows.shape)}: the last axis must be the {fmt.row_bytes} bytes of a "
            f"row of {fmt} with head_dim {fmt.head_dim}"
        )


def is_nan_row(rows: torch.Tensor, fmt: RowFormat) -> torch.Tensor:
    """Which rows [..., row_bytes] mark an input that their format could not hold: [...], bool.

    The elements (16-bit rows), or all scales and shifts, are NaN there only, and the codes 0.
    """
    dtype = fmt.pick(pairs=torch.float16, scales=torch.float32, **EXACT_DTYPES)
    first = fmt.pick(pairs=slice(2), scales=slice(-4, None), none=slice(2))
    return _viewed(rows[..., first], dtype).isnan()[..., 0]


def exact_codec(dtype: torch.dtype | None) -> str:
    """The 16-bit codec for tensors of a dtype: "fp16" for float16, else "bf16"."""
    return "fp16" if dtype == torch.float16 else "bf16"


def full_precision(x: torch.Tensor) -> AbstractContextManager[object]:
    """Let products of tensors on the device of x keep their dtype, inside torch.autocast too."""
    device = x.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def check_format(fmt: AnyFormat) -> None:
    if not isinstance(fmt, RowFormat | LatentFormat):
        raise ConfigError(
            f"the format is {shown(fmt)}: give a name ('int4-g4') or a RowFormat, such as "
            "RowFormat.parse('int4-g4', head_dim=128), or a LatentFormat"
        )


def non_finite(x: torch.Tensor, fmt: AnyFormat) -> NonFiniteError:
    """The error for x with a value that a format cannot hold."""
    index = tuple((~_holdable(x, fmt)).nonzero()[0].tolist())
    if isinstance(fmt, LatentFormat):
        fmt = fmt.latent if index[-1] < fmt.latent_dim else fmt.rope
    then = ", or pass check=False to get rows that decode to NaN"
    return beyond(f"x{list(index)}", x[index].item(), fmt, then)


def beyond(place: str, value: float, fmt: RowFormat, then: str) -> NonFiniteError:
    """The error for a value that rows of a format cannot hold, with what to do."""
    if not math.isfinite(value):
        how = "look for NaN and Inf in the model and its input, and run a float16 model in bfloat16"
    elif fmt.max_abs <= FP16_MAX:
        how = (
            "give the format 'bf16', for 16-bit rows as exact_format, which holds values up to "
            f"{BF16_MAX:.3g}"
        )
    else:
        how = "mend the model or its input"
    return NonFiniteError(
        f"{place} is {value}: {fmt} rows hold finite values up to {fmt.max_abs:g}; {how}{then}"
    )
