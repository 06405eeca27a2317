"""quantize_rows and dequantize_rows: layouts, dtypes, backends, and what they refuse; 5 s.

What the rows hold is tested in tests/rows/test_quantize.py.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from kvquant import RowFormat, dequantize_rows, quantize_rows
from kvquant.errors import ConfigError, DeviceError, NonFiniteError, ShapeError
from kvquant.rows.codec import BF16_MAX
from kvquant.rows.format import NAMES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# by the torch backend, to whose bytes kernels/cpu/test_rows.py holds the others
quantize: Any = partial(quantize_rows, backend="reference")
dequantize: Any = partial(dequantize_rows, backend="reference")


@pytest.mark.parametrize("name", NAMES)
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
    if dtype == torch.float32:
        x[0, 0] = -fmt.max_abs  # is held, and what is beyond is not
    rows = quantize(x, fmt)
    cast = x.to(torch.bfloat16 if codec == "bf16" else torch.float16)
    assert torch.equal(rows, cast.view(torch.uint8))
    for out in DTYPES:
        assert torch.equal(dequantize(rows, fmt, out), cast.to(out))


@pytest.mark.parametrize("name", ["int3", "int4-g4", "int8", "fp8-g8", "bf16"])
def test_results_are_rounded_once_to_the_dtype_asked_for(name: str) -> None:
    fmt = RowFormat.parse(name, 80)
    rows = quantize(torch.randn(5, 80), fmt)
    values = dequantize(rows, fmt)
    assert values.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(dequantize(rows, fmt, dtype), values.to(dtype))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["int2", "int3", "int4-g4", "int4-g8", "fp8", "bf16"])
def test_strides_and_odd_addresses_do_not_matter(name: str, backend: str) -> None:
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
        for gap in (0, 1):  # bytes between rows, which begin at an odd address
            shape = *rows.shape[:-1], fmt.row_bytes + gap
            room = torch.full((1 + math.prod(shape),), 255, dtype=torch.uint8)
            odd = room[1:].view(shape)[..., : fmt.row_bytes].copy_(rows)
            assert odd.data_ptr() % 2 == 1
            assert torch.equal(dequantize(odd, fmt, backend=backend), expected), label
        flipped = rows.flip(-1).flip(-1).transpose(0, -1).contiguous().transpose(0, -1)
        assert torch.equal(dequantize(flipped, fmt, backend=backend), expected), label


OVER_BF16 = torch.nextafter(torch.tensor(BF16_MAX), torch.tensor(torch.inf)).item()
# 65536 is the least bfloat16 over fp16's greatest, 65504, which bfloat16 rounds to it
OVER = [
    (name, torch.bfloat16, 65536.0) for name in ("int2", "int3", "int4-g4", "int8", "fp8", "fp16")
] + [
    ("int4-g4", torch.float32, 65504.004),
    ("fp16", torch.float32, -65504.004),
    ("bf16", torch.float32, OVER_BF16),
]
NOT_FINITE = [
    (name, dtype, value)
    for name in ("int2", "int3", "int4-g4", "int8", "fp8", "fp16", "bf16")
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
    with pytest.raises(ConfigError, match=f"rows is {dtype}: use uint8"):
        dequantize(torch.zeros(2, 36).to(dtype), fmt)


def test_backends_are_chosen_by_name_and_device() -> None:
    fmt, meta = RowFormat.parse("int4", 64), torch.zeros(2, 64, device="meta")
    with pytest.raises(ConfigError, match="backend 'torch' does not exist: use cpu, cuda or refe"):
        quantize(torch.zeros(64), fmt, backend="torch")
    with pytest.raises(DeviceError, match="backend 'cpu' takes CPU tensors, not meta"):
        dequantize(meta.to(torch.uint8)[:, :36], fmt, backend="cpu")
    with pytest.raises(DeviceError, match=r"no kernel serves meta: move .* backend='reference'"):
        quantize(meta, fmt, backend=None)
    with pytest.raises(DeviceError, match="'cuda' takes CUDA tensors, not cpu: leave it out"):
        quantize(torch.zeros(64), fmt, backend="cuda")
    assert dequantize(meta.to(torch.uint8)[:, :36], fmt).is_meta
