"""Append on CUDA: new K and V to their slots; see kvquant/ops/append.py.

Plain rows take one launch for K and V. With matrices, or rounding with feedback:

    a step      few tokens: one launch for K, V and queries (step_kernel.py)
    matrix      else one launch of the affine kernel a side, with the offset; torch's product after
                RoPE, and of float32
    feedback    else one launch of the feedback kernel, without it of the append kernel
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from kvquant.rows.basis import Encoding, Queries, transform_rows
from kvquant.rows.call import AppendCall, AppendSide
from kvquant.rows.format import RowFormat
from kvquant.rows.rotation import Rope
from kvquant.rows.slots import Slots

from ..affine.launch import SOURCES as ENCODED
from ..affine.launch import affine_rows, encode_rows
from ..device.row_layout import PRODUCT_ROWS, UNIT, refuse_latents
from ..runtime.launch import GPU, OVERLAPS, Launch, cached_launch, gpu_of, grid_of
from ..runtime.spec import addresses_of
from ..runtime.tensors import Tensors, check_pages, facts_of, is_readable, page_arguments, strides
from .spec import (
    APPEND,
    AppendSpec,
    FeedbackSide,
    FeedbackSpec,
    Side,
    StepSpec,
    make_feedback_spec,
)

SOURCES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
NO_ROPE = None, None, False
BOTH = "k", "v"  # the names of the sides
# Where a lane has a row the GPU does most, but a row takes longer than four lanes do: these are
# sooner done as long as an SM has no more rows than 8 warps of them.
FEW_LANES, ROWS_PER_SM = 4, 64
# Where a block multiplies its own rows it reads a whole matrix for them: for one group of tokens as
# long as there are no more blocks than that for each SM, for several then. Beyond it is sooner to
# read it less often, in a launch before. Rows with feedback take so long that blocks may be more.
BLOCKS_PER_SM, WITH_FEEDBACK = 2, 4
GROUPS = (1, 2, 4)
MOST_OF_BLOCK = 512  # groups times head_dim: 8 warps have the rows of a block at a time
MOST_FEEDBACK = 128  # head_dim of a step's rows with feedback
# head_dim of rows whose block has room for its part of a matrix in registers, and for the elements
# of 32 rows a warp with feedback
WIDEST = 256
NAMES = addresses_of(APPEND)  # of the tensors of a call
STEP_NAMES = addresses_of(StepSpec.arguments)
FEEDBACK_NAMES = addresses_of(FeedbackSpec.arguments)
K, V = NAMES.index("k.x"), NAMES.index("v.x")
ROWS_OF = {"x": UNIT, "q": 4, "q_matrix": UNIT}  # what kernels read so many bytes of at a time
MATRICES = "k_matrix", "v_matrix", "k_feedback", "v_feedback"  # of a step
ALIGNED = ("cos", "sin", "offset", *MATRICES)  # 16 bytes at a time, contiguous
EXACT = {
    "stride_page": "exact_stride_seq_slot",
    "stride_head": "exact_stride_head",
    "stride_row": "exact_stride_row",
    "num_slots": "num_exact",
    "page_size": "exact_len",
    "page_factor": "exact_factor",
    "page_shift": "exact_shift",
}


def append(
    call: AppendCall,
    check: Callable[[], None] | None = None,
    *,
    overlaps: bool = False,
    queries: Queries | None = None,
) -> torch.Tensor | None:
    """Append on the current stream; see ops.append.append_rows. Slots that do not exist are left
    out.

    check raises unless the arguments fit, and is called only before a launch is prepared. overlaps:
    the launch before on this stream is place_tokens, and this one may begin while that one ends.
    Returns the queries times their matrix, as affine_rows does; None without queries. ConfigError
    if rows are not aligned, UnsupportedError if there are too many slots; others as of
    cached_launch.
    """
    if queries is not None or call.k.is_calibrated or call.v.is_calibrated:
        return _append_calibrated(call, check, overlaps, queries)
    tensors = _tensors_of(call)
    launch = _find(BOTH, call, tensors, check, overlaps)
    if launch is not None:
        launch(tensors)
    return None


def _tensors_of(call: AppendCall, has_feedback: bool = False) -> Tensors:
    """In the order of their addresses among the arguments of the append or the feedback kernel."""
    cos, sin, _ = call.rope or NO_ROPE
    sides = call.k, call.v
    of_k, of_v = (
        (side.x, side.rows, side.exact_rows, side.transform.offset, side.transform.clip)
        for side in sides
    )
    feedback = [side.transform.feedback for side in sides] if has_feedback else ()
    return (*call.slots, cos, sin, call.bad, *of_k, *of_v, *feedback)


def bind_append(call: AppendCall, *, overlaps: bool = False) -> Launch | None:
    """Bind append to all tensors of a call but new rows and counters.

    Returns a launch that takes the addresses of bad, k.x and v.x; None where append takes several.
    """
    if call.k.is_calibrated or call.v.is_calibrated:
        return None
    tensors = _tensors_of(call)
    launch = _find(BOTH, call, tensors, None, overlaps)
    return launch and launch.bind(tensors, {"bad", "k.x", "v.x"})


def _append_calibrated(
    call: AppendCall,
    check: Callable[[], None] | None,
    overlaps: bool,
    queries: Queries | None,
) -> torch.Tensor | None:
    """Append where rows or queries are multiplied by a matrix, or rounded with feedback."""
    k, v, _, _, rope, bad = call
    refuse_latents(k.fmt, v.fmt)
    groups = _groups_of(call, queries)
    if groups and _is_of_step(k, rope) and _is_of_step(v, None):
        x, by, multiplied = None, None, None
        if queries is not None:
            x, by = queries
            multiplied = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        step = k.transform.matrix, v.transform.matrix, _feedback_of(k), _feedback_of(v)
        tensors = (*_tensors_of(call), *step, x, multiplied, by)
        launch = _find(BOTH, call, tensors, check, overlaps, groups)
        if launch is not None:
            launch(tensors)
        return multiplied
    parts: list[tuple[tuple[str, ...], AppendCall]] = []
    for i, (name, side, rotary) in enumerate((("k", k, rope), ("v", v, None))):
        transform = side.transform
        if transform.matrix is not None:
            x, rotary = _encode(side.x.detach(), transform, rotary, check), None
            transform = Encoding(clip=transform.clip, feedback=transform.feedback)
            side = side._replace(x=x, transform=transform)
        # the side stands for both; `bad` begins with its own number
        counted = None if bad is None else bad[i:]
        parts.append(((name,), call._replace(k=side, v=side, rope=rotary, bad=counted)))
    (_, of_k), (_, of_v) = parts
    if _feedback_of(of_k.k) is not None and _feedback_of(of_v.k) is not None:
        parts = [(BOTH, of_k._replace(v=of_v.k))]
    ready = [_prepared(*part, check) for part in parts]
    for one, its in ready:  # all parts are possible
        if one is not None:
            one(its)
    return None if queries is None else affine_rows(*queries, None, None)


def _feedback_of(side: AppendSide) -> torch.Tensor | None:
    """What rows are rounded with, where their codes are integers."""
    return side.transform.feedback if side.fmt.facts.is_integer else None


def _is_of_step(side: AppendSide, rope: Rope | None) -> bool:
    """Whether step_kernel.py appends such rows: 16-bit with a matrix, feedback with room for L."""
    if _feedback_of(side) is not None and not 64 <= side.fmt.head_dim <= MOST_FEEDBACK:
        return False
    if side.transform.matrix is None:
        return True
    return rope is None and side.x.dtype in ENCODED


def _groups_of(call: AppendCall, queries: Queries | None) -> int:
    """Groups of 8 tokens of a block of a step; 0 for too many tokens or too wide rows."""
    sides, (num_tokens, num_heads, _) = (call.k, call.v), call.k.x.shape
    heads = 2 * num_heads + (0 if queries is None else queries.x.shape[1])
    sm_count = gpu_of(call.k.x.get_device()).sm_count
    groups = -(-num_tokens // PRODUCT_ROWS)
    dim = max(side.fmt.head_dim for side in sides)
    if dim > WIDEST:
        return 0
    if any(_feedback_of(side) is not None for side in sides):
        return int(groups * heads <= WITH_FEEDBACK * sm_count)
    for count in GROUPS:
        if count * dim <= MOST_OF_BLOCK and -(-groups // count) * heads <= BLOCKS_PER_SM * sm_count:
            return count
    return 0


def quantize_with_feedback(
    x: torch.Tensor, fmt: RowFormat, clip: torch.Tensor | None, feedback: torch.Tensor
) -> torch.Tensor:
    """Quantize rows on the current stream; see kvquant/ops/quantize.py.

    x: [batch, num_kv_heads, tokens, head_dim], float32, bfloat16 or float16, not empty; clip:
    [num_kv_heads] float32 or None; feedback: [num_kv_heads, head_dim, head_dim] float32. Returns
    [batch, num_kv_heads, tokens, row_bytes], uint8. Codes of fmt are integers. UnsupportedError if
    there are too many rows; others as of cached_launch.
    """
    batch, num_heads, tokens, _ = x.shape
    shape = batch, num_heads, tokens, fmt.row_bytes
    rows = torch.empty(shape, dtype=torch.uint8, device=x.device)
    new = x.detach().transpose(1, 2).flatten(0, 1)  # a sequence is a page
    if new.stride(-1) != 1:
        new = new.contiguous()
    slots = Slots(torch.arange(batch * tokens, device=x.device))
    clip = None if clip is None else clip.contiguous()
    transform = Encoding(clip=clip, feedback=feedback.contiguous())
    side = AppendSide(new, rows, fmt, transform=transform)
    launch, tensors = _prepared(("x",), AppendCall(side, side, slots), None)
    if launch is not None:
        launch(tensors)
    return rows


def _encode(
    x: torch.Tensor, transform: Encoding, rope: Rope | None, check: Callable[[], None] | None
) -> torch.Tensor:
    """What transform_rows gives, where there is a matrix; check: as of append."""
    offset, matrix, _, _ = transform
    assert matrix is not None
    if rope is None and x.dtype in ENCODED:
        return encode_rows(x, matrix, offset, check=check)
    if check:
        check()
    return transform_rows(x, transform, rope)


def _prepared(
    names: tuple[str, ...], call: AppendCall, check: Callable[[], None] | None
) -> tuple[Launch | None, Tensors]:
    """The launch of a side alone, or of two with feedback, and its tensors; None: nothing to do."""
    has_feedback = _feedback_of(call.k) is not None
    tensors = _tensors_of(call, has_feedback)
    return _find(names, call, tensors, check, has_feedback=has_feedback), tensors


def _find(
    names: tuple[str, ...],
    call: AppendCall,
    tensors: Tensors,
    check: Callable[[], None] | None,
    overlaps: bool = False,
    groups: int = 0,
    has_feedback: bool = False,
) -> Launch | None:
    """Find the launch of a call; names: of the sides that are written. groups: of a step's block.
    has_feedback: whether the feedback kernel writes them."""
    k, v, _, exact_format, rope, _ = call
    interleaved = rope is not None and rope.interleaved
    kinds = k.fmt, v.fmt, k.x.is_neg(), v.x.is_neg()
    facts = map(facts_of, tensors)
    how = overlaps, groups, has_feedback
    key = (AppendSpec, names, exact_format, interleaved, *kinds, *how, *facts)
    return cached_launch(key, check, _prepare, names, call, tensors, *how)


def _prepare(
    names: tuple[str, ...],
    call: AppendCall,
    tensors: Tensors,
    overlaps: bool,
    groups: int,
    has_feedback: bool,
) -> Launch | None:
    all_names = FEEDBACK_NAMES if has_feedback else STEP_NAMES if groups else NAMES
    k = call.k.x
    if not k.numel():
        return None
    gpu = gpu_of(k.get_device())
    copied = _unaligned(all_names, tensors)
    num_tokens, num_heads, _ = k.shape
    constants = {"num_tokens": num_tokens, "num_heads": num_heads}
    spec: AppendSpec | FeedbackSpec
    if has_feedback:
        spec = _feedback_spec(call, names, gpu.sm_count)
        grid = -(-num_tokens // spec.block_rows), num_heads, len(names)
    else:
        spec = _append_spec(call, StepSpec if groups else AppendSpec, gpu)
        if isinstance(spec, StepSpec):
            given = dict(zip(all_names, tensors, strict=True))
            spec, ratio = _with_step(spec, given, constants, copied)
            spec = replace(spec, groups=groups)
            grid = -(-num_tokens // spec.tokens), num_heads, 2 + ratio
        else:
            grid = grid_of(num_tokens, num_heads, len(names), spec.tokens, gpu.sm_count)
    constants["heads_per_block"] = -(-num_heads // grid[1])
    of_sides = (K, "k", names[0], call.k.fmt), (V, "v", names[-1], call.v.fmt)
    for place, side, name, fmt in of_sides:
        x, rows, exact_rows = tensors[place : place + 3]
        assert x is not None and rows is not None
        found = _constants(name, fmt, call.exact_format, x, rows, exact_rows, place in copied)
        constants |= {f"{side}.{key}": value for key, value in found.items()}
        if side == "k":  # slots are those of K and of V
            constants |= found
    overlaps = overlaps and not copied
    return Launch(spec, k.get_device(), grid, constants, copied, overlaps=overlaps)


def _append_spec(call: AppendCall, kind: type[AppendSpec], gpu: GPU) -> AppendSpec:
    """The append kernel of a call, or that of a step without matrices so far."""
    cos, _, interleaved = call.rope or NO_ROPE
    spec = kind(
        _side_of(call.k),
        _side_of(call.v),
        SOURCES[call.k.x.dtype],
        "" if call.k.exact_rows is None else call.exact_format,
        0 if cos is None else 2 * cos.shape[-1],
        interleaved,
    )
    if any(side.fmt.pick(e4m3=True, integers=False, elements=False) for side in call[:2]):
        spec = replace(spec, converts_fp8=gpu.converts_fp8)
    return replace(spec, overlaps=True) if gpu.capability >= OVERLAPS else spec


def _feedback_spec(call: AppendCall, names: tuple[str, ...], sm_count: int) -> FeedbackSpec:
    """The feedback kernel of a call's sides; RoPE rotates the first one."""
    (num_tokens, num_heads, _), sides = call.k.x.shape, (call.k, call.v)[: len(names)]
    is_wide = max(side.fmt.head_dim for side in sides) > WIDEST
    are_few = num_tokens * num_heads * len(names) <= ROWS_PER_SM * sm_count
    share = FEW_LANES if are_few or is_wide else 1
    made = [
        FeedbackSide(
            side.fmt,
            side.transform.clip is not None,
            SOURCES[side.x.dtype],
            "" if side.exact_rows is None else call.exact_format,
            share=share,
        )
        for side in sides
    ]
    if call.rope is not None:
        cos, _, interleaved = call.rope
        made[0] = replace(made[0], rotary_dim=2 * cos.shape[-1], interleaved=interleaved)
    return make_feedback_spec(made)


