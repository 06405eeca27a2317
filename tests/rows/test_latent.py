"""Latent rows: names, sizes, and bytes written out by hand."""

from __future__ import annotations

import struct

import pytest
import torch

from kvquant import (
    KVCache,
    LatentFormat,
    PagedKVCache,
    RowFormat,
    decode_attention,
    dequantize_rows,
    quantize_rows,
)
from kvquant.errors import ConfigError, NonFiniteError
from kvquant.rows.quantize import is_nan_row

BACKENDS = ("reference", "cpu")


@pytest.mark.parametrize(
    ("name", "dims", "sizes", "alignment"),
    [
        ("bf16", (512, 64), (1024, 128), 128),
        ("int8-g4", (512, 64), (528, 128), 16),
        ("int4-g8", (512, 64), (288, 128), 32),
        ("int4-g8+fp8-g4", (512, 64), (288, 80), 16),
        ("fp8", (512, 64), (528, 128), 16),
        ("int4-g8", (256, 32), (160, 64), 32),
        ("fp16+int8", (256, 32), (512, 36), 4),
    ],
)
def test_rows_have_the_documented_sizes(
    name: str, dims: tuple[int, int], sizes: tuple[int, int], alignment: int
) -> None:
    fmt = LatentFormat.parse(name, *dims)
    assert tuple(part.row_bytes for part in fmt.parts) == sizes
    assert (fmt.row_bytes, fmt.head_dim, fmt.alignment) == (sum(sizes), sum(dims), alignment)
    assert str(fmt) == name
    assert LatentFormat.parse(str(fmt), *dims) == fmt == eval(repr(fmt))
    assert LatentFormat.parse(fmt, *dims) is fmt


