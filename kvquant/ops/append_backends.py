"""The eager append and dequantize calls: checks, choice of the kernel, and the meaning in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from .. import debug
from ..rows.format import RowFormat
from ..rows.quantize import dequantize_rows, is_nan_row, quantize_rows
from ..rows.rounding import quantize_calibrated
from ..rows.slots import Slots, check_existing, check_slots
from ..rows.transforms import Rope, RowTransform, apply_rope, transform_rows
from .append_checks import Append, check_append, check_dequantize, check_written
from .dispatch import kernels_for

TOKENS_PER_PART = 256

Write = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def append(call: Append, backend: str | None) -> None:
    """Check and append; see append.append_rows."""
    backend = kernels_for(call.k, backend)
    if backend == "cuda" and not debug.enabled:  # the launcher checks only calls it has not seen
        _append_cuda(_is_calibrated(call))(*call, check=functools.partial(_check, call))
        return
    _check(call)
    if debug.may_read(call.k):
        exact = 0 if call.exact_k is None else call.exact_k.shape[0] * call.exact_k.shape[2]
        check_slots(call.slots, call.k_rows.shape[0] * call.k_rows.shape[2], exact)
    if backend == "cuda":
        _append_cuda(_is_calibrated(call))(*call)
        return
    call = call._replace(k=call.k.detach(), v=call.v.detach())
    if backend == "reference":
        _append(call, backend)
        return
    is_rounded = _is_rounded(call)
    for part in _parts(call):
        if is_rounded:
            _append(part, backend)
        else:
            _append_cpu(part)


def _check(call: Append) -> None:
    check_append(call)
    check_written(call)


def dequantize(
    rows: torch.Tensor, fmt: RowFormat, slots: torch.Tensor, out: torch.Tensor, backend: str | None
) -> None:
    """Check and dequantize into out; see append.dequantize_pages."""
    backend = kernels_for(rows, backend)
    if backend == "cuda" and not debug.enabled:
        check = functools.partial(check_dequantize, rows, fmt, slots, out)
        _dequantize_cuda()(rows, fmt, slots, out, check=check)
        return
    check_dequantize(rows, fmt, slots, out)
    if debug.may_read(slots):
        check_existing("slots", slots, rows.shape[0] * rows.shape[2])
    if backend == "cuda":
        _dequantize_cuda()(rows, fmt, slots, out)
        return
    used = slots >= 0
    values = dequantize_rows(_take(rows, slots[used]), fmt, out.dtype, backend=backend)
    if len(values) < len(out):
        out.zero_()
    out[used] = values


@functools.cache
def _append_cuda(is_calibrated: bool) -> Callable[..., None]:
    from ..kernels.cuda.append.calibrated_launch import append_calibrated
    from ..kernels.cuda.append.launch import append

    return append_calibrated if is_calibrated else append


@functools.cache
def _cpu_kernels() -> tuple[Callable[..., tuple[int, int]], Callable[..., torch.Tensor]]:
    from ..kernels.cpu.append import append
    from ..kernels.cpu.transform import transform

    return append, transform


def _is_calibrated(call: Append) -> bool:
    """Whether more has to be done than one launch does."""
    return any(
        transform is not None and (transform.matrix is not None or transform.feedback is not None)
        for transform in (call.k_transform, call.v_transform)
    )


def _is_rounded(call: Append) -> bool:
    """Whether rows are clipped or rounded with feedback."""
    return any(
        transform is not None and (transform.clip is not None or transform.feedback is not None)
        for transform in (call.k_transform, call.v_transform)
    )


@functools.cache
def _dequantize_cuda() -> Callable[..., None]:
    from ..kernels.cuda.dequantize.launch import dequantize

    return dequantize


def _parts(call: Append) -> Iterator[Append]:
    """The call in parts, so that what is computed on the way stays in the caches of the CPU."""
    is_plain = call.k_transform is None and call.v_transform is None and call.rope is None
    if is_plain or len(call.k) <= TOKENS_PER_PART:
        yield call
        return
    for first in range(0, len(call.k), TOKENS_PER_PART):
        part = slice(first, first + TOKENS_PER_PART)
        k, v, rope = call.k[part], call.v[part], call.rope
        if rope is not None:
            rope = rope._replace(cos=rope.cos[part], sin=rope.sin[part])
        packed, exact, evicted = (None if x is None else x[part] for x in call.slots)
        assert packed is not None
        yield call._replace(k=k, v=v, slots=Slots(packed, exact, evicted), rope=rope)


def _append_cpu(call: Append) -> None:
    """The same by a kernel, once the new rows are transformed."""
    k = _transform_cpu(call.k, call.k_transform, call.rope)
    v = _transform_cpu(call.v, call.v_transform)
    append_rows, _ = _cpu_kernels()
    bad = append_rows(
        (k.resolve_neg(), call.k_rows, call.k_format, call.exact_k),
        (v.resolve_neg(), call.v_rows, call.v_format, call.exact_v),
        call.slots,
        call.exact_format,
    )
    if call.bad is not None and any(bad):
        call.bad.add_(torch.tensor(bad, dtype=torch.int32, device="cpu"))


def _transform_cpu(
    x: torch.Tensor, transform: RowTransform | None, rope: Rope | None = None
) -> torch.Tensor:
    """What transform_rows gives."""
    if transform is None or transform.matrix is not None:
        return transform_rows(x, transform, rope)
    if rope is not None:
        x = apply_rope(x, rope)
    if transform.offset is None and not transform.rotate:
        return x
    _, transform_rows_cpu = _cpu_kernels()
    by_head = x.transpose(0, 1)[None]
    return transform_rows_cpu(by_head, transform.offset, transform.rotate)[0].transpose(0, 1)


def _append(call: Append, backend: str) -> None:
    """The meaning."""
    transform = _transform_cpu if backend == "cpu" else transform_rows
    k = transform(call.k, call.k_transform, call.rope)
    v = transform(call.v, call.v_transform)
    writes = (
        _writes(k, call.k_rows, call.k_format, call.exact_k, call.k_transform, call, backend),
        _writes(v, call.v_rows, call.v_format, call.exact_v, call.v_transform, call, backend),
    )
    for side in (0, 1):  # everything is computed before anything is written
        for storage, slots, rows, bad in writes[side]:
            _put(storage, slots, rows)
            if call.bad is not None:
                call.bad[side] += bad.sum()


def _writes(
    x: torch.Tensor,
    storage: torch.Tensor,
    fmt: RowFormat,
    exact_storage: torch.Tensor | None,
    transform: RowTransform | None,
    call: Append,
    backend: str,
) -> list[Write]:
    """What to write of K or V: storage, slots, rows [slots, num_kv_heads, row_bytes], and which of
    the rows are to be counted as NaN [slots, num_kv_heads]."""
    clip, feedback = (None, None) if transform is None else (transform.clip, transform.feedback)

    def quantize(values: torch.Tensor) -> torch.Tensor:
        if clip is None and feedback is None:
            return quantize_rows(values, fmt, check=False, backend=backend)
        by_head = values.transpose(0, 1)[None]
        rows = quantize_calibrated(by_head, fmt, clip=clip, feedback=feedback, backend=backend)
        return rows[0].transpose(0, 1).contiguous()

    packed, exact, evicted = call.slots
    if exact_storage is None or exact is None or evicted is None:
        rows = quantize(x[packed >= 0])
        return [(storage, packed[packed >= 0], rows, is_nan_row(rows, fmt))]
    exact_format = RowFormat(call.exact_format, 1, fmt.head_dim)
    new = quantize_rows(x, exact_format, check=False, backend=backend)
    is_exact = exact >= 0
    leaves, is_packed = is_exact & (evicted >= 0), ~is_exact & (packed >= 0)
    old = _take(exact_storage, exact[leaves])
    to_pack = torch.cat([old, new[is_packed]])
    rows = quantize(dequantize_rows(to_pack, exact_format, backend=backend))
    slots, bad = torch.cat([evicted[leaves], packed[is_packed]]), is_nan_row(rows, fmt)
    bad[: len(old)] &= ~is_nan_row(old, exact_format)  # these were counted when they came
    kept = new[is_exact]
    return [
        (storage, slots, rows, bad),
        (exact_storage, exact[is_exact], kept, is_nan_row(kept, exact_format)),
    ]


def _take(storage: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copy the rows at slots: [slots, num_kv_heads, row_bytes]."""
    page_size = max(storage.shape[2], 1)
    return _widest(storage)[slots // page_size, :, slots % page_size].view(torch.uint8)


def _put(storage: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows as _take gives them."""
    page_size, wide = max(storage.shape[2], 1), _widest(storage)
    flat = rows.flatten().view(wide.dtype)  # view looks at strides of axes of size 1, too
    wide[slots // page_size, :, slots % page_size] = flat.view(*rows.shape[:2], wide.shape[-1])


def _widest(rows: torch.Tensor) -> torch.Tensor:
    """The same bytes as the largest numbers that they can be: indexing takes time by the number."""
    numbers = rows.shape[-1] | int(rows.storage_offset()) | rows.data_ptr()
    for stride in rows.stride()[:-1]:
        numbers |= stride
    dtypes = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return rows.view(dtypes[min(numbers & -numbers, 8)])
