"""Append on CUDA: new K and V to their slots; see kvquant/ops/append.py.

append              one launch for K and V
append_calibrated   where rows or queries are multiplied by a matrix, or rounded with feedback

    a step      few tokens: one launch for K, V and queries (step_kernel.py)
    matrix      else one launch of the affine kernel for the side, with the offset; torch's product
                after RoPE or a rotation, and of float32
    feedback    else one launch of the feedback kernel for all sides that have it; without it one of
                the append kernel
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from kvquant.rows.basis import Encoding, Queries, transform_rows
from kvquant.rows.format import RowFormat
from kvquant.rows.rotation import Rope
from kvquant.rows.slots import Slots

from ..affine.launch import SOURCES as ENCODED
from ..affine.launch import affine_rows, encode_rows
from ..device.row_layout import PRODUCT_ROWS, UNIT, refuse_latents
from ..runtime.launch import OVERLAPS, Launch, cached_launch, gpu_of, grid_of
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
NO_TRANSFORM, NO_ROPE = Encoding(), (None, None, False)
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
NAMES = addresses_of(APPEND)  # of the tensors of a call
STEP_NAMES = addresses_of(StepSpec.arguments)
K, V = NAMES.index("k.x"), NAMES.index("v.x")
ROWS_OF = {"x": UNIT, "q": 4, "q_matrix": UNIT}  # what kernels read so many bytes of at a time
MATRICES = "k_matrix", "v_matrix", "k_feedback", "v_feedback"  # of a step
ALIGNED = ("cos", "sin", "offset", "feedback", *MATRICES)  # 16 bytes at a time, contiguous
EXACT = {
    "stride_page": "exact_stride_seq_slot",
    "stride_head": "exact_stride_head",
    "stride_row": "exact_stride_row",
    "num_slots": "num_exact",
    "page_size": "exact_len",
    "page_factor": "exact_factor",
    "page_shift": "exact_shift",
}
Ready = tuple[Launch, Tensors]
NewRows = tuple[torch.Tensor, RowFormat, Encoding, "Rope | None"]


class OneSide(NamedTuple):
    """K or V of a call: the arguments of append that concern it.

    Attributes:
        name: "k" or "v", for messages.
        bad: [1] or more: its first number is the side's.
    """

    name: str
    x: torch.Tensor
    rows: torch.Tensor
    slots: Slots
    fmt: RowFormat
    transform: Encoding
    exact_rows: torch.Tensor | None = None
    exact_format: str = "bf16"
    rope: Rope | None = None
    bad: torch.Tensor | None = None


def append(
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
    k_transform: Encoding | None = None,
    v_transform: Encoding | None = None,
    rope: Rope | None = None,
    bad: torch.Tensor | None = None,
    check: Callable[[], None] | None = None,
    overlaps: bool = False,
) -> None:
    """Append on the current stream; see append.append_rows.

    Slots that do not exist are left out, like negative ones. Matrices and feedback are not looked
    at: see append_calibrated.

    Args:
        check: raises unless the arguments fit one another; called only before a launch is prepared.
        overlaps: whether what was launched before on this stream is place_tokens, which found the
            slots: then this launch may begin while that one ends.

    Raises:
        ConfigError: rows are not aligned.
        UnsupportedError: the GPU is too old, or there are too many slots.
        DeviceError: CUDA refuses the launch.
    """
    k_transform, v_transform = k_transform or NO_TRANSFORM, v_transform or NO_TRANSFORM
    cos, sin, _ = rope or NO_ROPE
    of_k = k, k_rows, exact_k, k_transform.offset, k_transform.clip
    of_v = v, v_rows, exact_v, v_transform.offset, v_transform.clip
    tensors = (*slots, cos, sin, bad, *of_k, *of_v)
    formats, transforms = (k_format, v_format), (k_transform, v_transform)
    names = ("k", "v")
    launch = _find(names, formats, exact_format, transforms, rope, tensors, check, overlaps)
    if launch is not None:
        launch(tensors)


class AppendAgain:
    """append for rows that stay, and new rows like some before: other ones, at other slots.

    Attributes:
        copies: whether new rows like these are copied first: then it cannot be called.
    """

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_rows: torch.Tensor,
        v_rows: torch.Tensor,
        slots: Slots,
        k_format: RowFormat,
        v_format: RowFormat,
        exact_k: torch.Tensor | None,
        exact_v: torch.Tensor | None,
        exact_format: str,
        k_transform: Encoding | None,
        v_transform: Encoding | None,
        bad: torch.Tensor,
        overlaps: bool = False,
    ) -> None:
        """Look at all that stays; arguments as of append."""
        k_transform, v_transform = k_transform or NO_TRANSFORM, v_transform or NO_TRANSFORM
        of_k = k, k_rows, exact_k, k_transform.offset, k_transform.clip
        of_v = v, v_rows, exact_v, v_transform.offset, v_transform.clip
        tensors = (*slots, None, None, bad, *of_k, *of_v)
        formats, transforms = (k_format, v_format), (k_transform, v_transform)
        names = ("k", "v")
        launch = _find(names, formats, exact_format, transforms, None, tensors, None, overlaps)
        assert launch is not None
        self._launch, self.copies = launch, launch.copies
        addresses = [0 if one is None else one.data_ptr() for one in tensors]
        self._of_k, self._of_v = addresses[K + 1 : V], addresses[V + 1 :]

    def __call__(self, k: int, v: int, slots: Sequence[int], bad: int) -> None:
        """Append on the current stream.

        Args:
            k, v: the addresses of new rows.
            slots: those of the tensors of Slots.
            bad: that of the counters.

        Raises:
            DeviceError: CUDA refuses the launch.
        """
        self._launch.at((*slots, 0, 0, bad, k, *self._of_k, v, *self._of_v))


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
    k_transform: Encoding | None = None,
    v_transform: Encoding | None = None,
    rope: Rope | None = None,
    bad: torch.Tensor | None = None,
    check: Callable[[], None] | None = None,
    overlaps: bool = False,
    queries: Queries | None = None,
) -> torch.Tensor | None:
    """Append on the current stream; arguments and errors as of append.

    Args:
        queries: of as many tokens, to be multiplied too.

    Returns:
        The queries times their matrix, as affine_rows gives them; None without.
    """
    refuse_latents(k_format, v_format)
    k_transform, v_transform = k_transform or NO_TRANSFORM, v_transform or NO_TRANSFORM
    sides = (k, k_format, k_transform, rope), (v, v_format, v_transform, None)
    groups = _groups_of(sides, queries)
    if groups and all(_is_of_step(*side) for side in sides):
        cos, sin, _ = rope or NO_ROPE
        x, by, multiplied = None, None, None
        if queries is not None:
            x, by = queries
            multiplied = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        of_k = k, k_rows, exact_k, k_transform.offset, k_transform.clip
        of_v = v, v_rows, exact_v, v_transform.offset, v_transform.clip
        matrices = k_transform.matrix, v_transform.matrix
        feedback = _feedback_of(k_format, k_transform), _feedback_of(v_format, v_transform)
        step = *matrices, *feedback, x, multiplied, by
        tensors = (*slots, cos, sin, bad, *of_k, *of_v, *step)
        formats, transforms = (k_format, v_format), (k_transform, v_transform)
        names = ("k", "v")
        launch = _find(
            names, formats, exact_format, transforms, rope, tensors, check, overlaps, groups
        )
        if launch is not None:
            launch(tensors)
        return multiplied
    of_k_side = "k", k, k_rows, k_format, exact_k, k_transform, rope
    of_v_side = "v", v, v_rows, v_format, exact_v, v_transform, None
    with_feedback: list[OneSide] = []
    ready: list[Ready | None] = []
    for i, (name, x, rows, fmt, exact_rows, transform, rotary) in enumerate((of_k_side, of_v_side)):
        if transform.matrix is not None:
            x, rotary = _encode(x.detach(), transform, rotary, check), None
            transform = Encoding(clip=transform.clip, feedback=transform.feedback)
        counted = None if bad is None else bad[i:]
        where, how = (name, x, rows, slots, fmt), (exact_rows, exact_format, rotary, counted)
        side = OneSide(*where, transform, *how)
        if transform.feedback is not None and fmt.facts.is_integer:
            with_feedback.append(side)
        else:
            ready.append(_ready_alone(side, check))
    if with_feedback:
        ready.append(_ready_with_feedback(with_feedback, check))
    for one in ready:  # both sides can be done
        if one is not None:
            one_launch, its = one
            one_launch(its)
    return None if queries is None else affine_rows(*queries, None, None)


def _feedback_of(fmt: RowFormat, transform: Encoding) -> torch.Tensor | None:
    """What rows are rounded with; other formats than int4 and int8 are not."""
    return transform.feedback if fmt.facts.is_integer else None


def _is_of_step(x: torch.Tensor, fmt: RowFormat, transform: Encoding, rope: Rope | None) -> bool:
    """Whether step_kernel.py appends such rows: a matrix of 16-bit rows alone, feedback of rows
    whose matrix L has room in shared memory."""
    if _feedback_of(fmt, transform) is not None and not 64 <= fmt.head_dim <= MOST_FEEDBACK:
        return False
    if transform.matrix is None:
        return True
    return rope is None and not transform.rotate and x.dtype in ENCODED


def _groups_of(sides: Sequence[NewRows], queries: Queries | None) -> int:
    """Groups of 8 tokens that a block of a step has; 0 if there are too many tokens."""
    num_tokens, num_heads, _ = sides[0][0].shape
    heads = 2 * num_heads + (0 if queries is None else queries.x.shape[1])
    sm_count = gpu_of(sides[0][0].get_device()).sm_count
    groups = -(-num_tokens // PRODUCT_ROWS)
    if any(_feedback_of(fmt, transform) is not None for _, fmt, transform, _ in sides):
        return int(groups * heads <= WITH_FEEDBACK * sm_count)
    dim = max(fmt.head_dim for _, fmt, _, _ in sides)
    for count in GROUPS:
        if count * dim <= MOST_OF_BLOCK and -(-groups // count) * heads <= BLOCKS_PER_SM * sm_count:
            return count
    return 0


def quantize_with_feedback(
    x: torch.Tensor, fmt: RowFormat, clip: torch.Tensor | None, feedback: torch.Tensor
) -> torch.Tensor:
    """Quantize rows on the current stream; see kvquant/ops/quantize.py.

    Args:
        x: [batch, num_kv_heads, tokens, head_dim], float32, bfloat16 or float16, not empty.
        fmt: int4 or int8.
        clip: [num_kv_heads], float32, or None.
        feedback: [num_kv_heads, head_dim, head_dim], float32.

    Returns:
        [batch, num_kv_heads, tokens, row_bytes], uint8.

    Raises:
        UnsupportedError: the GPU is too old, or there are too many rows.
        DeviceError: CUDA refuses the launch.
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
    ready = _ready_with_feedback([OneSide("x", new, rows, slots, fmt, transform)], None)
    if ready is not None:
        launch, tensors_of_launch = ready
        launch(tensors_of_launch)
    return rows


