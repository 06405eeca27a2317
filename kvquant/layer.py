"""LayerCache: the rows of one layer, and where each token goes.

    tokens    0 ... sink_len          ...          seq_len - recent_len ... seq_len
              ├─ sinks ─┤├──────── packed ─────────┤├──────── recent ──────┤
    rows      16-bit     k_format, v_format          16-bit, in a ring

A token is written exactly (16 bit) first and quantized once, when it leaves the recent window, from
its 16-bit values: the bytes do not depend on the chunks in which tokens arrive. With neither sinks
nor a recent window tokens are quantized as they come.
"""

from __future__ import annotations

import torch

from .errors import NonFiniteError
from .layout import RowFormat
from .quant import EXACT_DTYPES, dequantize_rows, quantize_rows
from .segments import Segment


class LayerCache:
    """The rows of one layer for a batch of sequences.

    Args:
        batch: sequences.
        num_kv_heads: KV heads.
        max_seq_len: tokens that a sequence has room for.
        k_format: format of the packed K rows.
        v_format: format of the packed V rows.
        sink_len: first tokens of each sequence kept in 16 bit.
        recent_len: last tokens of each sequence kept in 16 bit.
        exact_format: "bf16" or "fp16", the 16-bit rows.
        device: where the tensors lie.

    Attributes:
        k_packed, v_packed: [batch, num_kv_heads, max_seq_len - sink_len - recent_len, row_bytes].
        k_sinks, v_sinks: [batch, num_kv_heads, sink_len, 16-bit row bytes].
        k_recent, v_recent: [batch, num_kv_heads, recent_len, 16-bit row bytes], a ring: the i-th
            token after the sinks has slot i % recent_len.
        seq_lens: [batch] int32, tokens held.
        packed_lens: [batch] int32, how many of them are packed.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        max_seq_len: int,
        k_format: RowFormat,
        v_format: RowFormat,
        sink_len: int,
        recent_len: int,
        exact_format: str,
        device: torch.device,
    ) -> None:
        def rows(length: int, fmt: RowFormat) -> torch.Tensor:
            shape = (batch, num_kv_heads, length, fmt.row_bytes)
            return torch.zeros(shape, dtype=torch.uint8, device=device)

        self.sink_len = min(sink_len, max_seq_len)
        self.recent_len = min(recent_len, max_seq_len - self.sink_len)
        packed_len = max_seq_len - self.sink_len - self.recent_len
        self.k_format, self.v_format = k_format, v_format
        self.k_exact = RowFormat(exact_format, 1, k_format.head_dim)
        self.v_exact = RowFormat(exact_format, 1, v_format.head_dim)
        self.k_sinks = rows(self.sink_len, self.k_exact)
        self.v_sinks = rows(self.sink_len, self.v_exact)
        self.k_packed, self.v_packed = rows(packed_len, k_format), rows(packed_len, v_format)
        self.k_recent = rows(self.recent_len, self.k_exact)
        self.v_recent = rows(self.recent_len, self.v_exact)
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.packed_lens = torch.zeros(batch, dtype=torch.int32, device=device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the layer by its name; all have the batch as their first axis."""
        return {
            name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }

    def segments(self) -> list[Segment]:
        """The rows in use as segments, in the order of the tokens; kinds without room left out."""
        sink_lens = self.seq_lens.clamp(max=self.sink_len)
        found = []
        if self.sink_len:
            found.append(Segment(self.k_sinks, self.v_sinks, sink_lens, self.k_exact, self.v_exact))
        if self.k_packed.shape[2] or not self.sink_len + self.recent_len:
            found.append(
                Segment(
                    self.k_packed, self.v_packed, self.packed_lens, self.k_format, self.v_format
                )
            )
        if self.recent_len:
            lens = self.seq_lens - sink_lens - self.packed_lens
            starts = self.packed_lens % self.recent_len
            found.append(
                Segment(self.k_recent, self.v_recent, lens, self.k_exact, self.v_exact, starts)
            )
        return found

    def append(self, k: torch.Tensor, v: torch.Tensor, new_lens: torch.Tensor) -> None:
        """Add the first new_lens[b] tokens of k and v to sequence b; see KVCache.append."""
        old_lens, old_packed = self.seq_lens.cpu().long(), self.packed_lens.cpu().long()
        seq_lens = old_lens + new_lens
        packed = torch.maximum(old_packed, seq_lens - self.sink_len - self.recent_len)

        writes = []  # computed before anything is written
        for x, name in ((k.detach(), "k"), (v.detach(), "v")):
            formats: tuple[RowFormat, RowFormat] = (
                getattr(self, f"{name}_format"),
                getattr(self, f"{name}_exact"),
            )
            if self.sink_len or self.recent_len:
                x = x.to(EXACT_DTYPES[formats[1].codec])  # may round over a limit
            _check_values(x, name, formats, new_lens)
            places = [getattr(self, f"{name}_{kind}") for kind in ("sinks", "packed", "recent")]
            writes += self._writes(x, formats, places, old_lens, seq_lens, old_packed, packed)
        for rows, sequences, slots, values in writes:
            rows[sequences, :, slots] = values
        self.seq_lens.copy_(seq_lens)
        self.packed_lens.copy_(packed)

    def crop(self, seq_lens: torch.Tensor) -> None:
        """Keep the first seq_lens[b] tokens of sequence b; packed rows stay packed."""
        self.seq_lens.copy_(seq_lens)
        packed = (self.seq_lens - self.sink_len).clamp(min=0)
        self.packed_lens.copy_(torch.minimum(self.packed_lens, packed))

    def _writes(
        self,
        x: torch.Tensor,
        formats: tuple[RowFormat, RowFormat],
        places: list[torch.Tensor],
        old_lens: torch.Tensor,
        new_lens: torch.Tensor,
        old_packed: torch.Tensor,
        new_packed: torch.Tensor,
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """What to write of K or V, as (rows, sequences, slots, values)."""
        fmt, exact = formats
        sinks, packed, recent = places
        first, last = old_packed + self.sink_len, new_packed + self.sink_len  # tokens to be packed
        writes = []

        def add(
            to: torch.Tensor, to_format: RowFormat, start: torch.Tensor, stop: torch.Tensor
        ) -> None:
            """Write new tokens start to stop of each sequence."""
            sequences, tokens = _spans(start, stop, x.device)
            if len(tokens):
                values = x[sequences, :, tokens - old_lens.to(x.device)[sequences]]
                slots = tokens if to is sinks else tokens - self.sink_len
                slots = slots % self.recent_len if to is recent else slots
                values = quantize_rows(values, to_format, check=False)
                writes.append((to, sequences, slots, values))

        add(sinks, exact, old_lens, new_lens.clamp(max=self.sink_len))
        sequences, tokens = _spans(first, torch.minimum(last, old_lens), x.device)
        if len(tokens):  # they leave the ring
            leaving = recent[sequences, :, (tokens - self.sink_len) % self.recent_len]
            values = quantize_rows(dequantize_rows(leaving, exact), fmt, check=False)
            writes.append((packed, sequences, tokens - self.sink_len, values))
        add(packed, fmt, torch.maximum(first, old_lens), last)
        add(recent, exact, torch.maximum(last, old_lens), new_lens)
        return writes


def _spans(
    start: torch.Tensor, stop: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence and token of each of the tokens start[b] to stop[b] of every sequence b."""
    counts = (stop - start).clamp(min=0)
    sequences = torch.arange(len(counts)).repeat_interleave(counts)
    before = counts.cumsum(0) - counts
    tokens = torch.arange(len(sequences)) + (start - before)[sequences]
    return sequences.to(device), tokens.to(device)


def _check_values(
    x: torch.Tensor, name: str, formats: tuple[RowFormat, ...], new_lens: torch.Tensor
) -> None:
    """Raise if one of the tokens to append holds what one of its formats cannot."""
    limit = min(fmt.max_abs for fmt in formats)
    if not x.numel():
        return
    lowest, highest = (float(value) for value in x.aminmax())
    if -limit <= lowest and highest <= limit:
        return
    new = torch.arange(x.shape[2], device=x.device) < new_lens.to(x.device)[:, None]
    bad = ~(x.float().abs() <= limit) & new[:, None, :, None]
    if bool(bad.any()):
        index = bad.nonzero()[0].tolist()
        raise NonFiniteError(
            f"{name}{index} is {x[tuple(index)].item()}: {formats[0]} and {formats[1]} rows hold "
            f"finite values up to {limit:g}; nothing was appended"
        )
