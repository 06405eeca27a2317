"""Paged caches of both kinds under any calls, against lists of tokens with their values; 20 s.

As a script it makes random calls on a device until the time is up:

    PYTHONPATH=.:tests/support python tests/paged/test_stateful.py --device cuda --seconds 600
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
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
from paged_cases import poison
from slow_cases import mark_slow

from kvquant import LatentFormat, LatentPagedBatch, LatentPagedKVCache, RowFormat, dequantize_rows
from kvquant.errors import OutOfPagesError, ShapeError
from kvquant.io.sequences import load_sequences, save_sequences
from kvquant.ops.quantize import quantize_calibrated
from kvquant.paged import shared_prefix as sharedprefix
from kvquant.paged import state as paged_state
from kvquant.paged.batch import PagedBatch
from kvquant.paged.cache import PagedKVCache
from kvquant.rows.basis import Basis, LayerBasis
from kvquant.rows.quantize import feedback_matrix

LAYERS, HEADS, DIM, PAGE, PAGES, SEQ_SLOTS, MAX = 2, 1, 64, 16, 9, 4, 70
LATENTS = LatentFormat.parse("int8-g4+int8-g8", 256, 32)
FORMATS = {
    "heads": (RowFormat.parse("int4-g4", DIM), RowFormat.parse("int8", DIM)),
    "latents": LATENTS.parts,
}
NAMESPACES = [None, "one", "two"]
LENGTHS = [(2, 3), (0, 0), (3, 0), (0, 5), (1, 20)]
SHARES = [True, False, None]
WINDOWS: list[tuple[int | None, ...]] = [(None, None), (None, 12), (7, None), (20, 12), (9, 9)]
numbers = st.integers(0, 2**24)


@dataclass(frozen=True)
class Token:
    """A token, and a cell that stands for it after all tokens before it."""

    id: int
    cell: int
    known: bool
    packed: bool = False


def make_basis() -> LayerBasis:
    """A basis of each kind; the matrix is exact in any order of summation."""
    matrix = -2 * torch.eye(DIM)[torch.randperm(DIM)].expand(HEADS, DIM, DIM)
    weights = torch.randn(HEADS, DIM, DIM).double()
    feedback = feedback_matrix(weights @ weights.mT + torch.eye(DIM)).float()
    k = Basis(torch.randn(HEADS, DIM), matrix, torch.full((HEADS,), 0.9), feedback)
    return LayerBasis(k, Basis(torch.randn(HEADS, DIM)))


class Values:
    """K and V of every cell in every layer, 16-bit values and what they become when packed.

    kind: of rows; of latents K is the latent, V the RoPE part; basis: what they are stored as;
    rounds: whether they are rounded to 16 bit before.
    """

    def __init__(self, kind: str, basis: LayerBasis, rounds: bool) -> None:
        self.formats, self.basis, self.rounds = FORMATS[kind], basis, rounds
        self.cells: dict[tuple[int, int], int] = {}
        self.new, self.exact, self.packed = (
            [torch.empty(LAYERS, 0, HEADS, fmt.head_dim) for fmt in self.formats] for _ in range(3)
        )

    def cell(self, before: int, token: int) -> int:
        found = self.cells.setdefault((before, token), len(self.cells) + 1)
        if found >= self.exact[0].shape[1]:
            for side, (basis, fmt) in enumerate(zip(self.basis, self.formats, strict=True)):
                new = torch.randn(LAYERS, 256, HEADS, fmt.head_dim).bfloat16().float()
                stored = (x.transpose(1, 2) for x in self.stored(new.transpose(1, 2), basis, fmt))
                for held, more in zip(
                    (self.new, self.exact, self.packed), (new, *stored), strict=True
                ):
                    held[side] = torch.cat([held[side], more], 1)
        return found

    def stored(
        self, x: torch.Tensor, basis: Basis, fmt: RowFormat
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is read of rows that are kept in 16 bit, and of packed ones."""
        rows = basis.encode(x)
        if self.rounds:
            rows = rows.bfloat16().float()
        packed = dequantize_rows(
            quantize_calibrated(rows, fmt, clip=basis.clip, feedback=basis.feedback), fmt
        )
        return basis.decode(rows), basis.decode(packed)

    def of(self, tokens: list[Token], layer: int) -> list[torch.Tensor]:
        """K and V of tokens in a layer: each [HEADS, tokens, dim]."""
        cells = torch.tensor([token.cell for token in tokens], dtype=torch.int64)
        packed = torch.tensor([token.packed for token in tokens], dtype=torch.bool)[:, None, None]
        return [
            torch.where(packed, rounded[layer][cells], exact[layer][cells]).transpose(0, 1)
            for exact, rounded in zip(self.exact, self.packed, strict=True)
        ]