def _with_step(
    spec: StepSpec,
    given: Mapping[str, torch.Tensor | None],
    constants: dict[str, int],
    copied: Sequence[int],
) -> tuple[StepSpec, int]:
    """The spec of a call with its matrices, and the query heads on a KV head to multiply."""
    has = {name: given[f"step.{name}"] is not None for name in MATRICES}
    spec = replace(spec, **has)  # type: ignore[arg-type]  # names of its flags
    numbers = "q_stride_token", "q_stride_head", "q_matrix_stride", "ratio"
    values = [0, 0, 0, 0]
    q, matrix = given["step.q"], given["step.q_matrix"]
    if q is not None and matrix is not None:
        spec = replace(spec, query=ENCODED[q.dtype])
        steps = strides(q, STEP_NAMES.index("step.q") in copied)
        values = [*steps, 4 * matrix.stride(0), q.shape[1] // matrix.shape[0]]
    constants |= {f"step.{name}": n for name, n in zip(numbers, values, strict=True)}
    return spec, values[3]


def _side_of(side: AppendSide) -> Side:
    transform = side.transform
    clips = transform.clip is not None and side.fmt.facts.is_integer
    return Side(side.fmt, transform.offset is not None, clips)


def _unaligned(names: Sequence[str], tensors: Tensors) -> list[int]:
    """The places of tensors that a kernel cannot read 16 bytes at a time where they are."""
    found = []
    for i, (name, x) in enumerate(zip(names, tensors, strict=True)):
        field = name.rpartition(".")[2]
        if x is None or (field not in ROWS_OF and field not in ALIGNED):
            continue
        is_aligned = is_readable(x, ROWS_OF.get(field, UNIT), is_contiguous=field in ALIGNED)
        if not is_aligned or (field == "q" and x.stride(2) != 1):
            found.append(i)
    return found


def _constants(
    name: str,
    fmt: RowFormat,
    exact_codec: str,
    x: torch.Tensor,
    rows: torch.Tensor,
    exact_rows: torch.Tensor | None,
    is_copied: bool,
) -> dict[str, int]:
    """The arguments of K or of V that are no addresses, by name; errors as of check_pages."""
    check_pages(f"{name}_rows", rows, fmt)
    exact = dict.fromkeys(EXACT.values(), 0)
    if exact_rows is not None:
        check_pages(f"exact_{name}", exact_rows, RowFormat(exact_codec, 1, fmt.head_dim))
        exact = {EXACT[key]: value for key, value in page_arguments(exact_rows).items()}
    token, head = strides(x, is_copied)
    return page_arguments(rows) | exact | {"x_stride_token": token, "x_stride_head": head}