def _encode(
    x: torch.Tensor, transform: Encoding, rope: Rope | None, check: Callable[[], None] | None
) -> torch.Tensor:
    """What transform_rows gives, where there is a matrix; check: as of append."""
    offset, rotate, matrix, _, _ = transform
    assert matrix is not None
    if rope is None and not rotate and x.dtype in ENCODED:
        return encode_rows(x, matrix, offset, check)
    if check:
        check()
    return transform_rows(x, transform, rope)


# The append kernel


def _ready_alone(side: OneSide, check: Callable[[], None] | None) -> Ready | None:
    """Prepare the append of K or of V alone; None if there is nothing to do."""
    cos, sin, _ = side.rope or NO_ROPE
    rows = side.x, side.rows, side.exact_rows, side.transform.offset, side.transform.clip
    tensors = (*side.slots, cos, sin, side.bad, *rows, *rows)
    formats, transforms = (side.fmt, side.fmt), (side.transform, side.transform)
    names, exact_format = (side.name,), side.exact_format
    launch = _find(names, formats, exact_format, transforms, side.rope, tensors, check)
    return None if launch is None else (launch, tensors)


def _find(
    names: tuple[str, ...],
    formats: tuple[RowFormat, RowFormat],
    exact_format: str,
    transforms: tuple[Encoding, Encoding],
    rope: Rope | None,
    tensors: Tensors,
    check: Callable[[], None] | None,
    overlaps: bool = False,
    groups: int = 0,
) -> Launch | None:
    """Find the launch of a call; names: of the sides that are written."""
    k, v = tensors[K], tensors[V]
    assert k is not None and v is not None
    interleaved = rope is not None and rope.interleaved
    rotates = transforms[0].rotate, transforms[1].rotate
    how = k.is_neg(), v.is_neg(), overlaps, groups
    facts = map(facts_of, tensors)
    key = (AppendSpec, names, formats, exact_format, rotates, interleaved, how, *facts)
    call = names, formats, exact_format, transforms, interleaved, overlaps, groups, tensors
    return cached_launch(key, check, _prepare, *call)


