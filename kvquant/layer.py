"""LayerCache: the rows of one layer, and where each token goes.

    tokens    0 ... sink_len          ...          seq_len - recent_len ... seq_len
              ├─ sinks ─┤├──────── packed ─────────┤├──────── recent ──────┤
    rows      16-bit     k_format, v_format          16-bit, in a ring behind the sinks

A token is written exactly (16 bit) first and quantized once, when it leaves the recent window, from
its 16-bit values: the bytes do not depend on the chunks in which tokens arrive. With neither sinks
nor a recent window tokens are quantized as they come. All rows, the 16-bit ones too, are stored in
the layer's basis (basis.py), if it has one.
"""

from __future__ import annotations

import torch

from .basis import Basis, LayerBasis
from .errors import NonFiniteError
from .layout import RowFormat
from .quant import EXACT_DTYPES, dequantize_rows, quantize_rows
from .rowstacks import zero_rows
from .segments import Segment

Span = tuple[torch.Tensor | None, torch.Tensor]


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
        basis: what rows are stored as; as they come when None.

    Attributes:
        k_packed, v_packed: [batch, num_kv_heads, max_seq_len - sink_len - recent_len, row_bytes].
        k_exact_rows, v_exact_rows: [batch, num_kv_heads, sink_len + recent_len, 16-bit row bytes]:
            the sinks, and behind them a ring, in which the i-th token after the sinks has slot
            i % recent_len. One segment, which a kernel reads at once.
        seq_lens: [batch] int32, tokens held.
        packed_lens: [batch] int32, how many of them are packed.
        exact_lens: [batch] int32, the others: seq_lens - packed_lens.
        starts: [batch] int32, slot of the oldest token of the ring: packed_lens % recent_len.
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
        basis: LayerBasis | None = None,
    ) -> None:
        def rows(length: int, fmt: RowFormat) -> torch.Tensor:
            shape = (batch, num_kv_heads, length, fmt.row_bytes)
            what = f"{length} rows of {fmt} for {batch} sequences and {num_kv_heads} KV heads"
            return zero_rows(shape, device, what, "use a smaller max_seq_len or batch")

        self.sink_len = min(sink_len, max_seq_len)
        self.recent_len = min(recent_len, max_seq_len - self.sink_len)
        packed_len = max_seq_len - self.sink_len - self.recent_len
        self.k_format, self.v_format, self.basis = k_format, v_format, basis
        self.k_exact = RowFormat(exact_format, 1, k_format.head_dim)
        self.v_exact = RowFormat(exact_format, 1, v_format.head_dim)
        exact_len = self.sink_len + self.recent_len
        self.k_exact_rows, self.v_exact_rows = (
            rows(exact_len, fmt) for fmt in (self.k_exact, self.v_exact)
        )
        self.k_packed, self.v_packed = rows(packed_len, k_format), rows(packed_len, v_format)
        self.seq_lens, self.packed_lens, self.exact_lens, self.starts = (
            torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(4)
        )

    @property
    def k_sinks(self) -> torch.Tensor:
        """[batch, num_kv_heads, sink_len, 16-bit row bytes], of k_exact_rows."""
        return self.k_exact_rows[:, :, : self.sink_len]

    @property
    def v_sinks(self) -> torch.Tensor:
        """Likewise of v_exact_rows."""
        return self.v_exact_rows[:, :, : self.sink_len]

    @property
    def k_recent(self) -> torch.Tensor:
        """[batch, num_kv_heads, recent_len, 16-bit row bytes], of k_exact_rows."""
        return self.k_exact_rows[:, :, self.sink_len :]

    @property
    def v_recent(self) -> torch.Tensor:
        """Likewise of v_exact_rows."""
        return self.v_exact_rows[:, :, self.sink_len :]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the layer by its name; all have the batch as their first axis."""
        return {
            name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }

    def segments(self) -> list[Segment]:
        """The rows in use as segments; kinds without room left out."""
        k_rows, v_rows = self.k_packed, self.v_packed
        packed = Segment(k_rows, v_rows, self.packed_lens, self.k_format, self.v_format)
        if not self.sink_len + self.recent_len:
            return [packed]
        exact = Segment(
            self.k_exact_rows,
            self.v_exact_rows,
            self.exact_lens,
            self.k_exact,
            self.v_exact,
            self.starts if self.recent_len else None,
            sinks=self.sink_len,
        )
        return [packed, exact] if packed.capacity else [exact]

    def segments_in_order(self) -> list[Segment]:
        """The same rows, sinks and recent ones apart, in the order of the tokens."""
        sink_lens = self.seq_lens.clamp(max=self.sink_len)
        recent_lens = self.seq_lens - sink_lens - self.packed_lens
        exact, packed = (self.k_exact, self.v_exact), (self.k_format, self.v_format)
        found = [
            Segment(self.k_sinks, self.v_sinks, sink_lens, *exact),
            Segment(self.k_packed, self.v_packed, self.packed_lens, *packed),
            Segment(self.k_recent, self.v_recent, recent_lens, *exact, self.starts),
        ]
        return [segment for segment in found if segment.capacity] or found[1:2]

    def set_lens(self, seq_lens: torch.Tensor, packed_lens: torch.Tensor) -> None:
        """Set all lengths: tokens held and, of these, packed, [batch]."""
        self.seq_lens.copy_(seq_lens)
        self.packed_lens.copy_(packed_lens)
        self.exact_lens.copy_(self.seq_lens - self.packed_lens)
        self.starts.copy_(self.packed_lens % max(self.recent_len, 1))

    def append(self, k: torch.Tensor, v: torch.Tensor, new_lens: torch.Tensor) -> None:
        """Add the first new_lens[b] tokens of k and v to sequence b; see KVCache.append."""
        device = k.device
        old_lens, old_packed = self.seq_lens.tolist(), self.packed_lens.tolist()
        seq_lens = [old + new for old, new in zip(old_lens, new_lens.tolist(), strict=True)]
        room = self.sink_len + self.recent_len
        packed_lens = [max(p, n - room) for p, n in zip(old_packed, seq_lens, strict=True)]
        first = [self.sink_len + p for p in old_packed]  # tokens from here to `last` are packed
        last = [self.sink_len + p for p in packed_lens]
        bounds = {
            "sinks": (old_lens, [min(n, self.sink_len) for n in seq_lens]),
            "leaving": (first, list(map(min, last, old_lens))),
            "packed": (list(map(max, first, old_lens)), last),
            "recent": (list(map(max, last, old_lens)), seq_lens),
        }
        spans = {kind: _span(*bound, old_lens, device) for kind, bound in bounds.items()}
        if spans["sinks"] or spans["packed"] or spans["recent"]:
            offsets = torch.tensor(old_lens, device=device)
            writes = self._writes("k", k.detach(), new_lens, spans, offsets)
            writes += self._writes("v", v.detach(), new_lens, spans, offsets)
            for rows, sequences, slots, values in writes:  # computed before anything is written
                _put(rows, sequences, slots, values)
            self.set_lens(torch.tensor(seq_lens), torch.tensor(packed_lens))

    def crop(self, seq_lens: torch.Tensor) -> None:
        """Keep the first seq_lens[b] tokens of sequence b; packed rows stay packed."""
        packed = (seq_lens - self.sink_len).clamp(min=0)
        self.set_lens(seq_lens, torch.minimum(self.packed_lens.cpu(), packed))

    def _writes(
        self,
        name: str,
        x: torch.Tensor,
        new_lens: torch.Tensor,
        spans: dict[str, Span | None],
        offsets: torch.Tensor,
    ) -> list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]]:
        """What to write of K or V, as (rows, sequences, slots, values)."""
        fmt: RowFormat = getattr(self, f"{name}_format")
        exact: RowFormat = getattr(self, f"{name}_exact")
        basis: Basis | None = getattr(self.basis, name) if self.basis else None
        if basis:
            _check_values(x, name, (fmt, exact), new_lens)  # while the channels are its own
            x = basis.encode(x)
        if self.sink_len or self.recent_len:
            x = x.to(EXACT_DTYPES[exact.codec])  # may round over a limit
        _check_values(x, name, (fmt, exact), new_lens)
        writes = []
        for kind, span in spans.items():
            if span is None:
                continue
            sequences, tokens = span
            to_format = exact if kind in ("sinks", "recent") else fmt
            if kind == "leaving":
                ring = getattr(self, f"{name}_recent")
                slots = (tokens - self.sink_len) % self.recent_len
                values = dequantize_rows(_take(ring, sequences, slots), exact)
            else:
                start = offsets[0] if sequences is None else offsets[sequences]
                values = _take(x, sequences, tokens - start)
            slots = tokens if kind == "sinks" else tokens - self.sink_len
            slots = slots % self.recent_len if kind == "recent" else slots
            place = "packed" if kind == "leaving" else kind
            rows = getattr(self, f"{name}_{place}")
            if basis and place == "packed":
                flat = values if sequences is None else values[:, :, None]
                packed = basis.quantize(flat, fmt).view(*values.shape[:-1], fmt.row_bytes)
            else:
                packed = quantize_rows(values, to_format, check=False)
            writes.append((rows, sequences, slots, packed))
        return writes


def _span(
    start: list[int], stop: list[int], old_lens: list[int], device: torch.device
) -> Span | None:
    """The tokens start[b] to stop[b] of every sequence b, as sequences and tokens.

    Sequences are None where all have the same tokens, after as many old ones; None is returned
    where there are no tokens.
    """
    counts = [max(last - first, 0) for first, last in zip(start, stop, strict=True)]
    if not any(counts):
        return None
    if len(set(zip(start, stop, old_lens, strict=True))) == 1:
        return None, torch.arange(start[0], stop[0], device=device)
    sequences = [b for b, count in enumerate(counts) for _ in range(count)]
    tokens = [
        t for first, count in zip(start, counts, strict=True) for t in range(first, first + count)
    ]
    return torch.tensor(sequences, device=device), torch.tensor(tokens, device=device)


def _take(rows: torch.Tensor, sequences: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    """Rows [batch, heads, slots, ...] of all sequences, or [slots, heads, ...] of those named."""
    return rows.index_select(2, slots) if sequences is None else rows[sequences, :, slots]


def _put(
    rows: torch.Tensor, sequences: torch.Tensor | None, slots: torch.Tensor, values: torch.Tensor
) -> None:
    """Write values as _take gives them."""
    if sequences is None:
        rows.index_copy_(2, slots, values)
    else:
        rows[sequences, :, slots] = values


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
