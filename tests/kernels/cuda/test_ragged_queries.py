"""Ragged queries on CUDA: how they are cut into pieces. No GPU is needed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from in_simulator import SIMULATED, in_simulator
from ragged_cases import indptr

from kvquant import RowFormat
from kvquant.kernels.cuda.decode.ragged import EVERY, MOST_COLUMNS, PIECE_BYTES, Cut, Kind, kinds_of
from kvquant.kernels.cuda.decode.spec import columns_of
from kvquant.rows.ragged import pieces_of

if SIMULATED:
    from fake_cuda import CPU
    from simulated_launches import simulated


def cut(at: torch.Tensor, total: int, kinds: Sequence[Kind]) -> list[torch.Tensor]:
    """Cut in the simulator; the pieces of each kind, without the room that is left."""
    batch = len(at) - 1
    with simulated(at):
        made = Cut(CPU, total, batch, tuple(kinds))
        pieces = made(at).long()
    rows = [start // PIECE_BYTES for start in made.starts]
    assert rows == [*accumulate((kind.room + 1 for kind in kinds[:-1]), initial=0)]
    found = []
    for row, kind in zip(rows, kinds, strict=True):
        number = int(pieces[row + kind.room, 0])
        assert 0 <= number <= kind.room
        found.append(pieces[row : row + number])
    return found


@pytest.mark.extra("cuda")
@in_simulator
def test_pieces_are_those_of_the_host() -> None:
    draw, fmt = random.Random(0), RowFormat.parse("int4-g4", 128)
    seen = set()
    for i in range(60):
        size = 300 if i == 0 else draw.choice([1, 2, 5, 40])  # more than a block has threads
        queries = draw.choice([[0, 1, 1, 1, 9], [0, 1, 2, 40], [1], [5, 6, 7], [0, 0, 130]])
        counts, rest = draw.choices(queries, k=size), draw.choice([0, 0, 1, 17])
        at, total = indptr(counts), max(sum(counts) + rest, 1)
        rest, kinds = total - sum(counts), kinds_of(total, size, draw.choice([1, 4, 8, 70]), [fmt])
        seen.add(len(kinds))
        for kind, held in zip(kinds, cut(at, total, kinds), strict=True):
            wanted = torch.stack([torch.from_numpy(x) for x in pieces_of(at.numpy(), kind.size)], 1)
            number = torch.tensor(counts)[wanted[:, 0]]
            wanted = wanted[(number >= kind.least) & (number <= kind.most)]
            assert torch.equal(held[: len(wanted)], wanted)
            behind = held[len(wanted) :]  # rows behind the last sequence's: without tokens
            assert bool((behind[:, 3] == 1 << 30).all() and (behind[:, 2] <= kind.size).all())
            rows = [row for _, first, n, _ in behind.tolist() for row in range(first, first + n)]
            assert rows == ([*range(total - rest, total)] if kind is kinds[-1] else [])
    assert seen == {1, 2, 3}


@pytest.mark.extra("cuda")
@in_simulator
def test_no_piece_of_wrong_numbers_is_outside_of_q() -> None:
    draw, fmt, total = random.Random(1), RowFormat.parse("int4-g4", 128), 20
    for _ in range(40):
        batch, ratio = draw.choice([1, 3, 9]), draw.choice([1, 4, 8])
        at = torch.tensor([draw.randint(-50, 50) for _ in range(batch + 1)], dtype=torch.int32)
        for held in cut(at, total, kinds_of(total, batch, ratio, [fmt])):
            sequence, first, number, behind = held.unbind(1)
            assert bool(((sequence >= 0) & (sequence < batch)).all())
            assert bool((number > 0).all() and (behind >= 0).all())
            assert bool((first >= 0).all() and (first + number).le(total).all())


def test_pieces_have_the_columns_of_whole_warps() -> None:
    fmt = RowFormat.parse("int4-g4", 128)
    for total, batch, ratio in ((64, 64, 4), (576, 64, 4), (8192, 1, 8), (5, 9, 1), (70, 3, 100)):
        for _, _, size, _ in kinds_of(total, batch, ratio, [fmt]):
            columns, sharers = columns_of(size * ratio, fmt)
            assert size == 1 or columns * sharers - size * ratio < ratio
            assert size * ratio <= max(MOST_COLUMNS, ratio)


def test_kinds_of_pieces() -> None:
    """Decode steps take the kernel for one query, long chunks the one with most columns, sequences
    with about the mean number of queries the one for so many."""
    fmt = RowFormat.parse("int4-g4", 128)
    assert kinds_of(64, 64, 4, [fmt]) == ((1, 2, 2, 64), (3, EVERY, 16, 24))
    assert kinds_of(64 * 128, 64, 4, [fmt]) == ((1, 2, 2, 64), (3, EVERY, 16, 572))
    mixed = kinds_of(60 + 4 * 128, 64, 4, [fmt])
    assert mixed == ((1, 2, 2, 64), (3, 12, 12, 64), (13, EVERY, 16, 77))
    assert kinds_of(64 * 8, 64, 4, [fmt])[1] == (3, 8, 8, 64)
    # if no sequence can have more queries than a small piece, there is no other kind
    assert kinds_of(2, 64, 4, [fmt]) == ((1, EVERY, 2, 2),)
    assert kinds_of(500, 3, 100, [fmt]) == ((1, EVERY, 1, 500),)


def test_there_is_room_for_the_pieces_of_any_numbers_of_queries() -> None:
    draw, fmt = random.Random(2), RowFormat.parse("int4-g4", 128)
    for _ in range(2000):
        batch, most = draw.choice([1, 2, 9, 70]), draw.choice([1, 2, 3, 5, 17, 300])
        counts, rest = [draw.randint(0, most) for _ in range(batch)], draw.choice([0, 1, 50])
        total = max(sum(counts) + rest, 1)
        kinds = kinds_of(total, batch, draw.choice([1, 3, 4, 8, 16, 64]), [fmt])
        assert [kind.least for kind in kinds] == [1, *(kind.most + 1 for kind in kinds[:-1])]
        assert kinds[-1].most == EVERY
        for kind in kinds:
            own = [n for n in counts if kind.least <= n <= kind.most]
            own += [total - sum(counts)] if kind is kinds[-1] else []
            assert sum(-(-n // kind.size) for n in own) <= kind.room