class PagedMachine(RuleBasedStateMachine):
    """A paged cache beside its model; free pages and sequence slots hold NaN.

    Windows keep 8 tokens more in sight than they need, and have 6 frames.
    """

    device = "cpu"
    shared = 0  # steps in which a prefix was read once for several sequences
    found = 0  # sequences that began with a prefix before which a window sees nothing
    lost = 0  # pages that sequences saw no more in a window

    @initialize(
        lengths=st.sampled_from(LENGTHS),
        shared_prefix=st.sampled_from(SHARES),
        in_basis=st.booleans(),
        windows=st.sampled_from(WINDOWS),
        page=st.sampled_from([PAGE, PAGE, 1]),
        kind=st.sampled_from(["heads", "heads", "latents"]),
    )
    def start(
        self,
        lengths: tuple[int, int],
        shared_prefix: bool | None,
        in_basis: bool,
        windows: tuple[int | None, ...],
        page: int,
        kind: str,
    ) -> None:
        torch.manual_seed(0)
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the tensors are small: several would wait for one another
        self.patch = pytest.MonkeyPatch()
        for name in ("FIXED", "FIXED_LATENT"):  # None: in every step that could
            self.patch.setattr(sharedprefix, name, -math.inf)
        self.patch.setattr(paged_state, "SPARE", 8)
        self.patch.setattr(paged_state, "held_pages", lambda *_: 0)
        self.sinks, self.recent = lengths
        self.kind, self.windows = kind, windows if kind == "heads" else (None, None)
        self.page, self.pages = page, PAGES * PAGE // page
        basis = LayerBasis(*(Basis(torch.zeros(HEADS, fmt.head_dim)) for fmt in FORMATS[kind]))
        options: Any = {"max_num_seqs": SEQ_SLOTS, "max_seq_len": MAX, "page_size": self.page}
        options |= {"sink_len": self.sinks, "recent_len": self.recent, "rollback_len": 0}
        options |= {"device": self.device}
        sizes: Any = SEQ_SLOTS, 3 * MAX
        if kind == "heads":
            basis, bases = (one := make_basis(), [one] * LAYERS) if in_basis else (basis, None)
            k_format, v_format = FORMATS[kind]
            options |= {"k_format": k_format, "v_format": v_format, "windows": windows}
            options |= {"bases": bases, "chunk_len": 2 * PAGE}
            self.cache = PagedKVCache(LAYERS, HEADS, DIM, self.pages, **options)
            self.batch: Any = PagedBatch(self.cache, *sizes, shared_prefix=shared_prefix)
        else:
            options |= {"fmt": LATENTS, "latent_dim": 256, "rope_dim": 32}
            self.cache = LatentPagedKVCache(LAYERS, self.pages, **options)
            self.batch = LatentPagedBatch(self.cache, *sizes, shared_prefix=shared_prefix)
        self.values, self.next_id, self.turn = Values(kind, basis, any(lengths)), 0, 0
        self.live: dict[int, list[Token]] = {}
        self.swapped: dict[int, list[Token]] = {}
        self.namespaces: dict[int, str | None] = {}
        poison(self.cache)

    def teardown(self) -> None:
        self.patch.undo()
        torch.set_num_threads(self.threads)

    def pick(self, number: int, among: dict[int, list[Token]] | None = None) -> int:
        ids = list(self.live if among is None else among)
        return ids[number % len(ids)]

    def in_window(self, i: int, layer: int) -> list[torch.Tensor]:
        """K and V of a sequence that its next query sees in a layer."""
        window = self.windows[layer]
        return self.values.of(self.live[i][-window:] if window else self.live[i], layer)

    def chain(self, i: int, ids: list[int], before: list[Token], known: bool) -> list[Token]:
        """Tokens after others, of a sequence; the first ones after its namespace."""
        start = -NAMESPACES.index(self.namespaces[i])
        tokens, last = [], before[-1].cell if before else start
        known = known and (not before or before[-1].known)
        for token in ids:
            last = self.values.cell(last, token)
            tokens.append(Token(token, last, known))
        return tokens

    def packed(self, tokens: list[Token]) -> list[Token]:
        """The tokens as they are once the sequence has this length."""
        last = len(tokens) - self.recent
        return [
            replace(token, packed=token.packed or self.sinks <= i < last)
            for i, token in enumerate(tokens)
        ]

    def step(self, new: dict[int, list[int]], known: bool = True, *, fail_at: int = LAYERS) -> None:
        """Append to several sequences, and attend; the step raises in layer fail_at."""
        ids = list(new)
        counts = [len(new[i]) for i in ids]
        before = {i: list(self.live[i]) for i in ids}
        fits = self.cache.can_append(ids, counts)
        added = {i: self.chain(i, new[i], self.live[i], known) for i in ids}
        flat = [token for i in ids for token in added[i]]
        try:
            with self.batch.extend(ids, counts, [t.id for t in flat] if known else None):
                poison(self.cache)
                for layer in range(LAYERS):
                    if layer == fail_at:
                        raise ZeroDivisionError
                    cells = [token.cell for token in flat]
                    rows = (side[layer][cells].bfloat16() for side in self.values.new)
                    self.batch.append(layer, *(x.to(self.device) for x in rows))
                for i in ids:
                    self.live[i] = self.packed(self.live[i] + added[i])
                if not ids or any(self.live[i] for i in ids):
                    self.attend(ids)
        except OutOfPagesError:
            assert not fits
            self.live |= before
        except ZeroDivisionError:
            for i in ids:
                if new[i]:
                    self.cache.free(i)
                    del self.live[i]
        else:
            assert fits

    def attend(self, ids: list[int]) -> None:
        """The attention over each sequence is that over its values; other places give zeros."""
        layer, on_cpu, is_latent = self.turn % LAYERS, self.device == "cpu", self.kind == "latents"
        dims = [fmt.head_dim for fmt in FORMATS[self.kind]][: 1 + is_latent]
        q = [torch.randn(SEQ_SLOTS, 2, dim).bfloat16().float() for dim in dims]
        given = q if on_cpu else [x.bfloat16().to(self.device) for x in q]
        out = self.batch.attend(layer, *given, sm_scale=DIM**-0.5)
        assert isinstance(out, torch.Tensor)
        out = out.cpu().float()
        PagedMachine.shared += self.batch._num_members > 1
        for place, i in enumerate(ids):
            sides = [x[0] for x in self.in_window(i, layer)]
            scores = sum(x[place] @ side.T for x, side in zip(q, sides, strict=False))
            assert isinstance(scores, torch.Tensor)
            p = (scores / DIM**0.5).softmax(-1) if scores.numel() else torch.zeros(2, 0)
            rtol, atol = (1e-4, 1e-5) if on_cpu else (2e-2, 2e-2)
            expected = p @ sides[0 if is_latent else 1]
            torch.testing.assert_close(out[place], expected, rtol=rtol, atol=atol)
        assert not out[len(ids) :].any()
        if not is_latent:
            self.attend_ragged(ids, layer)

    def attend_ragged(self, ids: list[int], layer: int) -> None:
        """A query of each new token meets its own token and those before."""
        ends = self.batch.q_indptr.tolist()
        q, window = torch.randn(ends[-1], 2, DIM).bfloat16().float(), self.windows[layer]
        given = q if self.device == "cpu" else q.bfloat16().to(self.device)
        out = self.batch.attend(layer, given, q_indptr=self.batch.q_indptr)
        assert isinstance(out, torch.Tensor)
        for place, i in enumerate(ids):
            first, end = ends[place : place + 2]
            k, v = (x[0] for x in self.values.of(self.live[i], layer))
            behind = torch.arange(len(k)) - torch.arange(len(k) - end + first, len(k))[:, None]
            hidden = behind > 0 if window is None else (behind > 0) | (behind <= -window)
            scores = q[first:end].transpose(0, 1) @ k.T / DIM**0.5
            expected = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
            rtol, atol = (1e-4, 1e-5) if self.device == "cpu" else (2e-2, 2e-2)
            found = out[first:end].transpose(0, 1).cpu().float()
            torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)

    @rule(number=numbers, count=st.integers(0, 50))
    def allocate(self, number: int, count: int) -> None:
        ids = [number % 3] * (count // 2) + [number >> 3 & 1] * (count - count // 2)
        i, namespace = self.next_id, NAMESPACES[number >> 6 & 1]
        expected = self.cache.match_prefix(ids, namespace=namespace)
        try:
            present = self.cache.allocate(i, ids, namespace=namespace)
        except OutOfPagesError:
            assert not self.cache.num_free_seq_slots or self.device != "cpu"
            return
        assert present == expected < max(count, 1)
        assert not present or (present - self.sinks) % self.page == 0
        self.began(i, ids[:present], namespace)
        self.next_id += 1
        self.step({i: ids[present:]})

    def began(self, i: int, present: list[int], namespace: str | None) -> None:
        """A sequence has begun with the rows of these tokens."""
        self.namespaces[i] = namespace
        tokens = self.chain(i, present, [], True)
        self.live[i] = [replace(t, packed=at >= self.sinks) for at, t in enumerate(tokens)]
        PagedMachine.found += any(self.cache.state.dropped(i))

    @precondition(lambda self: len(self.live) < SEQ_SLOTS - 2)
    @rule(number=numbers, count=st.integers(33, MAX))
    def begin_twins(self, number: int, count: int) -> None:
        """Two sequences with one prompt, neither written when the other begins, and an heir."""
        ids = [number % 3] * (count - 20) + [number >> 3 & 1] * 20
        namespace = NAMESPACES[number >> 6 & 1]
        self.cache.finish_swaps()
        random.Random(number).shuffle(self.cache.state.pool._free)
        for group in (2, 1):
            new = {}
            for i in range(self.next_id, self.next_id + group):
                present = self.cache.allocate(i, ids, namespace=namespace)
                self.began(i, ids[:present], namespace)
                new[i] = ids[present:]
            self.next_id += group
            self.step(new)
        self.save_and_load(2**24 - 1)

    @rule(number=numbers, count=st.integers(1, 20), known=st.booleans())
    def append(self, number: int, count: int, known: bool) -> None:
        ids = [i for at, i in enumerate(self.live) if number >> at & 1]
        counts = [min(count >> at, MAX - len(self.live[i])) for at, i in enumerate(ids)]
        self.step({i: [number >> 5 & 1] * n for i, n in zip(ids, counts, strict=True)}, known)

    @rule(number=numbers, count=st.integers(1, 9), layer=st.integers(0, LAYERS - 1))
    def append_and_fail(self, number: int, count: int, layer: int) -> None:
        ids = [i for at, i in enumerate(self.live) if number >> at & 1]
        new = {i: [2] * min(count, MAX - len(self.live[i])) for i in ids}
        self.step(new, fail_at=layer)

    @rule(number=numbers)
    def attend_to_all(self, number: int) -> None:
        ids = list(self.live)
        random.Random(number).shuffle(ids)
        self.step({i: [] for i in ids})

    @precondition(lambda self: self.live and len(self.live) < SEQ_SLOTS)
    @rule(number=numbers)
    def fork(self, number: int) -> None:
        i = self.pick(number)
        self.cache.finish_swaps()
        self.cache.fork(i, self.next_id)
        self.live[self.next_id] = list(self.live[i])
        self.namespaces[self.next_id] = self.namespaces[i]
        self.next_id += 1

    @precondition(lambda self: self.live)
    @rule(number=numbers, cut=st.integers(0, 30))
    def truncate(self, number: int, cut: int) -> None:
        i = self.pick(number)
        length = max(len(self.live[i]) - cut, 0)
        try:
            self.cache.truncate(i, length)
        except ShapeError:
            assert any(self.cache.state.dropped(i)) and length > self.sinks
            return
        self.live[i] = self.live[i][:length]

    @precondition(lambda self: self.live or self.swapped)
    @rule(number=numbers)
    def free(self, number: int) -> None:
        i = self.pick(number, self.live | self.swapped)
        self.cache.free(i)
        (self.live if i in self.live else self.swapped).pop(i)

    @precondition(lambda self: self.live and len(self.swapped) < 3)
    @rule(number=numbers)
    def swap_out(self, number: int) -> None:
        i = self.pick(number)
        self.cache.swap_out(i)
        self.swapped[i] = self.live.pop(i)

    @precondition(lambda self: self.swapped)
    @rule(number=numbers)
    def swap_in(self, number: int) -> None:
        i = self.pick(number, self.swapped)
        try:
            self.cache.swap_in(i)
        except OutOfPagesError:
            assert len(self.live) == SEQ_SLOTS or self.live or self.cache.swap_space.swapping_out
            self.cache.finish_swaps()
            return
        self.live[i] = self.swapped.pop(i)

    @precondition(lambda self: self.live)
    @rule(number=numbers)
    def save_and_load(self, number: int) -> None:
        """Save some sequences, all with 2**24 - 1, and load them under other ids."""
        ids = [i for at, i in enumerate(self.live) if number >> at & 1 and number % 3 == 0]
        if not ids:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = save_sequences(self.cache, ids, Path(folder) / "saved.safetensors")
            names = {i: self.next_id + at for at, i in enumerate(ids)}
            try:
                load_sequences(self.cache, path, ids=names)
            except OutOfPagesError:
                return
        self.live |= {new: list(self.live[i]) for i, new in names.items()}
        self.namespaces |= {new: self.namespaces[i] for i, new in names.items()}
        self.next_id += len(ids)

    @invariant()
    def every_sequence_has_its_values(self) -> None:
        check_invariants(self.cache)
        poison(self.cache)
        self.turn += 1
        assert set(self.cache.ids) == set(self.live)
        left = SEQ_SLOTS - len(self.live)
        assert self.cache.num_free_seq_slots == left or self.device != "cpu"
        for i, tokens in (self.live | self.swapped).items():
            assert self.cache.length(i) == len(tokens)
            assert self.cache.namespace(i) == self.namespaces[i]
        for i, tokens in self.live.items():
            layer = (self.turn + i) % LAYERS
            for got, expected in zip(
                self.cache.dequantized(i, layer), self.in_window(i, layer), strict=True
            ):
                assert torch.equal(got.cpu(), expected)
            PagedMachine.lost += sum(self.cache.state.dropped(i))
            known = [token.id for token in tokens if token.known]
            packed = sum(token.packed for token in tokens if token.known) // self.page * self.page
            if sum(token.packed for token in tokens) - packed >= self.page and any(self.windows):
                continue  # windows are past the known tokens
            namespace = self.namespaces[i]
            found = self.cache.match_prefix([*known, -1], namespace=namespace)
            assert found >= (packed and packed + self.sinks)

    @invariant()
    def nothing_was_bad(self) -> None:
        assert self.cache.bad_rows.tolist() == [0, 0]


@pytest.mark.parametrize("examples", mark_slow([10, 60], [10]))
def test_any_calls_keep_what_the_model_holds(examples: int) -> None:
    run_state_machine_as_test(
        PagedMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=40, suppress_health_check=list(HealthCheck)
        ),
    )


