"""Write the rows of new tokens, and read rows back: one call, one launch on CUDA."""

from __future__ import annotations

import torch

from ..arguments import check_readable
from ..errors import ConfigError, ShapeError, shown
from ..rows.basis import Basis
from ..rows.format import RowFormat
from ..rows.quantize import check_dtype, format_of
from ..rows.slots import Slots
from ..rows.transforms import Rope, RowTransform
from .append_backends import append, dequantize
from .append_checks import Append, check_apart, check_new, check_transform_values, check_types
from .append_torch import append_rows_op, dequantize_pages_op


def append_rows(
    k: torch.Tensor,
    v: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slots: Slots | torch.Tensor,
    k_format: str | RowFormat,
    v_format: str | RowFormat,
    *,
    exact_k: torch.Tensor | None = None,
    exact_v: torch.Tensor | None = None,
    exact_format: str = "bf16",
    k_transform: RowTransform | Basis | None = None,
    v_transform: RowTransform | Basis | None = None,
    rope: Rope | None = None,
    bad: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Quantize new tokens into the slots of a cache, contiguous or paged, in place.

    For each token i, K and V alike:

        1. x = the new row in float32, after rope (K only) and the transform
        2. leaving[i] >= 0    the row at exact[i], as it stands, is quantized into packed leaving[i]
        3. exact[i] >= 0      x is written at exact[i], in 16 bit
           packed[i] >= 0     if not, x is quantized into packed[i]; where there are 16-bit rows,
                              it is rounded to 16 bit first

    so the bytes of a token do not depend on how many come in one call (but for the last bits of a
    product with a matrix: transforms.py). They are those that quantize_rows gives for x, or, with a
    clip ratio or feedback, rounding.quantize_calibrated. A row with NaN, Inf or a value that its
    format cannot hold is written so that all of it decodes to NaN. The slots of one call are all
    different. torch.compile takes the call as one op, with fullgraph=True too.

    Args:
        k: [num_tokens, num_kv_heads, head_dim], float32, bfloat16 or float16; rows contiguous, the
            other axes of any strides.
        v: likewise; its head_dim may differ.
        k_rows: [num_pages, num_kv_heads, page_size, row bytes of k_format], uint8; rows contiguous,
            the other axes of any strides. A contiguous cache [batch, num_kv_heads, capacity, row
            bytes] is one whose pages are sequences.
        v_rows: likewise, of the row bytes of v_format.
        slots: where each token goes; a tensor stands for Slots(packed=tensor). slots_of finds those
            of a batch.
        k_format: format of k_rows, or its short name ("int4-g4").
        v_format: format of v_rows, or its short name.
        exact_k: [max_num_seqs, num_kv_heads, exact_len, 16-bit row bytes], uint8: sinks and recent
            rows; given with exact_v, slots.exact and slots.evicted, or none of them.
        exact_v: likewise.
        exact_format: "bf16" or "fp16", of exact_k and exact_v.
        k_transform: what is done to K before it is stored, or the basis that it is stored in; rows
            that stand there stay as they are.
        v_transform: likewise to V.
        rope: the rotary embedding of K, before k_transform.
        bad: [2], int32: how many rows of K and of V were written as NaN is added to it; a 16-bit
            row that is NaN already was counted when it came, and is not again when it leaves.
        backend: "cpu" (numba), "cuda", or "reference" (plain torch on any device, slow); by the
            device of k when None.

    Raises:
        ShapeError: the tensors do not fit one another or the formats; or a slot does not exist or
            is given twice (on CUDA these values are read in debug mode only; see kvquant.debug).
        ConfigError: a dtype, a format or the backend does not exist, an argument is of another
            type, K and V are one tensor, or a RowTransform has values that are not finite, or a
            clip that is not positive (likewise).
        DeviceError: the tensors lie on different devices, or none of the backends serves theirs.
        UnsupportedError: the kernel, the GPU or what is installed cannot do it.
    """
    if not isinstance(slots, Slots):
        slots = Slots(slots)
    if torch.compiler.is_compiling():
        check_types(k, v, k_rows, v_rows, slots, exact_k, exact_v, k_transform, v_transform, rope)
        if k.ndim != 3 or v.ndim != 3:
            check_new(k, v)  # tells what is wrong
        for fmt, x in ((k_format, k), (v_format, v)):
            if isinstance(fmt, RowFormat) and fmt.head_dim != x.shape[-1]:
                RowFormat.parse(fmt, x.shape[-1])  # tells what does not fit
        cos, sin, interleaved = rope or (None, None, False)
        append_rows_op(
            k.detach(),
            v.detach(),
            k_rows,
            v_rows,
            *slots,
            str(k_format),
            str(v_format),
            exact_k,
            exact_v,
            exact_format,
            *(_row_transform(k_transform) or RowTransform()),
            *(_row_transform(v_transform) or RowTransform()),
            cos,
            sin,
            interleaved,
            bad,
            backend,
        )
        return
    try:
        if k.ndim != 3 or v.ndim != 3:
            check_new(k, v)
        check_apart("k_rows", k_rows, "v_rows", v_rows)
        if exact_k is not None and exact_v is not None:
            check_apart("exact_k", exact_k, "exact_v", exact_v)
        call = Append(
            k,
            v,
            k_rows,
            v_rows,
            slots,
            RowFormat.parse(k_format, k.shape[-1]),
            RowFormat.parse(v_format, v.shape[-1]),
            exact_k,
            exact_v,
            exact_format,
            _checked_transform("k_transform", k_transform),
            _checked_transform("v_transform", v_transform),
            rope,
            bad,
        )
        append(call, backend)
    except Exception:  # types are looked at only now: it takes time
        check_types(k, v, k_rows, v_rows, slots, exact_k, exact_v, k_transform, v_transform, rope)
        raise


def _row_transform(given: RowTransform | Basis | None) -> RowTransform | None:
    return given.row_transform if isinstance(given, Basis) else given


def _checked_transform(name: str, given: RowTransform | Basis | None) -> RowTransform | None:
    """What is to be done to rows; a basis was looked at when it was made."""
    if given is not None and not isinstance(given, Basis):
        check_transform_values(name, given)
    return _row_transform(given)


def dequantize_pages(
    rows: torch.Tensor,
    fmt: str | RowFormat,
    slots: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Give back the values of the rows at slots.

    Args:
        rows: [num_pages, num_kv_heads, page_size, row_bytes], uint8, as in append_rows.
        fmt: the format that they were written in, or its short name.
        slots: [num_tokens], int64, contiguous: page * page_size + place in the page; a negative one
            gives zeros.
        dtype: of the result: float32, bfloat16 or float16. Values are computed in float32 and
            rounded once.
        out: where to write: [num_tokens, num_kv_heads, head_dim], dtype, contiguous; new when None.
        backend: as in append_rows.

    Returns:
        out.

    Raises:
        As append_rows.
    """
    check_readable(rows=rows, slots=slots)
    fmt = format_of(rows, fmt)
    if not isinstance(fmt, RowFormat):
        raise ConfigError(f"fmt is {shown(fmt)}: give a name ('int4-g4') or a RowFormat")
    check_dtype(dtype)
    if rows.ndim != 4 or slots.ndim != 1:
        raise ShapeError(
            f"rows is {list(rows.shape)} and slots {list(slots.shape)}: they must be [num_pages, "
            "num_kv_heads, page_size, row_bytes] and [num_tokens]"
        )
    if out is None:
        shape = slots.shape[0], rows.shape[1], fmt.head_dim
        out = torch.empty(shape, dtype=dtype, device=rows.device)
    else:
        check_readable(out=out)
        if out.dtype != dtype:
            raise ConfigError(f"out is {out.dtype}, dtype {dtype}: give an out of this dtype")
    if torch.compiler.is_compiling():
        dequantize_pages_op(rows, str(fmt), slots, out, backend)
    else:
        dequantize(rows, fmt, slots, out, backend)
    return out
