"""PagePool under any sequence of calls, against models of its sequences and of a device; 20 s."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvquant.errors import OutOfPagesError
from kvquant.pagepool import Growth, PagePool

NUM_PAGES = 9
OPERATIONS = 50_000
numbers = st.integers(0, 2**20)


def seen(pool: PagePool, ids: Sequence[int]) -> object:
    tables = [(pool.block_table(i), pool.length(i)) for i in ids]
    return tables, pool.num_free, pool.num_cached


class Model:
    """A sequence as it should be: one cell per token, which stands for all tokens up to it."""

    def __init__(self, tokens: list[int], cells: list[int], known: int) -> None:
        self.tokens, self.cells, self.known = tokens, cells, known

    def first(self, length: int) -> Model:
        return Model(self.tokens[:length], self.cells[:length], min(self.known, length))


class PoolMachine(RuleBasedStateMachine):
    """A pool, its sequences' models, and the contents that a device would have in its pages."""

    operations = 0

    @initialize(page_size=st.integers(1, 3))
    def start(self, page_size: int) -> None:
        self.pool, self.size = PagePool(NUM_PAGES, page_size), page_size
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

    def used(self) -> set[int]:
        return {page for i in self.models for page in self.pool.block_table(i)}

    def grow(self, i: int, tokens: list[int], known: bool) -> Growth | None:
        """Append without touching contents; None when out of pages."""
        PoolMachine.operations += 1
        model, used, ids = self.models[i], self.used(), list(self.models)
        before, table = seen(self.pool, ids), self.pool.block_table(i)
        fits = self.pool.can_append([i], len(tokens))
        try:
            growth = self.pool.append(i, len(tokens), tokens if known else None)
        except OutOfPagesError:
            assert not fits
            assert seen(self.pool, ids) == before
            return None
        assert fits
        taken = [*growth.new_pages, *(target for _, target in growth.copies)]
        assert not used & set(taken) and len(set(taken)) == len(taken)
        assert all(source == table[-1] for source, _ in growth.copies)
        model.known += len(tokens) if known and model.known == len(model.cells) else 0
        model.tokens += tokens
        model.cells += self.cells(tokens, model.cells)
        return growth

    def write(self, ids: list[int], growths: list[Growth], count: int) -> None:
        """What a device does for one step of several sequences: all copies at once, then rows."""
        copies = [pair for growth in growths for pair in growth.copies]
        sources, targets = {source for source, _ in copies}, [target for _, target in copies]
        assert not sources & set(targets) and len(set(targets)) == len(targets)
        for page in targets + [page for growth in growths for page in growth.new_pages]:
            self.contents[page] = [None] * self.size
        for source, target in copies:
            self.contents[target] = list(self.contents[source])
        for i in ids:
            table, cells = self.pool.block_table(i), self.models[i].cells
            others = {page for j in self.models if j != i for page in self.pool.block_table(j)}
            for at in range(len(cells) - count, len(cells)):
                assert table[at // self.size] not in others, "a shared page is written"
                self.contents[table[at // self.size]][at % self.size] = cells[at]

    def step(self, ids: list[int], tokens: list[int], known: bool = True) -> bool:
        growths = {i: self.grow(i, tokens, known) for i in ids}
        done = {i: growth for i, growth in growths.items() if growth is not None}
        self.write(list(done), list(done.values()), len(tokens))
        return len(done) == len(ids)

    @rule(number=numbers, count=st.integers(0, 9))
    def allocate(self, number: int, count: int) -> None:
        if len(self.models) == 5:
            self.free(number)
        tokens = [number >> bit & 1 for bit in range(count)]
        expected, i = self.pool.match_prefix(tokens), self.next_id
        present = self.pool.allocate(i, tokens)
        PoolMachine.operations += 1
        assert present == expected <= count and present % self.size == 0
        self.models[i] = Model(tokens, self.cells(tokens), present).first(present)
        self.next_id += 1
        self.step([i], tokens[present:])

    @rule(number=numbers, count=st.integers(0, 4), known=st.booleans())
    def append(self, number: int, count: int, known: bool) -> None:
        if self.models:
            tokens = [number >> bit & 1 for bit in range(4, 4 + count)]
            self.step([self.pick(number)], tokens, known)

    @rule(number=numbers, count=st.integers(0, 3))
    def append_to_some(self, number: int, count: int) -> None:
        ids = [i for at, i in enumerate(self.models) if number >> at & 1]
        fits = self.pool.can_append(ids, count)
        assert self.step(ids, [number >> 9 & 1] * count) == fits

    @rule(number=numbers)
    def fork(self, number: int) -> None:
        if 0 < len(self.models) < 5:
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
            self.pool.truncate(i, length)
            self.models[i] = self.models[i].first(length)

    @rule(number=numbers)
    def free(self, number: int) -> None:
        if self.models:
            PoolMachine.operations += 1
            i = self.pick(number)
            self.pool.free(i)
            model = self.models.pop(i)
            whole = model.known // self.size * self.size
            assert self.pool.match_prefix(model.tokens[: model.known]) == whole

    @invariant()
    def every_sequence_has_its_contents(self) -> None:
        self.pool.check()
        assert self.pool.num_free == NUM_PAGES - len(self.used())
        for i, model in self.models.items():
            assert self.pool.length(i) == len(model.cells)
            rows = [cell for page in self.pool.block_table(i) for cell in self.contents[page]]
            assert rows[: len(model.cells)] == model.cells
            whole = model.known // self.size * self.size
            assert self.pool.match_prefix(model.tokens[: model.known]) == whole


def test_any_operations_keep_contents_and_pages() -> None:
    PoolMachine.operations = 0
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=600, stateful_step_count=200, suppress_health_check=list(HealthCheck)
        ),
    )
    assert PoolMachine.operations >= OPERATIONS
