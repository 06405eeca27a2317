"""slots_of, and the bytes of a cache that is filled through it in any chunks; 10 s."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from kvquant import KVCache, Slots, append_rows, slots_of
from kvquant.errors import ShapeError
from kvquant.rows.format import RowFormat
from kvquant.rows.slots import Split

HEADS, HEAD_DIM, MAX_SEQ_LEN = 2, 64, 40
K_FORMAT, V_FORMAT = RowFormat.parse("int4-g4", HEAD_DIM), RowFormat.parse("fp8", HEAD_DIM)
FORMATS = {"k": K_FORMAT, "v": V_FORMAT}


@dataclass
class Store:
    """A cache of one layer in pages, filled by append_rows alone."""

    batch: int
    sink_len: int
    recent_len: int
    page_size: int = 0  # 0: contiguous
    lens: torch.Tensor = field(init=False)
    packed_lens: torch.Tensor = field(init=False)
    table: torch.Tensor | None = None
    seq_slots: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.lens, self.packed_lens = torch.zeros(2, self.batch, dtype=torch.int32)
        room = MAX_SEQ_LEN - self.sink_len - self.recent_len
        pages = self.batch
        if self.page_size:
            per_sequence = -(-room // self.page_size)
            pages = self.batch * per_sequence + 1
            self.table = torch.randperm(pages)[:-1].view(self.batch, -1).int()
            self.seq_slots = torch.randperm(self.batch + 2)[: self.batch].int()
        max_num_seqs = self.batch + 2 if self.page_size else self.batch
        exact_len = self.sink_len + self.recent_len
        self.packed, self.exact = (
            {
                side: torch.zeros(n, HEADS, length, row_bytes, dtype=torch.uint8)
                for side, row_bytes in sizes.items()
            }
            for n, length, sizes in (
                (pages, self.page_size or room, {s: f.row_bytes for s, f in FORMATS.items()}),
                (max_num_seqs, exact_len, dict.fromkeys(FORMATS, 2 * HEAD_DIM)),
            )
        )

    def append(self, k: torch.Tensor, v: torch.Tensor, new_lens: torch.Tensor | None) -> Slots:
        options: Any = {"sink_len": self.sink_len, "recent_len": self.recent_len}
        options |= {"block_table": self.table, "seq_slots": self.seq_slots}
        room = self.packed["k"].shape[2]
        slots = slots_of(self.lens, self.packed_lens, new_lens, k.shape[2], room, **options)
        has_exact = slots.exact is not None
        x, y = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        exact: Any = {f"exact_{side}": self.exact[side] for side in "kv"} if has_exact else {}
        rows = self.packed["k"], self.packed["v"]
        append_rows(x, y, *rows, slots, K_FORMAT, V_FORMAT, **exact, backend="reference")
        self.lens += k.shape[2] if new_lens is None else new_lens
        split = Split(self.sink_len, self.recent_len, 1)
        self.packed_lens = split.packed_lens(self.lens, self.packed_lens)
        return slots

    def rows_in_order(self, side: str) -> torch.Tensor:
        """[batch, heads, room, row_bytes]: packed rows of each sequence in the order of tokens."""
        if self.table is None:
            return self.packed[side]
        return self.packed[side][self.table.long()].transpose(1, 2).flatten(2, 3)

    def exact_rows(self, side: str) -> torch.Tensor:
        return (
            self.exact[side] if self.seq_slots is None else self.exact[side][self.seq_slots.long()]
        )


@st.composite
def chunks(draw: st.DrawFn, batch: int) -> list[list[int] | int]:
    """Appends that fit MAX_SEQ_LEN: one count for all, or one for each sequence."""
    counts: list[list[int] | int] = []
    left = [MAX_SEQ_LEN] * batch
    for _ in range(draw(st.integers(1, 6))):
        new = draw(
            st.integers(0, min(min(left), 17))
            | st.tuples(*(st.integers(0, min(n, 17)) for n in left)).map(list)
        )
        counts.append(new)
        left = [
            n - c
            for n, c in zip(left, new if isinstance(new, list) else [new] * batch, strict=True)
        ]
    return counts


def assert_same_packed(
    store: Store, side: str, packed: torch.Tensor, packed_lens: torch.Tensor
) -> None:
    """Of the tokens that count as packed: in a KVCache the recent ones have a packed row, too."""
    rows = store.rows_in_order(side)
    for b, count in enumerate(packed_lens.tolist()):
        assert torch.equal(rows[b, :, :count], packed[b, :, :count])


@settings(max_examples=40)
@given(st.data())
def test_rows_are_those_of_a_kv_cache_after_any_chunks(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3), "batch")
    sink_len = data.draw(st.sampled_from([0, 1, 4, 12]), "sink_len")
    recent_len = data.draw(st.sampled_from([0, 1, 3, 8, 16]), "recent_len")
    store = Store(batch, sink_len, recent_len, data.draw(st.sampled_from([0, 1, 4, 16]), "page"))
    options: Any = {"sink_len": sink_len, "recent_len": recent_len, "rollback_len": 0}
    formats: Any = {"k_format": K_FORMAT, "v_format": V_FORMAT}
    cache = KVCache(1, batch, HEADS, HEAD_DIM, MAX_SEQ_LEN, **options, **formats)
    layer = cache.layers[0]
    for new in data.draw(chunks(batch), "chunks"):
        new_tokens = max(new) if isinstance(new, list) else new
        k, v = torch.randn(2, batch, HEADS, new_tokens, HEAD_DIM)
        new_lens = torch.tensor(new) if isinstance(new, list) else None
        cache.append(0, k, v, new_lens)
        store.append(k, v, new_lens)
        assert torch.equal(store.lens, layer.seq_lens)
        assert torch.equal(store.packed_lens, layer.packed_lens)
        for side, packed, exact in (
            ("k", layer.k_packed, layer.k_exact_rows),
            ("v", layer.v_packed, layer.v_exact_rows),
        ):
            assert_same_packed(store, side, packed, layer.packed_lens)
            assert torch.equal(store.exact_rows(side), exact)
    if data.draw(st.booleans(), "crop"):  # then the window is not full and fills again
        kept = [data.draw(st.integers(0, int(n))) for n in store.lens]
        cache.crop(kept)
        store.lens, store.packed_lens = layer.seq_lens.clone(), layer.packed_lens.clone()
        new_tokens = data.draw(st.integers(0, MAX_SEQ_LEN - max(kept)))
        k, v = torch.randn(2, batch, HEADS, new_tokens, HEAD_DIM)
        cache.append(0, k, v)
        store.append(k, v, None)
        assert torch.equal(store.packed_lens, layer.packed_lens)
        assert_same_packed(store, "k", layer.k_packed, layer.packed_lens)
        assert torch.equal(store.exact_rows("v"), layer.v_exact_rows)


def test_without_exact_rows_there_are_packed_slots_only() -> None:
    table = torch.tensor([[7, 2], [0, 1]], dtype=torch.int32)
    lens = torch.tensor([3, 0], dtype=torch.int32)
    slots = slots_of(lens, lens, torch.tensor([2, 1]), 2, 4, block_table=table)
    assert slots.exact is None and slots.evicted is None
    assert slots.packed.tolist() == [31, 8, 0, -1]
    assert slots.packed.dtype == torch.int64 and slots.packed.is_contiguous()


def test_sequences_that_outgrow_their_room_are_refused() -> None:
    lens = torch.tensor([3, 8])
    for table, page_size in ((None, 10), (torch.zeros(2, 5, dtype=torch.int32), 2)):
        slots_of(lens, lens, None, 2, page_size, block_table=table)
        with pytest.raises(ShapeError, match=r"sequence 1 would have 11 packed .* room for 10"):
            slots_of(lens, lens, None, 3, page_size, block_table=table)


LENS = torch.tensor([9, 4])
CALL: dict[str, Any] = {"seq_lens": LENS, "packed_lens": torch.tensor([4, 1]), "new_lens": None}
CALL |= {"new_tokens": 3, "page_size": 10, "sink_len": 2, "recent_len": 3}


def pages(*rows: list[int]) -> dict[str, Any]:
    return {"block_table": torch.tensor(rows), "page_size": 6}


def at(name: str, *values: int) -> dict[str, Any]:
    return {name: torch.tensor(values)}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sink_len": -1}, "ConfigError: sink_len -1 is not possible"),
    ({"recent_len": -2}, "ConfigError: recent_len -2 is not possible"),
    ({"recent_len": 1.5}, "ConfigError: recent_len 1.5 is not possible"),
    ({"new_tokens": -1}, "ConfigError: new_tokens -1 is not possible"),
    ({"page_size": 0}, "ConfigError: page_size 0 is not possible: use a whole number from 1 to"),
    ({"seq_lens": LENS.float()}, "ConfigError: seq_lens is torch.float32: use"),
    ({"new_lens": [1, 2]}, "ConfigError: new_lens is of type list: give"),
    ({"packed_lens": None}, "ConfigError: packed_lens is of type NoneType"),
    ({"seq_lens": LENS[None]}, "ShapeError: seq_lens is [1, 2]"),
    ({"packed_lens": LENS[:1]}, "ShapeError: packed_lens is [1]: it must be [2]"),
    ({"seq_slots": LENS[:1]}, "ShapeError: seq_slots is [1]: it must be [2]"),
    (pages([0]), "ShapeError: block_table is [1, 1]: it must be [2, max_pages]"),
    (at("packed_lens", 3, 0), "ShapeError: sequence 0 has 9 tokens, 3 of them packed: with 2"),
    (at("packed_lens", 3, 0), "ShapeError: must be 4 to 7"),
    (at("packed_lens", 4, 3), "ShapeError: must be 0 to 2"),
    (at("seq_lens", 9, -1), "ShapeError: sequence 1 has -1 tokens: le"),
    (at("new_lens", 1, 4), "ShapeError: new_lens is [1, 4]: give [batch] of 0 to 3"),
    (at("new_lens", 1, -1), "ShapeError: 0 to 3"),
    (pages([0, -1], [1, -1]), "ShapeError: block_table of sequence 0, entry 1, is -1, where there"),
    (pages([0, 1], [2**62, 1]), "ShapeError: sequence 1, entry 0, is 4611686018427387904, where"),
    (at("seq_slots", 0, -1), "ShapeError: seq_slots is [0, -1]"),
    (at("seq_slots", 0, 2**62), "ShapeError: 8427387904]: sequence slots are 0 to 2147483647"),
    (
        at("seq_lens", 9, 2**31) | at("packed_lens", 4, 2**31 - 5),
        "ShapeError: sequence 1 has 2147483648 tokens: lengths are 0 to 2147483647",
    ),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_cannot_be_a_cache_has_no_slots(changes: dict[str, Any], text: str) -> None:
    slots_of(**CALL)
    with refused(text):
        slots_of(**CALL | changes)


def test_slots_are_found_where_the_lengths_are() -> None:
    lens = torch.zeros(3, dtype=torch.int32, device="meta")
    slots = slots_of(lens, lens, lens, 5, 16, sink_len=2, recent_len=4)  # reading would fail
    assert all(x is not None and x.is_meta and x.shape == (15,) for x in slots)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's own graphs
def test_a_graph_takes_it_with_lengths_that_grow() -> None:
    def step(lens: torch.Tensor, packed_lens: torch.Tensor) -> Slots:
        return slots_of(lens, packed_lens, None, 1, 32, sink_len=2, recent_len=4)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for length in range(9):
        lens = torch.tensor([length, length + 3])
        packed_lens = Split(2, 4, 32).packed_lens(lens, torch.zeros(2, dtype=torch.int64))
        for got, expected in zip(compiled(lens, packed_lens), step(lens, packed_lens), strict=True):
            assert got is not None and expected is not None and torch.equal(got, expected)
