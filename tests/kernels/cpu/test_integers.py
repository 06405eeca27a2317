"""Attention by sums of integers: 16-bit queries on processors with VNNI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decode_rows import (
    BOTH,
    INT4,
    KINDS,
    RAGGED,
    SMALL,
    call_of,
    check_pages,
    hard,
    lens,
    make_rows,
    packed,
)
from relative_l2 import relative_l2
from segment_cases import assert_close
from slow_cases import mark_slow

from kvquant import RowFormat, dequantize_rows, reference_attention
from kvquant.kernels.cpu import compile as compiling
from kvquant.kernels.cpu import decode, simd
from kvquant.kernels.cpu.integers import MAX_INTEGER_HEADS, Keys, Values
from kvquant.kernels.cpu.values import parse_spec, tokens_per_block
from kvquant.rows.call import AttentionCall
from kvquant.rows.segment import Segment

HAS_VNNI = simd.in_hardware("avx512vnni")

# Half a step of 2**-15 of the greatest element, times what is left of a code: measured 2e-4 at most
LIMIT = 5e-4
OLDER = ["avx512vnni", "avx512f"]  # features, each of which a processor may lack

# K, V: fields of 2, 4 and 8 codes a word, a group, groups of a vector, a vector of groups
PAIRS = [
    ("int4/128", "int4/128"),
    ("int4-g4/128", "int4-g4/128"),
    ("int4-g8/128", "int8-g8/128"),
    ("int8/64", "int4-g2/64"),
    ("int8-g4/192", "int8/256"),
    ("int2/128", "int2/256"),
    ("int4/96", "int4-g4/64"),  # K of four tokens together only
    ("bf16/64", "int4/128"),
    ("int8-g2/64", "int3/80"),
]


def attend(q: torch.Tensor, *rows: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's float32 result, before it is rounded to the dtype of q."""
    k_rows, v_rows, seq_lens = rows
    segment = Segment(k_rows, v_rows, seq_lens, options["k_format"], options["v_format"])
    out, lse = decode.attend(AttentionCall(q, [segment], q.shape[-1] ** -0.5))
    assert out.dtype == torch.float32
    return out, lse


@pytest.fixture(params=[None, *OLDER])
def feature(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str | None:
    """A processor like this one, and those without a feature; their kernels are their own."""
    lacks: str | None = request.param
    hidden = OLDER[: OLDER.index(lacks) + 1] if lacks else []
    real = simd.in_hardware
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(tmp_path))  # code from the disk cannot be looked at
    monkeypatch.setattr(simd, "in_hardware", lambda name: name not in hidden and real(name))
    monkeypatch.setattr(compiling, "_surroundings", lambda: f"without {lacks}")
    monkeypatch.setattr(decode, "make_decode_kernel", decode.make_decode_kernel.__wrapped__)
    return lacks


def limit(q: torch.Tensor, without: str | None = None) -> float:
    exact = q.dtype == torch.float32 or without is not None or not HAS_VNNI
    return 1e-5 if exact else LIMIT


def name_of(case: tuple[tuple[str, str], int]) -> str:
    return f"{'+'.join(case[0])}-{case[1]}"


# each pair with ratio 4; each ratio with PAIRS[2] (fields of two widths) and with PAIRS[6] (K of
# four tokens together)
@pytest.mark.parametrize(
    "case",
    mark_slow(
        [
            *((pair, 4) for pair in PAIRS),
            *((PAIRS[i], ratio) for i in (2, 6) for ratio in (1, 2, 3, 5, 8, 16)),
        ],
        [(pair, 4) for pair in PAIRS[1:3]],
    ),
    ids=name_of,
)
def test_any_pair_of_formats_and_ratio_of_heads(case: tuple[tuple[str, str], int]) -> None:
    pair, ratio = case
    k_format, v_format = (
        RowFormat.parse(name, int(dim)) for name, dim in (word.split("/") for word in pair)
    )
    options: dict[str, Any] = {"k_format": k_format, "v_format": v_format}
    x, *rows = call_of(RAGGED, 2 * ratio, (k_format, v_format))
    for dtype in (torch.bfloat16, torch.float16):
        q = x.to(dtype)
        found = attend(q, *rows, **options)
        expected = reference_attention(q, *rows, return_lse=True, **options)
        assert_close(found, expected, limit(q), 1e-3)
        for out, wanted in zip(found[0], expected[0], strict=True):  # none hides behind others
            assert relative_l2(out, wanted) <= 2 * limit(q)
    check_pages(q, *rows, **options)


