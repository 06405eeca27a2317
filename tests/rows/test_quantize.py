"""What quantize_rows and dequantize_rows promise, for every format, by properties; 10 s."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvquant import RowFormat, dequantize_rows, quantize_rows
from kvquant.errors import ConfigError, DeviceError, NonFiniteError, ShapeError
from kvquant.rows.format import BF16_MAX, FP16_MAX, GROUPS, HEAD_DIMS

CODECS = ("int4", "int8", "fp8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = [f"{codec}{groups}" for codec in CODECS for groups in ("", "-g2", "-g4", "-g8")]
ALL_NAMES = [*NAMES, "bf16", "fp16"]

formats = st.builds(
    RowFormat, st.sampled_from(CODECS), st.sampled_from(GROUPS), st.sampled_from(HEAD_DIMS)
)
kinds = st.sampled_from(("normal", "offset", "constant", "outlier", "mixed", "zeros", "ties"))


def quantize(
    x: torch.Tensor, fmt: RowFormat, *, check: bool = True, backend: str | None = "reference"
) -> torch.Tensor:
    """Quantize by the torch backend; kernels/cpu/test_rows.py holds the others to its bytes."""
    return quantize_rows(x, fmt, check=check, backend=backend)


def dequantize(
    rows: torch.Tensor,
    fmt: RowFormat,
    dtype: torch.dtype = torch.float32,
    *,
    backend: str | None = "reference",
) -> torch.Tensor:
    return dequantize_rows(rows, fmt, dtype, backend=backend)


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
    header = rows[..., : fmt.header_bytes].contiguous().view(torch.float16).double()
    per_element = header.unflatten(-1, (fmt.groups, 2)).repeat_interleave(fmt.group_size, dim=-2)
    return per_element[..., 0], per_element[..., 1]


def bound(
    x: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, fmt: RowFormat
) -> torch.Tensor:
    """The greatest |x - value| that kvquant/rows/quantize.py's docstring allows."""
    scale, shift = parameters(rows, fmt)
    rounding = (2**-24 * values.double().abs()).clamp(min=2**-140)
    if fmt.codec == "fp8":
        relative = (x.double() - shift).abs() / 16
        return torch.maximum(relative, scale * 2**-10) * (1 + 2**-12) + rounding
    return scale * (0.5 + 2**-12) + rounding


@settings(max_examples=400)
@given(inputs())
@example(
    (torch.full((1, 64), 2**-149).index_fill(1, torch.tensor([3]), 0.0), RowFormat("int8", 1, 64))
)
@example(
    (torch.full((1, 64), 2**-142).index_fill(1, torch.tensor([3]), 0.0), RowFormat("fp8", 1, 64))
)
@example((torch.linspace(-FP16_MAX, FP16_MAX, 80)[None], RowFormat("int4", 8, 80)))
def test_every_element_comes_back_within_the_bound(case: tuple[torch.Tensor, RowFormat]) -> None:
    x, fmt = case
    rows = quantize(x, fmt)
    values = dequantize(rows, fmt)
    error = (x.double() - values.double()).abs()
    excess = error - bound(x, values, rows, fmt)
    assert bool((excess <= 0).all()), f"over the bound by {excess.max():.3g} in {fmt}"


@settings(max_examples=200)
@given(inputs())
def test_parameters_are_rounded_outwards_so_that_no_element_is_clamped(
    case: tuple[torch.Tensor, RowFormat],
) -> None:
    x, fmt = case
    scale, shift = parameters(quantize(x, fmt), fmt)
    assert bool((scale >= 0).all())
    least, greatest = {"int4": (0, 15), "int8": (0, 255), "fp8": (-448, 448)}[fmt.codec]
    slack = 2**-21 * (greatest - least) * scale + 2**-140
    distance = x.double() - shift
    assert bool((distance >= least * scale - slack).all())
    assert bool((distance <= greatest * scale + slack).all())


@settings(max_examples=200)
@given(inputs())
def test_quantizing_values_again_moves_them_no_further_than_the_bound(
    case: tuple[torch.Tensor, RowFormat],
) -> None:
    x, fmt = case
    values = dequantize(quantize(x, fmt), fmt)
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


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("shape", [(0, 96), (3, 0, 96), (0, 2, 0, 96)], ids=str)
def test_no_rows_give_no_rows(name: str, shape: tuple[int, ...]) -> None:
    fmt = RowFormat.parse(name, 96)
    for backend in ("reference", "cpu"):
        rows = quantize(torch.empty(shape), fmt, backend=backend)
        assert rows.shape == (*shape[:-1], fmt.row_bytes)
        assert dequantize(rows, fmt, backend=backend).shape == shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", ["bf16", "fp16"])
def test_16_bit_rows_are_torch_casts(codec: str, dtype: torch.dtype) -> None:
    fmt = RowFormat.parse(codec, 112)
    x = (10 ** (8 * torch.rand(7, 112) - 4) * torch.randn(7, 112)).clamp(-60000, 60000).to(dtype)
    rows = quantize(x, fmt)
    cast = x.to(torch.bfloat16 if codec == "bf16" else torch.float16)
    assert torch.equal(rows, cast.view(torch.uint8))
    for out in DTYPES:
        assert torch.equal(dequantize(rows, fmt, out), cast.to(out))


