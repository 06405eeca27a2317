"""Round codes with feedback on CUDA, in one launch; see kvquant/rounding.py for the meaning."""

from __future__ import annotations

import struct
from collections.abc import Hashable

import torch

from kvquant.layout import RowFormat

from .cuda.driver import Launcher
from .cuda.feedbackspec import FEEDBACK, FeedbackSpec
from .cuda.loaded import current_device, current_stream, gpu_of, kernel_of, settle

CONSTANTS = struct.Struct("=" + "".join(code for _, code in FEEDBACK[3:]))
# Where a lane has a row the GPU does most, but a row takes longer than four lanes do: these are
# sooner done as long as an SM has no more rows than 8 warps of them.
FEW_LANES, ROWS_PER_SM = 4, 64
_settled: dict[Hashable, FeedbackLaunch] = {}


def round_with_feedback(
    x: torch.Tensor, rows: torch.Tensor, fmt: RowFormat, feedback: torch.Tensor
) -> None:
    """Write the codes of rows, on the current stream.

    Args:
        x: [batch, num_kv_heads, tokens, head_dim], float32.
        rows: [batch, num_kv_heads, tokens, row_bytes], uint8, contiguous: scales and shifts, which
            stay; where they are NaN the codes become 0.
        fmt: of the rows, int4 or int8.
        feedback: [num_kv_heads, head_dim, head_dim], float32: L.

    Raises:
        UnsupportedError: the GPU is too old.
        DeviceError: CUDA refuses the launch.
    """
    index = x.get_device()
    key = fmt, x.shape, index
    launch = _settled.get(key)
    if launch is None:
        if not x.numel():
            return
        launch = settle(_settled, key, FeedbackLaunch, fmt, x)
    x, feedback = _aligned(x), _aligned(feedback)
    addresses = x.data_ptr(), rows.data_ptr(), feedback.data_ptr()
    if index == current_device():
        launch(addresses)
        return
    with torch.cuda.device(index):
        launch(addresses)


class FeedbackLaunch:
    """A settled call: everything but addresses."""

    def __init__(self, fmt: RowFormat, x: torch.Tensor) -> None:
        batch, num_heads, tokens, _ = x.shape
        num_rows = batch * tokens
        few = num_rows * num_heads <= ROWS_PER_SM * gpu_of(x).num_sms
        spec = FeedbackSpec(fmt, FEW_LANES if few else 1)
        self._constants = CONSTANTS.pack(num_rows, tokens, num_heads)
        self._index = x.get_device()
        grid = -(-num_rows // spec.block_rows), num_heads, 1
        self._launch = Launcher(kernel_of(spec, x), grid, f"=3Q{CONSTANTS.size}s")

    def __call__(self, addresses: tuple[int, int, int]) -> None:
        """Launch on the current stream of the current device, which is that of the tensors."""
        self._launch(current_stream(self._index), (*addresses, self._constants))


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """The same, contiguous, from a multiple of 16 bytes on."""
    x = x.detach().resolve_neg().contiguous()
    return x.clone() if x.data_ptr() % 16 else x