@pytest.mark.parametrize("ratio", [1, 4])
def test_pages_smaller_than_a_block(ratio: int) -> None:
    """V has float32 products there: two rows of a vector would lie in two pages."""
    x, *rows = call_of(RAGGED, 2 * ratio)
    q = x.bfloat16()
    check_pages(q, *rows, sizes=SMALL[:2], limit=2 * limit(q), **BOTH)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dtype", mark_slow([torch.bfloat16, torch.float16], [torch.bfloat16]), ids=str
)
def test_hard_values(kind: str, dtype: torch.dtype) -> None:
    q, k, v = hard(kind)
    q = q.to(dtype)
    if kind == "the greatest scale":
        q = q / 4  # fp16 ends there
    k_rows, v_rows = packed(k, INT4), packed(v, INT4)
    out, _ = attend(q, k_rows, v_rows, lens(300, 300), **BOTH)
    expected = reference_attention(q, k_rows, v_rows, lens(300, 300), **BOTH)
    # scores of thousands are off by more than the limit allows, and so they are in 16 bit
    k, v = (dequantize_rows(rows, INT4).bfloat16() for rows in (k_rows, v_rows))
    torchs = torch.nn.functional.scaled_dot_product_attention(
        q.bfloat16()[:, :, None], k, v, enable_gqa=True
    )[:, :, 0]
    large = kind in ("q of 1e4", "the greatest scale", "one huge outlier")
    allowed = relative_l2(torchs, expected) if large else 0.0
    assert relative_l2(out, expected) <= max(limit(q), allowed)


def test_a_sink_does_not_hide_thousands_of_small_weights() -> None:
    """Weights are rounded to steps of the greatest of their tile, not of the sequence."""
    q = torch.ones(1, 4, 64).bfloat16()
    k, v = torch.zeros(1, 1, 4096, 64), torch.randn(1, 1, 4096, 64) + 1
    k[:, :, 0] = 8.3 / 8  # a weight of e**8.3 = 4024, as large as those of all others
    v[:, :, 0] = 0
    k_rows, v_rows = packed(k, INT4), packed(v, INT4)
    out, _ = attend(q, k_rows, v_rows, lens(4096), **BOTH)
    expected = reference_attention(q, k_rows, v_rows, lens(4096), **BOTH)
    assert float(expected.mean()) > 0.4
    assert relative_l2(out, expected) <= limit(q)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_reach_the_output(where: str, bad: float) -> None:
    x, k_rows, v_rows, _ = call_of((200,))
    q = x.bfloat16()
    if where == "q":
        q[0, 1, 5] = bad
    else:
        header = (k_rows if where == "k" else v_rows)[0, 0, 77, :4].view(torch.float16)
        header[:] = bad  # scale and shift of a group
    out, _ = attend(q, k_rows, v_rows, lens(200), **BOTH)
    others = out[0, [0, 2, 3]] if where == "q" else out[0, 4:]
    assert others.isfinite().all()
    hurt = out[0, 1] if where == "q" else out[0, :4, : INT4.group_size]
    assert not hurt.isfinite().any()
    expected = reference_attention(q, k_rows, v_rows, lens(200), **BOTH)
    if where != "v" or bad != bad:
        assert out.isnan().any(-1).equal(~expected.isfinite().all(-1))


def test_bfloat16_queries_are_exact_above_a_part_of_their_greatest_element() -> None:
    k_rows, v_rows = make_rows(INT4, (600,), 1), make_rows(RowFormat.parse("bf16", 64), (600,), 1)
    q = (torch.rand(1, 4, 64) + 0.02).bfloat16() * torch.randn(1, 4, 64).sign()
    options: dict[str, Any] = {"k_format": INT4, "v_format": RowFormat.parse("bf16", 64)}
    out, lse = attend(q, k_rows, v_rows, lens(600), **options)
    expected, expected_lse = reference_attention(
        q, k_rows, v_rows, lens(600), return_lse=True, **options
    )
    assert relative_l2(out, expected) <= 1e-5
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", mark_slow(["int4-g4", "int8", "int3", "int2"], ["int4-g4"]))
def test_processors_without_a_feature_have_other_code(
    name: str, dtype: torch.dtype, feature: str | None
) -> None:
    fmt = RowFormat.parse(name, 128)
    x, *rows = call_of((300, 5), formats=(fmt, fmt))
    options: dict[str, Any] = {"k_format": fmt, "v_format": fmt}
    q = x.to(dtype)
    expected = reference_attention(q, *rows, **options)
    assert relative_l2(attend(q, *rows, **options)[0], expected) <= limit(q, feature)
    kernel: Any = compiling._kernels[-1]
    code = kernel._library.get_asm_str()
    is_integer = feature is None and HAS_VNNI and dtype != torch.float32 and name != "int3"
    assert ("vpdpwssd" in code) == is_integer
    if simd.in_hardware("avx512f") and not is_integer and name != "int8":
        assert "vcvtdq2ps" not in code  # codes number values, nothing converts them


def test_which_rows_are_multiplied_as_integers() -> None:
    def served(name: str, heads: int) -> tuple[bool, bool]:
        fmt, tokens = parse_spec(name), tokens_per_block(heads)
        return Keys.serve(fmt, heads, tokens), Values.serve(fmt, heads)

    for name in ("int4/64", "int4-g4/128", "int4-g8/128", "int8/64", "int8-g8/256", "int2/128"):
        assert all(served(name, heads) == (True, True) for heads in (1, 3, 4, 8)), name
    assert served("int4/96", 4) == (True, False)  # rows of 48 bytes are no pieces of 32
    for name in ("int4-g8/64", "int4/80", "int3/128", "fp8/128", "bf16/128", "int4-g8/512+64"):
        assert served(name, 4) == (False, False), name
    assert served("int4/128", MAX_INTEGER_HEADS + 1) == (False, False)
