"""LayerCache: the rows of one layer, and where each token goes.

    tokens    0 ... sink_len          ...          seq_len - recent_len ... seq_len
              ├─ sinks ─┤├──────── packed ─────────┤├──────── recent ──────┤
    is read    16-bit     k_format, v_format          16-bit, in a ring after the sinks
    is there   16-bit ──┤├─────────────────── packed ──────────────────────┤
                                  ├─ rollback_len ─┤├───── recent_len ─────┤ 16-bit, too

A token is rounded to 16 bit and quantized from that when it comes: its bytes do not depend on the
chunks of tokens. The last ones have both rows, and the lengths decide which one attention reads. So
a crop moves no row: recent_len tokens are in 16 bit again, bit for bit, as far back as the ring has
rows (rollback_len tokens). All rows are stored in the layer's basis (basis.py).

A layer with a sliding window attends to the last `window` tokens only. It has no sinks. Its packed
rows are a ring, too, with SPARE more tokens for crops: token i has row i % packed_len.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import torch

from .. import debug
from ..errors import ConfigError, ShapeError, UnsupportedError
from ..ops.append import bind_append, write_rows
from ..ops.quantize import dequantize_segment
from ..ops.slots import Lens, Placed, Sizes, bind_place, lens_before, place_tokens
from ..rehearsal import is_rehearsed
from ..rows.arguments import (
    FLOATS,
    INTEGERS,
    address,
    check_same_device,
    check_tensor,
    check_tensors,
)
from ..rows.basis import Encoding, LayerBasis, Queries
from ..rows.bound import Bound, kind_of
from ..rows.call import AppendCall, AppendSide
from ..rows.format import RowFormat
from ..rows.kind import KEY_VALUE, LATENT, KeyValue, Rows
from ..rows.latent import AnyFormat
from ..rows.quantize import EXACT_DTYPES, beyond, full_precision
from ..rows.segment import FixedSegments, Segment
from ..rows.slots import Slots, Split
from ..rows.spacing import spaced_len
from ..rows.variant import AttentionVariant, check_variant, check_variant_values, names_of, within
from .checks import Counts, whole_numbers
from .row_stacks import to_device, zero_rows

if TYPE_CHECKING:
    from ..kernels.cuda.runtime.launch import Launch

MOST_BOUND = 16  # new tokens of a sequence in appends whose launches are bound: their slots stay
SPARE = 512  # tokens before its window that a layer keeps, so that as many can be cropped
ROLLBACK = 64  # tokens before the recent ones that are kept in 16 bit, too


_K_AND_V = "k_packed", "v_packed", "k_exact_rows", "v_exact_rows"

# formats of K and of V, basis, window and device: what may differ from layer to layer
Kind = tuple[RowFormat, RowFormat, "LayerBasis | None", "int | None", torch.device]
LensAndStarts = tuple[torch.Tensor, "torch.Tensor | None"]


class Rooms(NamedTuple):
    """Rows of each kind that a sequence of a layer has."""

    sinks: int
    packed: int
    recent: int
    rollback: int

    def bytes_of(self, k_format: RowFormat, v_format: RowFormat, exact_format: str) -> int:
        """Bytes of all these rows, for a KV head and a sequence."""
        return sum(
            self.packed * fmt.row_bytes
            + (self.sinks + self.recent + self.rollback)
            * RowFormat.parse(exact_format, fmt.head_dim).row_bytes
            for fmt in (k_format, v_format)
        )


def rooms_of(
    max_seq_len: int,
    sink_len: int,
    recent_len: int,
    window: int | None,
    rollback_len: int = ROLLBACK,
    row_bytes: Sequence[int] = (),
) -> Rooms:
    """The rows that a layer needs, and a few that spread packed rows well in memory."""
    sink_len = min(sink_len, max_seq_len) if window is None else 0
    behind = max_seq_len - sink_len
    if recent_len >= behind and (window is None or window >= behind):
        return Rooms(sink_len, 0, behind, 0)  # no token ever leaves the recent window
    packed_len = behind if window is None else min(behind, window + SPARE)
    recent_len = recent_len if window is None else min(recent_len, window)
    rollback_len = min(rollback_len, behind - recent_len) if recent_len else 0
    return Rooms(sink_len, spaced_len(packed_len, row_bytes), recent_len, rollback_len)


def packed_row_bytes(
    k_format: RowFormat, v_format: RowFormat, *, latent: bool = False
) -> tuple[int, ...]:
    """Bytes of the rows of K and of V, or of the latent rows with both."""
    both = k_format.row_bytes, v_format.row_bytes
    return (sum(both),) if latent else both


class BoundAppend(NamedTuple):
    """The launches of an append of new_tokens to each sequence, bound to a layer's tensors.

    place is from bind_place, write from bind_append, which on the CPU does both; they share room
    (slots.Placed), so appends to a layer must follow one another on one stream.
    """

    new_tokens: int
    place: Launch | None
    write: Any
    room: torch.Tensor


class LayerCache:
    """The rows of one layer for a batch of sequences; arguments as of KVCache.

    Attributes:
        k_packed, v_packed: [batch, num_kv_heads, packed_len, row_bytes].
        k_exact_rows, v_exact_rows: [batch, num_kv_heads, sink_len + ring_len, 16-bit row
            bytes]: the sinks, then a ring of recent_len + rollback_len rows; the i-th token after
            the sinks has ring row i % ring_len. One segment for a kernel.
        seq_lens: [batch] int32, tokens held.
        packed_lens: [batch] int32, tokens whose packed rows attention reads.
        exact_lens: [batch] int32, the others, sinks and recent ones: seq_lens - packed_lens.
        starts: [batch] int32, ring row of the oldest recent token: packed_lens % ring_len.
        exact_firsts: [batch] int32, the first token after the sinks that is still in the ring.
        seen_lens: [batch] int32, packed tokens that attention sees: packed_lens without a window.
        seen_starts: [batch] int32, with a window: the row of the first of these.
        firsts: [batch] int32, with a window: the first token whose row is still there.
        split: which row a token has; all packed rows of a sequence are its page.
        lens, sizes: the lengths, and how tokens are split, as ops.slots.place_tokens takes them.
        longest: an upper bound of seq_lens; None once a graph appends, whose replays the host
            does not see (hf's CapturedStep counts its own).
        rounds_first: whether new rows are rounded to 16 bit before anything else.
        row_kind: KEY_VALUE or LATENT.
        sides: what messages call K and V.
        formats, exact_formats: of packed and 16-bit rows in memory, one for each tensor.
    """

    row_kind: ClassVar[KeyValue] = KEY_VALUE
    sides: ClassVar[tuple[str, str]] = KEY_VALUE.sides
    k_packed: torch.Tensor
    v_packed: torch.Tensor
    k_exact_rows: torch.Tensor
    v_exact_rows: torch.Tensor

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
        window: int | None = None,
        rollback_len: int = ROLLBACK,
    ) -> None:
        row_bytes = packed_row_bytes(k_format, v_format, latent=self.row_kind is LATENT)
        rooms = rooms_of(max_seq_len, sink_len, recent_len, window, rollback_len, row_bytes)
        self.sink_len, self.packed_len, self.recent_len, rollback_len = rooms
        page_size = max(self.packed_len, 1)
        self.split = Split(self.sink_len, self.recent_len, page_size, rollback_len)
        self.window = window
        self.max_seq_len = max_seq_len
        self.longest: int | None = 0
        self.k_format, self.v_format, self.basis = k_format, v_format, basis
        self.k_exact = RowFormat(exact_format, 1, k_format.head_dim)
        self.v_exact = RowFormat(exact_format, 1, v_format.head_dim)
        self._narrowest = tuple(  # of the formats of K and of V
            min(pair, key=lambda one: one.max_abs)
            for pair in ((k_format, self.k_exact), (v_format, self.v_exact))
        )
        self.formats = self.row_kind.stored(k_format, v_format)
        self.exact_formats = self.row_kind.stored(self.k_exact, self.v_exact)
        kinds = (self.packed_len, self.formats), (self.split.exact_len, self.exact_formats)
        for names, (length, formats) in zip(self.row_kind.stores, kinds, strict=True):
            for name, fmt in zip(names, formats, strict=True):
                setattr(self, name, rows_of(batch, num_kv_heads, length, fmt, device))
        self.seq_lens, self.packed_lens, self.exact_lens, self.starts, self.exact_firsts = (
            torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(5)
        )
        self.seen_lens = self.packed_lens
        self.seen_starts: torch.Tensor | None = None
        if window is not None:
            self.seen_lens, self.seen_starts, self.firsts = (
                torch.zeros_like(self.seq_lens) for _ in range(3)
            )
        lens = self.seq_lens, self.packed_lens, self.exact_lens, self.starts, self.exact_firsts
        hides = window if self.packed_len else None  # else the ring has room for all tokens
        seen = () if hides is None else (self.seen_lens, self.seen_starts, self.firsts)
        self.lens = Lens(*lens, *seen)
        sizes = self.sink_len, self.packed_len, self.recent_len, self.split.ring_len
        self.sizes = Sizes(*sizes, max_seq_len, hides or 0)
        self.rounds_first = basis is None and self.split.exact_len > 0
        self.bound = Bound()
        self._find_views()

    def _find_views(self) -> None:
        """Set the attributes that are views of the tensors: K, V and the segments."""
        self._stored = tuple(
            tuple(getattr(self, n) for n in names) for names in self.row_kind.stores
        )
        (self.k_packed, self.v_packed), exact_rows = self._k_and_v()
        self.k_exact_rows, self.v_exact_rows = exact_rows
        self._segments = FixedSegments(self._make_segments())

    def _k_and_v(self) -> tuple[Rows, Rows]:
        formats = self.k_format, self.k_exact
        packed, exact = map(self.row_kind.k_and_v, self._stored, formats)
        return packed, exact

    def __getstate__(self) -> dict[str, Any]:
        """The state without views, which a pickle would separate."""
        return {n: value for n, value in vars(self).items() if n not in self._views()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._find_views()

    def _views(self) -> set[str]:
        own = {name for names in self.row_kind.stores for name in names}
        return {*_K_AND_V, "_stored", "_segments"} - own

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    @property
    def kind(self) -> Kind:
        """The properties that may differ between layers of a cache."""
        return self.k_format, self.v_format, self.basis, self.window, self.device

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
        """[batch, num_kv_heads, ring_len, 16-bit row bytes], of k_exact_rows."""
        return self.k_exact_rows[:, :, self.sink_len :]

    @property
    def v_recent(self) -> torch.Tensor:
        """Likewise of v_exact_rows."""
        return self.v_exact_rows[:, :, self.sink_len :]

    @property
    def held_lens(self) -> torch.Tensor:
        """[batch] int32, tokens that attention sees: all, or those in the window."""
        return self.seen_lens + self.exact_lens

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the layer by its name; all have the batch as their first axis."""
        views = self._views()
        if self.window is None:
            views.add("seen_lens")  # another name of packed_lens
        given = vars(self).items()
        return {n: x for n, x in given if isinstance(x, torch.Tensor) and n not in views}

    def segments(self) -> Sequence[Segment]:
        return self._make_segments() if torch.compiler.is_compiling() else self._segments

    def check_filled(self, layer: int) -> None:
        """Raise ShapeError if the host knows that this layer is empty; not in a recorded call."""
        if torch.compiler.is_compiling() or self.longest != 0:
            return
        if not debug.is_recorded(self.seq_lens):
            raise ShapeError(f"layer {layer} holds no tokens: append to it first")

    def check_seen(self, layer: int, q_len: int) -> None:
        """Raise UnsupportedError if the last q_len tokens would see dropped ones; see seen_by."""
        if self.window is None or self.window >= self.max_seq_len:
            return
        if q_len > SPARE + 1:
            raise UnsupportedError(
                f"layer {layer} sees the last {self.window} tokens and keeps {SPARE} before them: "
                f"attend with {SPARE + 1} queries a sequence at most, not {q_len}"
            )

    def check_variant(self, q: torch.Tensor, variant: AttentionVariant | None) -> None:
        """Raise unless queries of tokens still to be appended can attend so."""
        if torch.compiler.is_compiling() or not names_of(variant):
            return
        assert variant is not None
        check_variant(q, variant)
        if debug.may_read(q):
            check_variant_values(q, None, variant)

    def _tighten(self, most: int) -> None:
        """Read the lengths if their bound `longest` is over most."""
        if self.longest is not None and self.longest > most:
            if is_rehearsed(self.seq_lens):  # suppose that there is room
                self.longest = max(most, 0)
            else:
                self.longest = int(self.seq_lens.cpu().max())

    def seen_by(
        self,
        layer: int,
        q_len: int,
        q_lens: torch.Tensor | None,
        variant: AttentionVariant | None,
        *,
        in_step: bool = False,
    ) -> tuple[Sequence[Segment], AttentionVariant | None]:
        """What the last q_len tokens of each sequence attend to, and with which variant.

        With a window the segments hold what any of them sees, and the variant separates them. Call
        check_seen before. in_step gives the rows that the first of these tokens saw.

        Raises:
            ShapeError: a query sees dropped tokens (on CUDA checked in debug mode only).
        """
        has_window = self.window is not None and self.window < self.max_seq_len
        in_step = in_step and self.recent_len > 0 and self.packed_len > 0
        if q_len == 1 or not (has_window or in_step):
            return self.segments(), variant
        packed_lens, exact = self.packed_lens, (self.exact_lens, self.starts)
        if in_step:
            counts = q_len if q_lens is None else q_lens.clamp(0, q_len)
            border = self.seq_lens - counts + (1 - self.sink_len - self.recent_len)
            packed_lens = torch.minimum(torch.maximum(border, self.exact_firsts), packed_lens)
            exact = self.seq_lens - packed_lens, self.split.ring_row(packed_lens)
        if not has_window or self.window is None:
            return self._make_segments((packed_lens, self.seen_starts), exact), variant
        if debug.may_read(self.seq_lens):
            counts = q_len if q_lens is None else q_lens.clamp(0, q_len)
            needed = (self.seq_lens - counts - self.window + 1).clamp(min=0)
            if bool(((needed < self.firsts) & (self.seq_lens > needed)).any()):
                raise ShapeError(
                    f"layer {layer} has tokens from {self.firsts.tolist()} on, its queries see "
                    f"those from {needed.tolist()} on: attend with tokens that came later"
                )
        first = torch.maximum(self.seq_lens - (self.window + q_len - 1), self.firsts)
        packed = (packed_lens - first).clamp(min=0), self.split.page_row(first)
        return self._make_segments(packed, exact), within(variant, self.window)

    def _make_segments(
        self, packed: LensAndStarts | None = None, exact: LensAndStarts | None = None
    ) -> list[Segment]:
        """The segments of packed and 16-bit rows, for one query or with other lengths."""
        packed_lens, packed_starts = packed or (self.seen_lens, self.seen_starts)
        exact_lens, starts = exact or (self.exact_lens, self.starts)
        (packed_rows, exact_rows), segment = self._stored, self.row_kind.segment
        found: list[Segment] = []
        if self.packed_len or not self.split.exact_len:
            found = [segment(packed_rows, self.formats, packed_lens, packed_starts)]
        if self.split.exact_len:  # sinks and ring
            starts = starts if self.recent_len else None
            kept = segment(exact_rows, self.exact_formats, exact_lens, starts, None, self.sink_len)
            found.append(kept)
        return found

    def segments_in_order(self) -> list[Segment]:
        """The same rows in token order, sinks and recent ones apart."""
        sink_lens = self.seq_lens.clamp(max=self.sink_len)
        recent_lens = self.exact_lens - sink_lens
        exact, packed = (self.k_exact, self.v_exact), (self.k_format, self.v_format)
        found = [
            Segment(self.k_sinks, self.v_sinks, sink_lens, *exact),
            Segment(self.k_packed, self.v_packed, self.seen_lens, *packed, self.seen_starts),
            Segment(self.k_recent, self.v_recent, recent_lens, *exact, self.starts),
        ]
        return [segment for segment in found if segment.capacity] or found[1:2]

    def dequantized(
        self, dtype: torch.dtype, *, room: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the values in token order, with room for more; see KVCache.dequantized."""
        lens = self.held_lens.tolist()
        shape = *self.k_packed.shape[:2], max(lens) + room
        outs = tuple(
            torch.zeros(*shape, fmt.head_dim, dtype=dtype, device=self.device)
            for fmt in (self.k_format, self.v_format)
        )
        segments, stored = self.segments_in_order(), torch.float32 if self.basis else dtype
        sides = self.basis or (None, None)
        for b, length in enumerate(lens):
            pairs = [dequantize_segment(segment, b, stored) for segment in segments]
            for out, parts, side in zip(outs, zip(*pairs, strict=True), sides, strict=True):
                if side is None:
                    torch.cat(parts, dim=1, out=out[b, :, :length])
                    continue
                with full_precision(out):
                    values = torch.cat(parts, dim=1)
                # all at once: the last bits of a product depend on its number of rows
                out[b, :, :length] = side.decode(values[None])[0]
        return outs[0], outs[1]

    def take(self, source: LayerCache, index: torch.Tensor | None = None) -> None:
        """Take the rows in use of sequences of a layer like this one, or of itself.

        index [batch] int64 are places in source; None for the same ones. A token has the same row
        in a layer with less room: a ring is shorter only if it holds every token.
        """
        index = None if index is None else index.to(self.device)
        used = source._packed_in_use()
        tensors = source.tensors()
        for name, target in self.tensors().items():
            taken = tensors[name]
            if name.endswith("packed"):
                taken = taken[:, :, :used]
            if target.ndim > 1:
                target, taken = target[:, :, : taken.shape[2]], taken[:, :, : target.shape[2]]
            target.copy_(taken if index is None else taken.index_select(0, index))
        self.longest = source.longest

    def limit(self, max_seq_len: int) -> None:
        """Accept no more tokens than a layer made with this smaller max_seq_len."""
        self.max_seq_len, self.bound = max_seq_len, Bound()  # launches know the other
        self.sizes = self.sizes._replace(max_seq_len=max_seq_len)

    def _packed_in_use(self) -> int:
        """An upper bound of the packed rows in use of any sequence."""
        if self.seq_lens.is_cpu:
            return min(max(int(self.seq_lens.max()) - self.sink_len, 0), self.packed_len)
        if self.longest is None:  # a graph may have grown them; to read them would wait
            return self.packed_len
        return min(max(self.longest - self.sink_len, 0), self.packed_len)

    def set_lens(
        self, seq_lens: torch.Tensor, packed_lens: torch.Tensor, longest: int | None = None
    ) -> None:
        """Set all lengths to [batch] tokens held and read packed.

        longest is as the attribute; None reads seq_lens.
        """
        self.seq_lens.copy_(seq_lens)
        self.packed_lens.copy_(packed_lens)
        torch.sub(self.seq_lens, self.packed_lens, out=self.exact_lens)
        self.starts.copy_(self.split.ring_row(self.packed_lens))
        self.exact_firsts.clamp_(self.seq_lens - self.split.exact_len, self.packed_lens)
        if self.window is not None and self.seen_starts is not None and self.packed_len:
            first = (self.seq_lens - self.window).clamp(min=0)
            self.seen_starts.copy_(self.split.page_row(first))
            self.seen_lens.copy_((self.packed_lens - first).clamp(min=0))
            self.firsts.clamp_(min=self.seq_lens - (self.sink_len + self.packed_len))
        if self.longest is not None:
            self.longest = int(seq_lens.max()) if longest is None else longest

    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        new_lens: Counts | None,
        bad_rows: torch.Tensor,
        overflow_tokens: torch.Tensor,
        queries: Queries | None = None,
        bound: BoundAppend | None = None,
    ) -> torch.Tensor | None:
        """Add the first new_lens[b] tokens of k and v to sequence b; see KVCache.append.

        Two launches: slots with lengths, then rows. They stay bound to the layer for new rows of
        the same kind.

        queries go to write_rows, which gives the result; bound are launches already found.
        """
        if new_lens is None and queries is None and (bound or not torch.compiler.is_compiling()):
            bound = bound or self.bound.find(k, v)
            # else lengths have to be read: they are not known, or near max_seq_len
            if bound and self.longest is not None and self.longest + bound[0] <= self.max_seq_len:
                new_tokens, place, write, room = bound
                overflow = overflow_tokens.data_ptr()
                new = bad_rows.data_ptr(), address(k, self.sides[0]), address(v, self.sides[1])
                if place is None:
                    try:
                        if not write.at(new, overflow, checks=True):
                            self._check_values(k, v, None)
                            write.at(new, overflow)
                    except BaseException:  # an interrupt comes when all is written
                        if int(self.seq_lens.max()) > self.longest:
                            self._take_back(room)
                        raise
                else:
                    place.at((overflow,))
                    try:
                        write.at(new)
                    except BaseException:  # an interrupt, too
                        self._take_back(room)
                        raise
                self.longest += new_tokens
                return None
        given = k, v
        check_tensors(**dict(zip(self.sides, given, strict=True)))
        k, v = k.detach(), v.detach()
        counts = self.check_new(k, v, new_lens)
        new_tokens, recorded = k.shape[2], debug.is_recorded(self.seq_lens)
        if not recorded:
            self._tighten(self.max_seq_len - new_tokens)
            self._check_values(k, v, counts)
        if not new_tokens:
            return None
        if recorded:
            self.longest = None
        if k.dtype != v.dtype:
            k, v = k.float(), v.float()
        # copied, or more, before slots are found: see write_rows
        by_token, transforms = self.row_kind.to_write(_by_token(k), _by_token(v), self.basis)
        packed_rows = self.k_packed, self.v_packed
        exact_rows = self.k_exact_rows, self.v_exact_rows
        if torch.compiler.is_compiling():
            # a graph makes these views itself: where two inputs of a graph share memory, torch
            # captures no CUDA graph
            packed_rows, exact_rows = self._k_and_v()
        placed = place_tokens(self.lens, self.sizes, counts, new_tokens, overflow_tokens)
        slots = placed.slots
        exact_k, exact_v = exact_rows if slots.exact is not None else (None, None)
        side_k = AppendSide(by_token[0], packed_rows[0], self.k_format, exact_k, transforms[0])
        side_v = AppendSide(by_token[1], packed_rows[1], self.v_format, exact_v, transforms[1])
        call = AppendCall(side_k, side_v, slots, self.k_exact.codec, None, bad_rows)
        try:
            multiplied = write_rows(call, placed=True, queries=queries)
        except BaseException:  # such as a lack of memory, or an interrupt
            self._take_back(placed.room)
            raise
        if self.longest is not None:
            self.longest += new_tokens
        if counts is None and not (recorded or k.is_meta):
            self._bind(given, call, placed)
        return multiplied

    def _bind(
        self, given: tuple[torch.Tensor, torch.Tensor], call: AppendCall, placed: Placed
    ) -> None:
        """Bind the launches of an append, unless it copied new rows."""
        new_tokens = given[0].shape[2]
        if new_tokens > MOST_BOUND or any(
            x.data_ptr() != side.x.data_ptr() for x, side in zip(given, call[:2], strict=True)
        ):
            return
        place = bind_place(self.lens, self.sizes, new_tokens, placed.room)
        found = bind_append(call, place)
        if place is not None and found is not None:
            self.bound.keep(kind_of(*given), BoundAppend(new_tokens, *found, placed.room))

    def _take_back(self, room: torch.Tensor) -> None:
        """Restore the lengths after tokens were placed that could not be written."""
        before = lens_before(room, len(self.seq_lens))
        if self.lens.firsts is not None:
            self.lens.firsts.copy_(before[2])
        self.set_lens(before[0], before[1], self.longest)

    def check_new(
        self, k: torch.Tensor, v: torch.Tensor, new_lens: Counts | None
    ) -> torch.Tensor | None:
        """Check new tokens as KVCache.append; return counts [batch] on the device, None for all."""
        batch, num_kv_heads = self.k_packed.shape[:2]
        formats = self.k_format, self.v_format
        for name, x, fmt in zip(self.sides, (k, v), formats, strict=True):
            shape = x.shape
            if len(shape) != 4 or shape[:2] != (batch, num_kv_heads) or shape[3] != fmt.head_dim:
                _refuse_shape(name, list(shape), (batch, num_kv_heads, fmt.head_dim))
            check_tensor(name, x, FLOATS)
            check_same_device(**{"the cache": self.seq_lens, name: x})
        new_tokens = k.shape[2]
        if v.shape[2] != new_tokens:
            k_name, v_name = self.sides
            raise ShapeError(f"{k_name} has {new_tokens} new tokens, {v_name} {v.shape[2]}")
        return None if new_lens is None else self._counts(new_lens, new_tokens)

    def check_step(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query: str = "q"
    ) -> int:
        """The new tokens of each sequence in a step, from q and the K and V of its append.

        It raises as append, and ShapeError if q has another number of tokens.
        """
        self.check_new(k, v, None)
        new_tokens, name = q.shape[1] if q.ndim == 4 else 1, self.sides[0]
        if k.shape[2] != new_tokens:
            is_swapped = q.ndim == 4 and k.shape[2] == q.shape[2]
            how = f". Tokens come before heads in {query}: give {query}.transpose(1, 2)"
            raise ShapeError(
                f"{name} is {list(k.shape)}, of {k.shape[2]} new tokens, and {query} "
                f"{list(q.shape)} has {new_tokens} of each sequence: use as many{how * is_swapped}"
            )
        return new_tokens

    def check_query(self, q: torch.Tensor) -> None:
        """Raise unless the shape, dtype and device of queries fit the layer; see KVCache.step."""
        batch, num_kv_heads = self.k_packed.shape[:2]
        shape, dim = q.shape, self.k_format.head_dim
        fits = len(shape) in (3, 4) and shape[0] == batch and shape[-1] == dim and shape[-2] > 0
        if not fits or shape[-2] % num_kv_heads:
            raise ShapeError(
                f"q is {list(shape)}: it must be [{batch}, num_q_heads, {dim}], num_q_heads a "
                f"multiple of {num_kv_heads}, or [{batch}, new_tokens, num_q_heads, {dim}]"
            )
        check_tensor("q", q, FLOATS)
        check_same_device(**{"the cache": self.seq_lens, "q": q})

    def _counts(self, new_lens: Counts, new_tokens: int) -> torch.Tensor:
        """new_lens on the device of a layer; a CUDA tensor is not read, place_tokens clamps it."""
        batch, device = self.seq_lens.shape[0], self.device
        if isinstance(new_lens, torch.Tensor) and new_lens.device == device:
            if not debug.may_read(new_lens):
                check_tensor("new_lens", new_lens, INTEGERS, (batch,))
                return new_lens if new_lens.is_cuda else new_lens.clamp(0, new_tokens)
        elif debug.is_recorded(self.seq_lens):
            raise ConfigError(
                "new_lens lies on the host, where a graph cannot read it: give a tensor on "
                f"{device}, as the cache"
            )
        counts = whole_numbers("new_lens", new_lens)
        if counts.shape != (batch,) or bool(((counts < 0) | (counts > new_tokens)).any()):
            raise ShapeError(f"new_lens is {counts.tolist()}: give [batch] of 0 to {new_tokens}")
        return to_device(counts.tolist(), device)

    def _check_room(self, counts: int | torch.Tensor) -> None:
        """Read the lengths; raise if a sequence would outgrow the layer."""
        if is_rehearsed(self.seq_lens):  # it has the length that _tighten supposed
            lens = torch.full(
                self.seq_lens.shape, self.longest or 0, dtype=torch.int64, device="cpu"
            )
        else:
            lens = self.seq_lens.cpu().long()  # int32 ends where max_seq_len may
        lens = lens + counts
        if bool((lens > self.max_seq_len).any()):
            sequence = int((lens > self.max_seq_len).nonzero()[0])
            raise ShapeError(
                f"sequence {sequence} would grow to {int(lens[sequence])} tokens, max_seq_len is "
                f"{self.max_seq_len}: crop it, or make a larger cache"
            )

    def _check_values(
        self, k: torch.Tensor, v: torch.Tensor, new_lens: torch.Tensor | None
    ) -> None:
        """Raise if a sequence would outgrow the layer, or a format cannot hold a new row."""
        new_tokens = k.shape[2]
        if self.longest is None or self.longest + new_tokens > self.max_seq_len:
            self._check_room(
                new_tokens if new_lens is None else new_lens.cpu().clamp(0, new_tokens)
            )
        if not debug.may_read(k):
            return
        bases = self.basis or (None, None)
        for name, x, basis, fmt in zip(self.sides, (k, v), bases, self._narrowest, strict=True):
            address(x, name)
            _check_limit(x, name, fmt, new_lens)
            if basis is not None:
                x, name = basis.encode(x), f"in the basis of the layer, {name}"
                _check_limit(x, name, fmt, new_lens)
            if self.split.exact_len:  # rounding may lead over a limit
                exact = EXACT_DTYPES[self.k_exact.codec]
                if x.dtype != exact:
                    _check_limit(x.to(exact), name, fmt, new_lens)

    def check_crop(self, layer: int, seq_lens: torch.Tensor) -> None:
        """Raise ShapeError unless the first seq_lens[b] tokens of sequence b can be kept."""
        if self.window is None:
            return
        firsts, present = self.firsts.cpu(), self.seq_lens.cpu()
        needed = (seq_lens - self.window).clamp(min=0)
        gone = (needed < firsts) & (seq_lens > 0) & (seq_lens < present)
        if bool(gone.any()):
            b = int(gone.nonzero()[0])
            raise ShapeError(
                f"sequence {b} cannot be cropped from {int(present[b])} to {int(seq_lens[b])} "
                f"tokens: layer {layer} sees the last {self.window} and has none before token "
                f"{int(firsts[b])}. Keep {int(firsts[b]) + self.window} or more, or none"
            )

    def crop(self, seq_lens: torch.Tensor) -> None:
        """Keep the first seq_lens[b] tokens of sequence b; see KVCache.crop."""
        behind = (seq_lens - self.sink_len).clamp(min=0)
        packed = torch.maximum(self.exact_firsts.cpu(), behind - self.recent_len)
        self.set_lens(seq_lens, torch.minimum(packed, behind))
        if self.window is not None:
            self.firsts *= self.seq_lens > 0

    def begin(
        self, seq_lens: torch.Tensor, packed_lens: torch.Tensor, firsts: torch.Tensor | None = None
    ) -> None:
        """Set the lengths of an empty layer that gets packed rows of packed_lens tokens and 16-bit
        rows of the others from elsewhere; pack_recent completes it.

        firsts is the attribute; where the window begins when None.
        """
        self.exact_firsts.copy_(packed_lens)
        self.set_lens(seq_lens, packed_lens)
        if self.window is not None:
            starts = (self.seq_lens - self.window).clamp(min=0)
            self.firsts.copy_(starts if firsts is None else firsts)

    def pack_recent(self, bad_rows: torch.Tensor) -> None:
        """Write the packed rows of recent tokens, as append does, and count NaN rows."""
        if not self.packed_len or not self.recent_len:
            return
        exact_dtype, bases = EXACT_DTYPES[self.k_exact.codec], self.basis or (None, None)
        ends = (self.seq_lens - self.sink_len).clamp(min=0)
        pairs = zip(self.packed_lens.tolist(), ends.tolist(), strict=True)
        for b, (first, end) in enumerate(pairs):
            recent = torch.arange(first, end, device=self.device)
            slots = Slots(b * self.packed_len + self.split.page_row(recent))
            sides: list[AppendSide] = []
            for rows, packed, fmt, basis in zip(
                (self.k_recent, self.v_recent),
                (self.k_packed, self.v_packed),
                (self.k_format, self.v_format),
                bases,
                strict=True,
            ):
                x = rows[b].view(exact_dtype)[:, self.split.ring_row(recent)].transpose(0, 1)
                rounding = Encoding()  # they are in the basis already
                if basis is not None:
                    rounding = Encoding(clip=basis.encoding.clip, feedback=basis.encoding.feedback)
                sides.append(AppendSide(x, packed, fmt, None, rounding))
            exact_format = self.k_exact.codec
            write_rows(AppendCall(sides[0], sides[1], slots, exact_format, None, bad_rows))


def rows_of(
    batch: int, num_kv_heads: int, length: int, fmt: AnyFormat, device: torch.device
) -> torch.Tensor:
    shape = (batch, num_kv_heads, length, fmt.row_bytes)
    what = f"{length} rows of {fmt} for {batch} sequences and {num_kv_heads} KV heads"
    return zero_rows(shape, device, what, "use a smaller max_seq_len or batch")


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """[batch, num_kv_heads, new_tokens, head_dim] in the order of the slots."""
    x = x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def _refuse_shape(name: str, shape: list[int], must: tuple[int, int, int]) -> NoReturn:
    """Raise, with what to do about axes in another order, or a missing one."""
    batch, heads, dim = must
    how = ""
    if len(shape) == 4 and (shape[0], shape[2], shape[3]) == must:
        how = f", the heads before the tokens: give {name}.transpose(1, 2)"
    elif shape == [batch, heads, dim]:
        how = f": give {name}.unsqueeze(2)"
    raise ShapeError(f"{name} is {shape}: it must be [{batch}, {heads}, new_tokens, {dim}]{how}")


def _check_limit(x: torch.Tensor, name: str, fmt: RowFormat, new_lens: torch.Tensor | None) -> None:
    if not x.numel():
        return
    limit = fmt.max_abs
    lowest, highest = x.aminmax()
    if -limit <= lowest.item() and highest.item() <= limit:
        return
    bad = ~(x.float().abs() <= limit)
    if new_lens is not None:
        is_new = torch.arange(x.shape[2], device=x.device) < new_lens[:, None]
        bad &= is_new[:, None, :, None]
    if bool(bad.any()):
        index = bad.nonzero()[0].tolist()
        raise beyond(f"{name}{index}", x[tuple(index)].item(), fmt, "; nothing was appended")
