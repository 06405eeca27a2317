"""The kernel that advances the 16-bit slots of an engine's sequences, in the simulator. No GPU."""

from __future__ import annotations

import random
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from in_simulator import SIMULATED, in_simulator

from kvquant.engine.window import Window
from kvquant.kernels.cuda.slots.window_launch import advance
from kvquant.rows.slots import Split

if SIMULATED:
    from simulated_launches import simulated

pytestmark = pytest.mark.extra("cuda")
PAGE, RECENT, SLOTS, PLACES, WIDTH = 4, 6, 5, 7, 8
SCRATCH, TABLE = (8, 9), 11  # places among the tensors of a window's state


class Sequence:
    """Pages and tokens so far."""

    def __init__(self, pages: list[int], length: int) -> None:
        self.pages, self.length = pages, length


def step_of(
    window: Window, batch: list[Sequence], counts: list[int], is_narrow: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What _advance and the kernel are given; block tables have more columns than pages."""
    table = torch.full((len(batch), 2 * WIDTH), 3, dtype=torch.int32)[:, : WIDTH - is_narrow]
    for row, one, count in zip(table, batch, counts, strict=True):
        one.length += count
        row[: len(one.pages)] = torch.tensor(one.pages)[: len(row)]
    lens = torch.tensor([one.length for one in batch], dtype=torch.int32)
    table, lens, starts = (x.to(window.device) for x in (table, lens, torch.tensor([0, *counts])))
    return table, lens, starts.cumsum(0)


def compare(seed: int, device: str = "cpu") -> int:
    """Random steps, by the kernel and by torch; how many sequences went on in a slot."""
    rng, rollback = random.Random(seed), (0, 2)[seed % 2]
    window = Window(Split(PAGE, RECENT, PAGE, rollback), SLOTS, 99, PLACES, 24, WIDTH, device)
    free, running, kept = list(range(4, 99)), list[Sequence](), 0
    rng.shuffle(free)
    for _ in range(25):
        if len(running) < 4 or (len(running) < PLACES and rng.random() < 0.4):
            pages = [free.pop(0) for _ in range(WIDTH - 1)]
            one = Sequence(pages, 0)
            running.append(one)
            prompt = rng.randrange(1, 20)
            table, lens, _ = step_of(window, [one], [prompt], False)
            window.begin(table, lens, [prompt], {0: 0})
        if rng.random() < 0.3:  # another sequence begins after the full pages of one
            one = rng.choice(running)
            shared = one.length // PAGE
            fresh = [free.pop(0) for _ in range(WIDTH - 1 - shared)]
            running.append(Sequence(one.pages[:shared] + fresh, shared * PAGE))
        if rng.random() < 0.3:
            one = rng.choice(running)
            one.length -= rng.randrange(min(rollback + 2, one.length + 1))
        rng.shuffle(running)
        most = (WIDTH - 2) * PAGE
        for one in [one for i, one in enumerate(running) if one.length >= most or i >= PLACES]:
            running.remove(one)
            others = {page for other in running for page in other.pages}
            free += [page for page in one.pages if page not in others]
        # places of a graph that no sequence has
        idle = [Sequence([rng.choice([-1, 0])] * (WIDTH - 1), 0)] * (PLACES - len(running))
        batch = running + idle[: rng.randrange(4)]
        counts = [rng.randrange(2 + rollback) for _ in running] + [0] * (len(batch) - len(running))
        given = step_of(window, batch, counts, rng.random() < 0.5)
        expected = deepcopy(window)
        expected._advance(*given, sum(counts), {})
        has_slot = expected._counts[1, : len(batch)] > 0
        filled = ((given[1] + PAGE - 1) // PAGE - has_slot.int()).tolist()
        on_gpu = nullcontext() if device == "cuda" else None
        with on_gpu or simulated(*given, *window._state, backwards=bool(seed % 3)):
            advance(*given, window._state, window._sizes)
        kept += int((window._counts[3] > 0).sum())
        for i, (ours, theirs) in enumerate(zip(window._state, expected._state, strict=True)):
            used = slice(-1) if i in (3, 4, 5, 6, 7) else slice(None)  # see Window.__init__
            if i == TABLE:
                for row, other, count in zip(ours, theirs, filled, strict=False):
                    assert torch.equal(row[:count], other[:count]), (seed, ours, theirs)
            elif i not in SCRATCH:
                assert torch.equal(ours[used], theirs[used]), (seed, i, ours, theirs)
        assert (window._state[SCRATCH[1]] == -1).all(), "the next step finds no rank"
    return kept


@in_simulator
def test_slots_are_those_of_torch() -> None:
    assert all(compare(seed) > 10 for seed in range(2))


@pytest.mark.slow
@in_simulator
def test_those_of_many_steps_are_too() -> None:
    for seed in range(2, 10):
        compare(seed)


@pytest.mark.gpu
def test_slots_of_a_gpu_are_those_of_torch() -> None:
    assert all(compare(seed, "cuda") > 10 for seed in range(6))