def soak(device: str, seed: int, goes_on: Callable[[int], bool]) -> int:
    """Make random calls, a new cache every 100 of them, while it goes on; return how many."""
    PagedMachine.device = device
    draw, calls = random.Random(seed), 0
    while goes_on(calls):
        machine = PagedMachine()
        page = (PAGE, PAGE, 1)[calls // 100 % 3]
        options = draw.choice(LENGTHS), draw.choice(SHARES), draw.random() < 0.5
        kind = ("heads", "heads", "latents")[calls // 100 % 5 // 2]
        machine.start(*options, draw.choice(WINDOWS), page, kind)
        for _ in range(100):
            n = draw.randrange(51)
            rest: dict[str, dict[str, int]] = {
                "allocate": {"count": n},
                "append": {"count": n % 20 + 1, "known": n % 4 > 0},
                "attend_to_all": {},
            }
            if n % 5 == 0:
                rest |= {"append_and_fail": {"count": n % 9 + 1, "layer": n % LAYERS}}
            if machine.live:
                rest |= {"truncate": {"cut": n % 31}, "free": {}, "swap_out": {}}
                rest |= {"save_and_load": {}}
            if 0 < len(machine.live) < SEQ_SLOTS:
                rest |= {"fork": {}}
            if len(machine.live) < SEQ_SLOTS - 2:
                rest |= {"begin_twins": {"count": 33 + n % (MAX - 32)}}
            if machine.swapped:
                rest |= {"swap_in": {}}
            name = draw.choice(list(rest))
            getattr(machine, name)(number=draw.randrange(2**24), **rest[name])
            machine.every_sequence_has_its_values()
            machine.nothing_was_bad()
            calls += 1
        machine.teardown()
    return calls


def test_a_short_soak_ends_without_a_mismatch() -> None:
    PagedMachine.shared = PagedMachine.found = PagedMachine.lost = 0
    assert soak("cpu", 2, lambda calls: calls < 500) == 500
    assert min(PagedMachine.shared, PagedMachine.found, PagedMachine.lost) > 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Random calls on a PagedKVCache, all checked.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    done = soak(options.device, options.seed, lambda _: time.monotonic() < end)
    print(f"{done} calls on {options.device}, seed {options.seed}: no mismatch")
    print(f"{PagedMachine.shared} steps read a shared prefix once")
