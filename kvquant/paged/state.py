"""PagedState: the host's view of a paged cache: slots, lengths and pages of its sequences."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cache.copying import NotCopied
from ..errors import ConfigError, OutOfPagesError, ShapeError, shown
from ..rows.arguments import check_kind, is_whole
from ..rows.slots import Ints, Split, TokenSlots, token_slots
from .pool import Arrival, PagePool, SequenceId
from .prefix_tree import token_ids, whole_number
from .window_pages import WindowPages, held_pages

MAX_ID_BITS = 1024  # of an id that is a number
SPARE = 64  # tokens before a window whose pages are kept: as many can be truncated


class Allocation(NamedTuple):
    """The slot of a new sequence, its present tokens, and the place of its sinks, if any."""

    seq_slot: int
    present: int
    root: int | None


class RingTokens(NamedTuple):
    """Tokens that have a row in their sequence's ring, or had one before they were packed;
    [num_tokens] each.

    indices are places among the tokens after the sinks.
    """

    seq_slots: Ints
    indices: Ints

    @classmethod
    def between(cls, seq_slots: Ints, firsts: Ints, ends: Ints) -> RingTokens:
        """The tokens from first to end of each sequence."""
        counts = np.maximum(ends - firsts, 0)
        owner = np.repeat(np.arange(len(counts)), counts)
        starts = firsts + counts - np.cumsum(counts)
        return cls(seq_slots[owner], np.arange(len(owner)) + starts[owner])


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """What one step of several sequences does.

    Attributes:
        ids: the sequences, in the order of the batch.
        counts: new tokens of each.
        seq_slots: [batch], their slots.
        packed_lens: [batch], before the step.
        copies: (source, target) pages to copy before anything is written.
        slots: where the new tokens go, sequence after sequence, in the layers of each group.
        leaving: tokens whose 16-bit rows to keep before they are overwritten.
    """

    ids: tuple[SequenceId, ...]
    counts: Ints
    seq_slots: Ints
    packed_lens: Ints
    copies: list[tuple[int, int]]
    slots: tuple[TokenSlots, ...]
    leaving: RingTokens


class GroupSize(NamedTuple):
    """Layers of one window (None if they see all tokens), and how many of their pages have rows."""

    window: int | None
    num_pages: int


class PagedState(NotCopied):
    """Sequence slots, lengths, pages and known tokens of the sequences of a paged cache.

    A call that raises has changed nothing. Layers of one window are a group; their rows lie in
    frames, not in the pool's pages (window_pages.py, `places`).

    Args:
        sizes: of the groups, that which sees the most first.
        max_num_seqs, max_seq_len: as in PagedKVCache.
        split: how the tokens of a sequence are split.
        rollback_len: tokens packed last of a sequence, whose 16-bit rows are kept.
        drafts_only: keep them in steps of 2 to rollback_len tokens of a sequence only.

    Attributes:
        pool: the pages; the length of a sequence there is its packed tokens.
        lengths: [max_num_seqs], the tokens of the sequence in each sequence slot.
        packed_lens: [max_num_seqs], how many of them are packed.
        exact_firsts: [max_num_seqs], the first token after the sinks with a 16-bit row, in the
            ring or kept.
        tables: [max_num_seqs, max_pages] int32, the pages of each; undefined after the last in use.
        groups: the frames of each group; None if it sees all tokens and has every page.
        failed: sequences of steps that have failed; only free takes them.
    """

    def __init__(
        self,
        sizes: Sequence[GroupSize],
        max_num_seqs: int,
        max_seq_len: int,
        split: Split,
        rollback_len: int = 0,
        *,
        drafts_only: bool = False,
    ) -> None:
        self.split, self.max_seq_len, self.rollback_len = split, max_seq_len, rollback_len
        self.drafts_only = drafts_only
        max_pages, size = pages_of(split, max_seq_len), split.page_size
        num_pages = sizes[0].num_pages
        if sizes[0].window is not None:  # a page of the pool has no rows of its own
            num_pages += max_num_seqs * max_pages
        self.groups = [
            None if window is None else WindowPages(window, frames, num_pages, size, SPARE)
            for window, frames in sizes
        ]
        windows = [group for group in self.groups if group is not None]
        self.pool = PagePool(
            num_pages, size, root_len=split.sink_len, num_roots=max_num_seqs, windows=windows
        )
        self.lengths = np.zeros(max_num_seqs, np.int64)
        self.packed_lens = np.zeros(max_num_seqs, np.int64)
        self.exact_firsts = np.zeros(max_num_seqs, np.int64)
        self.tables = np.zeros((max_num_seqs, max_pages), np.int32)
        self._tokens: list[list[int]] = [[] for _ in range(max_num_seqs)]  # as far as known
        self._seq_slots: dict[SequenceId, int] = {}
        self._free_seq_slots = list(range(max_num_seqs - 1, -1, -1))
        self.failed: set[SequenceId] = set()

    @property
    def ids(self) -> list[SequenceId]:
        return list(self._seq_slots)

    @property
    def num_free_seq_slots(self) -> int:
        """Sequences that can be begun."""
        return len(self._free_seq_slots)

    @property
    def num_free_pages(self) -> int:
        """Unreserved pages that can be taken, of the group that sees the most."""
        return max(self.pool.num_left()[self.groups[0] is not None], 0)

    def places(self, group: int, pages: Sequence[int]) -> list[int]:
        """The frames of pages in the layers of a group; -1 where their rows are gone."""
        of = self.groups[group]
        return list(pages) if of is None else of.frames[list(pages)].tolist()

    def dropped(self, sequence_id: SequenceId) -> list[int]:
        """How many of a sequence's first pages it no longer sees, in each group."""
        dropped = iter(self.pool.dropped(sequence_id))
        return [0 if group is None else next(dropped) for group in self.groups]

    def seq_slot(self, sequence_id: SequenceId) -> int:
        try:
            found = self._seq_slots[sequence_id]
        except (KeyError, TypeError):  # what cannot be hashed is no id
            raise ConfigError(
                f"no sequence {shown(sequence_id)}: allocate or fork it first"
            ) from None
        if sequence_id in self.failed:
            raise ConfigError(
                f"a step of sequence {shown(sequence_id)} has failed, and some of its rows were "
                "not written: free it, then allocate it again"
            )
        return found

    def tokens(self, sequence_id: SequenceId) -> list[int]:
        """The known first tokens of a sequence."""
        return self._tokens[self.seq_slot(sequence_id)]

    def match_prefix(self, tokens: Sequence[int], namespace: str | None = None) -> int:
        """How many of the tokens allocate would find; never all of them."""
        packed = self.pool.match_prefix(token_ids(tokens)[:-1], namespace)
        return packed + self.split.sink_len if packed else 0

    def allocate(
        self,
        sequence_id: SequenceId,
        tokens: Sequence[int] = (),
        room: int = 0,
        namespace: str | None = None,
    ) -> Allocation:
        """Begin a sequence with the known rows of its tokens; reserve pages for `room` tokens."""
        known = token_ids(tokens)[:-1]
        self._check_seq_slots([sequence_id])
        if room > self.max_seq_len:
            raise ShapeError(
                f"room for {room} tokens, max_seq_len is {self.max_seq_len}: ask for less, or make "
                "a larger cache"
            )
        packed_room = self.split.packed_len(room)
        packed, root = self.pool.allocate(sequence_id, known, packed_room, namespace)
        present = packed + self.split.sink_len if packed else 0
        return Allocation(
            self._assign_slot(sequence_id, present, packed, known[:present]), present, root
        )

    def place(self, arrivals: Mapping[SequenceId, Arrival]) -> list[int]:
        """Begin sequences as in another cache (PagePool.place); their pages are not published."""
        self._check_seq_slots(list(arrivals))
        pages = self.pool.place(arrivals)
        for sequence_id, one in arrivals.items():
            self._assign_slot(sequence_id, one.length, one.packed_len, list(one.tokens))
        return pages

    def fork(self, parent_id: SequenceId, child_id: SequenceId) -> tuple[int, int]:
        """Begin a sequence with the tokens of another; return the sequence slots of both."""
        seq_slot = self.seq_slot(parent_id)
        self._check_seq_slots([child_id])
        self.pool.fork(parent_id, child_id)
        length, packed = int(self.lengths[seq_slot]), int(self.packed_lens[seq_slot])
        child = self._assign_slot(child_id, length, packed, list(self._tokens[seq_slot]))
        self.exact_firsts[child] = self.exact_firsts[seq_slot]
        return seq_slot, child

    def truncate(self, sequence_id: SequenceId, length: int) -> RingTokens:
        """Keep the first tokens of a sequence; packed rows stay packed.

        Returns:
            Tokens to restore to 16 bit: put their rows back into the ring, then call unpack.
        """
        seq_slot, length = self.seq_slot(sequence_id), whole_number("length", length)
        if not 0 <= length <= self.lengths[seq_slot]:
            has = f"sequence {shown(sequence_id)} has {self.lengths[seq_slot]} tokens"
            raise ShapeError(f"{has}: it cannot be truncated to {length}")
        _, first = self._packed_of(seq_slot, length)
        dropped = self.pool.dropped(sequence_id)
        for window, pages in zip(self.pool.windows, dropped, strict=True):
            if first and pages > window.first_seen(first):
                full = pages + self.split.num_pages(window.window)
                least = full * self.split.page_size + self._outside_pages
                raise ShapeError(
                    f"sequence {shown(sequence_id)} cannot be truncated to {length} tokens: layers "
                    f"see the last {window.window}, its first {pages} pages are dropped there. "
                    f"Keep {least} or more, or {self.split.sink_len} at most"
                )
        return self._cut(sequence_id, length)

    def _packed_of(self, seq_slot: int, length: int) -> tuple[int, int]:
        """Packed tokens of a sequence cut to a length; and those that the ring cannot give."""
        behind = max(length - self.split.sink_len, 0)
        packed = min(int(self.packed_lens[seq_slot]), behind)
        if not self.rollback_len:
            return packed, packed
        exact_first = int(self.exact_firsts[seq_slot])
        return packed, min(packed, max(exact_first, behind - self.split.recent_len))

    def _cut(self, sequence_id: SequenceId, length: int) -> RingTokens:
        seq_slot = self._seq_slots[sequence_id]
        packed, first = self._packed_of(seq_slot, length)
        if self.rollback_len:
            self.exact_firsts[seq_slot] = min(int(self.exact_firsts[seq_slot]), packed)
        self.lengths[seq_slot], self.packed_lens[seq_slot] = length, packed
        self.pool.truncate(sequence_id, packed)
        del self._tokens[seq_slot][length:]
        return RingTokens(np.full(packed - first, seq_slot), np.arange(first, packed))

    def unpack(self, sequence_id: SequenceId, tokens: RingTokens) -> None:
        """Read the last packed tokens of a sequence from the ring again; see truncate."""
        seq_slot = self.seq_slot(sequence_id)
        self.packed_lens[seq_slot] -= len(tokens.indices)
        self.pool.truncate(sequence_id, int(self.packed_lens[seq_slot]))

    def free(self, sequence_id: SequenceId) -> None:
        """End a sequence."""
        seq_slot = self.seq_slot(sequence_id)
        del self._seq_slots[sequence_id]
        self.pool.free(sequence_id)
        self._free_seq_slots.append(seq_slot)
        self._tokens[seq_slot] = []
        self.lengths[seq_slot] = self.packed_lens[seq_slot] = 0

    @contextmanager
    def or_free(self, ids: Iterable[SequenceId]) -> Iterator[None]:
        """End these sequences if the block, which copies their rows, raises."""
        try:
            yield
        except BaseException:
            for sequence_id in ids:
                self.free(sequence_id)
            raise

    def rename(self, sequence_id: SequenceId, new_id: SequenceId) -> None:
        self.seq_slot(sequence_id)
        self.pool.rename(sequence_id, new_id)
        self._seq_slots[new_id] = self._seq_slots[sequence_id]
        del self._seq_slots[sequence_id]

    def can_append(self, ids: Sequence[SequenceId], counts: Sequence[int]) -> bool:
        """Whether there are pages for a step."""
        seq_slots, new = self._to_extend(ids, counts)
        return self.pool.can_append(ids, self._packed_counts(seq_slots, new).tolist())

    def extend(
        self, ids: Sequence[SequenceId], counts: Sequence[int], tokens: Sequence[int] | None = None
    ) -> Step:
        """Grow sequences by new tokens, whose rows are written next.

        tokens are the ids of all new tokens, sequence after sequence; None if not known. If the
        step fails, add the ids to `failed`.
        """
        seq_slots, new = self._to_extend(ids, counts)
        known = None if tokens is None else token_ids(tokens)
        if known is not None and len(known) != new.sum():
            raise ShapeError(f"{len(known)} tokens for counts that add up to {new.sum()}")
        lengths, packed_lens = self.lengths[seq_slots], self.packed_lens[seq_slots]
        packed_counts = self._packed_counts(seq_slots, new).tolist()
        growth = self.pool.append(ids, packed_counts)
        if growth.entries:
            place, at, page = np.array(growth.entries).T
            self.tables[seq_slots[place], at] = page
        self.lengths[seq_slots] += new
        self.packed_lens[seq_slots] = self.split.packed_lens(lengths + new, packed_lens)
        leaving = self._let_leave(seq_slots, lengths, packed_lens, new)
        if known is not None:
            self._learn(seq_slots.tolist(), lengths.tolist(), new.tolist(), known)
        slots = token_slots(self.split, seq_slots, lengths, packed_lens, new, self.tables)
        each = tuple(self._in_group(slots, group) for group in self.groups)
        return Step(tuple(ids), new, seq_slots, packed_lens, growth.copies, each, leaving)

    def _in_group(self, slots: TokenSlots, group: WindowPages | None) -> TokenSlots:
        """The same slots in a group's rows."""
        if group is None:
            return slots

        def mapped(packed: Ints) -> Ints:
            frames = group.frames[packed // size].astype(np.int64)
            return np.where(packed < 0, packed, frames * size + packed % size)

        size = self.split.page_size
        return slots._replace(packed=mapped(slots.packed), evicted=mapped(slots.evicted))

    def _let_leave(
        self, seq_slots: Ints, lengths: Ints, packed_lens: Ints, new: Ints
    ) -> RingTokens:
        """The tokens that a step moves out of the ring and whose 16-bit rows are kept.

        The sequences' packed_lens are those after the step; the arguments lengths and packed_lens
        are from before, new counts its tokens.
        """
        nobody = np.zeros(0, np.int64)
        if not self.rollback_len:
            return RingTokens(nobody, nobody)
        ends, held = self.packed_lens[seq_slots], np.maximum(lengths - self.split.sink_len, 0)
        firsts = np.maximum(self.exact_firsts[seq_slots], ends - self.rollback_len)
        if self.drafts_only:
            keeps = (ends == packed_lens) | ((new > 1) & (new <= self.rollback_len))
            firsts = np.where(keeps, firsts, ends)
        # new tokens that are packed at once never have 16-bit rows
        self.exact_firsts[seq_slots] = np.where(ends > held, ends, firsts)
        return RingTokens.between(seq_slots, np.maximum(firsts, packed_lens), ends.clip(max=held))

    def insert(self, ids: Sequence[SequenceId]) -> list[tuple[int, int]]:
        """Publish the full pages of sequences, whose rows are written.

        Returns:
            (sequence slot, place) of sinks to keep at a place.
        """
        kept = []
        for sequence_id in ids:
            seq_slot = self._seq_slots[sequence_id]
            root = self.pool.insert(sequence_id, self._tokens[seq_slot])
            if root is not None:
                kept.append((seq_slot, root))
        return kept

    def to_insert(self, step: Step) -> list[SequenceId]:
        size = self.split.page_size
        filled = self.packed_lens[step.seq_slots] // size > step.packed_lens // size
        return [step.ids[i] for i in filled.nonzero()[0]]

    def drop_pages(self, step: Step) -> None:
        """Drop the pages before an ended step's windows, but for SPARE tokens to truncate."""
        self.pool.settle()
        if self.pool.windows:
            lengths = self.lengths[step.seq_slots].tolist()
            for sequence_id, length in zip(step.ids, lengths, strict=True):
                self.pool.drop(sequence_id, self.first_pages(length))

    def first_pages(self, length: int) -> list[int]:
        """How many first pages a sequence of this length need not see, in each window."""
        behind = length - self._outside_pages
        return [window.first_seen(behind - window.spare) for window in self.pool.windows]

    @property
    def _outside_pages(self) -> int:
        """The most tokens of a sequence in 16 bit."""
        return self.split.sink_len + self.split.recent_len

    def forget_all(self) -> None:
        """Let no sequence begin with rows that are here now, nor publish them later."""
        for tokens in self._tokens:
            tokens.clear()
        self.pool.forget_all()

    def _check_seq_slots(self, ids: Sequence[SequenceId]) -> None:
        for sequence_id in ids:
            if sequence_id in self._seq_slots:
                raise ConfigError(
                    f"sequence {shown(sequence_id)} exists: free it or use another id"
                )
        if len(ids) > len(self._free_seq_slots):
            raise OutOfPagesError(
                f"{len(ids)} sequence slots are needed, but {len(self._free_seq_slots)} of "
                f"{len(self.lengths)} are free: free or swap out sequences, or "
                "make a cache with more sequence slots"
            )

    def _assign_slot(
        self, sequence_id: SequenceId, length: int, packed: int, tokens: list[int]
    ) -> int:
        """Give a sequence of the pool a sequence slot."""
        seq_slot = self._free_seq_slots.pop()
        table = self.pool.block_table(sequence_id)
        self.tables[seq_slot, : len(table)] = table
        self.lengths[seq_slot], self.packed_lens[seq_slot] = length, packed
        self.exact_firsts[seq_slot] = packed
        self._tokens[seq_slot] = tokens
        self._seq_slots[sequence_id] = seq_slot
        return seq_slot

    def _to_extend(self, ids: Sequence[SequenceId], counts: Sequence[int]) -> tuple[Ints, Ints]:
        """Sequence slots and counts of a step; all is checked but the pages."""
        seq_slots = np.array([self.seq_slot(sequence_id) for sequence_id in ids], np.int64)
        if len(set(ids)) < len(ids):
            raise ConfigError(f"sequences {shown(ids)} name one twice: name each once")
        new: NDArray[np.int64] = np.array(counts, np.int64)
        if len(new) != len(seq_slots) or (new < 0).any():
            raise ShapeError(
                f"counts {shown(counts)} for {len(seq_slots)} ids: give one >= 0 for each"
            )
        too_long = new > self.max_seq_len - self.lengths[seq_slots]
        if too_long.any():
            at = int(too_long.argmax())
            length = int(self.lengths[seq_slots[at]]) + int(new[at])
            raise ShapeError(
                f"sequence {shown(ids[at])} would grow to {length} tokens, "
                f"max_seq_len is {self.max_seq_len}: truncate it, or make a larger cache"
            )
        return seq_slots, new

    def _packed_counts(self, seq_slots: Ints, new: Ints) -> Ints:
        packed_lens = self.packed_lens[seq_slots]
        return self.split.packed_lens(self.lengths[seq_slots] + new, packed_lens) - packed_lens

    def _learn(
        self, seq_slots: list[int], lengths: list[int], new: list[int], known: list[int]
    ) -> None:
        """Keep the ids of new tokens if all before them are known."""
        start = 0
        for seq_slot, length, count in zip(seq_slots, lengths, new, strict=True):
            tokens = self._tokens[seq_slot]
            if len(tokens) == length:
                tokens += known[start : start + count]
            start += count


def listed(ids: Iterable[SequenceId]) -> list[SequenceId]:
    """Ids of sequences as a list; ConfigError for a single id, or what holds none."""
    if type(ids) is list:
        return ids
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        what = "the text " if isinstance(ids, str) else ""
        raise ConfigError(f"ids is {what}{shown(ids)}: give a list of ids")
    return list(ids)


def for_each(ids: Sequence[SequenceId], counts: int | Sequence[int]) -> list[int]:
    """One count for each sequence; ConfigError unless they are whole numbers."""
    try:
        if getattr(counts, "ndim", isinstance(counts, Iterable)):
            return token_ids(counts)  # type: ignore[arg-type]
        return [whole_number("counts", counts)] * len(ids)  # type: ignore[arg-type]
    except ConfigError:
        raise ConfigError(f"counts {shown(counts)} must be whole numbers") from None


def plain_id(sequence_id: SequenceId) -> SequenceId | None:
    """An id as a Python string or integer; None if it is neither.

    Neither True (1 after a file) nor numbers with too many digits for Python are ids.
    """
    if isinstance(sequence_id, str):
        return str.__str__(sequence_id)  # by which it is found; str() of an Enum is another one
    if not is_whole(sequence_id):
        return None
    number = operator.index(sequence_id)
    return number if number.bit_length() <= MAX_ID_BITS else None


def plain_namespace(namespace: str | None) -> str | None:
    """A namespace as a Python string or None; ConfigError for others."""
    if namespace is None:
        return None
    check_kind("namespace", namespace, str, "give a string, or None for no namespace")
    return str.__str__(namespace)  # as plain_id


def pages_of(split: Split, max_seq_len: int) -> int:
    """Pages of a sequence of max_seq_len tokens, one at least."""
    return max(split.num_pages(max_seq_len - split.sink_len), 1)


def group_sizes(
    windows: Iterable[int | None], num_pages: int, max_num_seqs: int, split: Split, chunk_len: int
) -> list[GroupSize]:
    """The groups of layers with these windows, and their pages.

    The group that sees the most has num_pages; others what all sequences hold and one step takes,
    if less.
    """
    all_windows = set(windows)
    order: list[int | None] = [None] * (None in all_windows)
    order += sorted((window for window in all_windows if window is not None), reverse=True)
    found = [GroupSize(order[0], num_pages)]
    for window in order[1:]:
        assert window is not None
        held = held_pages(window, split.page_size, SPARE) + 1  # new tokens may begin two pages
        most = max_num_seqs * held + split.num_pages(chunk_len)
        found.append(GroupSize(window, min(num_pages, most)))
    return found
