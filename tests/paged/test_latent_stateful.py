"""LatentPagedKVCache under any sequence of calls, beside a cache with both parts apart (5 s).

What a PagedKVCache does with K and V is compared with lists of tokens in test_stateful.py. Here one
whose K and V are latents and RoPE parts is the model: all values must be the same bits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from invariants import check_invariants
from latent_pages import DIMS, FORMATS, LAYERS, assert_attends, make, new_rows, poison
from latent_pages import queries as new_queries
from paged_cases import extend, same, values

from kvquant import LatentFormat, LatentPagedBatch, RowFormat
from kvquant.errors import OutOfPagesError
from kvquant.io.sequences import load_sequences, save_sequences
from kvquant.paged.batch import PagedBatch
from kvquant.paged.cache import PagedKVCache
from kvquant.rows.kind import KeyValue

PAGES, SEQ_SLOTS, MAX, MOST = 12, 4, 70, 4
LENGTHS = [(3, 5), (0, 0), (3, 0), (0, 5)]
SIZES: dict[str, Any] = {"max_num_seqs": SEQ_SLOTS, "max_seq_len": MAX, "page_size": 16}
numbers = st.integers(0, 2**16)


class AnyFormats(KeyValue):
    """Keys and values that may have the formats of parts of latent rows."""

    def check_formats(self, formats: Sequence[RowFormat]) -> None:
        pass


class Apart(PagedKVCache):
    """Latents and RoPE parts as K and V of one head, each in memory of its own."""

    row_kind = AnyFormats()


class LatentPages(RuleBasedStateMachine):
    """The same calls on both; free pages and sequence slots hold NaN."""

    @initialize(lengths=st.sampled_from(LENGTHS))
    def start(self, lengths: tuple[int, int]) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"sink_len": lengths[0], "recent_len": lengths[1], **SIZES}
        options["rollback_len"] = min(MOST, lengths[1])
        latent, rope = LatentFormat.parse(FORMATS["cpu"], *DIMS.values()).parts
        self.ours = make(num_pages=PAGES, **options)
        formats: dict[str, Any] = {"k_format": latent, "v_format": rope}
        self.theirs = Apart(LAYERS, 1, 256, PAGES, **formats, **options)
        self.caches = self.ours, self.theirs
        self.batch = LatentPagedBatch(self.ours, SEQ_SLOTS, SEQ_SLOTS * MAX)
        plain = PagedBatch(self.theirs, SEQ_SLOTS, SEQ_SLOTS * MAX, shared_prefix=False)
        self.batches: tuple[PagedBatch | LatentPagedBatch, ...] = self.batch, plain
        self.tokens: dict[int, list[int]] = {}
        self.swapped: dict[int, list[int]] = {}
        self.rows: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self.namespaces: dict[int, str | None] = {}
        self.next_id = 0

    def pick(self, number: int) -> int:
        return list(self.tokens)[number % len(self.tokens)]

    def some(self, number: int, most: int) -> list[int]:
        """Some of the sequences that have room for more tokens."""
        chosen = [i for at, i in enumerate(self.tokens) if number >> at & 1]
        return [i for i in chosen if len(self.tokens[i]) + most <= MAX]

    def rows_of(self, i: int, tokens: list[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a sequence's tokens from `start` on: the same after the same tokens of one
        namespace."""
        first = -1 if self.namespaces[i] is None else -2
        found = [
            self.rows.setdefault((first, *tokens[: end + 1]), new_rows(1))
            for end in range(start, len(tokens))
        ]
        latents, ropes = zip(new_rows(0), *found, strict=True)
        return torch.cat(latents), torch.cat(ropes)

    def step(self, new: dict[int, list[int]]) -> bool:
        """Append tokens to sequences, unless there are no pages, which both must say."""
        ids, counts, fits = list(new), [len(tokens) for tokens in new.values()], []
        each = [self.rows_of(i, self.tokens[i] + new[i], len(self.tokens[i])) for i in ids]
        latents, ropes = zip(new_rows(0), *each, strict=True)
        rows = torch.cat(latents), torch.cat(ropes)
        for batch in self.batches:
            try:
                extend(batch, ids, counts, [*chain(*new.values())], rows)
                fits.append(True)
            except OutOfPagesError:
                fits.append(False)
        assert fits[0] == fits[1]
        if fits[0]:
            for i, tokens in new.items():
                self.tokens[i] = self.tokens[i] + tokens
        return fits[0]

    @precondition(lambda self: len(self.tokens) + len(self.swapped) < SEQ_SLOTS)
    @rule(number=numbers, count=st.integers(1, 50))
    def allocate(self, number: int, count: int) -> None:
        tokens = [number % 2] * (count // 2) + [number >> 3 & 1] * (count - count // 2)
        i = self.next_id
        self.next_id += 1
        namespace = "one" if number >> 6 & 1 else None
        present = [cache.allocate(i, tokens, namespace=namespace) for cache in self.caches]
        self.namespaces[i] = namespace
        assert present[0] == present[1]
        self.tokens[i] = tokens[: present[0]]
        self.step({i: tokens[present[0] :]})

    @precondition(lambda self: self.tokens)
    @rule(number=numbers, count=st.integers(1, 20))
    def append(self, number: int, count: int) -> None:
        self.step({i: [number >> 5 & 1] * count for i in self.some(number, count)})

    @precondition(lambda self: self.tokens)
    @rule(number=numbers, count=st.integers(1, MOST), layers=st.integers(0, LAYERS - 1))
    def fail(self, number: int, count: int, layers: int) -> None:
        ids = self.some(number, count)
        latent, rope = new_rows(count * len(ids))
        has_failed = False
        for batch in self.batches:
            try:
                with batch.extend(ids, count):
                    for layer in range(layers):
                        batch.append(layer, latent, rope)
                    raise ZeroDivisionError
            except OutOfPagesError:
                pass
            except ZeroDivisionError:
                has_failed = True
                for i in ids:
                    batch.cache.free(i)
        if has_failed:
            for i in ids:
                del self.tokens[i]

    @precondition(lambda self: 0 < len(self.tokens) < SEQ_SLOTS - len(self.swapped))
    @rule(number=numbers)
    def fork(self, number: int) -> None:
        i = self.pick(number)
        for cache in self.caches:
            cache.fork(i, self.next_id)
        self.tokens[self.next_id] = list(self.tokens[i])
        self.namespaces[self.next_id] = self.namespaces[i]
        self.next_id += 1

    @precondition(lambda self: self.tokens)
    @rule(number=numbers, cut=st.integers(0, 30))
    def truncate(self, number: int, cut: int) -> None:
        i = self.pick(number)
        self.tokens[i] = self.tokens[i][: max(len(self.tokens[i]) - cut, 0)]
        for cache in self.caches:
            cache.truncate(i, len(self.tokens[i]))

    @precondition(lambda self: self.tokens)
    @rule(number=numbers, forget=st.booleans())
    def free(self, number: int, forget: bool) -> None:
        i = self.pick(number)
        for cache in self.caches:
            cache.free(i)
            if forget:
                cache.forget_prefixes()
        del self.tokens[i]

    @precondition(lambda self: self.tokens)
    @rule(number=numbers)
    def swap_out(self, number: int) -> None:
        i = self.pick(number)
        for cache in self.caches:
            cache.swap_out(i)
        self.swapped[i] = self.tokens.pop(i)

    @precondition(lambda self: self.swapped)
    @rule()
    def swap_in(self) -> None:
        i = next(iter(self.swapped))
        try:
            for cache in self.caches:
                cache.swap_in(i)
        except OutOfPagesError:
            assert i in self.ours.swapped_ids
            return
        self.tokens[i] = self.swapped.pop(i)

    @precondition(lambda self: self.tokens)
    @rule(number=numbers)
    def save_and_load(self, number: int) -> None:
        """Sequences of a file are in another cache what they were."""
        ids = [i for at, i in enumerate(self.tokens) if number >> at & 1 or at == 0]
        split = self.ours.state.split
        other = make(num_pages=2 * PAGES, sink_len=split.sink_len, recent_len=self.ours.recent_len)
        with tempfile.TemporaryDirectory() as folder:
            path = save_sequences(self.ours, ids, Path(folder) / "saved.safetensors")
            assert load_sequences(other, path) == ids
        for i in ids:
            assert other.namespace(i) == self.namespaces[i]
            assert same(values(other, i), values(self.ours, i))

    @invariant()
    def caches_are_alike(self) -> None:
        if not hasattr(self, "caches"):
            return
        for cache in self.caches:
            check_invariants(cache)
            poison(cache, cache.state._free_seq_slots, cache.state.pool._free)
        assert set(self.ours.ids) == set(self.theirs.ids) == set(self.tokens)
        for i, tokens in self.tokens.items():
            assert self.ours.length(i) == self.theirs.length(i) == len(tokens)
            assert same(values(self.ours, i), values(self.theirs, i))
        assert self.ours.bad_rows.tolist() == [0, 0]

    @precondition(lambda self: self.tokens)
    @rule()
    def attend(self) -> None:
        ids = [i for i, tokens in self.tokens.items() if tokens]
        with self.batch.extend(ids, 0):
            assert_attends(self.batch, len(ids) % LAYERS, ids, [0] * len(ids), new_queries(4, 3))


LatentPages.TestCase.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLatentPages = LatentPages.TestCase
