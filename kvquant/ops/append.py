"""Write the rows of new tokens: one call, one launch on CUDA.

write_rows   append_rows without its checks, for a cache
bind_append  the launch of write_rows, for a cache to keep

Under torch.compile only, torch.ops.kvquant.append_rows writes k_rows, v_rows, exact_k, exact_v
and bad in place, and returns nothing. Its dispatcher takes a few microseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from .. import debug
from ..rows.basis import Basis, Encoding, Queries, transform_rows
from ..rows.call import AppendCall, AppendSide
from ..rows.format import RowFormat
from ..rows.quantize import is_nan_row
from ..rows.rotation import Rope
from ..rows.slots import Slots
from .append_checks import check_apart, check_append, check_call, check_new, check_types
from .dispatch import kernels_for, torch_op
from .quantize import dequantize_rows, quantize_calibrated, quantize_rows
from .rows_at import put, take

TOKENS_PER_PART = 256  # what is computed on the way stays in the caches of the CPU

NO_ROPE = None, None, False
Write = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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
    k_transform: Basis | None = None,
    v_transform: Basis | None = None,
    rope: Rope | None = None,
    bad: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Quantize new tokens into the slots of a cache, contiguous or paged, in place.

    For each token i, K and V alike:

        1. x = the new row in float32, after rope (K only) and the transform
        2. evicted[i] >= 0    the row at exact[i], as it stands, is quantized into packed evicted[i]
        3. exact[i] >= 0      x is written at exact[i], in 16 bit
           packed[i] >= 0     without an eviction, x is quantized into packed[i]; where there are
                              16-bit rows, it is rounded to 16 bit first

    A token's bytes do not depend on how many tokens come in one call, but for the last bits of a
    product with a matrix (rows/basis.py). They are those of quantize_rows or, with a clip ratio or
    feedback, quantize_calibrated. A row with NaN, Inf or a value that its format cannot hold
    decodes to NaN. The slots of one call are all different. torch.compile(fullgraph=True) takes the
    call as one op.

    Args:
        k: [num_tokens, num_kv_heads, head_dim], float32, bfloat16 or float16; rows contiguous, the
            other axes of any strides.
        v: likewise; its head_dim may differ.
        k_rows: [num_pages, num_kv_heads, page_size, row bytes of k_format], uint8; rows contiguous,
            the other axes of any strides. A contiguous cache [batch, num_kv_heads, capacity, row
            bytes] is one whose pages are sequences.
        v_rows: likewise, of the row bytes of v_format. Both may be views of one tensor, as the
            parts of latent rows are (pages.split, see kvquant/ops/README.md).
        slots: where each token goes (see slots_of); a tensor stands for Slots(packed=tensor).
        k_format: format of k_rows, or its short name ("int4-g4"); "fp8_ds_mla" for FlashMLA's
            latents.
        v_format: format of v_rows, or its short name.
        exact_k: [max_num_seqs, num_kv_heads, exact_len, 16-bit row bytes], uint8: sinks and recent
            rows; given with exact_v, slots.exact and slots.evicted, or none of them.
        exact_v: likewise.
        exact_format: "bf16" or "fp16", of exact_k and exact_v.
        k_transform: the basis that K is stored in; rows that are there already stay as they are.
        v_transform: the basis of V.
        rope: the rotary embedding of K, before k_transform.
        bad: [2], int32: adds how many rows of K and of V became NaN; a token counts once, when
            it comes.
        backend: "cpu" (numba), "cuda" or "reference" (any device, slow); by device when None.

    Raises:
        ShapeError: the tensors do not fit one another or the formats; or a slot does not exist or
            is given twice (on CUDA these values are read in debug mode only; see kvquant.debug).
        ConfigError: a dtype, a format or the backend does not exist, an argument is of another
            type, or K and V are one tensor.
        DeviceError: the tensors lie on different devices, or none of the backends serves theirs.
        UnsupportedError: the kernel, the GPU or what is installed cannot do it.

    Example:
        >>> import torch
        >>> from kvquant import RowFormat, append_rows, dequantize_pages
        >>> int8 = RowFormat.parse("int8", 128)
        >>> k_pages, v_pages = torch.zeros(2, 4, 8, 16, int8.row_bytes, dtype=torch.uint8)
        >>> k, v = torch.randn(2, 3, 8, 128)  # 3 new tokens of 8 heads
        >>> slots = torch.tensor([16, 17, 18])  # the first places of page 1
        >>> append_rows(k, v, k_pages, v_pages, slots, int8, int8)
        >>> bool((dequantize_pages(k_pages, int8, slots, torch.float32) - k).abs().max() < 0.05)
        True
    """
    if not isinstance(slots, Slots):
        slots = Slots(slots)
    given = k, v, k_rows, v_rows, slots, exact_k, exact_v, k_transform, v_transform, rope
    try:
        if torch.compiler.is_compiling():
            check_types(*given)
        else:
            check_apart("k_rows", k_rows, "v_rows", v_rows)
            if exact_k is not None and exact_v is not None:
                check_apart("exact_k", exact_k, "exact_v", exact_v)
        if k.ndim != 3 or v.ndim != 3:
            check_new(k, v)  # says what is wrong
        of_k = _format_of(k, k_format), exact_k, _encoding_of(k_transform)
        of_v = _format_of(v, v_format), exact_v, _encoding_of(v_transform)
        sides = AppendSide(k, k_rows, *of_k), AppendSide(v, v_rows, *of_v)
        call = AppendCall(*sides, slots, exact_format, rope, bad)
        write_rows(call, backend=backend, check=functools.partial(check_call, call))
    except Exception:  # as of WRONG_TYPES; what is wrong may have another shape or dtype, too
        check_types(*given)
        raise


