"""16-bit first pages and last tokens beside an engine's pages: found, kept, never another's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engine_pages import exact
from relative_l2 import relative_l2

from kvquant import AttentionVariant, Basis, ShapeError, dequantize_pages
from kvquant.engine.contract import LayerRows, NewTokens
from kvquant.engine.settings import Settings
from kvquant.engine.step import FEW, append, attend, describe_step
from kvquant.engine.window import Window, WindowRows
from kvquant.rows.basis import LayerBasis
from kvquant.rows.slots import Split

HEADS, Q_HEADS, DIM, PAGE, RECENT, WIDTH = 2, 4, 64, 16, 24, 16
SCALE = DIM**-0.5


class Sequence:
    """Tokens, of which `length` are computed; those after the prompt come one at a time."""

    def __init__(self, tokens: list[int], prompt: int, pages: list[int]) -> None:
        self.tokens, self.prompt, self.pages = tokens, prompt, pages
        self.length = PAGE * len(pages)


class Engine:
    """Pages with a prefix cache. K and V of a token depend on all tokens up to it."""

    def __init__(self, num_pages: int, num_slots: int, drafts: int = 0, **layer: Any) -> None:
        layout = Settings("int4-g4", "int4-g4").layout(HEADS, DIM, DIM)
        split = Split(PAGE, RECENT, PAGE, drafts)
        self.window = Window(split, num_slots, num_pages, 8, 512, WIDTH, "cpu")
        rows = WindowRows.of(self.window, layout, torch.bfloat16)
        self.layer = LayerRows(layout, SCALE, window=rows, **layer)
        shape = num_pages, layout.num_kv_heads, PAGE, layout.token_bytes
        self.pages = torch.full(shape, 255, dtype=torch.uint8)
        self.drafts, self.free = drafts, list(range(1, num_pages))
        self.cached: dict[tuple[int, ...], int] = {}  # full pages, by all tokens up to their end
        self.users = dict.fromkeys(self.free, 0)
        self._values: dict[tuple[int, ...], torch.Tensor] = {}

    def values(self, tokens: list[int]) -> torch.Tensor:
        """K and V of the last one of tokens, [2, HEADS, DIM]."""
        key = tuple(tokens)
        if key not in self._values:
            seed = torch.Generator().manual_seed(hash(key) % (1 << 31))
            self._values[key] = torch.randn(2, HEADS, DIM, generator=seed).bfloat16().float()
        return self._values[key]

    def start(self, tokens: list[int], prompt: int) -> Sequence:
        """A new sequence, which reads no full page that is there already."""
        pages: list[int] = []
        while (end := PAGE * (len(pages) + 1)) < prompt and tuple(tokens[:end]) in self.cached:
            pages.append(self.cached[tuple(tokens[:end])])
        for page in pages:
            self.users[page] += 1
            if page in self.free:
                self.free.remove(page)
        return Sequence(tokens, prompt, pages)

    def stop(self, sequence: Sequence) -> None:
        for page in sequence.pages:
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)  # it may be found until it is taken

    def _grow(self, sequence: Sequence, end: int) -> None:
        while PAGE * len(sequence.pages) < end:
            page = self.free.pop(0)
            self.cached = {key: one for key, one in self.cached.items() if one != page}
            self.users[page] = 1
            sequence.pages.append(page)

    def schedule(self, sequence: Sequence, count: int) -> int:
        """Take pages for new tokens. Others find full ones of a prompt from now on, as in vLLM: in
        the step that will fill them, too."""
        count = min(count, max(sequence.prompt - sequence.length, 1 + self.drafts))
        end = sequence.length + count
        self._grow(sequence, end)
        for full in range(PAGE, min(end, sequence.prompt) + 1, PAGE):
            self.cached.setdefault(tuple(sequence.tokens[:full]), sequence.pages[full // PAGE - 1])
        return count

    def step(
        self, batch: list[Sequence], counts: list[int], rejected: list[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute new tokens, of which the last ones of each sequence may be rejected: q, out."""
        made, slots = [], []
        for one, count, wrong in zip(batch, counts, rejected or [0] * len(batch), strict=True):
            self._grow(one, one.length + count)
            for at in range(one.length, one.length + count):
                is_wrong = at >= one.length + count - wrong
                made.append(self.values(one.tokens[: at + 1] + [-1] * is_wrong))
                slots.append(one.pages[at // PAGE] * PAGE + at % PAGE)
            one.length += count
        table = torch.zeros(len(batch), WIDTH, dtype=torch.int32)
        for row, one in zip(table, batch, strict=True):
            row[: len(one.pages)] = torch.tensor(one.pages)
        lens = torch.tensor([one.length for one in batch], dtype=torch.int32)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        prefilling = lens - starts.diff() < torch.tensor([one.prompt for one in batch])
        new = NewTokens(table, lens, starts, lens, len(slots), 1 + self.drafts, prefilling)
        step = describe_step(new, self.window)
        (k, v), q = torch.stack(made, 1), torch.randn(len(slots), Q_HEADS, DIM)
        append(self.layer, k, v, self.pages, torch.tensor(slots))
        out = torch.full_like(q, torch.nan)
        attend(self.layer, step, q, k, v, self.pages, out)
        self.seen = [self.read(place, one) for place, one in enumerate(batch)]
        for one, wrong in zip(batch, rejected or [0] * len(batch), strict=True):
            one.length -= wrong
            for end in range(PAGE, one.length + 1, PAGE):
                self.cached.setdefault(tuple(one.tokens[:end]), one.pages[end // PAGE - 1])
        return q, out

    def packed(self, sequence: Sequence) -> list[torch.Tensor]:
        """K and V of the packed rows, [tokens, HEADS, DIM]."""
        token = torch.arange(sequence.length)
        slots = torch.tensor(sequence.pages)[token // PAGE] * PAGE + token % PAGE
        sides = zip(self.layer.layout.views(self.pages), self.layer.layout[:2], strict=True)
        return [dequantize_pages(rows, fmt, slots, torch.float32) for rows, fmt in sides]

    def read(self, place: int, one: Sequence) -> tuple[list[torch.Tensor], torch.Tensor]:
        """What a sequence of this step attends to: K and V, and whether they are of its slot."""
        step, split, kept = self.window.step, self.window.split, self.layer.window
        assert step is not None and kept is not None
        packed_len, exact_len = int(step.packed_lens[place]), int(step.exact_lens[place])
        assert packed_len + exact_len == one.length
        token, first = torch.arange(one.length), PAGE if exact_len else 0
        in_slot = (token < first) | (token >= first + packed_len)
        pages = step.block_table[place, : -(-packed_len // PAGE)].tolist()
        assert pages == one.pages[first // PAGE :][: len(pages)]
        row = torch.where(token < PAGE, token, PAGE + (token - PAGE) % split.ring_len)
        slots = torch.where(in_slot, int(step.seq_slots[place]) * split.exact_len + row, -1)
        sides = zip((kept.k_rows, kept.v_rows), (kept.k_format, kept.v_format), strict=True)
        found = [dequantize_pages(rows, fmt, slots, torch.float32) for rows, fmt in sides]
        where = in_slot[:, None, None]
        return [
            torch.where(where, x, y) for x, y in zip(found, self.packed(one), strict=True)
        ], in_slot


def tokens_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(100), k=count)


def kinds(engine: Engine, place: int, one: Sequence) -> list[str]:
    """For each token of the last step: "16", "packed", a packed value in a slot, or "wrong"."""
    (k, _), in_slot = engine.seen[place]
    packed = engine.packed(one)[0]
    found = []
    for at in range(one.length):
        true = engine.values(one.tokens[: at + 1])[0]
        if not in_slot[at]:
            found.append("packed" if torch.equal(k[at], packed[at]) else "wrong")
        elif torch.equal(k[at], true):
            found.append("16")
        else:
            is_packed = torch.equal(k[at], packed[at].bfloat16().float())
            found.append("refilled" if is_packed else "wrong")
        if (packed[at] - true).abs().max() > 0.5:
            found[-1] = "wrong"
    return found


def of_window(length: int) -> list[str]:
    packed = max(length - PAGE - RECENT, 0)
    return ["16"] * min(PAGE, length) + ["packed"] * packed + ["16"] * (length - packed - PAGE)


def test_a_sequence_keeps_its_first_page_and_last_tokens() -> None:
    engine = Engine(64, 3)
    one = engine.start(tokens_of(0, 100), 70)
    for count in [9, 30, 31, *30 * [1]]:
        engine.step([one], [count])
        assert kinds(engine, 0, one) == of_window(one.length)


def test_a_prefix_brings_its_first_page_in_16_bit() -> None:
    """A sequence behind it, too, whose prompt ends where a decoding one has one token more."""
    engine, tokens = Engine(64, 4), tokens_of(0, 81)
    first = engine.start(tokens, 80)
    engine.step([first], [80])
    for end in (70, 66):
        one = engine.start(tokens[:end], end)
        assert one.length == 64
        engine.step([one], [end - 64])
        told = kinds(engine, 0, one)
        assert told[:PAGE] == ["16"] * PAGE and told[64:] == ["16"] * (end - 64)
        # the first sequence has gone on to token 80: its slot has tokens 56 to 63 still
        assert told[end - RECENT : 64] == ["refilled"] * (80 - end) + ["16"] * 8
    engine.step([first], [1])
    assert kinds(engine, 0, first) == of_window(81)


def test_pages_that_another_sequence_fills_in_the_same_step() -> None:
    """Its tokens are in 16 bit in none of the slots of before."""
    engine = Engine(24, 4)
    for seed in range(3):  # pages that were others' first and last ones
        old = engine.start(tokens_of(seed, 90), 64 + seed)
        engine.step([old], [engine.schedule(old, 90)])
        engine.step([old], [engine.schedule(old, 1)])
        engine.stop(old)
    for end in (64, 80, 90, 75):
        tokens = tokens_of(end, 100)
        batch, counts = [], []
        for prompt in (end, end, 70, 66):
            batch.append(engine.start(tokens, prompt))
            counts.append(engine.schedule(batch[-1], 90))
        assert [one.length > 0 for one in batch] == [False, True, True, True]
        for more in ([*counts], *3 * [[1] * 4]):
            engine.step(batch, more)
            for place, one in enumerate(batch):
                told = kinds(engine, place, one)
                assert "wrong" not in told and told[-1] == "16", (end, place, told)
        for one in batch:
            engine.stop(one)


def test_without_a_slot_sequences_attend_to_packed_rows() -> None:
    engine = Engine(64, 2)
    both = [engine.start(tokens_of(i, 90), 60) for i in range(3)]
    engine.step(both, [60, 60, 60])
    assert [set(kinds(engine, i, one)) for i, one in enumerate(both)] == [
        {"16", "packed"},
        {"16", "packed"},
        {"packed"},
    ]
    engine.step(both, [1, 1, 1])  # a decoding sequence takes no slot: it would lack old tokens
    engine.stop(both[0])
    engine.step(both[1:], [1, 1])
    assert set(kinds(engine, 1, both[2])) == {"packed"}


def serve(engine: Engine, tokens: list[int], prompt: int = 0) -> set[str]:
    """Kinds of the first page's tokens after a sequence's last step."""
    one = engine.start(tokens, prompt or len(tokens))
    engine.step([one], [one.prompt - one.length])
    while one.length < len(tokens):
        engine.step([one], [1])
    engine.stop(one)
    return set(kinds(engine, 0, one)[:PAGE])


def take_slots(engine: Engine, count: int) -> None:
    """By prompts that fill no page."""
    for seed in range(count):
        serve(engine, tokens_of(10 + seed, PAGE - 1))


def test_first_tokens_outlast_their_slot() -> None:
    """They come back in 16 bit until other prompts have filled enough first pages."""
    engine, tokens = Engine(64, 10), tokens_of(0, 60)
    assert engine.window.num_slots == 8 and engine.window.num_firsts == 4
    serve(engine, tokens)
    take_slots(engine, 8)
    assert serve(engine, tokens[:50]) == {"16"}
    for seed in range(30, 38):
        serve(engine, tokens_of(seed, PAGE + 1))
    assert serve(engine, tokens[:50]) == {"refilled"}


def test_first_tokens_do_not_outlast_their_page() -> None:
    engine, other = Engine(12, 10), tokens_of(1, 20)
    serve(engine, tokens_of(0, 20))
    take_slots(engine, 9)
    serve(engine, other, 10)  # it has the first one's pages, and fills the first by decoding
    take_slots(engine, 8)
    assert serve(engine, other) == {"refilled"}


def test_first_tokens_that_a_decoding_sequence_completes_are_not_kept() -> None:
    """Beside a prompt, which keeps its own."""
    engine, tokens = Engine(64, 10), tokens_of(0, 60)
    one, other = engine.start(tokens, 10), engine.start(tokens_of(1, 40), 40)
    engine.step([one], [10])
    for _ in range(PAGE - 11):
        engine.step([one], [1])
    engine.step([one, other], [1, 40])
    for sequence in (one, other):
        engine.stop(sequence)
    take_slots(engine, 8)
    assert serve(engine, tokens[:50]) == {"refilled"}
    take_slots(engine, 8)
    assert serve(engine, tokens_of(1, 40)) == {"16"}


def test_a_step_that_a_graph_may_replay_refills_no_slot() -> None:
    """All sequences have one token, one of them the last one of a prompt behind a prefix."""
    engine, tokens = Engine(64, 4), tokens_of(0, 81)
    first = engine.start(tokens, 80)
    engine.step([first], [80])
    one = engine.start(tokens[:65], 65)
    engine.step([first, one], [1, 1])
    assert engine.window.step is not None and engine.window.step.refill is None
    assert kinds(engine, 0, first) == of_window(81) and set(kinds(engine, 1, one)) == {"packed"}


@pytest.mark.parametrize("page", [4, 8])
def test_small_pages_keep_as_many_first_tokens_as_they_have(page: int) -> None:
    window = Window(Split(page, page, page), 10, 8, 8, 64, WIDTH, "cpu")
    layout = Settings("int4-g4", "int4-g4").layout(HEADS, DIM, DIM)
    rows = WindowRows.of(window, layout, torch.bfloat16)
    pages = torch.zeros(8, HEADS, page, layout.token_bytes, dtype=torch.uint8)
    views, lens = layout.views(pages), torch.tensor([page], dtype=torch.int32)
    window.begin(torch.ones(1, WIDTH, dtype=torch.int32), lens, [page], {0: 0})
    rows.k_rows[0] = 7  # the slot that the prompt takes
    rows.refill(*views, layout[:2])
    kept = rows.k_rows[window.num_slots :] == 7
    assert window.step is not None and int(window.step.seq_slots[0]) == 0
    assert int(kept.all(-1).sum()) == HEADS * page


@pytest.mark.parametrize(
    ("batch", "pages", "tokens"), [(9, WIDTH, 9), (8, WIDTH + 1, 8), (8, WIDTH, 513)]
)
def test_a_step_without_room_is_refused(batch: int, pages: int, tokens: int) -> None:
    window = Engine(64, 3).window
    counts = [tokens - batch + 1, *[1] * (batch - 1)]
    table, lens = torch.zeros(batch, pages, dtype=torch.int32), torch.tensor(counts).int()
    with pytest.raises(ShapeError, match=f"{batch} sequences, {pages} pages and {tokens} tokens"):
        window.begin(table, lens, counts, {})
    with pytest.raises(ShapeError, match="give a contiguous table"):
        window.begin(table[:2, :8:2], lens[:2], [1, 1], {})
    assert int(window._now) == 0


@pytest.mark.parametrize("seed", range(12))
def test_whatever_an_engine_does_no_row_is_another_ones(seed: int) -> None:
    """Prompts in chunks, shared prefixes, preemption, rejected drafts, and pages taken anew."""
    rng = random.Random(seed)
    drafts = (0, 3)[seed % 2]
    engine = Engine(48, rng.choice([2, 4, 10]), drafts)
    running: list[Sequence] = []
    waiting: list[Sequence] = []
    seen = dict.fromkeys(("16", "packed", "refilled", "wrong"), 0)
    for _ in range(80):
        for one in list(running):
            is_long = one.length + 8 > len(one.tokens)
            if is_long or rng.random() < 0.05 or (len(engine.free) < 24 and one is running[0]):
                engine.stop(one)
                running.remove(one)
                waiting += [one] * (not is_long)
        rng.shuffle(running)
        running.sort(key=lambda one: one.length < one.prompt)
        batch, counts, rejected = list(running), [], []
        for one in running:
            is_prompt = one.length < one.prompt
            most = rng.choice([1, 5, 40, FEW + 6]) if is_prompt else rng.randrange(1, 2 + drafts)
            counts.append(engine.schedule(one, most))
            rejected.append(0 if is_prompt else rng.randrange(counts[-1]))
        for _ in range(rng.choice([0, 0, 1, 2])):
            if len(running) == 5:
                break
            if waiting and rng.random() < 0.5:
                old = waiting.pop()
                running.append(engine.start(old.tokens, old.length + 1))
            else:
                prefix = tokens_of(100 + rng.randrange(3), rng.choice([0, 16, 33, 48, 60]))
                prompt = prefix + tokens_of(rng.randrange(4), 1 + rng.randrange(60))
                running.append(engine.start(prompt + tokens_of(rng.randrange(3), 60), len(prompt)))
            batch.append(running[-1])
            counts.append(engine.schedule(batch[-1], rng.choice([1, 40, FEW + 6])))
            rejected.append(0)
        if not batch:
            continue
        _, out = engine.step(batch, counts, rejected)
        assert not out.isnan().any()
        for place, one in enumerate(batch):
            for kind in kinds(engine, place, one):
                seen[kind] += 1
            assert seen["wrong"] == 0, (seed, place, kinds(engine, place, one))
    assert seen["wrong"] == 0 < min(seen["16"], seen["packed"], seen["refilled"]), seen


VARIANTS: list[dict[str, Any]] = [
    {},
    {"soft_cap": 5.0, "window": 30},
    {"sink_logits": torch.linspace(-2, 2, Q_HEADS)},
]


@pytest.mark.parametrize("has_basis", [False, True], ids=["", "basis"])
@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "gemma", "gpt-oss"])
def test_attention_reads_16_bit_where_there_is(variant: dict[str, Any], has_basis: bool) -> None:
    """Decoding sequences, one with drafts, chunks of a few tokens and of many, a whole prompt."""
    given: dict[str, Any] = {"variant": AttentionVariant(**variant) if variant else None}
    if has_basis:
        matrix = torch.eye(DIM) + 0.05 * torch.randn(HEADS, DIM, DIM)
        given["basis"] = LayerBasis(
            Basis(torch.randn(HEADS, DIM), matrix), Basis(torch.zeros(HEADS, DIM))
        )
    engine = Engine(64, 6, 2, **given)

    def decoded(sides: Any) -> list[torch.Tensor]:
        bases = given.get("basis") or (None, None)
        return [
            x if basis is None else basis.decode(x.transpose(0, 1)[None])[0].transpose(0, 1)
            for basis, x in zip(bases, sides, strict=True)
        ]

    batch = [engine.start(tokens_of(i, 220), prompt) for i, prompt in enumerate([50, 90, 150, 200])]
    engine.step(batch, [50, 90, 100, 60])
    batch.append(engine.start(tokens_of(9, 70), 70))
    before = [engine.seen[i][0] for i in range(4)]
    counts = [1, 3, FEW - 14, FEW + 6, 70]
    q, out = engine.step(batch, counts)
    for place, one in enumerate(batch):
        k, v = decoded(engine.seen[place][0])
        new = slice(sum(counts[:place]), sum(counts[: place + 1]))
        if counts[place] > FEW:  # a prompt's own tokens are read as they are
            own = [engine.values(one.tokens[: i + 1]) for i in range(one.length)][-counts[place] :]
            past = decoded(before[place]) if place < len(before) else [k[:0], v[:0]]
            k, v = (torch.cat([x, y]) for x, y in zip(past, torch.stack(own, 1), strict=True))
        limit = 2**-7 if has_basis else 2e-5  # 16-bit rows are rounded in the basis
        expected = exact(q[new], k, v, AttentionVariant(**variant), SCALE)
        assert relative_l2(out[new], expected) < limit, place
