"""Append on CUDA: one launch for K and V, or for one of them; see kvquant/ops/append.py."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable
from dataclasses import replace

import torch

from kvquant.rows.format import RowFormat
from kvquant.rows.quantize import LEVELS
from kvquant.rows.slots import Slots
from kvquant.rows.transforms import Rope, RowTransform

from ..device.row_spec import APPEND, AppendSpec, Side, side_arguments
from ..runtime.driver import Launcher
from ..runtime.launch import (
    Ready,
    Tensors,
    current_stream,
    facts_of,
    gpu_of,
    grid_of,
    kernel_of,
    launch_on,
    settle,
    side_strides,
    slot_facts,
    unaligned,
    with_copies,
)

SOURCES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# what stands after the addresses, in all arguments and in those of a side
COMMON = struct.Struct("=" + "".join(code for _, code in APPEND[6:]) + "4x")
SIDE = struct.Struct("=" + side_arguments()[5:])
# the tensors of a call in the order of their addresses: six, then five of K and five of V
COS, SIN, K, V = 3, 4, 6, 11
ROWS, EXACT, OFFSET = 1, 2, 3  # after K or V
NO_TRANSFORM, NO_ROPE = RowTransform(), (None, None, False)
_settled: dict[Hashable, AppendLaunch] = {}


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
    k_transform: RowTransform | None = None,
    v_transform: RowTransform | None = None,
    rope: Rope | None = None,
    bad: torch.Tensor | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Append on the current stream; see append.append_rows.

    Slots that do not exist are left out, like negative ones. Matrices and feedback are not looked
    at: see calibrated_launch.py.

    Args:
        check: raises unless the arguments fit one another; called only before a call is settled.

    Raises:
        ConfigError: rows are not aligned.
        UnsupportedError: the GPU is too old, or there are too many slots.
        DeviceError: CUDA refuses the launch.
    """
    k_transform, v_transform = k_transform or NO_TRANSFORM, v_transform or NO_TRANSFORM
    cos, sin, _ = rope or NO_ROPE
    of_k = k, k_rows, exact_k, k_transform.offset, k_transform.clip
    of_v = v, v_rows, exact_v, v_transform.offset, v_transform.clip
    ready = _prepare(
        (k_format, v_format),
        exact_format,
        (k_transform, v_transform),
        rope,
        (*slots, cos, sin, bad, *of_k, *of_v),
        check,
        ("k", "v"),
    )
    if ready:
        launch_on(*ready)


def prepare_side(
    name: str,
    x: torch.Tensor,
    rows: torch.Tensor,
    slots: Slots,
    fmt: RowFormat,
    transform: RowTransform,
    exact_rows: torch.Tensor | None,
    exact_format: str,
    rope: Rope | None,
    bad: torch.Tensor | None,
    check: Callable[[], None] | None,
) -> Ready | None:
    """Settle the append of K or of V alone; arguments and errors as of append.

    Args:
        name: "k" or "v", for messages.
        bad: [1] or more: its first number is the side's.

    Returns:
        What launch_on takes; None if there is nothing to do.
    """
    cos, sin, _ = rope or NO_ROPE
    side = x, rows, exact_rows, transform.offset, transform.clip
    tensors = (*slots, cos, sin, bad, *side, *side)
    transforms = transform, transform
    return _prepare((fmt, fmt), exact_format, transforms, rope, tensors, check, (name,))


def _prepare(
    formats: tuple[RowFormat, RowFormat],
    exact_format: str,
    transforms: tuple[RowTransform, RowTransform],
    rope: Rope | None,
    tensors: Tensors,
    check: Callable[[], None] | None,
    names: tuple[str, ...],
) -> Ready | None:
    """Settle a call; names: of the sides that are written."""
    k, v, cos = tensors[K], tensors[V], tensors[COS]
    assert k is not None and v is not None
    interleaved = rope is not None and rope.interleaved
    # all that the check and the launch depend on
    key = (
        formats,
        exact_format,
        transforms[0].rotate,
        transforms[1].rotate,
        interleaved,
        names,
        k.is_neg(),
        v.is_neg(),
        *map(facts_of, tensors),
    )
    launch = _settled.get(key)
    if launch is None:
        if check:
            check()
        if not k.numel():
            return None
        spec = AppendSpec(
            side_of(formats[0], transforms[0]),
            side_of(formats[1], transforms[1]),
            SOURCES[k.dtype],
            "" if tensors[K + EXACT] is None else exact_format,
            0 if cos is None else 2 * cos.shape[-1],
            interleaved,
        )
        launch = settle(_settled, key, AppendLaunch, spec, tensors, names)
    return k.get_device(), launch, tensors


def side_of(fmt: RowFormat, transform: RowTransform) -> Side:
    """What kernels are compiled for."""
    clips = transform.clip is not None and fmt.codec in LEVELS
    return Side(fmt, transform.offset is not None, transform.rotate, clips)


class AppendLaunch:
    """A settled call: everything but addresses."""

    def __init__(self, spec: AppendSpec, tensors: Tensors, names: tuple[str, ...]) -> None:
        k, rows, exact = tensors[K], tensors[K + ROWS], tensors[K + EXACT]
        assert k is not None and rows is not None
        num_tokens, num_heads, _ = k.shape
        gpu = gpu_of(k)
        if "fp8" in (spec.k.fmt.codec, spec.v.fmt.codec):
            spec = replace(spec, converts_fp8=gpu.converts_fp8)
        grid = grid_of(num_tokens, num_heads, len(names), spec.tokens, gpu.num_sms)
        exact_facts = (0, 0, 0, 0) if exact is None else slot_facts(exact)
        heads = -(-num_heads // grid[1])
        self._common = COMMON.pack(num_tokens, num_heads, heads, *slot_facts(rows), *exact_facts)
        self._copied = unaligned(tensors, (K, V), (COS, SIN, K + OFFSET, V + OFFSET))
        self._k = self._side_constants(
            names[0], spec.k, spec.exact, tensors[K:V], K in self._copied
        )
        self._v = self._side_constants(
            names[-1], spec.v, spec.exact, tensors[V:], V in self._copied
        )
        self._index = k.get_device()
        layout = f"=6Q{COMMON.size}s5Q{SIDE.size}s5Q{SIDE.size}s"
        self._launch = Launcher(kernel_of(spec, k), grid, layout)

    def __call__(self, tensors: Tensors) -> None:
        """Launch on the current stream of the current device, which is that of the tensors."""
        tensors = with_copies(tensors, self._copied)
        at: list[float | bytes] = [0 if one is None else one.data_ptr() for one in tensors]
        values = (*at[:K], self._common, *at[K:V], self._k, *at[V:], self._v)
        self._launch(current_stream(self._index), values)

    @staticmethod
    def _side_constants(
        name: str, side: Side, exact_codec: str, tensors: Tensors, is_copied: bool
    ) -> bytes:
        """The strides of K or of V."""
        x, rows, exact_rows = tensors[:3]
        assert x is not None and rows is not None
        return SIDE.pack(*side_strides(name, side.fmt, exact_codec, x, rows, exact_rows, is_copied))