def _prepare(
    names: tuple[str, ...],
    formats: tuple[RowFormat, RowFormat],
    exact_format: str,
    transforms: tuple[Encoding, Encoding],
    interleaved: bool,
    overlaps: bool,
    groups: int,
    tensors: Tensors,
) -> Launch | None:
    all_names = STEP_NAMES if groups else NAMES
    given = dict(zip(all_names, tensors, strict=True))
    k, cos, exact_rows = given["k.x"], given["cos"], given["k.exact_rows"]
    assert k is not None
    if not k.numel():
        return None
    gpu = gpu_of(k.get_device())
    copied = _unaligned(all_names, tensors)
    spec: AppendSpec = (StepSpec if groups else AppendSpec)(
        _side_of(formats[0], transforms[0]),
        _side_of(formats[1], transforms[1]),
        SOURCES[k.dtype],
        "" if exact_rows is None else exact_format,
        0 if cos is None else 2 * cos.shape[-1],
        interleaved,
    )
    if any(fmt.pick(e4m3=True, integers=False, elements=False) for fmt in formats):
        spec = replace(spec, converts_fp8=gpu.converts_fp8)
    if gpu.capability >= OVERLAPS:
        spec = replace(spec, overlaps=True)
    num_tokens, num_heads, _ = k.shape
    constants = {"num_tokens": num_tokens, "num_heads": num_heads}
    if isinstance(spec, StepSpec):
        spec, ratio = _with_step(spec, given, constants, copied)
        spec = replace(spec, groups=groups)
        grid = -(-num_tokens // spec.tokens), num_heads, 2 + ratio
    else:
        grid = grid_of(num_tokens, num_heads, len(names), spec.tokens, gpu.sm_count)
    constants["heads_per_block"] = -(-num_heads // grid[1])
    for place, side, name, fmt in ((K, "k", names[0], formats[0]), (V, "v", names[-1], formats[1])):
        x, rows, exact_rows = tensors[place : place + 3]
        assert x is not None and rows is not None
        found = _constants(name, fmt, exact_format, x, rows, exact_rows, place in copied)
        constants |= {f"{side}.{key}": value for key, value in found.items()}
        if side == "k":  # slots are those of K and of V
            constants |= found
    overlaps = overlaps and not copied
    return Launch(spec, k.get_device(), grid, constants, copied, overlaps=overlaps)


def _with_step(
    spec: StepSpec,
    given: Mapping[str, torch.Tensor | None],
    constants: dict[str, int],
    copied: Sequence[int],
) -> tuple[StepSpec, int]:
    """The spec of a call with its matrices, whose constants are added, and the query heads on a KV
    head that are multiplied."""
    has = {name: given[f"step.{name}"] is not None for name in MATRICES}
    spec = replace(spec, **has)  # type: ignore[arg-type]  # names of its flags
    numbers = "q_stride_token", "q_stride_head", "q_matrix_stride", "ratio"
    values = [0, 0, 0, 0]
    q, matrix = given["step.q"], given["step.q_matrix"]
    if q is not None and matrix is not None:
        spec = replace(spec, query=ENCODED[q.dtype])
        row_bytes = q.shape[2] * q.element_size()
        is_copied = STEP_NAMES.index("step.q") in copied
        steps = [q.shape[1] * row_bytes, row_bytes] if is_copied else strides(q)
        values = [*steps, 4 * matrix.stride(0), q.shape[1] // matrix.shape[0]]
    constants |= {f"step.{name}": n for name, n in zip(numbers, values, strict=True)}
    return spec, values[3]


# The feedback kernel


def _ready_with_feedback(
    sides: Sequence[OneSide], check: Callable[[], None] | None
) -> Ready | None:
    """Prepare the append of K and V, or of one of them; None if there is nothing to do."""
    tensors = [tensor for side in sides for tensor in _tensors_with_feedback(side)]
    facts = map(facts_of, tensors)
    key = (FeedbackSpec, *map(_key_with_feedback, sides), *facts)
    launch = cached_launch(key, check, _prepare_with_feedback, sides, tensors)
    return None if launch is None else (launch, tensors)


def _tensors_with_feedback(side: OneSide) -> Tensors:
    """In the order of their addresses."""
    offset, _, _, clip, feedback = side.transform
    cos, sin, _ = side.rope or NO_ROPE
    rows = side.x, side.rows, side.exact_rows
    return (*side.slots, cos, sin, side.bad, *rows, offset, clip, feedback)


def _key_with_feedback(side: OneSide) -> Hashable:
    """What a launch depends on beside the tensors."""
    interleaved = side.rope is not None and side.rope.interleaved
    rotate, is_neg = side.transform.rotate, side.x.is_neg()
    return side.name, side.fmt, side.exact_format, rotate, interleaved, is_neg


def _prepare_with_feedback(sides: Sequence[OneSide], tensors: Tensors) -> Launch | None:
    x = sides[0].x
    if not x.numel():
        return None
    num_tokens, num_heads, _ = x.shape
    num_rows = num_tokens * num_heads * len(sides)
    share = FEW_LANES if num_rows <= ROWS_PER_SM * gpu_of(x.get_device()).sm_count else 1
    spec = make_feedback_spec([_feedback_side(side, share) for side in sides])
    names = addresses_of(spec.arguments)
    copied = _unaligned(names, tensors)
    constants: dict[str, float] = {}
    for (prefix, _), side in zip(spec.arguments, sides, strict=True):
        _, x, rows, _, fmt, _, exact_rows, exact_format, _, _ = side
        is_copied = names.index(f"{prefix}.x") in copied
        found = _constants(side.name, fmt, exact_format, x, rows, exact_rows, is_copied)
        found |= {"num_tokens": num_tokens, "rotates": int(side.transform.rotate)}
        constants |= {f"{prefix}.{key}": value for key, value in found.items()}
    grid = -(-num_tokens // spec.block_rows), num_heads, len(sides)
    return Launch(spec, x.get_device(), grid, constants, copied)


def _feedback_side(side: OneSide, share: int) -> FeedbackSide:
    cos, _, interleaved = side.rope or NO_ROPE
    return FeedbackSide(
        side.fmt,
        side.transform.clip is not None,
        SOURCES[side.x.dtype],
        "" if side.exact_rows is None else side.exact_format,
        0 if cos is None else 2 * cos.shape[-1],
        interleaved,
        share,
    )


# Both


def _side_of(fmt: RowFormat, transform: Encoding) -> Side:
    """What kernels are compiled for."""
    clips = transform.clip is not None and fmt.facts.is_integer
    return Side(fmt, transform.offset is not None, transform.rotate, clips)


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
    row_bytes = x.shape[2] * x.element_size()
    token, head = (x.shape[1] * row_bytes, row_bytes) if is_copied else strides(x)
    return page_arguments(rows) | exact | {"x_stride_token": token, "x_stride_head": head}