def _encoding_of(basis: Basis | None) -> Encoding:
    """The encoding of new rows; it has an offset of zeros, too, so that its shape is checked."""
    if basis is None:
        return Encoding()
    encoding = basis.encoding
    return encoding if encoding.offset is not None else encoding._replace(offset=basis.offset)


def _format_of(x: torch.Tensor, fmt: str | RowFormat) -> RowFormat:
    """The format of the rows of x; in a graph its name, because head_dim may vary."""
    if isinstance(fmt, str) and torch.compiler.is_compiling():
        return fmt  # type: ignore[return-value]
    return RowFormat.parse(fmt, x.shape[-1])


def write_rows(
    call: AppendCall,
    *,
    backend: str | None = None,
    check: Callable[[], None] | None = None,
    placed: bool = False,
    queries: Queries | None = None,
) -> torch.Tensor | None:
    """Append as append_rows does, without its checks.

    Args:
        check: raises unless the arguments fit one another. CUDA calls it only before launches
            that are not cached, and in debug mode. None where the caller has checked.
        placed: whether place_tokens found the slots, and nothing was launched since.
        queries: of a step, to multiply by their matrix meanwhile; eager CUDA only.

    The result is the products of the queries, as affine_rows gives them; None without queries.
    """
    k, v, slots, exact_format, rope, bad = call
    if torch.compiler.is_compiling():
        sides = *_op_arguments(k), *_op_arguments(v)
        append_rows_op(*sides, *slots, exact_format, *(rope or NO_ROPE), bad, backend)
        return None
    backend = kernels_for(k.x, backend)
    if check and (backend != "cuda" or debug.enabled):
        check()
        check = None
    if backend == "cuda":
        return _append_cuda()(call, check=check, overlaps=placed, queries=queries)
    assert queries is None
    if backend == "reference":
        _write(call, backend)
        return None
    changes = rope is not None or _changes(k.transform) or _changes(v.transform)
    is_rounded = k.is_rounded or v.is_rounded
    parts = [call]
    if (changes or is_rounded) and len(k.x) > TOKENS_PER_PART:
        parts = _parts(call)
    for part in parts:
        if is_rounded:
            _write(part, backend)
            continue
        if changes:
            new_k = transform_rows(part.k.x.detach(), k.transform, part.rope)
            new_v = transform_rows(part.v.x.detach(), v.transform)
            part = part._replace(k=part.k._replace(x=new_k), v=part.v._replace(x=new_v))
        _cpu().append(part)
    return None


def bind_append(call: AppendCall, place: Any = None) -> tuple[Any, Any] | None:
    """Bind an append of write_rows to its tensors; None unless it took exactly one launch.

    place: of bind_place; None for slots that are there. Returns place and the append. On the CPU
    this does both, and can check new rows: None and it.
    """
    if torch.compiler.is_compiling():
        return None
    if kernels_for(call.k.x, None) == "cpu":
        write = _cpu().bind_append(call, place)
        return None if write is None else (None, write)
    from ..kernels.cuda.append.launch import bind_append

    launch = bind_append(call, overlaps=place is not None)
    return None if launch is None else (place, launch)


@functools.cache
def _append_cuda() -> Callable[..., torch.Tensor | None]:
    from ..kernels.cuda.append.launch import append

    return append


@functools.cache
def _cpu() -> ModuleType:
    from ..kernels.cpu import append

    return append


def _changes(transform: Encoding) -> bool:
    """Whether the transform changes rows, and not only their rounding."""
    return transform.offset is not None or transform.matrix is not None


def _parts(call: AppendCall) -> list[AppendCall]:
    k, v, slots, _, rope, _ = call
    found = []
    for first in range(0, len(k.x), TOKENS_PER_PART):
        part = slice(first, first + TOKENS_PER_PART)
        found.append(
            call._replace(
                k=k._replace(x=k.x[part]),
                v=v._replace(x=v.x[part]),
                slots=Slots(*(one if one is None else one[part] for one in slots)),  # type: ignore[arg-type]
                rope=rope and rope._replace(cos=rope.cos[part], sin=rope.sin[part]),
            )
        )
    return found