@pytest.mark.parametrize("name", ["int4-g4", "int8", "fp8-g8", "bf16"])
def test_results_are_rounded_once_to_the_dtype_asked_for(name: str) -> None:
    fmt = RowFormat.parse(name, 80)
    rows = quantize(torch.randn(5, 80), fmt)
    values = dequantize(rows, fmt)
    assert values.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(dequantize(rows, fmt, dtype), values.to(dtype))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["int4-g4", "fp8", "bf16"])
def test_strides_do_not_matter(name: str, backend: str) -> None:
    fmt = RowFormat.parse(name, 64)
    base = torch.randn(6, 5, 64, 3)
    views = {
        "transposed": base[..., 0].transpose(0, 1),
        "every second": base[::2, :, :, 1],
        "expanded": base[0, 0, :, 2].expand(4, 3, 64),
        "strided last axis": torch.randn(5, 128)[:, ::2],
        "last axis first": torch.randn(64, 5).T,
        "one row": base[2, 3, :, 0],
        "odd offset": torch.randn(5 * 64 + 1)[1:].view(5, 64),
        "negative bit": torch.randn(5, 64, dtype=torch.complex64).conj().imag,
    }
    for label, x in views.items():
        rows = quantize(x, fmt, backend=backend)
        assert rows.is_contiguous()
        assert torch.equal(rows, quantize(x.clone().contiguous(), fmt)), label
        expected = dequantize(rows, fmt)
        padded = torch.full((*rows.shape[:-1], fmt.row_bytes + 1), 255, dtype=torch.uint8)
        padded[..., :-1] = rows
        assert torch.equal(dequantize(padded[..., :-1], fmt, backend=backend), expected), label
        flipped = rows.flip(-1).flip(-1).transpose(0, -1).contiguous().transpose(0, -1)
        assert torch.equal(dequantize(flipped, fmt, backend=backend), expected), label


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["int4", "int4-g8", "fp8", "bf16"])
def test_rows_may_start_at_odd_addresses(name: str, count: int, backend: str) -> None:
    fmt = RowFormat.parse(name, 64)
    rows = quantize(torch.randn(count, 64), fmt)
    for gap in (0, 1):  # bytes between the rows
        room = torch.full((1 + count * (fmt.row_bytes + gap),), 255, dtype=torch.uint8)
        odd = room[1:].view(count, -1)[:, : fmt.row_bytes]
        odd.copy_(rows)
        assert odd.data_ptr() % 2 == 1
        values = dequantize(odd, fmt, backend=backend)
        assert torch.equal(values, dequantize(rows, fmt))


FLOAT32_MAX = torch.finfo(torch.float32).max
# 65536 is the least bfloat16 over fp16's greatest, 65504, which bfloat16 rounds to it
OVER = [(name, torch.bfloat16, 65536.0) for name in ("int4-g4", "int8", "fp8", "fp16")] + [
    ("int4-g4", torch.float32, 65504.004),
    ("fp16", torch.float32, -65504.004),
    ("bf16", torch.float32, FLOAT32_MAX),
]
NOT_FINITE = [
    (name, dtype, value)
    for name in ("int4-g4", "int8", "fp8", "fp16", "bf16")
    for dtype in DTYPES
    for value in (math.nan, math.inf, -math.inf)
]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("name", "dtype", "value"), NOT_FINITE + OVER, ids=str)
def test_what_cannot_be_held_is_named_with_its_first_index(
    name: str, dtype: torch.dtype, value: float, backend: str
) -> None:
    fmt = RowFormat.parse(name, 64)
    x = torch.randn(2, 3, 64).to(dtype)
    x[1, 0, 63] = x[1, 2, 0] = value
    with pytest.raises(NonFiniteError) as caught:
        quantize(x, fmt, backend=backend)
    message = str(caught.value)
    assert f"x[1, 0, 63] is {x[1, 0, 63].item()}" in message
    assert f"{fmt} rows hold finite values up to {fmt.max_abs:g}" in message
    assert "check=False" in message


def test_limits_are_exact() -> None:
    over = torch.nextafter(torch.tensor(BF16_MAX), torch.tensor(torch.inf)).item()
    for name, limit, beyond in (("int4", FP16_MAX, 65504.004), ("bf16", BF16_MAX, over)):
        fmt = RowFormat.parse(name, 64)
        quantize(torch.full((64,), -limit), fmt)
        with pytest.raises(NonFiniteError):
            quantize(torch.full((64,), -beyond), fmt)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3.4e38])
