"""append_rows and dequantize_pages: the bytes, row by row; 8 s."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from append_cases import angles
from slow_cases import mark_slow

from kvquant import (
    Basis,
    RowFormat,
    Slots,
    append_rows,
    dequantize_pages,
    dequantize_rows,
    quantize_rows,
)
from kvquant.ops import append as append_ops
from kvquant.rows.format import NAMES
from kvquant.rows.quantize import is_nan_row
from kvquant.rows.rotation import apply_rope

HEADS, PAGES, PAGE_SIZE = 2, 5, 7  # page sizes that attention does not take are stored too
SEQ_SLOTS, EXACT_LEN = 3, 6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
USUAL = ("int2", "int3", "int4", "int4-g4", "int8-g8", "fp8", "bf16", "fp16")  # of them
TRANSFORMS = "as it comes", "offset", "rope", "all"


def storage(fmt: RowFormat) -> torch.Tensor:
    """Rows of rubbish, in strides that are not those of a contiguous tensor."""
    shape = (HEADS, PAGES, PAGE_SIZE, fmt.row_bytes + 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8)[..., 2:-1].transpose(0, 1)


def row(rows: torch.Tensor, slot: int) -> torch.Tensor:
    """[num_kv_heads, row_bytes] at a slot."""
    return rows[slot // rows.shape[2], :, slot % rows.shape[2]]


def one_by_one(
    values: torch.Tensor,
    rows: torch.Tensor,
    exact_rows: torch.Tensor | None,
    slots: Slots,
    fmt: RowFormat,
    exact_format: RowFormat,
) -> None:
    """What append_rows promises: values [num_tokens, num_kv_heads, head_dim] as they are stored."""
    for i, packed in enumerate(slots.packed.tolist()):
        new = values[i]
        if exact_rows is not None and slots.exact is not None and slots.evicted is not None:
            exact, evicted = int(slots.exact[i]), int(slots.evicted[i])
            rounded = quantize_rows(new, exact_format, check=False, backend="reference")
            new = dequantize_rows(rounded, exact_format)
            if evicted >= 0:
                old = dequantize_rows(row(exact_rows, exact), exact_format)
                row(rows, evicted)[:] = quantize_rows(old, fmt, check=False, backend="reference")
                packed = -1
            if exact >= 0:
                row(exact_rows, exact)[:] = rounded
        if packed >= 0:
            row(rows, packed)[:] = quantize_rows(new, fmt, check=False, backend="reference")


def some_slots(num_tokens: int) -> Slots:
    """Every kind: packed, packed and exact, exact with one that leaves, nowhere."""
    packed = torch.randperm(PAGES * PAGE_SIZE)
    exact = torch.randperm(SEQ_SLOTS * EXACT_LEN)[:num_tokens]
    kind = torch.arange(num_tokens) % 4
    evicted = torch.where(kind == 2, packed[num_tokens : 2 * num_tokens], -1)
    exact = torch.where((kind == 1) | (kind == 2), exact, -3)
    return Slots(torch.where(kind == 3, -1, packed[:num_tokens]), exact, evicted)


CASES = {  # dtype, K, V; the CPU kernel's bytes are torch's in kernels/cpu/test_rows.py
    "reference": [
        (torch.float32, "int4-g4", 80, "int8", 64),
        (torch.bfloat16, "fp8-g8", 112, "int4", 192),
        (torch.float16, "bf16", 64, "fp8", 256),
        (torch.bfloat16, "int8-g8", 128, "fp16", 96),
    ],
    None: [(torch.bfloat16, "int4-g4", 64, "fp8", 96), (torch.float32, "fp8", 96, "int4-g4", 64)],
}


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("exact_format", [None, "bf16", "fp16"])
def test_every_byte_is_that_of_quantize_rows_on_the_transformed_values(
    kind: str, exact_format: str | None, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append_ops, "TOKENS_PER_PART", 4)
    with_offset, with_rope = (kind == "all" or word in kind for word in ("offset", "rope"))
    for dtype, k_name, k_dim, v_name, v_dim in CASES[backend]:
        k_format, v_format = RowFormat.parse(k_name, k_dim), RowFormat.parse(v_name, v_dim)
        k, v = (3 * torch.randn(9, HEADS, dim).to(dtype) for dim in (k_dim, v_dim))
        offsets = [torch.randn(HEADS, dim) for dim in (k_dim, v_dim)]
        transforms = [Basis(x) if with_offset else None for x in offsets]
        rope = angles(9, k_dim // 2)._replace(interleaved=k_dim == 80) if with_rope else None
        slots = some_slots(9)
        exact: list[torch.Tensor | None] = [None, None]
        formats = [RowFormat(exact_format or "bf16", 1, dim) for dim in (k_dim, v_dim)]
        if exact_format is None:
            slots = Slots(slots.packed)
        else:
            old = torch.randn(SEQ_SLOTS, HEADS, EXACT_LEN, 256)
            exact = [quantize_rows(old[..., : fmt.head_dim], fmt) for fmt in formats]
        rows = [storage(k_format), storage(v_format)]
        expected = [x.clone() for x in rows]
        expected_exact = [None if x is None else x.clone() for x in exact]
        options: dict[str, Any] = dict(zip(("exact_k", "exact_v"), exact, strict=True))
        options |= zip(("k_transform", "v_transform"), transforms, strict=True)
        options |= {"exact_format": exact_format or "bf16", "rope": rope, "backend": backend}
        append_rows(k, v, rows[0], rows[1], slots, k_format, v_format, **options)
        for side, x in enumerate((k, v)):
            values = x.float() if side or rope is None else apply_rope(x.float(), rope)
            values = values - offsets[side] if with_offset else values
            fmt = (k_format, v_format)[side]
            arrays = expected[side], expected_exact[side]
            one_by_one(values, *arrays, slots, fmt, formats[side])
            assert torch.equal(rows[side], expected[side]), (str(fmt), dtype)
            got, wanted = exact[side], expected_exact[side]
            if got is not None and wanted is not None:
                assert torch.equal(got, wanted), (str(fmt), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", mark_slow(NAMES, USUAL))
def test_values_come_back_from_their_slots(name: str, dtype: torch.dtype) -> None:
    fmt = RowFormat.parse(name, 64)
    rows = storage(fmt)
    rows.copy_(quantize_rows(torch.randn(PAGES, HEADS, PAGE_SIZE, 64), fmt))
    slots = torch.tensor([0, 34, -1, 3, 3, -9, 17])
    for backend in (None, "reference"):
        values = dequantize_pages(rows, fmt, slots, dtype, backend=backend)
        assert values.dtype == dtype and values.shape == (7, HEADS, 64)
        for i, slot in enumerate(slots.tolist()):
            expected = dequantize_rows(row(rows, max(slot, 0)), fmt, dtype)
            assert torch.equal(values[i], expected if slot >= 0 else torch.zeros_like(expected))
        out = torch.full_like(values, 3)
        assert dequantize_pages(rows, fmt, slots, dtype, out, backend=backend) is out
        assert torch.equal(out, values)


def test_nothing_in_gives_nothing() -> None:
    fmt = RowFormat.parse("int4", 64)
    empty, none = torch.zeros(0, HEADS, 64), torch.zeros(0, dtype=torch.int64)
    rows = storage(fmt)
    before = rows.clone()
    append_rows(empty, empty, rows, rows.clone(), none, fmt, fmt)
    four = torch.randn(4, HEADS, 64)
    append_rows(four, four, rows, rows.clone(), torch.full((4,), -1), fmt, fmt)
    assert torch.equal(rows, before)
    assert dequantize_pages(rows, fmt, none, torch.float16).shape == (0, HEADS, 64)
    roomless = rows[:, :, :0]
    append_rows(four, four, roomless, roomless, torch.full((4,), -1), fmt, fmt)
    zeros = dequantize_pages(roomless, fmt, torch.full((4,), -1), torch.float32)
    assert torch.equal(zeros, torch.zeros_like(four))


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4e38])
@pytest.mark.parametrize("name", mark_slow(NAMES, USUAL))
def test_a_row_that_cannot_be_held_is_nan_throughout_and_counted(
    name: str, value: float, backend: str | None
) -> None:
    fmt = RowFormat.parse(name, 64)
    k, v = torch.randn(2, 6, HEADS, 64)
    good_rows, bad_rows = ([storage(fmt).contiguous(), storage(fmt)] for _ in "ab")
    exact_format = RowFormat.parse("bf16", 64)
    old = quantize_rows(torch.randn(SEQ_SLOTS, HEADS, EXACT_LEN, 64), exact_format)
    good_exact, bad_exact = [old, old.clone()], [old.clone(), old.clone()]
    slots = Slots(
        torch.tensor([3, 8, 25, -1, 30, -1]),
        torch.tensor([-1, -1, 5, 7, -1, -1]),
        torch.tensor([-1, -1, -1, 20, -1, -1]),
    )
    bad = torch.tensor([100, 0], dtype=torch.int32)
    for rows, exact in ((good_rows, good_exact), (bad_rows, bad_exact)):
        # tokens 0 and 3 of K, 2 of V, which is packed as well; 5 goes nowhere; a row of V leaves
        if exact is bad_exact:
            k[0, 1, 63] = k[3, 0, 0] = v[2, 1, 17] = k[5] = value
            bad_exact[1][1, 0, 1] = quantize_rows(
                torch.full((64,), math.nan), exact_format, check=False
            )
        options: Any = {"exact_k": exact[0], "exact_v": exact[1], "backend": backend}
        options["bad"] = bad if exact is bad_exact else None
        append_rows(k, v, rows[0], rows[1], slots, fmt, fmt, **options)
    assert bad.tolist() == [102, 1], "two rows of a token are one, what leaves was counted before"
    nan_slots = ({(3, 1)}, {(20, 0), (25, 1)}), ({(7, 0)}, {(5, 1)})  # (slot, head) of K, V
    for fmt_at, places, good, got in (
        (fmt, nan_slots[0], good_rows, bad_rows),
        (exact_format, nan_slots[1], good_exact, bad_exact),
    ):
        for side in (0, 1):
            for slot in range(got[side].shape[0] * got[side].shape[2]):
                if fmt_at is fmt and slot not in (3, 8, 20, 25, 30):
                    continue  # rubbish before and after
                for head in range(HEADS):
                    written = row(got[side], slot)[head]
                    is_bad = (slot, head) in places[side]
                    assert bool(is_nan_row(written, fmt_at)) == is_bad
                    if is_bad:
                        assert bool(dequantize_rows(written, fmt_at).isnan().all())
                    else:
                        assert torch.equal(written, row(good[side], slot)[head])


@pytest.mark.parametrize("name", mark_slow(NAMES, USUAL))
def test_nan_rows_are_told_by_their_first_number_in_every_backend(name: str) -> None:
    fmt = RowFormat.parse(name, 64)
    x = torch.randn(6, 64)
    good = quantize_rows(x, fmt, backend="reference")
    x[1, 63], x[2, 17], x[4, 0], x[5, 0] = math.nan, -math.inf, math.inf, -3.4e38
    for backend in ("reference", "cpu"):
        rows = quantize_rows(x, fmt, check=False, backend=backend)
        assert is_nan_row(rows, fmt).tolist() == [False, True, True, False, True, True]
        assert len(rows[[1, 2, 4, 5]].unique(dim=0)) == 1, "one row stands for all of these"
        assert torch.equal(rows[::3], good[::3])
        assert bool(dequantize_rows(rows[1], fmt).isnan().all())
        header = rows[1, : fmt.header_bytes or fmt.row_bytes]
        numbers = header.view(torch.bfloat16 if name == "bf16" else torch.float16)
        assert bool(numbers.isnan().all())
        assert not rows[1, len(header) :].any()


def with_odd_strides(odd: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose axes of size 1 have this stride."""
    strides = torch.empty(shape).stride()
    strides = tuple(odd if size == 1 else step for step, size in zip(strides, shape, strict=True))
    return torch.zeros(2048, dtype=dtype).as_strided(shape, strides)


