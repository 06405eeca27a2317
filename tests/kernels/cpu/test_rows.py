"""The numba rows against their meaning in torch, bit for bit; compiles about 80 small kernels."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import mark_slow

from kvquant import RowFormat, dequantize_rows, quantize_rows
from kvquant.kernels.cpu import compile as compiling
from kvquant.kernels.cpu import rows as rows_kernels
from kvquant.kernels.cpu import simd
from kvquant.rows.format import ROW_DIMS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def formats(words: str) -> list[RowFormat]:
    """Formats and head_dims, such as "int4-g8/80"."""
    pairs = (word.split("/") for word in words.split())
    found = [RowFormat.parse(name, int(head_dim)) for name, head_dim in pairs]
    return [*found, RowFormat("fp8_ds_mla", 4, 512)]


# each codec with groups of whole chunks of 16 elements and with others (10, 14, 20, 24, 28, 56),
# and each head_dim
FORMATS = [RowFormat(codec, 1, dim) for codec in ("int2", "int3") for dim in ROW_DIMS] + formats(
    "int4/64 int4-g4/128 int4-g8/80 int4-g8/112 int4-g4/96 int4-g8/192 int4-g2/256 int4-g8/512 "
    "int8/80 int8-g2/112 int8-g8/128 int8-g4/80 int8-g8/32 "
    "fp8/96 fp8-g4/64 fp8-g8/80 fp8-g4/112 fp8-g2/192 bf16/80 bf16/256 fp16/112"
)
# each codec, and groups of both kinds; a kernel takes half a second to compile
USUAL = formats(
    "int2/128 int3/80 int4/64 int4-g4/128 int4-g8/80 int8/80 int8-g4/80 fp8-g4/64 fp8-g8/80 "
    "bf16/80 fp16/112"
)


def label(fmt: RowFormat) -> str:
    return f"{fmt}-of-{fmt.head_dim}"


def assert_same_rows(x: torch.Tensor, fmt: RowFormat) -> torch.Tensor:
    expected = quantize_rows(x, fmt, check=False, backend="reference")
    rows = quantize_rows(x, fmt, check=False, backend="cpu")
    assert rows.shape == expected.shape
    if not torch.equal(rows, expected):
        row, byte = (rows != expected).flatten(0, -2).nonzero()[0].tolist()
        raise AssertionError(
            f"byte {byte} of row {row} of {fmt}: {rows.flatten(0, -2)[row, byte]}, in torch "
            f"{expected.flatten(0, -2)[row, byte]}, of {x.flatten(0, -2)[row].tolist()}"
        )
    return rows


def assert_same_values(rows: torch.Tensor, fmt: RowFormat) -> None:
    """Equal bits, but for those of a NaN."""
    for dtype in DTYPES:
        expected = dequantize_rows(rows, fmt, dtype, backend="reference")
        values = dequantize_rows(rows, fmt, dtype, backend="cpu")
        assert values.dtype == dtype
        assert torch.equal(values.isnan(), expected.isnan())
        plain = ~expected.isnan()
        assert torch.equal(values[plain], expected[plain])
        assert torch.equal(values[plain].signbit(), expected[plain].signbit())


def hostile(head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of every kind that has ever broken a quantizer, and 600 plain ones (3 work items)."""
    x = torch.randn(700, head_dim, dtype=torch.float64)
    x[0] = 0.0
    x[1] = -0.0
    x[2] = torch.where(x[2] < 0, -0.0, 0.0)
    x[3] = 1 / 3
    x[4] = -65504.0
    x[5, ::2], x[5, 1::2] = 65504.0, -65504.0
    x[6, 7] = 65504.0
    x[7] *= 1e-8
    x[8] *= 1e-45  # float32's subnormals
    x[9] *= 6e-8  # fp16's
    x[10] = 1000 + 1e-3 * x[10]
    x[11] = -60000 + x[11]
    x[12] = torch.arange(head_dim) % 16 / 2  # ties
    x[13] = torch.arange(head_dim) % 256 - 128.5
    x[14] *= 10 ** (10 * torch.rand(head_dim) - 7)
    x[15] = 448 * (torch.arange(head_dim) % 2 * 2 - 1) * 2.0 ** -(torch.arange(head_dim) % 24)
    x[16] = torch.linspace(-1, 1, head_dim) ** 9
    x[17, 0], x[18, 5], x[19, -1] = torch.nan, torch.inf, -torch.inf
    x[20, 3], x[21, 3], x[22, 3] = 65536.0, -65504.004, 3.4e38
    x[23, ::3] = torch.nan
    x[24:64] *= 10 ** torch.linspace(-9, 4, 40)[:, None]
    x[64:100] += 10 ** torch.linspace(-9, 4, 36)[:, None]
    x[690, 2] = torch.nan
    return x.to(dtype)


@pytest.mark.parametrize(
    "case",
    mark_slow(
        [
            *((fmt, torch.bfloat16) for fmt in FORMATS),
            *itertools.product(USUAL, (torch.float32, torch.float16)),
        ],
        [(fmt, torch.bfloat16) for fmt in USUAL],
    ),
    ids=lambda case: f"{label(case[0])}-{case[1]}",
)
def test_rows_are_those_of_torch(case: tuple[RowFormat, torch.dtype]) -> None:
    fmt, dtype = case
    rows = assert_same_rows(hostile(fmt.head_dim, dtype), fmt)
    assert_same_values(rows, fmt)
    for count in (0, 1, 15, 255, 256, 257):
        assert_same_rows(torch.randn(count, fmt.head_dim).to(dtype), fmt)


