"""The slots of a step, in numpy, are those of slots_of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvquant.ops.slots import slots_of
from kvquant.rows.slots import Split, token_slots


@pytest.mark.parametrize(
    "sinks, recent", [(0, 0), (4, 0), (0, 7), (3, 5), (2, 40)], ids=lambda n: str(n)
)
def test_slots_are_those_of_slots_of(sinks: int, recent: int) -> None:
    draw = np.random.default_rng(sinks * 100 + recent)
    split = Split(sinks, recent, 16)
    for _ in range(60):
        batch, most = 5, int(draw.integers(1, 40))
        lengths = draw.integers(0, 100, batch)
        counts = draw.integers(0, most + 1, batch)
        longest = np.maximum(lengths - sinks, 0)
        least = np.maximum(longest - recent, 0)
        packed = draw.integers(least, longest + 1)
        seq_slots = draw.permutation(9)[:batch]
        tables = draw.permutation(9 * 9).reshape(9, 9).astype(np.int32)
        got = token_slots(split, seq_slots, lengths, packed, counts, tables)
        expected = slots_of(
            torch.tensor(lengths, dtype=torch.int32),
            torch.tensor(packed, dtype=torch.int32),
            torch.tensor(counts, dtype=torch.int32),
            most,
            16,
            sink_len=sinks,
            recent_len=recent,
            block_table=torch.tensor(tables[seq_slots]),
            seq_slots=torch.tensor(seq_slots),
        )
        is_new = torch.arange(most) < torch.tensor(counts)[:, None]
        ends = [range(n, n + count) for n, count in zip(lengths, counts, strict=True)]
        assert got.positions.tolist() == [position for end in ends for position in end]
        for ours, theirs in zip(got[:3], expected, strict=True):
            if theirs is None:
                assert (ours == -1).all()
            else:
                chosen = theirs.view(batch, most)[is_new]
                assert ours.tolist() == chosen.tolist()


def test_packed_lens_never_shrink() -> None:
    split = Split(2, 4, 16)
    before = np.array([0, 0, 3, 9])
    after, packed = np.array([0, 7, 8, 12]), [0, 1, 3, 9]
    assert split.packed_lens(after, before).tolist() == packed
    assert split.packed_lens(torch.tensor(after), torch.tensor(before)).tolist() == packed
