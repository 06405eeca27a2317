"""The append kernel of the CPU against its meaning in torch, bit for bit; 15 s."""

from __future__ import annotations

import itertools

import pytest
import torch
from append_cases import append
from slow_cases import mark_slow

from kvquant import Rope, RowFormat, Slots, append_rows
from kvquant.errors import ConfigError
from kvquant.ops import append as append_ops
from kvquant.rows.basis import Encoding
from kvquant.rows.format import HEAD_DIMS
from kvquant.rows.quantize import EXACT_DTYPES

PAGES, PAGE_SIZE, SEQ_SLOTS, EXACT_LEN = 6, 11, 4, 9
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = [  # each codec; groups of whole chunks of 16 elements and others
    ("int3", 80, "int2", 128),
    ("int4-g4", 128, "int8", 80),
    ("fp8-g8", 80, "int4", 64),
    ("bf16", 80, "fp8-g4", 64),
    ("int8-g4", 80, "fp16", 112),
]


def rubbish(pages: int, heads: int, rows: int, row_bytes: int) -> torch.Tensor:
    """Rows of any bytes at odd addresses, in strides that are not those of a contiguous tensor."""
    shape = (heads, rows, pages, row_bytes + 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8)[..., 1:-2].permute(2, 0, 1, 3)


def hostile(num_tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of any magnitude, one in eight with what no format or not all can hold; strided."""
    x = torch.randn(heads, head_dim + 5, num_tokens) * 10 ** (8 * torch.rand(num_tokens) - 5)
    x = x.permute(2, 0, 1)[..., 5:].contiguous()
    worst = torch.tensor([torch.nan, torch.inf, -torch.inf, 7e4, 3.4e38])
    bad = torch.rand(num_tokens, heads) < 0.125
    x[..., 3] = torch.where(bad, worst[torch.randint(0, 5, bad.shape)], x[..., 3])
    padded = torch.empty(num_tokens, heads + 2, head_dim + 1, dtype=dtype)[:, 1:-1, 1:]
    return padded.copy_(x)


def random_slots(num_tokens: int, has_exact: bool) -> Slots:
    """Every kind in any order: packed, kept, kept in place of one that leaves, nowhere."""
    packed = torch.randperm(PAGES * PAGE_SIZE)
    kind = torch.randint(0, 4, (num_tokens,))
    new = torch.where(kind == 3, -5, packed[:num_tokens])
    if not has_exact:
        return Slots(new)
    exact = torch.where(
        (kind == 1) | (kind == 2), torch.randperm(SEQ_SLOTS * EXACT_LEN)[:num_tokens], -1
    )
    evicted = torch.where(kind == 2, packed[num_tokens : 2 * num_tokens], -2)
    return Slots(new, exact, evicted)


def assert_as_in_torch(
    formats: list[RowFormat],
    heads: int,
    num_tokens: int,
    exact_format: str | None,
    dtype: torch.dtype,
    transforms: tuple[Encoding | None, Encoding | None] = (None, None),
    rope: Rope | None = None,
) -> None:
    new = [hostile(num_tokens, heads, fmt.head_dim, dtype) for fmt in formats]
    rows = [rubbish(PAGES, heads, PAGE_SIZE, fmt.row_bytes) for fmt in formats]
    slots = random_slots(num_tokens, exact_format is not None)
    exact: list[torch.Tensor | None] = [None, None]
    if exact_format is not None:
        exact = [rubbish(SEQ_SLOTS, heads, EXACT_LEN, 2 * fmt.head_dim) for fmt in formats]
    results = []
    for backend in ("cpu", "reference"):
        got = [tensor.clone() for tensor in rows]
        got_exact = [None if tensor is None else tensor.clone() for tensor in exact]
        bad = torch.tensor([7, 0], dtype=torch.int32)
        append(
            k=new[0],
            v=new[1],
            k_rows=got[0],
            v_rows=got[1],
            slots=slots,
            k_format=formats[0],
            v_format=formats[1],
            exact_k=got_exact[0],
            exact_v=got_exact[1],
            exact_format=exact_format or "bf16",
            k_transform=transforms[0],
            v_transform=transforms[1],
            rope=rope,
            bad=bad,
            backend=backend,
        )
        results.append([*got, *got_exact, bad])
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours, theirs)


EXACT = (None, "bf16", "fp16")
# each pair, dtype and 16-bit format once; a kernel takes half a second to compile
USUAL = [(pair, DTYPES[i % 3], EXACT[i % 3]) for i, pair in enumerate(PAIRS)]


@pytest.mark.parametrize(
    "kind",
    mark_slow(itertools.product(PAIRS, DTYPES, EXACT), USUAL),
    ids=lambda kind: f"{kind[0][0]} {kind[0][2]} {kind[1]} {kind[2]}",
)
def test_every_byte_and_count_is_that_of_torch(
    kind: tuple[tuple[str, int, str, int], torch.dtype, str | None],
) -> None:
    pair, dtype, exact_format = kind
    formats = [RowFormat.parse(*pair[:2]), RowFormat.parse(*pair[2:])]
    for heads, num_tokens in ((1, 1), (2, 30), (3, 17), (4, 0), (5, 33)):
        assert_as_in_torch(formats, heads, num_tokens, exact_format, dtype)


@pytest.mark.parametrize("parts", [4, 256], ids=lambda n: f"parts of {n}")
@pytest.mark.parametrize("with_rope", [False, True], ids=["", "rope"])
@pytest.mark.parametrize("kind", ["offset", "rotated", "matrix", "clip", "feedback"])
def test_transformed_rows_are_those_of_torch(
    kind: str, with_rope: bool, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append_ops, "TOKENS_PER_PART", parts)
    dim, heads, num_tokens = 64, 2, 21
    whole = torch.randint(-2, 3, (heads, dim, dim)).float()  # products are exact, in any order
    options = {
        "offset": Encoding(torch.randn(heads, dim)),
        "rotated": Encoding(torch.randn(heads, dim), True),
        "matrix": Encoding(matrix=torch.eye(dim).roll(1, 0).repeat(heads, 1, 1)),
        "clip": Encoding(clip=torch.rand(heads)),
        "feedback": Encoding(feedback=torch.eye(dim) + whole.tril(-1) / 64),
    }
    formats = [RowFormat.parse("int4", dim), RowFormat.parse("fp8-g4", dim)]
    theta = torch.randn(num_tokens, 16)
    rope = Rope(theta.cos(), theta.sin()) if with_rope else None
    for transforms in ((options[kind], None), (options["rotated"], options[kind])):
        for exact_format in (None, "bf16"):
            assert_as_in_torch(
                formats, heads, num_tokens, exact_format, torch.bfloat16, transforms, rope
            )


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_does_not_change_the_bytes(threads: int) -> None:
    formats = [RowFormat.parse("int4-g4", 128), RowFormat.parse("int8", 80)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:  # 33 tokens of 31 heads are 4 work items a side
        for exact_format in (None, "bf16"):
            assert_as_in_torch(formats, 31, 33, exact_format, torch.float32)
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


def test_rows_of_inference_mode_stay_as_they_are_outside_of_it() -> None:
    fmt = RowFormat.parse("int4", 64)
    x = torch.randn(3, 2, 64)
    with torch.inference_mode():
        rows = [torch.zeros(1, 2, 3, fmt.row_bytes, dtype=torch.uint8) for _ in "kv"]
    with pytest.raises(ConfigError, match=r"made in torch.inference_mode\(\)"):
        append_rows(x, x, rows[0], rows[1], torch.arange(3), fmt, fmt)
    assert not any(bool(tensor.any()) for tensor in rows)
    with torch.inference_mode():
        append_rows(x, x, rows[0], rows[1], torch.arange(3), fmt, fmt)
    assert all(bool(tensor.any()) for tensor in rows)


def test_the_widest_row_fits() -> None:
    formats = [RowFormat.parse("int4", 64), RowFormat.parse("bf16", max(HEAD_DIMS))]
    for exact_format in EXACT_DTYPES:
        assert_as_in_torch(formats, 2, 33, exact_format, torch.bfloat16)
