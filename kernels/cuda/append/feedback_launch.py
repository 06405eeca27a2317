"""Append K and V, or one of them, rounded with feedback on CUDA, in one launch; see
kvquant/ops/append.py."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from kvquant.rows.format import RowFormat
from kvquant.rows.slots import Slots
from kvquant.rows.transforms import Rope, RowTransform

from ..runtime.driver import Launcher
from ..runtime.launch import (
    Ready,
    Tensors,
    current_stream,
    facts_of,
    gpu_of,
    kernel_of,
    launch_on,
    settle,
    side_strides,
    slot_facts,
    unaligned,
    with_copies,
)
from .feedback_spec import FEEDBACK, PAD, FeedbackSide, make_feedback_spec
from .launch import NO_ROPE, SOURCES, side_of

# the tensors of a side in the order of their addresses, which its other arguments follow
COS, SIN, X, OFFSET, FEEDBACK_MATRIX, TENSORS = 3, 4, 6, 9, 11, 12
CONSTANTS = struct.Struct("=" + "".join(code for _, code in FEEDBACK[TENSORS:]))
# Where a lane has a row the GPU does most, but a row takes longer than four lanes do: these are
# sooner done as long as an SM has no more rows than 8 warps of them.
FEW_LANES, ROWS_PER_SM = 4, 64
_settled: dict[Hashable, FeedbackLaunch] = {}


class Fed(NamedTuple):
    """K or V of a call: the arguments of append.append that concern it.

    Attributes:
        name: "k" or "v", for messages.
        fmt: int4 or int8.
        transform: with feedback; its matrix is not looked at.
        bad: [1] or more: its first number is the side's.
    """

    name: str
    x: torch.Tensor
    rows: torch.Tensor
    slots: Slots
    fmt: RowFormat
    transform: RowTransform
    exact_rows: torch.Tensor | None = None
    exact_format: str = "bf16"
    rope: Rope | None = None
    bad: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of their addresses."""
        offset, _, _, clip, feedback = self.transform
        cos, sin, _ = self.rope or NO_ROPE
        rows = self.x, self.rows, self.exact_rows
        return (*self.slots, cos, sin, self.bad, *rows, offset, clip, feedback)

    @property
    def key(self) -> Hashable:
        """What a launch depends on beside the tensors."""
        interleaved = self.rope is not None and self.rope.interleaved
        rotate, is_neg = self.transform.rotate, self.x.is_neg()
        return self.name, self.fmt, self.exact_format, rotate, interleaved, is_neg


def prepare(sides: Sequence[Fed], check: Callable[[], None] | None = None) -> Ready | None:
    """Settle the append of K and V, or of one of them; errors and check as of append.append.

    Returns:
        What launch_on takes; None if there is nothing to do.
    """
    tensors = [tensor for side in sides for tensor in side.tensors]
    key = (*(side.key for side in sides), *map(facts_of, tensors))
    launch = _settled.get(key)
    x = sides[0].x
    if launch is None:
        if check:
            check()
        if not x.numel():
            return None
        launch = settle(_settled, key, FeedbackLaunch, sides)
    return x.get_device(), launch, tensors


class FeedbackLaunch:
    """A settled call: everything but addresses."""

    def __init__(self, sides: Sequence[Fed]) -> None:
        x = sides[0].x
        num_tokens, num_heads, _ = x.shape
        rows = num_tokens * num_heads * len(sides)
        share = FEW_LANES if rows <= ROWS_PER_SM * gpu_of(x).num_sms else 1
        spec = make_feedback_spec([_side_spec(side, share) for side in sides])
        self._copied, self._constants = [], []
        for i, side in enumerate(sides):
            copied = unaligned(side.tensors, (X,), (COS, SIN, OFFSET, FEEDBACK_MATRIX))
            self._copied += [TENSORS * i + place for place in copied]
            self._constants.append(_constants(side, X in copied))
        self._index = x.get_device()
        grid = -(-num_tokens // spec.block_rows), num_heads, len(sides)
        layout = PAD.join(f"{TENSORS}Q{CONSTANTS.size}s" for _ in sides)
        self._launch = Launcher(kernel_of(spec, x), grid, f"={layout}")

    def __call__(self, tensors: Tensors) -> None:
        """Launch on the current stream of the current device, which is that of the tensors."""
        tensors = with_copies(tensors, self._copied)
        at: list[float | bytes] = [0 if one is None else one.data_ptr() for one in tensors]
        values = []
        for i, constants in enumerate(self._constants):
            values += [*at[TENSORS * i : TENSORS * (i + 1)], constants]
        self._launch(current_stream(self._index), values)


def _side_spec(side: Fed, share: int) -> FeedbackSide:
    cos, _, interleaved = side.rope or NO_ROPE
    return FeedbackSide(
        side_of(side.fmt, side.transform),
        SOURCES[side.x.dtype],
        "" if side.exact_rows is None else side.exact_format,
        0 if cos is None else 2 * cos.shape[-1],
        interleaved,
        share,
    )


def _constants(side: Fed, is_copied: bool) -> bytes:
    """The arguments of a side that stay."""
    _, x, rows, _, fmt, _, exact_rows, exact_format, _, _ = side
    steps = side_strides(side.name, fmt, exact_format, x, rows, exact_rows, is_copied)
    exact_facts = (0, 0, 0, 0) if exact_rows is None else slot_facts(exact_rows)
    return CONSTANTS.pack(*steps, x.shape[0], *slot_facts(rows), *exact_facts)


def quantize_with_feedback(
    x: torch.Tensor, fmt: RowFormat, clip: torch.Tensor | None, feedback: torch.Tensor
) -> torch.Tensor:
    """Quantize rows on the current stream; see rounding.quantize_calibrated.

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
    transform = RowTransform(clip=clip, feedback=feedback.contiguous())
    ready = prepare([Fed("x", new, rows, slots, fmt, transform)])
    if ready:
        launch_on(*ready)
    return rows