def test_unchecked_bad_rows_decode_to_nan_and_leave_others_alone(
    name: str, value: float, backend: str
) -> None:
    fmt = RowFormat.parse(name, 64)
    x = torch.randn(5, 64)
    expected = quantize(x, fmt)
    x[1, 17] = x[3, 0] = value
    rows = quantize(x, fmt, check=False, backend=backend)
    values = dequantize(rows, fmt, backend=backend)
    for row in range(5):
        if row in (1, 3):
            assert bool(values[row].isnan().all())
        else:
            assert torch.equal(rows[row], expected[row])
    assert torch.equal(quantize(x[::2], fmt, check=False), expected[::2])


def test_channel_order_within_a_group_does_not_change_the_values() -> None:
    order = torch.randperm(64)
    x = torch.randn(9, 64)
    for codec in CODECS:
        fmt = RowFormat(codec, 1, 64)
        values = dequantize(quantize(x, fmt), fmt)
        assert torch.equal(dequantize(quantize(x[:, order], fmt), fmt), values[:, order])


@pytest.mark.parametrize("codec", CODECS)
def test_groups_are_quantized_independently(codec: str) -> None:
    x = torch.randn(4, 128) * torch.tensor([0.01, 1.0]).repeat_interleave(64)
    both = dequantize(quantize(x, RowFormat(codec, 2, 128)), RowFormat(codec, 2, 128))
    one = RowFormat(codec, 1, 64)
    halves = [dequantize(quantize(half, one), one) for half in torch.split(x, 64, dim=-1)]
    assert torch.equal(both, torch.cat(halves, dim=-1))


def test_more_bits_and_more_groups_bring_values_nearer() -> None:
    x = torch.randn(64, 128) * 10 ** torch.linspace(-1, 1, 128)
    errors = {}
    for name in NAMES:
        fmt = RowFormat.parse(name, 128)
        errors[name] = (dequantize(quantize(x, fmt), fmt) - x).norm().item()
    for codec in ("int4", "int8"):
        in_order = [errors[codec + groups] for groups in ("", "-g2", "-g4", "-g8")]
        assert in_order == sorted(in_order, reverse=True)
    assert errors["int8"] < errors["int4"] / 12


def test_input_that_requires_grad_is_taken() -> None:
    fmt = RowFormat.parse("int4", 64)
    x = torch.randn(2, 64)
    for backend in ("reference", "cpu"):
        rows = quantize(x.clone().requires_grad_(), fmt, backend=backend)
        assert torch.equal(rows, quantize(x, fmt))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_does_not_matter(dtype: torch.dtype, backend: str) -> None:
    x = torch.randn(300, 64)
    for name in ("int4-g4", "fp8", "bf16"):
        fmt = RowFormat.parse(name, 64)
        rows = quantize(x, fmt)
        values = dequantize(rows, fmt)
        torch.set_default_dtype(dtype)
        try:
            assert torch.equal(quantize(x, fmt, backend=backend), rows)
            assert torch.equal(dequantize(rows, fmt, backend=backend), values)
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_wrong_last_axis_is_refused() -> None:
    fmt = RowFormat.parse("int4", 128)
    with pytest.raises(ShapeError, match=r"x is \[2, 64\]: its last axis must be head_dim 128"):
        quantize(torch.randn(2, 64), fmt)
    with pytest.raises(ShapeError, match=r"x is \[\]"):
        quantize(torch.tensor(1.0), fmt)
    with pytest.raises(ShapeError, match=r"rows is \[2, 80\]: .* 68 bytes of a row of int4"):
        dequantize(torch.zeros(2, 80, dtype=torch.uint8), fmt)
    with pytest.raises(ShapeError, match=r"rows is \[\]"):
        dequantize(torch.zeros((), dtype=torch.uint8), fmt)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    fmt = RowFormat.parse("int4", 64)
    with pytest.raises(ConfigError, match=f"x is {dtype}: use float32, bfloat16 or float16"):
        quantize(torch.zeros(2, 64).to(dtype), fmt)
    with pytest.raises(ConfigError, match=f"dtype {dtype} is not supported"):
        dequantize(torch.zeros(2, 36, dtype=torch.uint8), fmt, dtype)
    with pytest.raises(ConfigError, match=f"rows is {dtype}: rows are uint8"):
        dequantize(torch.zeros(2, 36).to(dtype), fmt)


def test_backends_are_chosen_by_name_and_device() -> None:
    fmt = RowFormat.parse("int4", 64)
    with pytest.raises(ConfigError, match="backend 'torch' does not exist: use cpu, cuda or refe"):
        quantize(torch.zeros(64), fmt, backend="torch")
    with pytest.raises(DeviceError, match="backend 'cuda' takes CUDA tensors, not cpu"):
        quantize(torch.zeros(64), fmt, backend="cuda")
    meta = torch.zeros(2, 64, device="meta")
    with pytest.raises(DeviceError, match="backend 'cpu' takes CPU tensors, not meta"):
        quantize(meta, fmt, backend="cpu")
    with pytest.raises(DeviceError, match="backend 'cpu' takes CPU tensors, not meta"):
        dequantize(meta.to(torch.uint8)[:, :36], fmt, backend="cpu")
    with pytest.raises(DeviceError, match="no kernel serves meta"):
        quantize(meta, fmt, backend=None)
