"""The append kernel of the CPU against its meaning in torch, bit for bit; 15 s."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from append_cases import Case, append, differences, expected, make_call, results
from slow_cases import mark_slow

from kvquant import RowFormat, append_rows
from kvquant.ops import append as append_ops
from kvquant.rows.format import HEAD_DIMS
from kvquant.rows.quantize import EXACT_DTYPES

SOURCES, EXACT = ("fp32", "bf16", "fp16"), ("", "bf16", "fp16")
PAIRS = [  # each codec; groups of whole chunks of 16 elements and others
    ("int3", 80, "int2", 128),
    ("int4-g4", 128, "int8", 80),
    ("fp8-g8", 80, "int4", 64),
    ("bf16", 80, "fp8-g4", 64),
    ("int8-g4", 80, "fp16", 112),
]


def check(*, exact: str = "", **options: Any) -> None:
    """Rows and counts of the kernel are those of torch; rows are strided, some hostile."""
    for layout, pages in (("odd", "tokens"), ("heads", "dense")):
        given = {"layout": layout, "pages": pages, "page_size": 11, "skip": True, "hostile": True}
        call = make_call(Case(**{**given, "exact": exact, **options}))
        wanted = expected(call)
        append(**call, backend="cpu")
        problem = differences(results(call), wanted)
        assert not problem, problem


# each pair, dtype and 16-bit format once; a kernel takes half a second to compile
USUAL = [(pair, SOURCES[i % 3], EXACT[i % 3]) for i, pair in enumerate(PAIRS)]


@pytest.mark.parametrize(
    "kind",
    mark_slow(itertools.product(PAIRS, SOURCES, EXACT), USUAL),
    ids=lambda kind: f"{kind[0][0]} {kind[0][2]} {kind[1]} {kind[2]}",
)
def test_every_byte_and_count_is_that_of_torch(
    kind: tuple[tuple[str, int, str, int], str, str],
) -> None:
    (k, head_dim, v, v_head_dim), source, exact = kind
    dims = {"k": k, "head_dim": head_dim, "v": v, "v_head_dim": v_head_dim}
    for heads, tokens in ((1, 1), (2, 30), (3, 17), (4, 0), (5, 33)):
        check(heads=heads, tokens=tokens, exact=exact, source=source, **dims)


@pytest.mark.parametrize("parts", [4, 256], ids=lambda n: f"parts of {n}")
@pytest.mark.parametrize("with_rope", [False, True], ids=["", "rope"])
@pytest.mark.parametrize("kind", ["offset", "matrix", "clip", "feedback"])
def test_transformed_rows_are_those_of_torch(
    kind: str, with_rope: bool, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append_ops, "TOKENS_PER_PART", parts)
    given: dict[str, Any] = {"k": "int4", "v": "fp8-g4", "head_dim": 64, "heads": 2, "tokens": 21}
    given |= {"rotary_dim": 32 * with_rope}
    for transforms in ({kind: "k"}, {"offset": "k", kind: "kv"}):
        for exact in ("", "bf16"):
            check(exact=exact, **given, **transforms)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_does_not_change_the_bytes(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:  # 33 tokens of 31 heads are 4 work items a side
        for exact in ("", "bf16"):
            check(v="int8", v_head_dim=80, heads=31, tokens=33, exact=exact, source="fp32")
    finally:
        torch.set_num_threads(before)


def test_what_reads_as_negated_is_negated() -> None:
    fmt = RowFormat.parse("int4", 64)
    x = torch.randn(3, 2, 64)
    results = []
    for new in (torch._neg_view(x), -x):  # as a conjugate has it, not yet computed
        rows = [torch.zeros(1, 2, 3, fmt.row_bytes, dtype=torch.uint8) for _ in "kv"]
        append_rows(new, new, rows[0], rows[1], torch.arange(3), fmt, fmt)
        results.append(rows[0])
    assert torch.equal(*results)


def test_the_widest_row_fits() -> None:
    for exact in EXACT_DTYPES:
        widest = max(HEAD_DIMS)
        check(k="int4", head_dim=64, v="bf16", v_head_dim=widest, heads=2, tokens=33, exact=exact)
