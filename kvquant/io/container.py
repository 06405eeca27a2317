"""The reader of files of rows; manifest.py reads their manifests."""

from __future__ import annotations

import os
import struct
from typing import Generic, TypeVar

import torch

from ..errors import CheckpointError
from ..rows.format import RowFormat
from ..rows.quantize import dequantize, parameters
from .manifest import Manifest
from .parts import Part
from .tensor_files import SafetensorsFile

_SAFE_SCALE = 2.0**119  # of FlashMLA's rows: 448 times it is finite

M = TypeVar("M", bound=Manifest)


class RowsFile(SafetensorsFile, Generic[M]):
    """A file of rows, open for reading, with checked header and manifest.

    kinds are the manifests to take: CacheManifest, SequencesManifest, or both; contents is the one.
    """

    contents: M

    def __init__(self, path: str | os.PathLike[str], *kinds: type[M]) -> None:
        self._kinds = {kind.FORMAT: kind for kind in kinds}
        super().__init__(path)

    def _check(self) -> None:
        top = self.manifest(*self._kinds)
        self.contents = self._kinds[top["format"]].read(top)
        parts = self.contents.parts.values()
        self.check_tensors(torch.uint8, {part.name: part.shape for part in parts})

    def rows(self, part: Part) -> torch.Tensor:
        """Read one tensor, uint8, of part.shape; raises as read and check_values."""
        rows = self.read(part.name)
        check_values(part.by_token(rows), part)
        return rows


def check_values(rows: torch.Tensor, part: Part, start: int = 0) -> None:
    """Raise CheckpointError if a row, from index start on, decodes to NaN or Inf or will."""
    fmt = part.fmt
    if not rows.numel():
        return
    codes = rows[..., fmt.code_offset :][..., : fmt.code_bytes]
    has_nan = fmt.pick(e4m3=True, integers=False, bf16=False, fp16=False)
    if has_nan and bool((is_nan := (codes & 0x7F) == 0x7F).any()):
        _refuse(is_nan, part, start, "a code is NaN")
    if fmt.pick(scales=True, pairs=False, none=False):
        scales, _ = parameters(rows, fmt)
        bad = ~((scales > 0) & scales.isfinite())
        bad &= (rows != 0).any(-1, keepdim=True)  # zeros stand behind the last row in use of a page
        _refuse(bad, part, start, "a scale is no positive number")
        if bool((scales > _SAFE_SCALE).any()):
            is_infinite = ~dequantize(rows, fmt).isfinite()
            _refuse(is_infinite, part, start, "a scale is so large that a value is infinite")
        return
    header = rows if fmt.is_exact else rows[..., : fmt.header_bytes]
    bits = header.contiguous().view(torch.int16)  # isfinite() is ten times slower
    sizes = bits & 0x7FFF
    # Inf as bits; NaN lies above
    largest, infinite = int(sizes.max()), fmt.pick(bf16=0x7F80, fp16=0x7C00, pairs=0x7C00)
    if fmt.is_exact:
        if largest >= infinite:
            _refuse(sizes >= infinite, part, start, "a value is NaN or infinite")
        packed = part.packed_as
        if packed and packed.max_abs < fmt.max_abs and largest > (most := _bf16_bits(packed)):
            problem = f"a value is too large for {packed} rows, as which it will be packed"
            _refuse(sizes > most, part, start, problem, part.sink_len)
        return
    if largest >= infinite or bool((bits[..., 0::2] < 0).any()):
        bad = sizes >= infinite
        bad[..., 0::2] |= bits[..., 0::2] < 0
        _refuse(bad, part, start, "a scale is negative, or a scale or shift is NaN or infinite")


def _bf16_bits(fmt: RowFormat) -> int:
    return int.from_bytes(struct.pack(">f", fmt.max_abs)[:2], "big")


def _refuse(bad: torch.Tensor, part: Part, start: int, problem: str, first: int = 0) -> None:
    """Raise for the first bad row of a token from `first` on, if any."""
    for row, head in bad.any(-1).nonzero().tolist():
        sequence, token = part.locate(start + row)
        if token >= first:
            raise CheckpointError(
                f"layer {part.layer}, {part.side.upper()}, sequence {sequence}, token {token}, KV "
                f"head {head}: {problem}; make the cache anew from finite keys and values"
            )
