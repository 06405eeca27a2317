"""What the attention calls refuse: alike in every backend, in a graph, and where CUDA launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import FakeDriver, OnCuda
from refusals import refused
from segment_cases import lens

from kvquant import AttentionVariant, RowFormat, decode_attention, reference_attention
from kvquant.ops import attention
from kvquant.rows.segment import check_segments

INT4 = RowFormat.parse("int4-g4", 128)


def byte(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


Q, MANY = torch.zeros(2, 8, 128).bfloat16(), torch.zeros(2, 3, 8, 128).bfloat16()
RAGGED = torch.zeros(6, 8, 128).bfloat16()
ROWS, PAGES = byte(2, 2, 64, 80), byte(8, 2, 16, 80)
GIVEN: dict[str, Any] = {"q": Q, "k_rows": ROWS, "v_rows": ROWS.clone(), "seq_lens": lens(8, 3)}
GIVEN |= {"k_format": INT4, "v_format": INT4}
TABLE = torch.zeros(2, 4, dtype=torch.int32)
PAGED: dict[str, Any] = {"k_rows": PAGES, "v_rows": PAGES.clone(), "block_table": TABLE}
TREE = torch.ones(2, 3, 3).bool()
PADDED_TREE = TREE.clone()
PADDED_TREE[1, 0, :2] = False  # sequence 1 has two queries; this one sees the place of no query
SIZES = "is not supported: use 1, 2, 4, 8, 16, 32, 64, 128 or 256"


def variant(**fields: Any) -> dict[str, Any]:
    return {"q": MANY, "variant": AttentionVariant(**fields)}


def other(fmt: torch.dtype | str, *names: str) -> dict[str, Any]:
    """Tensors of GIVEN or PAGED of another dtype, or on another device."""
    return {name: (PAGED | GIVEN)[name].to(fmt) for name in names}


Case = tuple[dict[str, Any], str]  # what differs from GIVEN; the error, and words that it has
CASES: list[Case] = [
    ({"q": Q[0]}, "ShapeError: q is [8, 128]: it must be [batch, num_q_heads"),
    ({"q": Q[:, :, None]}, "ShapeError: give q.transpose(1, 2)"),
    ({"q": Q[:1]}, "ShapeError: q [1, 8, 128] does not fit rows [2, 2, 64, 80]"),
    ({"q": Q[:, :3]}, "ShapeError: num_q_heads a multiple of num_kv_heads"),
    ({"q": Q[:, :1]}, "ShapeError: num_q_heads a multiple of num_kv_heads"),
    ({"q": Q[..., :64]}, "ConfigError: int4-g4 has head_dim 128, not 64"),
    ({"q": Q[..., :63]}, "ConfigError: int4-g4 has head_dim 128, not 63"),
    ({"k_rows": ROWS[:, :, :7]}, "ShapeError: k_rows [2, 2, 7, 80] and v_rows [2, 2, 64, 80]"),
    (other(torch.float32, "k_rows"), "ConfigError: k_rows is torch.float32: use uint8"),
    (other(torch.int8, "v_rows"), "ConfigError: v_rows is torch.int8: use uint8"),
    ({"v_rows": ROWS[..., :79]}, "ShapeError: v_rows is [2, 2, 64, 79]: the last axis must be the"),
    ({"k_rows": ROWS[:, :0], "v_rows": ROWS[:, :0]}, "ShapeError: does not fit rows"),
    ({"k_rows": byte(2, 2, 64, 160)[..., ::2]}, "ShapeError: contiguous"),
    ({"v_rows": byte(2, 2, 64, 160)[..., ::2]}, "ShapeError: contiguous"),
    ({"seq_lens": lens(3)}, "ShapeError: seq_lens is [1]: it must be [2]"),
    (other(torch.int64, "seq_lens"), "ConfigError: seq_lens is torch.int64: use int32"),
    ({"k_format": "int5"}, "ConfigError: format 'int5' does not exist"),
    ({"v_format": ["int4"]}, "ConfigError: ['int4']"),
    ({"k_format": "int8"}, "ShapeError: the 132 bytes of a row of int8"),
    ({"v_format": "int8"}, "ShapeError: the 132 bytes of a row of int8"),
    # pages
    (PAGED | {"block_table": None}, "ShapeError: seq_lens is [2]: it must be [8]"),
    (PAGED | other(torch.int64, "block_table"), "ConfigError: block_table is torch.int64: use int"),
    (PAGED | {"block_table": TABLE[0]}, "ShapeError: block_table is [4]: it must be [batch, max_p"),
    (PAGED | {"block_table": TABLE[:1]}, "ShapeError: seq_lens is [2]: it must be [1]"),
    (
        PAGED | {"block_table": TABLE[:1], "seq_lens": lens(8)},
        "ShapeError: q [2, 8, 128] does not fit rows [8, 2, 16, 80] with block_table [1, 4]",
    ),
    *(
        (PAGED | {"k_rows": PAGES[:, :, :n], "v_rows": PAGES[:, :, :n]}, f"ShapeError: {n} {SIZES}")
        for n in (15, 0)
    ),
    (PAGED | {"v_rows": PAGES[:5]}, "ShapeError: must both be [num_pages, num_kv_heads, page_size"),
    # several queries a sequence
    ({"q": MANY, "q_lens": lens(3)}, "ShapeError: q_lens is [1]: it must be [2]"),
    ({"q": MANY, "q_lens": lens(3, 3).long()}, "ConfigError: q_lens is torch.int64: use int32"),
    ({"q_lens": lens(1, 1)}, "ShapeError: q_lens are given with q [2, 8, 128]: they need"),
    ({"q": MANY[:1], "q_lens": lens(3, 3)}, "ShapeError: q_lens is [2]: it must be [1]"),
    ({"q": MANY[:, :, :3]}, "ShapeError: num_q_heads a multiple of num_kv_heads"),
    ({"q": MANY[..., :64]}, "ConfigError: int4-g4 has head_dim 128, not 64"),
    # ragged queries
    *(
        ({"q": RAGGED, "q_indptr": at}, text)
        for at, text in (
            ([0, 3, 6], "ConfigError: q_indptr is of type list: give a tensor"),
            (lens(0, 3, 6).long(), "ConfigError: q_indptr is torch.int64: use int32"),
            (lens(0, 3, 6)[None], "ShapeError: it must be [batch + 1]"),
            (lens(0, 3, 4, 6), "ShapeError: q_indptr [batch + 1] [4] does not fit rows [2, "),
        )
    ),
    (
        {"q": RAGGED[None], "q_indptr": lens(0, 3, 6)},
        "ShapeError: q_indptr is given with q [1, 6, 8, 128]: it needs q [total, num_q_heads, head",
    ),
    (
        {"q": RAGGED, "q_indptr": lens(0, 3, 6), "q_lens": lens(3, 3)},
        "ShapeError: q_lens and q_indptr are both given: use q_indptr with",
    ),
    (
        variant(tree_mask=TREE) | {"q": RAGGED, "q_indptr": lens(0, 3, 6)},
        "ShapeError: a tree_mask is given with q [6, 8, 128]: it needs q [batch, q_len",
    ),
    # variants
    ({"variant": {"soft_cap": 50.0}}, "ConfigError: variant is of type dict: give a kvquant"),
    (variant(tree_mask=TREE) | {"q": Q}, "ShapeError: a tree_mask is given with q [2, 8, 128]: it"),
    (variant(soft_cap=0.0), "ConfigError: soft_cap is 0.0: use a positive number"),
    (variant(soft_cap=torch.inf), "ConfigError: soft_cap is inf"),
    (variant(soft_cap=True), "ConfigError: soft_cap is True"),
    (variant(window=0), "ConfigError: window 0 is not possible: use a whole number from 1"),
    (variant(sink_logits=torch.zeros(2)), "ShapeError: sink_logits is [2]: it must be [8]"),
    (variant(alibi_slopes=torch.zeros(8).half()), "ConfigError: alibi_slopes is torch.float16"),
    (variant(alibi_slopes=[1.0] * 8), "ConfigError: alibi_slopes is of type list"),
    (variant(tree_mask=TREE[..., :2]), "ShapeError: tree_mask is [2, 3, 2]"),
    (variant(score_offsets=torch.zeros(2, 8)), "ShapeError: it must be [2, 3, 8]"),
]
ELSEWHERE: list[Case] = [
    (other("meta", "k_rows"), "DeviceError: q is on cpu, k_rows on meta"),
    (other("meta", "v_rows"), "DeviceError: q is on cpu, v_rows on meta"),
    (PAGED | other("meta", "block_table"), "DeviceError: q is on cpu, block_table on meta"),
    ({"q": MANY, "q_lens": lens(3, 3).to("meta")}, "DeviceError: q is on cpu, q_lens on meta"),
    (variant(alibi_slopes=torch.zeros(8).to("meta")), "DeviceError: alibi_slopes on meta"),
    (
        {"q": RAGGED, "q_indptr": lens(0, 3, 6).to("meta")},
        "DeviceError: q is on cpu, q_indptr on meta",
    ),
]
NUMBERS: list[Case] = [  # which the reference does not take
    (other(torch.int8, "q"), "ConfigError: q is torch.int8: use"),
    (other(torch.float64, "q"), "ConfigError: q is torch.float64: use"),
    *(
        ({"num_splits": n}, f"ConfigError: num_splits {n!r} is not possible: use a whole number fr")
        for n in (0, -1, True, False, 2.0, "2", [1])
    ),
    ({"backend": "gpu"}, "ConfigError: backend 'gpu' does not exist: use cpu, cuda or reference"),
    ({"num_splits": 0}, "ConfigError: from 1 to 2147483647, or None"),
]
VALUES: list[Case] = [  # which nobody reads on CUDA, but in debug mode
    ({"seq_lens": lens(8, 65)}, "ShapeError: seq_lens of sequence 1 is 65: there is room for 0 to"),
    ({"seq_lens": lens(-1, 3)}, "ShapeError: seq_lens of sequence 0 is -1: there is room for 0 to"),
    ({"q": MANY, "q_lens": lens(3, 4)}, "ShapeError: sequence 1 is 4: q has room for 0 to 3"),
    ({"q": MANY, "q_lens": lens(-1, 3)}, "ShapeError: q_lens of sequence 0 is -1: q has room for"),
    *(
        ({"q": RAGGED, "q_indptr": lens(*at)}, f"ShapeError: q_indptr {text}")
        for at, text in (
            ((1, 3, 6), "begins with 1: it must begin with 0"),
            ((0, 7, 6), "falls from 7 to 6 at sequence 1: each entry must be the one before it or"),
            (
                (0, 3, 7),
                "ends with 7, and q has 6 rows: it must end with that; rows of padding may",
            ),
            (
                (0, 3, 5),
                "ends with 5, and q has 6 rows: it must end with that; rows of padding may",
            ),
        )
    ),
    (variant(sink_logits=torch.full((8,), torch.nan)), "ConfigError: sink_logits must be finite"),
    (variant(alibi_slopes=torch.full((8,), torch.inf)), "ConfigError: alibi_slopes must be finite"),
    (variant(tree_mask=~TREE), "ShapeError: query 0 of sequence 0 sees no"),
    (
        variant(tree_mask=PADDED_TREE) | {"q_lens": lens(3, 2)},
        "ShapeError: query 0 of sequence 1 sees no token of the tree",
    ),
]


EVERY = CASES + ELSEWHERE + NUMBERS + VALUES


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
@pytest.mark.parametrize(("change", "text"), EVERY, ids=[text for _, text in EVERY])
def test_what_does_not_fit_is_refused(
    change: dict[str, Any], text: str, backend: str | None
) -> None:
    given = GIVEN | change
    with refused(text):
        decode_attention(**{"backend": backend, **given})
    if backend == "reference" and text not in [text for _, text in NUMBERS]:
        with refused(text):
            reference_attention(**given)


def test_the_calls_that_the_refusals_change_are_right() -> None:
    for change in ({}, PAGED, {"q": MANY, "q_lens": lens(3, 0)}, {"num_splits": 2}):
        decode_attention(**GIVEN | change)
    decode_attention(**GIVEN | {"q": RAGGED, "q_indptr": lens(0, 3, 6)})


def on_cuda(q: torch.Tensor, **given: Any) -> Any:
    return decode_attention(q.as_subclass(OnCuda), **given)


@pytest.mark.extra("cuda")
def test_a_settled_call_is_not_checked_again_but_any_other_is(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []

    def note(*arguments: Any) -> None:
        checked.append(arguments)
        check_segments(*arguments)

    monkeypatch.setattr(attention, "check_segments", note)
    by_name = {"k_format": "int4-g4", "v_format": "int4-g4"}
    for _ in range(3):
        for change in ({}, {"num_splits": 1}, by_name, PAGED):
            on_cuda(**GIVEN | change)
    assert len(checked) == 4 and len(cuda.launched) == 12
    on_16_bit = [({"q": Q.float()}, "ConfigError: on CUDA use bfloat16")]
    for change, text in CASES + NUMBERS + on_16_bit:
        for _ in range(2):
            with refused(text):
                on_cuda(**GIVEN | change)
    assert len(cuda.launched) == 12


def test_it_is_refused_while_a_graph_is_traced() -> None:
    traced = "it must be [batch, num_q", "the last", "use int32", "format 'int5'", "num_q_heads a"
    for change, text in CASES + NUMBERS[:-1]:
        if "num_splits" not in change and not text.rpartition(": ")[2].startswith(traced):
            continue
        compiled = torch.compile(
            lambda given=GIVEN | change: decode_attention(**given), fullgraph=True, backend="eager"
        )
        with pytest.raises(Exception) as caught:  # the type is torch's
            compiled()
        assert text.rpartition(": ")[2] in str(caught.value)
