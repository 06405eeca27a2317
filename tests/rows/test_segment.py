"""Segments: what fits, and which tokens queries see. Pages: paged/test_segments.py."""

from __future__ import annotations

import copy
import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvquant import RowFormat
from kvquant.rows.segment import Segment, visible_rows, visible_tokens

INT4 = RowFormat.parse("int4-g4", 64)


def test_a_segment_without_room_is_allowed() -> None:
    rows = torch.zeros(1, 2, 0, INT4.row_bytes, dtype=torch.uint8)
    segment = Segment(rows, rows, torch.zeros(1, dtype=torch.int32), INT4, INT4)
    k, v = segment.dequantized(0)
    assert k.shape == v.shape == (2, 0, 64)


def test_a_copy_of_a_format_is_equal_but_takes_no_hash_along() -> None:
    assert hash(INT4) == hash(RowFormat("int4", 4, 64)) == hash(("int4", 4, 64))
    for other in (copy.copy(INT4), copy.deepcopy(INT4), pickle.loads(pickle.dumps(INT4))):
        assert other == INT4
        assert "_hash" not in vars(other)  # another process's differs
        assert hash(other) == hash(INT4)


@given(st.data())
def test_queries_see_the_tokens_up_to_their_own(data: st.DataObject) -> None:
    """Token by token: sinks of all segments, then their other rows; the last queries see most."""
    batch, q_len = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 5))
    counts = st.lists(st.integers(0, 6), min_size=batch, max_size=batch)
    facts = data.draw(st.lists(st.tuples(counts, st.integers(0, 4)), min_size=1, max_size=3))
    rows = torch.zeros(batch, 1, 6, INT4.row_bytes, dtype=torch.uint8)
    segments = [
        Segment(rows, rows, torch.tensor(lens, dtype=torch.int32), INT4, INT4, sinks=sinks)
        for lens, sinks in facts
    ]
    given_lens = data.draw(st.none() | st.lists(st.integers(-1, 6), min_size=batch, max_size=batch))
    q_lens = None if given_lens is None else torch.tensor(given_lens, dtype=torch.int32)
    found = visible_rows(segments, q_lens, q_len)
    assert found.shape == (len(facts), batch, q_len) and found.dtype == torch.int32
    total = sum(segment.seq_lens for segment in segments)
    assert isinstance(total, torch.Tensor)
    assert torch.equal(found.sum(0), visible_tokens(total, q_lens, q_len))
    for b in range(batch):
        order = [i for i, (lens, sinks) in enumerate(facts) for _ in range(min(lens[b], sinks))]
        order += [i for i, (lens, sinks) in enumerate(facts) for _ in range(lens[b] - sinks)]
        queries = q_len if given_lens is None else min(max(given_lens[b], 0), q_len)
        for i in range(q_len):
            seen = order[: max(len(order) - queries + i + 1, 0)] if i < queries else []
            assert found[:, b, i].tolist() == [seen.count(n) for n in range(len(facts))]
