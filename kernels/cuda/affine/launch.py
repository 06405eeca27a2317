"""Turn queries and outputs, and encode new rows, on CUDA, in one launch.

See kvquant/ops/transform.py and kvquant/rows/transforms.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable
from dataclasses import replace

import torch

from ..device.row_spec import divisor
from ..runtime.driver import Launcher
from ..runtime.launch import (
    aligned_copy,
    current_stream,
    facts_of,
    gpu_of,
    kernel_of,
    launch_on,
    settle,
    strides,
)
from .spec import COLUMNS, TURN, TurnSpec

SOURCES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
ADDRESSES = 5
CONSTANTS = struct.Struct("=" + "".join(code for _, code in TURN[ADDRESSES:]))
BLOCKS_PER_SM = 4  # at most, as registers allow: more rows, and blocks go on with their part of M
WIDTH = 2  # columns of a lane where these do not do: a block needs twice the registers
MOST_BLOCKS = 65535  # along y and z
_settled: dict[Hashable, TurnLaunch] = {}


def turn_rows(
    x: torch.Tensor,
    matrix: torch.Tensor | None,
    offset: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    check: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Compute x M + offset on the current stream; see kvquant.ops.transform.turn_rows.

    Args:
        check: raises unless the arguments fit one another; called only before a call is settled.

    Raises:
        UnsupportedError: the GPU is too old.
        DeviceError: CUDA refuses the launch.
    """
    return _turn(x, matrix, offset, seq_lens, check)


def encode_rows(
    x: torch.Tensor,
    matrix: torch.Tensor,
    offset: torch.Tensor | None,
    check: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Compute (x - offset) M on the current stream; arguments and errors as of turn_rows.

    Returns:
        [num_tokens, num_kv_heads, head_dim], float32, contiguous. The bits of a row do not depend
        on the others.
    """
    return _turn(x, matrix, offset, None, check, encodes=True)


def _turn(
    x: torch.Tensor,
    matrix: torch.Tensor | None,
    offset: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    check: Callable[[], None] | None,
    encodes: bool = False,
) -> torch.Tensor:
    """Turn or encode rows."""
    tensors = x, matrix, offset, seq_lens
    key = encodes, x.is_neg(), *map(facts_of, tensors)
    launch = _settled.get(key)
    if launch is None:
        if check:
            check()
        if not x.numel():
            return x.new_empty(x.shape, dtype=torch.float32 if encodes else x.dtype)
        launch = settle(_settled, key, TurnLaunch, *tensors, encodes)
    return launch_on(x.get_device(), launch, *tensors)


class TurnLaunch:
    """A settled call: everything but addresses."""

    def __init__(
        self,
        x: torch.Tensor,
        matrix: torch.Tensor | None,
        offset: torch.Tensor | None,
        seq_lens: torch.Tensor | None,
        encodes: bool,
    ) -> None:
        batch, num_heads, head_dim = self._shape = x.shape
        self._dtype = torch.float32 if encodes else x.dtype
        self._device, self._index = x.device, x.get_device()
        at_odd_place = x.data_ptr() % 4 or any(step % 4 for step in strides(x))
        self._copied = x.is_neg() or x.stride(2) != 1 or bool(at_odd_place)
        if self._copied:
            x = aligned_copy(x)
        per_head = offset if matrix is None else matrix
        assert per_head is not None
        num_kv_heads = per_head.shape[0]
        ratio = num_heads // num_kv_heads
        spec = TurnSpec(head_dim, SOURCES[x.dtype], matrix is not None, encodes)
        rows, columns = batch * ratio, -(-head_dim // COLUMNS)
        most = BLOCKS_PER_SM * gpu_of(x).num_sms
        groups = -(-rows // spec.warps)
        if spec.product and groups * columns * num_kv_heads > most:
            spec = replace(spec, width=WIDTH)
            columns, most = -(-head_dim // (COLUMNS * WIDTH)), most // WIDTH
        walked = max(-(-groups * columns * num_kv_heads // most), -(-groups // MOST_BLOCKS))
        rows_of_block = spec.warps * walked
        self._constants = CONSTANTS.pack(
            *strides(x),
            0 if matrix is None else 4 * matrix.stride(0),
            0 if seq_lens is None else 4 * seq_lens.stride(0),
            num_heads,
            ratio,
            *divisor(ratio),
            rows,
            rows_of_block,
        )
        grid = columns, num_kv_heads, -(-rows // rows_of_block)
        layout = f"={ADDRESSES}Q{CONSTANTS.size}s"
        self._launch = Launcher(kernel_of(spec, x), grid, layout)

    def __call__(self, x: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        """Launch on the current stream of the current device, which is that of the tensors."""
        if self._copied:
            x = aligned_copy(x)
        y = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        tensors = (x, y, *others)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._launch(current_stream(self._index), (*addresses, self._constants))
        return y