@pytest.mark.parametrize("odd", [1, 7], ids=["stride 1", "stride 7"])
@pytest.mark.parametrize("exact", [False, True], ids=["packed", "exact"])
def test_axes_of_one_may_have_any_stride(odd: int, exact: bool) -> None:
    """Torch calls such a tensor contiguous, and yet its view() looks at them."""
    fmt, wide = RowFormat.parse("int4-g4", 64), RowFormat.parse("fp16", 64)
    for tokens, heads, pages in ((1, 1, 1), (3, 1, 3), (1, 2, 1), (0, 1, 1)):
        x, results = torch.randn(tokens, heads, 64), []
        for backend in ("cpu", "reference"):
            new = with_odd_strides(odd, (tokens, heads, 64), torch.float32).copy_(x)
            shapes = (pages, heads, 1, fmt.row_bytes), (1, heads, 3, wide.row_bytes)
            rows, kept = (
                [with_odd_strides(odd, shape, torch.uint8) for _ in "kv"] for shape in shapes
            )
            packed, none = torch.arange(tokens), torch.full((tokens,), -1)
            slots = Slots(packed, packed.clone(), none) if exact else Slots(packed)
            both = (kept[0], kept[1]) if exact else (None, None)
            options: Any = {"exact_k": both[0], "exact_v": both[1], "backend": backend}
            append_rows(new, new, rows[0], rows[1], slots, fmt, fmt, **options)
            found = dequantize_pages(rows[0], fmt, packed, torch.float32, backend=backend)
            results.append([*rows, *kept, found])
        assert all(map(torch.equal, *results))
        assert bool(results[0][2 if exact else 0].any()) == (tokens > 0)
