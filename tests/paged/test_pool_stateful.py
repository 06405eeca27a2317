"""PagePool under any sequence of calls, against models of its sequences and of a device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from invariants import check_pool
from slow_cases import mark_slow

from kvquant.errors import OutOfPagesError
from kvquant.paged.pool import PagePool

NUM_PAGES = 9
MOST = 5  # sequences, and heads that are known; there are 7 heads
OPERATIONS = {40: 1_000, 240: 15_000}  # at least, of so many examples: short ones come first
numbers = st.integers(0, 2**20)


def seen(pool: PagePool, ids: Sequence[int]) -> object:
    tables = [(pool.block_table(i), pool._sequences[i].length) for i in ids]
    return tables, pool.num_free, len(pool._cached)


class Model:
    """A sequence as it should be: one cell per token, which stands for all tokens up to it."""

    def __init__(self, tokens: list[int], cells: list[int], known: int) -> None:
        self.tokens, self.cells, self.known = tokens, cells, known

    def first(self, length: int) -> Model:
        return Model(self.tokens[:length], self.cells[:length], min(self.known, length))


class PoolMachine(RuleBasedStateMachine):
    """A pool, its sequences' models, and the contents that a device would have in its pages."""

    operations = 0

    @initialize(page_size=st.integers(1, 3), root_len=st.integers(0, 1))
    def start(self, page_size: int, root_len: int) -> None:
        self.pool = PagePool(NUM_PAGES, page_size, root_len=root_len, num_roots=MOST)
        self.size, self.root_len = page_size, root_len
        self.models: dict[int, Model] = {}
        self.contents: list[list[int | None]] = [[None] * page_size for _ in range(NUM_PAGES)]
        self.cell_of: dict[tuple[int, int], int] = {}
        self.next_id = 0

    def pick(self, number: int) -> int:
        return list(self.models)[number % len(self.models)]

    def cells(self, tokens: Sequence[int], before: Sequence[int] = ()) -> list[int]:
        """The cell of each token: the same for the same tokens after the same tokens."""
        cells, last = [], before[-1] if before else 0
        for token in tokens:
            last = self.cell_of.setdefault((last, token), len(self.cell_of) + 1)
            cells.append(last)
        return cells

    def in_pages(self, length: int) -> int:
        return max(length - self.root_len, 0)

    def whole(self, model: Model) -> int:
        """Known tokens that fill pages."""
        return self.in_pages(model.known) // self.size * self.size

    def used(self) -> set[int]:
        return {page for i in self.models for page in self.pool.block_table(i)}

    def step(self, new: dict[int, list[int]], known: bool = True) -> bool:
        """One step of several sequences, as a device makes it: all copies at once, then rows."""
        PoolMachine.operations += max(len(new), 1)
        ids, used = list(new), self.used()
        lengths = {i: len(self.models[i].cells) for i in ids}
        counts = [
            self.in_pages(lengths[i] + len(new[i])) - self.pool._sequences[i].length for i in ids
        ]
        before, tables = seen(self.pool, list(self.models)), [self.pool.block_table(i) for i in ids]
        fits = self.pool.can_append(ids, counts)
        try:
            growth = self.pool.append(ids, counts)
        except OutOfPagesError:
            assert not fits
            assert seen(self.pool, list(self.models)) == before
            return False
        assert fits
        pages = [page for _, _, page in growth.entries]
        assert not used & set(pages) and len(set(pages)) == len(pages)
        for place, at, page in growth.entries:
            assert self.pool.block_table(ids[place])[at] == page
            self.contents[page] = [None] * self.size
        for source, target in growth.copies:
            assert source not in pages and target in pages
            assert any(table and source == table[-1] for table in tables)
            self.contents[target] = list(self.contents[source])
        for i in ids:
            self.write(i, new[i], known)
        for i in ids:
            self.pool.insert(i, self.models[i].tokens[: self.models[i].known])
        return True

    def write(self, i: int, tokens: list[int], known: bool) -> None:
        model, table = self.models[i], self.pool.block_table(i)
        start = len(model.cells)
        model.known += len(tokens) if known and model.known == start else 0
        model.tokens += tokens
        model.cells += self.cells(tokens, model.cells)
        others = {page for j in self.models if j != i for page in self.pool.block_table(j)}
        for at in range(self.in_pages(start), self.in_pages(len(model.cells))):
            assert table[at // self.size] not in others, "a shared page is written"
            self.contents[table[at // self.size]][at % self.size] = model.cells[self.root_len + at]

    @rule(number=numbers, count=st.integers(0, 9), room=st.integers(0, 12))
    def allocate(self, number: int, count: int, room: int) -> None:
        if len(self.models) == MOST:
            self.free(number)
        tokens = [number % 7, *(number >> bit & 1 for bit in range(count))][:count]
        expected, i = self.pool.match_prefix(tokens), self.next_id
        before = seen(self.pool, list(self.models))
        try:
            present, head = self.pool.allocate(i, tokens, room)
        except OutOfPagesError:
            assert seen(self.pool, list(self.models)) == before and i not in self.pool._sequences
            return
        PoolMachine.operations += 1
        assert present == expected <= count and present % self.size == 0
        assert (head is None) == (present == 0)
        length = present and present + self.root_len
        self.models[i] = Model(tokens, self.cells(tokens), length).first(length)
        self.next_id += 1
        self.step({i: tokens[length:]})

    @rule(number=numbers, count=st.integers(0, 4), known=st.booleans())
    def append(self, number: int, count: int, known: bool) -> None:
        if self.models:
            self.step(
                {self.pick(number): [number >> bit & 1 for bit in range(4, 4 + count)]}, known
            )

    @rule(number=numbers)
    def append_to_some(self, number: int) -> None:
        ids = [i for at, i in enumerate(self.models) if number >> at & 1]
        counts = [number >> 2 * at & 3 for at in range(3, 3 + MOST)]
        self.step({i: [number >> 19] * n for i, n in zip(ids, counts, strict=False)})

    @rule(number=numbers)
    def fork(self, number: int) -> None:
        if 0 < len(self.models) < MOST:
            PoolMachine.operations += 1
            i = self.pick(number)
            self.pool.fork(i, self.next_id)
            self.models[self.next_id] = self.models[i].first(len(self.models[i].cells))
            self.next_id += 1

    @rule(number=numbers, cut=st.integers(0, 9))
    def truncate(self, number: int, cut: int) -> None:
        if self.models:
            PoolMachine.operations += 1
            i = self.pick(number)
            length = max(len(self.models[i].cells) - cut, 0)
            self.pool.truncate(i, self.in_pages(length))
            self.models[i] = self.models[i].first(length)

    @rule(number=numbers)
    def free(self, number: int) -> None:
        if self.models:
            PoolMachine.operations += 1
            i = self.pick(number)
            self.pool.free(i)
            model = self.models.pop(i)
            known = model.tokens[: model.known]
            assert self.pool.match_prefix(known) == self.whole(model)

    @rule(number=numbers)
    def forget(self, number: int) -> None:
        if number % 3 == 0:
            self.pool.forget_all()
            for model in self.models.values():
                assert not self.pool.match_prefix(model.tokens)
                model.known = 0

    @invariant()
    def every_sequence_has_its_contents(self) -> None:
        check_pool(self.pool)
        assert self.pool.num_free == NUM_PAGES - len(self.used())
        for i, model in self.models.items():
            length = self.in_pages(len(model.cells))
            assert self.pool._sequences[i].length == length
            rows = [cell for page in self.pool.block_table(i) for cell in self.contents[page]]
            assert rows[:length] == model.cells[self.root_len :][:length]
            assert self.pool.match_prefix(model.tokens[: model.known]) == self.whole(model)


@pytest.mark.parametrize("examples", mark_slow([40, 240], [40]))
def test_any_operations_keep_contents_and_pages(examples: int) -> None:
    PoolMachine.operations = 0
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=200, suppress_health_check=list(HealthCheck)
        ),
    )
    assert PoolMachine.operations >= OPERATIONS[examples]
