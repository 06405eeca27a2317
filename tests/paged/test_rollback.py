"""Tokens that are taken back: a cache is, bit for bit, like one that never saw them (25 s)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from invariants import check_invariants
from paged_cases import DIM, HEADS, LAYERS, begin, extend, make, new_rows, rows_of, same, values
from row_kinds import KINDS as ROW_KINDS
from row_kinds import RowKind, planned
from slow_cases import mark_slow

from kvquant.errors import ConfigError

RECENT, MOST = 8, 6  # of the recent window, and tokens that are taken back
PAGES, SEQ_SLOTS, MAX = 40, 4, 100
OPTIONS: dict[str, Any] = {"num_pages": PAGES, "max_num_seqs": SEQ_SLOTS, "max_seq_len": MAX}
KINDS: dict[str, RowKind] = {
    "plain": ROW_KINDS["heads"],
    "offset": planned("offset"),
    "feedback": planned("clip feedback"),
    "latents": ROW_KINDS["latents"],
}
Rows = Sequence[torch.Tensor]  # K and V of new tokens


def some(rows: Rows, first: int, last: int) -> Rows:
    return [x[first:last] for x in rows]


def joined(parts: Sequence[Rows]) -> Rows:
    """Rows of several sequences, one after another."""
    return [torch.cat(side) for side in zip(*parts, strict=True)]


def both(kind: str, recent_len: int = RECENT, most: int | None = MOST, **options: Any) -> list[Any]:
    """The batch that takes tokens back, by rollback_len or of steps of several tokens (most is
    None), and one that never sees them."""
    kept: dict[str, Any] = {"sink_len": 2, "recent_len": recent_len, **OPTIONS, **options}
    of = KINDS[kind]
    made = of.make(**kept, rollback_len=most), of.make(**kept, rollback_len=0)
    return [of.batch(cache, SEQ_SLOTS, SEQ_SLOTS * MAX) for cache in made]


class Rollback(RuleBasedStateMachine):
    """Random steps of both; only one of them drafts."""

    kind_name = ""

    @initialize(recent_len=st.sampled_from([0, RECENT]), most=st.sampled_from([MOST, None]))
    def start(self, recent_len: int, most: int | None) -> None:
        self.kind = KINDS[self.kind_name]
        self.ours, self.theirs = self.batches = both(self.kind_name, recent_len, most)
        self.counts = st.integers(1 if most else 2, MOST)
        self.tokens: dict[str, list[int]] = {}
        self.next_name = self.next_token = 0

    def names(self, data: st.DataObject) -> list[str]:
        """Some of the sequences, in any order."""
        return data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, unique=True))

    def new_rows(self, count: int) -> Rows:
        return list(rows_of(self.ours.cache, count))

    def new_tokens(self, count: int) -> list[int]:
        """Ids that no token had."""
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    @precondition(lambda self: len(self.tokens) < SEQ_SLOTS)
    @rule(data=st.data(), count=st.integers(1, 30))
    def allocate(self, data: st.DataObject, count: int) -> None:
        """A prompt that begins as a sequence does, or has begun."""
        name, before = f"{self.next_name}", [[], *self.tokens.values()]
        self.next_name += 1
        known: list[int] = data.draw(st.sampled_from(before))
        tokens = [*known[: data.draw(st.integers(0, len(known)))], *self.new_tokens(count)]
        tokens = tokens[:MAX]
        present = [batch.cache.allocate(name, tokens) for batch in self.batches]
        # a draft may have filled a page with tokens that stay: it is found, and its rows are right,
        # but the other cache holds these tokens in 16 bit
        assert present[0] >= present[1]
        assume(present[0] == present[1])
        count = len(tokens) - present[0]
        rows = self.new_rows(count)
        for batch in self.batches:
            extend(batch, [name], count, tokens[present[0] :], rows)
        self.tokens[name] = tokens

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), one_by_one=st.booleans())
    def draft(self, data: st.DataObject, one_by_one: bool) -> None:
        """New tokens of several sequences, of which some are kept."""
        names = [name for name in self.names(data) if len(self.tokens[name]) + MOST <= MAX]
        drafted = [data.draw(self.counts) for _ in names]
        kept = [data.draw(st.integers(0, count)) for count in drafted]
        chosen = [self.new_tokens(count) for count in drafted]
        rows = [self.new_rows(count) for count in drafted]
        if one_by_one and self.ours.cache.rollback_len:
            for name, tokens, new in zip(names, chosen, rows, strict=True):
                for i, token in enumerate(tokens):
                    extend(self.ours, [name], 1, [token], some(new, i, i + 1))
        elif names:
            extend(self.ours, names, drafted, [*chain(*chosen)], joined(rows))
        for name, keep in zip(names, kept, strict=True):
            self.ours.cache.truncate(name, len(self.tokens[name]) + keep)
        if names:
            kept_tokens = [own[:keep] for own, keep in zip(chosen, kept, strict=True)]
            new = joined([some(x, 0, keep) for x, keep in zip(rows, kept, strict=True)])
            extend(self.theirs, names, kept, [*chain(*kept_tokens)], new)
            for name, more in zip(names, kept_tokens, strict=True):
                self.tokens[name] += more

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), layers=st.integers(0, 1))
    def fail(self, data: st.DataObject, layers: int) -> None:
        """A step that raises when some of its rows are written ends its sequences."""
        names = [name for name in self.names(data) if len(self.tokens[name]) + MOST <= MAX]
        drafted = [data.draw(self.counts) for _ in names]
        with pytest.raises(ZeroDivisionError), self.ours.extend(names, drafted):
            for layer in range(layers):
                self.ours.append(layer, *self.new_rows(sum(drafted)))
            raise ZeroDivisionError
        for name in names:
            for batch in self.batches:
                batch.cache.free(name)
            del self.tokens[name]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(1, 40))
    def go_on(self, data: st.DataObject, count: int) -> None:
        """Tokens that stay."""
        name = self.names(data)[0]
        count = min(count, MAX - len(self.tokens[name]))
        tokens, rows = self.new_tokens(count), self.new_rows(count)
        for batch in self.batches:
            extend(batch, [name], count, tokens, rows)
        self.tokens[name] += tokens

    @precondition(lambda self: 0 < len(self.tokens) < SEQ_SLOTS)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = self.names(data)[0], f"{self.next_name}"
        self.next_name += 1
        for batch in self.batches:
            batch.cache.fork(parent, child)
        self.tokens[child] = list(self.tokens[parent])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), how=st.sampled_from(["free", "swap"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        """A sequence ends, or goes to the host and comes back."""
        name = self.names(data)[0]
        for batch in self.batches:
            if how == "free":
                batch.cache.free(name)
            else:
                batch.cache.swap_out(name)
                batch.cache.swap_in(name)
        if how == "free":
            del self.tokens[name]

    @invariant()
    def caches_are_alike(self) -> None:
        if not hasattr(self, "batches"):
            return
        ours, theirs = (batch.cache for batch in self.batches)
        check_invariants(ours)
        names = sorted(self.tokens)
        for name in names:
            assert ours.length(name) == theirs.length(name) == len(self.tokens[name])
            lens = [int(at.state.packed_lens[at.state.seq_slot(name)]) for at in (ours, theirs)]
            assert lens[0] == lens[1]
            tables = [at.state.pool.block_table(name) for at in (ours, theirs)]
            assert len(tables[0]) == len(tables[1])
            assert same(values(ours, name), values(theirs, name))
            assert ours.state.tokens(name) == theirs.state.tokens(name)
        if names:
            torch.manual_seed(len(names))
            q, layers = self.kind.queries(len(names), 2 * HEADS), range(ours.num_layers)
            outs = []
            for batch in self.batches:
                with batch.extend(names, 0):
                    outs.append([self.kind.attend(batch, i, q) for i in layers])
            assert same(*outs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("examples", mark_slow([2, 6], [2]))
def test_drafts_that_are_taken_back_leave_nothing(examples: int, kind: str) -> None:
    Rollback.kind_name = kind
    health = list(HealthCheck)
    run_state_machine_as_test(
        Rollback,
        settings=settings(
            max_examples=examples, stateful_step_count=18, suppress_health_check=health
        ),
    )


def test_what_is_kept_has_a_price_and_a_limit() -> None:
    """Originals are 16-bit rows of each layer, head and sequence slot; none without the option."""
    with_it, without = (batch.cache for batch in both("plain"))
    rows = with_it.num_layers * SEQ_SLOTS * HEADS * MOST
    assert with_it.nbytes - without.nbytes == rows * 2 * DIM * 2
    with pytest.raises(ConfigError, match="rollback_len 9 is over recent_len 8"):
        make(recent_len=8, rollback_len=9)
    assert make(recent_len=0, rollback_len=64).nbytes == make(recent_len=0).nbytes
    batch = both("plain")[0]
    begin(batch, "a", 30)
    batch.cache.truncate("a", 12)  # more than is kept: as without it
    state = batch.cache.state
    assert state.packed_lens[state.seq_slot("a")] == 10
    check_invariants(batch.cache)


def test_a_cache_that_is_not_asked_keeps_rows_of_drafted_steps_only() -> None:
    """A step of one token, or of more than 16, copies nothing; one between is taken back whole."""
    for count, keeps in ((1, False), (2, True), (16, True), (17, False), (0, False)):
        ours, theirs = both("plain", recent_len=20, most=None)
        for batch in (ours, theirs):
            torch.manual_seed(0)
            begin(batch, "a", 40)
            extend(batch, ["a"])
        state = ours.cache.state
        assert state.exact_firsts[0] == state.packed_lens[0] == 41 - 22
        with ours.extend(["a"], count):
            assert ours.cache._step is not None
            leaving = ours.cache._step.leaving
            for layer in range(LAYERS):
                ours.append(layer, *new_rows(count))
        assert len(leaving.indices) == (count if keeps else 0)
        ours.cache.truncate("a", 41)
        alike = same(values(ours.cache, "a"), values(theirs.cache, "a"))
        assert alike == (keeps or not count)
        check_invariants(ours.cache)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: str) -> None:
    ours, theirs = both(kind, device="cuda")
    for batch in (ours, theirs):
        torch.manual_seed(0)
        begin(batch, "a", 25)
        batch.cache.fork("a", "b")
    for step in range(12):
        kept, drafted = [step % 4, 2 - step % 3], [4, 3]
        rows = rows_of(ours.cache, 7)
        extend(ours, ["a", "b"], drafted, rows=rows)
        lengths = [theirs.cache.length(name) for name in "ab"]
        for name, length, keep in zip("ab", lengths, kept, strict=True):
            ours.cache.truncate(name, length + keep)
        chosen = [*range(kept[0]), *range(4, 4 + kept[1])]
        extend(theirs, ["a", "b"], kept, rows=[x[chosen] for x in rows])
        for name in "ab":
            assert same(values(ours.cache, name), values(theirs.cache, name))
    assert not ours.cache.bad_rows.any()