def _write(call: AppendCall, backend: str) -> None:
    """Append by the reference, or on the CPU by single operations, where no kernel does all."""
    k, v, slots, exact_format, rope, bad = call
    k = k._replace(x=transform_rows(k.x.detach(), k.transform, rope))
    v = v._replace(x=transform_rows(v.x.detach(), v.transform))
    writes = [_writes(side, slots, exact_format, backend) for side in (k, v)]
    for i, found in enumerate(writes):  # everything is computed before anything is written
        for storage, where, rows, is_bad in found:
            put(storage, where, rows)
            if bad is not None:
                bad[i] += is_bad.sum()


def _writes(side: AppendSide, slots: Slots, exact_codec: str, backend: str) -> list[Write]:
    """The writes of K or V: storage, slots, rows, and the rows to count as NaN."""
    x, storage, fmt, exact_storage, transform = side
    clip, feedback = transform.clip, transform.feedback

    def quantize(values: torch.Tensor) -> torch.Tensor:
        if clip is None and feedback is None:
            return quantize_rows(values, fmt, check=False, backend=backend)
        by_head = values.transpose(0, 1)[None]
        rows = quantize_calibrated(by_head, fmt, clip=clip, feedback=feedback, backend=backend)
        return rows[0].transpose(0, 1).contiguous()

    packed, exact, evicted = slots
    if exact_storage is None or exact is None or evicted is None:
        rows = quantize(x[packed >= 0])
        return [(storage, packed[packed >= 0], rows, is_nan_row(rows, fmt))]
    exact_format = RowFormat(exact_codec, 1, fmt.head_dim)
    new = quantize_rows(x, exact_format, check=False, backend=backend)
    is_exact = exact >= 0
    leaves = is_exact & (evicted >= 0)
    is_packed = ~leaves & (packed >= 0)
    old = take(exact_storage, exact[leaves])
    to_pack = torch.cat([old, new[is_packed]])
    rows = quantize(dequantize_rows(to_pack, exact_format, backend=backend))
    where, is_bad = torch.cat([evicted[leaves], packed[is_packed]]), is_nan_row(rows, fmt)
    is_bad[: len(old)] &= ~is_nan_row(old, exact_format)  # these were counted when they came
    kept = new[is_exact]
    # a token that has a packed row, too, is counted by that one
    counts = ~is_packed[is_exact, None] & is_nan_row(kept, exact_format)
    return [(storage, where, rows, is_bad), (exact_storage, exact[is_exact], kept, counts)]


# The arguments of K, then those of V, then what they share. Sides in the order of a Side, whose
# transform is spelled out: an op takes tensors and plain values only.
SIDE = (
    "Tensor {0}, Tensor({1}!) {0}_rows, str {0}_format, Tensor({2}!)? exact_{0}, "
    "Tensor? {0}_offset, Tensor? {0}_matrix, Tensor? {0}_clip, Tensor? {0}_feedback"
)
APPEND_ROWS = (
    f"({SIDE.format('k', 'a', 'b')}, {SIDE.format('v', 'c', 'd')}, Tensor packed, Tensor? exact, "
    "Tensor? evicted, str exact_format, Tensor? cos, Tensor? sin, bool interleaved, "
    "Tensor(e!)? bad, str? backend) -> ()"
)
_PER_SIDE = 4 + len(Encoding._fields)


def _op_arguments(side: AppendSide) -> list[Any]:
    x, rows, fmt, exact_rows, transform = side
    return [x.detach(), rows, str(fmt), exact_rows, *transform]


def _call_of(args: Sequence[Any]) -> AppendCall:
    sides = []
    for x, rows, name, exact_rows, *transform in (args[:_PER_SIDE], args[_PER_SIDE:][:_PER_SIDE]):
        fmt = RowFormat.parse(name, int(x.shape[-1]))
        sides.append(AppendSide(x, rows, fmt, exact_rows, Encoding(*transform)))
    packed, exact, evicted, exact_format, cos, sin, interleaved, bad = args[2 * _PER_SIDE :]
    rope = None if cos is None else Rope(cos, sin, interleaved)
    return AppendCall(sides[0], sides[1], Slots(packed, exact, evicted), exact_format, rope, bad)


def _append_op(*args: Any) -> None:
    call = _call_of(args[:-1])
    write_rows(call, backend=args[-1], check=functools.partial(check_call, call))


def _append_fake(*args: Any) -> None:
    check_append(_call_of(args[:-1]))


append_rows_op = torch_op("append_rows", APPEND_ROWS, _append_op, _append_fake)
