"""The contract of the formats, by properties of the reference; 4 s."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvquant import RowFormat
from kvquant.rows import quantize as reference
from kvquant.rows.codec import EXACT_CODECS, FP8_DS_MLA, FP16_MAX
from kvquant.rows.format import HEAD_DIMS, ROW_DIMS
from kvquant.rows.format import NAMES as ALL_NAMES
from kvquant.rows.quantize import dequantize

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = [name for name in ALL_NAMES if name not in EXACT_CODECS]

formats = st.one_of(
    st.builds(RowFormat.parse, st.sampled_from(NAMES), st.sampled_from(ROW_DIMS)),
    st.just(RowFormat(FP8_DS_MLA, 4, 512)),
)
kinds = st.sampled_from(("normal", "offset", "constant", "outlier", "mixed", "zeros", "ties"))


def quantize(x: torch.Tensor, fmt: RowFormat) -> torch.Tensor:
    """Rows of values that the format can hold; kernels/cpu/test_rows.py holds kernels to them."""
    rows, holdable = reference.quantize(x, fmt)
    assert bool(holdable)
    return rows


@st.composite
def inputs(draw: st.DrawFn) -> tuple[torch.Tensor, RowFormat]:
    """A few rows of one kind, at any magnitude and offset that the formats hold."""
    fmt = draw(formats)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = (draw(st.integers(1, 5)), fmt.head_dim)
    magnitude = 10 ** draw(st.floats(-45, 4.8))
    offset = draw(st.sampled_from((0.0, 1.0, -1.0))) * 10 ** draw(st.floats(-8, 4.8))
    kind = draw(kinds)
    x = magnitude * torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "offset":
        x += offset
    elif kind == "constant":
        x = torch.full(shape, offset, dtype=torch.float64)
    elif kind == "outlier":
        x[:, draw(st.integers(0, fmt.head_dim - 1))] = offset
    elif kind == "mixed":
        x *= 10 ** (8 * torch.rand(shape, generator=generator, dtype=torch.float64) - 4)
    elif kind == "zeros":
        x = torch.where(torch.rand(shape, generator=generator) < 0.5, 0.0, -0.0).double()
    elif kind == "ties":
        x = offset + magnitude * x.sign() * torch.randint(0, 16, shape, generator=generator) / 2
    dtype = draw(st.sampled_from(DTYPES))
    limit = 65280.0 if dtype == torch.bfloat16 else FP16_MAX
    return x.clamp(-limit, limit).to(dtype), fmt


def parameters(rows: torch.Tensor, fmt: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored scale and shift of every element, float64."""
    if fmt.codec == FP8_DS_MLA:
        scale = rows[..., 512:].contiguous().view(torch.float32).double()
        return scale.repeat_interleave(128, dim=-1), torch.zeros(512, dtype=torch.float64)
    header = rows[..., : fmt.header_bytes].contiguous().view(torch.float16).double()
    per_element = header.unflatten(-1, (fmt.groups, 2)).repeat_interleave(fmt.group_size, dim=-2)
    return per_element[..., 0], per_element[..., 1]


def bound(
    x: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, fmt: RowFormat
) -> torch.Tensor:
    """The greatest |x - value| that kvquant/rows/quantize.py's docstring allows."""
    scale, shift = parameters(rows, fmt)
    rounding = (2**-24 * values.double().abs()).clamp(min=2**-140)
    if fmt.codec in ("fp8", FP8_DS_MLA):
        relative = (x.double() - shift).abs() / 16
        return torch.maximum(relative, scale * 2**-10) * (1 + 2**-12) + rounding
    return scale * (0.5 + 2**-12) + rounding


@settings(max_examples=200)
@given(inputs())
@example(
    (torch.full((1, 64), 2**-149).index_fill(1, torch.tensor([3]), 0.0), RowFormat("int8", 1, 64))
)
@example(
    (torch.full((1, 64), 2**-142).index_fill(1, torch.tensor([3]), 0.0), RowFormat("fp8", 1, 64))
)
@example((torch.linspace(-FP16_MAX, FP16_MAX, 80)[None], RowFormat("int4", 8, 80)))
def test_elements_come_back_within_the_bound_none_is_clamped_and_again_the_same(
    case: tuple[torch.Tensor, RowFormat],
) -> None:
    x, fmt = case
    rows = quantize(x, fmt)
    values = dequantize(rows, fmt)
    error = (x.double() - values.double()).abs()
    excess = error - bound(x, values, rows, fmt)
    assert bool((excess <= 0).all()), f"over the bound by {excess.max():.3g} in {fmt}"
    # parameters are rounded outwards, so that no element is clamped
    scale, shift = parameters(rows, fmt)
    assert bool((scale >= 0).all())
    least, greatest = (0, 2**fmt.bits - 1) if "int" in fmt.codec else (-448, 448)
    slack = 2**-21 * (greatest - least) * scale + 2**-140
    distance = x.double() - shift
    assert bool((distance >= least * scale - slack).all())
    assert bool((distance <= greatest * scale + slack).all())
    # quantized again, values move no further than the bound
    values = values.clamp(-FP16_MAX, FP16_MAX)  # the last code may lie a step over
    rows = quantize(values, fmt)
    again = dequantize(rows, fmt)
    error = (again.double() - values.double()).abs()
    assert bool((error <= bound(values, again, rows, fmt)).all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, -1.0, 0.375, FP16_MAX, -FP16_MAX, 2**-24, -(2**-14)]
)
def test_a_constant_that_fp16_holds_comes_back_exactly(name: str, value: float) -> None:
    fmt = RowFormat.parse(name, 128)
    values = dequantize(quantize(torch.full((2, 128), value), fmt), fmt)
    assert values.tolist() == [[value] * 128] * 2


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_signed_zeros_are_written_as_plain_zeros(name: str, head_dim: int) -> None:
    fmt = RowFormat.parse(name, head_dim)
    signs = torch.rand(64, head_dim) < torch.linspace(0, 1, 64)[:, None]
    rows = quantize(torch.where(signs, -0.0, 0.0), fmt)
    assert not rows[:, : fmt.header_bytes].any(), "a -0.0 scale or shift"
    values = dequantize(rows, fmt)
    assert not values.any()
    assert not values.signbit().any()


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("limit", [FP16_MAX, -FP16_MAX])
def test_the_greatest_fp16_is_held(name: str, limit: float) -> None:
    fmt = RowFormat.parse(name, 64)
    x = torch.zeros(64)
    x[5] = limit
    value = dequantize(quantize(x, fmt), fmt)
    assert bool(value.isfinite().all())
    assert value[5].item() == pytest.approx(limit, rel=2**-8)