@pytest.mark.parametrize("fmt", mark_slow(FORMATS, USUAL), ids=label)
def test_any_bytes_decode_as_in_torch(fmt: RowFormat) -> None:
    rows = torch.randint(0, 256, (600, fmt.row_bytes), dtype=torch.uint8)
    assert_same_values(rows, fmt)  # NaN codes of E4M3, NaN and Inf as scale and shift
    rows[:256] = torch.arange(256, dtype=torch.uint8)[:, None]
    assert_same_values(rows, fmt)
    if fmt.is_exact:
        return
    # every pair of special scales and shifts over all codes
    numbers = [0.0, 2**-24, 2**-14, 1.0, 1 / 3, 65504.0, torch.inf, torch.nan]
    special = torch.tensor([*numbers, *(-x for x in numbers)]).half()
    pairs = torch.cartesian_prod(special, special)
    rows = torch.randint(0, 256, (len(pairs), 3, fmt.row_bytes), dtype=torch.uint8)
    rows[..., : fmt.header_bytes] = pairs.repeat(1, fmt.groups).view(torch.uint8)[:, None]
    assert_same_values(rows, fmt)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codec", ["bf16", "fp16", "fp8", "int8", "int4", "int3", "int2"])
def test_every_16_bit_number_is_quantized_as_in_torch(codec: str, dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    head_dim = {"bf16": 256, "fp16": 112, "int8": 80, "int3": 80, "int2": 128}.get(codec, 64)
    groups = 4 if codec == "fp8" else 1
    fmt = RowFormat(codec, groups, head_dim)
    x = numbers[: len(numbers) // head_dim * head_dim].view(-1, head_dim)
    assert_same_values(assert_same_rows(x, fmt), fmt)
    # each number as the greatest of a row of its own
    spread = torch.linspace(-1, 1, head_dim) * numbers[::8, None].float()
    assert_same_rows(spread.to(dtype), fmt)


@pytest.mark.parametrize(
    "formats", [USUAL[:4], pytest.param(FORMATS, marks=pytest.mark.slow)], ids=["", "all"]
)
@settings(max_examples=150)
@given(st.data(), st.integers(0, 2**32), st.floats(-46, 4.8), st.floats(-9, 4.8), st.booleans())
def test_rows_of_any_magnitude_are_those_of_torch(
    formats: list[RowFormat], data: Any, seed: int, magnitude: float, offset: float, coarse: bool
) -> None:
    fmt, sign = data.draw(st.sampled_from(formats)), data.draw(st.sampled_from((-1.0, 0.0, 1.0)))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(9, fmt.head_dim, generator=generator, dtype=torch.float64)
    x = (x * 4).round() / 8 if coarse else x
    x = x * 10**magnitude + sign * 10**offset
    assert_same_values(assert_same_rows(x.clamp(-65504, 65504).float(), fmt), fmt)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_does_not_change_the_bytes(threads: int) -> None:
    fmt = RowFormat("int4", 4, 128)
    x = torch.randn(3, 700, 128)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same_values(assert_same_rows(x, fmt), fmt)
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def without_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that neither converts fp16 nor adds products by itself; kernels are its own."""
    monkeypatch.setenv("KVQUANT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(simd, "in_hardware", lambda name: False)
    monkeypatch.setattr(compiling, "_surroundings", lambda: "another processor")
    for name in ("make_quantize_kernel", "make_dequantize_kernel"):
        monkeypatch.setattr(rows_kernels, name, getattr(rows_kernels, name).__wrapped__)


@pytest.mark.parametrize("name", mark_slow(["fp16", "int4-g4", "fp8", "int3"], ["fp16", "int4-g4"]))
def test_old_processors_give_the_same_bytes(name: str, without_half: None) -> None:
    """Virtual machines hide F16C and FMA; each fp16 number and those between are rounded alike."""
    fmt = RowFormat.parse(name, 64)
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    halves = bits.view(torch.float16)[bits.view(torch.float16).isfinite()]
    halves = torch.cat([halves, halves[: -len(halves) % 64]]).view(-1, 64)
    floats = halves.float()
    near = torch.cat([floats, floats * 1.0002, floats * (1 + 2**-11), torch.randn_like(floats)])
    near = near.clamp(-65504, 65504)
    mixed = near.flatten()[torch.randperm(near.numel())].view(near.shape)
    for x in (halves, near, mixed):
        expected = quantize_rows(x, fmt, backend="reference")
        assert torch.equal(quantize_rows(x, fmt, backend="cpu"), expected)
        values = dequantize_rows(expected, fmt, backend="cpu")
        assert torch.equal(values, dequantize_rows(expected, fmt, backend="reference"))
    odd = torch.full((2, 64), torch.nan)
    odd[1] = torch.inf
    expected = quantize_rows(odd, fmt, check=False, backend="reference")
    assert torch.equal(quantize_rows(odd, fmt, check=False, backend="cpu"), expected)
    assert dequantize_rows(expected, fmt, backend="cpu").isnan().all()


def test_small_fp16_numbers_stand_when_denormal_floats_are_flushed(without_half: None) -> None:
    halves = torch.arange(2**10, dtype=torch.int16).view(torch.float16).view(-1, 64)
    fmt = RowFormat.parse("fp16", 64)
    torch.set_flush_denormal(True)
    try:
        values = dequantize_rows(quantize_rows(halves, fmt, backend="cpu"), fmt, backend="cpu")
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(values.to(torch.float64) * 2**24, torch.arange(2.0**10).view(-1, 64))