@pytest.mark.parametrize(
    ("name", "dims", "message"),
    [
        ("int6", (512, 64), "format 'int6' does not exist"),
        ("int4-g8+", (512, 64), "format '' does not exist"),
        ("int4+int4+int4", (512, 64), "format 'int4\\+int4' has several parts"),
        (None, (512, 64), "format None is not possible: give a name"),
        ("int4", (128, 64), "latent_dim 128 is not supported: use 512 or 256"),
        ("int4", (512, 128), "rope_dim 128 is not supported: use 64 or 32"),
        ("int4", (512.0, 64), "latent_dim 512.0 is not supported"),
        ("fp8", (256, 64), "fp8 is FlashMLA's layout, of 512 latents and 64 RoPE elements"),
        ("fp8+fp16", (512, 64), "of bf16 RoPE parts, not fp16"),
        ("fp8-g1", (512, 64), "fp8 latents have groups"),
        (LatentFormat.parse("int4"), (256, 64), "has 512 latents and 64 RoPE elements, not 256"),
    ],
)
def test_other_formats_are_refused(name: str, dims: tuple[int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LatentFormat.parse(name, *dims)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bytes_of_flashmla_are_those_derived_by_hand(backend: str) -> None:
    """512 E4M3, 4 float32 powers of two, 64 bf16: FlashMLA's tests/quant.py, V32_FP8Sparse."""
    x = torch.zeros(576)
    # tile 0: 448 / 448 = 1 is a power of two: codes are the E4M3 of the values
    x[:4] = torch.tensor([448.0, -448.0, 17.0, -0.5])  # 17 is a tie between 16 = 58 and 18
    # tile 1: 449 / 448 is over 1: the scale is 2; 449 / 2 = 224.5 -> 224 = 1.75 * 2**7 = 76
    x[128:130] = torch.tensor([449.0, 2.0])
    # tile 2: zeros: the scale is the least power of two over 1e-4, 2**-13
    # tile 3: 2**-5 / 448 = 7e-5 is under 1e-4: 2**-13; 2**-5 * 2**13 = 256 = 78
    x[384] = -(2.0**-5)
    x[512:514] = torch.tensor([1.0, -2.5])
    codes = bytearray(512)
    codes[:4] = bytes.fromhex("7e fe 58 b0")
    codes[128:130] = bytes.fromhex("76 38")
    codes[384:385] = bytes.fromhex("f8")
    scales = struct.pack("<4f", 1.0, 2.0, 2**-13, 2**-13)
    expected = bytes(codes) + scales + bytes.fromhex("803f 20c0") + bytes(124)
    fmt = LatentFormat.parse("fp8")
    row = quantize_rows(x, fmt, backend=backend)
    assert bytes(row.tolist()).hex(" ") == expected.hex(" ")
    values = dequantize_rows(row, fmt, backend=backend)
    decoded = x.clone()
    decoded[2], decoded[128] = 16.0, 448.0
    assert values.tolist() == decoded.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "dims"), [("int4-g8+fp8-g4", (512, 64)), ("fp8", (512, 64)), ("int8-g4", (256, 32))]
)
def test_a_latent_row_is_two_rows_side_by_side(
    name: str, dims: tuple[int, int], backend: str
) -> None:
    fmt = LatentFormat.parse(name, *dims)
    x = torch.randn(2, 3, fmt.head_dim)
    rows = quantize_rows(x, fmt, backend=backend)
    parts = zip(rows.split([p.row_bytes for p in fmt.parts], -1), x.split(dims, -1), strict=True)
    values = []
    for (part_rows, part_x), part in zip(parts, fmt.parts, strict=True):
        assert torch.equal(part_rows, quantize_rows(part_x, part, backend=backend))
        values.append(dequantize_rows(part_rows, part, backend=backend))
    assert torch.equal(dequantize_rows(rows, fmt, backend=backend), torch.cat(values, -1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["bf16", "fp8", "int4-g8+fp8-g4"])
def test_what_a_part_cannot_hold_makes_all_of_it_nan(name: str, backend: str) -> None:
    fmt = LatentFormat.parse(name)
    x = torch.randn(3, 576)
    x[0, 5], x[1, 575] = torch.nan, torch.inf
    rows = quantize_rows(x, fmt, check=False, backend=backend)
    is_nan = dequantize_rows(rows, fmt, backend=backend).isnan()
    assert is_nan[0, :512].all() and is_nan[1, 512:].all()
    assert not (is_nan[0, 512:].any() or is_nan[1, :512].any() or is_nan[2].any())
    split = rows.split([part.row_bytes for part in fmt.parts], -1)
    found = [is_nan_row(part, f).tolist() for part, f in zip(split, fmt.parts, strict=True)]
    assert found == [[True, False, False], [False, True, False]]
    with pytest.raises(NonFiniteError, match=r"x\[0, 5\] is nan"):
        quantize_rows(x, fmt, backend=backend)
    with pytest.raises(NonFiniteError, match=rf"x\[0, 575\] is inf: {fmt.rope} rows"):
        quantize_rows(x[1:], fmt, backend=backend)


def test_rows_of_heads_are_not_as_narrow_as_rope_parts() -> None:
    fmt = RowFormat.parse("int8", 32)
    rows = quantize_rows(torch.randn(1, 1, 5, 32), fmt)
    lens = torch.tensor([5], dtype=torch.int32)
    message = "head_dim 32 is that of a part of latent rows"
    with pytest.raises(ConfigError, match=message):
        q = torch.randn(1, 16, 32)
        decode_attention(q, rows, rows, lens, k_format=fmt, v_format="int8")
    with pytest.raises(ConfigError, match="codec fp8_ds_mla is that of a part of latent rows"):
        KVCache(1, 1, 1, 512, 64, k_format="fp8_ds_mla")
    with pytest.raises(ConfigError, match=message):
        KVCache(1, 1, 1, 32, 64)
    with pytest.raises(ConfigError, match=message):
        PagedKVCache(1, 1, 32, num_pages=2, page_size=16, max_num_seqs=1)
