"""A step of an engine: new rows into its pages, attention of its queries.

    decoding sequences             attend to their rows, all in one call: a token, or drafted ones
    the first tokens of a prompt   attend causally to themselves, in 16 bit; neighbours in one call
    later ones, up to FEW          attend to the rows, as decoding sequences do
    more of them                   attend to the dequantized past, and causally to themselves

With LayerRows.prompts_from_rows all tokens of a prompt attend to rows, dequantized if there are
many, so its results do not depend on the chunks. Rows are written before attention, so that queries
find their own.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from ..ops import attention
from ..ops.append import append_rows
from ..ops.causal import causal_attention
from ..ops.rows_at import dequantize_pages
from ..rows.basis import Basis
from ..rows.call import AttentionCall
from ..rows.format import RowFormat
from ..rows.segment import Segment
from ..rows.slots import Slots
from .contract import LayerRows, Lengths, NewTokens, Pages
from .window import Window

# queries of a chunk that attends to rows, made up to one of these: each number of them would be
# another kernel to compile; for more it pays to dequantize the rows once
WIDTHS = 16, 64
FEW = WIDTHS[-1]
BLOCK = 8192  # tokens whose basis is undone, or that torch dequantizes, at a time


class Chunk(NamedTuple):
    """A part of a prompt: its row of the block table, its tokens in the step, and those before."""

    sequence: int
    first: int
    end: int
    past: int


@dataclass  # no tuple: vLLM sets an attribute of its own on those of local chunks (Llama 4)
class Step:
    """The tokens of a step, the same for all layers.

    Attributes:
        block_table: [num_seqs, max_pages], int32: pages of each sequence.
        seq_lens: [num_seqs], int32: tokens of each, the new ones included.
        decodes: how many sequences, the first ones, attend in one call.
        num_tokens: rows of q of these sequences, padding included.
        q_len: most queries of one of these, 1 or more.
        q_lens: [decodes], int32: queries of each; None where all have q_len. Padding makes
            sequences of its own.
        places: [queries], int64: place of each query in [decodes * q_len]; None as q_lens.
        chunks: the other sequences.
        kept: tensors that one layer computes and later layers reuse.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    decodes: int
    num_tokens: int
    q_len: int
    q_lens: torch.Tensor | None
    places: torch.Tensor | None
    chunks: tuple[Chunk, ...]
    kept: dict[Hashable, Any] = field(default_factory=dict)

    def int32(self, *numbers: int) -> torch.Tensor:
        found = self.kept.get(numbers)
        if found is None:
            made = torch.tensor(numbers, dtype=torch.int32, device="cpu")
            found = self.kept[numbers] = made.to(self.block_table.device, non_blocking=True)
        return found

    def lengths(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> Lengths:
        starts = (self.int32(0, *accumulate(counts)) for counts in (queries, keys))
        return Lengths(queries, keys, *starts)

    def padded(self, q: torch.Tensor) -> torch.Tensor:
        """The decoding sequences' queries: [decodes, ...], or [decodes, q_len, ...] if several."""
        q = q[: self.num_tokens if self.places is None else len(self.places)]
        if self.places is not None:
            q = q.new_empty(self.decodes * self.q_len, *q.shape[1:]).index_copy_(0, self.places, q)
        return q.unflatten(0, (self.decodes, self.q_len)) if self._has_places else q

    def unpadded(self, found: torch.Tensor) -> torch.Tensor:
        """The output for padded queries as [num_tokens, ...], zeros in rows without a query."""
        if self._has_places:
            found = found.flatten(0, 1)
        if self.places is None:
            return found
        found, padding = found[self.places], self.num_tokens - len(self.places)
        return torch.nn.functional.pad(found, (0, 0, 0, 0, 0, padding)) if padding else found

    @property
    def _has_places(self) -> bool:
        return self.q_len > 1 or self.places is not None

    def slots(self, sequence: int, first: int, end: int, page_size: int) -> torch.Tensor:
        """The slots of a sequence's tokens first to end, [tokens], int64."""
        key = "slots", sequence, first, end, page_size
        found = self.kept.get(key)
        if found is None:
            table = self.block_table[sequence].long()
            token = torch.arange(first, end, device=table.device)
            found = self.kept[key] = table[token // page_size] * page_size + token % page_size
        return found


def describe_step(new: NewTokens, window: Window | None = None) -> Step:
    """Split a step into decoding sequences and chunks, without reading from the device.

    Chunks begin at the first sequence with more than most_queries new tokens, or with several and
    no past. Raises as NewTokens.check.

    window: the Window of the layers; this call begins its step.
    """
    new.check()
    step = _split(new)
    if window is not None:
        begin_window(window, new, step)
    return step


def begin_window(window: Window, new: NewTokens, step: Step) -> None:
    """Begin a step in the window of layers that have new.block_table; step: as of describe_step."""
    if not len(new.lens):
        return
    starts, lens = new.starts.numpy(), new.lens.numpy()
    counts = starts[1:] - starts[:-1]
    pasts = {chunk.sequence: chunk.past for chunk in step.chunks}
    decodes = slice(step.decodes)
    asking = (lens == counts)[decodes]
    if new.prefilling is not None:  # engines leave the padding of a graph out
        prefilling = new.prefilling.numpy()[decodes]
        asking[: len(prefilling)] |= prefilling
    if not step.chunks and step.q_lens is None:
        # an engine may replay a graph of such a step: that refills no slot from older tokens
        asking &= (lens == counts)[decodes]
    pasts |= {int(i): int(lens[i] - counts[i]) for i in asking.nonzero()[0] if counts[i]}
    window.begin(new.block_table, new.seq_lens, counts, pasts)


def _split(new: NewTokens) -> Step:
    block_table, seq_lens, _, _, num_tokens, most_queries, _ = new
    starts, lens = new.starts.numpy(), new.lens.numpy()  # torch takes several times as long here
    counts = starts[1:] - starts[:-1]
    decodes, q_len = len(counts), int(counts.max(initial=1))
    chunks = []
    if q_len > 1:  # with at most one query each, all sequences are decoding
        of_prompts = (counts > most_queries) | ((counts > 1) & (lens == counts))
        if of_prompts.any():
            decodes = int(of_prompts.argmax())
            num_tokens = int(starts[decodes])
            for i in range(decodes, len(counts)):
                if counts[i]:
                    past = int(lens[i] - counts[i])
                    chunks.append(Chunk(i, int(starts[i]), int(starts[i + 1]), past))
            counts = counts[:decodes]
            q_len = int(counts.max(initial=1))
    q_lens = places = None
    # a CUDA graph has q_len queries a sequence; its last sequences may be padding
    in_place = q_len * (np.arange(decodes) * q_len < starts[decodes])
    if num_tokens != decodes * q_len or (counts != in_place).any():
        sequence = np.arange(decodes).repeat(counts)
        place = np.arange(len(sequence)) - starts[sequence]
        device = block_table.device
        places = torch.from_numpy(sequence * q_len + place).to(device, non_blocking=True)
        q_lens = torch.from_numpy(counts).to(device, torch.int32, non_blocking=True)
    return Step(block_table, seq_lens, decodes, num_tokens, q_len, q_lens, places, tuple(chunks))


def append(
    layer: LayerRows, k: torch.Tensor, v: torch.Tensor, pages: Pages, slots: torch.Tensor
) -> None:
    """Write the rows of new tokens; shapes as in contract.py."""
    k_rows, v_rows = layer.layout.views(pages)
    k_format, v_format, _ = layer.layout
    k_basis, v_basis = layer.basis or (None, None)
    where: Slots | torch.Tensor = slots
    exact = {}
    if layer.window is not None:
        layer.window.read()
        where, exact = layer.window.window.slots(slots), layer.window.options
    append_rows(
        k[: len(slots)],
        v[: len(slots)],
        k_rows,
        v_rows,
        where,
        k_format,
        v_format,
        k_transform=k_basis,
        v_transform=v_basis,
        **exact,
    )
    if layer.window is not None:
        layer.window.refill(k_rows, v_rows, (k_format, v_format))


def attend(
    layer: LayerRows,
    step: Step,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: Pages,
    out: torch.Tensor,
) -> None:
    """Attend with all queries of a step, after append; shapes as in contract.py.

    out has a row for each query; other rows may be overwritten, so do not read them.
    """
    if step.num_tokens:
        sequences, queries = slice(step.decodes), step.padded(q)
        found = _attend_to_rows(layer, step, sequences, queries, step.q_lens, pages)
        out[: step.num_tokens] = step.unpadded(found)
    for is_first, run in groupby(
        step.chunks, lambda chunk: not (chunk.past or layer.prompts_from_rows)
    ):
        chunks = list(run)
        if is_first:
            tokens = slice(chunks[0].first, chunks[-1].end)
            counts = tuple(chunk.end - chunk.first for chunk in chunks)
            own = q[tokens], k[tokens], v[tokens]
            _attend_causally(layer, *own, step.lengths(counts, counts), out[tokens])
            continue
        for chunk in chunks:
            tokens, count = slice(chunk.first, chunk.end), chunk.end - chunk.first
            if count <= FEW:
                out[tokens] = _attend_with_few(layer, step, chunk.sequence, q[tokens], pages)
                continue
            seen = _seen(layer, step, chunk, k[tokens], v[tokens], pages)
            lengths = step.lengths((count,), (len(seen[0]),))
            _attend_causally(layer, q[tokens], *seen, lengths, out[tokens])


def _attend_causally(
    layer: LayerRows,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Lengths,
    out: torch.Tensor,
) -> None:
    """Attend causally with the last tokens of each sequence, in 16 bit."""
    if layer.causal is not None:
        layer.causal(q, k, v, lengths, out)
        return
    query = key = 0
    for count, length in zip(lengths.queries, lengths.keys, strict=True):
        queries, keys = slice(query, query + count), slice(key, key + length)
        query, key = queries.stop, keys.stop
        found = causal_attention(
            q[queries].transpose(0, 1)[None],
            k[keys].transpose(0, 1)[None],
            v[keys].transpose(0, 1)[None],
            [length],
            layer.sm_scale,
            layer.variant,
        )
        out[queries] = found[0].transpose(0, 1)


def _attend_with_few(
    layer: LayerRows, step: Step, sequence: int, q: torch.Tensor, pages: Pages
) -> torch.Tensor:
    """Attend with the last tokens of one sequence to rows alone."""
    count = len(q)
    width = next(width for width in WIDTHS if width >= count)
    padded = q.new_empty(1, width, *q.shape[1:])
    padded[0, :count] = q
    one, q_lens = slice(sequence, sequence + 1), step.int32(count)
    return _attend_to_rows(layer, step, one, padded, q_lens, pages)[0, :count]


def _attend_to_rows(
    layer: LayerRows,
    step: Step,
    sequences: slice,
    queries: torch.Tensor,
    q_lens: torch.Tensor | None,
    pages: Pages,
) -> torch.Tensor:
    """Attend with the last tokens of some sequences to rows alone."""
    lens, table = step.seq_lens[sequences], step.block_table[sequences]
    k_format, v_format, _ = layer.layout
    rows = Segment(*layer.layout.views(pages), lens, k_format, v_format, block_table=table)
    segments = [rows] if layer.window is None else layer.window.segments(rows, sequences)
    call = AttentionCall(queries, segments, layer.sm_scale, q_lens=q_lens, variant=layer.variant)
    return attention.attend(call, layer.basis, lens)[0]


def _seen(
    layer: LayerRows,
    step: Step,
    chunk: Chunk,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: Pages,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the tokens that a chunk sees, its own last, [tokens, num_kv_heads, ...]."""
    past = chunk.past
    if layer.prompts_from_rows:
        past, k, v = past + len(k), k[:0], v[:0]
    if not past:
        return k, v
    window = None if layer.variant is None else layer.variant.window
    first = 0 if window is None else max(chunk.past - window + 1, 0)
    k_rows, v_rows = layer.layout.views(pages)
    slots = step.slots(chunk.sequence, first, past, k_rows.shape[2])
    k_format, v_format, _ = layer.layout
    bases = k_basis, v_basis = layer.basis or (None, None)
    keys = _behind_past(k, k_rows, k_format, k_basis, slots)
    values = _behind_past(v, v_rows, v_format, v_basis, slots)
    exact = layer.window
    if exact is None:
        return keys, values
    # past tokens that have 16-bit rows are replaced by these
    assert exact.window.step is not None
    tokens, positions, has_slot = exact.window.step.seen[chunk.sequence]
    key = "window", chunk.sequence, first
    if key not in step.kept:
        chosen = (positions >= first).nonzero()[:, 0]
        both = torch.stack([positions[chosen] - first, chosen])
        step.kept[key] = both.to(keys.device, non_blocking=True).unbind()
    at, chosen = step.kept[key]
    formats = exact.k_format, exact.v_format
    for out, stored, fmt, basis in zip((keys, values), exact.seen, formats, bases, strict=True):
        rows = stored[tokens].view(torch.uint8)[:, :, None]
        found = out.new_empty(len(chosen), *out.shape[1:])
        dequantize_past(rows, fmt, basis, chosen, found)
        out[at] = torch.where(has_slot, found, out[at])
    return keys, values


def _behind_past(
    new: torch.Tensor, rows: torch.Tensor, fmt: RowFormat, basis: Basis | None, slots: torch.Tensor
) -> torch.Tensor:
    """Values of the rows at slots, then new rows, [tokens, num_kv_heads, head_dim]."""
    past = len(slots)
    both = new.new_empty(past + len(new), *new.shape[1:])
    both[past:] = new
    dequantize_past(rows, fmt, basis, slots, both[:past])
    return both


def dequantize_past(
    rows: torch.Tensor, fmt: RowFormat, basis: Basis | None, slots: torch.Tensor, out: torch.Tensor
) -> None:
    """Dequantize rows at slots out of their basis into out [tokens, num_kv_heads, head_dim]."""
    if basis is None and fmt.is_of_heads:  # by a kernel
        dequantize_pages(rows, fmt, slots, out.dtype, out)
        return
    # in bfloat16 tensor cores multiply; fp16 may not hold what is in a basis
    dtype = out.dtype if out.dtype == torch.bfloat16 else torch.float32
    for first in range(0, len(slots), BLOCK):
        block, found = slots[first : first + BLOCK], out[first : first + BLOCK]
        if basis is None:
            dequantize_pages(rows, fmt, block, out.dtype, found)
            continue
        stored = dequantize_pages(rows, fmt, block, dtype)
        if basis.transposed is not None:
            stored = (stored.transpose(0, 1) @ basis.transposed.to(dtype)).transpose(0, 1)
        torch.add(stored, basis.offset, out=found)
