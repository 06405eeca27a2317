"""16-bit first pages and last tokens beside an engine's pages: found, kept, never another's."""

from __future__ import annotations

import random

import pytest
import torch

from kvquant import dequantize_pages
from kvquant.engine.contract import LayerRows, NewTokens
from kvquant.engine.settings import Settings
from kvquant.engine.step import append, attend, describe_step
from kvquant.engine.window import Window, WindowRows
from kvquant.rows.slots import Split

HEADS, Q_HEADS, DIM, PAGE, RECENT = 2, 4, 64, 16, 24
SCALE = DIM**-0.5


class Sequence:
    def __init__(self, tokens: list[int], pages: list[int], length: int) -> None:
        self.tokens, self.pages, self.length = tokens, pages, length  # length: computed ones
        self.prompt = len(tokens)


class Engine:
    """Pages with a prefix cache, and sequences whose tokens have K and V by their history."""

    def __init__(self, num_pages: int, num_slots: int, max_seqs: int, drafts: int = 0) -> None:
        layout = Settings("int4-g4", "int4-g4").layout(HEADS, DIM, DIM)
        split = Split(PAGE, RECENT, PAGE, drafts)
        self.window = Window(split, num_slots, num_pages, max_seqs, 512, 16, "cpu")
        rows = WindowRows.of(self.window, layout, torch.bfloat16)
        self.layer = LayerRows(layout, SCALE, window=rows)
        shape = num_pages, layout.slots, PAGE, layout.slot_bytes
        self.pages = torch.full(shape, 255, dtype=torch.uint8)
        self.drafts, self.free = drafts, list(range(1, num_pages))
        self.cached: dict[tuple[int, ...], int] = {}  # full pages by all tokens up to their end
        self.users: dict[int, int] = {}

    def values(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the last of tokens, which depend on all of them."""
        seed = hash(tuple(tokens)) % (1 << 31)
        made = torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(seed))
        return made.bfloat16()

    def start(self, tokens: list[int]) -> Sequence:
        """A new sequence behind the pages that an earlier one has filled."""
        pages: list[int] = []
        while (end := PAGE * (len(pages) + 1)) < len(tokens):
            page = self.cached.get(tuple(tokens[:end]))
            if page is None:
                break
            pages.append(page)
        for page in pages:
            self.take(page)
        return Sequence(tokens, pages, PAGE * len(pages))

    def take(self, page: int) -> None:
        self.users[page] = self.users.get(page, 0) + 1
        if page in self.free:
            self.free.remove(page)

    def stop(self, sequence: Sequence) -> None:
        for page in sequence.pages:
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)  # its content may be found until it is taken
        sequence.pages, sequence.length = [], 0

    def grow(self, sequence: Sequence, end: int) -> None:
        while PAGE * len(sequence.pages) < end:
            page = self.free.pop(0)
            for key in [key for key, one in self.cached.items() if one == page]:
                del self.cached[key]
            self.users[page] = 1
            sequence.pages.append(page)

    def step(self, batch: list[Sequence], counts: list[int]) -> tuple[torch.Tensor, ...]:
        """Compute so many tokens of each: q, out; tokens that are no prompt come first."""
        k, v, slots = [], [], []
        for one, count in zip(batch, counts, strict=True):
            self.grow(one, one.length + count)
            for at in range(one.length, one.length + count):
                made = self.values(one.tokens[: at + 1])
                k.append(made[0])
                v.append(made[1])
                slots.append(one.pages[at // PAGE] * PAGE + at % PAGE)
        table = torch.zeros(len(batch), 16, dtype=torch.int32)
        for row, one in zip(table, batch, strict=True):
            row[: len(one.pages)] = torch.tensor(one.pages)
        lens = torch.tensor([one.length + n for one, n in zip(batch, counts)], dtype=torch.int32)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        prefilling = torch.tensor([one.length < one.prompt for one in batch])
        new = NewTokens(table, lens, starts, lens, len(k), 1 + self.drafts, prefilling)
        step = describe_step(new, self.window)
        keys, values, q = torch.stack(k), torch.stack(v), torch.randn(len(k), Q_HEADS, DIM)
        append(self.layer, keys, values, self.pages, torch.tensor(slots))
        out = torch.full((len(k), Q_HEADS, DIM), torch.nan).bfloat16()
        attend(self.layer, step, q.bfloat16(), keys, values, self.pages, out)
        for one, count in zip(batch, counts, strict=True):
            one.length += count
            for end in range(PAGE, one.length + 1, PAGE):
                self.cached.setdefault(tuple(one.tokens[:end]), one.pages[end // PAGE - 1])
        return q.bfloat16(), out, starts

    def kept(self, place: int, sequence: Sequence) -> list[str]:
        """What a sequence of the last step attends to, for each token: "16", "packed", both alike
        in its row, or "wrong"."""
        step, split, found = self.window.step, self.window.split, []
        assert step is not None
        packed_len, exact_len = int(step.packed_lens[place]), int(step.exact_lens[place])
        assert packed_len + exact_len == sequence.length
        rows, fmt = self.layer.layout.views(self.pages)[0], self.layer.layout.k_format
        first = PAGE if exact_len else 0
        for at in range(sequence.length):
            true = self.values(sequence.tokens[: at + 1])[0].float()
            slot = sequence.pages[at // PAGE] * PAGE + at % PAGE
            packed = dequantize_pages(rows, fmt, torch.tensor([slot]), torch.float32)[0]
            assert (packed - true).abs().max() < 0.5
            if first <= at < first + packed_len:
                in_table = int(step.block_table[place, (at - first) // PAGE])
                assert in_table == sequence.pages[at // PAGE]
                found.append("packed")
                continue
            row = at if at < PAGE else PAGE + (at - PAGE) % split.ring_len
            slot = int(step.seq_slots[place]) * split.exact_len + row
            exact = self.layer.window
            x = dequantize_pages(exact.k_rows, exact.k_format, torch.tensor([slot]), torch.float32)
            is_true, is_packed = (
                torch.equal(x[0], true),
                torch.equal(x[0], packed.bfloat16().float()),
            )
            found.append("16" if is_true else "packed in slot" if is_packed else "wrong")
        return found


def tokens_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(100), k=count)


def test_a_sequence_keeps_its_first_page_and_last_tokens() -> None:
    engine = Engine(64, 3, 3)
    one = engine.start(tokens_of(0, 100))
    engine.step([one], [70])
    while one.length < 100:
        engine.step([one], [1])
        kept = engine.kept(0, one)
        assert kept == ["16"] * PAGE + ["packed"] * (len(kept) - PAGE - RECENT) + ["16"] * RECENT


@pytest.mark.parametrize("seed", range(20))
def test_whatever_an_engine_does_no_row_is_another_ones(seed: int) -> None:
    """Prompts in chunks, shared prefixes, forks, preemption, drafts, and pages taken anew."""
    rng = random.Random(seed)
    drafts = rng.choice([0, 0, 3])
    engine = Engine(48, rng.choice([2, 4, 6]), 5, drafts)
    families = [tokens_of(100 + i, 60) for i in range(3)]
    running: list[Sequence] = []
    seen = {"16": 0, "packed": 0, "packed in slot": 0}
    waiting: list[Sequence] = []
    for _ in range(80):
        if len(running) < 5 and rng.random() < 0.4:
            if waiting and rng.random() < 0.5:
                old = waiting.pop()
                sequence = engine.start(old.tokens)
                sequence.prompt = old.prompt
            else:
                prefix = rng.choice(families)[: rng.choice([0, 16, 33, 48, 60])]
                more = tokens_of(rng.randrange(4), 1 + rng.randrange(120 - len(prefix)))
                sequence = engine.start((prefix + more)[:120])
            sequence.tokens = sequence.tokens + tokens_of(rng.randrange(3), 60)
            running.append(sequence)
        for one in list(running):
            over = one.length + 8 > len(one.tokens)
            if over or rng.random() < 0.05 or (len(engine.free) < 20 and one is running[0]):
                if not over:
                    waiting.append(Sequence(one.tokens[: one.length + 1], [], 0))
                    waiting[-1].prompt = one.prompt
                engine.stop(one)
                running.remove(one)
        if not running:
            continue
        decodes = [one for one in running if one.length >= one.prompt]
        prompts = [one for one in running if one.length < one.prompt]
        rng.shuffle(decodes)
        counts = [rng.randrange(1, 2 + drafts) for _ in decodes]
        chunks = [min(rng.choice([1, 5, 40, 70]), one.prompt - one.length) for one in prompts]
        # an engine calls what has few new tokens and a past a decoding sequence
        order = sorted(
            range(len(prompts)), key=lambda i: chunks[i] > 1 + drafts or not prompts[i].length
        )
        batch = decodes + [prompts[i] for i in order]
        counts = counts + [chunks[i] for i in order]
        engine.step(batch, counts)
        for place, one in enumerate(batch):
            kept = engine.kept(place, one)
            assert "wrong" not in kept, (seed, place, kept)
            for name in seen:
                seen[name] += kept.count(name)
        for one, count in zip(batch, counts, strict=True):
            if drafts and one in decodes:  # some are not accepted
                one.length -= rng.randrange(count)
    assert all(seen.values()), seen
