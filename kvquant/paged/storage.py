"""PagedRows, the tensors of a paged cache: pages, 16-bit rows of sequences, and sinks kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..cache.copying import NotCopied
from ..cache.memory import check_room
from ..cache.row_stacks import RowStacks, to_device
from ..ops.quantize import dequantize_segment
from ..rows.basis import LayerBasis
from ..rows.format import RowFormat
from ..rows.kind import KEY_VALUE, KeyValue
from ..rows.latent import AnyFormat
from ..rows.quantize import full_precision
from ..rows.segment import Segment
from ..rows.slots import Split
from .state import RingTokens


class LayerRows(NamedTuple):
    """The rows of one layer.

    Attributes:
        group: the index of the layer's group in PagedRows.
        k_pages, v_pages: [num_pages, num_kv_heads, page_size, row_bytes], uint8.
        k_exact, v_exact: [max_num_seqs, num_kv_heads, exact_len, 16-bit row bytes], uint8.
        k_format, v_format: of the pages.
        k_exact_format, v_exact_format: of the 16-bit rows.
        basis: the transform of rows; None for none.
    """

    group: int
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    k_exact: torch.Tensor
    v_exact: torch.Tensor
    k_format: RowFormat
    v_format: RowFormat
    k_exact_format: RowFormat
    v_exact_format: RowFormat
    basis: LayerBasis | None


class PageGroup(NamedTuple):
    """Layers of one window, and the packed rows of their K and V, or of latent rows."""

    layers: Sequence[int]
    sides: list[RowStacks]

    @property
    def page_bytes(self) -> int:
        return sum(stack[:, :1].nbytes for stack in stacks_of(self.sides))


class PagedRows(NotCopied):
    """Rows of all layers.

    Args:
        kind: KEY_VALUE or LATENT.
        groups: the layers of each group, and its pages.
        max_num_seqs: sequences with 16-bit rows, and prefixes with kept sinks.
        rollback_len: tokens packed last of a sequence, whose 16-bit rows are kept.

    Attributes:
        groups: packed rows, in pages.
        exact: their 16-bit rows, in sequence slots.
        layers: the same rows, layer by layer.
    """

    def __init__(
        self,
        kind: KeyValue,
        k_formats: Sequence[RowFormat],
        v_formats: Sequence[RowFormat],
        bases: Sequence[LayerBasis | None],
        exact_format: str,
        num_kv_heads: int,
        groups: Sequence[tuple[Sequence[int], int]],
        max_num_seqs: int,
        split: Split,
        rollback_len: int,
        device: torch.device,
    ) -> None:
        packed = k_formats, v_formats
        k_exact, v_exact = (
            [RowFormat(exact_format, 1, fmt.head_dim) for fmt in side] for side in packed
        )
        exact = k_exact, v_exact
        self.split, self.rollback_len, self.device = split, rollback_len, device
        self.kind = kind
        of_pages, of_slots = (  # of each tensor that holds rows
            list(zip(*map(kind.stored, *sides), strict=True)) for sides in (packed, exact)
        )
        kinds: list[tuple[Sequence[Sequence[AnyFormat]], int, int]] = [
            ([[side[layer] for layer in layers] for side in of_pages], num_pages, split.page_size)
            for layers, num_pages in groups
        ]
        kinds += [
            (of_slots, max_num_seqs, length)
            for length in (split.exact_len, split.sink_len, rollback_len)
        ]
        check_room(
            sum(
                RowStacks.bytes_of(side, units, num_kv_heads, length)
                for sides, units, length in kinds
                for side in sides
            ),
            device,
            f"a cache of {groups[0][1]} pages and {max_num_seqs} sequence slots",
            "use fewer pages or sequence slots",
        )
        made = [
            [RowStacks(side, units, num_kv_heads, length, device) for side in sides]
            for sides, units, length in kinds
        ]
        *pages, self.exact, self._sinks, self._originals = made
        self.groups = [
            PageGroup(layers, sides) for (layers, _), sides in zip(groups, pages, strict=True)
        ]
        where = {
            layer: (at, i) for at, of in enumerate(self.groups) for i, layer in enumerate(of.layers)
        }
        self.layers: list[LayerRows] = []
        self._stored: list[tuple[torch.Tensor, ...]] = []  # the pages of each layer, as they lie
        for layer, basis in enumerate(bases):
            k_format, v_format = k_formats[layer], v_formats[layer]
            group, at = where[layer]
            own = _rows_of(self.groups[group].sides, at)
            slots = kind.k_and_v(_rows_of(self.exact, layer), k_exact[layer])
            formats = k_format, v_format, k_exact[layer], v_exact[layer]
            rows = *kind.k_and_v(own, k_format), *slots
            self.layers.append(LayerRows(group, *rows, *formats, basis))
            self._stored.append(own)

    @property
    def pages(self) -> list[RowStacks]:
        return [side for group in self.groups for side in group.sides]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stack.nbytes for stack in stacks_of([*self.pages, *self._of_slots]))

    @property
    def page_bytes(self) -> int:
        return sum(group.page_bytes for group in self.groups)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a sequence slot's 16-bit rows, in all layers, and of its kept sinks."""
        return sum(stack[:, :1].nbytes for stack in stacks_of(self._of_slots))

    @property
    def _of_slots(self) -> list[RowStacks]:
        return [*self.exact, *self._sinks, *self._originals]

    def segments(
        self,
        layer: int,
        block_table: torch.Tensor,
        packed_lens: torch.Tensor,
        exact_lens: torch.Tensor,
        starts: torch.Tensor,
        seq_slots: torch.Tensor,
        *,
        apart: bool = False,
    ) -> list[Segment]:
        """The rows of sequences as segments, packed ones first; with `apart` K and V apart."""
        at, split, kind = self.layers[layer], self.split, self.kind
        pages, slots = self._stored[layer], _rows_of(self.exact, layer)
        if apart:
            kind, pages, slots = KEY_VALUE, at[1:3], at[3:5]
        formats = kind.stored(at.k_format, at.v_format)
        packed = kind.segment(pages, formats, packed_lens, None, block_table)
        if not split.exact_len:
            return [packed]
        formats = kind.stored(at.k_exact_format, at.v_exact_format)
        starts_in_ring = starts if split.recent_len else None
        places = exact_lens, starts_in_ring, None, split.sink_len, seq_slots
        return [packed, kind.segment(slots, formats, *places)]

    def dequantized(
        self,
        layer: int,
        table: Sequence[int],
        seq_slot: int,
        length: int,
        packed_len: int,
        dtype: torch.dtype,
        dropped: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy K and V of a sequence in token order, without its first dropped pages."""
        start = self.split.ring_row(packed_len)
        in_pages = packed_len - dropped * self.split.page_size
        numbers = [[in_pages], [length - packed_len], [start], [seq_slot]]
        pages, counts = (
            torch.tensor(one, dtype=torch.int32, device="cpu").to(self.device)
            for one in ([table], numbers)
        )
        segments = self.segments(layer, pages, *counts, apart=True)
        basis = self.layers[layer].basis
        stored = torch.float32 if basis else dtype
        parts = [dequantize_segment(segment, 0, stored) for segment in segments]
        sinks = min(length, self.split.sink_len)
        k, v = (_in_order(side, sinks) for side in zip(*parts, strict=True))
        if basis:
            k, v = (
                side.decode(x[None])[0].to(dtype) for side, x in zip(basis, (k, v), strict=True)
            )
        return k, v

    def copy_pages(self, pairs: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Copy whole pages, (source, target), in each group; no source is a target."""
        for group, of_one in zip(self.groups, pairs, strict=True):
            for side in group.sides:
                side.copy_units(of_one)

    def copy_seq_slot(self, source: int, target: int) -> None:
        for side in (*self.exact, *self._originals):
            side.copy_units([(source, target)])

    def copy_originals(self, tokens: RingTokens, *, back: bool = False) -> None:
        """Keep the 16-bit rows of tokens that leave the ring, or put them back."""
        if not len(tokens.indices):
            return
        sink_len, ring_row = self.split.sink_len, self.split.ring_row
        rows = (
            tokens.seq_slots,
            sink_len + ring_row(tokens.indices),
            tokens.indices % self.rollback_len,
        )
        seq_slot, ring, kept = to_device([row.tolist() for row in rows], self.device)
        each = zip(stacks_of(self.exact), stacks_of(self._originals), strict=True)
        for exact, originals in each:
            if back:
                exact[:, seq_slot, :, ring] = originals[:, seq_slot, :, kept]
            else:
                originals[:, seq_slot, :, kept] = exact[:, seq_slot, :, ring]

    def keep_sinks(self, seq_slot: int, place: int) -> None:
        """Keep the sinks of a sequence slot at a place, for later sequences."""
        for rows, kept in self._sink_stacks():
            kept[:, place].copy_(rows[:, seq_slot])

    def restore_sinks(self, place: int, seq_slot: int) -> None:
        """Copy the sinks kept at a place to a sequence slot."""
        for rows, kept in self._sink_stacks():
            rows[:, seq_slot].copy_(kept[:, place])

    def _sink_stacks(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The sinks of all sequence slots and the kept ones, by stack; none without sinks."""
        sink_len = self.split.sink_len
        return [
            (stack[:, :, :, :sink_len], kept)
            for exact, sinks in zip(self.exact, self._sinks, strict=True)
            for stack, kept in zip(exact.stacks, sinks.stacks, strict=True)
            if sink_len
        ]


def stacks_of(sides: Iterable[RowStacks]) -> list[torch.Tensor]:
    return [stack for side in sides for stack in side.stacks]


def _rows_of(sides: Iterable[RowStacks], layer: int) -> tuple[torch.Tensor, ...]:
    return tuple(side.layers[layer] for side in sides)


def _in_order(parts: Sequence[torch.Tensor], sinks: int) -> torch.Tensor:
    """Packed values between sinks and recent ones, if there are exact ones."""
    if len(parts) == 1:
        return parts[0]
    packed, exact = parts
    with full_precision(packed):
        return torch.cat([exact[:, :sinks], packed, exact[:, sinks:]], 1)
